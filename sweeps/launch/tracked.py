"""Observer that tracks a study's members in MLflow as they run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sweeps.errors import UserError
from sweeps.launch.observer import Observer
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec
from sweeps.tracking import Member, Shipper, Tracker
from sweeps.tracking.store import IDS_FILE, STATUS, STOPPED_TAG

_log = logging.getLogger(__name__)

RETRY_S = 60.0


class TrackingObserver(Observer):
    """Observer that logs a study to MLflow. It creates members there before they start, and updates them as they run.

    A slow or unavailable tracking server delays the display in MLflow, but never the study.

    Args:
        study: study whose members are tracked.
        uri: MLflow's tracking URI.
        axis: metric that the charts use as their compute axis.
    """

    def __init__(self, study: Study, uri: str, axis: str) -> None:
        self._study = study
        self._tracker = Tracker(uri, experiment=study.directory.resolve().name, axis=axis)
        self._shipper: Shipper | None = None
        self._statuses: dict[str, str] = {}
        self._were_stopped: set[str] = set()  # members that were stopped at some time, even if they have resumed since
        self._next_try = 0.0
        self._uncreated: list[RunSpec] = []  # added members that the store does not have yet

    def open(self) -> None:
        """Create the experiment, the parent run and the members' runs, before any member starts; then begin to send
        metrics.

        A study that was tracked before continues even if the store is unavailable. Tracking resumes when the store
        answers.

        Raises:
            UserError: the store cannot be reached, and the study was never tracked in it.
        """
        try:
            self._open()
        except UserError as error:
            if not (self._study.directory / IDS_FILE).is_file():
                raise
            _log.warning("%s; the study continues, and its records are sent to MLflow later", error)
            self._next_try = time.monotonic() + RETRY_S

    def _open(self) -> None:
        study = self._study
        self._were_stopped |= {entry["run"] for entry in study.ledger.entries() if entry["event"] == "stopped"}
        name = study.directory.resolve().name
        sweep = self._tracker.open_sweep(study.directory, self._members(study.specs), name=name)
        self._shipper = Shipper(self._tracker, sweep)
        # Statuses that were set while the store was unavailable.
        for run, status in self._statuses.items():
            self._shipper.set_status(run or sweep.key, status)
        self._shipper.start()

    def _members(self, specs: Sequence[RunSpec]) -> list[Member]:
        return [Member(spec.run, spec.recipe, spec.seed, self._study.run_dir(spec), spec.baseline) for spec in specs]

    def _set(self, run: str, status: str, tags: Mapping[str, str | None] | None = None) -> None:
        """Set the status of a member, or of the study if `run` is "". If the store is unavailable, it is set later."""
        self._statuses[run] = status
        if self._shipper is not None and (not run or run in self._shipper.sweep.members):
            self._shipper.set_status(run or self._shipper.sweep.key, status, tags)

    def added(self, specs: Sequence[RunSpec]) -> None:
        """Create the added members in MLflow before they start, like the first ones."""
        if self._shipper is not None:  # otherwise `_open` creates them, once the store answers
            self._uncreated += specs
            self._create_members(self._shipper)

    def _create_members(self, shipper: Shipper) -> None:
        """Create the members that the store does not have yet. If it is unavailable, try again after `RETRY_S`."""
        try:
            self._tracker.add_members(shipper.sweep, self._members(self._uncreated))
        except UserError as error:
            _log.warning("%s; trying again in %.0f s", error, RETRY_S)
            self._next_try = time.monotonic() + RETRY_S
            return
        created, self._uncreated = self._uncreated, []
        for spec in created:
            if spec.run in self._statuses:
                shipper.set_status(spec.run, self._statuses[spec.run])

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        """Set the member's status in MLflow to SCHEDULED."""
        self._set(spec.run, "SCHEDULED")

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """Set the member's status to RUNNING and clear the tag of an earlier stop."""
        self._set(spec.run, "RUNNING", {STOPPED_TAG: None} if spec.run in self._were_stopped else None)

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Set the member's status back to SCHEDULED."""
        self._set(spec.run, "SCHEDULED")

    def paused(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Set the member's status to SCHEDULED, as before its first start."""
        self._set(spec.run, "SCHEDULED")

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """Set the status to FINISHED, FAILED or KILLED, and the reason of a stop as a tag of the member's run."""
        if state == "stopped":
            self._were_stopped.add(spec.run)
        tags = {STOPPED_TAG: (reason or "") if state == "stopped" else None}
        self._set(spec.run, STATUS[state], tags if spec.run in self._were_stopped else None)

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """Retry an unavailable store every `RETRY_S` seconds. Metrics are sent independently, by the shipper."""
        if self._shipper is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + RETRY_S
            with suppress(UserError):
                self._open()
        elif self._uncreated and self._shipper is not None and time.monotonic() >= self._next_try:
            self._create_members(self._shipper)

    def close(self, failed: int, left: int) -> None:
        """Set the study's final status, unless members continue, and send the remaining metrics."""
        if not left:
            self._set("", "FAILED" if failed else "FINISHED")
        if self._shipper is None:
            with suppress(UserError):
                self._open()
        if self._shipper is None:
            _log.warning(
                "MLflow was unreachable until the end; `scalerl collect` or `scalerl publish` sends the missing records"
            )
        else:
            self._shipper.stop(final=True)
