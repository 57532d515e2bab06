"""Translation of a recipe for prime-rl: a TOML file for `uv run rl @ FILE`.

prime-rl has none of our losses. Its losses `default` and `ipo` mask tokens by the difference of probabilities and add a
squared log-ratio, over all tokens of a batch. Everything but the loss is translated, for use with a custom loss
(trainer.loss.type = "custom"). In prime-rl the ratio is relative to the engine's log-probabilities, and the advantage
is the reward minus the group's mean, as in ScaleRL.

Source: PrimeIntellect-ai/prime-rl 559b4477, packages/prime-rl-configs/src/prime_rl/configs, src/prime_rl/trainer.
"""

from __future__ import annotations

from lightning_scalerl.axes.advantage import GroupAdvantage
from lightning_scalerl.axes.aggregation import TokenAggregation
from lightning_scalerl.axes.correction import Behaviour
from lightning_scalerl.axes.filter import NoFilter, ZeroVariance
from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.axes.normalization import NoNormalization
from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.translate.record import (
    Run,
    Translation,
    common,
    kl_coefficient,
    no_adapter,
    on_policy,
    translate_schedule,
)

VERSION = "559b4477"
ADAM_EPS = 1e-8  # torch's default, which prime-rl always uses


def to_prime_rl(run: Run) -> Translation:
    """Translate a recipe, except its loss, into a TOML file of prime-rl."""
    into = Translation("prime-rl", VERSION, "toml")
    common(run, into)
    choices, recipe = run.choices, run.recipe
    into.add_missing(
        "loss", choices.loss, "its losses mask by differences of probabilities; trainer.loss.type is your own"
    )
    tokens = isinstance(choices.aggregation, TokenAggregation)
    into.express_if(
        tokens, "aggregation", choices.aggregation, "all tokens of a batch count the same there; aggregation=token"
    )
    into.express_if(
        kl_coefficient(run) == 0,
        "kl",
        choices.kl,
        "kl_tau is the squared log-ratio to the engine, not a distance from a reference",
    )
    into.express_if(not choices.entropy.acts, "entropy", choices.entropy, "there is no bonus")
    is_group_advantage = isinstance(choices.advantage, GroupAdvantage)
    if is_group_advantage:
        into.under("orchestrator.algo", "advantage", type="grpo")
    if not isinstance(choices.normalization, NoNormalization):
        into.add_missing("normalization", choices.normalization, "advantages are not divided there; normalization=none")
    else:
        into.express("normalization", *(["orchestrator.algo.type"] if is_group_advantage else []))
    if isinstance(choices.filter, ZeroVariance | NoFilter):
        into.under("orchestrator.train", "filter", filter_zero_advantages=isinstance(choices.filter, ZeroVariance))
        if isinstance(choices.filter, ZeroVariance):
            into.note("filter: what is left out there is a rollout with an advantage of 0, whatever its group")
    else:
        into.add_missing("filter", choices.filter, "its gates sample others by rules that are not compared with ours")
    masks, trained_on = isinstance(choices.truncated, MaskTruncated), "truncated completions are trained on there"
    into.express_if(not masks, "truncated", choices.truncated, f"{trained_on}; truncated=keep")
    if isinstance(choices.length_control, Penalty):
        into.add_missing(
            "length_control", choices.length_control, "length_penalty there is linear in all tokens, no buffer"
        )
    uses_engine = isinstance(choices.correction, Behaviour)
    into.express_if(
        uses_engine, "correction", choices.correction, "the ratio is to the engine there; correction=behaviour"
    )
    epochs = choices.epochs.count
    into.express_if(epochs == 1, "epochs", epochs, "a batch is gone over once there")
    if run.k > 1:
        into.add_missing(
            "async_mode", choices.async_mode, "it trains while it samples; phases of several steps are no setting"
        )
    elif on_policy(run):
        into.under("orchestrator", "async_mode", max_off_policy_steps=0)
    _settings(run, into)
    if recipe.context.too_long == "refuse":
        into.note("context: nothing there refuses long prompts; what exceeds seq_len is cut off")
    no_adapter(run, into, "trainer.model.lora")
    return into


def _settings(run: Run, into: Translation) -> None:
    recipe, optimizer, limits = run.recipe, run.recipe.optimizer, run.recipe.context
    into.set(max_steps=run.steps, seq_len=limits.max_prompt_tokens + limits.max_new_tokens)
    into.under("orchestrator", batch_size=run.rollouts, group_size=recipe.batch.completions)
    into.under(
        "orchestrator.train.sampling", temperature=limits.temperature, max_completion_tokens=limits.max_new_tokens
    )
    interval = int(recipe.evaluation.get("every_n_steps", 0))
    if interval:
        into.under("orchestrator.eval", interval=interval, group_size=int(recipe.evaluation.get("samples", 1)))
    into.add_missing("seed", run.seed, "there is none of sampling")
    into.set_optimizer("fp32", "fp32", ADAM_EPS)  # `trainer.model.optimization_dtype` is float32 by default
    into.under(
        "trainer.optim",
        type="adamw",
        lr=run.lr,
        betas1=optimizer.beta1,
        betas2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
    )
    if optimizer.clip_norm is None:
        into.add_missing(
            "optimizer.clip_norm", None, "trainer.optim.max_norm is left out by None, which TOML cannot say"
        )
    else:
        into.under("trainer.optim", max_norm=optimizer.clip_norm)
    if optimizer.eps != ADAM_EPS:
        into.add_missing(
            "optimizer.eps", optimizer.eps, f"it is torch's there; optimizer.eps={ADAM_EPS:g} is translated"
        )
    if optimizer.dropout:
        into.add_missing("optimizer.dropout", True, "the model's dropout is off there")
    has_warmup, has_decay = translate_schedule(run, into, by_step=run.choices.epochs.count == 1)
    warmup = recipe.schedule.warmup_steps
    if has_decay:
        into.add_missing("schedule", "cosine", "its shape is not compared with ours (trainer.scheduler.type)")
    elif has_warmup:
        # The rate rises from min_lr at the first step: at step s it is (s + 1) / (warmup_steps + 1) of the full rate,
        # as ours is.
        into.under(
            "trainer.scheduler",
            type="linear",
            warmup_steps=warmup,
            decay_steps=0,
            min_lr=run.lr / (warmup + 1),
        )
    elif run.cosine is None:
        into.under("trainer.scheduler", type="constant")
    precision = run.choices.precision
    into.under("inference.vllm", "precision", dtype=run.dtype)
    into.under(
        "inference", "precision", enable_fp32_lm_head=precision.policy == "bf16" and precision.fp32_head_generator
    )
    if precision.policy != "bf16" or precision.fp32_head_trainer:
        into.add_missing(
            "precision", precision, "the trainer computes in BF16; in which type its head does is no setting"
        )
