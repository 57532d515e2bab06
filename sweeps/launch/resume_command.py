"""Build the command line for a proposed next run, for studies that were launched by this package."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sweeps.errors import UserError
from sweeps.run.journal import JournalView
from sweeps.run.spec import RunSpec

# Overrides of the study to leave out: the proposal sets the first two, and the last is from an earlier version.
_DROPPED_KEYS = ("seed", "budget.steps", "race.freed")
_FOLDER_KEYS = ("study", "output_dir")
# A path that Hydra reads as text even without quotes.
_PLAIN = re.compile(r"(\.\./)*[a-z_/][\w./-]*", re.ASCII | re.IGNORECASE)
_CONSTANTS = ("null", "true", "false", "nan", "inf")


class Advice(Protocol):
    """Protocol of a proposal for the next run; `sweeps.decide.next_run.Step` is one."""

    @property
    def recipe(self) -> str: ...  # noqa: D102

    @property
    def action(self) -> str: ...  # noqa: D102

    @property
    def compute(self) -> float: ...  # noqa: D102


def command(advice: Advice, runs: Sequence[JournalView], axis: str) -> str | None:
    """Return the `scalerl train ...` command for a proposal; None if the runs were not launched by this package.

    A run that is extended keeps its identity, and gets a larger budget. Further steps are assumed to cost as much as
    those so far.

    Args:
        advice: proposal to extend all runs of a recipe to a compute, or to add a seed of the recipe.
        runs: journals of all runs of the study.
        axis: name of the compute axis in the journals, such as `compute/device_hours`.
    """
    recipe_runs = [run for run in runs if run.header.get("recipe") == advice.recipe]
    try:
        specs = [RunSpec.read(run.path.parent) for run in recipe_runs]
    except UserError:
        return None
    if not specs or not specs[0].overrides:
        return None
    points = [(record.step, record.metrics.get(axis, 0.0)) for run in recipe_runs for record in run.of_kind("eval")]
    steps, compute = max(points, key=lambda pair: pair[1], default=(0, 0.0))
    if not compute:
        return None
    seeds = sorted({spec.seed for spec in specs})
    budget = math.ceil(steps * advice.compute / compute)
    if advice.action == "seed":
        seeds, budget = [seeds[-1] + 1], max(spec.steps for spec in specs)
    overrides = [entry for entry in specs[0].overrides if _key(entry) not in _DROPPED_KEYS]
    if specs[0].config.get("race", {}).get("mode", "none") != "none":  # a race would stop the recipe again
        overrides = [*(entry for entry in overrides if not _key(entry).startswith("race.")), "race.mode=none"]
    overrides = _into_folder(overrides, specs[0], recipe_runs[0].path.parent)
    words = [*overrides, f"seed={','.join(map(str, seeds))}", f"budget.steps={budget}"]
    return shlex.join(["scalerl", "train", *folder_arguments(specs[0].folders), "--multirun", *words])


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


def _into_folder(overrides: Sequence[str], spec: RunSpec, run_dir: Path) -> list[str]:
    """Return overrides that make the launch write to the study's folder, even if the folder was moved or copied."""
    recorded, study, here = spec.config.get("output_dir"), run_dir.resolve().parent.parent, Path.cwd()
    if recorded is None or Path(recorded).resolve() == study:
        return [*overrides]
    study = study.relative_to(here) if here in study.parents else study
    return [*(entry for entry in overrides if _key(entry) not in _FOLDER_KEYS), f"output_dir={quoted(str(study))}"]


def quoted(text: str) -> str:
    """Return a text as the value of a Hydra override, in quotes if it needs them."""
    if _PLAIN.fullmatch(text) and text.lower() not in _CONSTANTS:
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def folder_arguments(folders: Sequence[str]) -> list[str]:
    """Return the arguments of `scalerl train` that name configuration folders, from `RunSpec.folders`.

    An entry that ends in `.yaml` is a file: the configuration of a study of another trainer's commands.
    """
    files = [Path(folder) for folder in folders if folder.endswith(".yaml")]
    words = [word for file in files[:1] for word in ("--config-dir", str(file.parent), "--config-name", file.stem)]
    others = [folder for folder in folders if not folder.endswith(".yaml") and folder not in words]
    if others and not words:  # Hydra takes a single --config-dir
        words = ["--config-dir", others.pop(0)]
    return [*words, f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in others)}]"] if others else words
