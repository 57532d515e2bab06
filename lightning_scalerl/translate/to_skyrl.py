"""Translation of a recipe for SkyRL: overrides of `skyrl.train.config` (`python -m skyrl.train.entrypoints.main_base`).

Properties of the code at this commit:

- both bounds of `cispo` are offsets from 1;
- masked rollouts still count in averages over sequences and prompts, but not in averages over tokens;
- the variance of a group is computed over its unmasked rollouts;
- KL is averaged over sequences under every reduction;
- `advantage_batch_normalize` counts an advantage once per token;
- `advantage_estimator=maxrl` divides by the mean reward itself, so incorrect completions must have a reward of 0;
- `advantage_estimator=gae` whitens advantages regardless of `advantage_batch_normalize`;
- the trainer's log-probabilities before the update are computed once for the whole batch, after it was sampled;
- workers compute under BF16 autocast, regardless of `bf16`;
- training ends after `epochs` (1 by default), regardless of `max_training_steps`.

Source: NovaSky-AI/SkyRL a9564572, skyrl/train/config/config.py, skyrl/train/trainer.py,
skyrl/backends/skyrl_train/utils/ppo_utils.py, workers/worker.py.
"""

from __future__ import annotations

from lightning_scalerl.axes.aggregation import (
    ConstantAggregation,
    PromptAggregation,
    SampleAggregation,
    TokenAggregation,
)
from lightning_scalerl.axes.correction import Proximal
from lightning_scalerl.axes.filter import DynamicSampling, NoFilter, ZeroVariance
from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.axes.loss import CISPO, DPPO, GSPO, SAPO, ClipCov, KLCov, Reinforce
from lightning_scalerl.axes.normalization import (
    BatchRewardNormalization,
    MaxRLNormalization,
    Normalization,
    RunningNormalization,
)
from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.translate.record import (
    NO_BOUND,
    Run,
    Translation,
    common,
    divides_by_deviation,
    estimator,
    evaluation_interval,
    kl_term,
    on_policy,
    refuse_adapter,
    translate_schedule,
)

VERSION = "a9564572"
EPS = 1e-6  # SkyRL's fixed addition to a standard deviation
ADAM_EPS = 1e-8  # torch's default, which SkyRL always uses
ALGORITHM = "trainer.algorithm"
_BY_AGGREGATION = {
    PromptAggregation: "prompt_mean",
    SampleAggregation: "sequence_mean",
    TokenAggregation: "token_mean",
    ConstantAggregation: "seq_mean_token_sum_norm",
}


def to_skyrl(run: Run) -> Translation:
    """Translate a recipe into overrides of SkyRL's configuration, for one training and one generation device."""
    into = Translation("skyrl", VERSION, "overrides")
    common(run, into)
    _loss(run, into)
    _credit(run, into)
    _data(run, into)
    _optimizer(run, into)
    _ratio(run, into)
    return into


def _loss(run: Run, into: Translation) -> None:
    loss, aggregation = run.choices.loss, run.choices.aggregation
    by_name = _BY_AGGREGATION.get(type(aggregation))
    if by_name is None:
        into.add_missing("aggregation", aggregation, f"loss_reduction has only {', '.join(_BY_AGGREGATION.values())}")
    else:
        into.under(ALGORITHM, "aggregation", loss_reduction=by_name)
    if isinstance(aggregation, ConstantAggregation):
        into.under(ALGORITHM, "aggregation", max_seq_len=run.recipe.context.max_new_tokens)
    if isinstance(loss, CISPO):
        into.under(
            ALGORITHM,
            "loss",
            policy_loss_type="cispo",
            cispo__cispo_eps_clip_low=1.0,
            cispo__cispo_eps_clip_high=loss.max_ratio - 1,
        )
    elif isinstance(loss, SAPO):
        into.under(ALGORITHM, "loss", policy_loss_type="sapo", sapo__tau_pos=loss.tau_pos, sapo__tau_neg=loss.tau_neg)
    elif isinstance(loss, DPPO):
        into.add_missing("loss", loss, "SkyRL's dppo has no cap on the ratio")
    elif isinstance(loss, ClipCov | KLCov):
        into.add_missing("loss", loss, "SkyRL selects tokens in every micro-batch and pass, by the current policy")
    elif isinstance(loss, Reinforce):
        into.add_missing("loss", loss, "SkyRL's importance_sampling weights tokens by a ratio")
    elif (clips := run.clips) is None:
        into.add_missing("loss", loss, "no policy_loss_type is known to be the same")
    else:
        name = "gspo" if isinstance(loss, GSPO) else "regular"
        into.under(ALGORITHM, "loss", policy_loss_type=name, eps_clip_low=clips[0], eps_clip_high=clips[1])
    why = "SkyRL averages the KL term over samples under every reduction"
    beta = kl_term(run, into, SampleAggregation, why)
    if beta is not None:
        into.under(ALGORITHM, "kl", use_kl_loss=bool(beta), kl_loss_coef=beta)
        into.under(ALGORITHM, "kl", kl_estimator_type="k3", use_kl_in_reward=False)
        if beta:
            into.note("kl: SkyRL caps k3 at 10, with no gradient beyond the cap")
    if run.choices.entropy.acts:
        into.add_missing("entropy", run.choices.entropy, "SkyRL averages the bonus within each micro-batch")
    else:
        into.under(ALGORITHM, "entropy", use_entropy_loss=False)


def _credit(run: Run, into: Translation) -> None:
    choices = run.choices
    scale, name = choices.normalization, estimator(run)
    is_maxrl = isinstance(scale, MaxRLNormalization) and (scale.incorrect, scale.eps, name) == (0, EPS, "grpo")
    if is_maxrl:
        into.under(ALGORITHM, "advantage", "normalization", advantage_estimator="maxrl")
    elif name is not None:
        into.under(ALGORITHM, "advantage", advantage_estimator=name)
    into.under(ALGORITHM, "normalization", advantage_batch_normalize=False)
    if not is_maxrl:
        divides = divides_by_deviation(run, into, EPS, _no_normalization(scale))
        if divides is not None:
            into.under(ALGORITHM, "normalization", grpo_norm_by_std=divides)
    # Masked rollouts do not count in a token average, and a constant denominator is not affected. In averages over
    # samples and prompts they still count.
    by_token = isinstance(choices.aggregation, TokenAggregation | ConstantAggregation)
    why_counted = "masked rollouts still count in SkyRL's averages over samples and prompts"
    if isinstance(choices.filter, DynamicSampling):
        into.under(
            ALGORITHM,
            "filter",
            zero_variance_filter=False,
            dynamic_sampling__type="filter",
            dynamic_sampling__max_sample_batches=-1,
        )
        into.note("filter: SkyRL samples without a limit until the batch is full")
    elif isinstance(choices.filter, NoFilter):
        into.under(ALGORITHM, "filter", zero_variance_filter=False)
    elif isinstance(choices.filter, ZeroVariance) and by_token and isinstance(choices.truncated, MaskTruncated):
        into.add_missing(
            "filter",
            choices.filter,
            "SkyRL compares only the unmasked rollouts of a group; truncated=keep can be translated",
        )
    elif isinstance(choices.filter, ZeroVariance) and by_token:
        into.under(ALGORITHM, "filter", zero_variance_filter=True, zero_variance_filter_tol=0.0)
    else:
        into.add_missing("filter", choices.filter, f"{why_counted}; aggregation=token can be translated")
    masks = isinstance(choices.truncated, MaskTruncated)
    if masks and not by_token:
        into.add_missing(
            "truncated",
            choices.truncated,
            f"{why_counted}; aggregation=token or truncated=keep can be translated",
        )
    else:
        into.under("generator", "truncated", apply_overlong_filtering=masks, zero_reward_on_non_stop=False)
    if isinstance(choices.length_control, Penalty):
        into.add_missing("length_control", choices.length_control, "SkyRL computes a length penalty in the environment")


def _no_normalization(scale: Normalization) -> str:
    """Return the reason why no setting of SkyRL has the same meaning as this normalization."""
    if isinstance(scale, MaxRLNormalization):
        return (
            f"advantage_estimator=maxrl divides by the mean reward above 0 plus {EPS:g}; reward=zero_one with "
            f"normalization.eps={EPS:g} can be translated"
        )
    if isinstance(scale, BatchRewardNormalization):
        why = "SkyRL divides by the standard deviation of a group's rewards, not of a batch's"
    elif isinstance(scale, RunningNormalization):
        why = "no setting divides by a standard deviation over earlier batches"
    else:
        why = "advantage_batch_normalize counts an advantage once per token of its rollout"
    return f"{why}; normalization=prompt or normalization=none can be translated"


def _data(run: Run, into: Translation) -> None:
    recipe, epochs, k = run.recipe, run.choices.epochs.count, run.k
    if epochs > 1 and not on_policy(run):
        into.add_missing("epochs", epochs, "SkyRL repeats whole generation batches, not single steps")
    if run.steps % k:
        into.add_missing("budget.steps", run.steps, f"SkyRL trains in batches of {k} steps; give a multiple")
    limits = recipe.context
    into.under("trainer", "async_mode", train_batch_size=recipe.batch.prompts * k)
    into.under("trainer", "async_mode", policy_mini_batch_size=recipe.batch.prompts)
    into.under("trainer", "epochs", update_epochs_per_batch=epochs)
    into.under(
        "trainer",
        micro_train_batch_size_per_gpu=run.micro_batch,
        max_training_steps=run.steps // k,
        epochs=run.steps // k,  # passes over the data: enough for all steps even if the data is a single batch
        max_prompt_length=limits.max_prompt_tokens,
        fully_async__enabled=False,
        seed=run.seed,
    )
    if limits.too_long == "refuse":
        into.note("context: SkyRL drops longer prompts instead of refusing them")
    into.under(
        "generator",
        n_samples_per_prompt=recipe.batch.completions,
        sampling_params__temperature=limits.temperature,
        sampling_params__max_generate_length=limits.max_new_tokens,
        sampling_params__top_p=1.0,
        sampling_params__top_k=-1,
        sampling_params__min_p=0.0,
    )
    if interval := evaluation_interval(run, into):
        into.under("trainer", eval_interval=interval, eval_before_train=True)
        into.under(
            "generator",
            eval_n_samples_per_prompt=run.evaluation[1],
            eval_sampling_params__temperature=limits.temperature,
            eval_sampling_params__max_generate_length=limits.max_new_tokens,
        )


def _optimizer(run: Run, into: Translation) -> None:
    optimizer = run.recipe.optimizer
    into.set_optimizer("fp32", "fp32", ADAM_EPS)  # workers/fsdp/fsdp_worker.py loads a policy in FP32 for training
    into.under(
        "trainer.policy.optimizer_config",
        lr=run.lr,
        adam_betas=[optimizer.beta1, optimizer.beta2],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm or NO_BOUND,
    )
    if optimizer.eps != ADAM_EPS:
        into.add_missing(
            "optimizer.eps",
            optimizer.eps,
            f"SkyRL always uses torch's default; optimizer.eps={ADAM_EPS:g} can be translated",
        )
    if optimizer.dropout:
        into.add_missing("optimizer.dropout", True, "SkyRL's dropout was not compared with this project's")
    has_warmup, has_decay = translate_schedule(run, into, by_step=run.choices.epochs.count == 1)
    if has_warmup:
        into.add_missing(
            "schedule.warmup_steps", run.recipe.schedule.warmup_steps, "SkyRL's warm-up begins at a learning rate of 0"
        )
    elif has_decay:
        into.add_missing("schedule", "cosine", "SkyRL counts the end of its cosine in passes over the data")
    elif run.cosine is None:
        into.under("trainer.policy.optimizer_config", scheduler="constant_with_warmup", num_warmup_steps=0)
    refuse_adapter(run, into, "policy.model.lora")


def _ratio(run: Run, into: Translation) -> None:
    """Add the precision, and the denominator of the importance ratio: the engine's probabilities or the trainer's."""
    correction, precision, loss = run.choices.correction, run.choices.precision, run.choices.loss
    if precision.policy == "fp32":
        into.add_missing(
            "precision", precision, "SkyRL's workers compute under BF16 autocast; precision=bf16 is nearest"
        )
    into.set("precision", trainer__bf16=precision.policy == "bf16")
    into.under("generator.inference_engine", "precision", model_dtype=run.dtype)
    if run.head is None or run.head:
        into.add_missing("precision.fp32_head", "true", "SkyRL has no setting for an FP32 head on a 16-bit policy")
    under = f"{ALGORITHM}.off_policy_correction"
    if not isinstance(correction, Proximal):
        if isinstance(loss, CISPO):
            into.under(ALGORITHM, "correction", cispo__cispo_anchor="rollout")
            into.under(under, "correction", tis_ratio_type=None)
        else:
            into.add_missing(
                "correction",
                correction,
                "SkyRL uses the engine's log-probabilities as anchor only for cispo; correction=proximal with "
                "async_mode=on_policy can be translated",
            )
        return
    if isinstance(loss, CISPO):
        into.under(ALGORITHM, "correction", cispo__cispo_anchor="old")
    if not on_policy(run):
        into.add_missing(
            "correction", correction, "SkyRL's anchor is computed when tokens are sampled, not before each step"
        )
    elif correction.mode == "none":
        into.under(under, "correction", tis_ratio_type=None)
    elif correction.mode == "truncate" and correction.min_weight == 0:
        into.under(under, "correction", tis_ratio_type=correction.level)
        into.under(under, "correction", **{f"{correction.level}_tis_ratio_clip_high": correction.max_weight})
    else:
        into.add_missing(
            "correction",
            correction,
            "SkyRL's weights have only an upper bound; its masks were not compared with this project's",
        )
