"""Shell completion (`scalerl completion`), generated from the argument parser."""

from __future__ import annotations

import argparse

from sweeps.cli.main import make_parser


def completion_command(options: argparse.Namespace) -> None:
    """Print the completion script for a shell (`scalerl completion bash|zsh|tcsh`)."""
    import shtab

    parser = make_parser()
    for subparser in _parsers(parser):
        for action in subparser._actions:
            if action.metavar in ("SOURCE", "FILE"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "SWEEP":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        subparser
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for subparser in action.choices.values()
    ]
