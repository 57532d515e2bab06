"""Compute of one recipe as a multiple of another's, and the compute that breaks a tie in A.

    C(q) = compute at which a recipe has gained the share q of the way from R0 to the asymptote that tied recipes share

B alone is no efficiency: it is an exponent, and two recipes of equal A and B may differ in C_mid. Tied recipes are
ordered by C(0.9). Every multiple of compute that is shown anywhere is a `Ratio`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.posterior import by_weight
from sweeps.fit.predict import quantiles, support
from sweeps.fit.seeds import SeedSpread

# Shares of the gain up to which compute is counted: ties are broken at the first, the second is shown beside it.
MOST, HALF = 0.9, 0.5
# The share of draws beyond either end of a 95% interval.
TAIL = 0.025


@dataclass(frozen=True, eq=False)
class Ratio:
    """Draws of one compute over another.

    Attributes:
        draws: of the joint draws in which at least one side arrives: 0 or infinite where only one does.
        p_neither: share of all joint draws in which neither arrives; they say nothing of the ratio.
    """

    draws: Array
    p_neither: float

    @classmethod
    def of(cls, ours: Array, theirs: Array) -> Ratio:
        """Divide draw by draw; infinite compute stands for never. Two that need no compute at all are equal. (K,)."""
        known = np.isfinite(ours) | np.isfinite(theirs)
        mine, other = ours[known], theirs[known]
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = np.where(mine == other, 1.0, mine / other)
        return cls(draws, float(1 - known.mean()))

    def interval(self, tail: float = TAIL) -> Interval | None:
        """Return the median with bounds; None where neither side ever arrives.

        Infinite values are None. Both bounds are open where neither side arrives in more than half of the draws.
        """
        if not len(self.draws):
            return None
        found = quantiles(self.draws, tail)
        return Interval(found.value, None, None) if self.p_neither > 0.5 else found

    def above_one(self, tail: float = TAIL) -> bool:
        """Return whether the interval lies above 1."""
        found = self.interval(tail)
        return found is not None and found.low is not None and found.low > 1


def tail_of_all_pairs(count: int) -> float:
    """Return the tail at which intervals of ratios between so many recipes hold together, by Bonferroni.

    The recipe that others are divided by is the fastest of all, which is chosen by the same draws: a bound for one pair
    would call one of several equal recipes slower far too often.
    """
    return TAIL / max(count * (count - 1) // 2, 1)


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Draws of a recipe's compute to 90% and to half of the way to a shared asymptote; (K,) each, in the curves' unit.

    Infinite where that lies beyond what the fit may be read for. B and C_mid (K,) are those of the same draws.
    """

    to_most: Array
    to_half: Array
    B: Array
    C_mid: Array


def efficiencies(
    tied: Sequence[Fit], shared_a: float, spreads: Mapping[str, SeedSpread] | None = None
) -> dict[str, Efficiency]:
    """Draw the efficiency of recipes that share an asymptote, by recipe.

    A recipe's draws are weighted by how near their A lies to the shared one: the runs given may lie off their recipe by
    the spread between seeds, and the shared A has an error of its own. Fixing A would leave both out, and then two
    recipes that differ in their seeds alone look surely different.

    Args:
        tied: identifiable recipes.
        shared_a: asymptote that they share, in reward.
        spreads: spread between seeds, by recipe; None for each fit's own.
    """
    own = {fit.recipe: fit.draws for fit in tied}
    error = np.sqrt(sum(float(draws.A.var()) for draws in own.values() if draws is not None)) / max(len(tied), 1)
    found = {}
    for fit in tied:
        draws = own[fit.recipe]
        assert draws is not None, "an identifiable recipe has draws"
        spread = fit.seed_spread if spreads is None else spreads[fit.recipe]
        width = max(float(np.hypot(spread.sd / np.sqrt(max(fit.informing, 1)), error)), 1e-9 * fit.curve.scale)
        rng = generator(fit.recipe, "efficiency")
        squares = ((draws.A - shared_a) / width) ** 2
        # Log density of Student's t, or of a normal where the spread is taken as known.
        tails = spread.dof
        density = -0.5 * squares if np.isinf(tails) else -0.5 * (tails + 1) * np.log1p(squares / tails)
        rows = by_weight(np.exp(density - density.max()), DRAWS, rng)
        limit = support(fit)
        first, second = draws.B[rows], draws.C_mid[rows]
        computes = [draws.family.compute_at(share, first, second) for share in (MOST, HALF)]
        computes = [np.where(at > (np.inf if limit is None else limit), np.inf, at) for at in computes]
        found[fit.recipe] = Efficiency(computes[0], computes[1], first, second)
    return found
