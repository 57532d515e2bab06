"""Comparison of curve families on one recipe, and of their forecasts with the last value's.

Families are compared by AICc on the points they all can use (positive compute), and by their error on later compute
that the fit has not seen: from origins at 50% to 90% of the window, each is fitted to what came before and predicts
what follows, up to twice the origin's compute (rolling origin). The yardstick is the last value: each seed's last
evaluation before the origin. Where no family beats it, the curve carries no forecast, and a ranking on
its asymptote is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.fit import least_squares as profile
from sweeps.fit import verdict
from sweeps.fit.checks import point_prediction
from sweeps.fit.family import FAMILIES
from sweeps.fit.least_squares import Array
from sweeps.fit.points import FitOptions, Points, fits_r0, pooled, problem_of, select, weighted

ORIGINS = (0.5, 0.6, 0.7, 0.8, 0.9)
# Fewer held-out points than this say nothing about skill.
_LEAST_HELD_OUT = 5


@dataclass(frozen=True)
class FamilyRow(AsJson):
    """Fit and forecast error of one family on one recipe's points.

    Attributes:
        parameters: number of fitted parameters, the seeds' offsets not counted.
        A, sse, r2: asymptote, weighted sum of squares and R^2 on all points of positive compute.
        aicc, delta_aicc: Akaike's criterion corrected for few points, and its excess over the least of all families.
        held_out: mean absolute error in reward on later, unseen compute; None where too little can be held out.
    """

    family: str
    parameters: int
    A: float | None
    sse: float
    aicc: float
    delta_aicc: float
    held_out: float | None
    r2: float | None


@dataclass(frozen=True)
class Comparison(AsJson):
    """Comparison of all families on one recipe.

    Attributes:
        rows: one per family; empty with too few points.
        last_value: mean absolute error of each seed's last value, in reward; None where too little is held out.
        beats_last: whether some family (but the constant) has a smaller error; None where too little is held out.
        sentence: the outcome in words.
    """

    recipe: str
    rows: tuple[FamilyRow, ...]
    last_value: float | None
    beats_last: bool | None
    sentence: str

    JSON: ClassVar = {"rows": "families"}


def compare(curve: Curve, options: FitOptions | None = None) -> Comparison:
    """Compare the families on one recipe, within the window of `options`; its R0 rule holds where it applies.

    Args:
        curve: evaluations of one recipe.
        options: R0 rule and compute window, and the family that the sentence names; the defaults if None.

    Raises:
        UserError: as for `sweeps.fit.fit.fit_curve`.
    """
    options = options or FitOptions()
    curve = _started(curve)
    every = {name: replace(options, family=name, asymptote=None) for name in FAMILIES}
    nothing = Comparison(curve.recipe, (), None, None, "too few points, or no change, to compare families on")
    if not len(curve.reward) or not len(select(curve, every["power_law"]).reward):
        return nothing
    points = {name: pooled(select(curve, how))[0] for name, how in every.items()}
    shared = points["sigmoid"].take(points["sigmoid"].compute > 0)
    if verdict.before_fit(shared.compute, shared.reward, shared.seed, 4) is not None:
        return nothing
    parts, last = _held_back(points["sigmoid"])
    held = {name: _error(points[name], every[name], parts, curve.bounds) for name in points} if parts else {}
    variance = 1 / weighted(shared, every["sigmoid"], curve.bounds).weight
    rows = [_row(name, shared, every[name], curve.bounds, variance, held.get(name)) for name in FAMILIES]
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


def _started(curve: Curve) -> Curve:
    """Drop the seeds that have no evaluation above compute 0: not every family could use them."""
    return curve.take(np.isin(curve.seed, curve.seed[curve.compute > 0]))


def _row(
    name: str, points: Points, options: FitOptions, bounds: tuple[float, float], variance: Array, held_out: float | None
) -> FamilyRow:
    """Fit a family to all points and return its row; `variance` (n,), of each point, is the same for every family."""
    problem = problem_of(points, options, bounds, variance)
    best = profile.solve(problem, tolerance=1e-9)
    n = len(points.reward)
    parameters = FAMILIES[name].shape + 1 + fits_r0(options)
    # Beside the curve: the seeds' offsets and the noise's variance.
    k = parameters + problem.seeds
    _, residual, _ = profile.evaluate(problem, best.u, best.v)
    # Weights of mean 1: the SSE is in units of the reward, whatever the size of the points' variances.
    share = problem.weight / problem.weight.mean()
    sse = float(share @ residual**2)
    # AICc = n ln(SSE / n) + 2 k + 2 k (k + 1) / (n - k - 1); it is not defined for n <= k + 1, and the floor keeps
    # noise-free data from ln 0.
    floor = n * (1e-7 * max(1.0, float(np.abs(points.reward).max()))) ** 2
    correction = 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else 1e6
    aicc = n * float(np.log((sse + floor) / n)) + 2 * k + correction
    spread = float(share @ (points.reward - share @ points.reward / n) ** 2)
    return FamilyRow(name, parameters, best.a, sse, aicc, 0.0, held_out, 1 - sse / spread if spread > 0 else None)


@dataclass(frozen=True, eq=False)
class _Later:
    """Evaluations after an origin, held back: `compute`, `reward` and `seed` are (m,)."""

    origin: float
    compute: Array
    reward: Array
    seed: Any


def _held_back(whole: Points) -> tuple[list[_Later], float | None]:
    """Return the evaluations held out after each origin, and the mean absolute error of the last value on them.

    A seed's later evaluations are compared with its own curve and its own last value, so that seeds that ended earlier
    do not matter.
    """
    end = float(whole.compute.max())
    parts: list[_Later] = []
    naive: list[Array] = []
    for share in ORIGINS:
        origin = share * end
        before = whole.compute <= origin
        later = (whole.compute > origin) & (whole.compute <= 2 * origin) & np.isin(whole.seed, whole.seed[before])
        seen = whole.take(before)
        if not later.any() or verdict.before_fit(seen.compute, seen.reward, seen.seed, 4) is not None:
            continue
        part = _Later(origin, whole.compute[later], whole.reward[later], whole.seed[later])
        last = {s: float(whole.reward[before & (whole.seed == s)][-1]) for s in np.unique(part.seed)}
        naive.append(np.abs(part.reward - np.array([last[s] for s in part.seed])))
        parts.append(part)
    if not naive or sum(len(part) for part in naive) < _LEAST_HELD_OUT:
        return [], None
    return parts, float(np.concatenate(naive).mean())


def _error(own: Points, options: FitOptions, parts: Sequence[_Later], bounds: tuple[float, float]) -> float:
    """Return the mean absolute error, in reward, of a family over everything that was held back."""
    errors = []
    for part in parts:
        # Numbers of seeds are those of the points taken.
        known = np.unique(own.seed[own.compute <= part.origin])
        number = np.where(np.isin(part.seed, known), np.searchsorted(known, part.seed), -1)
        seen = own.take(own.compute <= part.origin)
        predicted = point_prediction(seen, options, bounds, part.compute, number)
        errors.append(np.abs(part.reward - predicted))
    return float(np.concatenate(errors).mean())
