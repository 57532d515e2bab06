"""Planning of members that TRL trains: our recipes, checked and identified as ours, each started as a command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import Folders, use_folders
from lightning_scalerl.member.identify import group_of, plan_members
from lightning_scalerl.member.identity import identity_of
from lightning_scalerl.translate.record import Run
from lightning_scalerl.translate.to_trl import VERSION
from lightning_scalerl.translate.trl_member import refuse
from sweeps.run.spec import RunSpec, make_spec

GROUP = "trainer"
# How a study is conducted, which is its controller's to know: a run's command is the same wherever and however it is
# launched, and holds no address. Seed and budget are filled in by the runner.
_OF_STUDY = frozenset({"seed", "budget", "study", "output_dir", "label", "cluster", "launch", "race", "mlflow"})
_OF_RUN = ("launch.threads",)
_ASKED = "from importlib.metadata import version; import torch, transformers, datasets; print(version('trl'))"


def plan_trl(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify members as `plan_members` does, and make commands of TRL of them.

    Args:
        override_lists: one a member, as on the command line, with `trainer=trl trainer.python=PYTHON`.
        folders: of the user's, beside `conf/`.

    Raises:
        ConfigurationError: the first problem found, in one line: what TRL cannot express, by name, among them.
    """
    own = use_folders(folders)
    ours = [[entry for entry in overrides if group_of(entry) != GROUP] for overrides in override_lists]
    specs = plan_members(ours, folders)
    made: list[RunSpec] = []
    checked: set[str] = set()
    for spec, overrides, rest in zip(specs, override_lists, ours, strict=True):
        if spec.curve not in checked:
            refuse(Run.of(rest, list(own)))
            checked.add(spec.curve)
        made.append(_on_trl(spec, _python(overrides), rest, tuple(overrides)))
    return made


def _is_runs(entry: str) -> bool:
    """Return whether an override belongs in the command of a run."""
    return group_of(entry) not in _OF_STUDY or entry.lstrip("+~").partition("=")[0] in _OF_RUN


def _python(overrides: Sequence[str]) -> str:
    """Return the interpreter that a member names, having asked it for its TRL."""
    named = [entry.partition("=")[2] for entry in overrides if entry.lstrip("+").startswith(f"{GROUP}.python=")]
    if not named:
        raise ConfigurationError(f"{GROUP}.python: needs a value; name the interpreter of an environment that has TRL")
    return _asked(str(Path(named[-1]).expanduser().absolute()))


@cache  # once in a planner's process, which takes seconds
def _asked(python: str) -> str:
    try:
        done = subprocess.run([python, "-c", _ASKED], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigurationError(f"{GROUP}.python: {python}: {error.strerror}; name an interpreter") from error
    found = (done.stdout or done.stderr).strip().splitlines()[-1:] or [""]
    if done.returncode or found[0].split(".")[:2] != VERSION.split(".")[:2]:
        raise ConfigurationError(
            f"{GROUP}.python: {python}: {found[0]}; an environment with trl {VERSION}, torch, transformers and "
            "datasets is needed: the extra lightning-scalerl[trl], or one of its own"
        )
    return python


def _on_trl(spec: RunSpec, python: str, overrides: Sequence[str], pasted: tuple[str, ...]) -> RunSpec:
    """Return the specification of the same recipe on another trainer: another curve, under a label that says so."""
    suffix = f"+{GROUP}=trl"
    label = f"{spec.baseline}{suffix}{spec.recipe.removeprefix(spec.baseline)}"
    found = make_spec(
        config={**spec.config, GROUP: {"name": "trl", "python": python}, "command": _command(python, spec, overrides)},
        reference=spec.reference,
        identity={**identity_of(spec.config), GROUP: {"name": "trl", "version": VERSION}},
        label=label,
        baseline=f"{spec.baseline}{suffix}",
        departures=spec.departures,
        settings=spec.settings,
        folders=spec.folders,
    )
    return replace(found, overrides=tuple(entry for entry in pasted if not entry.lstrip("+~").startswith("mlflow")))


def _command(python: str, spec: RunSpec, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what `sweeps.command` is told of a member, with every key of conf/command/base/command.yaml."""
    # Braces in a value are no placeholders.
    escaped = [entry.replace("{", "{{").replace("}", "}}") for entry in overrides if _is_runs(entry)]
    directories = [word for folder in spec.folders for word in ("--config-dir", folder)]
    line = [sys.executable, "-m", "lightning_scalerl.translate.trl_member", "--python", python]
    line += ["--folder", "{run_dir}/trl", *directories, *escaped, "seed={seed}", "budget.steps={steps}"]
    return {
        "line": line,
        "files": {},
        "env": {},
        "folder": str(Path.cwd()),
        "identity": [],
        "metrics": {
            "source": "{run_dir}/trl/evaluations.jsonl",
            "step": "step",
            "reward": {"heldout": "reward"},
            "keep": ["reward_se"],
        },
        "compute": {
            "unit": "flops",
            "column": "compute",
            "per_step": False,
            "restarts": False,
            "devices": 1,
            "parameters": "counted",
            "model": None,
        },
        "resume": {"anew": False, "add": None, "checkpoints": "{run_dir}/trl/checkpoint-*/scalerl-*.json"},
        "stop": {"signal": "SIGTERM", "file": None, "within_s": 60},
        "done": {"within": 0},
        "texts": {},
        "named": {},
    }
