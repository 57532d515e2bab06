"""Setup of a fit, validation or prediction: choices, models, `Stage`, and the data path of a fit, in this order.

The inputs are a recipe, its models, and a Trainer with callbacks and data module. Afterwards the choices are resolved,
the models are on their device, and the run can generate, train and evaluate. Every configuration error is raised here,
before any compute.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.callbacks.checkpoint_file import read_either
from lightning_scalerl.callbacks.evaluate import evaluation_of
from lightning_scalerl.callbacks.trainer import (
    STAGES,
    check_datamodule,
    check_instances,
    check_trainer,
    prepare_trainer,
    remove_wandb_anonymous,
)
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices, by_axis
from lightning_scalerl.composition import SETTINGS
from lightning_scalerl.distributed.meeting import meet
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.continuation import Continuation
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.memory import check_memory
from lightning_scalerl.session.models import Models
from lightning_scalerl.session.placement import (
    check_partners,
    check_sharded,
    place_policy,
    prepare_adapter,
    read_whole_model,
    recompute_activations,
)
from lightning_scalerl.session.sampling import Stage
from lightning_scalerl.task.base import check_curriculum
from lightning_scalerl.task.beside import TaskWithEvaluationSets
from sweeps.run.spec import OPERATIONAL_KEYS, digest

_log = logging.getLogger(__name__)


def supplied_choices(trainer: Any, recipe: Recipe, last_fit_choices: Choices | None) -> Sequence[Callback]:
    """Check and prepare the Trainer; return the recipe's choices for axes that no callback covers.

    Repeated calls return the same objects.

    Args:
        trainer: the Trainer.
        recipe: the recipe.
        fitted: choices of the module's last fit, if there was one.
    """
    check_instances(trainer)
    check_datamodule(trainer)
    evaluation = evaluation_of(trainer)
    if evaluation is not None:
        evaluation.follow(recipe.evaluation)
        evaluation.check_context(recipe.context.max_new_tokens)
    trainer.datamodule.set_evaluation_sets({} if evaluation is None else evaluation.tasks)
    check_trainer(trainer)
    remove_wandb_anonymous(trainer)
    meet(trainer)
    read_either(trainer)
    if trainer.state.fn == "fit":
        prepare_trainer(trainer)
        if not trainer.fast_dev_run:  # `max_steps` is then not the run's length
            recipe.set_length(trainer.max_steps)
    # Trainer.validate after a fit uses that fit's choices, regardless of this Trainer's callbacks.
    base = recipe.choices if last_fit_choices is None or trainer.state.fn == "fit" else last_fit_choices
    recipe_objects = {*map(id, recipe.choices), *map(id, base)}
    covered = by_axis(choice for choice in _choices_among(trainer) if id(choice) not in recipe_objects)
    return [choice for axis, choice in base.items() if axis not in covered]


def resolve_choices(trainer: Trainer, recipe: Recipe, stage: str) -> Choices:
    """Return the design choices among the Trainer's callbacks, after checking them.

    Raises:
        ConfigurationError: the choices are incompatible, or the stage is not supported.
    """
    if stage in STAGES:
        raise ConfigurationError(STAGES[stage])
    choices = Choices.of(_choices_among(trainer))
    for axis, choice in choices.user_axes.items():
        if axis in SETTINGS or axis in OPERATIONAL_KEYS:
            raise ConfigurationError(
                f"axis: {axis!r} of {type(choice).__name__} is a group of settings; name the axis otherwise"
            )
        if (warning := choice.without_effect()) is not None:
            _log.warning(warning)
    recipe.check(choices)
    return choices


def place_models(models: Models, recipe: Recipe, choices: Choices, trainer: Trainer) -> str:
    """Prepare the models for this stage on their device; return a line for the user on the memory of a fit.

    Raises:
        ConfigurationError: model, adapter, ranks and memory are incompatible.
    """
    policy, strategy, fits = models.policy, trainer.strategy, trainer.state.fn == "fit"
    policy.precision = choices.precision
    read_whole_model(models, strategy, choices)
    prepare_adapter(policy, choices, fits)
    if fits:
        check_sharded(recipe.optimizer, strategy)
        if recipe.optimizer.storage == "bf16":
            models.store_in_bf16()
    # This only avoids a warning of Lightning; `ScaleRL.on_train_start` sets the actual mode.
    policy.train()
    if models.critic is not None:
        models.critic.train()
    check_partners(policy, strategy, recipe.optimizer.dropout)
    models.ranks, models.device = Ranks.of(trainer, models.trained.answer), strategy.root_device
    recompute_activations(models, recipe.batch)
    memory = check_memory(models, recipe, choices) if fits else ""
    place_policy(models)
    return memory


def stage_of(trainer: Any, recipe: Recipe, choices: Choices, models: Models) -> Stage:
    """Return the inputs of the Trainer's current function: fit, validate or predict."""
    evaluation, data = evaluation_of(trainer), trainer.datamodule
    predicts = trainer.state.fn == "predict"
    return Stage(
        recipe=recipe,
        choices=choices,
        models=models,
        task=data.predicted if predicts else data.task,
        seed=int(data.seed),
        local_ranks=trainer.num_devices,
        held_out=None if evaluation is None or predicts else evaluation.prompts,
    )


def set_up_fit(
    stage: Stage,
    meter: ComputeMeter,
    settings: dict[str, Any],
    continuation: Continuation,
    last: DataPath | None,
    steps: int,
) -> tuple[DataPath | None, bool]:
    """Build the data path of a fit (on rank 0), its critic and its reference.

    Returns:
        The data path (None on other ranks), and whether the fit continues the run of the module's last fit.

    Args:
        stage: choices and models of the fit.
        meter: compute meter of the fit.
        settings: resolved settings and choices.
        continuation: record of the module's last fit.
        last: data path of the last fit, on rank 0.
        steps: number of completed steps.

    Raises:
        ConfigurationError: settings, task or model are incompatible with each other or with the last fit's run.
    """
    check_curriculum(stage.task, stage.choices.curriculum)
    # Use a digest, because checkpoints store it too and there may be many prompts.
    prompts = digest([(prompt.prompt_id, prompt.text) for prompt in stage.task.train_prompts()])
    task = stage.task.trained if isinstance(stage.task, TaskWithEvaluationSets) else stage.task
    run_settings = {**settings, "task": (type(task).__name__, prompts, task.identity())}
    resumes = continuation.resumes(run_settings, steps)
    # Copy the state before its parts are replaced.
    state = last.state.state_dict() if resumes and last is not None else {}
    models = stage.models
    if not resumes:
        models.critic = None
        if continuation.failure is None:  # after a failure the run resumes from a checkpoint, with the same reference
            models.reference = None
        # The choices are reused across fits, so drop the running statistics of normalization.
        for choices in (stage.choices, stage.recipe.choices):
            choices.normalization.forget()
    # Every rank has models and loss. Rank 0 also has the data path, which is built last, after all cheap checks.
    context = stage.recipe.context
    models.begin(stage.choices, context.max_prompt_tokens + context.max_new_tokens)
    meter.reference = models.teacher_flops
    path = models.ranks.on_leader(partial(DataPath, stage, meter))
    # Set this last, so that a fit whose setup failed does not change how the module continues.
    continuation.run_settings = run_settings
    if path is None:
        # With one seed for all ranks, dropout would use the same masks on different rows.
        torch.manual_seed((torch.initial_seed() + models.ranks.number) % 2**63)
    elif resumes:
        path.state.load_state_dict(state)
    return path, resumes


def _choices_among(trainer: Any) -> list[DesignChoice]:
    return [callback for callback in trainer.callbacks if isinstance(callback, DesignChoice)]
