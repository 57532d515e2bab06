"""Axis `curriculum`: which prompts, and how long completions, are allowed as training goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep
from lightning_scalerl.prompt import Prompt


def difficulty(prompt: Prompt) -> float:
    """The first number in the prompt's label of difficulty, such as 3 in "Level 3".

    Raises:
        ConfigurationError: there is none.
    """
    found = re.search(r"(?:(?<!\w)-)?\d+(?:\.\d+)?", prompt.difficulty)
    if found is None:
        raise ConfigurationError(
            f"curriculum: prompt {prompt.prompt_id!r} has no number in its difficulty ({prompt.difficulty!r}); an "
            "order from easy to hard needs one on every prompt of the task, or choose curriculum=none"
        )
    return float(found[0])


class Curriculum(DesignChoice):
    """Opens the pool, or the length of completions, step by step.

    Attributes:
        by_difficulty: whether prompts need a number as their difficulty.
    """

    axis: ClassVar[str] = "curriculum"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoCurriculum"}
    by_difficulty: ClassVar[bool] = False

    def share(self, completed_steps: int) -> float:
        """Of the pool, from its easy end, that may be drawn from."""
        return 1.0

    def max_new_tokens(self, limit: int, completed_steps: int) -> int:
        """Of completions that are begun now; `limit` is the context's."""
        return limit

    def places(self, pool: Sequence[Prompt]) -> list[int]:
        """Each prompt's place from easy to hard; prompts of one difficulty in the order of the pool.

        Raises:
            ConfigurationError: a prompt without a difficulty.
        """
        if not self.by_difficulty:
            return [0] * len(pool)
        order = sorted(range(len(pool)), key=lambda number: difficulty(pool[number]))
        places = [0] * len(pool)
        for place, number in enumerate(order):
            places[number] = place
        return places

    def differs(self, theirs: Curriculum, step: ObservedStep) -> bool:
        """Whether the two allow other prompts, or other lengths, at this step."""
        at, whole = step.completed_steps, 10**6
        limits = self.max_new_tokens(whole, at), theirs.max_new_tokens(whole, at)
        return self.share(at) != theirs.share(at) or limits[0] != limits[1]


class NoCurriculum(Curriculum):
    """Every prompt and the whole length, from the first step."""


class _Opening(Curriculum):
    by_difficulty: ClassVar[bool] = True

    def __init__(self, start: float, over_steps: int) -> None:
        if isinstance(start, bool) or not isinstance(start, int | float) or not 0 < start <= 1:
            raise ConfigurationError(f"curriculum.start: {start!r} must be above 0 and at most 1")
        self.start = start
        self.over_steps = whole_number("curriculum.over_steps", over_steps)

    def semantics(self) -> dict[str, Any]:
        """With what is shared out."""
        return {**super().semantics(), "share_of": "prompts of the pool, easiest first"}


class LinearCurriculum(_Opening):
    """The easiest prompts first; the share that may be drawn grows linearly to all of them.

    Args:
        start: share of the pool at the first step.
        over_steps: optimizer steps until all are in.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """start + (1 - start) * progress."""
        return self.start + (1 - self.start) * min(1.0, completed_steps / self.over_steps)


class ExponentialCurriculum(_Opening):
    """The easiest prompts first; the share that may be drawn grows by the same factor every step.

    Args:
        start, over_steps: as `LinearCurriculum`.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """start ** (1 - progress)."""
        return float(self.start ** (1 - min(1.0, completed_steps / self.over_steps)))


class StagedLength(Curriculum):
    """Short completions first: the limit grows in stages to the context's, and the points of interruptions with it.

    Args:
        shares: of `context.max_new_tokens`, a stage each; the last is 1.
        steps: optimizer steps a stage.
    """

    def __init__(self, shares: Sequence[float] = (0.5, 0.75, 1.0), steps: int = 50) -> None:
        self.shares = [float(share) for share in shares]
        rising = all(low < high for low, high in zip(self.shares, self.shares[1:], strict=False))
        if not self.shares or not rising or not self.shares[0] > 0 or self.shares[-1] != 1:
            raise ConfigurationError(f"curriculum.shares: {list(shares)!r} must rise from above 0 to 1")
        self.steps = whole_number("curriculum.steps", steps)

    def max_new_tokens(self, limit: int, completed_steps: int) -> int:
        """The stage's."""
        stage = min(completed_steps // self.steps, len(self.shares) - 1)
        # A share that is written in decimals may come out a little above the whole number that it means.
        return max(1, math.ceil(round(limit * self.shares[stage], 6)))

    def semantics(self) -> dict[str, Any]:
        """With what is never cut short, and what shrinks along."""
        return {**super().semantics(), "evaluation": "whole length", "interruption": "at the same share of the limit"}
