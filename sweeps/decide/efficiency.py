"""One recipe's compute as a multiple of another's, and the compute that breaks ties in A.

    C(q) = compute at which a recipe has gained the fraction q of the way from R0 to the tied recipes' common asymptote

B alone does not measure efficiency: it is an exponent, and two recipes with equal A and B may differ in C_mid. Tied
recipes are ordered by C(0.9). `Ratio` is the posterior of one compute as a multiple of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.posterior import draw_by_weight
from sweeps.fit.predict import forecast_limit, quantiles
from sweeps.fit.seeds import SeedSpread

# Fractions of the gain. Ties are broken by the compute to reach MOST; the compute to reach HALF is only shown.
MOST, HALF = 0.9, 0.5
# Probability below, and above, a 95% interval.
TAIL = 0.025


@dataclass(frozen=True, eq=False)
class Ratio:
    """Posterior draws of the ratio of the computes that two recipes need for the same reward.

    Attributes:
        draws: the ratio in each joint draw in which at least one recipe reaches the reward; 0 or infinite where only
            one reaches it.
        p_neither: fraction of all joint draws in which neither reaches it; these give no ratio.
    """

    draws: Array
    p_neither: float

    @classmethod
    def of(cls, computes: Array, reference: Array) -> Ratio:
        """Divide `computes` by `reference` in each draw, (K,).

        Infinity means that the reward is never reached; 0 / 0 gives 1.
        """
        is_finite = np.isfinite(computes) | np.isfinite(reference)
        numerator, denominator = computes[is_finite], reference[is_finite]
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = np.where(numerator == denominator, 1.0, numerator / denominator)
        return cls(draws, float(1 - is_finite.mean()))

    def interval(self, tail: float = TAIL) -> Interval | None:
        """Return the median with bounds, or None if there are no draws.

        A median or bound that is infinite is None. Both bounds are None if `p_neither` is above one half.
        """
        if not len(self.draws):
            return None
        result = quantiles(self.draws, tail)
        return Interval(result.value, None, None) if self.p_neither > 0.5 else result

    def above_one(self, tail: float = TAIL) -> bool:
        """Return whether the interval is entirely above 1."""
        interval = self.interval(tail)
        return interval is not None and interval.low is not None and interval.low > 1

    def below_one(self, tail: float = TAIL) -> bool:
        """Return whether the interval is entirely below 1."""
        interval = self.interval(tail)
        return interval is not None and interval.high is not None and interval.high < 1


def bonferroni_tail(count: int) -> float:
    """Return the tail probability at which the ratio intervals of all pairs of `count` recipes hold at once.

    This is Bonferroni's correction. All ratios divide by the fastest recipe, which is selected by the same draws. With
    the bounds of a single pair, one of several equal recipes would be called slower far too often.
    """
    return TAIL / max(count * (count - 1) // 2, 1)


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Draws of a recipe's compute to 90%, and to half, of the gain from R0 to a shared asymptote; (K,).

    A compute is infinite where it is beyond the range in which the fit may be used. B and C_mid (K,) belong to the same
    draws.
    """

    to_most: Array
    to_half: Array
    B: Array
    C_mid: Array


def efficiencies(
    tied: Sequence[Fit], shared_a: float, spreads: Mapping[str, SeedSpread] | None = None
) -> dict[str, Efficiency]:
    """Return each recipe's draws of the compute to a fraction of the gain, for recipes that share an asymptote.

    A recipe's draws are weighted by how close their A is to the shared one. The width of the weights combines the
    spread between seeds, because more seeds could give another A, and the error of the shared A. With A fixed at the
    shared value both errors would be missing, and two recipes that differ only in their seeds would look surely
    different.

    Args:
        tied: identifiable recipes.
        shared_a: their common asymptote, in reward.
        spreads: spread between seeds, by recipe; None for each fit's `seed_spread`.
    """
    draws_by_recipe = {fit.recipe: fit.draws for fit in tied}
    error = np.sqrt(sum(float(draws.A.var()) for draws in draws_by_recipe.values() if draws is not None)) / max(
        len(tied), 1
    )
    result = {}
    for fit in tied:
        draws = draws_by_recipe[fit.recipe]
        assert draws is not None, "an identifiable recipe has draws"
        spread = fit.seed_spread if spreads is None else spreads[fit.recipe]
        width = max(float(np.hypot(spread.sd / np.sqrt(max(fit.informative_seeds, 1)), error)), 1e-9 * fit.curve.scale)
        rng = generator(fit.recipe, "efficiency")
        squares = ((draws.A - shared_a) / width) ** 2
        # Log density of Student's t, or of a normal distribution if the spread between seeds is treated as known.
        dof = spread.dof
        density = -0.5 * squares if np.isinf(dof) else -0.5 * (dof + 1) * np.log1p(squares / dof)
        rows = draw_by_weight(np.exp(density - density.max()), DRAWS, rng)
        limit = forecast_limit(fit)
        b, c_mid = draws.B[rows], draws.C_mid[rows]
        computes = [draws.family.compute_at(share, b, c_mid) for share in (MOST, HALF)]
        computes = [np.where(at > (np.inf if limit is None else limit), np.inf, at) for at in computes]
        result[fit.recipe] = Efficiency(computes[0], computes[1], b, c_mid)
    return result
