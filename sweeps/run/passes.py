"""Passes by held-out prompt at each evaluation of a run: a line each in `passes.jsonl`, beside the journal.

The journal has the mean; two runs that were evaluated on the same prompts can be compared prompt by prompt with this.
Evaluations that a resume made void stay in the file, and count where the journal has their step and no later line does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.run.files import append_lines, parse_lines

PASSES_FILE = "passes.jsonl"


@dataclass(frozen=True)
class Passes:
    """Passes by prompt of one evaluation of one held-out set.

    Attributes:
        prompts: digest of the set's prompts in their order; two runs can be paired where it is the same.
        passed: number of completions that passed, by prompt, (n,).
        scored: number of completions that could be graded, by prompt, (n,).
    """

    prompts: str
    passed: tuple[int, ...]
    scored: tuple[int, ...]


def digest(prompts: Iterable[tuple[str, object]]) -> str:
    """Return a digest of prompts and their answers, in order, as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for text, answer in prompts:
        found.update(repr((text, answer)).encode())
    return found.hexdigest()[:16]


def write_passes(run_dir: Path, step: int, sets: Mapping[str, Passes]) -> None:
    """Append an evaluation of the weights of `step`, one line for each held-out set."""
    entries = [
        {"step": step, "set": name, "prompts": each.prompts, "passed": each.passed, "scored": each.scored}
        for name, each in sets.items()
    ]
    append_lines(run_dir / PASSES_FILE, entries, checksum=True)


def read_passes(run_dir: Path, name: str, steps: Sequence[int]) -> dict[int, Passes]:
    """Read the evaluations of one held-out set, by step; empty if the run kept none, as earlier versions did.

    Args:
        run_dir: the run's folder.
        name: name of the held-out set.
        steps: steps at which the journal has an evaluation; others are ignored.
    """
    try:
        raw = (run_dir / PASSES_FILE).read_bytes()
    except OSError:
        return {}
    wanted, found = set(steps), {}
    for entry in parse_lines(raw):
        if entry.get("set") != name or entry.get("step") not in wanted:
            continue
        passed, scored = entry.get("passed"), entry.get("scored")
        if isinstance(passed, list) and isinstance(scored, list) and len(passed) == len(scored):
            found[entry["step"]] = Passes(str(entry.get("prompts")), tuple(passed), tuple(scored))
    return found
