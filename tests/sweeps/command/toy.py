"""Helpers for studies of a toy command: a script without torch that prints JSON lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_scalerl.member.command import plan_commands
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.spec import RunSpec

PATIENCE_S = 60.0

# Logs tokens at every step and a reward at every fifth step. It saves a checkpoint after every tenth step and resumes
# from the newest. At the step given by --wait it waits for the file `go`.
SCRIPT = """
import json, os, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
steps, seed, out = int(given["steps"]), int(given["seed"]), given["out"]
saved = os.path.join(out, "state-%d.json")
step = max([int(name[6:-5]) for name in os.listdir(out) if name.startswith("state-")], default=0)
best = {"grpo": 0.5, "dapo": 0.8}[given.get("loss", "grpo")]
while step < steps:
    step += 1
    row = {"step": step, "tokens": 100 * step}
    if step % 5 == 0:
        row["eval_reward"] = best * step / (step + 10) + 0.001 * seed
    print(json.dumps(row), flush=True)
    if step % 10 == 0:
        open(saved % step, "w").close()
    if step == int(given.get("wait", -1)):
        while not os.path.exists(os.path.join(out, "go")):
            time.sleep(0.005)
"""


def write_study(folder: Path, /, script: str = SCRIPT, steps: int = 30, **settings: Any) -> Path:
    """Write a study's file and its script. `settings` are keys of `command`, except `values`: the user's own keys.

    Returns:
        Path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    values: Mapping[str, Any] = settings.pop("values", {"loss": "grpo"})
    command = {
        "line": "python -S train.py --steps={steps} --seed={seed} --out={run_dir} --loss={loss}",
        "metrics": {"reward": "eval_reward"},
        "compute": {"unit": "tokens", "column": "tokens"},
        **settings,
    }
    content = {
        "defaults": [{"member": "command"}, "_self_"],
        **values,
        "command": command,
        "budget": {"steps": steps},
        "study": "toy",
        "output_dir": str(folder / "outputs"),
    }
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def planned(file: Path, *override_lists: str) -> list[RunSpec]:
    """Plan one member per string of overrides, which are separated by spaces."""
    return plan_commands([words.split() for words in override_lists or ("",)], [str(file)])


def written(file: Path, overrides: str = "") -> tuple[RunSpec, Path]:
    """Plan one member and write its specification to its folder, as a launch does."""
    (spec,) = planned(file, overrides)
    run_dir = file.parent / "outputs" / "runs" / spec.run
    spec.write(run_dir)
    return spec, run_dir


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)


def lines(run_dir: Path) -> int:
    """Return the number of lines in the member's journal, 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def commands_of(run_dir: Path) -> list[int]:
    """Return the process ids on this machine that run the command of a member."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "train.py" in words and f"--out={run_dir}" in words:
            pids.append(int(folder.name))
    return pids


def steps_of(run_dir: Path, kind: str = "train") -> list[int]:
    """Return the steps of the valid records of a kind, in order."""
    return [record.step for record in view(run_dir).of_kind(kind)]


def view(run_dir: Path) -> JournalView:
    """Return a member's journal."""
    return read_journal(run_dir)
