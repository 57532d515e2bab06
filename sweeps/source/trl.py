"""Read TRL's `trainer_state.json`, which transformers' Trainer writes with every checkpoint.

`log_history` is a list of rows, separate for training and evaluations. In evaluation rows every metric has the prefix
`eval_`, including `num_tokens`. With several evaluation sets transformers names its own metrics by set
(`eval_math_loss`, `eval_math_runtime`), but TRL's metrics have the name `eval_reward` for every set. So the set is read
from the names of transformers' metrics in the same row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run.files import read_json
from sweeps.run.journal import finite
from sweeps.source.cells import is_empty
from sweeps.source.collected import FINISHED, RUNNING, Collected
from sweeps.source.log import Log, add_logs, series_of_records
from sweeps.source.text import CHECKPOINT, File, short
from sweeps.source.vocabulary import TRL

NAME = "TRL trainer state"
FILE = "trainer_state.json"
_SET = re.compile(r"eval_(.+)_runtime")


def matches(file: File, into: Collected) -> bool:
    """Return whether the file is a JSON object with a `log_history`."""
    return file.start[:1] == b"{" and isinstance(file.document, dict) and "log_history" in file.document


def read(file: File, into: Collected) -> None:
    """Add the evaluations of the run or, without evaluations, its training rewards.

    Raises:
        UserError: no row has a reward.
    """
    first_state = into.run_folders.setdefault(file.run_folder, file.path)
    if first_state != file.path:
        raise UserError(
            f"{file.path}: the same run as {first_state}; a state holds the whole history, give the last checkpoint's"
        )
    state: dict[str, Any] = file.document
    history = state["log_history"]
    if not isinstance(history, list) or not history:
        raise UserError(f"{file.path}: log_history holds no rows; the run has not logged yet")
    rows = [row for row in history if isinstance(row, dict)]
    rows_with_step = [(step, row) for row in rows if (step := finite(row.get("step"))) is not None]
    records, notes = rename_metrics(rows_with_step)
    fields = {key: str(value) for key, value in state.items() if isinstance(value, str | int | float)}
    names = list(dict.fromkeys(key for _, row in records for key in row if key != "step"))
    log = Log(
        name=file.run_name,
        names=names,
        rows=len(history),
        series=series_of_records(records),
        labels=tuple(fields),
        label=fields.get,
        key=str(file.run_folder),
        state=_run_state(state),
    )
    if len(records) < len(history):
        notes.insert(0, f"rows without a step: {len(history) - len(records)}")
    add_logs([log], NAME, str(file.path), into, TRL, "the run's directory", notes=notes)


def rename_metrics(
    rows: Sequence[tuple[float, dict[str, Any]]],
) -> tuple[list[tuple[float, dict[str, Any]]], list[str]]:
    """Rename the metrics of evaluation rows, see `_rename_row`. Return rows with their steps, and notes."""
    sets = {name for _, row in rows if (name := _set_of(row)) is not None}
    notes = []
    if any("eval_num_tokens" in row and "num_tokens" not in row for _, row in rows):
        notes.append("num_tokens of evaluation rows <- eval_num_tokens")
    if len(sets) > 1:
        notes.append(f"evaluation sets found by eval_<set>_runtime: {short(', '.join(sorted(sets)))}")
    return [(step, _rename_row(row, sets)) for step, row in rows], notes


def last_states(directory: Path) -> list[Path]:
    """Return the last state of each run at or below a directory, sorted by path. A state has the run's whole history.

    A run's folder has a state in each checkpoint, and another next to them after `trainer.save_state`.
    """
    states_by_run: dict[Path, list[Path]] = {}
    for path in sorted(directory.rglob(FILE)):
        states_by_run.setdefault(File(path).run_folder, []).append(path)
    return [
        max(states, key=_last_step) if len(states) > 1 else states[0] for _, states in sorted(states_by_run.items())
    ]


def _last_step(path: Path) -> tuple[float, bool]:
    """Return a key that orders states by step. At equal steps a state outside of checkpoints is the later one."""
    match = CHECKPOINT.fullmatch(path.parent.resolve().name)
    if match is not None:
        return float(match[1]), False
    return finite(read_json(path).get("global_step")) or 0.0, True


def _run_state(state: dict[str, Any]) -> str:
    """Return `FINISHED` if a run has taken all its steps, else `RUNNING`; "" if their number is unknown."""
    step, total = finite(state.get("global_step")), finite(state.get("max_steps"))
    return "" if step is None or not total or total < 0 else FINISHED if step >= total else RUNNING


def _set_of(row: dict[str, Any]) -> str | None:
    """Return the evaluation set that transformers wrote into the names of a row's metrics; None without one."""
    return next((match[1] for key in row if (match := _SET.fullmatch(key))), None)


def _rename_row(row: dict[str, Any], sets: set[str]) -> dict[str, Any]:
    """Give compute the name that it has in training rows. With several sets, add the set to the names of metrics."""
    row = dict(row)
    if is_empty(row.get("num_tokens")) and not is_empty(row.get("eval_num_tokens")):
        row["num_tokens"] = row["eval_num_tokens"]
    set_name = _set_of(row)
    if set_name is None or len(sets) < 2:
        return row
    prefix = f"eval_{set_name}_"
    return {
        f"{prefix}{key[5:]}" if key.startswith("eval_") and not key.startswith(prefix) else key: value
        for key, value in row.items()
    }
