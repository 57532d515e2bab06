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

from lightning_scalerl.measure.compute_meter import WASTED, ComputeMeter, total_cost
from sweeps.run.files import read_json, write_json
from sweeps.run.journal import finite

HEARTBEAT_FILE = "compute.json"
FIRST_INTERVAL_S, MAX_INTERVAL_S = 1.0, 15.0
_log = logging.getLogger(__name__)


class MeterHeartbeat:
    """Background thread that writes the totals of a compute meter into `compute.json`.

    Args:
        run_dir: directory of the run.
        meter: the meter; it is only read.
        guard: called before each write; raises if another process has taken over the run; the heartbeat then ends.
    """

    def __init__(self, run_dir: Path, meter: ComputeMeter, guard: Callable[[], None]) -> None:
        self._path = run_dir / HEARTBEAT_FILE
        self._meter, self._guard = meter, guard
        self._stopped = threading.Event()
        self._last_write_failed = False
        self._try_write()
        self._thread = threading.Thread(target=self._run, daemon=True, name="meter heartbeat")
        self._thread.start()

    def stop(self, finished: bool) -> None:
        """End the thread, and write the file a last time, or delete it if the run is finished."""
        self._stopped.set()
        self._thread.join()
        with suppress(Exception):  # an error here must not hide the exception that ends the run
            self._write()
            if finished:
                self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        wait_s = FIRST_INTERVAL_S
        while not self._stopped.wait(wait_s):
            wait_s = min(2 * wait_s, MAX_INTERVAL_S)
            try:
                self._try_write()
            except Exception as error:
                _log.warning("%s: no longer written (%s)", self._path, error)
                return

    def _try_write(self) -> None:
        """Write the file. On an OSError, such as a full disk, only warn: the journal's writes will raise it."""
        try:
            self._write()
        except OSError as error:
            if not self._last_write_failed:
                _log.warning("%s: not written (%s); retrying every few seconds", self._path, error)
            self._last_write_failed = True
        else:
            self._last_write_failed = False

    def _write(self) -> None:
        self._guard()
        write_json(self._path, total_cost(self._meter.metrics()))


def heartbeat_cost(run_dir: Path) -> Mapping[str, float]:
    """Return the cost in a run's last heartbeat, by the names in `WASTED`; empty without a heartbeat."""
    cost = read_json(run_dir / HEARTBEAT_FILE)
    return {name: value for name in WASTED if (value := finite(cost.get(name))) is not None}
