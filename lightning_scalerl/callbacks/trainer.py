"""Lightning's Trainer around a run: checks of its settings, and the times at which its callbacks act.

An optimizer step of RL takes seconds to minutes, and a run is one pass over an endless stream, so Lightning's epochs
mean nothing here. Callbacks that act at the end of an epoch therefore act after every evaluation. Callbacks that
monitor a training metric (`train/...`) act after every optimizer step.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.model_summary.model_summary import _format_summary_table

from lightning_scalerl.callbacks.evaluate import Evaluate, evaluation_of
from lightning_scalerl.callbacks.evaluation_set import EvaluationSet
from lightning_scalerl.callbacks.progress import StepProgress
from lightning_scalerl.checks import ConfigurationError, did_you_mean
from lightning_scalerl.compat import lightning as compat
from lightning_scalerl.distributed.ranks import check_strategy
from lightning_scalerl.rollouts.prompt import Prompt
from sweeps.run.pass_at_k import sizes

# Lightning's own logger of this table, so that the level that a user has set for it holds.
log = logging.getLogger("lightning.pytorch.callbacks.model_summary")

# Lightning's default of `log_every_n_steps`, meant for steps of milliseconds. Here it is taken as "every step".
LOG_EVERY = 50
NEVER = sys.maxsize
EVALUATE = "leave it at its default and say when and how much with Evaluate(every_n_steps=..., prompts=...)"
# Metrics that a run may log, by prefix, besides those of held-out sets (docs/reference/metrics.md). A star stands for
# names that depend on the user's code or the run's choices.
LOGGED = {
    "train": "pass_rate reward rewards_staged completion_tokens truncated cut_by_stage interrupted forced_tokens "
    "ungraded zero_variance groups_kept groups_dropped credited_prompts credited_rollouts credited_tokens "
    "prompts_retired epoch loss loss_* gradient_norm value_gradient_norm gradient_clipped learning_rate clip_fraction "
    "ratio_mean ratio_min ratio_max entropy kl explained_variance skipped_updates loss_scale logprob_gap mismatch_kl "
    "effective_samples probe_gap_mean probe_gap_p99 staleness_mean staleness_p95 staleness_max "
    "staleness_in_flight_mean staleness_in_flight_p95 staleness_in_flight_max staleness_queued_mean "
    "staleness_queued_p95 staleness_queued_max",
    "reward": "*",
    "alarm": "truncated",
    "compute": "flops flops_train flops_generate device_hours device_hours_train device_hours_generate "
    "device_hours_checkpoint device_hours_idle device_hours_judge virtual_device_hours judge_hours judge_tokens "
    "judge_prompt_tokens judge_completion_tokens judge_cost wasted_flops wasted_device_hours",
    "eval_cost": "flops judge_hours judge_tokens judge_prompt_tokens judge_completion_tokens judge_cost",
    "environment": "turns calls malformed raised failed tokens characters_cut info_* pass_rate_*",
    "virtual": "trainer_idle generator_idle",
    "live": "trainer_idle generator_idle trainer_tokens_s engine*_idle engine*_tokens_s publish_s generators_lost",
    "mechanism": "*",
    "verify": "scored abstained errors timeouts retried judge_asked judge_cached",
    "time": "verify_mean_s verify_slowest_s verify_total_s evaluate_s reward_per_device_hour",
}
_LOGGED = [f"{prefix}/{name}" for prefix, names in LOGGED.items() for name in names.split()]
STAGES = {
    "test": "Trainer.test: a held-out set is evaluated by Trainer.validate(module, datamodule=...); there is no other",
}


def check_datamodule(trainer: Trainer) -> None:
    """Check that the Trainer's data come from a RolloutDataModule.

    Raises:
        ConfigurationError: there are no data, or they come from another datamodule or from dataloaders.
    """
    # A Trainer that is used again keeps its last datamodule, so look at the loop's data as well.
    datamodule, source = getattr(trainer, "datamodule", None), compat.data_source(trainer)
    if source is datamodule and hasattr(datamodule, "set_evaluation_sets"):
        return
    description = "none is given" if source in (None, trainer.lightning_module) else type(source).__name__
    raise ConfigurationError(
        f"datamodule: {description}, and ScaleRL generates its data; give RolloutDataModule(task=...) as "
        f"Trainer.{trainer.state.fn.value}(module, datamodule=...)"  # type: ignore[union-attr]
    )


def check_instances(trainer: Trainer) -> None:
    """Raise ConfigurationError if a callback is a class instead of an instance."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    classes = [callback for callback in callbacks if isinstance(callback, type)]
    if classes:
        # Lightning reports this error to all callbacks, and would raise another one for a class.
        trainer.callbacks = [callback for callback in callbacks if callback not in classes]  # type: ignore[attr-defined]
        name = classes[0].__name__
        raise ConfigurationError(f"callbacks: {name} is a class; give an instance, {name}(...)")


def check_trainer(trainer: Trainer) -> None:
    """Check the settings of Lightning's Trainer before anything is built.

    Raises:
        ConfigurationError: a setting conflicts with the recipe or means nothing here. The message says what to use.
    """
    if str(trainer.precision) != "32-true":
        raise ConfigurationError(
            f"precision: Trainer(precision={trainer.precision!r}) would fight the precision axis; leave it at "
            "32-true and choose e.g. precision=bf16 in the recipe"
        )
    check_strategy(trainer.strategy)
    foreign_types = [type(each) for each in trainer.callbacks if type(each).__module__.startswith("pytorch_lightning")]  # type: ignore[attr-defined]
    if foreign_types:
        raise ConfigurationError(
            f"callbacks: {foreign_types[0].__name__} is of pytorch_lightning, another package than the Trainer's; "
            "import it from lightning.pytorch"
        )
    evaluates = evaluation_of(trainer) is not None or trainer.state.fn == "validate"
    if evaluates and trainer.state.fn != "predict" and not trainer.datamodule.task.eval_sets():  # type: ignore[attr-defined]
        raise ConfigurationError(
            "task.heldout: the task has no held-out prompts, and Evaluate and Trainer.validate need some; give e.g. "
            "heldout=0.1, a tenth of the training prompts, or leave Evaluate out"
        )
    if trainer.state.fn == "fit":
        _check_fit(trainer)
    elif trainer.limit_val_batches == 0:
        trainer.limit_val_batches = 1.0


def _check_fit(trainer: Trainer) -> None:
    if trainer.max_steps < 1:
        raise ConfigurationError(
            f"max_steps: {trainer.max_steps} must be 1 or more, because the rollout stream has no end; give "
            "Trainer(max_steps=...)"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches: {trainer.accumulate_grad_batches} would change what a batch is; leave it at 1: "
            'a batch is cut into pieces that fit by overrides=["batch.micro_batch=..."], with the same gradient'
        )
    if trainer.gradient_clip_val:
        raise ConfigurationError(
            f"gradient_clip_val: {trainer.gradient_clip_val!r} would clip beside the recipe's own; use "
            'overrides=["optimizer.clip_norm=..."] in its place'
        )
    if batches := trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"overfit_batches: {batches!r} has no meaning on a stream; give a task with few prompts"
        )
    # The integer 1 means one batch per epoch. Lightning would end its epoch after one step, and call the hooks for
    # that.
    limit = trainer.limit_train_batches
    if (limit != 1.0 or isinstance(limit, int)) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(f"limit_train_batches: {limit!r} has no meaning on a stream; use max_steps")
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    evaluates = evaluation_of(trainer) is not None
    for field, default in (("val_check_interval", 1.0), ("check_val_every_n_epoch", 1), ("limit_val_batches", 1.0)):
        value = getattr(trainer, field)
        # The integer 1 means one step or batch. Lightning's default, 1.0, means the whole epoch or set.
        is_default = value == default and isinstance(value, int) == isinstance(default, int)
        if not is_default and value != (NEVER if evaluates else 0):
            raise ConfigurationError(f"{field}: {value!r} decides nothing here; {EVALUATE}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and compat.saves_by_time(callback):
            raise ConfigurationError(
                "callbacks: ModelCheckpoint(train_time_interval=...) saves nothing where a module steps its optimizer "
                "itself; use every_n_train_steps"
            )
        if isinstance(callback, StochasticWeightAveraging):
            # It averages the weights at the start of each epoch. A run is one epoch, so the result would be the initial
            # weights.
            raise ConfigurationError(
                "callbacks: StochasticWeightAveraging averages over epochs, and a run is one epoch; use "
                "EMAWeightAveraging"
            )
    evaluation = evaluation_of(trainer)
    settings = {} if evaluation is None else evaluation.settings(trainer.datamodule.task)  # type: ignore[attr-defined]
    for callback in monitoring_callbacks(trainer):
        if str(callback.monitor).startswith("eval/"):
            _check_times(callback, evaluation, settings)
        _check_monitor(trainer, callback, settings)


def _check_times(callback: Any, evaluation: Evaluate | None, settings: Mapping[str, EvaluationSet]) -> None:
    """Check that a callback acts only at steps at which the metric that it monitors is measured.

    At other steps it would use the value of an earlier step.

    Raises:
        ConfigurationError: the callback also acts at other steps, or the run has no evaluations.
    """
    if evaluation is None:
        raise ConfigurationError(
            f"callbacks: {type(callback).__name__} monitors {callback.monitor!r} and nothing evaluates; add "
            "Evaluate(every_n_steps=...)"
        )
    monitored = settings.get(str(callback.monitor).split("/")[1])
    interval = evaluation.every_n_steps if monitored is None else monitored.every_n_steps
    steps = compat.saves_every_n_steps(callback)
    if interval and steps % interval:
        raise ConfigurationError(
            f"callbacks: ModelCheckpoint(monitor={callback.monitor!r}, every_n_train_steps={steps}) would save "
            "weights under the score of earlier ones; leave every_n_train_steps out, or make it a multiple of "
            f"Evaluate's every_n_steps, {interval}"
        )
    for name, each in settings.items():
        if interval and monitored is not None and each.every_n_steps is not None and each.every_n_steps % interval:
            raise ConfigurationError(
                f"evaluation.sets: {name} is evaluated every {each.every_n_steps} steps, alone at some of them, where "
                f"{type(callback).__name__} would read the last score of {callback.monitor!r} again; make its "
                f"every_n_steps a multiple of {interval}"
            )


def _check_monitor(trainer: Trainer, callback: Any, settings: Mapping[str, EvaluationSet]) -> None:
    """Refuse to monitor a metric that is never logged. Lightning would notice only after the first evaluation.

    Raises:
        ConfigurationError: the metric is never logged. The message lists valid names.
    """
    name, sets = str(callback.monitor), trainer.datamodule.task.eval_sets()  # type: ignore[attr-defined]
    evaluation = evaluation_of(trainer)
    valid = [
        metric
        for set_name, prompts in sets.items()
        for metric in _metric_names(set_name, prompts, settings[set_name].samples or 1 if set_name in settings else 1)
    ]
    if evaluation is not None and evaluation.gold_logprob:
        valid += [f"eval/{each}/gold_logprob" for each, prompts in sets.items() if any(p.solution for p in prompts)]
    if name.startswith("eval/"):
        unknown = name not in (*valid, "eval/weight_version", *(f"eval/{set_name}/ungraded" for set_name in sets))
    else:
        is_logged = any(fnmatchcase(name, pattern) for pattern in _LOGGED)
        unknown = not is_logged and not _may_log_other_metrics(trainer)
    if unknown:
        suggestion = did_you_mean(name, [*valid, *(each for each in _LOGGED if "*" not in each)])
        raise ConfigurationError(
            f"callbacks: {type(callback).__name__} monitors {name!r}, which nothing logs{suggestion}; "
            f"valid: {', '.join(valid)}, and metrics of a step such as train/reward (docs/reference/metrics.md)"
        )


def _check_mechanisms(trainer: Trainer, axes: Sequence[str]) -> None:
    """Refuse to monitor `mechanism/<axis>` of an axis on which the run does not differ from its recipe.

    Raises:
        ConfigurationError: the metric is never logged. The message lists valid names.
    """
    for callback in monitoring_callbacks(trainer):
        prefix, _, axis = str(callback.monitor).partition("/")
        if prefix == "mechanism" and axis not in axes and not _may_log_other_metrics(trainer):
            raise ConfigurationError(
                f"callbacks: {type(callback).__name__} monitors {callback.monitor!r}, which nothing logs, because the "
                "run does not differ from its recipe there; valid: "
                f"{', '.join(f'{prefix}/{each}' for each in axes) or 'no metric of this kind in this run'}"
            )


def _metric_names(name: str, prompts: Sequence[Prompt], samples: int) -> list[str]:
    """Return the names of a held-out set's metrics, with maj@k, which not every verifier measures."""
    difficulties = sorted({prompt.difficulty for prompt in prompts} - {""})
    suffixes = [
        "pass_rate",
        "pass_rate_se",
        "prompts_at_0",
        "prompts_at_1",
        *(f"pass_rate_{difficulty}" for difficulty in difficulties),
    ]
    suffixes += [f"{kind}@{k}{end}" for k in sizes(samples) for kind in ("pass", "maj") for end in ("", "_se")]
    return [f"eval/{name}/{end}" for end in suffixes]


def _may_log_other_metrics(trainer: Trainer) -> bool:
    """Return whether a callback or the module is of a class of the user's, which may log other metrics."""
    parts = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(not type(part).__module__.startswith(("lightning.", "lightning_scalerl.")) for part in parts)


def monitoring_callbacks(trainer: Trainer) -> list[Any]:
    """Return the Trainer's EarlyStopping and ModelCheckpoint callbacks that monitor a metric."""
    callbacks = [each for each in trainer.callbacks if isinstance(each, EarlyStopping | ModelCheckpoint)]  # type: ignore[attr-defined]
    return [callback for callback in callbacks if callback.monitor]


def remove_wandb_anonymous(trainer: Trainer) -> None:
    """Remove `anonymous=None` from the arguments that Lightning's W&B logger passes to `wandb.init`.

    wandb warns that this setting is deprecated, and Lightning passes it even if the user has not set it.
    """
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and compat.wandb_arguments(logger).get("anonymous", "") is None:
            del compat.wandb_arguments(logger)["anonymous"]


def prepare_trainer(trainer: Trainer) -> None:
    """Set up Lightning's callbacks to act when there is a new metric. Called for every fit; idempotent."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.log_every_n_steps == LOG_EVERY:  # type: ignore[attr-defined]
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
    trainer.num_sanity_val_steps = 0
    # Lightning warns that a metric may belong to older weights than the checkpoint. Here metrics are measured on
    # exactly the weights that are saved.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    # Lightning's data loop uses a deprecated function of torch.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
    if evaluation_of(trainer) is not None:
        # Lightning must not validate by itself: `Evaluate` runs the validation loop, after which callbacks act.
        trainer.check_val_every_n_epoch = NEVER
    else:
        trainer.limit_val_batches = 0  # otherwise Lightning validates once at the end
    for callback in monitoring_callbacks(trainer):
        if str(callback.monitor).startswith("train/"):
            _at_every_step(callback)
    if not any(isinstance(each, StepHooks) for each in callbacks):
        # First in the list, so that EarlyStopping and ModelCheckpoint act on a step before its checkpoint is saved.
        callbacks.insert(0, StepHooks())
    for index, callback in enumerate(callbacks):
        if type(callback) in (RichProgressBar, TQDMProgressBar):
            callbacks[index] = StepProgress()
        if isinstance(callback, ModelSummary) and type(callback) in (ModelSummary, RichModelSummary):
            callbacks[index] = ParameterSummary(compat.summary_depth(callback))


def _at_every_step(callback: Any) -> None:
    """Let a callback act in its end-of-epoch hook, which `StepHooks` calls after each step."""
    if isinstance(callback, EarlyStopping):
        compat.stop_at_epoch_end(callback)
    if isinstance(callback, ModelCheckpoint):
        compat.save_at_epoch_end(callback)


def set_step_counter(trainer: Trainer, steps: int) -> None:
    """Set a new Trainer's step counter to `steps`, so that `max_steps` and callbacks count all steps of the run."""
    loop = trainer.fit_loop.epoch_loop
    total = loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = max(total.completed, steps)
    compat.set_batches_that_stepped(loop, total.completed)


class ParameterSummary(ModelSummary):
    """Lightning's table of the module's parts, without FLOPs, and without numbers of modules in train mode.

    Lightning measures FLOPs on an example input. Our module has none, so Lightning would print 0 for each part; the
    metric `compute/flops` has the run's FLOPs. Modes are left out because they alternate during training.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Log Lightning's table without FLOPs (a row and a column), and without the rows that count modules by mode."""
        columns = [column for column in summary_data if column[0] != "FLOPs"]
        table = _format_summary_table(
            total_parameters, trainable_parameters, model_size, total_training_modes, total_flops, *columns
        )
        dropped = ("Total Flops", "Modules in train mode", "Modules in eval mode")
        log.info("\n" + "\n".join(line for line in table.splitlines() if not line.endswith(dropped)))


class StepHooks(Callback):
    """Callback that calls, after every optimizer step, the EarlyStopping and ModelCheckpoint that monitor `train/...`.

    At the end of Lightning's epoch those are disabled, because they have already acted on the last step.
    """

    def __init__(self) -> None:
        self._disabled: list[tuple[Any, str]] = []
        self._until_first_step: list[EarlyStopping] = []  # callbacks whose `strict` is switched off

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Check optimizer and checkpoint before other callbacks write anything."""
        pl_module.updates.check_configured(pl_module, trainer)
        pl_module.continuation.require_checkpoint_after_failure(trainer.ckpt_path)
        pl_module.ranks.share(lambda: _check_mechanisms(trainer, pl_module.mechanism.axes))

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Let EarlyStopping accept that a metric of the user's is missing before the first step."""
        if trainer.global_step > 0:
            return
        for callback in monitoring_callbacks(trainer):
            is_user_metric = (
                not str(callback.monitor).startswith("eval/") and callback.monitor not in trainer.callback_metrics
            )
            if is_user_metric and isinstance(callback, EarlyStopping) and callback.strict:
                callback.strict = False
                self._until_first_step.append(callback)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Make EarlyStopping strict again: from now on, a missing metric is an error."""
        while self._until_first_step:
            self._until_first_step.pop().strict = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Disable callbacks that monitor `train/...` at the end of Lightning's epoch: they have already acted."""
        for callback in monitoring_callbacks(trainer):
            for flag in ("_check_on_train_epoch_end", "_save_on_train_epoch_end"):
                if str(callback.monitor).startswith("train/") and getattr(callback, flag, False):
                    self._disabled.append((callback, flag))
                    setattr(callback, flag, False)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Enable the callbacks again that `on_train_epoch_end` has disabled."""
        for callback, flag in self._disabled:
            setattr(callback, flag, True)
        self._disabled.clear()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Tell the module about the error, because its state may now be inconsistent."""
        pl_module.failed(exception)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call the end-of-epoch hooks of callbacks that monitor `train/...`."""
        for callback in monitoring_callbacks(trainer):
            if str(callback.monitor).startswith("train/"):
                callback.on_train_epoch_end(trainer, pl_module)


def warn_of_pytorch_lightning() -> None:
    """Log a warning if `pytorch_lightning` is imported, because its Trainers and callbacks cannot be used.

    The packages `pytorch_lightning` and `lightning.pytorch` are copies of each other, but their classes are unrelated.
    A Trainer of `pytorch_lightning` raises a TypeError (ScaleRL is not a subclass of its LightningModule) before it
    calls any of our hooks.
    """
    if "pytorch_lightning" in sys.modules:
        logging.getLogger(__name__).warning(
            "pytorch_lightning is imported: ScaleRL is a module of lightning.pytorch, and a Trainer or callback of "
            "pytorch_lightning refuses it; use from lightning.pytorch import Trainer"
        )
