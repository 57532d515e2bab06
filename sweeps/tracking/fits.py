"""Publish fits to MLflow: a fit run and two band runs per recipe, saved views, and artifacts of the parent run."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sweeps.curve import UNITS
from sweeps.errors import UserError
from sweeps.tracking.colours import LINE_TAG, RUN_COLOUR_TAG, line_value, recipe_colours
from sweeps.tracking.common import ChartKeys, now_ms
from sweeps.tracking.store import SWEEP_TAG, TrackedSweep, Tracker, run_colours
from sweeps.tracking.views import (
    BAND_KEY,
    RANK_KEY,
    VIEW_TAG,
    ChartRange,
    encode_view,
    link,
    ranking_state,
    recipes_state,
    scaling_state,
)

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

Array = npt.NDArray[np.float64]

RANKING_FILE = "ranking.json"
RATIO_KEY = "rank/times_compute"
# Largest number of lines that a view lists as collapsed, so that its state has at most 4,000 characters.
MAX_LINES = 200
_NOTE_START = "[Scaling curves]("


@dataclass(frozen=True)
class FitSummary:
    """Summary of one recipe's fit for MLflow. Unknown values and open bounds are None.

    Attributes:
        curve_x, curve_y: log-spaced compute (not its logarithm), and the fitted pass rate there; None to draw no curve.
        band_low, band_high: ends of the band at `curve_x`.
        label: short name of the recipe in the chart.
        efficiency: compute to 90% of the gain up to the tied recipes' common asymptote.
        ratio: `efficiency` divided by the efficiency of the first recipe.
        place_at_k: the recipe's place by pass@k at common compute.
    """

    recipe: str
    verdict: str
    axis: str
    window: tuple[float, float] | None = None
    reason: str | None = None
    A: float | None = None
    A_low: float | None = None
    A_high: float | None = None
    B: float | None = None
    C_mid: float | None = None
    R0: float | None = None
    rmse: float | None = None
    p_best: float | None = None
    curve_x: Array | None = None
    curve_y: Array | None = None
    band_low: Array | None = None
    band_high: Array | None = None
    rank: int | None = None
    label: str | None = None
    efficiency: float | None = None
    ratio: float | None = None
    place_at_k: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics `fit/*` and `rank/*` that are known and finite."""
        log10_c_mid = math.log10(self.C_mid) if self.C_mid is not None and 0 < self.C_mid < math.inf else None
        values = {
            "fit/A": self.A,
            "fit/A_low": self.A_low,
            "fit/A_high": self.A_high,
            "fit/B": self.B,
            "fit/log10_C_mid": log10_c_mid,
            "fit/R0": self.R0,
            "fit/rmse": self.rmse,
            "rank/p_best": self.p_best,
            RANK_KEY: self.rank,
            "rank/efficiency": self.efficiency,
            RATIO_KEY: self.ratio,
            "rank/place_at_k": self.place_at_k,
        }
        return {key: float(v) for key, v in values.items() if v is not None and math.isfinite(v)}

    def tags(self) -> dict[str, str]:
        """Return tags with verdict, fitted range of compute, axis and A's bounds ("open" for an open bound)."""
        out = {"fit.verdict": self.verdict, "fit.axis": self.axis, "fit.reason": self.reason or "none"}
        out["fit.window"] = "none" if self.window is None else f"{self.window[0]:.6g} to {self.window[1]:.6g}"
        metrics = self.metrics()
        for end in ("A_low", "A_high"):
            out[f"fit.{end}"] = f"{metrics[f'fit/{end}']:.6g}" if f"fit/{end}" in metrics else "open"
        return out

    def curve(self) -> dict[str, Array] | None:
        """Return the columns x (log10 of compute), fit and, with a band, low and high; None without finite points."""
        if self.curve_x is None or self.curve_y is None:
            return None
        columns = {"x": np.asarray(self.curve_x, float), "fit": np.asarray(self.curve_y, float)}
        if self.band_low is not None and self.band_high is not None:
            columns |= {"low": np.asarray(self.band_low, float), "high": np.asarray(self.band_high, float)}
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["x"] = np.log10(columns["x"])
        keep = np.all([np.isfinite(column) for column in columns.values()], axis=0)
        return {name: column[keep] for name, column in columns.items()} if keep.any() else None


@dataclass(frozen=True)
class Published:
    """Links to the saved views, to be appended to the interface's address, and the id of each recipe's fit run."""

    link: str
    recipes_link: str
    ranking_link: str
    fit_runs: dict[str, str]


def publish(
    fits: Sequence[FitSummary],
    tracker: Tracker,
    sweep: TrackedSweep,
    *,
    eval_set: str = "heldout",
    ranking: Sequence[Mapping[str, Any]] = (),
    artifacts: Iterable[str | Path] = (),
    at_k: str = "",
) -> Published:
    """Publish fits, bands, ranking and saved views of one study to MLflow, and remove earlier publications.

    The new runs are complete before the earlier ones are deleted, so that a failure midway leaves the old chart. Each
    member gets the `fit/*` metrics and tags of its recipe, so that members can be sorted by them. The step of these
    metrics is the number of publications so far.

    Args:
        fits: summaries of the fits.
        tracker: client of the store.
        sweep: the study with its MLflow ids.
        eval_set: evaluation set of the fits.
        ranking: rows of the ranking, stored as a table of the parent run.
        artifacts: files to store with the parent run.
        at_k: sentence on the rankings by pass@1 and pass@k, stored as the tag `rank.pass_at_k`; "" without one.

    Raises:
        UserError: a file does not exist, or the store does not answer.
    """
    files = [Path(file) for file in artifacts]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"artifacts {', '.join(missing)}: no such file; nothing was published")
    keys = ChartKeys(eval_set, UNITS.get(tracker.axis, tracker.axis.removeprefix("compute/")))
    created: list[str] = []
    with tracker.store_errors("publishing fits"):
        runs = tracker.sweep_runs(sweep)
        earlier = [r.info.run_id for r in runs if r.data.tags.get("kind") in ("fit", "band")]
        parent = next((r for r in runs if r.info.run_id == sweep.parent_id), None)
        count = 1 + int(parent.data.tags.get("scalerl.published", "0") if parent is not None else 0)
        members = [run for run in runs if run.data.tags.get("kind") == "member"]
        lines = _lines(fits, members)
        try:
            fit_runs = {fit.recipe: _fit_runs(fit, tracker, sweep, keys, lines, created) for fit in fits}
        except BaseException:
            for run_id in created:
                with contextlib.suppress(Exception):
                    tracker.client.delete_run(run_id)
            raise
        for run_id in earlier:
            tracker.client.delete_run(run_id)
        points = [_complete_points(run, tracker, keys) for run in members]
        for fit in fits:
            for run in members:
                if run.data.tags.get("recipe") == fit.recipe:
                    _copy_to_member(fit, tracker, run, count, lines.tags(run))
        for file in files:
            tracker.client.log_artifact(sweep.parent_id, str(file))
        if ranking:
            _ranking_table(ranking, tracker, sweep)
        tracker.set_tags(sweep.parent_id, {"scalerl.published": str(count), "rank.pass_at_k": at_k or "none"})
        return _views(fits, tracker, sweep, fit_runs, members, points, keys, lines)


@dataclass(frozen=True)
class _Lines:
    """Labels and colours of a study's lines in the chart, by recipe."""

    labels: Mapping[str, str]
    colours: Mapping[str, str]

    def value(self, recipe: str, what: str) -> str:
        """Return the value of the tag `line` for one line of a recipe.

        `what` is "fit", or a text that names the seed.
        """
        return line_value(f"{self.labels.get(recipe, recipe)} {what}", self.colours[recipe])

    def tags(self, member: Run) -> dict[str, str]:
        """Return the tag `line` of a member and, if the member has no colour yet, the tag for its colour."""
        own_tags = member.data.tags
        what = own_tags.get("series", "").removeprefix(f"{own_tags['recipe']} ") or member.info.run_id
        tags = {LINE_TAG: self.value(own_tags["recipe"], what)}
        return tags if RUN_COLOUR_TAG in own_tags else tags | {RUN_COLOUR_TAG: self.colours[own_tags["recipe"]]}


def _lines(fits: Sequence[FitSummary], members: Sequence[Run]) -> _Lines:
    """Return the lines of all recipes. Recipes keep the colours that their members already have."""
    recipes = [run.data.tags["recipe"] for run in reversed(members)] + [fit.recipe for fit in fits]
    labels = {fit.recipe: fit.label or fit.recipe for fit in fits}
    counts = Counter(run.data.tags.get("baseline") for run in members)
    baseline = max(filter(None, counts), key=lambda recipe: counts[recipe], default=None)
    return _Lines(labels, recipe_colours(dict.fromkeys(recipes), run_colours(members), baseline))


def _fit_runs(
    fit: FitSummary, tracker: Tracker, sweep: TrackedSweep, keys: ChartKeys, lines: _Lines, created: list[str]
) -> str:
    """Create the fit run and the band runs of one recipe. Return the fit run's id, and append all ids to `created`."""
    from mlflow.entities import Metric, Param

    curve = fit.curve()
    drawn = ["fit"] if curve is None else [name for name in ("low", "high", "fit") if name in curve]
    at = now_ms()
    fit_id = ""
    for name in drawn:
        tags = {
            "mlflow.parentRunId": sweep.parent_id,
            "kind": "fit" if name == "fit" else "band",
            "series": f"{fit.recipe} fit",
            "recipe": fit.recipe,
            SWEEP_TAG: sweep.key,
            LINE_TAG: lines.value(fit.recipe, "fit"),
            RUN_COLOUR_TAG: lines.colours[fit.recipe],
        }
        tags |= {key: value[:8000] for key, value in fit.tags().items()}
        run = tracker.client.create_run(sweep.experiment_id, run_name=f"{fit.recipe} {name}", tags=tags)
        run_id = str(run.info.run_id)
        created.append(run_id)
        metrics: list[Metric] = []
        if name == "fit":
            fit_id = run_id
            metrics += [Metric(key, value, at, 0) for key, value in fit.metrics().items()]
        elif fit.rank is not None:
            # A band has the rank of its fit, so that both are sorted together.
            metrics.append(Metric(RANK_KEY, fit.rank, at, 0))
        if curve is not None:
            columns = {keys.x: curve["x"], keys.log10: curve["x"], keys.compute: 10 ** curve["x"]}
            columns[BAND_KEY] = curve[name] if name != "fit" else _values_with_mean_on_curve(curve)
            if name == "fit":
                columns |= {f"curve/{c}": curve[c] for c in ("fit", "low", "high") if c in curve}
            metrics += [
                Metric(key, float(value), at, step)
                for key, column in columns.items()
                for step, value in enumerate(column)
            ]
        _log(tracker, run_id, metrics)
        if name == "fit":
            tracker.client.log_batch(run_id, params=[Param("recipe", fit.recipe[:6000])])
        tracker.client.set_terminated(run_id, status="FINISHED")
    return fit_id


def _values_with_mean_on_curve(curve: Mapping[str, Array]) -> Array:
    """Return values whose mean with both ends of the band is the fitted curve, clipped to the band.

    MLflow draws the line of a group as the mean of its runs. If the curve itself was one of these runs, the line would
    be above the curve wherever the band is wider above than below.
    """
    if "low" not in curve:
        return curve["fit"]
    low, high = curve["low"], curve["high"]
    return np.clip(3 * curve["fit"] - low - high, np.minimum(low, high), np.maximum(low, high))


def _log(tracker: Tracker, run_id: str, metrics: Sequence[Metric]) -> None:
    for start in range(0, len(metrics), 1000):
        tracker.client.log_batch(run_id, metrics=metrics[start : start + 1000])


@dataclass(frozen=True)
class _Points:
    """Evaluations of a member in MLflow: `log10`, `rate` at compute above 0; `compute`, `whole` at all compute."""

    log10: list[float]
    rate: list[float]
    compute: list[float]
    whole: list[float]


def _complete_points(member: Run, tracker: Tracker, keys: ChartKeys) -> _Points:
    """Return the evaluations of a member, after logging metrics of the charts that MLflow lacks.

    The metrics of the compute axes are logged only here, at exactly the steps of the metrics drawn over them. Runs sent
    by an earlier version get their whole curve here too. Stored values are not changed.
    """
    from mlflow.entities import Metric

    def history(key: str) -> list[Metric]:
        return tracker.client.get_metric_history(member.info.run_id, key) if key in member.data.metrics else []

    rates = {point.step: point for point in history(keys.rate)}
    positive = [(rates[x.step], x.value) for x in history(keys.x) if x.step in rates]
    all_points = [(point, 0.0) for point in history(keys.start)] + [(point, 10**x) for point, x in positive]
    wanted = [(keys.log10, point, x) for point, x in positive]
    wanted += [(keys.compute, point, compute) for point, compute in all_points]
    wanted += [(keys.whole, point, point.value) for point, _ in all_points]
    # The chart's first metric is that of the fits. A member gets an empty value of it, so that its evaluations are its
    # second metric, which MLflow draws dashed.
    wanted += [(BAND_KEY, point, math.nan) for point, _ in positive[:1]]
    stored = {(key, point.step) for key in (keys.log10, keys.compute, keys.whole, BAND_KEY) for point in history(key)}
    missing = [
        Metric(key, value, point.timestamp, point.step)
        for key, point, value in wanted
        if (key, point.step) not in stored
    ]
    _log(tracker, member.info.run_id, missing)
    return _Points(
        log10=[x for _, x in positive],
        rate=[point.value for point, _ in positive],
        compute=[compute for _, compute in all_points],
        whole=[point.value for point, _ in all_points],
    )


def _copy_to_member(fit: FitSummary, tracker: Tracker, member: Run, count: int, more_tags: Mapping[str, str]) -> None:
    """Copy those of a recipe's metrics `fit/*` and `rank/*` that have changed to a member run.

    A metric that the new fit lacks becomes NaN, because a table would otherwise show, and sort by, the earlier value. A
    tag lists such metrics.
    """
    from mlflow.entities import Metric

    values = fit.metrics()
    known = {k: v for k, v in member.data.metrics.items() if k.startswith(("fit/", "rank/"))}
    stale = sorted(set(known) - set(values))
    at = now_ms()
    metrics = [Metric(key, value, at, count) for key, value in values.items() if known.get(key) != value]
    metrics += [Metric(key, math.nan, at, count) for key in stale if not math.isnan(known[key])]
    _log(tracker, member.info.run_id, metrics)
    tracker.set_tags(member.info.run_id, {**fit.tags(), "fit.stale": ", ".join(stale) or "none", **more_tags})


def _ranking_table(ranking: Sequence[Mapping[str, Any]], tracker: Tracker, sweep: TrackedSweep) -> None:
    """Write the ranking as MLflow's `log_table` does, but replace the earlier table instead of appending to it."""
    columns = list(dict.fromkeys(key for row in ranking for key in row))
    rows = [[_cell(row.get(column)) for column in columns] for row in ranking]
    tracker.client.log_dict(sweep.parent_id, {"columns": columns, "data": rows}, RANKING_FILE)
    tables = json.dumps([{"path": RANKING_FILE, "type": "table"}])
    tracker.client.set_tag(sweep.parent_id, "mlflow.loggedArtifacts", tables)


def _cell(value: Any) -> Any:
    """Convert a value to a table cell: a JSON scalar, or JSON text; None for numbers that are not finite."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else json.dumps(value, default=str)


def _ranges(fits: Sequence[FitSummary], points: Sequence[_Points]) -> tuple[ChartRange, ChartRange]:
    """Return the axis ranges of the charts over log10 of compute and over compute, which cover all that is drawn."""
    curves = [curve for fit in fits if (curve := fit.curve())]
    log10 = [x for member in points for x in member.log10] + [x for curve in curves for x in curve["x"].tolist()]
    compute = [x for member in points for x in member.compute] + [
        10**x for curve in curves for x in curve["x"].tolist()
    ]
    drawn = [y for curve in curves for name, column in curve.items() if name != "x" for y in column.tolist()]
    return (
        ChartRange.around(log10, [*(y for member in points for y in member.rate), *drawn]),
        ChartRange.around(compute, [*(y for member in points for y in member.whole), *drawn]),
    )


def _views(
    fits: Sequence[FitSummary],
    tracker: Tracker,
    sweep: TrackedSweep,
    fit_runs: dict[str, str],
    members: Sequence[Run],
    points: Sequence[_Points],
    keys: ChartKeys,
    lines: _Lines,
) -> Published:
    """Save the views as tags of the experiment, and write links to them into the first line of its note."""
    client, experiment_id = tracker.client, sweep.experiment_id
    fitted = [set(fit.metrics()) for fit in fits if "fit/A" in fit.metrics()] or [set()]
    order = ("fit/log10_C_mid", "fit/B", "rank/p_best", "fit/A_low", "fit/A_high", "fit/A")
    # A recipe without one of the metrics would not be drawn: keep those that all recipes have.
    charted = [key for key in order if key in set.intersection(*fitted)]
    keys_shown = (RANK_KEY, "rank/p_best", "fit/A", "fit/A_low", "fit/A_high", keys.whole, RATIO_KEY)
    columns = [f"metrics.`{key}`" for key in keys_shown]
    columns.insert(2, "tags.`fit.verdict`")
    by_recipe = [f"metrics.`{key}`" for key in (RANK_KEY, "fit/A", "fit/A_low", "fit/A_high", RATIO_KEY, "rank/p_best")]
    by_recipe.append("tags.`fit.verdict`")
    shown = []  # the best recipes first, because the number of lines is limited
    for fit in sorted(fits, key=lambda fit: fit.rank or math.inf):
        shown.append(lines.value(fit.recipe, "fit"))
        shown += [lines.tags(run)[LINE_TAG] for run in members if run.data.tags["recipe"] == fit.recipe]
    logarithmic, linear = _ranges(fits, points)
    views = {
        f"scaling-{sweep.key}": (
            "Scaling curves",
            scaling_state(sweep.key, keys, logarithmic, linear, shown[:MAX_LINES]),
        ),
        f"recipes-{sweep.key}": ("Recipes", recipes_state(sweep.key, charted, by_recipe)),
        f"ranking-{sweep.key}": ("Ranking", ranking_state(sweep.key, charted, columns)),
    }
    for view_id, (name, state) in views.items():
        value = encode_view(f"{name}: {sweep.name}", state, now_ms())
        client.set_experiment_tag(experiment_id, VIEW_TAG + view_id, value)
    scaling = link(experiment_id, f"scaling-{sweep.key}")
    recipes, ranking = (link(experiment_id, f"{name}-{sweep.key}", "TABLE") for name in ("recipes", "ranking"))
    note = client.get_experiment(experiment_id).tags.get("mlflow.note.content", "")
    first, _, rest = note.partition("\n")
    kept = rest if first.startswith(_NOTE_START) else f"\n{note}" if note else ""
    line = f"{_NOTE_START}{scaling}), [recipes]({recipes}) and [runs by rank]({ranking}) of {sweep.name}"
    client.set_experiment_tag(experiment_id, "mlflow.note.content", f"{line}\n{kept}")
    return Published(scaling, recipes, ranking, fit_runs)
