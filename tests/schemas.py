"""Checks what commands print with `--json` against the files in sweeps/schemas, in every test that calls `main`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sweeps
from sweeps.cli import main as commands
from sweeps.cli import output

FOLDER = Path(sweeps.__file__).parent / "schemas"


@cache
def validator(command: str) -> Any:
    """The validator of a command's `--json`."""
    import jsonschema

    schema = json.loads((FOLDER / f"{command}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def with_json() -> list[str]:
    """The commands with the option `--json`, by the parser itself."""
    (choices,) = [
        action.choices for action in commands.make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return [name for name, parser in choices.items() if "--json" in parser._option_string_actions]


@contextmanager
def checked() -> Iterator[None]:
    """Validate what each command prints as JSON; what is printed outside of `main` is not checked."""
    running: list[str] = []
    later = commands._lazy_handler

    def noted(module: str, function: str) -> commands.Handler:
        handler = later(module, function)

        def run(options: argparse.Namespace) -> int | None:
            running.append(function.removesuffix("_command"))
            try:
                return handler(options)
            finally:
                running.pop()

        return run

    def dumps(value: Any, **how: Any) -> str:
        text = json.dumps(value, **how)
        if running:
            validator(running[-1]).validate(json.loads(text))
        return text

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commands, "_lazy_handler", noted)
        patched.setattr(output, "json", SimpleNamespace(dumps=dumps))
        yield
