"""Command `scalerl init`: make a user's folder with a task, a reward, a recipe, a study and a batch script."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from sweeps.errors import UserError

FOLDER = Path(__file__).parent / "own_folder"


def init_command(options: argparse.Namespace) -> None:
    """Copy the example study to a new folder, and print the commands that run it (`scalerl init`)."""
    folder = Path(options.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give the name of a new or an empty folder")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(each.relative_to(folder) for each in folder.rglob("*") if each.is_file()):
        print(f"  {path}")
    print(f"cd {shlex.quote(str(folder))}")
    print("scalerl train --config-dir . recipe=mine budget.steps=4      # a run of a few steps")
    print("scalerl train --config-dir . --multirun experiment=mine      # the study; see README.md")
