"""Check the types of all settings of a study of other trainers' commands, before any of them is used.

One table replaces a check at each place where a setting is used, so that a wrong type gives a clear message and not one
of Python's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from sweeps.errors import UserError

_LARGEST = 2**64  # integers must be smaller: no trainer accepts a larger seed or budget, and JSON readers round it
_LONGEST_NAME = 255  # bytes in a folder's name


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


_is_text, _is_flag, _is_group, _is_none = _is(str), _is(bool), _is(Mapping), _is(NoneType)
_is_scalar = _is(str, int, float, bool, NoneType)


def _is_column(value: Any) -> bool:
    """Return whether a value can name a column: a string, or a number, since headers of tables may be numbers."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_count(value: Any) -> bool:
    return _is_whole(value, 1)


def _is_counted(value: Any) -> bool:
    return isinstance(value, str) and value == "counted"


def _is_folder_name(value: Any) -> bool:
    name = str(value)
    plain = _is_column(value) and name.isprintable() and Path(name).name == name and name != ".."
    return plain and len(name.encode()) <= _LONGEST_NAME


def _list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(is_valid, value))


def _group_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(is_valid, value.values()))


def _any_of(*checks: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(check(value) for check in checks)


# By dotted key: the check of a value, and a description of valid values. A group comes before its settings. Settings
# that are missing here are checked by `RaceSettings`, by `HangTimeout`, or where they are used.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "command": (_is_group, "a group of settings"),
    "command.line": (_any_of(_is_text, _list_of(_is_scalar)), "a command line, or a list of words"),
    "command.files": (_any_of(_is_none, _group_of(_is_text)), "a group: names of files, and the template of each"),
    "command.env": (_any_of(_is_none, _group_of(_is_scalar)), "a group: names of variables, and the value of each"),
    "command.folder": (_any_of(_is_none, _is_text), "the path of a folder"),
    "command.identity": (_any_of(_is_none, _list_of(_is_text)), "a list of files"),
    "command.optimizer": (
        _any_of(_is_none, _group_of(_is_scalar)),
        "a group: trainer, storage, states, eps, and the value of each",
    ),
    "command.metrics": (_is_group, "a group of settings"),
    "command.metrics.source": (_is_text, "stdout, a path or an address"),
    "command.metrics.step": (_any_of(_is_none, _is_column), "the name of a column, or null"),
    "command.metrics.reward": (
        _any_of(_is_text, _group_of(_is_text)),
        "the name of a column, or a group: names of evaluation sets, and the column of each",
    ),
    "command.metrics.keep": (_any_of(_is_none, _list_of(_is_column)), "a list of columns"),
    "command.compute": (_is_group, "a group of settings"),
    "command.compute.unit": (_is_text, "steps, tokens, device_hours or flops"),
    "command.compute.column": (_any_of(_is_none, _is_column), "the name of a column, or null"),
    "command.compute.per_step": (_is_flag, "true or false"),
    "command.compute.restarts": (_is_flag, "true or false"),
    "command.compute.devices": (_is_number, "a number above 0"),
    "command.compute.parameters": (_any_of(_is_none, _is_number, _is_counted), "a number above 0, counted, or null"),
    "command.compute.model": (_any_of(_is_none, _is_text), "the path of a folder with config.json, or null"),
    "command.resume": (_is_group, "a group of settings"),
    "command.resume.anew": (_is_flag, "true or false"),
    "command.resume.add": (_any_of(_is_none, _is_text, _list_of(_is_scalar)), "words of a command line, or null"),
    "command.resume.checkpoints": (_any_of(_is_none, _is_text), "a path, with * for the part that varies, or null"),
    "command.stop": (_is_group, "a group of settings"),
    "command.stop.signal": (_any_of(_is_none, _is_text), "the name of a signal, such as SIGTERM, or null"),
    "command.stop.file": (_any_of(_is_none, _is_text), "the path of a file, or null"),
    "command.stop.within_s": (_is_number, "a number of seconds above 0"),
    "command.done": (_is_group, "a group of settings"),
    "command.done.within": (_is_whole, "a whole number of steps, 0 or more"),
    "label": (_any_of(_is_none, _is_text), "a text such as '{loss}', or null"),
    "budget": (_is_group, "a group of settings; give budget.steps"),
    "budget.steps": (_is_count, "a whole number of steps, 1 or more"),
    "study": (_is_folder_name, "the name of one folder"),
    "output_dir": (_is_text, "the path of a folder"),
    "launch": (_is_group, "a group of settings, such as launch.max_parallel"),
    "launch.max_parallel": (_is_count, "a whole number, 1 or more"),
    "launch.threads": (_is_count, "a whole number, 1 or more"),
    "launch.strict_code": (_any_of(_is_none, _is_flag), "true or false"),
    "launch.like": (_any_of(_is_none, _is_text), "the folder of an earlier study, or null"),
    "mlflow": (_any_of(_is_none, _is_group), "a group of settings; give mlflow.uri"),
    "mlflow.uri": (_any_of(_is_none, _is_text), "an address such as sqlite:///outputs/mlflow.db, or null"),
}


def check_kinds(config: Mapping[str, Any]) -> None:
    """Check that all settings are present with the right types, and that all values can be serialized.

    Args:
        config: resolved configuration of a member.

    Raises:
        UserError: a setting is invalid. The message has the field, its value, and a description of valid values.
    """
    for key, value in _leaves(config):
        _check_plain(key, value)
    for key, (is_valid, description) in _KINDS.items():
        *groups, name = key.split(".")
        part: Any = config
        for group in groups:
            part = part[group]
        if part is None:  # the group is optional
            continue
        if name not in part:
            raise UserError(f"{key}: was taken away; give {description}")
        if not is_valid(part[name]):
            raise UserError(f"{key}: {_shown(part[name])} must be {description}")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every plain value of a configuration, and (dotted key, key) for every key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            inner_key = f"{key}.{name}" if key else str(name)
            yield inner_key, name
            yield from _leaves(inner, inner_key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def _check_plain(key: str, value: Any) -> None:
    """Check that a value can be written to a command line, an environment variable and a JSON file."""
    if not _is_scalar(value):
        raise UserError(f"{key!a}: {_shown(value)} must be a text, a number, true, false or null")
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise UserError(f"{key}: {_shown(value)} is too large a number; give one below 2^64")
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        what = "a NUL character" if "\0" in value else "half of a surrogate pair, which is no character"
        raise UserError(f"{key!a}: {_shown(value)} holds {what}; take it out")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """Format a value for a message: printable, on one line, shortened."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return f"a whole number of {value.bit_length()} bits"
    text = ascii(value) if isinstance(value, str) and not _is_unicode(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
