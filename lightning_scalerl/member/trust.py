"""Check of the code that the folder of a run or study names, before any of it is imported.

`scalerl export`, `rescore`, `noise` and `collect` build objects from a stored specification. `collect` also starts the
entry that `launch.json` names (`sweeps.launch.trust`). A folder from another person could name any code. Without
`--trust`, code in a specification must be one of these:

- a choice or setting with a public name of this package, as in the files of `conf/`;
- code of the user: in a folder of `--config-dir` that the specification lists, or a file with a reward function. It
  must belong to the user, not be writable by others, and be outside of the study's folder.

If a member runs another trainer's command, it must be the command in the study's file. That file must belong to the
user and be outside of the study's folder. Only values that the file leaves to a grid may differ. If TRL trains a
member, its command must be the one that its overrides produce here, and its interpreter must belong to the user or the
system.

The specification must also have the identity that it names. This detects edits and damage. It does not protect against
attackers, who can compute identities: only the check of names prevents foreign code from running.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl import axis_names
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.compat.hydra import locate
from lightning_scalerl.composition import compose, conf_dir, group_of, use_folders
from lightning_scalerl.member.command import plan_commands
from lightning_scalerl.member.identity import content_of, identity_of
from sweeps.errors import UserError
from sweeps.run.progress import is_done
from sweeps.run.spec import SPEC_FILE, RunSpec, digest
from sweeps.run.trust import REMEDY, belongs_to_system, belongs_to_user, refusal

_PACKAGE = "lightning_scalerl"
_TRAINER = "trainer"  # group that a specification only has if another trainer, such as TRL, trains the run
_NAMED_IN_CONF = re.compile(rf"\b_target_: *({_PACKAGE}\.\w+)")
# Keys of a task that name verifiers: a single word for a built-in one, else file.py:function or module:function.
_VERIFIERS = ("rewards", "use", "verifier")
_RUNS = "runs"  # folder of the runs in a study's folder


def check_run(run_dir: Path, spec: RunSpec, finished: bool = False) -> None:
    """Check that code in a run's specification is this project's or the user's, and check the specification's identity.

    It also registers the run's folders (`use_folders`), because names are looked up in them.

    Args:
        run_dir: directory of the run.
        spec: the specification read from it.
        finished: whether the run has finished, so that it is not started. Then its identity, which depends on its data,
            is not checked.

    Raises:
        UserError: a check failed; one line with the field, its value and the remedy.
    """
    study = run_dir.resolve().parents[1] if run_dir.resolve().parent.name == _RUNS else run_dir.resolve()
    file = run_dir / SPEC_FILE
    if "adopted" in spec.config:
        return  # an adopted run is never started
    for folder in spec.folders:
        if not (Path(folder).is_absolute() and belongs_to_user(Path(folder), study) and belongs_to_user(file)):
            raise refusal(file, "folders", folder, "a folder of yours")
    if "command" in spec.config:
        if not finished:
            (_check_trl if _TRAINER in spec.config else _check_command)(file, spec, study)
        return
    try:
        _check_names(file, {"config": spec.config, "reference": spec.reference}, spec.folders, study)
        if not finished:
            _check_identity(file, spec)
    except ConfigurationError as error:
        raise UserError(str(error)) from error


def check_runs(words: Sequence[Sequence[str]], _: Sequence[str]) -> list[RunSpec]:
    """Check members of a study by `check_run`.

    The signature and the empty result are those of a planner (`plan_members`), so that this function can be called in
    a separate process as planners are.

    Args:
        words: for each member, its folder and its identity in the study's ledger.

    Raises:
        UserError: see `check_run`; or a folder contains another run.
    """
    for folder, run in words:
        run_dir = Path(folder)
        spec = RunSpec.read(run_dir)
        if spec.run != run:
            raise refusal(run_dir / SPEC_FILE, "run", spec.run, f"{run!r}, as the ledger has it")
        check_run(run_dir, spec, is_done(run_dir, spec.steps, spec.run))
    return []


def _check_names(file: Path, configs: Mapping[str, Any], folders: Sequence[str], study: Path) -> None:
    """Check that all code that the configurations name has a public name of this package or belongs to the user.

    Args:
        file: the specification, for error messages.
        configs: configurations, by the field of the specification that holds them.
        folders: the user's folders of configuration files.
        study: the study's folder, which must not contain the code.
    """
    # Check public names before `use_folders`, so that they are not looked up in the user's folders.
    other_names = [
        (field, name)
        for part, config in configs.items()
        for field, name in dict.fromkeys(_names_of_code(config, part))
        if not _is_public(field, name)
    ]
    use_folders(folders)
    for field, name in other_names:
        if not (belongs_to_user(file) and _is_own_code(name, folders, study)):
            raise refusal(file, field, name, "a public name of lightning_scalerl, nor code of yours")


def _names_of_code(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for every text in a configuration that names code."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            field = f"{path}.{key}"
            # Positional arguments may contain a verifier. They are never accepted, and no file of `conf/` has any.
            if key in ("_target_", "_args_") or (key in _VERIFIERS and isinstance(value, str)):
                yield field, str(value)
            else:
                if key in _VERIFIERS and isinstance(value, list | tuple):
                    yield from ((field, entry) for entry in value if isinstance(entry, str))
                yield from _names_of_code(value, field)
    elif isinstance(config, list | tuple):
        for number, value in enumerate(config):
            yield from _names_of_code(value, f"{path}[{number}]")


def _is_public(field: str, name: str) -> bool:
    if field.endswith("._target_"):
        return name in _buildable_names()
    return not field.endswith("._args_") and name.isidentifier()


@cache
def _buildable_names() -> frozenset[str]:
    """Return the public names that a configuration may build.

    `run_member` is not among them, because it would run code that another folder names.
    """
    files = conf_dir().rglob("*.yaml")
    names = {name for file in files for name in _NAMED_IN_CONF.findall(file.read_text(encoding="utf-8"))}
    return frozenset(names | {f"{_PACKAGE}.{name}" for name in axis_names()})


def _is_own_code(name: str, folders: Sequence[str], study: Path) -> bool:
    """Return whether a name is defined in a file that belongs to the user, or in one of the user's `folders`."""
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return function.isidentifier() and belongs_to_user(Path(file), study)
    dotted = name.replace(":", ".")
    if not folders or not all(part.isidentifier() for part in dotted.split(".")):
        return False
    try:
        # Find out where the module would be imported from before importing it.
        spec = importlib.util.find_spec(dotted.partition(".")[0])
        paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
        if not any(_below(path, folders) for path in paths):
            return False
        target = locate(dotted)
    except Exception as error:
        raise ConfigurationError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    # The module may have imported the object from elsewhere, as in my_choices.os.system: check its defining module.
    module = sys.modules.get(str(getattr(target, "__module__", "")))
    return _below(getattr(module, "__file__", None), folders)


def _below(path: str | None, folders: Sequence[str]) -> bool:
    resolved = None if path is None else Path(path).resolve()
    return resolved is not None and any(resolved.is_relative_to(Path(folder).resolve()) for folder in folders)


def _check_command(file: Path, spec: RunSpec, _: Path) -> None:
    """Check that a member's command is the one that the user's study file produces from its overrides.

    The study's file is the last entry of `spec.folders`. It was already checked to belong to the user and to be outside
    of the study's folder.
    """
    refused = _refusal_of_command(file, spec, "the command of a study's file of yours")
    study_file = Path(spec.folders[-1]) if spec.folders else None
    if study_file is None or not study_file.is_file() or _overrides_command(spec):
        raise refused
    try:
        (replanned,) = plan_commands([spec.overrides], spec.folders)
    except ConfigurationError as error:
        raise UserError(f"{file}: {error}") from error
    if replanned.run != spec.run or replanned.config["command"] != spec.config["command"]:
        raise refused


def _refusal_of_command(file: Path, spec: RunSpec, expected: str) -> UserError:
    line = spec.config["command"].get("line") if isinstance(spec.config["command"], Mapping) else None
    return refusal(file, "config.command.line", line, expected)


def _overrides_command(spec: RunSpec) -> bool:
    """Return whether an override changes the command or its launch, which only the study's file may set."""
    return any(group_of(word) in ("command", "member", "hydra") for word in spec.overrides)


def _check_trl(file: Path, spec: RunSpec, study: Path) -> None:
    """Check that a member's command equals the command that its overrides produce here.

    Names of code are checked before anything is built from the overrides, and the interpreter before it is started.
    """
    from lightning_scalerl.member.trl import plan_trl  # only for members of TRL

    refused = _refusal_of_command(file, spec, "the command that this version makes of its overrides")
    trainer, command = spec.config[_TRAINER], spec.config["command"]
    python = trainer.get("python") if isinstance(trainer, Mapping) else None
    if not _is_own_interpreter(python, study):
        raise refusal(file, f"config.{_TRAINER}.python", python, "an interpreter of yours or of the system's")
    if not isinstance(command, Mapping) or _overrides_command(spec):
        raise refused
    try:
        composed = OmegaConf.to_container(compose(spec.overrides, spec.folders), resolve=True)
        _check_names(file, {"overrides": composed}, spec.folders, study)
        # Use the absolute path of the interpreter: a relative path refers to the folder of the launch.
        (replanned,) = plan_trl([[*spec.overrides, f"{_TRAINER}.python={python}"]], spec.folders)
    except ConfigurationError as error:
        raise UserError(f"{file}: {error}") from error
    # Python searches its working folder for modules, so that folder must belong to the user too.
    folder = command.get("folder")
    if not (isinstance(folder, str) and Path(folder).is_absolute() and belongs_to_user(Path(folder), study)):
        raise refusal(file, "config.command.folder", folder, "a folder of yours")
    line, here = command.get("line"), Path(sys.executable)
    if isinstance(line, list) and line and _is_another_name_of(Path(str(line[0])), here):  # such as python3 and python
        line = [str(here), *line[1:]]
    if replanned.run != spec.run or {**replanned.config["command"], "folder": folder} != {**command, "line": line}:
        raise refused


def _is_another_name_of(path: Path, python: Path) -> bool:
    return path.parent == python.parent and path.resolve() == python.resolve()


def _is_own_interpreter(python: Any, study: Path) -> bool:
    """Return whether an interpreter and its folder belong to the user or the system.

    The folder matters because the interpreter of a virtual environment is a link, and its folder decides which
    packages it imports.
    """
    if not (isinstance(python, str) and Path(python).is_absolute()):
        return False
    paths = (Path(python), Path(python).parent)
    return all(belongs_to_user(path, study) or belongs_to_system(path, study) for path in paths)


def _check_identity(file: Path, spec: RunSpec) -> None:
    """Check that the specification has the identity that it names, if its data is available."""
    try:
        identity = identity_of(spec.config)
    except ConfigurationError:
        return  # its data is missing here; commands that need the data report that themselves
    actual = digest({"science": identity, "seed": spec.seed})
    # If the configuration reads files, a changed file may be the reason for another identity.
    if actual != spec.run and not _reads_files(spec.config):
        raise UserError(
            f"{file}: run: {spec.run!r} is not the identity of its configuration, which is {actual}: it was edited or "
            f"damaged; {REMEDY}"
        )


def _reads_files(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(content_of(config)) or any(_reads_files(value) for value in config.values())
    return isinstance(config, list | tuple) and any(_reads_files(value) for value in config)
