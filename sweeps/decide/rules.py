"""Stopping rules of a race, in a module that imports neither NumPy nor SciPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sweeps.as_json import AsJson
from sweeps.errors import UserError
from sweeps.run import fields

# A `loss` of the whole scale: no limit.
NO_LIMIT = 1.0


@dataclass(frozen=True)
class Rules(AsJson):
    """Rules by which a race takes its looks and stops recipes.

    Args:
        budget: compute of one run at which the best recipe is wanted, in the curves' unit.
        p_ahead: a recipe is stopped when its probability of ending ahead of the favourite, the recipe of the highest
            expected reward at the budget, is below this. The probability of being best would not do: among many recipes
            that are alike it is small for each.
        looks: number of looks in a row at which that must be so.
        first: share of the budget at which the first look is taken; nothing is stopped before.
        growth: factor by which compute grows from one look to the next.
        loss: the most that all that is stopped may be expected to cost: by how much the best of the stopped will exceed
            the best of those left, in expectation and summed over the looks, as a share of the reward's scale. Each
            stopped recipe may be unlikely to come out ahead, and one of many still be likely to. 1 sets no limit.

    Raises:
        UserError: one of them is out of range.
    """

    budget: float
    p_ahead: float = 0.1
    looks: int = 1
    first: float = 0.2
    growth: float = 1.05
    loss: float = 0.01

    def __post_init__(self) -> None:
        checks = (
            ("budget", 0 < self.budget < math.inf, "a positive compute of one run, in the unit of the compute axis"),
            ("p-ahead", 0 < self.p_ahead < 0.5, "a chance above 0 and below 0.5"),
            ("looks", self.looks >= 1, "1 or more"),
            ("first", 0 < self.first < 1, "a share of the budget, above 0 and below 1"),
            ("growth", 1 < self.growth < math.inf, "a factor above 1"),
            ("loss", 0 < self.loss <= NO_LIMIT, "a share of the reward's scale, above 0; 1 sets no limit"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise UserError(f"--{name} {getattr(self, name.replace('-', '_')):g}: give {wanted}")

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Rules:
        """Read rules back from the JSON that `to_json` wrote; races that were begun without a `loss` have no limit.

        Raises:
            TypeError: a rule of another version.
            ValueError: a field of another kind.
            UserError: a rule out of range.
        """
        given = {"loss": NO_LIMIT, **entry}
        for name in given:
            (fields.whole if name == "looks" else fields.number)(given, name)
        return cls(**given)

    def going_on(self, begun: Rules) -> Rules:
        """Return these rules for a race that was begun by others: without a limit on the loss where it has none."""
        return replace(self, loss=NO_LIMIT) if begun.loss == NO_LIMIT and self.loss == Rules.loss else self

    def levels(self) -> Iterator[float]:
        """Computes at which looks are taken, the budget itself excepted."""
        level = self.first * self.budget
        # The factors' rounding must not add a look at the budget itself.
        while level < self.budget * (1 - 1e-9):
            yield level
            level *= self.growth
