"""Data classes from prompt to training batch: Prompt -> Rollout -> Group -> TrainBatch.

Sizes in shapes: P groups (prompts) per batch, G rollouts per prompt, R rollouts per batch, T completion tokens, S
prompt + completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.rollouts.prompt import Prompt

# A rollout's per-token lists, and the NumPy types that store them exactly.
_PER_TOKEN = {
    "tokens": np.int32,
    "weight_versions": np.int32,
    "generator_logprobs": np.float64,
    "sources": np.int8,
}


class Source(IntEnum):
    """Origin of a rollout's token: the model, a forced phrase, or an environment's answer."""

    SAMPLED = 0
    FORCED = 1
    ENVIRONMENT = 2


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a rollout, all from one source and one version of the weights."""

    source: Source
    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Conversation:
    """Record of a rollout's conversation with an environment.

    Attributes:
        starts: index of the first token of each of the model's turns in the completion.
        rewards: the environment's reward of each turn; the last entry includes the final reward.
        rewarded: whether the environment has given any reward. With an environment in text form (`environment.forms`)
            also True if a limit ended the conversation before any step gave a reward; the reward is then 0.
        scale: factor from `rewards` to the training reward; 0 if a verifier grades the rollout.
        calls: number of tool calls, malformed ones included.
        malformed: number of calls that could not be read.
        raised: number of calls whose tool raised an exception.
        cut: number of characters removed from observations that were too long.
        failed: why the environment failed; "" if it did not.
        environment: name of the environment, if there are several.
        info: numbers that the environment reported last, by name.
    """

    starts: tuple[int, ...]
    rewards: tuple[float, ...]
    rewarded: bool = False
    scale: float = 1.0
    calls: int = 0
    malformed: int = 0
    raised: int = 0
    cut: int = 0
    failed: str = ""
    environment: str = ""
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Number of turns of the model."""
        return len(self.starts)


@dataclass
class Rollout:
    """One completion as the generator sampled it.

    Attributes:
        tokens: token ids, a list of length T, as are the next three attributes.
        generator_logprobs: log-probabilities at sampling time.
        weight_versions: for each token, the version (number of optimizer steps) of the weights that sampled it; for an
            inserted token, the version in use when it was inserted.
        sources: for each token, its `Source`. Only sampled tokens enter loss and ratio.
        finish_reason: "stop" (end of sequence) or "length" (truncated).
        reward: the reward that is trained on.
        correct: whether the completion passes.
        outcome: result of grading: "score", "abstain" or "error".
        grade: the verifier's reward, before length control and other adjustments.
        parts: numbers that the grader reported along with the grade.
        extra: texts that the grader reported along with the grade.
        terms: the weighted terms, if the grade is a sum of several rewards.
        staged: whether a curriculum has weighted these terms differently from the task.
        conversation: record of the conversation with an environment; None without an environment.
        completed_steps: number of completed optimizer steps when the rollout finished, as its grader received it; None
            before the rollout has finished.
    """

    tokens: list[int]
    generator_logprobs: list[float]
    weight_versions: list[int]
    sources: list[int]
    finish_reason: str
    reward: float = 0.0
    correct: bool = False
    outcome: str = "score"
    grade: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    staged: bool = False
    conversation: Conversation | None = None
    completed_steps: int | None = None

    @property
    def truncated(self) -> bool:
        """True if the completion hit the token limit."""
        return self.finish_reason == "length"

    @property
    def length(self) -> int:
        """Number of tokens of the completion, without those from an environment. Length control uses this number."""
        return len(self.tokens) - self.sources.count(Source.ENVIRONMENT)

    @property
    def forced(self) -> list[bool]:
        """For each token, whether it belongs to a forced phrase."""
        return [source == Source.FORCED for source in self.sources]

    @property
    def inserted(self) -> list[bool]:
        """For each token, whether it was inserted instead of sampled."""
        return [source != Source.SAMPLED for source in self.sources]

    def sampled_last(self, most: int) -> list[int]:
        """Return the tokens sampled since the last inserted token, at most the last `most` of them."""
        start = max(0, len(self.tokens) - most)
        for index in range(len(self.tokens) - 1, start - 1, -1):
            if self.sources[index] != Source.SAMPLED:
                return self.tokens[index + 1 :]
        return self.tokens[start:]

    @property
    def source_spans(self) -> list[tuple[Source, int, int]]:
        """(source, start, end) of each maximal run of tokens with the same source, in order."""
        runs, start = [], 0
        for source, tokens in groupby(self.sources):
            end = start + sum(1 for _ in tokens)
            runs.append((Source(source), start, end))
            start = end
        return runs

    @property
    def spans(self) -> list[Span]:
        """The maximal runs of tokens with the same source and weight version, in order."""
        spans, start = [], 0
        for (source, version), tokens in groupby(zip(self.sources, self.weight_versions, strict=True)):
            end = start + sum(1 for _ in tokens)
            spans.append(Span(Source(source), version, start, end))
            start = end
        return spans


def packed(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Pack rollouts into a few flat tensors.

    Per-token fields are concatenated over all rollouts: tokens, weight_versions, generator_logprobs, forced, and
    environment if any token is an environment's. Fields with one entry per rollout: lengths, reward, correct,
    finish_reason, outcome, grade, parts, extra, terms, staged, completed_steps, and conversation if any rollout
    has one.
    """
    # Use flat tensors: saving nested lists of millions of numbers takes half a minute.
    per_token = {
        name: torch.from_numpy(np.fromiter(chain.from_iterable(getattr(rollout, name) for rollout in rollouts), kind))
        for name, kind in _PER_TOKEN.items()
    }
    # Checkpoints of earlier versions contain two masks instead of the sources, so store masks. The second is stored
    # only if an environment gave tokens.
    sources = per_token.pop("sources")
    per_token["forced"] = sources == Source.FORCED
    if (environment := sources == Source.ENVIRONMENT).any():
        per_token["environment"] = environment
    conversations = [rollout.conversation and asdict(rollout.conversation) for rollout in rollouts]
    return {
        **per_token,
        **({"conversation": conversations} if any(conversations) else {}),
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
        "completed_steps": [rollout.completed_steps for rollout in rollouts],
    }


def unpack_rollouts(state: dict[str, Any]) -> list[Rollout]:
    """Restore the rollouts from the result of `packed`."""
    lengths = state["lengths"].tolist()
    sources = state["forced"].to(torch.int8) * Source.FORCED
    if "environment" in state:
        sources[state["environment"]] = Source.ENVIRONMENT
    columns = {name: sources if name == "sources" else state[name] for name in _PER_TOKEN}
    per_token = {name: [part.tolist() for part in torch.split(column, lengths)] for name, column in columns.items()}
    count = len(lengths)
    # Checkpoints of earlier versions lack these fields.
    outcomes, grades = state.get("outcome", ["score"] * count), state.get("grade", [0.0] * count)
    parts_of, extra_of = state.get("parts", [{}] * count), state.get("extra", [{}] * count)
    terms_of, staged = state.get("terms", [{}] * count), state.get("staged", [False] * count)
    conversations = state.get("conversation", [None] * count)
    completed_steps = state.get("completed_steps", [None] * count)
    return [
        Rollout(
            **{name: values[number] for name, values in per_token.items()},
            finish_reason=reason,
            reward=float(state["reward"][number]),
            correct=bool(state["correct"][number]),
            outcome=outcomes[number],
            grade=grades[number],
            parts=dict(parts_of[number]),
            extra=dict(extra_of[number]),
            terms=dict(terms_of[number]),
            staged=staged[number],
            conversation=conversations[number] and Conversation(**conversations[number]),
            completed_steps=completed_steps[number],
        )
        for number, reason in enumerate(state["finish_reason"])
    ]


@dataclass
class Group:
    """All rollouts of one prompt, which are sent to the generator and rewarded together.

    Attributes:
        admission: number of the group, from 0, in the order in which groups are sent to the generator ("admitted").
        prompt: the prompt.
        prompt_tokens: token ids of the prompt.
        rollouts: the rollouts with a score.
        history: pass rates of those earlier groups of the prompt that were complete when this group was admitted.
        ungraded: the rollouts without a score, which are ignored in training and in pass rates.
    """

    admission: int
    prompt: Prompt
    prompt_tokens: list[int]
    rollouts: list[Rollout]
    history: tuple[float, ...] = ()
    ungraded: list[Rollout] = field(default_factory=list)

    @property
    def rewards(self) -> Tensor:
        """Rewards of the scored rollouts, (G,), in float64."""
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)

    @property
    def oldest_version(self) -> int:
        """Smallest version of the weights that sampled any token of the group."""
        return min(min(rollout.weight_versions) for rollout in self.sampled)

    @property
    def sampled(self) -> list[Rollout]:
        """All rollouts of the group, graded or not."""
        return [*self.rollouts, *self.ungraded]

    @property
    def comparable(self) -> bool:
        """True if enough rollouts have a score: at least two if any could not be graded, else at least one."""
        return len(self.rollouts) >= (2 if self.ungraded else 1)

    @property
    def pass_rate(self) -> float:
        """Share of correct rollouts among those with a score; 0 if none has one."""
        if not self.rollouts:
            return 0.0
        return sum(rollout.correct for rollout in self.rollouts) / len(self.rollouts)

    @property
    def pass_rate_so_far(self) -> float:
        """Mean pass rate of the prompt's groups up to and including this one, a measure of how easy the prompt is."""
        rates = [*self.history, *([self.pass_rate] if self.rollouts else [])]
        return sum(rates) / max(1, len(rates))


@dataclass(frozen=True)
class Denominators:
    """Divisors of the aggregations, counted over the *global* batch of one optimizer step.

    They are never recomputed for a rank or micro-batch, so any split of a batch gives the same gradient.

    Attributes:
        prompts: number of groups with a rollout in the loss.
        samples: number of rollouts in the loss.
        tokens: number of tokens in the loss.
        max_tokens: the completion limit.
        scored_samples: number of all rollouts of the step with a score, in the loss or not. An abstention has no score.
    """

    prompts: float
    samples: float
    tokens: float
    max_tokens: float
    scored_samples: float = 0.0


@dataclass(frozen=True)
class PassSize:
    """Upper limits of one forward pass, in rollouts and in tokens; None for no limit on tokens.

    Padding counts as tokens, except in a `packed` batch, which has none.
    """

    rollouts: int
    tokens: int | None = None


@dataclass
class TrainBatch:
    """The batch of one optimizer step, or a micro-batch of it: tensors and the groups they came from.

    Tensors of shape (R, T) are aligned to the first token of the completion.

    Attributes:
        tokens: (R, S) int64, prompt then completion, left-aligned and padded on the right.
        lengths: (R,), number of tokens of prompt and completion.
        completion_start: (R,), number of tokens of the prompt.
        generator_logprobs: (R, T).
        weight_versions: (R, T).
        loss_mask: (R, T), 1 for the tokens in the loss.
        forced_mask: (R, T), 1 for inserted tokens, which are forced or come from an environment.
        advantages: (R, T).
        sample_tokens: (R,), number of the rollout's tokens in the loss mask.
        group_tokens: (R,), the same number for the rollout's whole group.
        row: (R,), the rollout's index in the flattened `groups`.
        rewards: (R,), rewards that are trained on.
        pass_rates: (R,), mean pass rate of the prompt's groups so far, including this one.
        denominators: divisors for the whole batch, also in a micro-batch.
        groups: all groups of the batch, also those that are not in the loss.
        anchor_logprobs: (R, T), the trainer's log-probabilities before the update; None if no choice needs them.
        reference_logprobs: (R, T), log-probabilities of the frozen reference; None if axis `kl` does not need them.
        divergences: (R, T), KL(policy, reference) over the vocabulary, without gradient; None if it is not computed.
        values: (R, T), the critic's values before the update; None without a critic.
        returns: (R, T), the targets of the values; None without a critic.
        group: (R,), number of the rollout's group, so that rollouts of one group can share the forward pass of their
            prompt; None if no prompt is shared.
        selected: (R, T) bool, tokens that the loss treats differently (`Loss.select`); None if there are none.
        packed: whether models get the rows concatenated without padding (`model.packed`).
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
    divergences: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    group: Tensor | None = None
    selected: Tensor | None = None
    packed: bool = False

    @property
    def rollouts(self) -> int:
        """Number R of rollouts in the loss."""
        return int(self.tokens.shape[0])

    def select(self, rows: Tensor) -> TrainBatch:
        """Return a batch of these rows, as wide as the longest of them, with unchanged denominators."""
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
        """Return a batch of one row with one completion token, whose loss and gradient are exactly zero."""
        values: dict[str, Any] = {"groups": [], "denominators": self.denominators, "packed": self.packed}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                columns = 2 if entry.name == "tokens" else 1
                values[entry.name] = value.new_zeros((1, columns) if value.dim() == 2 else (1,))
        values["lengths"] += 2
        values["completion_start"] += 1
        # Make these counts at least 1, because aggregations divide by them.
        values["sample_tokens"] += 1
        values["group_tokens"] += 1
        values["row"] -= 1
        return TrainBatch(**values)

    def cut(self, size: PassSize) -> Iterator[Tensor]:
        """Yield the row numbers of micro-batches of at most this size.

        Rows of a group are adjacent, so that they can share the forward pass of their prompt. Groups are sorted by
        length, so that there is little padding.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        if self.group is not None and self.rollouts:
            longest = self.lengths.new_zeros(int(self.group.max()) + 1)
            longest.scatter_reduce_(0, self.group, self.lengths, "amax")
            # Sort by length of the group's longest row, then group, then length. The sorts are stable, so the sort by
            # the first key is made last.
            order = order[torch.argsort(self.group[order], stable=True)]
            order = order[torch.argsort(longest[self.group[order]], descending=True, stable=True)]
        start, widest, total = 0, 0, 0
        lengths = self.lengths[order].tolist() if size.tokens is not None else [0] * self.rollouts
        for end, length in enumerate(lengths):
            rollouts = end - start + 1
            # Padded rows all cost as much as the longest row of the pass.
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


# Tensors (R, T) that are filled in after the batch is laid out and before the update.
BEFORE_UPDATE = ("advantages", "anchor_logprobs", "reference_logprobs", "divergences", "values", "returns")


def zero_outside(mask: Tensor, table: Tensor) -> Tensor:
    """Return `table` with 0 outside the mask, even where it holds NaN or infinity. Shapes: both (R, T).

    Call this before any arithmetic: a NaN multiplied by a mask of 0 stays NaN, in the value and in the gradient.
    """
    return torch.where(mask > 0, table, 0.0)


@dataclass
class Scored:
    """Output of policy and critic for a (micro-)batch; each tensor is (R, T) and zero after a completion's end.

    `entropies` have a gradient only if a term needs it. `values` is None without a critic. `divergences` is the KL to
    the reference over the vocabulary, with gradient; None if axis `kl` does not use it.
    """

    batch: TrainBatch
    trainer_logprobs: Tensor
    entropies: Tensor
    values: Tensor | None = None
    divergences: Tensor | None = None

    def zero_outside_mask(self) -> Scored:
        """Return a copy with 0 outside the loss mask, in the models' outputs and in the batch's per-token tensors.

        Every computation on tokens in the loss starts from this copy, so that no value of an inserted or masked token
        (such as NaN) can reach it.
        """
        batch, mask = self.batch, self.batch.loss_mask
        tables = {name: getattr(batch, name) for name in ("generator_logprobs", *BEFORE_UPDATE)}
        cleared: dict[str, Any] = {
            name: zero_outside(mask, table) for name, table in tables.items() if table is not None
        }
        return Scored(
            replace(batch, **cleared),
            zero_outside(mask, self.trainer_logprobs),
            zero_outside(mask, self.entropies),
            None if self.values is None else zero_outside(mask, self.values),
            None if self.divergences is None else zero_outside(mask, self.divergences),
        )


# A micro-batch with the trainer's log-probabilities and entropies, (R, T) each.
Part = tuple[TrainBatch, Tensor, Tensor]


def whole(batch: TrainBatch, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Assemble a batch's log-probabilities and entropies (R, T) from micro-batches; rows in none of them are zero."""
    logprobs, entropies = torch.zeros_like(batch.generator_logprobs), torch.zeros_like(batch.generator_logprobs)
    # `row` identifies a rollout in the batch and in micro-batches, but need not be sorted in the batch.
    order = torch.argsort(batch.row)
    for micro_batch, part_logprobs, part_entropies in parts:
        rows = order[torch.searchsorted(batch.row[order], micro_batch.row)]
        logprobs[rows, : part_logprobs.shape[1]] = part_logprobs
        entropies[rows, : part_entropies.shape[1]] = part_entropies
    return logprobs, entropies
