"""The records that travel along the data path: Prompt -> Rollout -> Group -> TrainBatch.

Axis sizes in shapes: P groups (prompts), G rollouts of one prompt, R rollouts of a batch, T completion tokens, S prompt
+ completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.prompt import Prompt

# A rollout's per-token lists, and the types that hold them without loss.
_PER_TOKEN = {
    "tokens": np.int32,
    "weight_versions": np.int32,
    "generator_logprobs": np.float64,
    "forced": np.bool_,
}


@dataclass
class Rollout:
    """One completion as the generator sampled it.

    tokens, generator_logprobs, weight_versions, forced: lists of length T. `generator_logprobs` are taken at
    sampling time, `weight_versions[t]` is the number of optimizer steps behind the weights that sampled token
    t, and `forced[t]` marks tokens that were inserted, not sampled (in neither loss nor ratio).
    `finish_reason` is "stop" (end of sequence) or "length" (truncated). `outcome` is what became of its grading:
    "score", "abstain" or "error"; `grade` is its verifier's own reward, before anything is made of it; `parts` and
    `extra` are the numbers and texts that its grader gave beside it, `terms` those of a weighted sum of rewards.
    `staged`: the curriculum has weighed these terms otherwise than the task.
    """

    tokens: list[int]
    generator_logprobs: list[float]
    weight_versions: list[int]
    forced: list[bool]
    finish_reason: str
    reward: float = 0.0
    correct: bool = False
    outcome: str = "score"
    grade: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    staged: bool = False

    @property
    def truncated(self) -> bool:
        """Return True if the completion hit the token limit."""
        return self.finish_reason == "length"


def packed(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Pack rollouts into a few flat tensors: nested lists of millions of numbers take a checkpoint half a minute.

    Per token, of all rollouts one after the other: tokens, weight_versions, generator_logprobs, forced; per rollout:
    lengths, reward, correct, finish_reason, outcome, grade, parts, extra, terms, staged.
    """
    every = {
        name: torch.from_numpy(np.fromiter(chain.from_iterable(getattr(rollout, name) for rollout in rollouts), kind))
        for name, kind in _PER_TOKEN.items()
    }
    return {
        **every,
        "lengths": torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.int64),
        "reward": torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        "correct": torch.tensor([rollout.correct for rollout in rollouts], dtype=torch.bool),
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "outcome": [rollout.outcome for rollout in rollouts],
        "grade": [rollout.grade for rollout in rollouts],
        "parts": [dict(rollout.parts) for rollout in rollouts],
        "extra": [dict(rollout.extra) for rollout in rollouts],
        "terms": [dict(rollout.terms) for rollout in rollouts],
        "staged": [rollout.staged for rollout in rollouts],
    }


def unpacked(state: dict[str, Any]) -> list[Rollout]:
    """Unpack what `packed` has made, to the last bit."""
    lengths = state["lengths"].tolist()
    parts = {name: [part.tolist() for part in torch.split(state[name], lengths)] for name in _PER_TOKEN}
    count = len(lengths)
    # Checkpoints of earlier versions lack the later fields: hence the defaults.
    outcomes, grades = state.get("outcome", ["score"] * count), state.get("grade", [0.0] * count)
    parts_of, extra_of = state.get("parts", [{}] * count), state.get("extra", [{}] * count)
    terms_of, staged = state.get("terms", [{}] * count), state.get("staged", [False] * count)
    return [
        Rollout(
            **{name: of_all[number] for name, of_all in parts.items()},
            finish_reason=reason,
            reward=float(state["reward"][number]),
            correct=bool(state["correct"][number]),
            outcome=outcomes[number],
            grade=grades[number],
            parts=dict(parts_of[number]),
            extra=dict(extra_of[number]),
            terms=dict(terms_of[number]),
            staged=staged[number],
        )
        for number, reason in enumerate(state["finish_reason"])
    ]


@dataclass
class Group:
    """All rollouts of one prompt: admitted together, rewarded and credited together.

    `admission` counts groups in order of admission (from 0) and is unique within a run. `history` holds the pass
    rates of the prompt's groups that were complete when this one was admitted. `rollouts` are those that have a score;
    those without one are `ungraded`, and count as if they had not been sampled.
    """

    admission: int
    prompt: Prompt
    prompt_tokens: list[int]
    rollouts: list[Rollout]
    history: tuple[float, ...] = ()
    ungraded: list[Rollout] = field(default_factory=list)

    @property
    def rewards(self) -> Tensor:
        """Rewards of the scored rollouts, (G,), float64: there are few, so exactness is cheap."""
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)

    @property
    def oldest_version(self) -> int:
        """Return the smallest weight version that sampled any token of the group."""
        return min(min(rollout.weight_versions) for rollout in self.sampled)

    @property
    def sampled(self) -> list[Rollout]:
        """All rollouts of the group, graded or not."""
        return [*self.rollouts, *self.ungraded]

    @property
    def comparable(self) -> bool:
        """Return whether enough rollouts have a score: two where some could not be graded, else one."""
        return len(self.rollouts) >= (2 if self.ungraded else 1)

    @property
    def pass_rate(self) -> float:
        """Share of correct rollouts among those with a score; 0 if none has one."""
        if not self.rollouts:
            return 0.0
        return sum(rollout.correct for rollout in self.rollouts) / len(self.rollouts)

    @property
    def pass_rate_so_far(self) -> float:
        """Mean pass rate of the prompt's groups up to this one: how easy the prompt has been."""
        rates = [*self.history, *([self.pass_rate] if self.rollouts else [])]
        return sum(rates) / max(1, len(rates))


@dataclass(frozen=True)
class Denominators:
    """Divisors of the aggregations, counted over the *global* batch of one optimizer step.

    Passed as an argument everywhere, never recomputed for a rank or micro-batch, so any split of a batch gives
    the same gradient. `prompts`, `samples` and `tokens` are those that carry credit; `sampled` are all rollouts of the
    step, with credit or without, and `max_tokens` is the completion limit.
    """

    prompts: float
    samples: float
    tokens: float
    max_tokens: float
    sampled: float = 0.0


@dataclass(frozen=True)
class PassSize:
    """Upper limits of one forward pass: its rollouts, and its tokens; None for as many as these have.

    Padding counts among the tokens, unless the batch is `packed`.
    """

    rollouts: int
    tokens: int | None = None


@dataclass
class TrainBatch:
    """The batch of one optimizer step (or a micro-batch of it): tensors plus the groups they came from.

    tokens (R, S) int64: prompt then completion, left-aligned, padded at the right. `completion_start` (R,) is
    the prompt's length. The (R, T) tensors are aligned to the completion's first token: generator_logprobs,
    weight_versions, loss_mask (sampled, credited tokens), forced_mask, advantages. `sample_tokens` and
    `group_tokens` (R,) count loss-mask tokens of the rollout and of its whole group. `row` (R,) is the
    rollout's place in the flattened `groups`. `rewards` (R,) are what is trained on, `pass_rates` (R,) those of the
    prompt's groups so far, this one among them. Micro-batches keep `denominators` of the whole batch.

    group (R,) numbers the groups: rollouts of one share a prompt. None where it is not known, and nothing shared.
    `packed`: models are given the rows one behind the other, without their padding (`model.packed`).

    What forward passes before the update add, where a choice asks for it, (R, T): `anchor_logprobs` and `values` of the
    weights before the update, `reference_logprobs` of the frozen reference, `returns` that values are to meet.
    """

    tokens: Tensor
    lengths: Tensor
    completion_start: Tensor
    generator_logprobs: Tensor
    weight_versions: Tensor
    loss_mask: Tensor
    forced_mask: Tensor
    advantages: Tensor
    sample_tokens: Tensor
    group_tokens: Tensor
    row: Tensor
    rewards: Tensor
    pass_rates: Tensor
    denominators: Denominators
    groups: list[Group] = field(default_factory=list)
    anchor_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    group: Tensor | None = None
    packed: bool = False

    @property
    def rollouts(self) -> int:
        """Number R of rollouts that carry credit."""
        return int(self.tokens.shape[0])

    def select(self, rows: Tensor) -> TrainBatch:
        """Return the rollouts `rows` as a smaller batch, cut to their longest member; denominators stay global."""
        values: dict[str, Any] = {}
        width = int(self.lengths[rows].max()) if rows.numel() else 0
        completion = int((self.lengths[rows] - self.completion_start[rows]).max()) if rows.numel() else 0
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                value = value[rows]
                if value.dim() == 2:
                    value = value[:, : width if entry.name == "tokens" else completion]
            values[entry.name] = value
        return TrainBatch(**values)

    def blank(self) -> TrainBatch:
        """Return a batch of one row of one completion token that weighs nothing, its loss and gradient exactly zero."""
        values: dict[str, Any] = {"groups": [], "denominators": self.denominators, "packed": self.packed}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                columns = 2 if entry.name == "tokens" else 1
                values[entry.name] = value.new_zeros((1, columns) if value.dim() == 2 else (1,))
        values["lengths"] += 2
        values["completion_start"] += 1
        # Aggregations divide by them.
        values["sample_tokens"] += 1
        values["group_tokens"] += 1
        values["row"] -= 1
        return TrainBatch(**values)

    def cut(self, size: PassSize) -> Iterator[Tensor]:
        """Yield the row numbers of micro-batches of at most this size.

        Those of a group stand together, so that they can share their prompt's forward pass, and groups of similar
        length, so that little is padding. Packed rows fill a pass one after the other in that order.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        if self.group is not None and self.rollouts:
            longest = self.lengths.new_zeros(int(self.group.max()) + 1)
            longest.scatter_reduce_(0, self.group, self.lengths, "amax")
            order = order[torch.argsort(self.group[order], stable=True)]
            order = order[torch.argsort(longest[self.group[order]], descending=True, stable=True)]
        start, widest, total = 0, 0, 0
        lengths = self.lengths[order].tolist() if size.tokens is not None else [0] * self.rollouts
        for end, length in enumerate(lengths):
            rollouts = end - start + 1
            # Rows of a pass are padded to its longest, so that one costs as much as the others.
            tokens = total + length if self.packed else rollouts * max(widest, length)
            too_many = size.tokens is not None and tokens > size.tokens
            if end > start and (rollouts > size.rollouts or too_many):
                yield order[start:end]
                start, widest, total = end, 0, 0
            widest, total = max(widest, length), total + length
        if self.rollouts:
            yield order[start:]

    def micro_batches(self, size: PassSize) -> Iterator[TrainBatch]:
        """Yield micro-batches of at most this size, in the order of `cut`."""
        for rows in self.cut(size):
            yield self.select(rows)

    def to(self, device: torch.device | str) -> TrainBatch:
        """Return the same batch with all tensors on another device."""
        values: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            values[entry.name] = value.to(device) if isinstance(value, Tensor) else value
        return TrainBatch(**values)


# Tensors (R, T) that a batch gets after its layout and before the update.
BEFORE_UPDATE = ("advantages", "anchor_logprobs", "reference_logprobs", "values", "returns")


def inside(mask: Tensor, table: Tensor) -> Tensor:
    """Return `table` with 0 for whatever stands outside the mask, a NaN or infinity among it. Shapes: both (R, T).

    Arithmetic comes after it: multiplied with a mask of 0 a NaN stays one, in the value as in the gradient.
    """
    return torch.where(mask > 0, table, 0.0)


@dataclass
class Scored:
    """Output of policy and critic for a (micro-)batch: (R, T) each, zero beyond a completion's end.

    `entropies` have a gradient only where a term asks for it; `values` are the critic's, None without one.
    """

    batch: TrainBatch
    trainer_logprobs: Tensor
    entropies: Tensor
    values: Tensor | None = None

    def inside(self) -> Scored:
        """Return the same with 0 outside the loss mask, in what the models say and in what the batch holds of a token.

        Every computation on credited tokens starts from here, so that no value (such as NaN) of a forced or masked
        token can reach it.
        """
        batch, mask = self.batch, self.batch.loss_mask
        tables = {name: getattr(batch, name) for name in ("generator_logprobs", *BEFORE_UPDATE)}
        cleared: dict[str, Any] = {name: inside(mask, table) for name, table in tables.items() if table is not None}
        return Scored(
            replace(batch, **cleared),
            inside(mask, self.trainer_logprobs),
            inside(mask, self.entropies),
            None if self.values is None else inside(mask, self.values),
        )


# A micro-batch with the trainer's log-probabilities and entropies of it, (R, T) each.
Part = tuple[TrainBatch, Tensor, Tensor]


def whole(batch: TrainBatch, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Put log-probabilities and entropies (R, T) of the batch together from its parts; zero in rows without one."""
    logprobs, entropies = torch.zeros_like(batch.generator_logprobs), torch.zeros_like(batch.generator_logprobs)
    order = torch.argsort(batch.row)
    for micro_batch, of_logprobs, of_entropies in parts:
        rows = order[torch.searchsorted(batch.row[order], micro_batch.row)]
        logprobs[rows, : of_logprobs.shape[1]] = of_logprobs
        entropies[rows, : of_entropies.shape[1]] = of_entropies
    return logprobs, entropies
