"""Mechanism counters: does a variant's choice change anything?

For every axis on which a run departs from its recipe, the share of optimizer steps in which the departure
acted. For credit and loss: the per-token loss weights differ by more than 1e-3 (relative, in norm) from those
of the recipe's own choice on the same batch. For precision: the log-probabilities differ from those in the
recipe's precision. For the async mode: the batch is not as stale as the recipe's mode would have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.credit import assemble, loss_weights
from lightning_scalerl.policy import Policy
from lightning_scalerl.rollout import TrainBatch

CREDIT_AXES = ("filter", "advantage", "normalization", "correction", "loss", "aggregation")
THRESHOLD = 1e-3
# Far above the rounding of an FP32 log-probability, far below what a 16-bit type does to one.
LOGPROB_THRESHOLD = 1e-4
# Rollouts on which two precisions are compared each step: a hundredth of a usual batch.
PROBE_ROLLOUTS = 8


class MechanismCounters:
    """Counts, for each axis that departs from the recipe, the steps in which it acted.

    Args:
        choices: the run's, by axis.
        recipe_choices: the recipe's own, by axis.
        max_new_tokens: completion limit.
    """

    def __init__(
        self, choices: Mapping[str, Any], recipe_choices: Mapping[str, DesignChoice], max_new_tokens: int
    ) -> None:
        self._choices = choices
        self._recipe = recipe_choices
        self._max_new_tokens = max_new_tokens
        self.axes = [axis for axis, choice in choices.items() if not choice.same_as(recipe_choices[axis])]
        self._acted = dict.fromkeys(self.axes, 0)
        self._steps = 0

    def observe(self, batch: TrainBatch, trainer_logprobs: Tensor, policy: Policy, completed_steps: int) -> None:
        """Look at one step, before its optimizer step. trainer_logprobs (R, T): of this batch."""
        self._steps += 1
        for axis in self.axes:
            if axis in CREDIT_AXES:
                acted = self._credit_differs(axis, batch, trainer_logprobs)
            elif axis == "precision":
                acted = self._precision_differs(batch, policy)
            else:
                acted = self._staleness_differs(batch, completed_steps)
            self._acted[axis] += acted

    def metrics(self) -> dict[str, float]:
        """`mechanism/<axis>`: share of steps so far."""
        return {f"mechanism/{axis}": self._acted[axis] / max(1, self._steps) for axis in self.axes}

    def _credit_differs(self, axis: str, batch: TrainBatch, trainer_logprobs: Tensor) -> bool:
        other = {**self._choices, axis: self._recipe[axis]}
        twin = assemble(batch.groups, other, self._max_new_tokens).to(trainer_logprobs.device)
        logprobs = twin.generator_logprobs.clone()
        # Rollouts that only the recipe's choice would have kept have no trainer log-probability; what the
        # generator recorded stands in. Both keep what carries credit, so the stand-in has no weight.
        place = {int(row): number for number, row in enumerate(batch.row)}
        shared = [(number, place[int(row)]) for number, row in enumerate(twin.row) if int(row) in place]
        if shared:
            target, source = (torch.tensor(column, device=logprobs.device) for column in zip(*shared, strict=True))
            width = min(logprobs.shape[1], trainer_logprobs.shape[1])
            logprobs[target, :width] = trainer_logprobs.detach()[source, :width]
        ours = loss_weights(batch, trainer_logprobs, self._choices)
        theirs = loss_weights(twin, logprobs, other)
        return bool((ours - theirs).norm() > THRESHOLD * theirs.norm())

    @torch.no_grad()
    def _precision_differs(self, batch: TrainBatch, policy: Policy) -> bool:
        if batch.rollouts == 0:
            return False
        probe = batch.select(torch.arange(min(PROBE_ROLLOUTS, batch.rollouts), device=batch.tokens.device))
        ours, _ = policy(probe)
        theirs, _ = policy(probe, precision=self._recipe["precision"])
        return bool((ours - theirs).abs().max() > LOGPROB_THRESHOLD)

    def _staleness_differs(self, batch: TrainBatch, completed_steps: int) -> bool:
        stale = [completed_steps - group.oldest_version for group in batch.groups]
        expected = self._recipe["async_mode"].scheduled_staleness(completed_steps)  # type: ignore[attr-defined]
        return any(staleness != expected for staleness in stale)

    def state_dict(self) -> dict[str, Any]:
        """Counts."""
        return {"acted": dict(self._acted), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self._acted = dict(state["acted"])
        self._steps = state["steps"]
