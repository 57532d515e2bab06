"""Heartbeat file next to a journal: the compute that a run has spent so far, in case its process is killed.

Without it, the compute spent since the last journal record (a long generation or step) would not be accounted for. The
file is first written one second after the start, then at growing intervals of up to 15 seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lightning_scalerl.measure.compute_meter import WASTED, ComputeMeter, spent_in
from sweeps.run.files import read_json, write_json
from sweeps.run.journal import finite

HEARTBEAT_FILE = "compute.json"
FIRST_S, RAREST_S = 1.0, 15.0
_log = logging.getLogger(__name__)


class MeterHeartbeat:
    """Background thread that writes the totals of a compute meter into `compute.json`.

    Args:
        run_dir: directory of the run.
        meter: the meter; it is only read.
        guard: called before each write; raises if another process has taken over the run, which ends the heartbeat.
    """

    def __init__(self, run_dir: Path, meter: ComputeMeter, guard: Callable[[], None]) -> None:
        self._path = run_dir / HEARTBEAT_FILE
        self._meter, self._guard = meter, guard
        self._done = threading.Event()
        self._failing = False
        self._try_beat()
        self._thread = threading.Thread(target=self._run, daemon=True, name="meter heartbeat")
        self._thread.start()

    def stop(self, finished: bool) -> None:
        """End the thread and write a last time; the file of a finished run is deleted instead."""
        self._done.set()
        self._thread.join()
        with suppress(Exception):  # an error here must not hide the exception that ends the run
            self._beat()
            if finished:
                self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        wait_s = FIRST_S
        while not self._done.wait(wait_s):
            wait_s = min(2 * wait_s, RAREST_S)
            try:
                self._try_beat()
            except Exception as error:
                _log.warning("%s: no longer written (%s)", self._path, error)
                return

    def _try_beat(self) -> None:
        """Write; with a full disk or without the file server try again later. The journal's own writes will raise."""
        try:
            self._beat()
        except OSError as error:
            if not self._failing:
                _log.warning("%s: not written (%s); it is tried again every few seconds", self._path, error)
            self._failing = True
        else:
            self._failing = False

    def _beat(self) -> None:
        self._guard()
        write_json(self._path, spent_in(self._meter.metrics()))


def spent_by_heartbeat(run_dir: Path) -> Mapping[str, float]:
    """Return the cost in a run's last heartbeat, by the names in `WASTED`; empty without a heartbeat."""
    spent = read_json(run_dir / HEARTBEAT_FILE)
    return {name: value for name in WASTED if (value := finite(spent.get(name))) is not None}
