"""From sources to MLflow: members fed, fits and bands published, the link to the finished chart printed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.decide.rank import Ranking, rank
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import predict
from sweeps.run.journal import find_runs, read_journal
from sweeps.run.spec import SPEC_FILE, RunSpec
from sweeps.source import LoadedStudy, load
from sweeps.study import Study
from sweeps.tracking import FitSummary, Member, Shipper, TrackedSweep, Tracker, ship, ui_command
from sweeps.tracking import publish as publish_fits
from sweeps.tracking.store import IDS_FILE

_log = logging.getLogger(__name__)

CURVE_POINTS = 75
STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
RETRY_S = 60.0
ARTIFACTS = ("report.html", "ranking.csv", "report_curves.png", "report_curves.svg", "report_asymptotes.png")


def publish(sources: Sequence[str], uri: str) -> None:
    """Put one sweep into MLflow and print how to look at it.

    Args:
        sources: exactly one run or sweep directory.
        uri: tracking URI, such as `sqlite:///mlflow.db`.

    Raises:
        UserError: no such directory, nothing to fit, or MLflow cannot be reached.
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
    for member in sweep.members.values():
        with tracker.reaching("sending the members"):
            ship(member.member.run_dir, tracker.client, member.mlflow_run_id, axis=tracker.axis)
        status = STATUS.get(read_journal(member.member.run_dir).status)
        if status:
            tracker.set_status(member.mlflow_run_id, status)
    print(publish_into(tracker, sweep, loaded, fits, rank(fits)))


def publish_into(
    tracker: Tracker, sweep: TrackedSweep, loaded: LoadedStudy, fits: Sequence[Fit], ranking: Ranking
) -> str:
    """Publish fits of a sweep that is tracked already; returns the command and link that open the chart."""
    chances = {entry.recipe: entry.p_best for entry in ranking.ranking}
    summaries = [summary(fit, chances.get(fit.recipe)) for fit in fits]
    artifacts = [path for name in ARTIFACTS if (path := sweep.directory / name).is_file()]
    table = ranking.to_json()["ranking"]
    eval_set = loaded.curves[0].metric.split("/")[1]
    published = publish_fits(summaries, tracker, sweep, eval_set=eval_set, ranking=table, artifacts=artifacts)
    tracker.set_status(sweep.parent_id, "FINISHED")
    return str(ui_command(tracker.uri, published.link))


def member_of(run_dir: Path) -> Member:
    """The member behind a run directory, from its frozen specification or its journal's header."""
    if (run_dir / SPEC_FILE).is_file():
        spec = RunSpec.read(run_dir)
        return Member(spec.run, spec.recipe, spec.seed, run_dir)
    header = read_journal(run_dir).header
    return Member(f"{header['run']}-{run_dir.name}", header["recipe"], int(header["seed"]), run_dir)


def summary(fit: Fit, p_best: float | None) -> FitSummary:
    """What MLflow is told about a fit; a curve and band only if its asymptote may be named."""
    common: dict[str, Any] = {
        "recipe": fit.recipe,
        "verdict": fit.verdict,
        "axis": fit.curve.axis,
        "reason": fit.reason,
    }
    if not fit.identifiable or fit.A is None or fit.B is None or fit.C_mid is None:
        return FitSummary(**common, window=fit.window)
    positive = fit.curve.compute[fit.curve.compute > 0]
    compute = np.geomspace(positive.min(), positive.max(), CURVE_POINTS)
    band = predict(fit, compute)
    return FitSummary(
        **common,
        window=fit.window,
        A=fit.A.value,
        A_low=fit.A.low,
        A_high=fit.A.high,
        B=fit.B.value,
        C_mid=fit.C_mid.value,
        R0=fit.R0,
        rmse=fit.rmse,
        p_best=p_best,
        curve_x=compute,
        curve_y=band.mean,
        band_low=band.low,
        band_high=band.high,
    )


class TrackingObserver:
    """Tells MLflow about a study as it runs: members created before they start, fed as they go.

    A tracking server that is slow or away delays what is seen there, never the study.

    Args:
        study: whose members to track.
        uri: tracking URI.
        axis: compute axis of the charts.
    """

    def __init__(self, study: Study, uri: str, axis: str) -> None:
        self._study = study
        self._tracker = Tracker(uri, experiment=study.directory.resolve().name, axis=axis)
        self._shipper: Shipper | None = None
        self._statuses: dict[str, str] = {}
        self._next_try = 0.0

    def open(self) -> None:
        """Make schema, experiment, parent and members, once, before any member starts; then feed them.

        A study that is tracked already goes on although the store is away, and is tracked again once it answers.

        Raises:
            UserError: the store cannot be reached, and the study has never been in it.
        """
        try:
            self._open()
        except UserError as error:
            if not (self._study.directory / IDS_FILE).is_file():
                raise
            _log.warning("%s; the study goes on, and is told to MLflow later", error)
            self._next_try = time.monotonic() + RETRY_S

    def _open(self) -> None:
        study = self._study
        members = [Member(spec.run, spec.recipe, spec.seed, study.run_dir(spec)) for spec in study.specs]
        sweep = self._tracker.open_sweep(study.directory, members, name=study.directory.resolve().name)
        self._shipper = Shipper(self._tracker, sweep)
        for run, status in self._statuses.items():
            self._shipper.set_status(run or sweep.key, status)
        self._shipper.start()

    def _set(self, run: str, status: str) -> None:
        """Of a member, or of the sweep (""); kept as long as there is nobody to tell."""
        self._statuses[run] = status
        if self._shipper is not None:
            self._shipper.set_status(run or self._shipper.sweep.key, status)

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        """SCHEDULED."""
        self._set(spec.run, "SCHEDULED")

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """RUNNING."""
        self._set(spec.run, "RUNNING")

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """SCHEDULED again."""
        self._set(spec.run, "SCHEDULED")

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """FINISHED, FAILED or KILLED."""
        self._set(spec.run, STATUS[state])

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """Look for a store that was away; the shipper has a pace of its own."""
        if self._shipper is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + RETRY_S
            with suppress(UserError):
                self._open()

    def close(self, failed: int, left: int) -> None:
        """Ship what is there, then say how the sweep ended, if it has."""
        if not left:
            self._set("", "FAILED" if failed else "FINISHED")
        if self._shipper is None:
            with suppress(UserError):
                self._open()
        if self._shipper is None:
            _log.warning("MLflow was away all the time; `scalerl collect` or `scalerl publish` sends what is missing")
        else:
            self._shipper.stop(final=True)
