"""Heartbeat file of the meter beside a journal: what a run has spent so far, should this process be killed.

Whatever is done between two records, a long generation or a long step, would else be lost without a trace. The file is
written a second after the start, then ever more rarely, at last four times a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lightning_scalerl.measure.compute_meter import WASTED, ComputeMeter, spent_in
from sweeps.run.files import read_json, write_json
from sweeps.run.journal import finite

HEARTBEAT_FILE = "compute.json"
FIRST_S, RAREST_S = 1.0, 15.0


class MeterHeartbeat:
    """Writes what a meter counts into `compute.json`, in a thread of its own.

    Args:
        run_dir: of the run.
        meter: read, never changed.
        guard: called before each writing; raises if another process has taken the run over, which ends the heartbeat.
    """

    def __init__(self, run_dir: Path, meter: ComputeMeter, guard: Callable[[], None]) -> None:
        self._path = run_dir / HEARTBEAT_FILE
        self._meter, self._guard = meter, guard
        self._done = threading.Event()
        with suppress(OSError):
            self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True, name="meter heartbeat")
        self._thread.start()

    def stop(self, finished: bool) -> None:
        """Write for the last time and end the thread; a finished run's file is deleted."""
        self._done.set()
        self._thread.join()
        with suppress(Exception):  # whatever ends the run must not be hidden by this
            self._beat()
            if finished:
                self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        wait_s = FIRST_S
        while not self._done.wait(wait_s):
            wait_s = min(2 * wait_s, RAREST_S)
            try:
                self._beat()
            except OSError:
                continue  # a full disk or an absent file server: the journal's own writes will raise
            except Exception:
                return

    def _beat(self) -> None:
        self._guard()
        write_json(self._path, spent_in(self._meter.metrics()))


def spent_by_heartbeat(run_dir: Path) -> Mapping[str, float]:
    """Return the cost by a run's last heartbeat, under the names of `WASTED`; empty if there is none."""
    found = read_json(run_dir / HEARTBEAT_FILE)
    return {name: value for name in WASTED if (value := finite(found.get(name))) is not None}
