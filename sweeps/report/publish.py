"""Publish to MLflow: send the members' metrics, log fits and bands, print links to the views."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.decide.at_k import AtK, study_at_k
from sweeps.decide.rank import Ranked, Ranking, rank
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import predict
from sweeps.launch.ledger import Ledger
from sweeps.launch.settings import LaunchSettings
from sweeps.report.labels import shorten_labels
from sweeps.run.journal import find_runs, read_journal
from sweeps.run.spec import SPEC_FILE
from sweeps.search.race_log import RACE_FILE
from sweeps.source import LoadedStudy, load
from sweeps.tracking import FitSummary, Member, TrackedSweep, Tracker, ship, ui_command
from sweeps.tracking import publish as publish_fits
from sweeps.tracking.store import STATUS, STOPPED_TAG

_log = logging.getLogger(__name__)

CURVE_POINTS = 75
ARTIFACTS = (
    "report.html",
    "ranking.csv",
    "report_overlay.png",
    "report_curves.png",
    "report_curves.svg",
    "report_asymptotes.png",
    RACE_FILE,
)


def publish(
    sources: Sequence[str], uri: str, on_ranked: Callable[[Sequence[Fit], Ranking], None] = lambda fits, ranking: None
) -> None:
    """Publish one study to MLflow, and print the command that opens its interface and the links to its views.

    Args:
        sources: exactly one folder of a run or study.
        uri: tracking URI, such as `sqlite:///mlflow.db`.
        ranked: function that is called with fits and ranking, before the links are printed.

    Raises:
        UserError: the folder does not exist, there is nothing to fit, or MLflow cannot be reached.
    """
    if len(sources) != 1:
        raise UserError(f"publish: {len(sources)} sources given; one sweep at a time")
    directory = Path(sources[0])
    members = [member_of(run_dir) for run_dir in find_runs(directory)]
    if not members:
        raise UserError(f"publish: {directory} holds no runs; give a sweep directory")
    loaded = load([str(directory)])
    fits = fit_curves(loaded.curves)
    tracker = Tracker(uri, experiment=directory.resolve().name, axis=loaded.curves[0].axis)
    sweep = tracker.open_sweep(directory, members, name=directory.resolve().name, reopen=False)
    states = Ledger(directory).fold()
    for member in sweep.members.values():
        with tracker.store_errors("sending the members"):
            ship(member.member.run_dir, tracker.client, member.mlflow_run_id, axis=tracker.axis)
        state = states.get(member.member.run)
        if state is not None and state.state == "stopped":
            tracker.set_status(member.mlflow_run_id, STATUS["stopped"])
            tracker.set_tags(member.mlflow_run_id, {STOPPED_TAG: state.reason or ""})
        elif status := STATUS.get(read_journal(member.member.run_dir).status):
            tracker.set_status(member.mlflow_run_id, status)
            with tracker.store_errors("removing a tag"):
                tracker.remove_tag(member.mlflow_run_id, STOPPED_TAG)
    ranking = rank(fits, margin=LaunchSettings.margin_of(directory))
    at_k = study_at_k(loaded, ranking, fit_curves)
    links = publish_into(tracker=tracker, sweep=sweep, loaded=loaded, fits=fits, ranking=ranking, at_k=at_k)
    on_ranked(fits, ranking)
    print(links)


def publish_into(
    tracker: Tracker,
    sweep: TrackedSweep,
    loaded: LoadedStudy,
    fits: Sequence[Fit],
    ranking: Ranking,
    at_k: AtK | None = None,
) -> str:
    """Publish fits of a study that is already tracked. Return the command and the links that open the views."""
    entries = {entry.recipe: entry for entry in ranking.ranking}
    labels = shorten_labels([fit.recipe for fit in fits])
    places = {} if at_k is None else {row.recipe: row.at_k.place for row in at_k.rows}
    summaries = [
        replace(summary(fit, entries.get(fit.recipe), labels[fit.recipe]), place_at_k=places.get(fit.recipe))
        for fit in fits
    ]
    artifacts = [path for name in ARTIFACTS if (path := sweep.directory / name).is_file()]
    table = ranking.to_json()["ranking"]
    eval_set = loaded.curves[0].metric.split("/")[1]
    sentence = "" if at_k is None else at_k.sentence
    published = publish_fits(
        summaries, tracker, sweep, eval_set=eval_set, ranking=table, artifacts=artifacts, at_k=sentence
    )
    tracker.set_status(sweep.parent_id, "FINISHED")
    links = (published.link, published.recipes_link, published.ranking_link)
    chart, recipes, runs = (ui_command(tracker.uri, link) for link in links)
    lines = [
        f"points, curves and bands: {chart.url}",
        f"one row per recipe:       {recipes.url}",
        f"runs by rank:             {runs.url}",
    ]
    return "\n".join(lines if chart.command is None else [chart.command, *lines])


def member_of(run_dir: Path) -> Member:
    """Make a `Member` from the header of a run's journal."""
    header = read_journal(run_dir).header
    # Runs of scripts may share an identity, so add the folder's name.
    run = header["run"] if (run_dir / SPEC_FILE).is_file() else f"{header['run']}-{run_dir.name}"
    return Member(
        run=run,
        recipe=header["recipe"],
        seed=int(header["seed"]),
        run_dir=run_dir,
        baseline=header.get("baseline"),
    )


def summary(fit: Fit, entry: Ranked | None, label: str) -> FitSummary:
    """Summarize a fit for MLflow. Parameters, curve and band are included only if A is identifiable."""
    common: dict[str, Any] = {
        "recipe": fit.recipe,
        "verdict": fit.verdict,
        "axis": fit.curve.axis,
        "reason": fit.reason,
        "window": fit.window,
        "label": label,
        "p_best": None if entry is None else entry.p_best,
        "rank": None if entry is None else entry.rank,
        **_efficiency(entry),
    }
    if not fit.identifiable:
        return FitSummary(**common)
    positive = fit.curve.compute[fit.curve.compute > 0]
    compute = np.geomspace(positive.min(), positive.max(), CURVE_POINTS)
    band = predict(fit, compute)
    return FitSummary(
        **common,
        A=fit.A.value,
        A_low=fit.A.low,
        A_high=fit.A.high,
        B=fit.B.value,
        C_mid=fit.C_mid.value,
        R0=fit.R0,
        rmse=fit.rmse,
        curve_x=compute + fit.curve.origin,  # members' points in MLflow are at the compute since the run's start
        curve_y=band.value,
        band_low=band.low,
        band_high=band.high,
    )


def _efficiency(entry: Ranked | None) -> dict[str, float | None]:
    """Return the compute to 90% of the gain to a shared A, and its ratio to the first recipe's; empty if not tied."""
    if entry is None or entry.efficiency is None:
        return {}
    ratio = 1.0 if entry.p_neither is None else None if entry.ratio is None else entry.ratio.value
    return {"efficiency": entry.efficiency.value, "ratio": ratio}
