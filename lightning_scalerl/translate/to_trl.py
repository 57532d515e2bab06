"""Translation of a recipe for TRL's `GRPOTrainer`: fields of `GRPOConfig`, as read by `trl grpo --config`.

TRL's `loss_type` fixes both surrogate and denominator, so these two axes are translated together. These properties of
the released code are easily misunderstood:

- `epsilon_high` of `cispo` is the cap itself, not an offset from 1;
- `scale_rewards="batch"` divides by the deviation of rewards, not of advantages;
- masked completions and groups without variance still count in averages over rows;
- the token denominator counts the tokens of the generation batch, not of the step;
- weight decay does not apply to norms;
- the warm-up of `constant_with_warmup` begins at a learning rate of 0.

Source: trl 1.16.0, trainer/grpo_trainer.py and grpo_config.py; the losses are compared number by number in
tests/parity.
"""

from __future__ import annotations

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.axes.aggregation import ConstantAggregation, SampleAggregation, TokenAggregation
from lightning_scalerl.axes.correction import Proximal
from lightning_scalerl.axes.entropy import FixedEntropy
from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.axes.loss import CISPO, GMPO, GSPO, SAPO, Reinforce
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    BatchRewardNormalization,
    MaxRLNormalization,
    NoNormalization,
    Normalization,
    PromptNormalization,
    RunningNormalization,
)
from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.optim import AdamW8bit
from lightning_scalerl.translate.record import (
    Run,
    Translation,
    common,
    deviation,
    kl_term,
    on_policy,
    translate_schedule,
)

VERSION = "1.16.0"
EPS = 1e-4  # TRL's fixed addition to a standard deviation
_BY_AGGREGATION = {SampleAggregation: "grpo", TokenAggregation: "dapo", ConstantAggregation: "dr_grpo"}


def to_trl(run: Run) -> Translation:
    """Translate a recipe into fields of TRL's `GRPOConfig`, for as many processes as `strategy` has devices."""
    into = Translation("trl", VERSION, "yaml")
    common(run, into)
    _loss(run, into)
    _credit(run, into)
    _data(run, into)
    _optimizer(run, into)
    _ratio(run, into)
    into.note(
        "optimizer: on a batch without a credited token TRL takes an optimizer step with zero gradients, which moves "
        "the weights by momentum; in this project such a batch changes no weights"
    )
    return into


def _loss(run: Run, into: Translation) -> None:
    loss, aggregation = run.choices.loss, run.choices.aggregation
    by_name = _BY_AGGREGATION.get(type(aggregation))
    if isinstance(loss, SAPO):
        if not isinstance(aggregation, SampleAggregation):
            why = "loss_type=sapo averages over samples; aggregation=sample can be translated"
            into.add_missing("aggregation", aggregation, why)
    elif by_name is None:
        into.add_missing(
            "aggregation",
            aggregation,
            "no loss_type has this average (grpo: samples; dapo and cispo: tokens; dr_grpo: a constant; luspo: sums "
            "divided by the number of rows); the loss_type below matches the loss, and averages over tokens",
        )
    elif isinstance(aggregation, TokenAggregation) and not on_policy(run):
        into.add_missing(
            "aggregation",
            aggregation,
            "dapo and cispo divide by the tokens of the whole generation batch, averaged over its steps; with "
            "async_mode=on_policy these are the tokens of the step",
        )
    if isinstance(loss, CISPO):
        into.set("loss", "aggregation", loss_type="cispo")
        into.set("loss", epsilon_high=loss.max_ratio)  # the cap itself, not 1 + epsilon
        if by_name is not None and not isinstance(aggregation, TokenAggregation):
            into.add_missing(
                "aggregation", aggregation, "loss_type=cispo divides by tokens; aggregation=token can be translated"
            )
    elif isinstance(loss, SAPO):
        into.set("loss", "aggregation", loss_type="sapo")
        into.set("loss", sapo_temperature_pos=loss.tau_pos, sapo_temperature_neg=loss.tau_neg)
    else:
        # Losses with a clip have the same surrogate under grpo, dapo and dr_grpo.
        into.set("loss", "aggregation", loss_type=by_name or "dapo")
        if isinstance(loss, Reinforce):
            into.add_missing("loss", loss, "every loss_type weights tokens by an importance ratio")
        elif isinstance(loss, GMPO):
            into.add_missing("loss", loss, "TRL has a separate trainer for it, trl.experimental.gmpo, and no loss_type")
        elif (clips := run.clips) is None:
            into.add_missing("loss", loss, "no loss_type is known to be the same")
        else:
            into.set("loss", epsilon=clips[0], epsilon_high=clips[1])
    into.set(router_aux_loss_coef=0.0)  # the default would add the load-balancing loss of a model with experts
    into.set("loss", importance_sampling_level="sequence" if isinstance(loss, GSPO) else "token")
    beta = kl_term(run, into, type(aggregation), "TRL averages the KL term in the same way as the loss")
    if beta is not None:
        # Use the plain k3 estimator: by default TRL multiplies it by the ratio, which gives another estimator.
        into.set("kl", beta=beta, use_bias_correction_kl=False)
    entropy = run.choices.entropy
    if isinstance(entropy, FixedEntropy):
        if run.is_one_micro_batch and run.aggregation_of(entropy) is TokenAggregation:
            into.set("entropy", entropy_coef=entropy.coefficient)
        else:
            into.add_missing(
                "entropy",
                entropy,
                "TRL averages the bonus over the tokens of each micro-batch; entropy.aggregation=token with a step in "
                "one micro-batch of one process can be translated",
            )
    elif entropy.acts:
        into.add_missing("entropy", entropy, "TRL has one coefficient for all tokens")
    else:
        into.set("entropy", entropy_coef=0.0)


def _credit(run: Run, into: Translation) -> None:
    choices = run.choices
    into.express("advantage")
    scale = choices.normalization
    if isinstance(scale, PromptNormalization | BatchRewardNormalization) and (scale.ddof, scale.eps) != (1, EPS):
        into.add_missing("normalization", scale, deviation(EPS))
    elif isinstance(scale, PromptNormalization):
        into.set("normalization", scale_rewards="group")
    elif isinstance(scale, BatchRewardNormalization) and on_policy(run):
        into.set("normalization", scale_rewards="batch")
    elif isinstance(scale, NoNormalization):
        into.set("normalization", scale_rewards="none")
    elif isinstance(scale, BatchRewardNormalization):
        into.add_missing(
            "normalization", scale, "scale_rewards=batch covers the whole generation batch, which is several steps"
        )
    else:
        into.add_missing("normalization", scale, _no_scale_rewards(scale))
    into.express_if(
        isinstance(choices.filter, NoFilter),
        "filter",
        choices.filter,
        "groups whose rewards are all equal still count in every denominator, and TRL samples no replacements; "
        "filter=none can be translated",
    )
    masks = isinstance(choices.truncated, MaskTruncated)
    if masks and isinstance(choices.aggregation, SampleAggregation):
        into.add_missing(
            "truncated",
            choices.truncated,
            "a masked completion still counts in the average over samples; truncated=keep or another aggregation can "
            "be translated",
        )
    else:
        into.set("truncated", mask_truncated_completions=masks)
    control = choices.length_control
    if isinstance(control, Penalty):
        if control.only_correct:
            into.add_missing(
                "length_control",
                control,
                "TRL's penalty applies to every completion; length_control.only_correct=false can be translated",
            )
        else:
            into.express("length_control", "reward_funcs")
            into.note(
                "length_control: add trl.rewards.get_soft_overlong_punishment(max_completion_len="
                f"{control.limit}, soft_punish_cache={control.buffer}) to reward_funcs"
            )


def _no_scale_rewards(scale: Normalization) -> str:
    """Return the reason why no value of `scale_rewards` has the same meaning as this normalization."""
    if isinstance(scale, MaxRLNormalization):
        return "no scale_rewards divides by the mean reward of a group"
    if isinstance(scale, RunningNormalization):
        return "no scale_rewards divides by a standard deviation over earlier batches"
    if isinstance(scale, BatchNormalization) and scale.centre:
        return "no scale_rewards subtracts the mean of a batch's advantages, or divides by their standard deviation"
    return (
        "scale_rewards=batch divides by the standard deviation of raw rewards (normalization=batch_reward_std), not of "
        "advantages"
    )


def _data(run: Run, into: Translation) -> None:
    recipe, epochs = run.recipe, run.choices.epochs.count
    processes = run.processes
    if run.rollouts % processes:
        into.add_missing(
            "strategy.devices",
            run.config.strategy.devices,
            f"{run.rollouts} rollouts of a step cannot be divided among {processes} processes, and TRL gives each the "
            "same number; the batch below is for one process",
        )
        processes = 1
    micro_batch = run.micro_batch_of(run.rollouts // processes)
    accumulation = run.rollouts // (micro_batch * processes)
    into.note(
        "batch: per_device_train_batch_size and gradient_accumulation_steps are for "
        f"{processes} process{'' if processes == 1 else 'es'}; with another number of processes, a step has another "
        "number of rollouts (strategy.devices)"
    )
    if epochs > 1 and not on_policy(run):
        into.add_missing("epochs", epochs, "num_iterations repeats whole generation batches, not single steps")
    into.set("async_mode", steps_per_generation=accumulation * run.k)
    into.set("epochs", num_iterations=epochs)
    into.set(
        num_generations=recipe.batch.completions,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=run.steps * epochs,
        max_completion_length=recipe.context.max_new_tokens,
        temperature=recipe.context.temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        shuffle_dataset=True,
        seed=run.seed,
    )
    if recipe.context.too_long == "drop":
        into.add_missing(
            "context.too_long", "drop", "TRL accepts prompts of any length; remove the long ones from the data"
        )
    else:
        into.note(f"context: TRL does not refuse prompts above {recipe.context.max_prompt_tokens} tokens")
    if recipe.batch.prompts > 1 and run.k > 1:
        into.note(
            "async_mode: TRL shuffles a generation batch by rollouts, not by groups, before it splits the batch into "
            "steps"
        )
    interval, samples = run.evaluation
    if interval:
        into.set(
            eval_strategy="steps",
            eval_steps=interval * epochs,
            eval_on_start=True,
            num_generations_eval=samples,
            per_device_eval_batch_size=samples * max(1, micro_batch // samples),
        )
        into.note("evaluation: eval_reward is a mean reward, and its samples use the random numbers of training")


def _optimizer(run: Run, into: Translation) -> None:
    optimizer, epochs = run.recipe.optimizer, run.choices.epochs.count
    eight_bit = isinstance(optimizer, AdamW8bit)
    # A model that is named by its path is loaded in FP32 unless model_init_kwargs says otherwise.
    into.set_optimizer("fp32", "8 bits, blocks of 256" if eight_bit else "fp32", optimizer.eps)
    into.set(
        optim="adamw_torch_8bit" if eight_bit else "adamw_torch",
        learning_rate=run.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        max_grad_norm=optimizer.clip_norm or 0.0,
        disable_dropout=not optimizer.dropout,
    )
    if optimizer.weight_decay:
        into.add_missing(
            "optimizer.weight_decay",
            optimizer.weight_decay,
            "TRL exempts norms and biases from it; optimizer.weight_decay=0 can be translated",
        )
    else:
        into.set(weight_decay=0.0)
    has_warmup, has_decay = translate_schedule(run, into, by_step=epochs == 1)
    warmup = run.recipe.schedule.warmup_steps
    cosine = run.cosine
    if cosine is not None and has_decay:
        if has_warmup or cosine.total_steps != run.steps:
            into.add_missing(
                "schedule",
                "cosine",
                "TRL's cosine ends with training; schedule.total_steps=budget.steps without warm-up can be translated",
            )
        else:
            into.set(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": cosine.final})
    elif has_warmup:
        # TRL's only schedule whose first step has a rate above 0. With a final rate of 1 its cosine is constant.
        into.set(
            lr_scheduler_type="cosine_warmup_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 1.0},
            warmup_steps=warmup + 1,
        )
    elif cosine is None:
        into.set(lr_scheduler_type="constant")
    adapter = run.choices.adapter
    if isinstance(adapter, LoRA):
        into.add_missing(
            "adapter",
            adapter,
            "GRPOConfig has no field for it; use peft_config of GRPOTrainer, or --use_peft of TRL's command",
        )


def _ratio(run: Run, into: Translation) -> None:
    """Add the denominator of the importance ratio, the generator, and the types in which trainer and generator compute.

    Without vLLM, TRL divides by the trainer's probabilities at the time of sampling. In FP32 they equal the
    generator's.
    """
    correction, precision = run.choices.correction, run.choices.precision
    is_fp32 = precision.policy == "fp32"
    into.set(use_vllm=run.vllm)
    into.set("precision", bf16=precision.policy == "bf16", fp16=False, model_init_kwargs={"dtype": "float32"})
    if run.head is None or (run.head and run.vllm):
        into.add_missing(
            "precision.fp32_head",
            f"trainer {precision.fp32_head_trainer}, generator {precision.fp32_head_generator}",
            "cast_lm_head_to_fp32 applies to the trainer's model, which also samples unless an engine does",
        )
    else:
        into.set("precision", cast_lm_head_to_fp32=run.head)
    if not is_fp32:
        into.note(
            "precision: TRL samples with the trainer's autocast forward pass; this project samples with a copy in the "
            "policy's type"
        )
    if not isinstance(correction, Proximal):
        if run.vllm or not is_fp32:
            into.add_missing(
                "correction",
                correction,
                "TRL's ratio is relative to the trainer's own log-probabilities, which differ from the generator's "
                "here; precision=fp32 with generator=torch, or correction=proximal, can be translated",
            )
        into.express("correction", "use_vllm")  # the trainer samples: its log-probabilities are the generator's
        return
    if not on_policy(run):
        into.add_missing(
            "correction", correction, "TRL's anchor is computed when tokens are sampled, not before each step"
        )
    elif correction.mode == "none":
        into.set("correction", vllm_importance_sampling_correction=False)
    elif not run.vllm:
        into.add_missing(
            "correction",
            correction,
            "TRL corrects by weights only if an engine samples; correction.mode=none can be translated",
        )
    else:
        into.set(
            "correction",
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=f"{correction.level}_{correction.mode}",
            vllm_importance_sampling_clip_min=correction.min_weight,
            vllm_importance_sampling_clip_max=correction.max_weight,
        )
