"""Translation of a recipe for verl: overrides of its Hydra configuration (`python -m verl.trainer.main_ppo`).

Properties of the released code:

- `vanilla` has a dual clip at 3 by default, which is another surrogate;
- `clip_ratio_high` of `cispo` is the cap minus 1, and its lower bound is 0 at `clip_ratio_low=1`;
- `sapo` averages over samples regardless of `loss_agg_mode`, and `geo_mean` over the samples of each micro-batch;
- `clip_cov` and `kl_cov` select tokens in every micro-batch and pass, by the current policy's log-probabilities;
- `clip_ratio_c` of `dppo_tv` and `dppo_kl` is the cap on the ratio, by default 3;
- `adv_estimator=gae` whitens advantages, regardless of any setting;
- the divisor of `seq-mean-token-sum-norm` is the padded width unless `loss_scale_factor` is set;
- the learning rate advances once per generation batch;
- training ends after `total_epochs`, regardless of `total_training_steps`;
- FSDP takes its types from `mixed_precision`, or BF16 without it, and never reads `dtype`;
- an engine always samples, so the ratio's denominator is a choice: `bypass_mode` uses the engine's log-probabilities.
  With `use_v1=false`, the older trainer, `bypass_mode` also replaces any loss by PPO's.

Source: verl 0.9.1, trainer/ppo/core_algos.py, trainer/ppo/rollout_corr_helper.py, trainer/ppo/v1/trainer_base.py,
trainer/config, workers/engine/fsdp/transformer_impl.py, workers/utils/losses.py; the losses are compared number by
number in tests/parity.
"""

from __future__ import annotations

from lightning_scalerl.axes.aggregation import (
    ConstantAggregation,
    SampleAggregation,
    SumAggregation,
    TokenAggregation,
)
from lightning_scalerl.axes.correction import Proximal
from lightning_scalerl.axes.entropy import FixedEntropy
from lightning_scalerl.axes.filter import DynamicSampling, NoFilter
from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.axes.loss import CISPO, DPPO, GMPO, GSPO, SAPO, ClipCov, KLCov, Reinforce
from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.translate.record import (
    NO_BOUND,
    Run,
    Translation,
    common,
    divides_by_deviation,
    estimator,
    evaluation_interval,
    kl_coefficient,
    kl_term,
    on_policy,
    refuse_adapter,
    translate_schedule,
)

VERSION = "0.9.1"
EPS = 1e-6  # verl's fixed addition to a standard deviation
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
_BY_AGGREGATION = {
    SampleAggregation: "seq-mean-token-mean",
    TokenAggregation: "token-mean",
    SumAggregation: "token-sum",
    ConstantAggregation: "seq-mean-token-sum-norm",
}


def to_verl(run: Run) -> Translation:
    """Translate a recipe into overrides of verl's configuration, for one device."""
    into = Translation("verl", VERSION, "overrides")
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
        into.add_missing("aggregation", aggregation, f"loss_agg_mode has only {', '.join(_BY_AGGREGATION.values())}")
    else:
        into.under(ACTOR, "aggregation", loss_agg_mode=by_name)
    if isinstance(aggregation, ConstantAggregation):
        into.under(ACTOR, "aggregation", loss_scale_factor=run.recipe.context.max_new_tokens)
    if isinstance(loss, CISPO):
        into.under(
            ACTOR, "loss", policy_loss__loss_mode="cispo", clip_ratio_low=1.0, clip_ratio_high=loss.max_ratio - 1
        )
    elif isinstance(loss, SAPO):
        into.under(ACTOR, "loss", policy_loss__loss_mode="sapo", tau_pos=loss.tau_pos, tau_neg=loss.tau_neg)
        if by_name is not None and not isinstance(aggregation, SampleAggregation):
            into.add_missing(
                "aggregation", aggregation, "loss_mode=sapo averages over samples; aggregation=sample can be translated"
            )
    elif isinstance(loss, DPPO):
        into.under(
            ACTOR,
            "loss",
            policy_loss__loss_mode=f"dppo_{loss.divergence}",
            clip_ratio_low=loss.max_divergence_low,
            clip_ratio_high=loss.max_divergence_high,
            clip_ratio_c=loss.max_ratio,
        )
    elif isinstance(loss, GMPO):
        _gmpo(run, into, loss)
    elif isinstance(loss, ClipCov | KLCov):
        _covariance(run, into, loss)
    elif isinstance(loss, Reinforce):
        into.add_missing("loss", loss, "verl has reinforce only as a loss of bypass_mode, weighted by a ratio")
    elif (clips := run.clips) is None:
        into.add_missing("loss", loss, "no loss_mode is known to be the same")
    else:
        mode = "gspo" if isinstance(loss, GSPO) else "vanilla"
        into.under(ACTOR, "loss", policy_loss__loss_mode=mode, clip_ratio_low=clips[0], clip_ratio_high=clips[1])
        if mode == "vanilla":
            into.under(ACTOR, "loss", clip_ratio_c=NO_BOUND)  # turns off the dual clip
    beta = kl_term(run, into, type(aggregation), "verl averages the KL term in the same way as the loss")
    if beta is not None:
        into.under(ACTOR, "kl", use_kl_loss=bool(beta), kl_loss_coef=beta, kl_loss_type="low_var_kl")
        into.set("kl", algorithm__use_kl_in_reward=False)
        if beta:
            into.note("kl: verl caps k3 at 10, with no gradient beyond the cap")
    entropy = run.choices.entropy
    if isinstance(entropy, FixedEntropy) and run.aggregation_of(entropy) is type(aggregation):
        into.under(ACTOR, "entropy", entropy_coeff=entropy.coefficient)
    elif entropy.acts:
        into.add_missing(
            "entropy", entropy, "verl has one coefficient for all tokens, and averages the bonus like the loss"
        )
    else:
        into.under(ACTOR, "entropy", entropy_coeff=0)


def _gmpo(run: Run, into: Translation, loss: GMPO) -> None:
    correction = run.choices.correction
    has_weights = isinstance(correction, Proximal) and correction.mode != "none"
    by_sample = isinstance(run.choices.aggregation, SampleAggregation)
    if by_sample and not has_weights and run.is_one_micro_batch:
        into.under(ACTOR, "loss", policy_loss__loss_mode="geo_mean")
        into.under(ACTOR, "loss", clip_ratio_low=loss.clip_low, clip_ratio_high=loss.clip_high)
    else:
        into.add_missing(
            "loss",
            loss,
            "geo_mean averages over the samples of a micro-batch, and takes the geometric mean of a sample's "
            "correction weights; aggregation=sample with a step in one micro-batch and no weights "
            "(correction.mode=none) can be translated",
        )


def _covariance(run: Run, into: Translation, loss: ClipCov | KLCov) -> None:
    is_one_pass = run.is_one_micro_batch and run.choices.epochs.count == 1
    if not is_one_pass or not isinstance(run.choices.correction, Proximal):
        into.add_missing(
            "loss",
            loss,
            "verl selects tokens in every micro-batch and pass, by the current policy; a step of one pass in one "
            "micro-batch with correction=proximal, whose anchor is then the current policy, can be translated",
        )
    elif isinstance(loss, ClipCov):
        into.under(ACTOR, "loss", policy_loss__loss_mode="clip_cov", policy_loss__clip_cov_ratio=loss.share)
        into.under(ACTOR, "loss", policy_loss__clip_cov_lb=loss.low, policy_loss__clip_cov_ub=loss.high)
        into.under(ACTOR, "loss", clip_ratio_low=loss.clip_low, clip_ratio_high=loss.clip_high)
    else:
        into.under(ACTOR, "loss", policy_loss__loss_mode="kl_cov", policy_loss__kl_cov_ratio=loss.share)
        into.under(ACTOR, "loss", policy_loss__ppo_kl_coef=loss.coefficient)


def _credit(run: Run, into: Translation) -> None:
    choices = run.choices
    divides = divides_by_deviation(
        run,
        into,
        EPS,
        "verl divides by a group's standard deviation or not at all; normalization=prompt or normalization=none can be "
        "translated",
    )
    if divides is not None:
        into.set("normalization", algorithm__norm_adv_by_std_in_grpo=divides)
    if (name := estimator(run)) is not None:
        into.set("advantage", algorithm__adv_estimator=name)
    if isinstance(choices.filter, DynamicSampling):
        into.under("algorithm.filter_groups", "filter", enable=True, metric="reward", max_num_gen_batches=0)
        into.note(
            "filter: verl samples without a limit until the batch is full, and drops a group by its reward after any "
            "length penalty"
        )
    elif isinstance(choices.filter, NoFilter):
        into.under("algorithm.filter_groups", "filter", enable=False)
    else:
        into.add_missing(
            "filter",
            choices.filter,
            "verl replaces a dropped group; filter=dynamic_sampling or filter=none can be translated",
        )
    into.express_if(
        not isinstance(choices.truncated, MaskTruncated),
        "truncated",
        choices.truncated,
        "verl trains on truncated completions; truncated=keep can be translated",
    )
    if isinstance(choices.length_control, Penalty):
        into.add_missing(
            "length_control", choices.length_control, "verl computes a length penalty in a reward function"
        )


def _data(run: Run, into: Translation) -> None:
    recipe, epochs, k = run.recipe, run.choices.epochs.count, run.k
    if epochs > 1 and not on_policy(run):
        into.add_missing("epochs", epochs, "ppo_epochs repeats whole generation batches, not single steps")
    if run.steps % k:
        into.add_missing("budget.steps", run.steps, f"verl trains in batches of {k} steps; give a multiple")
    limits = recipe.context
    into.under("data", "async_mode", train_batch_size=recipe.batch.prompts * k)
    into.under(ACTOR, "async_mode", ppo_mini_batch_size=recipe.batch.prompts)
    into.under(ACTOR, "epochs", ppo_epochs=epochs)
    into.under(
        "data",
        max_prompt_length=limits.max_prompt_tokens,
        max_response_length=limits.max_new_tokens,
        filter_overlong_prompts=limits.too_long == "drop",
        truncation="error",
        shuffle=True,
        seed=run.seed,
    )
    into.under(
        ROLLOUT,
        name="vllm",
        n=recipe.batch.completions,
        temperature=limits.temperature,
        top_p=1.0,
        top_k=-1,
        calculate_log_probs=True,
    )
    into.under(ACTOR, ppo_micro_batch_size_per_gpu=run.micro_batch, shuffle=False)
    # Passes over the data (`total_epochs`): enough for all steps even if the data is a single batch.
    into.under("trainer", total_training_steps=run.steps // k, total_epochs=run.steps // k)
    into.under("trainer", use_v1=True, v1__trainer_mode="sync")
    if interval := evaluation_interval(run, into):
        into.under("trainer", test_freq=interval, val_before_train=True)
        _, samples = run.evaluation
        into.under(f"{ROLLOUT}.val_kwargs", n=samples, do_sample=True, temperature=limits.temperature)


def _optimizer(run: Run, into: Translation) -> None:
    optimizer = run.recipe.optimizer
    into.set_optimizer("fp32", "fp32", optimizer.eps)  # `model_dtype` is set in `_ratio`, eps below
    into.under(
        f"{ACTOR}.optim",
        lr=run.lr,
        betas=[optimizer.beta1, optimizer.beta2],
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_norm or NO_BOUND,
        override_optimizer_config={"eps": optimizer.eps},
    )
    if optimizer.dropout:
        into.add_missing("optimizer.dropout", True, "verl turns the model's dropout off")
    has_warmup, has_decay = translate_schedule(run, into, by_step=run.k == 1)
    cosine = run.cosine
    if has_warmup:
        into.add_missing(
            "schedule.warmup_steps", run.recipe.schedule.warmup_steps, "verl's warm-up begins at a learning rate of 0"
        )
    elif cosine is not None and has_decay:
        if cosine.total_steps != run.steps:
            into.add_missing(
                "schedule",
                "cosine",
                "verl's cosine ends with training; schedule.total_steps=budget.steps can be translated",
            )
        into.under(f"{ACTOR}.optim", lr_scheduler_type="cosine", min_lr_ratio=cosine.final, num_cycles=0.5)
    elif cosine is None:
        into.under(f"{ACTOR}.optim", lr_scheduler_type="constant")
    refuse_adapter(run, into, "model.lora_rank")


def _ratio(run: Run, into: Translation) -> None:
    """Add the precision, and the denominator of the importance ratio: the engine's probabilities or the trainer's."""
    correction, precision = run.choices.correction, run.choices.precision
    into.under(ROLLOUT, "precision", dtype=run.dtype)
    # The reference policy has its own engine, which also uses BF16 by default.
    for engine in (ACTOR, "actor_rollout_ref.ref")[: 2 if kl_coefficient(run) else 1]:
        into.under(f"{engine}.fsdp_config", model_dtype="fp32")
        types = {"param_dtype": run.dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"}
        into.add(f"{engine}.fsdp_config.mixed_precision", types)
    if precision.policy == "fp32":
        into.note(
            "precision: flash attention, verl's default, does not support FP32; choose another attention in "
            "model.override_config"
        )
    if run.head is None or run.head:
        into.add_missing("precision.fp32_head", "true", "verl has no setting for an FP32 head on a 16-bit policy")
    under = "algorithm.rollout_correction"
    if not isinstance(correction, Proximal):
        into.under(under, "correction", bypass_mode=True, loss_type="ppo_clip", rollout_is=None)
        return
    into.under(under, "correction", bypass_mode=False)
    if not on_policy(run):
        into.add_missing(
            "correction", correction, "verl's anchor is computed when tokens are sampled, not before each step"
        )
    elif correction.mode == "none":
        into.under(under, "correction", rollout_is=None)
    elif correction.mode == "truncate" and correction.min_weight == 0:
        into.under(under, "correction", rollout_is=correction.level, rollout_is_threshold=correction.max_weight)
    elif correction.mode == "mask" and correction.min_weight > 0:
        bounds = f"{correction.min_weight}_{correction.max_weight}"
        into.under(under, "correction", rollout_is=correction.level, rollout_is_threshold=bounds)
    else:
        into.add_missing(
            "correction", correction, "verl's truncation has no lower bound, and its mask needs one above 0"
        )
