"""Planning of members that TRL trains: recipes are checked and identified as usual, and each becomes a command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import Folders, group_of, use_folders
from lightning_scalerl.member.branch import GROUP as BRANCH
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.identity import identity_of
from lightning_scalerl.translate.record import Run
from lightning_scalerl.translate.to_trl import VERSION
from lightning_scalerl.translate.trl_member import translate_for_trl
from sweeps.run.spec import RunSpec, make_spec

GROUP = "trainer"
# Groups whose overrides are not copied into a member's command: the command must not depend on where and how it is
# launched, and must not contain an address. The runner adds seed and budget. `_COMMAND_KEYS` are the exceptions.
_STUDY_GROUPS = frozenset({"seed", "budget", "study", "output_dir", "label", "cluster", "launch", "race", "mlflow"})
_COMMAND_KEYS = ("launch.threads",)
# Program for TRL's interpreter: it checks for the packages and prints TRL's version.
_PROBE = "from importlib.metadata import version; import torch, transformers, datasets; print(version('trl'))"


def plan_trl(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify members as `plan_members` does, and turn them into commands that run TRL.

    Args:
        override_lists: overrides per member, as on the command line, with `trainer=trl trainer.python=PYTHON`.
        folders: the user's folders of configuration files, in addition to `conf/`.

    Raises:
        ConfigurationError: the first problem, in one line; this includes choices that TRL cannot express.
    """
    if any(group_of(entry) == BRANCH for overrides in override_lists for entry in overrides):
        raise ConfigurationError(
            f"{BRANCH}: starts from a checkpoint of ours, which TRL cannot read; leave out {GROUP}=trl"
        )
    used_folders = use_folders(folders)
    our_overrides = [[entry for entry in overrides if group_of(entry) != GROUP] for overrides in override_lists]
    specs = plan_members(our_overrides, folders)
    trl_specs: list[RunSpec] = []
    optimizers: dict[str, dict[str, Any]] = {}  # by curve: members that differ only in their seed need one check
    for spec, overrides, own_overrides in zip(specs, override_lists, our_overrides, strict=True):
        if spec.curve not in optimizers:
            translation, _ = translate_for_trl(Run.of(own_overrides, list(used_folders)))
            optimizers[spec.curve] = {"trainer": "trl", **translation.optimizer}
        command = _command(_python(overrides), spec, own_overrides, optimizers[spec.curve])
        trl_specs.append(_trl_spec(spec, _python(overrides), command, tuple(overrides)))
    return trl_specs


def _belongs_in_command(entry: str) -> bool:
    return group_of(entry) not in _STUDY_GROUPS or entry.lstrip("+~").partition("=")[0] in _COMMAND_KEYS


def _python(overrides: Sequence[str]) -> str:
    """Return the interpreter that a member's overrides name, after checking its version of TRL."""
    interpreters = [entry.partition("=")[2] for entry in overrides if entry.lstrip("+").startswith(f"{GROUP}.python=")]
    if not interpreters:
        raise ConfigurationError(f"{GROUP}.python: needs a value; name the interpreter of an environment that has TRL")
    return _checked_interpreter(str(Path(interpreters[-1]).expanduser().absolute()))


@cache  # starting the interpreter and importing torch takes seconds
def _checked_interpreter(python: str) -> str:
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigurationError(f"{GROUP}.python: {python}: {error.strerror}; name an interpreter") from error
    (output,) = (done.stdout or done.stderr).strip().splitlines()[-1:] or [""]
    if done.returncode or output.split(".")[:2] != VERSION.split(".")[:2]:
        raise ConfigurationError(
            f"{GROUP}.python: {python}: {output}; an environment with trl {VERSION}, torch, transformers and "
            "datasets is needed: the extra lightning-scalerl[trl], or one of its own"
        )
    return python


def _trl_spec(spec: RunSpec, python: str, command: Mapping[str, Any], pasted: tuple[str, ...]) -> RunSpec:
    """Return the specification of the same recipe trained by TRL: another curve, labelled with `+trainer=trl`."""
    suffix = f"+{GROUP}=trl"
    label = f"{spec.baseline}{suffix}{spec.recipe.removeprefix(spec.baseline)}"
    trl_spec = make_spec(
        config={**spec.config, GROUP: {"name": "trl", "python": python}, "command": command},
        reference=spec.reference,
        identity={**identity_of(spec.config), GROUP: {"name": "trl", "version": VERSION}},
        label=label,
        baseline=f"{spec.baseline}{suffix}",
        departures=spec.departures,
        settings=spec.settings,
        folders=spec.folders,
    )
    return replace(trl_spec, overrides=tuple(entry for entry in pasted if not entry.lstrip("+~").startswith("mlflow")))


def _command(python: str, spec: RunSpec, overrides: Sequence[str], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a member for `sweeps.command`, with all keys of conf/command/base/command.yaml."""
    # Braces in values must not be taken for placeholders.
    escaped = [entry.replace("{", "{{").replace("}", "}}") for entry in overrides if _belongs_in_command(entry)]
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
        "optimizer": dict(optimizer),
        "texts": {},
        "named": {},
    }
