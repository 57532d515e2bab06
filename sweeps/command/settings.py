"""Checked settings of a member that is a command, with its values filled in."""

from __future__ import annotations

import glob
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.command.compute import Compute, compute_of
from sweeps.command.template import as_text, check_for_shell, filled, flat, names_in
from sweeps.errors import UserError
from sweeps.run.spec import OPERATIONAL_KEYS

STDOUT = "stdout"
STDOUT_FILE = "stdout.txt"  # in the member's folder
# Keys of the configuration that this project uses; all others are the user's values.
OWN_KEYS = OPERATIONAL_KEYS | {"command", "cluster", "member"}
# Added when a study is planned: digests of the files that the command names, and the texts of its templates.
FROZEN = ("named", "texts")
_SECTIONS = {
    "": {
        "line",
        "files",
        "env",
        "folder",
        "identity",
        "metrics",
        "compute",
        "resume",
        "stop",
        "done",
        "optimizer",
        *FROZEN,
    },
    "metrics": {"source", "step", "reward", "keep"},
    "compute": {"unit", "column", "per_step", "restarts", "devices", "parameters", "model"},
    "resume": {"anew", "add", "checkpoints"},
    "stop": {"signal", "file", "within_s"},
    "done": {"within"},
}
DEFAULT_SET = "heldout"
_REMOTE = ("mlflow:", "wandb:")
_NUMBER = re.compile(r"\d+")
# The option of a shell that is followed by a script, and the names of shells.
_SHELL_WORDS = re.compile(r"-[a-z]*c")
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")


@dataclass(frozen=True)
class Command:
    """A member's command with all values filled in.

    Attributes:
        words: words of the command line.
        files: text of each file to write before the start, by its name in the member's folder.
        env: environment variables in addition to the inherited ones.
        folder: working directory.
        source: location of the metrics: `stdout`, a path (with `*` for the newest of several) or an address.
        is_pattern: True if the source is a path with `*`; other wildcards are literal.
        step: name of the step column; None for a tracker's usual name.
        rewards: column of the reward of each evaluation set.
        keep: other columns to record.
        compute: how compute is measured.
        anew: True if an interrupted run starts again from zero.
        add: words added to the command when it resumes; they may contain `{checkpoint}`.
        checkpoints: pattern of its checkpoints; None if they are unknown.
        stop_signal, stop_file: ways to ask it to stop; either may be None.
        stop_within_s: seconds after which it is killed.
        within: number of steps by which the last logged step may be short of the budget.
    """

    words: tuple[str, ...]
    files: Mapping[str, str]
    env: Mapping[str, str]
    folder: Path
    source: str
    is_pattern: bool
    step: str | None
    rewards: Mapping[str, str]
    keep: tuple[str, ...]
    compute: Compute
    anew: bool
    add: tuple[str, ...]
    checkpoints: str | None
    stop_signal: signal.Signals | None
    stop_file: Path | None
    stop_within_s: float
    within: int

    @property
    def remote(self) -> bool:
        """Return True if the metrics are at an address instead of in a file."""
        return self.source.startswith(_REMOTE)

    def newest_checkpoint(self) -> str | None:
        """Return the path of the checkpoint with the largest number in its name; None if there is none."""
        return newest(self.checkpoints) if self.checkpoints is not None else None

    def checkpoint_stamp(self) -> tuple[str, int] | None:
        """Return path and modification time of the newest checkpoint; None if there is none."""
        path = self.newest_checkpoint()
        try:
            return None if path is None else (path, Path(path).stat().st_mtime_ns)
        except OSError:  # deleted since it was listed
            return None


def newest(pattern: str) -> str | None:
    """Return the matching path with the largest numbers in its name; None without a match."""
    found = glob.glob(pattern)  # noqa: PTH207 (a pattern may be absolute)
    return max(found, key=lambda path: [int(number) for number in _NUMBER.findall(path)], default=None)


def own_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's own values in a configuration."""
    return {key: value for key, value in config.items() if key not in OWN_KEYS}


def command_of(config: Mapping[str, Any], run_dir: Path | str, run: str = "", only_symbols: bool = False) -> Command:
    """Fill in the values of the command in a configuration, whose settings have their types (`check_kinds`).

    Args:
        config: resolved configuration of a member.
        run_dir: the member's folder.
        run: its identity.
        only_symbols: leave seed, budget and the member's folder as placeholders, as identities need.

    Raises:
        UserError: a setting that cannot be used, or a placeholder without a value.
    """
    given = _sections(config)
    # Values that are not part of a recipe's identity.
    apart = {"seed": config["seed"], "steps": config["budget"]["steps"], "run_dir": str(run_dir), "run": run}
    if only_symbols:
        apart = {key: f"{{{key}}}" for key in apart}
    apart["study"] = "{study}" if only_symbols else config["study"]
    values = {**flat(own_values(config)), **apart, "devices": given["compute"]["devices"]}

    def text(field: str, value: str) -> str:
        return filled(value, values, f"command.{field}")

    folder = Path(given["folder"])
    written = split("line", given["line"])
    words = [text("line", word) for word in written]
    if not words:
        raise UserError("command.line: is empty; give the command that trains, with {seed} and your values in it")
    if not only_symbols and Path(words[0]).name in _SHELLS:
        options = [at for at, word in enumerate(written) if _SHELL_WORDS.fullmatch(word)]
        for word in written[options[0] + 1 : options[0] + 2] if options else ():
            check_for_shell(word, values)
    # Only stars of the user's pattern are wildcards: values and folders may contain them too, as in `study[1]`.
    literal = {key: glob.escape(as_text(value)) for key, value in values.items()}
    escaped = Path(glob.escape(str(folder)))
    lies = given["metrics"]["source"]
    source = text("metrics.source", lies)
    is_pattern = False
    if source != STDOUT and not source.startswith(_REMOTE):
        is_pattern = "*" in lies
        source = str(escaped / filled(lies, literal, "command.metrics.source") if is_pattern else folder / source)
    stop, resume = given["stop"], given["resume"]
    checkpoints = resume["checkpoints"]
    values["checkpoint"] = "{checkpoint}"
    keep = given["metrics"]["keep"] or []
    step = given["metrics"]["step"]
    return Command(
        words=tuple(words),
        files={
            text(f"files.{name}", name): filled(
                template,
                values,
                f"command.files.{name} ({given['files'][name]})",
                yaml=name.endswith((".yaml", ".yml")),
            )
            for name, template in _templates(given).items()
        },
        env={str(name): text(f"env.{name}", str(value)) for name, value in given["env"].items()},
        folder=folder,
        source=source,
        is_pattern=is_pattern,
        step=None if step is None else str(step),
        rewards=_rewards(given["metrics"]["reward"]),
        keep=tuple(str(column) for column in keep),
        compute=compute_of(given["compute"], folder),
        anew=resume["anew"],
        add=tuple(text("resume.add", word) for word in split("resume.add", resume["add"] or [])),
        checkpoints=None
        if checkpoints is None
        else str(escaped / filled(checkpoints, literal, "command.resume.checkpoints")),
        stop_signal=_signal(stop["signal"]),
        stop_file=None if stop["file"] is None else folder / text("stop.file", stop["file"]),
        stop_within_s=float(stop["within_s"]),
        within=given["done"]["within"],
    )


def used_names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of all placeholders in the command's line, files and environment."""
    given = _sections(config)
    texts = [*split("line", given["line"]), *(str(value) for value in given["env"].values())]
    texts += _templates(given).values()
    return {name for text in texts for name in names_in(text)}


def templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a configuration's templates, by the name of the file that each makes."""
    return _templates(_sections(config))


def split(field: str, line: Any) -> list[str]:
    """Split a line into words as a shell does; a list is returned as texts.

    Raises:
        UserError: quotes are not closed.
    """
    if isinstance(line, list | tuple):
        return [str(word) for word in line]
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UserError(f"command.{field}: {line!r} must be a command line, or a list of words ({error})") from error


def _sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under `command`, with all sections and no unknown key.

    Raises:
        UserError: an unknown key.
    """
    given = config["command"]
    for section, valid in _SECTIONS.items():
        part = given[section] if section else given
        if unknown := sorted(set(map(str, part)) - valid):
            at = f"command.{section}." if section else "command."
            raise UserError(f"{at}{unknown[0]}: no such setting; valid: {', '.join(sorted(valid.difference(FROZEN)))}")
    return {**given, "files": given["files"] or {}, "env": given["env"] or {}}


def _rewards(given: Any) -> dict[str, str]:
    if given:
        return {DEFAULT_SET: given} if isinstance(given, str) else {str(name): column for name, column in given.items()}
    raise UserError(f"command.metrics.reward: {given!r} must be the name of a column, or names by evaluation set")


def _templates(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the templates by the name of the file to make: frozen ones, or else read from their files."""
    if "texts" in given:
        return dict(given["texts"])
    texts = {}
    for name, path in given["files"].items():
        try:
            texts[str(name)] = Path(str(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"command.files.{name}: {path}: cannot be read ({error}); name a template") from error
    return texts


def _signal(name: Any) -> signal.Signals | None:
    if name is None:
        return None
    try:
        return signal.Signals[str(name)]
    except KeyError:
        raise UserError(
            f"command.stop.signal: {name!r} is no signal; give SIGTERM, SIGINT, SIGUSR1, ... or null for none"
        ) from None


def written_by(commands: Sequence[tuple[str, Command]]) -> None:
    """Check that no two members share a place to write to: metrics, checkpoints or the stop file.

    Raises:
        UserError: two members share one; the message has both names and the place.
    """
    known: dict[tuple[str, str], str] = {}
    for title, command in commands:
        places = {
            "metrics.source": None if command.source == STDOUT else command.source,
            "resume.checkpoints": command.checkpoints,
            "stop.file": None if command.stop_file is None else str(command.stop_file),
        }
        for setting, place in places.items():
            if place is None:
                continue
            real = place if command.remote and setting == "metrics.source" else os.path.realpath(place)
            if (other := known.setdefault((setting, real), title)) != title:
                raise UserError(
                    f"command.{setting}: {place}: {other} and {title} would both write it; put {{run_dir}}, "
                    "or {seed} and all values that vary, into its path"
                )
