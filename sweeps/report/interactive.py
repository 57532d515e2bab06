"""Data of the report's interactive figure, and the library that draws it: Vega-Lite, inlined into the page.

`sweeps/report/templates/report.js` makes the figure of `study_data`. Points are those of the curves; what else a
journal says of an evaluation (its step, other compute axes) is joined to them, so curves from tables have one axis.
"""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.curve import DEVICE_HOURS, FLOPS, UNITS, VIRTUAL_HOURS, Array, Curve
from sweeps.decide.rank import Ranking
from sweeps.fit.fit import Fit
from sweeps.fit.predict import predict, readable
from sweeps.report.overlay import style
from sweeps.report.thinning import MOST_HOVERED, evenly
from sweeps.run.journal import JournalView, Record
from sweeps.run.rollouts import Shown, kept_steps

# Axes besides the curves' own, in the order of the menu.
_AXES = {
    "step": "optimizer steps",
    "tokens": "tokens trained on",
    DEVICE_HOURS: UNITS[DEVICE_HOURS],
    VIRTUAL_HOURS: UNITS[VIRTUAL_HOURS],
    FLOPS: UNITS[FLOPS],
    "cost": "cost",
}
_CURVE_POINTS = 40
_NOTHING = float("nan")


@cache
def library() -> str | None:
    """Return Vega, Vega-Lite and Vega-Embed as one script, by gzip and base64; None if vl-convert is not installed.

    A third of the size that it is in full. vl-convert carries the sources and bundles them in some seconds: the
    bundle is kept in the user's cache.
    """
    try:
        import vl_convert
    except ImportError:
        return None
    # The package's own cache, see `lightning_scalerl.cache`.
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-scalerl"
    kept = Path(os.environ.get("SCALERL_CACHE", default)) / f"vega-{metadata.version('vl-convert-python')}.js.gz"
    try:
        packed = kept.read_bytes()
    except OSError:
        script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub knows of no default
        packed = gzip.compress(script.encode(), mtime=0)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            beside = kept.with_name(f"{kept.name}.{os.getpid()}")
            beside.write_bytes(packed)
            beside.replace(kept)
    return base64.b64encode(packed).decode()


def study_data(
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    short: Mapping[str, str],
    shown: Sequence[Shown],
    rate: float | None = None,
) -> dict[str, Any]:
    """Return what the interactive figure draws, as plain JSON: recipes with curves and asymptotes, points, runs.

    Args:
        curves, fits, ranking, runs: as for `write_report`.
        short: short labels of the recipes.
        shown: rollouts that stand on the page.
        rate: price of a device hour, which adds the axis of cost.
    """
    by_recipe = {curve.recipe: curve for curve in curves}
    fit_of = {fit.recipe: fit for fit in fits}
    order = [entry.recipe for entry in ranking.ranking]
    journals = _Journals(runs, curves[0].axis, curves[0].column, rate)
    total = sum(len(curve.compute) for curve in curves)
    share = min(1.0, MOST_HOVERED / max(total, 1))
    recipes: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for place, recipe in enumerate(order):
        curve, fit = by_recipe[recipe], fit_of[recipe]
        joined = [journals.find(recipe, str(seed), c, y) for seed, c, y in _rows(curve)]
        others = {axis: np.array([_on(axis, at, journals) for at in joined]) for axis in _AXES}
        colour, dash = style(place)
        recipes.append(
            {"label": recipe, "short": short[recipe], "colour": colour, "dash": dash}
            | _asymptote(fit, curve)
            | {"curve": _fitted_curve(fit, curve, others)}
        )
        for seed in dict.fromkeys(curve.seed):
            own = np.flatnonzero(curve.seed == seed)
            for at in own[evenly(len(own), share)]:
                run = joined[at]
                points.append(
                    {"r": place, "s": str(seed), "y": _short(curve.reward[at], 5), "c": _short(curve.compute[at])}
                    | ({} if curve.sd is None else {"e": _short(curve.sd[at], 3)})
                    | ({} if run is None else {"run": run[0]})
                    | {axis: _short(of[at], 5) for axis, of in others.items() if np.isfinite(of[at])}
                )
    # The figure needs no second copy of the curves' own axis.
    columns = sorted({key for point in points for key in point} - {curves[0].axis})
    return {
        "metric": curves[0].metric,
        "unit": curves[0].unit,
        "axes": [["c", curves[0].unit], *([axis, name] for axis, name in _AXES.items() if axis in columns)],
        "margin": ranking.margin,
        "recipes": recipes,
        "points": {column: [point.get(column) for point in points] for column in columns},
        "runs": [[str(view.path.parent), kept_steps(view.path.parent)] for view in runs],
        "shown": [[one.run, one.step] for one in shown],
        "thinned": [len(points), total] if len(points) < total else None,
    }


class _Journals:
    """Evaluations of all runs, to be found by seed, compute and reward."""

    def __init__(self, runs: Sequence[JournalView], axis: str, metric: str, rate: float | None) -> None:
        self.rate = rate
        self.tokens: list[dict[int, float]] = []
        self._exact: dict[tuple[str, str, float, float], tuple[int, Record]] = {}
        self._any: dict[tuple[float, float], tuple[int, Record] | None] = {}
        for number, view in enumerate(runs):
            trained = view.of_kind("train")
            counts = np.cumsum([float(record.metrics.get("train/credited_tokens", _NOTHING)) for record in trained])
            self.tokens.append({0: 0.0} | dict(zip((record.step for record in trained), counts, strict=True)))
            recipe, seed = str(view.header.get("recipe", "")), str(view.header.get("seed", ""))
            for record in view.of_kind("eval"):
                at = (float(record.metrics.get(axis, _NOTHING)), float(record.metrics.get(metric, _NOTHING)))
                self._exact[(recipe, seed, *at)] = (number, record)
                self._any[at] = None if at in self._any else (number, record)

    def find(self, recipe: str, seed: str, compute: float, reward: float) -> tuple[int, Record] | None:
        """Return the number of the run and the record of an evaluation; None if no journal has it, or several have.

        Recipe and seed may bear other names in a curve than in the journals: then compute and reward must do.
        """
        return self._exact.get((recipe, seed, compute, reward)) or self._any.get((compute, reward))


def _rows(curve: Curve) -> list[tuple[str, float, float]]:
    return list(zip(curve.seed, curve.compute.tolist(), curve.values.tolist(), strict=True))


def _on(axis: str, at: tuple[int, Record] | None, journals: _Journals) -> float:
    """Return where an evaluation stands on another axis; NaN where its journal does not say."""
    if at is None:
        return _NOTHING
    number, record = at
    if axis == "step":
        return float(record.step)
    if axis == "tokens":
        return journals.tokens[number].get(record.step, _NOTHING)
    if axis == "cost":
        return _NOTHING if journals.rate is None else journals.rate * record.metrics.get(DEVICE_HOURS, _NOTHING)
    return float(record.metrics.get(axis, _NOTHING))


def _asymptote(fit: Fit, curve: Curve) -> dict[str, Any]:
    """Return the asymptote with its interval, or where it may not be named the reward of the last tenth of compute."""
    if fit.identifiable and fit.A.value is not None:
        low, high = (bound if bound is not None else end for bound, end in zip(fit.A_total, fit.bounds, strict=True))
        return {"named": True, "a": _short(fit.A.value), "low": _short(low), "high": _short(high)}
    last = float(curve.reward[curve.compute >= 0.9 * curve.compute.max()].mean())
    return {"named": False, "a": _short(last), "verdict": fit.verdict}


def _fitted_curve(fit: Fit, curve: Curve, others: Mapping[str, Array]) -> dict[str, list[float | None]] | None:
    """Return the fitted curve with its 95% band within the window, on every axis; None if it has none."""
    if not readable(fit) or fit.window is None or not fit.window[0] < fit.window[1]:
        return None
    positive = curve.compute[curve.compute > 0]
    x = np.geomspace(max(fit.window[0], float(positive.min())), fit.window[1], _CURVE_POINTS)
    band = predict(fit, x)
    columns = {"c": x, "y": band.value, "low": band.low, "high": band.high}
    for axis, at in others.items():
        known = np.isfinite(at)
        if known.sum() < 2:
            continue
        # Seeds average: the curve is one function of compute, drawn where its runs stood on the other axis.
        compute, index = np.unique(curve.compute[known], return_inverse=True)
        mean = np.bincount(index, weights=at[known]) / np.bincount(index)
        columns[axis] = np.interp(x, compute, np.maximum.accumulate(mean))
    return {name: [_short(value) for value in values] for name, values in columns.items()}


def _short(value: float, digits: int = 4) -> float | None:
    """Return a number of few digits, or None for one that is not finite."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None
