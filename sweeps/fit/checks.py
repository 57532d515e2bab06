"""Further fits of the same points, which help a reader judge a fit.

No decision depends on these checks. So they are computed only where they are shown, and not when a race or a ranking
refits hundreds of recipes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sweeps.as_json import AsJson
from sweeps.fit import verdict
from sweeps.fit.forecast import OutlookInputs, outlook_inputs
from sweeps.fit.points import Points

# Shift of R0, in units of the reward's range, that shows how much A and B depend on R0.
R0_STEP = 0.05


@dataclass(frozen=True)
class R0Effect(AsJson):
    """A and B, refitted with R0 fixed `step` lower and `step` higher; None where that R0 is impossible."""

    step: float
    A: tuple[float | None, float | None]
    B: tuple[float | None, float | None]


@dataclass(frozen=True, eq=False)
class Checks:
    """The fitted points and the checks of their fit; each check is computed at first use.

    Attributes:
        points: the fitted points.
        inputs: inputs of the fit's posterior.
        R0, A: fitted values, in reward.
        bounds: lowest and highest possible reward.
        parameters: number of parameters of the fit.
    """

    points: Points
    inputs: OutlookInputs
    R0: float
    A: float
    bounds: tuple[float, float]
    parameters: int

    @cached_property
    def extrapolation_error(self) -> float | None:
        """Error of a forecast of the last quarter of the window from a fit to the first half, as an absolute reward.

        None if the first half has too few points for a fit.
        """
        points, end = self.points, float(self.points.compute.max())
        first, last = points.compute <= 0.5 * end, points.compute >= 0.75 * end
        half = points.take(first)
        if not len(half.reward):
            return None
        if verdict.before_fit(half.compute, half.reward, half.seed, self.parameters) is not None:
            return None
        early_inputs = outlook_inputs(self.inputs.recipe, half, self.inputs.limits, options=self.inputs.options)
        if early_inputs is None:
            return None
        predicted = np.median(early_inputs.outlook.at(points.compute[last]), axis=0)
        return abs(float(predicted.mean() - points.reward[last].mean()))

    @cached_property
    def R0_effect(self) -> R0Effect | None:
        """A and B refitted with R0 fixed one step lower and higher; None unless a sigmoid was fitted with A free."""
        options = self.inputs.options
        if not options.is_free_sigmoid:
            return None
        step = R0_STEP * self.inputs.width
        estimates: list[tuple[float | None, float | None]] = []
        for r0 in (self.R0 - step, self.R0 + step):
            if not self.bounds[0] <= r0 < self.A:
                estimates.append((None, None))
                continue
            draws = replace(self.inputs, options=replace(options, r0=r0)).outlook.draws
            estimates.append((float(np.median(draws.A)), float(np.median(draws.B))))
        return R0Effect(step, (estimates[0][0], estimates[1][0]), (estimates[0][1], estimates[1][1]))
