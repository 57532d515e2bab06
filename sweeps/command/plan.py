"""Make the specifications of members that run another trainer's command: identity, label, and checks before a start.

A recipe's identity consists of the command's words, environment and files, and of the content of files that the command
names, such as its script. All values are filled in except seed, budget and the member's folder. Where the command runs,
how it is followed and how long it trains are not part of the identity.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeps.command.kinds import check_kinds
from sweeps.command.settings import (
    STDOUT_FILE,
    Command,
    check_shared_paths,
    command_of,
    own_values,
    templates,
    used_names,
)
from sweeps.command.template import as_text, fill, flatten
from sweeps.errors import UserError, errors_naming
from sweeps.run.activity import HangTimeout
from sweeps.run.files import parse_line
from sweeps.run.journal import CONFIG_FILE, JOURNAL_FILE, LOG_FILE, SEMANTICS_FILE
from sweeps.run.spec import SPEC_FILE, RunSpec, make_spec

# Largest size in bytes of a file that is read for the identity: large enough for scripts and configurations.
MAX_NAMED_BYTES = 1 << 26
ABSENT = "absent"
# Files that this project writes in a member's folder. A command's files must not replace them.
RESERVED_FILES = frozenset(
    {JOURNAL_FILE, CONFIG_FILE, SEMANTICS_FILE, LOG_FILE, SPEC_FILE, STDOUT_FILE, "command.json"}
)


@dataclass(frozen=True)
class ComposedMember:
    """A member's configuration and where it comes from.

    Attributes:
        config: resolved configuration.
        plain: resolved configuration of the user's file alone, without overrides on the command line.
        overrides: overrides on the command line.
    """

    config: Mapping[str, Any]
    plain: Mapping[str, Any]
    overrides: tuple[str, ...]


def make_specs(members: Sequence[ComposedMember], name: str, folder: Path, folders: Sequence[str]) -> list[RunSpec]:
    """Check members that run another trainer's command, and make their specifications.

    Args:
        members: composed configurations.
        name: stem of the user's file, which is the label of members without overrides.
        folder: folder of that file, to which relative paths refer.
        folders: see `RunSpec`.

    Raises:
        UserError: the first problem found, in one line.
    """
    specs = []
    for member in members:
        check_kinds(member.config)
        config = _resolve_files(member.config, folder)
        _check(config)
        identity = _identity(config)
        departures = _departures(config, member.plain)
        baseline = _baseline_label(config, member.plain, name)
        specs.append(
            replace(
                make_spec(
                    config=config,
                    reference=config,
                    identity=identity,
                    label=_label_from_template(config)
                    or "+".join(f"{key}={value}" for key, value in departures.items())
                    or name,
                    baseline=baseline,
                    departures=departures,
                    folders=folders,
                ),
                overrides=tuple(word for word in member.overrides if not word.lstrip("+~").startswith("mlflow")),
            )
        )
    runs_dir = Path(specs[0].config["output_dir"]) / "runs" if specs else Path()
    check_shared_paths(
        [(spec.title, resolved(spec, runs_dir / spec.run)) for spec in {s.run: s for s in specs}.values()]
    )
    measures = {command_of(spec.config, "", spec.run).compute.text for spec in specs}
    if len(measures) > 1:
        raise UserError(
            f"command.compute: members measure compute in {len(measures)} ways ({'; '.join(sorted(measures))}); one "
            "study has one axis"
        )
    _check_measure(runs_dir, measures)
    return specs


def _check_measure(runs_dir: Path, measures: set[str]) -> None:
    """Raise UserError if an existing run of the study measures compute in none of the ways `measures`."""
    for path in sorted(runs_dir.glob(f"*/{JOURNAL_FILE}")):
        try:
            with path.open("rb") as handle:
                header = parse_line(handle.readline()) or {}
        except OSError:
            continue
        measure = header.get("compute_is")
        if "adopted" in header:  # the launch checks the unit of adopted runs, and replaces their description
            continue
        if measure is not None and measure not in measures:
            raise UserError(
                f"command.compute: {', '.join(measures)}, and runs in {runs_dir.parent} measure {measure}; one study "
                "has one axis: go back to that, or launch into a folder of its own (study=NAME)"
            )


def resolved(spec: RunSpec, run_dir: Path) -> Command:
    """Return a member's command, with its values filled in for the folder `run_dir`."""
    return command_of(spec.config, run_dir.resolve(), spec.run)


def _resolve_files(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with absolute paths, the texts of templates, and digests of the files that it names."""
    command, compute = config["command"], config["command"]["compute"]
    with errors_naming("command.folder"):
        working_dir = (folder / (command["folder"] or ".")).resolve()
        if not working_dir.is_dir():
            raise UserError(
                f"command.folder: {working_dir}: no such folder; give the one that the command is started in"
            )
    files = {name: str(folder / path) for name, path in (command["files"] or {}).items()}
    result = {**config, "command": {**command, "folder": str(working_dir), "files": files}}
    if compute["model"] is not None:
        result["command"]["compute"] = {**compute, "model": str(folder / compute["model"])}
    result["command"]["texts"] = templates(result)
    result["command"]["named"] = named_files(command_of(result, "{run_dir}", only_symbols=True), result)
    return result


def named_files(command: Command, config: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the files that words of the command or `command.identity` name, by the name used there.

    Raises:
        UserError: a file listed in `command.identity` does not exist.
    """
    digests: dict[str, str] = {}
    for word in command.words[1:]:
        for text in (word, word.partition("=")[2]):
            if text and (digest := _digest(command.folder / text)) != ABSENT:
                digests[text] = digest
    for name in config["command"].get("identity") or []:
        digests[str(name)] = _digest(command.folder / str(name))
        if digests[str(name)] == ABSENT:
            raise UserError(f"command.identity: {command.folder / str(name)}: no such file; name files that are there")
    return digests


def _digest(path: Path) -> str:
    """Return the digest of a file; `ABSENT` if it is missing, unreadable or too large."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_NAMED_BYTES:
            return ABSENT
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, ValueError):
        return ABSENT


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that affect what a command learns, without the seed."""
    command = command_of(config, "", only_symbols=True)
    return {
        "command": list(command.words),
        "files": dict(command.files),
        "env": dict(command.env),
        "named": dict(config["command"]["named"]),
    }


def _check(config: Mapping[str, Any]) -> None:
    """Check for errors that would otherwise appear only in a member's process.

    Raises:
        UserError: a number is out of range, a value is not used, or a template with its values filled in is not valid.
    """
    seed = config.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed: {seed!r} must be a whole number; give seed=0, or several: seed=0,1,2")
    HangTimeout.of(config)
    used = used_names(config)
    valid = flatten(own_values(config))
    for key, value in valid.items():
        parents = {key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)}
        if not isinstance(value, Mapping) and not used & {key, *parents}:
            raise UserError(
                f"{key}: {as_text(value)[:80]} is used nowhere; write {{{key}}} where it belongs in command.line, in a "
                "file of command.files or in command.env, or leave the key out"
            )
    if "seed" not in used:
        raise UserError(
            f"seed: {seed} is used nowhere; write {{seed}} where the command takes its random seed, or members with "
            "different seeds are the same run"
        )
    command = command_of(config, "/RUN")
    for name, text in command.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or str(Path(name)) in RESERVED_FILES:
            raise UserError(
                f"command.files.{name}: is kept for this project, or lies outside of the member's folder; give the "
                "file another name, such as conf/" + Path(name).name
            )
        _check_syntax(name, text)
    if command.source == f"/RUN/{JOURNAL_FILE}":
        raise UserError(
            f"command.metrics.source: {{run_dir}}/{JOURNAL_FILE} is the member's journal, which this project writes; "
            "let the command write below a folder of its own, such as {run_dir}/out"
        )


def _check_syntax(name: str, text: str) -> None:
    try:
        if name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith(".json"):
            json.loads(text)
        elif name.endswith((".yaml", ".yml")):
            import yaml

            yaml.safe_load(text)
    except Exception as error:  # each parser has its own exceptions
        reason = " ".join(str(error).split())
        raise UserError(
            f"command.files.{name}: with its values filled in it is not {name.rpartition('.')[2]} ({reason})"
        ) from error


def _departures(config: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's values that differ from those in the user's file (`plain`), as text by dotted key."""
    plain_values = flatten(own_values(plain))
    return {
        key: as_text(value)
        for key, value in flatten(own_values(config)).items()
        if not isinstance(value, Mapping) and (key not in plain_values or plain_values[key] != value)
    }


def _label_from_template(config: Mapping[str, Any]) -> str | None:
    label = config.get("label")
    if label is None:
        return None
    if not label.strip():
        raise UserError(f"label: {label!r} must be a text such as '{{loss}}', or null")
    return fill(label, flatten(own_values(config)), "label")


def _baseline_label(config: Mapping[str, Any], plain: Mapping[str, Any], name: str) -> str:
    """Return the label of the recipe without overrides; `name` if there is no complete template for it."""
    if config.get("label") is None:
        return name
    values = flatten(own_values(plain))
    missing = "???" in map(str, values.values())
    return name if missing else fill(str(config["label"]), values, "label")
