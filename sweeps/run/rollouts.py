"""Stored rollouts of a run for inspection: whole groups, sampled occasionally, one per line in `rollouts.jsonl`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run.files import append_lines, parse_lines, write_atomically

ROLLOUTS_FILE = "rollouts.jsonl"

_STEP = re.compile(rb'\{\s*"step":\s*(\d+)')

# {"step", "admission", "prompt_id", "source", "difficulty", "prompt", "answer", "rollouts": [{"completion", "reward",
# "grade", "correct", "outcome", "parts", "extra", "finish_reason", "tokens", "ids", "forced", "versions": [[version,
# tokens], ...]}]}. `reward` is the training reward, `grade` the verifier's, `tokens` the number of `ids`. With an
# environment a rollout has "turns": [[source, text], ...] and "conversation": {"turns", "calls", ...}; "completion" is
# the last turn.
Group = dict[str, Any]


def write_groups(run_dir: Path, groups: Sequence[Group]) -> None:
    """Append groups of one step to the run's rollouts."""
    append_lines(run_dir / ROLLOUTS_FILE, groups)


def cut_groups(run_dir: Path, step: int, guard: Callable[[], None]) -> None:
    """Drop the groups after `step`; `guard` is called before the file is rewritten."""
    path = run_dir / ROLLOUTS_FILE
    if not path.is_file():
        return
    entries = parse_lines(path.read_bytes())
    kept = [entry for entry in entries if entry.get("step", 0) <= step]
    if len(kept) < len(entries):
        guard()
        write_atomically(path, "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in kept))


def read_groups(run_dir: Path) -> list[Group]:
    """Read all stored groups of a run, in the order written.

    Raises:
        UserError: the file cannot be read.
    """
    path = run_dir / ROLLOUTS_FILE
    try:
        entries = parse_lines(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{run_dir}: holds no {ROLLOUTS_FILE} ({error.strerror}); give the folder of a run that was trained with "
            "rollouts.groups of 1 or more"
        ) from error
    return [entry for entry in entries if "step" in entry and "rollouts" in entry]


def kept_steps(run_dir: Path) -> list[int]:
    """Return the steps for which a run stores rollouts, in order; empty if none can be read.

    Only the beginning of each line is read: `step` is its first field.
    """
    try:
        with (run_dir / ROLLOUTS_FILE).open("rb") as lines:
            matches = [_STEP.match(line) for line in lines]
    except OSError:
        return []
    return sorted({int(match.group(1)) for match in matches if match})


@dataclass(frozen=True)
class Shown:
    """A prompt with its best and its worst completion, shortened for a report."""

    recipe: str
    run: str  # name of the run's folder
    step: int
    prompt_id: str
    prompt: str
    answer: str
    written: Sequence[tuple[str, str]]  # (outcome, text) of each


def a_few(runs: Iterable[tuple[str, Path]], most: int = 4, characters: int = 700) -> list[Shown]:
    """Pick one group per recipe: in its first run with rollouts, the last group whose rewards differ, else the last.

    Args:
        runs: pairs of a recipe's label and the folder of one of its runs.
        most: largest number of recipes.
        characters: length to which a text is shortened, keeping its beginning and end.
    """
    by_recipe: dict[str, Shown] = {}
    for recipe, run_dir in runs:
        if recipe in by_recipe or len(by_recipe) == most or not (run_dir / ROLLOUTS_FILE).is_file():
            continue
        groups = [group for group in read_groups(run_dir) if group["rollouts"]]
        if not groups:
            continue
        differing = [group for group in groups if len({rollout["reward"] for rollout in group["rollouts"]}) > 1]
        group = (differing or groups)[-1]
        ordered = sorted(
            group["rollouts"], key=lambda rollout: (rollout["reward"] is None, -(rollout["reward"] or 0.0))
        )
        ends = ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]
        by_recipe[recipe] = Shown(
            recipe=recipe,
            run=run_dir.name,
            step=int(group["step"]),
            prompt_id=str(group["prompt_id"]),
            prompt=_cut(str(group["prompt"]), characters),
            answer=_cut(str(group["answer"]), characters),
            written=[(_became(rollout), _cut(written(rollout), characters)) for rollout in ends],
        )
    return list(by_recipe.values())


def written(rollout: dict[str, Any]) -> str:
    """Return a rollout's text; a conversation has a line with the speaker before each turn and observation."""
    if "turns" not in rollout:
        return str(rollout["completion"])
    names = {"sampled": "model", "forced": "forced"}
    return "\n".join(f"[{names.get(source, source)}] {text.strip()}" for source, text in rollout["turns"])


def _became(rollout: dict[str, Any]) -> str:
    if rollout["outcome"] != "score":
        return f"{rollout['outcome']}: {rollout['extra'].get('why', '')}"
    cut = ", cut off" if rollout["finish_reason"] == "length" else ""
    turns = f"{rollout['conversation']['turns']} turns, " if "conversation" in rollout else ""
    return f"reward {rollout['reward']:g}, {turns}{rollout['tokens']} tokens{cut}"


def _cut(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    return f"{text[: characters // 2]} [...] {text[-characters // 2 :]}"
