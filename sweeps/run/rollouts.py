"""Store some of a run's rollouts for inspection: each line of `rollouts.jsonl` has all completions of one prompt."""

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

# A group has the fields
# {"step", "admission", "prompt_id", "source", "difficulty", "prompt", "answer", "rollouts": [{"completion", "reward",
# "grade", "correct", "outcome", "parts", "extra", "finish_reason", "tokens", "ids", "forced", "completed_steps",
# "versions": [[version, tokens], ...]}]}.
# In a rollout, `reward` is the training reward, `grade` is the verifier's, `tokens` is the number of `ids`, and
# `completed_steps` is the step that the verifier was given. If the run has an environment, a rollout also has "turns":
# [[source, text], ...] and "conversation": {"turns", "calls", ...}, and its "completion" is the last turn. If the
# prompt is a conversation, the group has "messages", and its "prompt" is the last message.
Group = dict[str, Any]


def write_groups(run_dir: Path, groups: Sequence[Group]) -> None:
    """Append the groups of one step to the run's stored rollouts."""
    append_lines(run_dir / ROLLOUTS_FILE, groups)


def cut_groups(run_dir: Path, step: int, guard: Callable[[], None]) -> None:
    """Remove the groups of all steps after `step` from the file.

    Args:
        run_dir: the run's folder.
        step: step to which the run goes back.
        guard: called before the file is rewritten; raises to prevent that.
    """
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
            "rollouts.groups of 1 or more, and whose rollouts were not removed (scalerl clean --rollouts)"
        ) from error
    return [entry for entry in entries if "step" in entry and "rollouts" in entry]


def stored_steps(run_dir: Path) -> list[int]:
    """Return the steps for which a run has stored rollouts, sorted; empty if none can be read.

    Only the beginning of each line is read, where `step` is.
    """
    try:
        with (run_dir / ROLLOUTS_FILE).open("rb") as lines:
            matches = [_STEP.match(line) for line in lines]
    except OSError:
        return []
    return sorted({int(match.group(1)) for match in matches if match})


@dataclass(frozen=True)
class ExamplePrompt:
    """One prompt with its best and worst completion, shortened for a report.

    Attributes:
        run: name of the run's folder.
        written: outcome and text of the best and of the worst completion; only one pair if the group has one
            completion.
    """

    recipe: str
    run: str
    step: int
    prompt_id: str
    prompt: str
    answer: str
    written: Sequence[tuple[str, str]]


def pick_examples(runs: Iterable[tuple[str, Path]], max_recipes: int = 4, characters: int = 700) -> list[ExamplePrompt]:
    """Pick one group per recipe to show in a report.

    It comes from the recipe's first run with stored rollouts: the last group whose rewards differ, else the last group.

    Args:
        runs: pairs of a recipe's label and the folder of one of its runs.
        max_recipes: largest number of recipes.
        characters: length to which texts are shortened; their beginning and end are kept.
    """
    by_recipe: dict[str, ExamplePrompt] = {}
    for recipe, run_dir in runs:
        if recipe in by_recipe or len(by_recipe) == max_recipes or not (run_dir / ROLLOUTS_FILE).is_file():
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
        by_recipe[recipe] = ExamplePrompt(
            recipe=recipe,
            run=run_dir.name,
            step=int(group["step"]),
            prompt_id=str(group["prompt_id"]),
            prompt=_shorten(str(group["prompt"]), characters),
            answer=_shorten(str(group["answer"]), characters),
            written=[(_outcome_text(rollout), _shorten(written(rollout), characters)) for rollout in ends],
        )
    return list(by_recipe.values())


def written(rollout: dict[str, Any]) -> str:
    """Return a rollout's text. In a conversation, each turn and observation begins with its speaker in brackets."""
    if "turns" not in rollout:
        return str(rollout["completion"])
    names = {"sampled": "model", "forced": "forced"}
    return "\n".join(f"[{names.get(source, source)}] {text.strip()}" for source, text in rollout["turns"])


def _outcome_text(rollout: dict[str, Any]) -> str:
    if rollout["outcome"] != "score":
        return f"{rollout['outcome']}: {rollout['extra'].get('why', '')}"
    cut = ", cut off" if rollout["finish_reason"] == "length" else ""
    turns = f"{rollout['conversation']['turns']} turns, " if "conversation" in rollout else ""
    return f"reward {rollout['reward']:g}, {turns}{rollout['tokens']} tokens{cut}"


def _shorten(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    return f"{text[: characters // 2]} [...] {text[-characters // 2 :]}"
