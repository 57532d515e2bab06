"""Commands `rollouts`, `rescore` and `noise`: stored rollouts, and repeated evaluations."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sweeps.cli.output import print_json
from sweeps.errors import UserError, require_training
from sweeps.executor.base import load_entry
from sweeps.report.plain import one_line, table
from sweeps.run.rollouts import Group, read_groups, written
from sweeps.run.spec import run_folder
from sweeps.terminal import counted

# Number of lines of a prompt, and of a completion, that are shown without --full.
LINES = 6
MARKS = {"abstain": "-", "error": "!"}
Rollout = dict[str, Any]


def rollouts_command(options: argparse.Namespace) -> None:
    """Print the last stored groups of a run's rollouts that match the filters (`scalerl rollouts`)."""
    groups = [(group, rollouts) for group in read_groups(Path(options.run)) if (rollouts := _matching(group, options))]
    if not groups:
        raise UserError(f"{options.run}: no rollout is of that kind; leave out an option")
    shown = groups[-options.limit :] if options.limit else groups
    if options.json:
        print_json([{**group, "rollouts": rollouts} for group, rollouts in shown])
        return
    width = max(40, shutil.get_terminal_size().columns)
    for group, rollouts in shown:
        print("\n".join(_lines(group, rollouts, width, None if options.full else LINES)), end="\n\n")
    left = len(groups) - len(shown)
    print(f"{counted(len(shown), 'group')}{f', and {left} before them (--limit 0)' if left else ''}")


def _matching(group: Group, options: argparse.Namespace) -> list[Rollout]:
    first, last = options.step or (0, None)
    wanted = (
        group["step"] >= first
        and (last is None or group["step"] <= last)
        and options.prompt in (None, group["prompt_id"])
        and options.difficulty in (None, group["difficulty"])
        and options.source in (None, group["source"])
    )
    if not wanted:
        return []
    outcome, correct = options.outcome, {"right": True, "wrong": False}.get(options.only)
    return [
        rollout
        for rollout in group["rollouts"]
        if outcome in (None, rollout["outcome"])
        and (correct is None or (rollout["outcome"] == "score" and rollout["correct"] == correct))
    ]


def _lines(group: Group, rollouts: Sequence[Rollout], width: int, max_lines: int | None) -> Iterator[str]:
    count = len(group["rollouts"])
    scored = [rollout for rollout in group["rollouts"] if rollout["outcome"] == "score"]
    rate = f", {sum(rollout['correct'] for rollout in scored)} of {len(scored)} right" if scored else ""
    labels = ", ".join(filter(None, (group["source"], group["difficulty"])))
    part = f"; {len(rollouts)} of {count} shown" if len(rollouts) < count else ""
    title = f"step {group['step']}, prompt {one_line(str(group['prompt_id']))}"
    yield f"{title}{f' ({labels})' if labels else ''}{rate}{part}"
    yield from _wrapped(group["prompt"], "    ", width, max_lines)
    yield f"    answer: {one_line(str(group['answer']))[: width - 12]}"
    for rollout in rollouts:
        mark = MARKS.get(rollout["outcome"]) or ("+" if rollout["correct"] else "x")
        reward = "no score" if rollout["reward"] is None else f"{rollout['reward']:g}"
        parts = "".join(f", {name} {value:g}" for name, value in rollout["parts"].items())
        versions = ", ".join(f"{count} of version {version}" for version, count in rollout["versions"])
        cut = ", cut off" if rollout["finish_reason"] == "length" else ""
        forced = f", {rollout['forced']} forced" if rollout["forced"] else ""
        yield f"  {mark} {reward}{parts}; {rollout['tokens']} tokens ({versions}){forced}{cut}"
        for name, text in rollout["extra"].items():
            yield f"      {one_line(name)}: {one_line(str(text))[:width]}"
        if "conversation" in rollout:
            yield f"      {_conversation_line(rollout['conversation'])}"
        yield from _wrapped(written(rollout), "      ", width, max_lines)


def _conversation_line(conversation: dict[str, Any]) -> str:
    name = f" with {conversation['environment']}" if conversation["environment"] else ""
    rewards = ", ".join(f"{reward:g}" for reward in conversation["rewards"])
    counts = "".join(f", {conversation[key]} {key}" for key in ("calls", "malformed", "raised") if conversation[key])
    failed = f"; failed, {one_line(conversation['failed'])}" if conversation["failed"] else ""
    return f"conversation{name}: {conversation['turns']} turns{counts}; rewards of the environment {rewards}{failed}"


def _wrapped(text: str, indent: str, width: int, max_lines: int | None) -> list[str]:
    """Wrap a text. If it has more than `max_lines` lines, keep the first ones, and the last one with the answer."""
    lines = [
        piece
        for line in text.splitlines() or [""]
        for piece in textwrap.wrap(one_line(line), width - len(indent)) or [""]
    ]
    if max_lines is not None and len(lines) > max_lines:
        lines = [*lines[: max_lines - 2], f"[{len(lines) - max_lines + 1} more lines, --full]", lines[-1]]
    return [f"{indent}{line}".rstrip() for line in lines]


def rescore_command(options: argparse.Namespace) -> None:
    """Grade a run's stored rollouts again, and print rewards before and after (`scalerl rescore`)."""
    run = run_folder(options.run)
    require_training("scalerl rescore")
    rescore = load_entry("lightning_scalerl.member.rescore:rescore_run")
    found: list[dict[str, Any]] = rescore(
        run, options.reward, None if options.out is None else Path(options.out), options.trust
    )
    if options.json:
        print_json(found)
        return
    rows = [
        [
            entry["source"] or "all",
            str(entry["rollouts"]),
            *(
                "-" if entry[when][what] is None else f"{entry[when][what]:.4g}"
                for when in ("before", "after")
                for what in ("reward", "pass_rate")
            ),
            str(entry["changed"]),
            f"{entry['after']['abstained']}, {entry['after']['errors']}",
        ]
        for entry in found
    ]
    head = ["task", "rollouts", "reward", "pass rate", "new reward", "new pass rate", "changed", "abstained, errors"]
    print(table(head, rows))
    print("\nchanged: rollouts with a grade both times that went from right to wrong or back")
    for entry in found:
        for why in entry["reasons"]:
            print(f"error{' of ' + entry['source'] if entry['source'] else ''}: {one_line(why)}")


def noise_command(options: argparse.Namespace) -> None:
    """Repeat an evaluation with the same weights, and print its sampling error (`scalerl noise`)."""
    require_training("scalerl noise")
    noise = load_entry("lightning_scalerl.member.noise:measure_noise")
    words: Sequence[str] = options.overrides
    # The first word may be the name of a task alone.
    overrides = [f"task={word}" if number == 0 and "=" not in word else word for number, word in enumerate(words)]
    found: list[dict[str, Any]] = noise(options.model, overrides, options.repeats, options.trust)
    if options.json:
        print_json(found)
        return
    rows = [
        [
            entry["set"], str(entry["prompts"]), str(entry["samples"]), f"{entry['pass_rate']:.4f}",
            f"{entry['sampling_error']:.4f} [{entry['sampling_error_low']:.4f}, {entry['sampling_error_high']:.4f}]",
            f"{entry['foretold']:.4f}", f"{entry['prompt_error']:.4f}",
        ]
        for entry in found
    ]  # fmt: skip
    print(table(["set", "prompts", "samples", "pass rate", "sampling error", "predicted", "prompt error"], rows))
    print(
        f"\n{options.repeats} evaluations of the same weights.\nsampling error: standard deviation of the evaluations, "
        "with its "
        "95% interval\npredicted: the same, computed from a single evaluation (fits use it)\nprompt error: additional "
        "standard deviation if the held-out prompts were drawn again"
    )
