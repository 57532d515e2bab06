"""Stopping rules of a race.

This module imports neither NumPy nor SciPy, because a run imports it and should start fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sweeps.as_json import AsJson
from sweeps.errors import UserError
from sweeps.run import fields

# Value of `loss` that sets no limit: the whole scale of the reward.
NO_LIMIT = 1.0


@dataclass(frozen=True)
class Rules(AsJson):
    """Rules for when a race looks at its runs and which recipes it stops.

    Args:
        budget: compute of one run at which the best recipe is wanted, in the curves' unit.
        p_ahead: a recipe is stopped when its probability of ending ahead of the favourite (the recipe with the highest
            expected reward at the budget) is below this. The probability of being best is not used, because
            among many similar recipes it is small for each.
        looks: number of consecutive looks at which this probability must be below `p_ahead`.
        first: fraction of the budget at which the first look is taken; no recipe is stopped before.
        growth: factor by which compute grows from one look to the next.
        loss: largest expected cost of all stops together, as a fraction of the reward's scale; 1 sets no limit. The
            cost is the expected reward of the best stopped recipe above that of the best remaining one, summed over the
            looks. It is limited because small probabilities add up when many recipes are stopped.

    Raises:
        UserError: a rule is out of range.
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
        """Create rules from the JSON that `to_json` wrote. Old journals lack `loss`, which then sets no limit.

        Raises:
            TypeError: an unknown rule.
            ValueError: a field of the wrong type.
            UserError: a rule out of range.
        """
        values = {"loss": NO_LIMIT, **entry}
        for name in values:
            (fields.whole if name == "looks" else fields.number)(values, name)
        return cls(**values)

    def resumed_from(self, earlier: Rules) -> Rules:
        """Return these rules, adapted to continue a race that began under the rules `earlier`.

        If the earlier race had no limit on its expected loss, and `loss` is at its default here, the continued race has
        no limit either.
        """
        return replace(self, loss=NO_LIMIT) if earlier.loss == NO_LIMIT and self.loss == Rules.loss else self

    def levels(self) -> Iterator[float]:
        """Yield the computes at which looks are taken, except the budget itself."""
        level = self.first * self.budget
        # The tolerance keeps rounding from adding a look at the budget itself.
        while level < self.budget * (1 - 1e-9):
            yield level
            level *= self.growth
