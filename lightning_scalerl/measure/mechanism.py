"""Mechanism counters: the share of optimizer steps in which a variant's choice changed anything.

There is one counter per axis on which a run differs from its recipe. `DesignChoice.differs` of the axis decides whether
the run's choice had an effect in a step. Axes that change advantages or the loss compare, on the same batch, the
tokens' weights in the update (`update.terms.loss_weights`) under both choices. A relative difference in norm above 1e-3
counts as an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.credit import assemble, update_moments
from lightning_scalerl.stream.random_streams import SELECTION_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.update.terms import loss_weights, with_selection
from lightning_scalerl.update.token_credit import token_advantages
from lightning_scalerl.update.trained import TrainedPolicy

EFFECT_THRESHOLD = 1e-3
# Threshold with `rounding`: far above the relative error of FP32, and far below that of BF16 (1e-3 in norm) and FP16
# (2e-4).
ROUNDING = 1e-5
# Rollouts on which two precisions are compared at each step: about a hundredth of a usual batch.
PROBE_ROLLOUTS = 8


class MechanismCounters:
    """Counts, for each axis on which the run differs from its recipe, the steps in which the difference had an effect.

    Args:
        choices: the run's choices.
        recipe_choices: the choices of its recipe.
        stream: the stream that the batches come from.
        trained: the policy in training.
        decode: function from token ids to text, including special tokens.
    """

    def __init__(
        self,
        choices: Choices,
        recipe_choices: Choices,
        stream: RolloutStream,
        trained: TrainedPolicy,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._choices = choices
        self._stream = stream
        self._trained = trained
        self._decode = decode
        self._departures = choice_differences(choices, recipe_choices)
        self._steps_with_effect = dict.fromkeys(self.axes, 0)
        self._steps = 0

    @property
    def axes(self) -> list[str]:
        """Axes on which the run differs from its recipe."""
        return [ours.axis for ours, _ in self._departures]

    def observe(self, batch: TrainBatch, trainer_logprobs: Tensor, first: Tensor | None = None) -> None:
        """Count one step. Call it before the last update on the batch, when ratios are furthest from 1.

        Args:
            batch: the batch of this step.
            trainer_logprobs: (R, T), from the last pass over the batch.
            first: (R, T), from the first pass over the batch; None if there was only one pass.
        """
        self._steps += 1
        anchor = trainer_logprobs if first is None else first
        step = _Step(
            batch=batch,
            trainer_logprobs=trainer_logprobs,
            first_logprobs=anchor,
            choices=self._choices,
            stream=self._stream,
            trained=self._trained,
            decode=self._decode,
            admitted=self._stream.admitted,
            completed_steps=self._stream.completed_steps,
            groups_per_step=self._stream.groups_per_step,
            completions=self._stream.completions,
            dropped=self._stream.dropped_for_batch,
            reward_sums=self._stream.reward_sums,
        )
        for ours, theirs in self._departures:
            self._steps_with_effect[ours.axis] += ours.differs(theirs, step)

    def metrics(self) -> dict[str, float]:
        """Return `mechanism/<axis>`, the share of steps so far in which the difference had an effect."""
        return {f"mechanism/{axis}": self._steps_with_effect[axis] / max(1, self._steps) for axis in self.axes}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the state of the recipe's choices, which is updated in each step."""
        remembered = {theirs.axis: state for _, theirs in self._departures if (state := theirs.state_dict())}
        return {"acted": dict(self._steps_with_effect), "steps": self._steps, "remembered": remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts and the state of the recipe's choices."""
        self._steps_with_effect = dict(state["acted"])
        self._steps = state["steps"]
        for _, theirs in self._departures:
            if theirs.axis in state.get("remembered", {}):
                theirs.load_state_dict(state["remembered"][theirs.axis])


def choice_differences(choices: Choices, recipe_choices: Choices) -> list[tuple[DesignChoice, DesignChoice]]:
    """Return (the run's choice, the recipe's choice) for every axis on which they differ.

    If only one of the two contains a user-defined axis, the other has that axis's neutral choice.
    """
    pairs = []
    for axis in [axis for axis, _ in choices.items()] + sorted(
        recipe_choices.user_axes.keys() - choices.user_axes.keys()
    ):
        ours, theirs = choices.on(axis), recipe_choices.on(axis)
        ours, theirs = ours or neutral_of(theirs), theirs or neutral_of(ours)
        if not ours.same_as(theirs):
            pairs.append((ours, theirs))
    return pairs


def neutral_of(choice: DesignChoice | None) -> DesignChoice:
    """Return the neutral choice on an axis defined by the user; `choices.by_axis` ensures that it exists."""
    neutral = None if choice is None else choice.neutral_choice()
    assert neutral is not None
    return neutral


@dataclass
class _Step:
    batch: TrainBatch
    trainer_logprobs: Tensor
    first_logprobs: Tensor
    choices: Choices
    stream: RolloutStream
    trained: TrainedPolicy
    decode: Callable[[list[int]], str]
    admitted: int
    completed_steps: int
    groups_per_step: int
    completions: int
    dropped: int
    reward_sums: Sequence[Sequence[str]]

    def histories(self) -> Sequence[Sequence[float]]:
        return list(self.stream.prompts.histories())

    def drawn_histories(self) -> Sequence[Sequence[float]]:
        return [*(group.history for group in self.batch.groups), *self.stream.waiting_histories]

    def probe_logprobs(self, precision: Precision) -> Tensor:
        if self.batch.rollouts == 0:
            return torch.zeros(0, 0)
        rows = torch.arange(min(PROBE_ROLLOUTS, self.batch.rollouts), device=self.batch.tokens.device)
        return self.trained.logprobs(self.batch.select(rows), precision)

    def loss_weights_differ(self, theirs: DesignChoice, rounding: bool = False) -> bool:
        other = self.choices.replacing(theirs)
        # On the axis `normalization`, the run does not use the recipe's choice; only this comparison does. So the
        # running moments of that choice, if it has any, are updated here.
        updates_moments = theirs is other.normalization
        if updates_moments and not other.advantage.after_forward:
            update_moments(self.batch.groups, other)
        if not self._has_inputs(other):
            # The recipe's choice needs a model that this run does not have, so the two choices certainly differ.
            return self.batch.rollouts > 0
        # `twin` is a batch of the same groups, whose advantages are computed with the recipe's choice on this axis.
        device = self.trainer_logprobs.device
        twin = assemble(self.batch.groups, other, self.stream.max_new_tokens).to(device)
        logprobs = self._aligned(twin, self.trainer_logprobs.detach(), twin.generator_logprobs)
        # Rollouts that only the recipe's choice keeps were never scored by a model. The generator's log-probabilities
        # replace the missing ones (a ratio of 1, a value of 0): accurate enough to show that these rollouts would
        # change the update. The anchor is the policy before the first update, whose log-probabilities the first pass
        # has computed.
        twin.anchor_logprobs = self._aligned(twin, self.first_logprobs.detach(), twin.generator_logprobs)
        twin.reference_logprobs = self._aligned(twin, self.batch.reference_logprobs, twin.generator_logprobs)
        for name in ("values", "divergences"):
            if (table := getattr(self.batch, name)) is not None:
                setattr(twin, name, self._aligned(twin, table, torch.zeros_like(twin.generator_logprobs)))
        twin = token_advantages(twin, other, lambda numbers: numbers, update_statistics=updates_moments)
        twin = with_selection(twin, other, (self.stream.seed, SELECTION_STREAM, self.completed_steps))
        ours = loss_weights(self.batch, self.trainer_logprobs, self.choices)
        their_weights = loss_weights(twin, logprobs, other)
        return bool((ours - their_weights).norm() > (ROUNDING if rounding else EFFECT_THRESHOLD) * their_weights.norm())

    def _has_inputs(self, other: Choices) -> bool:
        """Return whether the batch has the outputs of critic and reference that these choices need."""
        ours, theirs = self.choices.kl, other.kl
        references = [each.reference if each.where else None for each in (ours, theirs)]
        if theirs.where and (references[0] != references[1] or ours.reads_vocabulary != theirs.reads_vocabulary):
            return False
        reference_scores = self.batch.divergences if theirs.reads_vocabulary else self.batch.reference_logprobs
        inputs = (
            (other.advantage.after_forward, self.batch.values),
            (theirs.where and not other.kl_in_update, reference_scores),
        )
        return all(tensor is not None for needed, tensor in inputs if needed)

    def _aligned(self, twin: TrainBatch, ours: Tensor | None, default: Tensor) -> Tensor:
        """Return the rows of `ours` (R, T) in the twin's order; rows that only the twin has come from `default`."""
        if ours is None:
            return default
        aligned = default.clone()
        number_of_row = {int(row): number for number, row in enumerate(self.batch.row)}
        shared = [(number, number_of_row[int(row)]) for number, row in enumerate(twin.row) if int(row) in number_of_row]
        if shared:
            target, source = (torch.tensor(column, device=aligned.device) for column in zip(*shared, strict=True))
            width = min(aligned.shape[1], ours.shape[1])
            aligned[target, :width] = ours[source, :width]
        return aligned
