"""Send a journal to its MLflow run: only durable records, each exactly once, also after crashes.

MLflow cannot delete a point, and keeps a second value at the same step in addition to the first. So a record is sent
only when a checkpoint covers it, and only if nothing was sent before for its kind and step. `mlflow_shipped.json` in
the run's folder has the steps sent so far. If that file is missing, or a request was interrupted, MLflow is queried for
the points that it has.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sweeps.errors import UserError
from sweeps.run.files import read_json, write_json
from sweeps.run.journal import (
    CONFIG_FILE,
    PASS_RATE,
    SEMANTICS_FILE,
    JournalView,
    Record,
    read_journal,
)
from sweeps.run.spec import flatten_config
from sweeps.tracking.common import ChartKeys, entity_key
from sweeps.tracking.store import DEFAULT_AXIS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

CURSOR_FILE = "mlflow_shipped.json"
MAX_METRICS = 1000  # MLflow's limit of metrics per request. With names of 250 characters they also stay below 1 MB.
# Metrics of evaluations that no training step has.
_OF_EVALUATIONS = ("eval/", "eval_cost/", "time/evaluate_s")
MAX_PARAMS = 100
MAX_PARAM_CHARS = 6000
MAX_REQUEST_BYTES = 900_000


def points(record: Record, axis: str) -> dict[str, float]:
    """Return the metrics of one journal record by MLflow key.

    A train record sends its metrics outside `eval/`. An eval record sends its metrics in `eval/` and the cost of the
    evaluation, so that no key comes from both. A pass rate at compute C > 0 is accompanied by
    `eval/<set>/log10_compute`. At C = 0 it becomes `eval/<set>/initial_pass_rate`, because the chart pairs x and y by
    index, and 0 has no logarithm. Every pass rate is also sent as `Pass rate/<set>`, the whole curve, which a run's
    page shows first.

    Raises:
        UserError: an evaluation lacks the compute axis.
    """
    finite = {key: float(value) for key, value in record.metrics.items() if math.isfinite(value)}
    if record.kind != "eval":
        return {entity_key(k): v for k, v in finite.items() if not k.startswith("eval/")}
    # A run's page lists metrics in the order received, and the pass rate should be first.
    out = {ChartKeys(m[1], unit="").whole: value for key, value in finite.items() if (m := PASS_RATE.fullmatch(key))}
    for key, value in finite.items():
        match = PASS_RATE.fullmatch(key)
        if match is None:
            if key.startswith(_OF_EVALUATIONS) and not key.endswith("/log10_compute"):
                out[entity_key(key)] = value
            continue
        if axis not in finite:
            axes = sorted(k for k in finite if k.startswith("compute/"))
            raise UserError(
                f"compute axis {axis!r} is not in the evaluation at step {record.step}; "
                f"recorded there: {', '.join(axes) or 'none'}"
            )
        keys = ChartKeys(match[1], unit="")
        if finite[axis] > 0:
            out[keys.rate] = value
            out[keys.x] = math.log10(finite[axis])
        else:
            out[keys.start] = value
    return out


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a resolved configuration as parameters by dotted key. Lists are encoded as JSON."""
    texts = {key: v if isinstance(v, str) else json.dumps(v, default=str) for key, v in flatten_config(config).items()}
    return {entity_key(key): text[:MAX_PARAM_CHARS] for key, text in texts.items()}


def ship(
    run_dir: str | Path,
    client: MlflowClient,
    mlflow_run_id: str,
    axis: str = DEFAULT_AXIS,
    view: JournalView | None = None,
) -> int:
    """Send the durable records of one run's journal that MLflow lacks. Return the number of metric values sent.

    Points have the time (ms) and optimizer step of the journal. `mlflow_shipped.json` is written after each successful
    request. `config.yaml` is sent as parameters and, like `semantics.json`, as an artifact. MLflow cannot overwrite a
    parameter that has changed, such as the budget of a continued run: its new value becomes the tag `config.<key>`.

    Raises:
        JournalError: the journal does not exist yet, or is damaged.
        UserError: an evaluation lacks the axis, or the run's earlier points were sent with another axis.
        Exception: the store does not answer (any error of MLflow's client); call again later.
    """
    run_dir = Path(run_dir)
    view = read_journal(run_dir) if view is None else view
    cursors = read_json(run_dir / CURSOR_FILE)
    state: dict[str, Any] = cursors.get(mlflow_run_id, {})
    is_complete = bool(state) and not state.get("sending", False)
    if state.setdefault("axis", axis) != axis:
        raise UserError(
            f"{run_dir}: its MLflow run has points along {state['axis']!r}, not {axis!r}; keep the axis, or "
            "track under another experiment"
        )
    steps: dict[str, int] = state.setdefault("steps", {})
    records = sorted(view.durable(), key=lambda r: (r.step, r.kind != "train"))
    unsent = [(r, points(r, axis)) for r in records if r.step > steps.get(r.kind, -1)]

    def save(sending: bool) -> None:
        state["sending"] = sending
        cursors[mlflow_run_id] = state
        write_json(run_dir / CURSOR_FILE, cursors)

    sent = 0
    if unsent:
        stored = set() if is_complete else _stored(client, mlflow_run_id, {k for _, values in unsent for k in values})
        save(sending=True)
        for batch, upto in _batches(unsent, stored):
            if batch:
                client.log_batch(mlflow_run_id, metrics=batch)
                sent += len(batch)
            steps.update(upto)
            save(sending=True)
        save(sending=False)
    if _ship_files(run_dir, client, mlflow_run_id, state.setdefault("files", {})):
        save(sending=False)
    return sent


def sent_steps(run_dir: Path, mlflow_run_id: str) -> dict[str, int]:
    """Return the step up to which records were sent to an MLflow run, by kind of record."""
    steps = read_json(run_dir / CURSOR_FILE).get(mlflow_run_id, {}).get("steps", {})
    return {str(kind): int(step) for kind, step in steps.items()}


def _stored(client: MlflowClient, mlflow_run_id: str, keys: set[str]) -> set[tuple[str, int]]:
    present = keys & set(client.get_run(mlflow_run_id).data.metrics)
    return {
        (key, int(point.step)) for key in sorted(present) for point in client.get_metric_history(mlflow_run_id, key)
    }


def _batches(
    unsent: Sequence[tuple[Record, dict[str, float]]], stored: set[tuple[str, int]]
) -> Iterator[tuple[list[Metric], dict[str, int]]]:
    """Split records into requests within MLflow's limits. A record's x and y stay together.

    Yields:
        The metrics of a request, and by kind of record the step up to which all records have then been sent.
    """
    from mlflow.entities import Metric

    batch: list[Metric] = []
    steps: dict[str, int] = {}
    for record, values in unsent:
        time_ms = int(record.time * 1000)
        new = [Metric(k, v, time_ms, record.step) for k, v in values.items() if (k, record.step) not in stored]
        if batch and len(batch) + len(new) > MAX_METRICS:
            yield batch, steps
            batch, steps = [], {}
        while len(new) > MAX_METRICS:  # the record is split, and only its last part completes the step
            yield new[:MAX_METRICS], {}
            new = new[MAX_METRICS:]
        batch.extend(new)
        steps[record.kind] = record.step
    if steps:
        yield batch, steps


def _ship_files(run_dir: Path, client: MlflowClient, mlflow_run_id: str, shipped: dict[str, str]) -> bool:
    """Send parameters and artifacts from those of a run's files that changed. Return whether anything was sent."""
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
                continue  # The file is half written. The next call sends it.
            _ship_params(client, mlflow_run_id, flatten(config or {}))
        client.log_artifact(mlflow_run_id, str(run_dir / name))
        shipped[name] = digest
        changed = True
    return changed


def _ship_params(client: MlflowClient, mlflow_run_id: str, params: Mapping[str, str]) -> None:
    """Send new parameters, and changed ones as tags, in requests within MLflow's limits."""
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
