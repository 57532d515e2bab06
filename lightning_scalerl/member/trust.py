"""Check of the code that a run's or study's folder would have this machine run, before any of it is imported.

`scalerl export`, `rescore`, `noise` and `collect` build objects from a frozen specification (and `collect` starts the
entry that `launch.json` names: `sweeps.launch.trust`): a folder that somebody else has made could name anything.
Without `--trust` the names in it must be

- choices and settings that this package offers by a public name, as the files of `conf/` do;
- or code of the user's own: a folder of `--config-dir` that the specification has frozen, or a reward's file, which
  belongs to the user, which nobody else may write, and which lies outside of the study's folder;

A member that is a command must be what the study's file says, which belongs to the user and lies elsewhere: only values
may differ that it leaves to a grid. One that TRL trains must be the command that its overrides make here, and its
interpreter the user's or the system's. And the specification must be that of its identity. An identity can be computed
by anybody, so that this finds what was edited or damaged; that nothing foreign runs rests on the names.
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
from lightning_scalerl.composition import compose, conf_dir, use_folders
from lightning_scalerl.member.command import plan_commands
from lightning_scalerl.member.identify import group_of
from lightning_scalerl.member.identity import content_of, identity_of, located
from sweeps.errors import UserError
from sweeps.run.progress import is_done
from sweeps.run.spec import SPEC_FILE, RunSpec, digest
from sweeps.run.trust import REMEDY, belongs_to_system, belongs_to_user, refusal

_PACKAGE = "lightning_scalerl"
_TRAINER = "trainer"  # group of who trains a run; only others' are in a specification
_NAMED_IN_CONF = re.compile(rf"\b_target_: *({_PACKAGE}\.\w+)")
# Keys of a task under which a verifier is named: one of ours in one word, or file.py:function or module:function.
_VERIFIERS = ("rewards", "use", "verifier")
_RUNS = "runs"  # in a study's folder


def check_run(run_dir: Path, spec: RunSpec, done: bool = False) -> None:
    """Check that all code which a run's specification names is ours or the user's own, and that it is of its identity.

    Makes the run's folders known (`use_folders`), for what they define is looked up.

    Args:
        run_dir: of the run.
        spec: as read from there.
        done: whether nothing will be run of it, so that its identity, for which its data is read, need not be known.

    Raises:
        UserError: something is not; one line with the field, its value and the remedy.
    """
    study = run_dir.resolve().parents[1] if run_dir.resolve().parent.name == _RUNS else run_dir.resolve()
    file = run_dir / SPEC_FILE
    if "adopted" in spec.config:
        return  # it is never started
    for folder in spec.folders:
        if not (Path(folder).is_absolute() and belongs_to_user(Path(folder), study) and belongs_to_user(file)):
            raise refusal(file, "folders", folder, "a folder of yours")
    if "command" in spec.config:
        if not done:
            (_check_trl if _TRAINER in spec.config else _check_command)(file, spec, study)
        return
    try:
        _check_names(file, {"config": spec.config, "reference": spec.reference}, spec.folders, study)
        if not done:
            _check_identity(file, spec)
    except ConfigurationError as error:
        raise UserError(str(error)) from error


def check_runs(words: Sequence[Sequence[str]], _: Sequence[str]) -> list[RunSpec]:
    """Check members of a study (`check_run`), in the form of a planner, which gets a process of its own.

    Args:
        words: of each member its folder, and its identity in the ledger.

    Raises:
        UserError: see `check_run`; or a folder holds another run.
    """
    for place, run in words:
        run_dir = Path(place)
        spec = RunSpec.read(run_dir)
        if spec.run != run:
            raise refusal(run_dir / SPEC_FILE, "run", spec.run, f"{run!r}, as the ledger has it")
        check_run(run_dir, spec, is_done(run_dir, spec.steps, spec.run))
    return []


def _check_names(file: Path, configs: Mapping[str, Any], folders: Sequence[str], study: Path) -> None:
    # Before the folders are known, so that no name of ours is looked for in them.
    theirs = [
        (field, name)
        for part, config in configs.items()
        for field, name in dict.fromkeys(_code_named(config, part))
        if not _is_ours(field, name)
    ]
    use_folders(folders)
    for field, name in theirs:
        if not (belongs_to_user(file) and _is_own_code(name, folders, study)):
            raise refusal(file, field, name, "a public name of lightning_scalerl, nor code of yours")


def _code_named(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a configuration that names code, with the place where it stands."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            place = f"{path}.{key}"
            # Arguments by position: a verifier could be among them, and no file of ours has any.
            if key in ("_target_", "_args_") or (key in _VERIFIERS and isinstance(value, str)):
                yield place, str(value)
            else:
                if key in _VERIFIERS and isinstance(value, list | tuple):
                    yield from ((place, each) for each in value if isinstance(each, str))
                yield from _code_named(value, place)
    elif isinstance(config, list | tuple):
        for number, value in enumerate(config):
            yield from _code_named(value, f"{path}[{number}]")


def _is_ours(field: str, name: str) -> bool:
    if field.endswith("._target_"):
        return name in _choosable()
    return not field.endswith("._args_") and name.isidentifier()


@cache
def _choosable() -> frozenset[str]:
    """Return the public names that a configuration may build.

    `run_member` is none of them: it would run what another folder names.
    """
    files = conf_dir().rglob("*.yaml")
    named = {name for file in files for name in _NAMED_IN_CONF.findall(file.read_text(encoding="utf-8"))}
    return frozenset(named | {f"{_PACKAGE}.{name}" for name in axis_names()})


def _is_own_code(name: str, folders: Sequence[str], study: Path) -> bool:
    """Return whether a name is defined by a file of the user's, or in one of the folders, which are the user's."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        return function.isidentifier() and belongs_to_user(Path(place), study)
    dotted = name.replace(":", ".")
    if not folders or not all(part.isidentifier() for part in dotted.split(".")):
        return False
    try:  # where it would be imported from, without importing what is not the user's
        about = importlib.util.find_spec(dotted.partition(".")[0])
        places = [] if about is None else [about.origin, *(about.submodule_search_locations or [])]
        if not any(_below(place, folders) for place in places):
            return False
        target = located(dotted)
    except Exception as error:
        raise ConfigurationError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    # Not what it has imported from elsewhere, such as my_choices.os.system.
    home = sys.modules.get(str(getattr(target, "__module__", "")))
    return _below(getattr(home, "__file__", None), folders)


def _below(place: str | None, folders: Sequence[str]) -> bool:
    found = None if place is None else Path(place).resolve()
    return found is not None and any(found.is_relative_to(Path(folder).resolve()) for folder in folders)


def _check_command(file: Path, spec: RunSpec, _: Path) -> None:
    """Check that a member's command is the one that the user's own file makes of its overrides.

    The file, the last of the folders, is known to be the user's and to lie outside of the study.
    """
    foreign = _foreign(file, spec, "the command of a study's file of yours")
    study_file = Path(spec.folders[-1]) if spec.folders else None
    if study_file is None or not study_file.is_file() or _names_a_command(spec):
        raise foreign
    try:
        (again,) = plan_commands([spec.overrides], spec.folders)
    except ConfigurationError as error:
        raise UserError(f"{file}: {error}") from error
    if again.run != spec.run or again.config["command"] != spec.config["command"]:
        raise foreign


def _foreign(file: Path, spec: RunSpec, expected: str) -> UserError:
    line = spec.config["command"].get("line") if isinstance(spec.config["command"], Mapping) else None
    return refusal(file, "config.command.line", line, expected)


def _names_a_command(spec: RunSpec) -> bool:
    """Return whether an override says what is run, or how it is launched, in the place of the file or of ours."""
    return any(group_of(word) in ("command", "member", "hydra") for word in spec.overrides)


def _check_trl(file: Path, spec: RunSpec, study: Path) -> None:
    """Check that a member's command is the one that its overrides make here, of names that are ours or the user's own.

    Names are looked at before anything of the overrides is built, and the interpreter before it is asked for its TRL.
    """
    from lightning_scalerl import plan_trl  # by its public name, for its room is above this one

    foreign = _foreign(file, spec, "the command that this version makes of its overrides")
    trainer, command = spec.config[_TRAINER], spec.config["command"]
    python = trainer.get("python") if isinstance(trainer, Mapping) else None
    if not _is_own_interpreter(python, study):
        raise refusal(file, f"config.{_TRAINER}.python", python, "an interpreter of yours or of the system's")
    if not isinstance(command, Mapping) or _names_a_command(spec):
        raise foreign
    try:
        composed = OmegaConf.to_container(compose(spec.overrides, spec.folders), resolve=True)
        _check_names(file, {"overrides": composed}, spec.folders, study)
        # By its whole path: a relative one was seen from where the study was launched.
        (again,) = plan_trl([[*spec.overrides, f"{_TRAINER}.python={python}"]], spec.folders)
    except ConfigurationError as error:
        raise UserError(f"{file}: {error}") from error
    # Where it is started, Python looks for modules.
    folder = command.get("folder")
    if not (isinstance(folder, str) and Path(folder).is_absolute() and belongs_to_user(Path(folder), study)):
        raise refusal(file, "config.command.folder", folder, "a folder of yours")
    line, here = command.get("line"), Path(sys.executable)
    if isinstance(line, list) and line and _is_another_name_of(Path(str(line[0])), here):  # bin/python3, bin/python
        line = [str(here), *line[1:]]
    if again.run != spec.run or {**again.config["command"], "folder": folder} != {**command, "line": line}:
        raise foreign


def _is_another_name_of(place: Path, python: Path) -> bool:
    return place.parent == python.parent and place.resolve() == python.resolve()


def _is_own_interpreter(python: Any, study: Path) -> bool:
    """Return whether an interpreter, and the folder that it is named in, are the user's or the system's.

    The folder decides what a virtual environment imports; its interpreter is a link to another.
    """
    if not (isinstance(python, str) and Path(python).is_absolute()):
        return False
    places = (Path(python), Path(python).parent)
    return all(belongs_to_user(place, study) or belongs_to_system(place, study) for place in places)


def _check_identity(file: Path, spec: RunSpec) -> None:
    try:
        identity = identity_of(spec.config)
    except ConfigurationError:
        return  # its data is not here: what is run says so itself, if it needs it
    found = digest({"science": identity, "seed": spec.seed})
    # A configuration that reads files may differ because they have changed: that cannot be told from an edit.
    if found != spec.run and not _reads_files(spec.config):
        raise UserError(
            f"{file}: run: {spec.run!r} is not the identity of its configuration, which is {found}: it was edited or "
            f"damaged; {REMEDY}"
        )


def _reads_files(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(content_of(config)) or any(_reads_files(value) for value in config.values())
    return isinstance(config, list | tuple) and any(_reads_files(value) for value in config)
