"""From journal to MLflow run: only durable records, each once, whatever crashes in between.

MLflow cannot take a point back and stores a second value at a step beside the first. So a record is sent only
once a checkpoint covers it, and only if nothing was sent for its kind and step before. What was sent is
remembered in `<run_dir>/mlflow_shipped.json`; if that file is missing, or a send was cut short, MLflow itself
is asked which points it has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sweeps.errors import UserError
from sweeps.journal import (
    CONFIG_FILE,
    JOURNAL_FILE,
    SEMANTICS_FILE,
    JournalError,
    JournalView,
    Record,
    read_journal,
)
from sweeps.tracking.store import (
    DEFAULT_AXIS,
    STATUSES,
    TrackedSweep,
    Tracker,
    now_ms,
    one_line,
    read_json,
    without_credentials,
    write_json,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

CURSOR_FILE = "mlflow_shipped.json"
MAX_METRICS = 1000  # a request; 1000 keys of at most 250 characters stay below the 1 MB limit too
MAX_PARAMS = 100
MAX_PARAM_CHARS = 6000
MAX_REQUEST_BYTES = 900_000

_PASS_RATE = re.compile(r"^eval/(.+)/pass_rate$")
# What MLflow answers when this run, not the store, is the trouble: trying again changes nothing.
_ABOUT_THE_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "BAD_REQUEST")

_log = logging.getLogger(__name__)


def entity_key(name: str) -> str:
    """A metric or parameter name that MLflow takes: other characters become underscores."""
    return re.sub(r"[^/\w.\- :]", "_", name).strip("/")[:250]


def points(record: Record, axis: str) -> dict[str, float]:
    """The metrics of one journal record under their MLflow keys.

    Train records keep everything outside `eval/`, eval records only `eval/`, so no key comes from both. A pass
    rate at compute C > 0 brings `eval/<set>/log10_compute` with it; one at C = 0 becomes
    `eval/<set>/initial_pass_rate`, for the chart pairs x and y by their index and has no place for C = 0.

    Raises:
        UserError: an evaluation without the compute axis.
    """
    finite = {key: float(value) for key, value in record.metrics.items() if math.isfinite(value)}
    if record.kind != "eval":
        return {entity_key(k): v for k, v in finite.items() if not k.startswith("eval/")}
    out: dict[str, float] = {}
    for key, value in finite.items():
        match = _PASS_RATE.match(key)
        if match is None:
            if key.startswith("eval/") and not key.endswith("/log10_compute"):
                out[entity_key(key)] = value
            continue
        if axis not in finite:
            axes = sorted(k for k in finite if k.startswith("compute/"))
            raise UserError(
                f"compute axis {axis!r} is not in the evaluation at step {record.step}; "
                f"recorded there: {', '.join(axes) or 'none'}"
            )
        if finite[axis] > 0:
            out[entity_key(key)] = value
            out[entity_key(f"eval/{match[1]}/log10_compute")] = math.log10(finite[axis])
        else:
            out[entity_key(f"eval/{match[1]}/initial_pass_rate")] = value
    return out


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A resolved configuration as (dotted key, value) pairs; lists as JSON."""
    if isinstance(config, Mapping) and (config or not prefix):
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        text = config if isinstance(config, str) else json.dumps(config, default=str)
        yield entity_key(prefix), text[:MAX_PARAM_CHARS]


def ship(
    run_dir: str | Path,
    client: MlflowClient,
    mlflow_run_id: str,
    axis: str = DEFAULT_AXIS,
    view: JournalView | None = None,
) -> int:
    """Send what is durable in one run's journal and not yet in MLflow; returns the number of metric values.

    Points carry the journal's time (ms) and optimizer step. The cursor is written after each request that
    succeeded. `config.yaml` becomes parameters, and with `semantics.json` an artifact. A parameter that
    changed since (the budget of a continued run) cannot be overwritten: its new value becomes the tag
    `config.<key>`.

    Raises:
        JournalError: no journal yet, or a broken one.
        UserError: an evaluation without the axis, or a run shipped along another axis before.
        Exception: whatever the client raises when the store does not answer; call again later.
    """
    run_dir = Path(run_dir)
    view = read_journal(run_dir) if view is None else view
    cursors = read_json(run_dir / CURSOR_FILE)
    state: dict[str, Any] = cursors.get(mlflow_run_id, {})
    certain = bool(state) and not state.get("sending", False)
    if state.setdefault("axis", axis) != axis:
        raise UserError(
            f"{run_dir}: its MLflow run has points along {state['axis']!r}, not {axis!r}; keep the axis, or "
            "track under another experiment"
        )
    steps: dict[str, int] = state.setdefault("steps", {})
    records = sorted(view.durable(), key=lambda r: (r.step, r.kind != "train"))
    todo = [(r, points(r, axis)) for r in records if r.step > steps.get(r.kind, -1)]

    def save(sending: bool) -> None:
        state["sending"] = sending
        cursors[mlflow_run_id] = state
        write_json(run_dir / CURSOR_FILE, cursors)

    sent = 0
    if todo:
        stored = set() if certain else _stored(client, mlflow_run_id, {k for _, values in todo for k in values})
        save(sending=True)
        for batch, upto in _batches(todo, stored):
            if batch:
                client.log_batch(mlflow_run_id, metrics=batch)
                sent += len(batch)
            steps.update(upto)
            save(sending=True)
        save(sending=False)
    if _ship_files(run_dir, client, mlflow_run_id, state.setdefault("files", {})):
        save(sending=False)
    return sent


def _stored(client: MlflowClient, mlflow_run_id: str, keys: set[str]) -> set[tuple[str, int]]:
    """The (key, step) pairs that the run has already."""
    present = keys & set(client.get_run(mlflow_run_id).data.metrics)
    return {
        (key, int(point.step))
        for key in sorted(present)
        for point in client.get_metric_history(mlflow_run_id, key)
    }


def _batches(
    todo: Sequence[tuple[Record, dict[str, float]]], stored: set[tuple[str, int]]
) -> Iterator[tuple[list[Metric], dict[str, int]]]:
    """Requests within MLflow's limits, each with the steps it completes; x and y of a record stay together."""
    from mlflow.entities import Metric

    batch: list[Metric] = []
    upto: dict[str, int] = {}
    for record, values in todo:
        at = int(record.time * 1000)
        fresh = [Metric(k, v, at, record.step) for k, v in values.items() if (k, record.step) not in stored]
        if batch and len(batch) + len(fresh) > MAX_METRICS:
            yield batch, upto
            batch, upto = [], {}
        while len(fresh) > MAX_METRICS:  # one record beyond the limit: only its last part completes the step
            yield fresh[:MAX_METRICS], {}
            fresh = fresh[MAX_METRICS:]
        batch.extend(fresh)
        upto[record.kind] = record.step
    if upto:
        yield batch, upto


def _ship_files(run_dir: Path, client: MlflowClient, mlflow_run_id: str, shipped: dict[str, str]) -> bool:
    """Parameters and artifacts of a run whose files changed since; tells whether anything was sent."""
    changed = False
    for name in (CONFIG_FILE, SEMANTICS_FILE):
        try:
            content = (run_dir / name).read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(content).hexdigest()
        if shipped.get(name) == digest:
            continue
        if name == CONFIG_FILE:
            try:
                config = yaml.safe_load(content)
            except (yaml.YAMLError, UnicodeDecodeError):
                continue  # half written: the next pass has it
            _ship_params(client, mlflow_run_id, dict(flatten(config or {})))
        client.log_artifact(mlflow_run_id, str(run_dir / name))
        shipped[name] = digest
        changed = True
    return changed


def _ship_params(client: MlflowClient, mlflow_run_id: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    known = client.get_run(mlflow_run_id).data.params
    changed = [RunTag(f"config.{k}"[:250], v) for k, v in params.items() if known.get(k, v) != v]
    for start in range(0, len(changed), MAX_PARAMS):
        client.log_batch(mlflow_run_id, tags=changed[start : start + MAX_PARAMS])
    batch: list[Param] = []
    size = 0
    for key, value in params.items():
        if key in known:
            continue
        weight = len(json.dumps([key, value])) + 32
        if batch and (len(batch) == MAX_PARAMS or size + weight > MAX_REQUEST_BYTES):
            client.log_batch(mlflow_run_id, params=batch)
            batch, size = [], 0
        batch.append(Param(key, value))
        size += weight
    if batch:
        client.log_batch(mlflow_run_id, params=batch)


class Shipper:
    """Feeds a sweep's member runs from their journals, in a thread of the controller.

    A store that does not answer is logged once and tried again with growing pauses; nothing is raised into
    the controller, nothing is lost, and the backlog is sent when it answers again. Trouble with one run (it
    was deleted in MLflow, its journal is broken) is logged once and leaves the others alone.

    Args:
        tracker: where to.
        sweep: what; members added to it later are picked up.
        interval_s: pause between passes.
        max_pause_s: longest pause while the store is away.
    """

    def __init__(
        self, tracker: Tracker, sweep: TrackedSweep, interval_s: float = 10.0, max_pause_s: float = 300.0
    ) -> None:
        self.tracker = tracker
        self.sweep = sweep
        self.interval_s = interval_s
        self.max_pause_s = max_pause_s
        self.outage: str | None = None
        self.troubles: dict[str, str] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._statuses: dict[str, tuple[str, int]] = {}
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
        """Stop the thread; with `final`, send what is durable now. Tells whether MLflow has everything.

        A store that is away is tried three times, within `timeout_s`; what is missing then stays in the
        journals, and the next start, or `scalerl publish`, sends it.
        """
        deadline = time.monotonic() + timeout_s
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning("MLflow: the shipper still waits for the store; not everything was sent")
                return False
            self._thread = None
        complete = False
        self._seen.clear()  # after trouble with a run, look once more
        for attempt in range(3 if final else 0):
            complete = self.run_once()
            if self.outage is None or time.monotonic() + 2**attempt > deadline:
                break
            time.sleep(min(2**attempt, self.interval_s))
        if final and not complete:
            reason = self.outage or next(iter(self.troubles.values()), "unknown")
            _log.warning("MLflow: not everything was sent (%s); `scalerl publish` sends the rest", reason)
        return complete

    def set_status(self, run: str, status: str) -> None:
        """Ask for a status of a member (by identity hash) or of the sweep (by its key); set in the next pass.

        Raises:
            UserError: no such status or run: a mistake of the caller, found at once.
        """
        if status not in STATUSES:
            raise UserError(f"run status {status!r} is not one of {', '.join(STATUSES)}")
        if run != self.sweep.key and run not in self.sweep.members:
            raise UserError(f"run {run!r} is not in sweep {self.sweep.name!r}")
        with self._lock:
            self._statuses[run] = (status, now_ms())
        self._wake.set()

    def run_once(self) -> bool:
        """One pass over all members; tells whether all that is durable has been sent. Never raises."""
        with self._pass:
            try:
                complete = all([self._feed(run) for run in list(self.sweep.members)])
                complete = all([self._apply_status(run) for run in list(self._statuses)]) and complete
            except Exception as error:  # the store, or something unforeseen: either way not the controller's
                if self.outage is None:
                    store = without_credentials(self.tracker.uri)
                    _log.warning("MLflow at %s does not answer (%s); trying on", store, one_line(error))
                self.outage = one_line(error)
                return False
            if self.outage is not None:
                _log.info("MLflow answers again; the backlog is sent")
            self.outage = None
            return complete

    def _loop(self) -> None:
        pause = self.interval_s
        while not self._stopping:
            self.run_once()
            pause = self.interval_s if self.outage is None else min(2 * pause, self.max_pause_s)
            # A status asked for during an outage must not cut the pause short again and again.
            if self.outage is None:
                self._wake.wait(pause)
                self._wake.clear()
            else:
                until = time.monotonic() + pause
                while not self._stopping and time.monotonic() < until:
                    time.sleep(min(0.2, pause))

    def _feed(self, run: str) -> bool:
        """Ship one member; False if it is in trouble of its own. Raises when the store does not answer."""
        tracked = self.sweep.members[run]
        run_dir = tracked.member.run_dir
        stamp = tuple(
            number
            for name in (JOURNAL_FILE, CONFIG_FILE, SEMANTICS_FILE)
            for number in _stamp(run_dir / name)
        )
        if stamp[0] < 0 or self._seen.get(run) == stamp:
            return run not in self.troubles
        try:
            ship(run_dir, self.tracker.client, tracked.mlflow_run_id, self.tracker.axis)
        except JournalError as error:
            if "no header record yet" in str(error):
                return True
            trouble = str(error)
        except UserError as error:
            trouble = str(error)
        except Exception as error:
            if getattr(error, "error_code", None) not in _ABOUT_THE_RUN:
                raise
            trouble = f"{run_dir}: {one_line(error)}"
        else:
            self.troubles.pop(run, None)
            self._seen[run] = stamp
            return True
        self._seen[run] = stamp
        if self.troubles.get(run) != trouble:
            _log.warning("MLflow: run skipped: %s", trouble)
        self.troubles[run] = trouble
        return False

    def _apply_status(self, run: str) -> bool:
        with self._lock:
            wanted = self._statuses[run]
        run_id = self.sweep.parent_id if run == self.sweep.key else self.sweep.members[run].mlflow_run_id
        done = True
        try:
            self.tracker.set_status(run_id, *wanted)
        except UserError as error:
            if getattr(error.__cause__, "error_code", None) not in _ABOUT_THE_RUN:
                raise
            _log.warning("MLflow: %s", error)
            done = False
        with self._lock:
            if self._statuses.get(run) == wanted:
                del self._statuses[run]
        return done


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (-1, -1)
    return stat.st_size, stat.st_mtime_ns
