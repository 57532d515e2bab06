"""Background thread of the controller that sends journals to MLflow, and survives outages of the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps.curve import default_axis
from sweeps.errors import UserError
from sweeps.run.journal import CONFIG_FILE, JOURNAL_FILE, SEMANTICS_FILE, JournalError
from sweeps.run.tail import JournalTail
from sweeps.tracking.common import now_ms, one_line, without_credentials
from sweeps.tracking.ship import sent_steps, ship
from sweeps.tracking.store import STATUSES, TrackedMember, TrackedSweep, Tracker

# MLflow's error codes that concern one run instead of the store, for which retrying does not help.
_RUN_ERRORS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "BAD_REQUEST")

_log = logging.getLogger(__name__)


class Shipper:
    """Thread that sends the journals of a study's members to their MLflow runs.

    If the store does not answer, this is logged once, and the thread retries with growing pauses. No error reaches the
    controller. Unsent records are sent when the store answers again. A problem with one run (deleted in MLflow, damaged
    journal) is logged once and does not affect other runs.

    Args:
        tracker: client of the store.
        sweep: study to send; members added later are included.
        interval_s: seconds between passes over all members.
        max_pause_s: longest pause during an outage, in seconds.

    Attributes:
        outage: error of the last pass if the store did not answer, else None.
        troubles: problem of each run that has one, by the run's identity.
    """

    def __init__(
        self, tracker: Tracker, sweep: TrackedSweep, interval_s: float = 10.0, max_pause_s: float = 300.0
    ) -> None:
        self.tracker = tracker
        self.sweep = sweep
        self.interval_s = interval_s
        self.max_pause_s = max_pause_s
        self.outage: str | None = None
        self.run_problems: dict[str, str] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._statuses: dict[str, tuple[str, int, dict[str, str | None]]] = {}
        self._axes: dict[str, str] = {}
        self._tails: dict[str, JournalTail] = {}
        self._lock = threading.Lock()
        self._pass = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            self._stopping = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._loop, name="mlflow-shipper", daemon=True)
            self._thread.start()

    def stop(self, final: bool = True, timeout_s: float = 120.0) -> bool:
        """Stop the thread and, with `final`, send all durable records. Return whether MLflow has everything.

        A store that does not answer is tried up to three times within `timeout_s` seconds. Unsent records stay in the
        journals; the next start, or `scalerl publish`, sends them.
        """
        deadline = time.monotonic() + timeout_s
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning("MLflow: the store does not answer in time; not everything was sent")
                return False
            self._thread = None
        complete = False
        self._stamps.clear()  # runs with problems are tried once more
        for attempt in range(3 if final else 0):
            complete = self.run_once()
            if self.outage is None or time.monotonic() + 2**attempt > deadline:
                break
            time.sleep(min(2**attempt, self.interval_s))
        if final and not complete:
            reason = self.outage or next(iter(self.run_problems.values()), "unknown")
            _log.warning("MLflow: not everything was sent (%s); `scalerl publish` sends the rest", reason)
        return complete

    def set_status(self, run: str, status: str, tags: Mapping[str, str | None] | None = None) -> None:
        """Queue a status and tags for the next pass. `run` is a member's identity, or the study's key.

        A tag with the value None is removed.

        Raises:
            UserError: the status or run does not exist.
        """
        if status not in STATUSES:
            raise UserError(f"run status {status!r} is not one of {', '.join(STATUSES)}")
        if run != self.sweep.key and run not in self.sweep.members:
            raise UserError(f"run {run!r} is not in sweep {self.sweep.name!r}")
        with self._lock:
            self._statuses[run] = (status, now_ms(), dict(tags or {}))
        self._wake.set()

    def run_once(self) -> bool:
        """Run one pass over all members. Return whether all durable records have been sent. Never raises."""
        with self._pass:
            try:
                complete = all([self._ship_member(run) for run in list(self.sweep.members)])
                complete = all([self._apply_status(run) for run in list(self._statuses)]) and complete
            except Exception as error:  # an outage or an unforeseen error must not reach the controller
                if self.outage is None:
                    store = without_credentials(self.tracker.uri)
                    _log.warning("MLflow at %s does not answer (%s); trying again", store, one_line(error))
                self.outage = one_line(error)
                return False
            if self.outage is not None:
                _log.info("MLflow answers again; the backlog was sent")
            self.outage = None
            return complete

    def _loop(self) -> None:
        pause = self.interval_s
        while not self._stopping:
            self.run_once()
            pause = self.interval_s if self.outage is None else min(2 * pause, self.max_pause_s)
            # A new status must not shorten the pause during an outage.
            if self.outage is None:
                self._wake.wait(pause)
                self._wake.clear()
            else:
                until = time.monotonic() + pause
                while not self._stopping and time.monotonic() < until:
                    time.sleep(min(0.2, pause))

    def _ship_member(self, run: str) -> bool:
        """Send the new records of one member. Return False if the run has a problem.

        Raises:
            Exception: the store does not answer (any error of MLflow's client).
        """
        tracked = self.sweep.members[run]
        run_dir = tracked.member.run_dir
        stamp = tuple(
            number for name in (JOURNAL_FILE, CONFIG_FILE, SEMANTICS_FILE) for number in _stamp(run_dir / name)
        )
        if stamp[0] < 0 or self._stamps.get(run) == stamp:
            return run not in self.run_problems
        try:
            self._send(run, tracked)
        except JournalError as error:
            if "no header record yet" in str(error):
                return True
            trouble = str(error)
        except UserError as error:
            trouble = str(error)
        except Exception as error:
            if getattr(error, "error_code", None) not in _RUN_ERRORS:
                raise
            trouble = f"{run_dir}: {one_line(error)}"
        else:
            self.run_problems.pop(run, None)
            self._stamps[run] = stamp
            return True
        self._stamps[run] = stamp
        if self.run_problems.get(run) != trouble:
            _log.warning("MLflow: run skipped: %s", trouble)
        self.run_problems[run] = trouble
        return False

    def _send(self, run: str, tracked: TrackedMember) -> None:
        run_dir, run_id = tracked.member.run_dir, tracked.mlflow_run_id
        if run_id not in self._tails:
            self._tails[run_id] = JournalTail(run_dir)
            self._tails[run_id].forget(sent_steps(run_dir, run_id))
        tail = self._tails[run_id]
        view = tail.update()
        ship(run_dir, self.tracker.client, run_id, self._axis(tracked, view.header), view)
        if view.status == "finished":
            del self._tails[run_id]  # saves memory: of thousands of members, only a few run at one time
        else:
            tail.forget(sent_steps(run_dir, run_id))

    def _axis(self, tracked: TrackedMember, header: Mapping[str, Any]) -> str:
        """Return the compute axis of a run, by the device in its journal's header, and correct tags with a wrong axis.

        The controller could only guess the device: a login node may have no GPU, and a job may not use its GPU.
        """
        known = self._axes.get(tracked.mlflow_run_id)
        if known is not None:
            return known
        device = header.get("device")
        axis = self.tracker.axis if device is None else default_axis(str(device).startswith("cuda"))
        if axis != self.tracker.axis:
            for run_id in (tracked.mlflow_run_id, self.sweep.parent_id):
                self.tracker.set_tags(run_id, {"compute.axis": axis})
        self._axes[tracked.mlflow_run_id] = axis
        return axis

    def _apply_status(self, run: str) -> bool:
        """Send the queued status and tags of a run or the study. Return False if the run has a problem."""
        with self._lock:
            wanted = self._statuses[run]
        run_id = self.sweep.parent_id if run == self.sweep.key else self.sweep.members[run].mlflow_run_id
        done = True
        try:
            self.tracker.set_status(run_id, *wanted[:2])
            if tags := {name: value for name, value in wanted[2].items() if value is not None}:
                self.tracker.set_tags(run_id, tags)
            for name in wanted[2].keys() - tags.keys():
                self.tracker.remove_tag(run_id, name)
        except UserError as error:
            if getattr(error.__cause__, "error_code", None) not in _RUN_ERRORS:
                raise
            _log.warning("MLflow: %s", error)
            done = False
        with self._lock:
            if self._statuses.get(run) == wanted:
                del self._statuses[run]
        return done


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and modification time (ns) of a file; (-1, -1) if it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return (-1, -1)
    return stat.st_size, stat.st_mtime_ns
