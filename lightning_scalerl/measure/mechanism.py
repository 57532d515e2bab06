"""Mechanism counters: does a variant's choice change anything?

For every axis on which a run departs from its recipe, the share of optimizer steps in which the departure
acted. For credit and loss: the per-token loss weights differ by more than 1e-3 (relative, in norm) from those
of the recipe's own choice on the same batch. For the others a named event:

- precision: the log-probabilities differ from those in the recipe's precision.
- async_mode: the two modes' rules decide differently about the next admission or about publishing these weights;
  or, if they differ in the KV cache only, weights changed within a rollout of the batch.
- length_control: one of the two controls acted on a rollout of the batch, or would have.
- allocation: a group of the batch has another size.
- resampling: a prompt is retired that the other would not have retired, or one is in the batch that it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollout import TrainBatch
from lightning_scalerl.stream.credit import assemble, loss_weights
from lightning_scalerl.stream.rollout_stream import RolloutStream

CREDIT_AXES = ("truncated", "filter", "advantage", "normalization", "correction", "loss", "aggregation")
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
        stream: where the batches come from.
        policy: what is trained.
        decode: tokens to text, special tokens included.
    """

    def __init__(
        self,
        choices: Mapping[str, Any],
        recipe_choices: Mapping[str, DesignChoice],
        stream: RolloutStream,
        policy: Policy,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._choices = choices
        self._recipe: Mapping[str, Any] = recipe_choices
        self._stream = stream
        self._policy = policy
        self._decode = decode
        self.axes = [axis for axis, choice in choices.items() if not choice.same_as(recipe_choices[axis])]
        self._acted = dict.fromkeys(self.axes, 0)
        self._steps = 0

    def observe(self, batch: TrainBatch, trainer_logprobs: Tensor) -> None:
        """Look at one step, before its optimizer step. trainer_logprobs (R, T): of this batch."""
        self._steps += 1
        for axis in self.axes:
            if axis in CREDIT_AXES:
                acted = self._credit_differs(axis, batch, trainer_logprobs)
            else:
                acted = getattr(self, f"_{axis}_differs")(batch)
            self._acted[axis] += acted

    def metrics(self) -> dict[str, float]:
        """`mechanism/<axis>`: share of steps so far."""
        return {f"mechanism/{axis}": self._acted[axis] / max(1, self._steps) for axis in self.axes}

    def _credit_differs(self, axis: str, batch: TrainBatch, trainer_logprobs: Tensor) -> bool:
        other = {**self._choices, axis: self._recipe[axis]}
        twin = assemble(batch.groups, other, self._stream.max_new_tokens).to(trainer_logprobs.device)
        logprobs = twin.generator_logprobs.clone()
        # Rollouts that only the recipe's choice would have kept have no trainer log-probability; what the generator
        # recorded stands in, a ratio of 1: exact enough to see that they would have weighed something.
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
    def _precision_differs(self, batch: TrainBatch) -> bool:
        if batch.rollouts == 0:
            return False
        probe = batch.select(torch.arange(min(PROBE_ROLLOUTS, batch.rollouts), device=batch.tokens.device))
        ours, _ = self._policy(probe)
        theirs, _ = self._policy(probe, precision=self._recipe["precision"])
        return bool((ours - theirs).abs().max() > LOGPROB_THRESHOLD)

    def _async_mode_differs(self, batch: TrainBatch) -> bool:
        ours, theirs, stream = self._choices["async_mode"], self._recipe["async_mode"], self._stream
        next_admission = (stream.admitted, stream.completed_steps, stream.groups_per_step)
        if ours.may_admit(*next_admission) != theirs.may_admit(*next_admission):
            return True
        version = stream.completed_steps + 1
        if ours.publishes(version) != theirs.publishes(version):
            return True
        swapped = any(len(set(rollout.weight_versions)) > 1 for group in batch.groups for rollout in group.rollouts)
        return swapped and ours.recompute_kv != theirs.recompute_kv

    def _length_control_differs(self, batch: TrainBatch) -> bool:
        for control in (self._choices["length_control"], self._recipe["length_control"]):
            if any(control.acts_on(rollout, self._decode) for group in batch.groups for rollout in group.rollouts):
                return True
        return False

    def _resampling_differs(self, batch: TrainBatch) -> bool:
        ours, theirs, prompts = self._choices["resampling"], self._recipe["resampling"], self._stream.prompts
        if any(ours.retires(rates) and not theirs.retires(rates) for rates in prompts.histories()):
            return True
        return any(theirs.retires(group.history) and not ours.retires(group.history) for group in batch.groups)

    def _allocation_differs(self, batch: TrainBatch) -> bool:
        theirs, stream = self._recipe["allocation"], self._stream
        return any(
            len(group.rollouts) != theirs.completions(stream.completions, group.history) for group in batch.groups
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts."""
        return {"acted": dict(self._acted), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self._acted = dict(state["acted"])
        self._steps = state["steps"]
