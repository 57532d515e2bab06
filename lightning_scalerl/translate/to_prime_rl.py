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
    on_policy,
    refuse_adapter,
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
        "loss",
        choices.loss,
        "prime-rl's losses mask tokens by differences of probabilities; use a custom loss (trainer.loss.type)",
    )
    tokens = isinstance(choices.aggregation, TokenAggregation)
    into.express_if(
        tokens,
        "aggregation",
        choices.aggregation,
        "prime-rl weights all tokens of a batch equally; aggregation=token can be translated",
    )
    into.express_if(
        kl_coefficient(run) == 0,
        "kl",
        choices.kl,
        "kl_tau weights the squared log-ratio to the engine, not a KL term to a reference model",
    )
    into.express_if(not choices.entropy.acts, "entropy", choices.entropy, "prime-rl has no entropy bonus")
    is_group_advantage = isinstance(choices.advantage, GroupAdvantage)
    if is_group_advantage:
        into.under("orchestrator.algo", "advantage", type="grpo")
    if not isinstance(choices.normalization, NoNormalization):
        into.add_missing(
            "normalization",
            choices.normalization,
            "prime-rl does not divide advantages; normalization=none can be translated",
        )
    else:
        into.express("normalization", *(["orchestrator.algo.type"] if is_group_advantage else []))
    if isinstance(choices.filter, ZeroVariance | NoFilter):
        into.under("orchestrator.train", "filter", filter_zero_advantages=isinstance(choices.filter, ZeroVariance))
        if isinstance(choices.filter, ZeroVariance):
            into.note("filter: prime-rl drops each rollout with an advantage of 0, not whole groups")
    else:
        into.add_missing(
            "filter", choices.filter, "prime-rl replaces groups by rules that were not compared with this project's"
        )
    into.express_if(
        not isinstance(choices.truncated, MaskTruncated),
        "truncated",
        choices.truncated,
        "prime-rl trains on truncated completions; truncated=keep can be translated",
    )
    if isinstance(choices.length_control, Penalty):
        into.add_missing(
            "length_control",
            choices.length_control,
            "prime-rl's length_penalty is linear in all tokens, without a buffer",
        )
    uses_engine = isinstance(choices.correction, Behaviour)
    into.express_if(
        uses_engine,
        "correction",
        choices.correction,
        "prime-rl's ratio is relative to the engine's log-probabilities; correction=behaviour can be translated",
    )
    epochs = choices.epochs.count
    into.express_if(epochs == 1, "epochs", epochs, "prime-rl makes one pass over each batch")
    if run.k > 1:
        into.add_missing(
            "async_mode",
            choices.async_mode,
            "prime-rl trains while it samples, and has no setting for phases of several steps",
        )
    elif on_policy(run):
        into.under("orchestrator", "async_mode", max_off_policy_steps=0)
    _settings(run, into)
    if recipe.context.too_long == "refuse":
        into.note("context: prime-rl does not refuse long prompts; it cuts off tokens beyond seq_len")
    refuse_adapter(run, into, "trainer.model.lora")
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
    into.add_missing("seed", run.seed, "prime-rl has no seed for sampling")
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
            "optimizer.clip_norm",
            None,
            "without clipping, trainer.optim.max_norm must be None, which TOML cannot express",
        )
    else:
        into.under("trainer.optim", max_norm=optimizer.clip_norm)
    if optimizer.eps != ADAM_EPS:
        into.add_missing(
            "optimizer.eps",
            optimizer.eps,
            f"prime-rl always uses torch's default; optimizer.eps={ADAM_EPS:g} can be translated",
        )
    if optimizer.dropout:
        into.add_missing("optimizer.dropout", True, "prime-rl turns the model's dropout off")
    has_warmup, has_decay = translate_schedule(run, into, by_step=run.choices.epochs.count == 1)
    warmup = recipe.schedule.warmup_steps
    if has_decay:
        into.add_missing(
            "schedule",
            "cosine",
            "the shape of prime-rl's cosine (trainer.scheduler.type) was not compared with this project's",
        )
    elif has_warmup:
        # prime-rl's LinearLR starts at min_lr / lr (a min_lr of 0 means 1e-8) and reaches the full rate after
        # warmup_steps. With the min_lr below, step s = 0, 1, ... has (s + 1) / (warmup_steps + 1) of the full rate, as
        # in this project. Without a decay, min_lr has no other use.
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
            "precision",
            precision,
            "prime-rl's trainer computes in BF16, and has no setting for the type of its head",
        )
