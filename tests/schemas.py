"""Check the `--json` output of commands against sweeps/schemas, in every test that calls `main`."""

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
    """Return the validator for a command's `--json` output."""
    import jsonschema

    schema = json.loads((FOLDER / f"{command}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def with_json() -> list[str]:
    """Return the commands that have the option `--json`, according to the parser."""
    (choices,) = [
        action.choices for action in commands.make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return [name for name, parser in choices.items() if "--json" in parser._option_string_actions]


@contextmanager
def checked() -> Iterator[None]:
    """Validate JSON that a command prints while `main` runs; JSON printed outside of `main` is not checked."""
    running: list[str] = []
    original = commands._lazy_handler

    def recording_handler(module: str, function: str) -> commands.Handler:
        handler = original(module, function)

        def run(options: argparse.Namespace) -> int | None:
            running.append(function.removesuffix("_command"))
            try:
                return handler(options)
            finally:
                running.pop()

        return run

    def dumps(value: Any, **options_of_dumps: Any) -> str:
        text = json.dumps(value, **options_of_dumps)
        if running:
            validator(running[-1]).validate(json.loads(text))
        return text

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commands, "_lazy_handler", recording_handler)
        patched.setattr(output, "json", SimpleNamespace(dumps=dumps))
        yield
