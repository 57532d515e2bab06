"""Slots of the in-process generator: the rollouts that decode together, one row each, with their keys and values.

The active slots are always the first ones. A slot also tracks the phrase that ends its rollout's thinking: when it is
to be forced, and which of its tokens is next. A rollout that waits for an insertion leaves its row, and gets another
one when it continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, SamplingSettings
from lightning_scalerl.generator.insertion import NEVER, Insertions, Next
from lightning_scalerl.generator.torch.slot_cache import KeysValues, SlotCache
from lightning_scalerl.rollouts.rollout import Rollout

# Sentinel: no phrase is being forced.
NOT_FORCING = -1


@dataclass(eq=False)
class Paused:
    """Rollout that has left its row at the end of a turn.

    Attributes:
        insertions: the rollout's insertion rules.
        rollout: the rollout so far.
        row: the rollout's row of every buffer of `Slots`.
        keys_values: keys and values of all tokens of the sequence but the last; None if they were dropped.
        answer: tokens of the environment's answer, to insert before the rollout continues; None while it waits for
            them.
    """

    insertions: Insertions
    rollout: Rollout
    row: list[Tensor]
    keys_values: KeysValues | None
    answer: tuple[int, ...] | None = None

    @property
    def prefill_input(self) -> tuple[KeysValues | None, list[int]]:
        """Cached keys and values of the sequence's beginning (None for none), and the tokens to prefill after it."""
        tokens, answer = self.rollout.tokens, self.answer or ()
        if self.keys_values is None:
            return None, [*self.insertions.request.prompt_tokens, *tokens, *answer]
        # The last token's keys and values were not computed yet.
        return self.keys_values, [tokens[-1], *answer]


class Slots:
    """Rows of all rollouts that decode together.

    Args:
        cache: KV cache with one row per slot.
        size: number of slots.
        sampling: sampling settings of the generator.
        device: the model's device.
    """

    def __init__(self, cache: SlotCache, size: int, sampling: SamplingSettings, device: torch.device) -> None:
        self.cache, self.size, self.device = cache, size, device
        self._phrase = torch.tensor(sampling.phrase, dtype=torch.long, device=device)
        self._sampling = sampling
        self.occupants: list[Insertions] = []  # slot i holds occupant i
        shape = (size, sampling.max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._versions = torch.zeros(shape, dtype=torch.long, device=device)
        self._forced = torch.zeros(shape, dtype=torch.bool, device=device)
        self._uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        self._count = torch.zeros(size, dtype=torch.long, device=device)
        self._limit = torch.zeros(size, dtype=torch.long, device=device)
        self._prompt_length = torch.zeros(size, dtype=torch.long, device=device)
        self._interrupt_at = torch.full((size,), NEVER, device=device)
        self._phrase_next = torch.full((size,), NOT_FORCING, device=device)

    @property
    def active(self) -> int:
        """Number of slots that have a rollout."""
        return len(self.occupants)

    @property
    def counts(self) -> Tensor:
        """Number of tokens of each rollout so far, (active,)."""
        return self._count[: self.active]

    @property
    def at_limit(self) -> Tensor:
        """Mask (active,) of the rollouts that have reached the token limit of their turn."""
        return self.counts >= self._limit[: self.active]

    def occupy(
        self,
        request: GroupRequest,
        first: int,
        number: int,
        keys_values: list[tuple[Tensor, Tensor]],
        uniform: Tensor,
    ) -> None:
        """Give the next `number` slots to rollouts `first`, `first + 1`, ... of a group with a prefilled prompt."""
        rows = slice(self.active, self.active + number)
        occupants = [Insertions(request, index, self._sampling) for index in range(first, first + number)]
        self.occupants += occupants
        self.cache.fill(rows, keys_values)
        self._count[rows] = 0
        self._prompt_length[rows] = len(request.prompt_tokens)
        self._uniform[rows] = uniform[first : first + number]
        self._interrupt_at[rows] = torch.tensor(
            [insertions.interruption_point for insertions in occupants], device=self.device
        )
        self._phrase_next[rows] = NOT_FORCING
        self._limit[rows] = occupants[0].turn_limit

    def resume(self, paused: Paused, keys_values: KeysValues, version: int) -> None:
        """Give the next slot to a rollout that continues, and append the environment's answer to the rollout.

        Args:
            paused: the rollout.
            keys_values: keys and values of its sequence, including the answer.
            version: weight version to record for the tokens of the answer.
        """
        slot, answer = self.active, paused.answer or ()
        self.occupants.append(paused.insertions)
        self.cache.fill(slice(slot, slot + 1), keys_values)
        for buffer, row in zip(self._buffers(), paused.row, strict=True):
            buffer[slot] = row
        start = int(self._count[slot])
        inserted = slice(start, start + len(answer))
        self.tokens[slot, inserted] = torch.tensor(answer, dtype=torch.long, device=self.device)
        # An environment's answer is not sampled: record 0 as log-probability.
        self._logprobs[slot, inserted] = 0.0
        self._versions[slot, inserted] = version
        self._count[slot] = inserted.stop
        self._limit[slot] = paused.insertions.turn_limit
        if self._interrupt_at[slot] != NEVER:
            self._interrupt_at[slot] = paused.insertions.interruption_point

    def last_tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the last tokens (number,) of the first `number` slots, and their positions in the sequences."""
        row, count = torch.arange(number, device=self.device), self._count[:number]
        return self.tokens[row, count - 1], self._prompt_length[:number] + count - 1

    def sampled_last(self, slot: int, most: int) -> list[int]:
        """Return a rollout's tokens sampled since the last inserted token, at most the last `most` of them."""
        count = int(self._count[slot])
        answers = self.occupants[slot].answers
        start = max(0, count - most, answers[-1][1] if answers else 0)
        forced = torch.nonzero(self._forced[slot, start:count]).flatten()
        if forced.numel():
            start += int(forced[-1]) + 1
        return self.tokens[slot, start:count].tolist()

    def next_uniform(self) -> Tensor:
        """Return the uniform numbers (active,) that decide the next token of each rollout."""
        return self._uniform[torch.arange(self.active, device=self.device), self.counts]

    def append(self, tokens: Tensor, logprobs: Tensor, version: int) -> Tensor:
        """Append one token to each rollout: the sampled token, or the next token of a phrase that is being forced.

        Args:
            tokens: sampled tokens (active,); overwritten where a phrase is forced.
            logprobs: log-probabilities of the whole vocabulary (active, V).
            version: version of the weights.

        Returns:
            Mask (active,) of the forced tokens.
        """
        row, count = torch.arange(self.active, device=self.device), self.counts
        forced = self._force(tokens)
        self.tokens[row, count] = tokens
        self._logprobs[row, count] = logprobs[row, tokens]
        self._versions[row, count] = version
        self._forced[row, count] = forced
        self._count[: self.active] += 1
        return forced

    def _force(self, tokens: Tensor) -> Tensor:
        """Overwrite sampled tokens (active,) where the end of thinking is due; return a mask of these tokens."""
        active = tokens.numel()
        phrase_next, interrupt_at = self._phrase_next[:active], self._interrupt_at[:active]
        # The count excludes the current token: an interruption at n forces the token after the n-th.
        for slot in (
            torch.nonzero((phrase_next == NOT_FORCING) & (self._count[:active] >= interrupt_at)).flatten().tolist()
        ):
            # This is decided once per rollout: either its thinking has already ended, or the phrase ends it.
            phrase = self.occupants[slot].phrase(self.tokens[slot, : self._count[slot]].tolist())
            if phrase:
                phrase_next[slot] = 0
            else:
                interrupt_at[slot] = NEVER
        forced = phrase_next != NOT_FORCING
        if forced.any():
            tokens[forced] = self._phrase[phrase_next[forced]]
            phrase_next[forced] += 1
            completed = phrase_next == self._phrase.numel()
            phrase_next[completed] = NOT_FORCING
            interrupt_at[completed] = NEVER
        return forced

    def cached_tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens of a slot's sequence that are in the KV cache: all but the last."""
        # The last token's keys and values are written when the next token is decoded.
        completion = self.tokens[slot, : self._count[slot] - 1].tolist()
        return (*self.occupants[slot].request.prompt_tokens, *completion)

    def release(
        self, ending: list[int], stopped: Tensor, keep_cache: bool
    ) -> tuple[list[FinishedRollout], list[Paused]]:
        """Remove rollouts whose turn ends from their slots, and move the last rollouts into the freed slots.

        Args:
            ending: slots whose rollouts have stopped or are at their limit, in ascending order.
            stopped: mask (active,) of the rollouts that have stopped.
            keep_cache: whether rollouts that wait keep their keys and values.

        Returns:
            The rollouts that ended, and those that wait for an insertion.
        """
        if not ending:
            return [], []
        rows = torch.tensor(ending, device=self.device)
        columns = (self.tokens, self._logprobs, self._versions, self._forced, self._count, self._phrase_next)
        finished: list[FinishedRollout] = []
        paused: list[Paused] = []
        released = []
        for slot, has_stopped, tokens, logprobs, versions, forced, length, phrase_next in zip(
            ending, stopped[rows].tolist(), *(column[rows].tolist() for column in columns), strict=True
        ):
            occupant = self.occupants[slot]
            waits = occupant.decide_next(length, has_stopped) is Next.WAIT
            # A turn does not end in the middle of a phrase, unless the completion is full.
            if waits and phrase_next != NOT_FORCING and length < occupant.limit:
                continue
            released.append(slot)
            rollout = Rollout(
                tokens=tokens[:length],
                generator_logprobs=logprobs[:length],
                weight_versions=versions[:length],
                sources=occupant.sources(forced[:length]),
                finish_reason="stop" if has_stopped else "length",
            )
            if waits:
                prefix = len(occupant.request.prompt_tokens) + length - 1
                keys_values = self.cache.copy(slot, prefix) if keep_cache else None
                row = [buffer[slot].clone() for buffer in self._buffers()]
                paused.append(Paused(occupant, rollout, row, keys_values))
            else:
                finished.append(FinishedRollout(occupant.request.key, occupant.index, rollout))
        self._fill_holes(released)
        return finished, paused

    def _fill_holes(self, released: list[int]) -> None:
        """Move the last rollouts into the released slots, so that the active slots are the first ones."""
        active, released_set = self.active - len(released), set(released)
        holes = [slot for slot in released if slot < active]
        movers = [slot for slot in range(active, self.active) if slot not in released_set]
        if holes:
            sources, targets = torch.tensor(movers, device=self.device), torch.tensor(holes, device=self.device)
            self.cache.move(sources, targets)
            for buffer in self._buffers():
                buffer[targets] = buffer[sources]
            for source, target in zip(movers, holes, strict=True):
                self.occupants[target] = self.occupants[source]
        del self.occupants[active:]

    def _buffers(self) -> tuple[Tensor, ...]:
        """Return all tensors with one row per slot; they are moved and saved together."""
        return (
            self.tokens,
            self._logprobs,
            self._versions,
            self._forced,
            self._uniform,
            self._count,
            self._limit,
            self._prompt_length,
            self._interrupt_at,
            self._phrase_next,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts that have slots, with their (possibly stale) keys and values, in host memory."""
        active = self.active
        return {
            "occupants": [slot.state() for slot in self.occupants],
            "buffers": [host(buffer[:active]) for buffer in self._buffers()],
            "cache": [
                (host(layer.keys[:active]), host(layer.values[:active])) if active else ()
                for layer in self.cache.layers
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rollouts saved by `state_dict`; they continue exactly where they were."""
        self.occupants = [Insertions.from_state(slot, self._sampling) for slot in state["occupants"]]
        active = self.active
        for buffer, saved in zip(self._buffers(), state["buffers"], strict=True):
            buffer[:active] = saved.to(self.device)
        for layer, saved in zip(self.cache.layers, state["cache"], strict=True):
            if saved:
                keys, values = (tensor.to(self.device) for tensor in saved)
                self.cache.reserve(active, keys.shape[2])
                if not layer.is_initialized:
                    layer.lazy_initialization(keys, values)
                layer.keys[:active, :, : keys.shape[2]] = keys
                layer.values[:active, :, : values.shape[2]] = values


def host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, because the device may lack memory for a second copy of weights or cache."""
    return tensor.detach().to("cpu", copy=True)
