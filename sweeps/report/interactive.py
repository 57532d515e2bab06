"""Prepare the data of the report's interactive figure, and the library that draws it: Vega-Lite, inlined in the page.

`sweeps/report/templates/report.js` draws the figure from `study_data`. The points' steps and their values on other
compute axes come from journals, so curves from tables have only one axis.
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
from sweeps.fit.predict import can_forecast, predict
from sweeps.report.drawing import ranking_styles
from sweeps.report.labels import cut
from sweeps.report.thinning import MAX_HOVERED, even_indices
from sweeps.run.journal import JournalView, Record
from sweeps.run.rollouts import ExamplePrompt, stored_steps

# Axes that the menu offers besides the axis of the curves, in its order.
_AXES = {
    "step": "optimizer steps",
    "tokens": "tokens trained on",
    DEVICE_HOURS: UNITS[DEVICE_HOURS],
    VIRTUAL_HOURS: UNITS[VIRTUAL_HOURS],
    FLOPS: UNITS[FLOPS],
    "cost": "cost",
}
_CURVE_POINTS = 40
# Lengths to which a recipe's name is cut where its asymptote is drawn: on a screen, and on a phone.
_NAME_LIMITS = (28, 18)
_UNKNOWN = float("nan")


@cache
def library() -> str | None:
    """Return Vega, Vega-Lite and Vega-Embed as one gzipped script in base64; None if vl-convert is not installed.

    Compression reduces the size to a third. Bundling the sources takes vl-convert a few seconds, so the bundle is
    cached in the user's cache folder.
    """
    try:
        import vl_convert
    except ImportError:
        return None
    # The cache folder of `lightning_scalerl.cache`.
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-scalerl"
    cached = Path(os.environ.get("SCALERL_CACHE", default)) / f"vega-{metadata.version('vl-convert-python')}.js.gz"
    try:
        compressed = cached.read_bytes()
    except OSError:
        script = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
        compressed = gzip.compress(script.encode(), mtime=0)
        with suppress(OSError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
            unfinished.write_bytes(compressed)
            unfinished.replace(cached)
    return base64.b64encode(compressed).decode()


def study_data(
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    short: Mapping[str, str],
    shown: Sequence[ExamplePrompt],
    rate: float | None = None,
) -> dict[str, Any]:
    """Return the data of the interactive figure as plain JSON: recipes with curves and asymptotes, points, runs.

    Args:
        curves, fits, ranking, runs: as for `write_report`.
        short: short labels of the recipes.
        shown: rollouts that are on the page.
        rate: price of a device hour, which adds an axis of cost; None for no such axis.
    """
    by_recipe = {curve.recipe: curve for curve in curves}
    fit_of = {fit.recipe: fit for fit in fits}
    order = [entry.recipe for entry in ranking.ranking]
    journals = _Journals(runs, curves[0].axis, curves[0].column, rate)
    total = sum(len(curve.compute) for curve in curves)
    fraction = min(1.0, MAX_HOVERED / max(total, 1))
    style_by_recipe, cuts = ranking_styles(ranking), [cut(list(short.values()), limit) for limit in _NAME_LIMITS]
    recipes: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for place, recipe in enumerate(order):
        curve, fit = by_recipe[recipe], fit_of[recipe]
        records = [journals.find(recipe, str(seed), c, y) for seed, c, y in _rows(curve)]
        other_axes = {axis: np.array([_axis_value(axis, record, journals) for record in records]) for axis in _AXES}
        colour, dash = style_by_recipe[recipe]
        recipes.append(
            {
                "label": recipe,
                "short": short[recipe],
                "cut": [cut_names[short[recipe]] for cut_names in cuts],
                "colour": colour,
                "dash": dash,
            }
            | _asymptote(fit, curve)
            | {"curve": _fitted_curve(fit, curve, other_axes)}
        )
        for seed in dict.fromkeys(curve.seed):
            rows = np.flatnonzero(curve.seed == seed)
            for index in rows[even_indices(len(rows), fraction)]:
                run = records[index]
                points.append(
                    {"r": place, "s": str(seed), "y": _round(curve.reward[index], 5), "c": _round(curve.compute[index])}
                    | ({} if curve.sd is None else {"e": _round(curve.sd[index], 3)})
                    | ({} if run is None else {"run": run[0]})
                    | {
                        axis: _round(values[index], 5)
                        for axis, values in other_axes.items()
                        if np.isfinite(values[index])
                    }
                )
    # The axis of the curves is stored as column "c".
    columns = sorted({key for point in points for key in point} - {curves[0].axis})
    return {
        "metric": curves[0].metric,
        "unit": curves[0].unit,
        "axes": [["c", curves[0].unit], *([axis, name] for axis, name in _AXES.items() if axis in columns)],
        "margin": ranking.margin,
        "recipes": recipes,
        "points": {column: [point.get(column) for point in points] for column in columns},
        "runs": [[str(view.path.parent), stored_steps(view.path.parent)] for view in runs],
        "shown": [[rollout.run, rollout.step] for rollout in shown],
        "thinned": [len(points), total] if len(points) < total else None,
    }


class _Journals:
    """Index of all runs' evaluations, for finding them by seed, compute and reward."""

    def __init__(self, runs: Sequence[JournalView], axis: str, metric: str, rate: float | None) -> None:
        self.rate = rate
        self.tokens: list[dict[int, float]] = []
        self._exact: dict[tuple[str, str, float, float], tuple[int, Record]] = {}
        self._any: dict[tuple[float, float], tuple[int, Record] | None] = {}
        for number, view in enumerate(runs):
            training_records = view.of_kind("train")
            counts = np.cumsum(
                [float(record.metrics.get("train/credited_tokens", _UNKNOWN)) for record in training_records]
            )
            self.tokens.append({0: 0.0} | dict(zip((record.step for record in training_records), counts, strict=True)))
            recipe, seed = str(view.header.get("recipe", "")), str(view.header.get("seed", ""))
            for record in view.of_kind("eval"):
                key = (float(record.metrics.get(axis, _UNKNOWN)), float(record.metrics.get(metric, _UNKNOWN)))
                self._exact[(recipe, seed, *key)] = (number, record)
                self._any[key] = None if key in self._any else (number, record)

    def find(self, recipe: str, seed: str, compute: float, reward: float) -> tuple[int, Record] | None:
        """Return an evaluation's run (by number) and record; None if it is in no journal, or in several.

        If recipe and seed have other names in the curve than in the journals, only compute and reward are compared.
        """
        return self._exact.get((recipe, seed, compute, reward)) or self._any.get((compute, reward))


def _rows(curve: Curve) -> list[tuple[str, float, float]]:
    return list(zip(curve.seed, curve.compute.tolist(), curve.values.tolist(), strict=True))


def _axis_value(axis: str, evaluation: tuple[int, Record] | None, journals: _Journals) -> float:
    """Return the value of an evaluation (number of its run, and record) on another axis; NaN if unknown."""
    if evaluation is None:
        return _UNKNOWN
    number, record = evaluation
    if axis == "step":
        return float(record.step)
    if axis == "tokens":
        return journals.tokens[number].get(record.step, _UNKNOWN)
    if axis == "cost":
        return _UNKNOWN if journals.rate is None else journals.rate * record.metrics.get(DEVICE_HOURS, _UNKNOWN)
    return float(record.metrics.get(axis, _UNKNOWN))


def _asymptote(fit: Fit, curve: Curve) -> dict[str, Any]:
    """Return the asymptote with its interval; if not identifiable, the mean reward over the last tenth of compute."""
    if fit.identifiable and fit.A.value is not None:
        low, high = (bound if bound is not None else end for bound, end in zip(fit.A_total, fit.bounds, strict=True))
        return {"named": True, "a": _round(fit.A.value), "low": _round(low), "high": _round(high)}
    last = float(curve.reward[curve.compute >= 0.9 * curve.compute.max()].mean())
    return {"named": False, "a": _round(last), "verdict": fit.verdict}


def _fitted_curve(fit: Fit, curve: Curve, other_axes: Mapping[str, Array]) -> dict[str, list[float | None]] | None:
    """Return the fitted curve with its 95% band within the evaluated compute, on every axis; None without a curve."""
    if not can_forecast(fit) or fit.window is None or not fit.window[0] < fit.window[1]:
        return None
    positive = curve.compute[curve.compute > 0]
    x = np.geomspace(max(fit.window[0], float(positive.min())), fit.window[1], _CURVE_POINTS)
    band = predict(fit, x)
    columns = {"c": x, "y": band.value, "low": band.low, "high": band.high}
    for axis, values_on_axis in other_axes.items():
        is_known = np.isfinite(values_on_axis)
        if is_known.sum() < 2:
            continue
        # The curve is a function of compute. The mean over runs maps compute to the other axis.
        compute, index = np.unique(curve.compute[is_known], return_inverse=True)
        mean = np.bincount(index, weights=values_on_axis[is_known]) / np.bincount(index)
        columns[axis] = np.interp(x, compute, np.maximum.accumulate(mean))
    return {name: [_round(value) for value in values] for name, values in columns.items()}


def _round(value: float, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None
