"""Command `scalerl translate`: translate a recipe into settings of another trainer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweeps.cli.output import print_json
from sweeps.executor.base import load_entry
from sweeps.run.files import write_atomically
from sweeps.terminal import counted


def translate_command(options: argparse.Namespace) -> None:
    """Print or write a recipe in another trainer's format. Settings without a counterpart become comments.

    Raises:
        UserError: the overrides do not compose, or the trainer is unknown.
    """
    translate = load_entry("lightning_scalerl.translate.command:translate")
    found = translate(options.overrides, options.to, options.config_dir)
    if options.json:
        written = {name: value for name, value in vars(found).items() if name != "settings_by_axis"}
        print_json({**written, "missing": [vars(each) for each in found.missing], "axes": found.axes})
    if options.output is not None:
        write_atomically(Path(options.output), found.text())
        keys = ", ".join(each.key for each in found.missing)
        lacking = f"; without a counterpart (see its comments): {keys}" if keys else ""
        print(f"{options.output}: {counted(len(found.settings), 'setting')} of {found.to}{lacking}", file=sys.stderr)
    elif not options.json:
        print(found.text(), end="")
