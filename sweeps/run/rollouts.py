"""Rollouts that can be read: whole groups of a run, sampled now and then, a line each in `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run.files import append_lines, parse_lines

ROLLOUTS_FILE = "rollouts.jsonl"

# {"step", "admission", "prompt_id", "source", "difficulty", "prompt", "answer", "rollouts": [{"completion", "reward",
# "correct", "outcome", "parts", "extra", "finish_reason", "tokens", "forced", "versions": [[version, tokens], ...]}]}
Group = dict[str, Any]


def write_groups(run_dir: Path, groups: Sequence[Group]) -> None:
    """Append groups of one step."""
    append_lines(run_dir / ROLLOUTS_FILE, groups)


def read_groups(run_dir: Path) -> list[Group]:
    """All groups, by step; of a step that was repeated after a resume the later ones.

    Raises:
        UserError: there are none.
    """
    path = run_dir / ROLLOUTS_FILE
    try:
        entries = parse_lines(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{run_dir}: holds no {ROLLOUTS_FILE} ({error.strerror}); give the folder of a run that was trained with "
            "rollouts.groups of 1 or more"
        ) from error
    return _superseded(entry for entry in entries if "step" in entry and "rollouts" in entry)


def _superseded(entries: Iterable[Group]) -> list[Group]:
    """Without what a later attempt has made again: it begins at an earlier step."""
    kept: list[Group] = []
    for entry in entries:
        while kept and (
            kept[-1]["step"] > entry["step"]
            or (kept[-1]["step"] == entry["step"] and kept[-1]["admission"] == entry["admission"])
        ):
            kept.pop()
        kept.append(entry)
    return kept
