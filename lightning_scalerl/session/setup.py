"""Setup of a stage, top to bottom: the hooks that Lightning calls before a fit or a validation.

The inputs are the module's recipe, and a Trainer with callbacks and data module. Afterwards the choices are resolved,
the models are on their device, and the module can generate, train and evaluate. Every configuration error is raised
here, before any compute.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.callbacks.checkpoint_file import read_either
from lightning_scalerl.callbacks.evaluate import evaluation_of
from lightning_scalerl.callbacks.trainer import STAGES, check_trainer, count_from, prepare_trainer, without_anonymous
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices, by_axis
from lightning_scalerl.distributed.meeting import meet
from lightning_scalerl.distributed.ranks import Follower, Ranks
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.semantics import resolved_choices
from lightning_scalerl.session.data_path import DataPath, build_data_path
from lightning_scalerl.session.memory import check_memory
from lightning_scalerl.session.models import make_critic
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.session.placement import (
    check_partners,
    made_on,
    place,
    prepare_adapter,
    read_whole_model,
    recompute_activations,
)
from lightning_scalerl.session.sampling import Inputs, Sampling
from lightning_scalerl.task.base import check_curriculum
from lightning_scalerl.task.beside import TaskWithSets
from lightning_scalerl.update.health import HealthWatch
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from lightning_scalerl.update.terms import terms


def supplied_choices(module: Parts) -> Sequence[Callback]:
    """Check and prepare the Trainer; return the recipe's choices for axes that no callback covers.

    Repeated calls return the same instances.
    """
    trainer, recipe = module.trainer, module.recipe
    evaluation = evaluation_of(trainer)
    if evaluation is not None:
        evaluation.follow(recipe.evaluation)
        evaluation.check_context(recipe.context.max_new_tokens)
        trainer.datamodule.evaluate_beside(evaluation.tasks)  # type: ignore[attr-defined]
    check_trainer(trainer)
    without_anonymous(trainer)
    meet(trainer)
    read_either(trainer)
    if trainer.state.fn == "fit":
        prepare_trainer(trainer)
    # Trainer.validate after a fit uses that fit's choices, regardless of this Trainer's callbacks.
    after_fit = module.continuation.meaning is not None and trainer.state.fn != "fit"
    base = module.choices if after_fit else recipe.choices
    own = {*map(id, recipe.choices), *map(id, base)}
    claimed = by_axis(choice for choice in _choices_among(trainer) if id(choice) not in own)
    return [choice for axis, choice in base.items() if axis not in claimed]


def build_optimizer(module: Parts) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for policy and critic, each with its learning rate."""
    models = [module.policy] if module.critic is None else [module.policy, module.critic]
    rates = zip(models, learning_rates(module), strict=True)
    groups = [(list(model.parameters()), rate) for model, rate in rates]
    if module.policy.adapter is not None:
        groups = [([each for each in parameters if each.requires_grad], rate) for parameters, rate in groups]
    return module.recipe.optimizer.build([{"params": parameters, "lr": rate} for parameters, rate in groups])


def learning_rates(module: Parts) -> list[float]:
    """Return the learning rates of the policy and of the critic (if any), before the schedule's factor."""
    rate = module.recipe.optimizer.lr
    own = getattr(module.choices.critic, "lr", None)
    return [rate] if module.critic is None else [rate, rate if own is None else own]


def set_learning_rates(module: Parts) -> None:
    """Set the optimizer's learning rates for the next step, by the recipe's schedule."""
    factor = module.recipe.schedule.factor(module.completed_steps)
    for group, rate in zip(module.optimizers().param_groups, learning_rates(module), strict=True):
        group["lr"] = rate * factor


def set_up(module: Parts, stage: str) -> None:
    """Resolve the choices, place the models, and build what the stage needs.

    Raises:
        ConfigurationError: choices, settings, task or model are incompatible, or the stage is not supported.
    """
    if stage in STAGES:
        raise ConfigurationError(STAGES[stage])
    trainer, recipe = module.trainer, module.recipe
    # Save the handler here: Lightning installs its own after this hook.
    module.sigterm_handler = signal.getsignal(signal.SIGTERM)
    choices = Choices.of(_choices_among(trainer))
    recipe.check(choices)
    module.choices = choices
    module.policy.precision = choices.precision
    read_whole_model(module)
    prepare_adapter(module)
    # Only avoids a warning of Lightning; `fit.begin_training` sets the actual mode.
    module.policy.train()
    if module.critic is not None:
        module.critic.train()
    resolved = {**resolved_choices(recipe, choices), **module.arguments, "seed": module.seed}
    module.save_hyperparameters(resolved)
    check_partners(module)
    devices = trainer.world_size + recipe.driver.engine_devices
    module.meter = ComputeMeter(FlopModel.of(module.policy.model), devices=devices)
    module.ranks = Ranks.of(trainer, module.trained.answer)
    recompute_activations(module)
    module.memory = check_memory(module) if stage == "fit" else ""
    place(module)
    evaluation = evaluation_of(trainer)
    inputs = Inputs(
        recipe=recipe,
        choices=choices,
        task=module.task,
        seed=module.seed,
        tokenizer=module.tokenizer,
        stop_tokens=module.stop_tokens,
        rows=int(module.policy.model.get_input_embeddings().weight.shape[0]),  # type: ignore[operator]
        trained=module.trained,
        device=trainer.strategy.root_device,
        ranks=trainer.num_devices,
        held_out=None if evaluation is None else evaluation.prompts,
    )
    if stage == "predict":
        inputs = replace(inputs, task=trainer.datamodule.predicted, held_out=None)  # type: ignore[attr-defined]
    if stage != "fit":
        # Evaluation needs only the step from the stream, so the state that a fit left stays for the next one.
        sampling = module.ranks.on_leader(partial(Sampling, inputs, training=False))
        if sampling is not None:
            module.sampling = sampling
        return
    _set_up_fit(module, inputs, resolved)


def _set_up_fit(module: Parts, inputs: Inputs, resolved: dict[str, Any]) -> None:
    """Build the parts of a fit other than its policy, and continue the module's last fit if it is the same run."""
    check_curriculum(inputs.task, inputs.choices.curriculum)
    prompts = [(prompt.prompt_id, prompt.text) for prompt in inputs.task.train_prompts()]
    task = inputs.task.trained if isinstance(inputs.task, TaskWithSets) else inputs.task
    meaning = {**resolved, "task": (type(task).__name__, prompts, task.identity())}
    steps = module.completed_steps
    goes_on = module.continuation.goes_on(meaning, steps)
    module.continuation.generator = None
    # Copy the state before its parts are replaced.
    state = module.data_path.state.state_dict() if goes_on and module.data_path is not None else {}
    if not goes_on:
        _begin_anew(module)
    # Every rank has models and loss. Rank 0 also has the data path, which is built last, after all cheap checks.
    choices = inputs.choices
    device = made_on(module)
    if choices.critic.has_values and module.critic is None:
        module.critic = make_critic(module.policy, choices, device)
    if choices.kl.where:
        module.reference_model.begin_with(module.policy, choices, device)
    module.terms = terms(choices)
    _take(module, module.ranks.on_leader(partial(build_data_path, inputs, module.meter)))
    # Set this last, so that a fit whose setup failed does not change how the module continues.
    module.continuation.meaning = meaning
    if not goes_on:
        module.optimizer = None
        return
    if module.data_path is not None:
        module.data_path.state.load_state_dict(state)
    module.stream.completed_steps = steps
    count_from(module.trainer, steps)


def _begin_anew(module: Parts) -> None:
    """Discard the state that an earlier fit of this module left, on all ranks."""
    module.critic = None
    if module.continuation.failure is None:  # else the run resumes from a checkpoint, and keeps its reference
        module.reference_model.forget()
    # The choices are reused across fits, so drop the running statistics of normalization.
    for row in (module.choices, module.recipe.choices):
        row.normalization.forget()
    module.loss_scale = LossScale(acts=module.choices.precision.policy == "fp16")
    module.skipped = SkippedUpdates()
    module.health = HealthWatch(module.recipe.health, module.recipe.reward.incorrect)


def _take(module: Parts, path: DataPath | None) -> None:
    """Set the module's attributes from its data path; ranks that only train have none."""
    module.data_path = path
    if path is None:
        module.stream = Follower()  # type: ignore[assignment]  # it only counts steps
        # With one seed for all ranks, dropout would use the same masks on different rows.
        torch.manual_seed((torch.initial_seed() + module.ranks.number) % 2**63)
        return
    module.sampling, module.prompts, module.stream = path.sampling, path.prompts, path.stream
    module.generator, module.driver = path.generator, path.driver
    module.mechanism, module.alarm = path.mechanism, path.alarm


def _choices_among(trainer: Any) -> list[DesignChoice]:
    """Return the design choices among a Trainer's callbacks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, DesignChoice)]
