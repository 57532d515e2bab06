"""State of a run's optimizer steps: optimizer, learning rates, loss scale, skipped updates, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.models import Models
from lightning_scalerl.update.health import HealthWatch
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from lightning_scalerl.update.muon import hidden_matrices


class Updates:
    """State of the optimizer steps of one run. The optimizer is built for the run's first fit.

    Args:
        recipe: the run's recipe; its optimizer, schedule and health bounds are used.
        choices: the run's choices; the critic's learning rate and the policy's precision are used.
    """

    def __init__(self, recipe: Recipe, choices: Choices) -> None:
        self._recipe = recipe
        self.loss_scale = LossScale(acts=choices.precision.policy == "fp16")
        self.skipped = SkippedUpdates()
        self.health = HealthWatch(recipe.health, recipe.reward.incorrect)
        rate, critic_rate = recipe.optimizer.lr, getattr(choices.critic, "lr", None)
        # Rates of the policy and of the critic (if any), before the schedule's factor.
        self._rates = [rate, rate if critic_rate is None else critic_rate] if choices.critic.has_values else [rate]
        self._optimizer: torch.optim.Optimizer | None = None
        self._recipe_settings: list[dict[str, Any]] = []  # settings of each parameter group in the recipe
        self._is_branch = False

    def optimizer(self, models: Models) -> torch.optim.Optimizer:
        """Return the optimizer of policy and critic, each with its learning rate; later calls return the same one."""
        if self._optimizer is None:
            roots = [models.policy] if models.critic is None else [models.policy, models.critic]
            adapted = models.policy.adapter is not None
            groups = [
                {"params": [each for each in root.parameters() if each.requires_grad or not adapted], "lr": rate}
                for root, rate in zip(roots, self._rates, strict=True)
            ]
            hidden = {id(each) for root in roots for each in hidden_matrices(root)}
            self._optimizer = self._recipe.optimizer.build(groups, hidden)
            # An optimizer may split the groups, so read the learning rates from its groups.
            self._rates = [group["lr"] for group in self._groups]
            self._recipe_settings = [{key: group[key] for key in group if key != "params"} for group in self._groups]
        return self._optimizer

    def check_configured(self, module: Any, trainer: Any) -> None:
        """Check the result of `configure_optimizers`, a method that a subclass of the module may override.

        Raises:
            ConfigurationError: it is not the recipe's optimizer, or there is a scheduler as well.
        """
        returned, schedulers = trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]
        field = f"configure_optimizers: {type(module).__name__} returns"
        if [id(each) for each in returned] != [id(self._optimizer)]:
            raise ConfigurationError(
                f"{field} {_types(returned)}, and only the recipe's own optimizer can train; leave the method out and "
                'choose an optimizer with overrides=["optimizer=..."]'
            )
        if schedulers:
            raise ConfigurationError(
                f"{field} a scheduler, {_types(schedulers)}, and the recipe's schedule sets the rate of every step; "
                'return the optimizer alone and choose a schedule with overrides=["schedule=..."]'
            )

    def branch(self, checkpoint: dict[str, Any], optimizer: str) -> None:
        """Prepare the start of a branch from its parent's checkpoint, before the optimizer's state is loaded from it.

        Args:
            checkpoint: the parent's checkpoint, from which the optimizer's state is dropped if it is not kept.
            optimizer: "kept" to continue with the parent's optimizer state, "fresh" to start without it.
        """
        if optimizer == "fresh":
            checkpoint["optimizer_states"] = []
        self._is_branch = True

    def begin(self) -> None:
        """In a branch, set the recipe's optimizer settings again, once the optimizer's state is loaded.

        The loaded state also contains the parent's settings (betas, weight decay), which the branch may change.
        """
        if self._is_branch:
            for group, settings in zip(self._groups, self._recipe_settings, strict=True):
                group.update(settings)
        self._is_branch = False

    @property
    def learning_rate(self) -> float:
        """Learning rate of the policy in the current step."""
        return float(self._groups[0]["lr"])

    def set_learning_rates(self, completed_steps: int) -> None:
        """Set the optimizer's learning rates for the next step, by the recipe's schedule."""
        factor = self._recipe.schedule.factor(completed_steps)
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * factor

    @property
    def _groups(self) -> list[dict[str, Any]]:
        assert self._optimizer is not None
        return self._optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, skipped updates and health, for a checkpoint; Lightning saves the optimizer."""
        return {
            "loss_scale": self.loss_scale.state_dict(),
            "skipped": self.skipped.state_dict(),
            "health": self.health.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.skipped.load_state_dict(state["skipped"])
        self.health.load_state_dict(state["health"])


def _types(objects: Sequence[Any]) -> str:
    return ", ".join(type(each).__name__ for each in objects)
