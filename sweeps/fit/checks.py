"""Further fits of the same points, which help a reader judge a fit.

No decision depends on these checks. They are computed only where they are shown, not when a race or a ranking refits
hundreds of recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """A and B, refitted with R0 lower and higher by `step`; None where such an R0 or the refit is impossible."""

    step: float
    A: tuple[float | None, float | None]
    B: tuple[float | None, float | None]


@dataclass(frozen=True, eq=False)
class Checks:
    """The fitted points and the checks of their fit. Each check is computed when first read.

    Attributes:
        points: the fitted points.
        inputs: inputs of the fit's posterior.
        parameters: number of parameters of the fit.
    """

    points: Points
    inputs: OutlookInputs
    parameters: int

    @cached_property
    def extrapolation_error(self) -> float | None:
        """Error, in reward, of a test forecast: a fit to the first half of compute predicts the last quarter's mean.

        None if the first half has too few points for a fit.
        """
        points, end = self.points, float(self.points.compute.max())
        first, last = points.compute <= 0.5 * end, points.compute >= 0.75 * end
        half = points.take(first)
        if not len(half.reward):
            return None
        if verdict.refuse_points(half.compute, half.reward, half.seed, self.parameters) is not None:
            return None
        early_inputs = outlook_inputs(self.inputs.recipe, half, self.inputs.limits, options=self.inputs.options)
        if early_inputs is None:
            return None
        predicted = np.median(early_inputs.outlook.at(points.compute[last]), axis=0)
        return abs(float(predicted.mean() - points.reward[last].mean()))
