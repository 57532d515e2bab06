"""Check the settings of a member that runs another trainer's command, and fill in its values."""

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
from sweeps.command.template import as_text, check_for_shell, fill, flatten, names_in
from sweeps.errors import UserError
from sweeps.run.spec import OPERATIONAL_KEYS

STDOUT = "stdout"
STDOUT_FILE = "stdout.txt"  # in the member's folder
# Keys of the configuration that this project uses; all other keys are the user's values.
OWN_KEYS = OPERATIONAL_KEYS | {"command", "cluster", "member"}
# Settings that planning adds: digests of the files that the command names, and the texts of its templates.
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
# A shell's option whose argument is a script, and names of shells.
_SHELL_WORDS = re.compile(r"-[a-z]*c")
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")


@dataclass(frozen=True)
class Command:
    """Another trainer's command for one member, with all values filled in.

    Attributes:
        files: text of each file to write before the command starts, by the file's name in the member's folder.
        env: environment variables that are added to the inherited ones.
        folder: working directory.
        source: where the metrics are: `stdout`, a path (`*` matches several, of which the newest is read) or an
            address.
        is_pattern: whether the source is a path with `*`. Other wildcards are taken literally.
        step: name of the step column; None for the usual names of trackers.
        rewards: column of the reward, by evaluation set. The first set is the default.
        keep: other columns to record.
        compute: how compute is measured.
        anew: whether an interrupted run starts again from step 0.
        add: words added to the command when it resumes; they may contain `{checkpoint}`.
        checkpoints: pattern of the checkpoints' paths; None if unknown.
        stop_signal, stop_file: signal to send, and file to create, by which the command is asked to stop; None for
            neither.
        stop_within_s: seconds after which a command that was asked to stop is killed.
        within: a run is complete if its last logged step is at most this many steps below the budget.
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
        """True if the metrics are read from an address, not from a file."""
        return self.source.startswith(_REMOTE)

    def newest_checkpoint(self) -> str | None:
        """Return the path of the checkpoint with the largest numbers in its path; None if there is no checkpoint."""
        return newest(self.checkpoints) if self.checkpoints is not None else None

    def checkpoint_stamp(self) -> tuple[str, int] | None:
        """Return path and modification time (ns) of the newest checkpoint; None if there is no checkpoint."""
        path = self.newest_checkpoint()
        try:
            return None if path is None else (path, Path(path).stat().st_mtime_ns)
        except OSError:  # deleted since it was listed
            return None


def newest(pattern: str) -> str | None:
    """Return the path with the largest numbers in it, compared in order, that matches a pattern; None if none does."""
    paths = glob.glob(pattern)  # noqa: PTH207 (a pattern may be absolute)
    return max(paths, key=lambda path: [int(number) for number in _NUMBER.findall(path)], default=None)


def own_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values in a configuration: all keys that this project does not use."""
    return {key: value for key, value in config.items() if key not in OWN_KEYS}


def command_of(config: Mapping[str, Any], run_dir: Path | str, run: str = "", only_symbols: bool = False) -> Command:
    """Make a member's command from a configuration, with all values filled in.

    Args:
        config: resolved configuration of a member, checked by `check_kinds`.
        run_dir: the member's folder.
        run: the member's identity.
        only_symbols: whether to leave placeholders for seed, budget, study, and the member's folder and identity. From
            this form a recipe's identity is computed.

    Raises:
        UserError: a setting cannot be used, or a placeholder has no value.
    """
    settings = _sections(config)
    # Values in which the runs of one recipe differ.
    run_values = {"seed": config["seed"], "steps": config["budget"]["steps"], "run_dir": str(run_dir), "run": run}
    if only_symbols:
        run_values = {key: f"{{{key}}}" for key in run_values}
    run_values["study"] = "{study}" if only_symbols else config["study"]
    values = {**flatten(own_values(config)), **run_values, "devices": settings["compute"]["devices"]}

    def text(field: str, value: str) -> str:
        return fill(value, values, f"command.{field}")

    folder = Path(settings["folder"])
    line_words = split("line", settings["line"])
    words = [text("line", word) for word in line_words]
    if not words:
        raise UserError("command.line: is empty; give the command that trains, with {seed} and your values in it")
    if not only_symbols and Path(words[0]).name in _SHELLS:
        options = [index for index, word in enumerate(line_words) if _SHELL_WORDS.fullmatch(word)]
        for word in line_words[options[0] + 1 : options[0] + 2] if options else ():
            check_for_shell(word, values)
    # Only a `*` that the user has written is a wildcard. Escape wildcards in values and folders, such as `study[1]`.
    literal = {key: glob.escape(as_text(value)) for key, value in values.items()}
    escaped = Path(glob.escape(str(folder)))
    source_template = settings["metrics"]["source"]
    source = text("metrics.source", source_template)
    is_pattern = False
    if source != STDOUT and not source.startswith(_REMOTE):
        is_pattern = "*" in source_template
        source = str(
            escaped / fill(source_template, literal, "command.metrics.source") if is_pattern else folder / source
        )
    stop, resume = settings["stop"], settings["resume"]
    checkpoints = resume["checkpoints"]
    values["checkpoint"] = "{checkpoint}"
    keep = settings["metrics"]["keep"] or []
    step = settings["metrics"]["step"]
    return Command(
        words=tuple(words),
        files={
            text(f"files.{name}", name): fill(
                template,
                values,
                f"command.files.{name} ({settings['files'][name]})",
                yaml=name.endswith((".yaml", ".yml")),
            )
            for name, template in _templates(settings).items()
        },
        env={str(name): text(f"env.{name}", str(value)) for name, value in settings["env"].items()},
        folder=folder,
        source=source,
        is_pattern=is_pattern,
        step=None if step is None else str(step),
        rewards=_rewards(settings["metrics"]["reward"]),
        keep=tuple(str(column) for column in keep),
        compute=compute_of(settings["compute"], folder),
        anew=resume["anew"],
        add=tuple(text("resume.add", word) for word in split("resume.add", resume["add"] or [])),
        checkpoints=None
        if checkpoints is None
        else str(escaped / fill(checkpoints, literal, "command.resume.checkpoints")),
        stop_signal=_signal(stop["signal"]),
        stop_file=None if stop["file"] is None else folder / text("stop.file", stop["file"]),
        stop_within_s=float(stop["within_s"]),
        within=settings["done"]["within"],
    )


def used_names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of all placeholders in the command's line, files and environment."""
    settings = _sections(config)
    texts = [*split("line", settings["line"]), *(str(value) for value in settings["env"].values())]
    texts += _templates(settings).values()
    return {name for text in texts for name in names_in(text)}


def templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a configuration's templates, by the name of the file to write."""
    return _templates(_sections(config))


def split(field: str, line: Any) -> list[str]:
    """Split a command line into words as a shell does. The items of a list become strings.

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
    """Return the settings under `command`, with empty groups for missing `files` and `env`.

    Raises:
        UserError: a key is unknown.
    """
    settings = config["command"]
    for section, valid in _SECTIONS.items():
        part = settings[section] if section else settings
        if unknown := sorted(set(map(str, part)) - valid):
            prefix = f"command.{section}." if section else "command."
            raise UserError(
                f"{prefix}{unknown[0]}: no such setting; valid: {', '.join(sorted(valid.difference(FROZEN)))}"
            )
    return {**settings, "files": settings["files"] or {}, "env": settings["env"] or {}}


def _rewards(reward: Any) -> dict[str, str]:
    """Return the column of the reward by evaluation set. A single column belongs to `DEFAULT_SET`."""
    if reward:
        return (
            {DEFAULT_SET: reward} if isinstance(reward, str) else {str(name): column for name, column in reward.items()}
        )
    raise UserError(f"command.metrics.reward: {reward!r} must be the name of a column, or names by evaluation set")


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each template, by the name of the file to write.

    Planning stores the texts in the settings. Before that, they are read from the templates' files.

    Raises:
        UserError: a template cannot be read.
    """
    if "texts" in settings:
        return dict(settings["texts"])
    texts = {}
    for name, path in settings["files"].items():
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


def check_shared_paths(commands: Sequence[tuple[str, Command]]) -> None:
    """Check that no two members write to one path: metrics, checkpoints or stop file.

    Args:
        commands: pairs of a member's title and its command.

    Raises:
        UserError: two members share a path. The message has the path and both titles.
    """
    known: dict[tuple[str, str], str] = {}
    for title, command in commands:
        paths = {
            "metrics.source": None if command.source == STDOUT else command.source,
            "resume.checkpoints": command.checkpoints,
            "stop.file": None if command.stop_file is None else str(command.stop_file),
        }
        for setting, path in paths.items():
            if path is None:
                continue
            real_path = path if command.remote and setting == "metrics.source" else os.path.realpath(path)
            if (other := known.setdefault((setting, real_path), title)) != title:
                raise UserError(
                    f"command.{setting}: {path}: {other} and {title} would both write it; put {{run_dir}}, "
                    "or {seed} and all values that vary, into its path"
                )
