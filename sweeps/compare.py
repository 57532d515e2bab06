"""Which family of curves describes a recipe, and does any foretell more than "it stays as it is"?

Families are compared by AICc on the points they all can use (positive compute), and by their error on later compute
that the fit has not seen: from origins at 50% to 90% of the window, each is fitted to what came before and predicts
what follows, up to twice the origin's compute (rolling origin). The yardstick is the last value: the mean of the
seeds' last evaluations before the origin. Where no family beats it, the curve carries no forecast, and a ranking on
its asymptote is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sweeps import profile, verdict
from sweeps.curve import Curve
from sweeps.family import FAMILIES
from sweeps.fit import fits_r0, point_prediction
from sweeps.points import FitOptions, Points, bounds_of, pooled, select, weighted
from sweeps.profile import Array

ORIGINS = (0.5, 0.6, 0.7, 0.8, 0.9)
# Fewer held-out points than this say nothing about skill.
_LEAST_HELD_OUT = 5


@dataclass(frozen=True)
class FamilyRow:
    """One family on one recipe's points.

    parameters: fitted ones, seeds' offsets left out. A, sse, r2: on all positive-compute points. aicc: Akaike's
    criterion corrected for few points, delta_aicc: above the least. held_out: mean absolute error on later compute,
    None if the windows are too short.
    """

    family: str
    parameters: int
    A: float | None
    sse: float
    aicc: float
    delta_aicc: float
    held_out: float | None
    r2: float | None

    def to_json(self) -> dict[str, Any]:
        """One entry of `families`."""
        return dict(vars(self))


@dataclass(frozen=True)
class Comparison:
    """All families on one recipe. beats_last is None where too little was held out to tell."""

    recipe: str
    rows: tuple[FamilyRow, ...]
    last_value: float | None
    beats_last: bool | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """As printed by `scalerl fit --family all --json`."""
        return {
            "recipe": self.recipe,
            "families": [row.to_json() for row in self.rows],
            "last_value": self.last_value,
            "beats_last": self.beats_last,
            "sentence": self.sentence,
        }


def compare(curve: Curve, options: FitOptions | None = None) -> Comparison:
    """Compare the families on one recipe, within the window of `options`; its R0 rule holds where it applies.

    Raises:
        UserError: as for `sweeps.fit.fit_curve`.
    """
    options = options or FitOptions()
    every = {name: replace(options, family=name, asymptote=None) for name in FAMILIES}
    points = {name: pooled(select(curve, how))[0] for name, how in every.items()}
    shared = points["sigmoid"].take(points["sigmoid"].compute > 0)
    if not len(shared.reward) or verdict.before_fit(shared.compute, shared.reward, shared.seed, 4) is not None:
        return Comparison(curve.recipe, (), None, None, "too few points, or no change, to compare families on")
    held, last = _held_out(points, every)
    rows = [_row(name, shared, every[name], held.get(name)) for name in FAMILIES]
    least = min(row.aicc for row in rows)
    rows = [replace(row, delta_aicc=row.aicc - least) for row in rows]
    scored = [row for row in rows if row.held_out is not None and row.family != "constant"]
    beats = None
    sentence = "too little later compute to judge forecasts by"
    if last is not None and scored:
        best = min(scored, key=lambda row: row.held_out or 0.0)
        assert best.held_out is not None
        beats = best.held_out < last
        ours = next((row.held_out for row in scored if row.family == options.family), None)
        sentence = f"{best.family} foretells later compute best (error {best.held_out:.4f}; last value {last:.4f}" + (
            f", {options.family} {ours:.4f})" if ours is not None and best.family != options.family else ")"
        )
        if not beats:
            sentence = (
                f"no family foretells later compute better than the last value does (error {last:.4f}, "
                f"{best.family} {best.held_out:.4f})"
            )
    return Comparison(curve.recipe, tuple(rows), last, beats, sentence)


def _row(name: str, points: Points, options: FitOptions, held_out: float | None) -> FamilyRow:
    """A family fitted to all points."""
    bounds = bounds_of(points.reward)
    problem = weighted(points, options, bounds)
    best, _ = profile.solve(problem, polished=2, tolerance=1e-9)
    n = len(points.reward)
    parameters = FAMILIES[name].shape + 1 + fits_r0(options)
    # Beside the curve: the seeds' offsets and the noise's variance.
    k = parameters + problem.seeds
    # On one scale for all families, whose weights differ only through their residuals.
    _, residual, _ = profile.evaluate(problem, best.u, best.v)
    sse = float(residual @ residual)
    floor = n * (1e-7 * max(1.0, float(np.abs(points.reward).max()))) ** 2
    correction = 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else 1e6
    aicc = n * float(np.log((sse + floor) / n)) + 2 * k + correction
    spread = float(((points.reward - points.reward.mean()) ** 2).sum())
    return FamilyRow(name, parameters, best.a, sse, aicc, 0.0, held_out, 1 - sse / spread if spread > 0 else None)


def _held_out(points: dict[str, Points], options: dict[str, FitOptions]) -> tuple[dict[str, float], float | None]:
    """Mean absolute error of every family, and of the last value, over all origins' held-out points."""
    whole = points["sigmoid"]
    end = float(whole.compute.max())
    errors: dict[str, list[Array]] = {name: [] for name in points}
    naive: list[Array] = []
    for share in ORIGINS:
        origin = share * end
        later = (whole.compute > origin) & (whole.compute <= 2 * origin)
        seen = whole.take(whole.compute <= origin)
        if not later.any() or verdict.before_fit(seen.compute, seen.reward, seen.seed, 4) is not None:
            continue
        compute, reward = whole.compute[later], whole.reward[later]
        naive.append(np.abs(reward - _last_value(seen)))
        for name, own in points.items():
            part = own.take(own.compute <= origin)
            predicted = point_prediction(part, options[name], bounds_of(part.reward), compute)
            errors[name].append(np.abs(reward - predicted))
    if not naive or sum(len(part) for part in naive) < _LEAST_HELD_OUT:
        return {}, None
    return {name: float(np.concatenate(parts).mean()) for name, parts in errors.items()}, float(
        np.concatenate(naive).mean()
    )


def _last_value(points: Points) -> float:
    """Mean of the seeds' last evaluations."""
    return float(np.mean([points.reward[points.seed == s][-1] for s in np.unique(points.seed)]))
