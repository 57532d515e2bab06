"""Resumable source of training prompts: a finite pool, reshuffled every epoch.

A curriculum decides from which step on a prompt is available, and resampling retires prompts by their pass rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_scalerl.axes.curriculum import Curriculum, NoCurriculum
from lightning_scalerl.axes.resampling import Resampling
from lightning_scalerl.axes.results import check_bool
from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.rollouts.prompt import Prompt


class PoolExhaustedError(CannotGoOnError):
    """Raised when every prompt of the pool is retired."""


class PromptSource:
    """Endless source of prompts: epoch after epoch over the pool, each epoch in a new random order.

    Args:
        pool: the prompts, with unique ids.
        random_key: seed of the orders; each epoch appends its number to it.
        resampling: decides which prompts are retired; a retired prompt is never drawn again. Copies of a prompt
            (`Prompt.copy_of`) share their pass rates and are retired together, as one prompt.
        curriculum: decides which prompts may be drawn at a step; None for all. An epoch draws each of these prompts
            once, including prompts that become available during the epoch.

    Raises:
        ConfigurationError: an empty pool, a prompt id that occurs twice, or a prompt without the difficulty that the
            curriculum asks for.
    """

    def __init__(
        self,
        pool: Sequence[Prompt],
        random_key: tuple[int, ...],
        resampling: Resampling,
        curriculum: Curriculum | None = None,
    ) -> None:
        if not pool:
            raise ConfigurationError("task: its pool of training prompts is empty")
        self._pool = list(pool)
        self._by_id = {prompt.prompt_id: prompt for prompt in self._pool}
        if len(self._by_id) < len(self._pool):
            duplicate, _ = Counter(prompt.prompt_id for prompt in self._pool).most_common(1)[0]
            raise ConfigurationError(f"task: prompt id {duplicate!r} occurs twice in the pool")
        self._key = random_key
        self._resampling = resampling
        self._curriculum = curriculum or NoCurriculum()
        # The curriculum's rank of each prompt: the easiest prompt has rank 0 and is available first.
        self._curriculum_rank = self._curriculum.places(self._pool)
        self._originals = {prompt.prompt_id: prompt.copy_of for prompt in self._pool if prompt.copy_of}
        self._distinct = len({self._original(prompt.prompt_id) for prompt in self._pool})
        # Pass rates of a prompt's complete groups. Copies share one entry here and in `_retired`, by the id of the
        # original.
        self._history: dict[str, list[float]] = {}
        self._retired: set[str] = set()
        self._epoch = 0
        # The positions of this epoch's order that are drawn or retired: all positions before `_position`, and those in
        # `_taken`.
        self._position = 0
        self._taken: set[int] = set()
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> float:
        """Number of passes over the pool so far. The fraction is the share of this epoch that is drawn or retired."""
        return self._epoch + (self._position + len(self._taken)) / len(self._pool)

    def _shuffled(self, epoch: int) -> list[int]:
        # The order depends on key and epoch alone, so checkpoints need not store it.
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._key, epoch))))
        return [int(position) for position in generator.permutation(len(self._pool))]

    def next(self, completed_steps: int = 0) -> Prompt:
        """Draw the next prompt that is not retired and that the curriculum makes available at `completed_steps`.

        Raises:
            PoolExhaustedError: all prompts are retired.
        """
        if self.exhausted:
            raise PoolExhaustedError(
                f"resampling: all {len(self._retired)} prompts of the pool are retired, nothing is left to train on; "
                "use a larger or harder pool, or resampling=uniform"
            )
        # Round before `ceil`: 0.07 * 100 is slightly above 7 in floating point.
        allowed = math.ceil(round(self._curriculum.share(completed_steps) * len(self._pool), 6))
        if self._retired and allowed < len(self._pool):
            # If every available prompt is retired, nothing could be drawn: make the next easiest available early.
            easiest = min(
                rank
                for rank, prompt in zip(self._curriculum_rank, self._pool, strict=True)
                if not self._is_retired(prompt)
            )
            allowed = max(allowed, easiest + 1)
        while True:
            if (position := self._draw_position(allowed)) is not None:
                return self._pool[self._order[position]]
            # This epoch has no prompt left: start the next one.
            self._epoch += 1
            self._position = 0
            self._taken = set()
            self._order = self._shuffled(self._epoch)

    def _draw_position(self, allowed: int) -> int | None:
        """Draw the first position of this epoch that has an available prompt, and return it; None if there is none."""
        position = self._position
        while position < len(self._order):
            number = self._order[position]
            retired = self._is_retired(self._pool[number])
            if not retired and position not in self._taken and self._curriculum_rank[number] < allowed:
                self._taken.add(position)
                self._advance()
                return position
            # A retired prompt never returns: mark it as taken, so that the position can move past it.
            if retired:
                self._taken.add(position)
            position += 1
        self._advance()
        return None

    def _advance(self) -> None:
        # Keep `_taken` small, because checkpoints contain it: remove positions that `_position` has passed.
        while self._position in self._taken:
            self._taken.remove(self._position)
            self._position += 1

    def _original(self, prompt_id: str) -> str:
        return self._originals.get(prompt_id, prompt_id)

    def _is_retired(self, prompt: Prompt) -> bool:
        return self._original(prompt.prompt_id) in self._retired

    def resolved(self, prompt_id: str, pass_rate: float) -> None:
        """Record the pass rate of a complete group, even if the filter drops it; retire the group's prompt if due."""
        original = self._original(prompt_id)
        history = self._history.setdefault(original, [])
        history.append(pass_rate)
        if check_bool(self._resampling, "retires", self._resampling.retires(history)):
            self._retired.add(original)

    def history(self, prompt_id: str) -> Sequence[float]:
        """Return the pass rates of a prompt's complete groups, oldest first, including those of its copies."""
        return self._history.get(self._original(prompt_id), ())

    def histories(self) -> Iterable[Sequence[float]]:
        """Return the pass rates of every prompt that has a complete group."""
        return self._history.values()

    @property
    def exhausted(self) -> bool:
        """True if every prompt of the pool is retired."""
        return len(self._retired) == self._distinct

    @property
    def retired(self) -> int:
        """Number of retired prompts; copies count once."""
        return len(self._retired)

    def by_id(self, prompt_id: str) -> Prompt:
        """Return a prompt of the pool by its id.

        Raises:
            KeyError: the pool has no prompt with this id.
        """
        return self._by_id[prompt_id]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it, all pass rates and the retired prompts; the order is recomputed."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "taken": sorted(self._taken),
            "history": {prompt_id: list(rates) for prompt_id, rates in self._history.items()},
            "retired": sorted(self._retired),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the epoch, the position in it, all pass rates and the retired prompts."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._taken = set(state.get("taken", ()))
        self._order = self._shuffled(self._epoch)
        # Checkpoints of older versions have entries for each copy.
        self._history = {}
        for prompt_id, rates in state["history"].items():
            self._history.setdefault(self._original(prompt_id), []).extend(rates)
        self._retired = {self._original(prompt_id) for prompt_id in state["retired"]}


TOO_LONG = ("refuse", "drop")


@dataclass(frozen=True)
class PromptSet:
    """Prompts that fit the context, their token ids, and the number of prompts that were dropped as too long."""

    prompts: Sequence[Prompt]
    tokens: Sequence[list[int]]
    dropped: int = 0

    @cached_property
    def _tokens_by_id(self) -> dict[str, list[int]]:
        return {prompt.prompt_id: ids for prompt, ids in zip(self.prompts, self.tokens, strict=True)}

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of one of the prompts."""
        return self._tokens_by_id[prompt.prompt_id]

    def describe(self, name: str) -> str:
        """Return one line with the number of prompts and their lengths in tokens."""
        lengths = [len(ids) for ids in self.tokens]
        # inverted_cdf returns a length that occurs, not one interpolated between two.
        median, percentile_95 = (int(np.percentile(lengths, share, method="inverted_cdf")) for share in (50, 95))
        dropped_note = f"; {self.dropped} too long, left out" if self.dropped else ""
        return (
            f"{len(lengths)} {name} prompt{'' if len(lengths) == 1 else 's'}, lengths in tokens: median {median}, "
            f"95th percentile {percentile_95}, longest {max(lengths)}{dropped_note}"
        )


def fitting(
    sets: Mapping[str, Sequence[Prompt]],
    tokens: Mapping[str, Sequence[list[int]]],
    max_prompt_tokens: int,
    too_long: str = "refuse",
) -> dict[str, PromptSet]:
    """Return the prompts of each set that fit the context; refuse or drop longer prompts.

    Args:
        sets: prompts by the name of their set.
        tokens: token ids of the prompts, with the same names and order.
        max_prompt_tokens: longest prompt that fits, in tokens.
        too_long: "refuse" to raise an error if any prompt is longer, "drop" to leave these prompts out.

    Raises:
        ConfigurationError: a prompt is too long and `too_long` is "refuse", no prompt of a set fits, or a prompt has no
            tokens.
    """
    fitting_sets, excess = {}, []
    longest = 0
    for name, prompts in sets.items():
        lengths = [len(ids) for ids in tokens[name]]
        if 0 in lengths:
            raise ConfigurationError(f"task: prompt {prompts[lengths.index(0)].prompt_id!r} ({name}) has no tokens")
        longest = max([longest, *lengths])
        fit = [number for number, length in enumerate(lengths) if length <= max_prompt_tokens]
        if len(fit) < len(lengths):
            excess.append(f"{len(lengths) - len(fit)} of {len(lengths)} {name} prompts")
        fitting_sets[name] = PromptSet(
            [prompts[number] for number in fit], [tokens[name][number] for number in fit], len(lengths) - len(fit)
        )
    if excess and (too_long == "refuse" or not all(prompt_set.prompts for prompt_set in fitting_sets.values())):
        raise ConfigurationError(
            f"context.max_prompt_tokens: {' and '.join(excess)} have more than {max_prompt_tokens} tokens, the "
            f"longest {longest}; raise it, or leave them out with context.too_long=drop"
        )
    return fitting_sets
