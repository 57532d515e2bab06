"""Branches: runs that start from another run's checkpoint (the parent's), with at most one choice changed.

A branch has the parent's weights, optimizer, prompts, work in flight, random states, step and compute. Its journal
begins with the parent's records up to the branching step, marked as shared by the header's field `branch`. A branch
without a change continues exactly as its parent did.

    plan    `parent_of`, `inherited_overrides`, `changed_groups`: the parent, its overrides, and the branch's change
    start   `begin`: copy the parent's checkpoint and records into the branch's folder
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_scalerl.checks import ConfigurationError, whole_number
from sweeps.errors import UserError
from sweeps.run.checkpoint_names import checkpoint_name, checkpoints, step_of
from sweeps.run.files import append_lines, parse_lines
from sweeps.run.journal import JOURNAL_FILE, Journal, JournalError, JournalView, read_journal
from sweeps.run.passes import PASSES_FILE
from sweeps.run.spec import OPERATIONAL_KEYS, SPEC_FILE, RunSpec, changed_keys

GROUP = "branch"
KEPT, FRESH = "kept", "fresh"
# Groups that a branch cannot change: the checkpoint's weights or rollouts in flight only fit the parent's values.
UNCHANGEABLE_GROUPS = frozenset(
    {"model", "adapter", "critic", "advantage", "task", "batch", "context", "thinking", "chat", "environment"}
    | {"generator", "driver", "async_mode", "allocation", "length_control", "cost_model", "precision"}
)
# Operational keys whose values a branch inherits from its parent if its overrides do not set them.
_INHERITED = frozenset({"seed", "budget", "scaled_for"})
_LAUNCH_KEYS = (OPERATIONAL_KEYS | {GROUP, "cluster", "trainer"}) - _INHERITED


@dataclass(frozen=True)
class Branch:
    """Start of a run: from the initial model, or from a checkpoint of another run.

    Args:
        run: identity of the parent; on the command line also its folder, or the folder of a study that has one run of
            the same seed. None for a run that starts from the initial model. Not part of the identity, unlike `curve`.
        step: completed optimizer steps of the parent's checkpoint.
        optimizer: "kept" to start with the parent's optimizer state, "fresh" to start with none.
        folder: the parent's folder, from which the checkpoint is copied; not part of the identity.
        ancestors: last step that this run shares with its parent and each ancestor of the parent, by run; not part of
            the identity, because the parent's identity implies them.
        curve: identity of the parent's curve, which is the same for all seeds. So all seeds of a branch are one curve.
    """

    neutral: ClassVar[Mapping[str, Any]] = {"choice": "Branch", "step": None}
    added: ClassVar[Mapping[str, Any]] = {"optimizer": KEPT, "curve": None}
    operational_parameters: ClassVar[tuple[str, ...]] = ("run", "folder", "ancestors")

    run: str | None = None
    step: int | None = None
    optimizer: str = KEPT
    folder: str | None = None
    ancestors: Mapping[str, int] = field(default_factory=dict)
    curve: str | None = None


@dataclass(frozen=True)
class Parent:
    """Run that a branch starts from, with the step of the checkpoint and the setting `branch.optimizer`."""

    folder: Path
    spec: RunSpec
    step: int
    optimizer: str

    @property
    def label(self) -> str:
        """Label of a branch without a change: the parent's recipe and the step, such as `scalerl@60`."""
        return f"{self.spec.recipe}@{self.step}"

    @property
    def checkpoint(self) -> Path:
        """The parent's checkpoint at the step."""
        return checkpoint_at(self.folder, self.step)

    @property
    def values(self) -> dict[str, Any]:
        """Group `branch` of the branch's configuration."""
        parents_ancestors: Mapping[str, int] = self.spec.config.get(GROUP, {}).get("ancestors") or {}
        return {
            "_target_": f"lightning_scalerl.{Branch.__name__}",
            "run": self.spec.run,
            "step": self.step,
            "optimizer": self.optimizer,
            "folder": str(self.folder),
            "ancestors": {self.spec.run: self.step, **parents_ancestors},
            "curve": self.spec.curve,
        }


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of a run's checkpoint of a step."""
    return folder / "checkpoints" / checkpoint_name(step)


# --- planning ------------------------------------------------------------------------------------------------


def parent_of(overrides: Sequence[str], output_dir: Path, seed: int | None) -> Parent | None:
    """Find the run that a member's overrides branch from; return None if they do not set `branch.run`.

    Args:
        overrides: the member's overrides.
        output_dir: folder of the member's study; identities are looked up there and in the studies next to it.
        seed: the seed that the overrides set; None if they do not set one.

    Raises:
        ConfigurationError: the parent does not exist, has another seed, or is itself a branch from this or a later
            step; or a value is invalid.
    """
    settings = _branch_settings(overrides)
    if settings.get("run") is None:
        if len(settings) > (1 if "run" in settings else 0):
            raise ConfigurationError("branch.run: needs a value; give the folder or the identity of the parent run")
        return None
    if unknown := sorted(settings.keys() - {"run", "step", "optimizer"}):
        raise ConfigurationError(f"branch.{unknown[0]}: unknown; valid: run, step, optimizer")
    optimizer = settings.get("optimizer", KEPT)
    if optimizer not in (KEPT, FRESH):
        raise ConfigurationError(f"branch.optimizer: {optimizer!r} is unknown; valid: {KEPT}, {FRESH}")
    step = whole_number("branch.step", settings.get("step"))
    folder = _find_run(str(settings["run"]), output_dir, seed)
    spec = RunSpec.read(folder)
    if GROUP not in spec.config and "member" in spec.config:
        raise ConfigurationError(
            f"branch.run: {folder} is another trainer's run; a branch needs a run of scalerl train"
        )
    if seed not in (None, spec.seed):
        raise ConfigurationError(
            f"seed: {seed}, and the parent {folder} has {spec.seed}, whose random states a branch goes on with; give "
            f"seed={spec.seed}, or leave it out"
        )
    start = (spec.config.get(GROUP) or {}).get("step") or 0
    if step <= start:
        raise ConfigurationError(
            f"branch.step: {step}, and the parent {folder} is itself a branch from step {start}; give a later step, or "
            "branch from its parent"
        )
    return Parent(folder, spec, step, optimizer)


def _branch_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the branch settings that overrides set, by `branch.run=...` or `branch={run: ..., step: ...}`."""
    words = [word for word in overrides if word.lstrip("+").split("=")[0].split(".")[0] == GROUP and "=" in word]
    settings: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides([word.lstrip("+") for word in words]):
        _, _, name = override.key_or_group.partition(".")
        value = override.value()
        if not name and value is not None and not isinstance(value, Mapping):
            raise ConfigurationError(f"branch: {value!r} must be {{run: ..., step: ...}}")
        settings |= {name: value} if name else dict(value or {})
    return settings


def _find_run(name: str, output_dir: Path, seed: int | None) -> Path:
    """Find a run's folder.

    Args:
        name: the run's folder, its study's folder (then the seed selects the run), or the run's identity.
        output_dir: folder of a study; an identity is looked up there and in the studies next to it.
        seed: seed of the run; None for any.
    """
    path = Path(name).expanduser()
    if (path / SPEC_FILE).is_file():
        return path.resolve()
    if (path / "runs").is_dir():
        runs = [file.parent for file in sorted(path.glob(f"runs/*/{SPEC_FILE}"))]
        specs = {run: RunSpec.read(run) for run in runs}
        matches = {run: spec for run, spec in specs.items() if seed in (None, spec.seed)}
        if len(matches) == 1:
            return next(iter(matches)).resolve()
        have = ", ".join(f"{run.name} ({spec.title})" for run, spec in matches.items()) or "none"
        of_seed = "" if seed is None else f" of seed {seed}"
        raise ConfigurationError(
            f"branch.run: {path} must have one run{of_seed}, and has {have}; give the folder or identity of one"
        )
    matches_by_identity = sorted(output_dir.parent.glob(f"*/runs/{name}/{SPEC_FILE}")) if name else []
    if matches_by_identity:
        return matches_by_identity[0].parent.resolve()
    raise ConfigurationError(
        f"branch.run: {name!r} is no run here: neither a folder with {SPEC_FILE} nor the identity of a run in "
        f"{output_dir.parent}/*/runs; copy the parent's folder to this machine, and give its path"
    )


def own_overrides(overrides: Sequence[str], parent: Parent) -> list[str]:
    """Return a branch's overrides, except those that the parent has too and those of group `branch`."""
    return [entry for entry in overrides if _key(entry).split(".")[0] != GROUP and entry not in parent.spec.overrides]


def inherited_overrides(overrides: Sequence[str], parent: Parent) -> list[str]:
    """Return the parent's overrides that the branch does not replace, followed by `overrides`, the branch's own."""
    own_keys = {_key(entry) for entry in overrides}
    replaced = {key for key in own_keys if "." not in key}
    from_parent = [
        entry
        for entry in parent.spec.overrides
        if _key(entry) not in own_keys
        and _key(entry).split(".")[0] not in _LAUNCH_KEYS | replaced
        and not entry.lstrip("+").startswith("hydra")
    ]
    if not any(_key(entry).split(".")[0] == "budget" for entry in [*from_parent, *overrides]):
        from_parent.append(f"budget.steps={parent.spec.steps}")
    if not any(_key(entry) == "seed" for entry in [*from_parent, *overrides]):
        from_parent.append(f"seed={parent.spec.seed}")
    return [*from_parent, *overrides]


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0].split("@")[0]


def changed_groups(
    identity: Mapping[str, Any], parent: Mapping[str, Any], steps: int, origin: Parent
) -> tuple[str, ...]:
    """Return a tuple with the configuration group in which a branch differs from its parent; empty if it does not.

    Args:
        identity, parent: identity forms (`identity_of`) of the branch and of its parent.
        steps: the branch's budget in steps.
        origin: the parent.

    Raises:
        ConfigurationError: the branch changes several groups, or a group in `UNCHANGEABLE_GROUPS`, or the budget ends
            before the branching step.
    """
    ours, theirs = ({key: value for key, value in form.items() if key != GROUP} for form in (identity, parent))
    changed = changed_keys(ours, theirs)
    if len(changed) > 1:
        raise ConfigurationError(
            f"branch: {', '.join(changed)} differ from the parent {origin.folder}; a branch changes one of them"
        )
    if fixed := UNCHANGEABLE_GROUPS & set(changed):
        raise ConfigurationError(
            f"branch: {min(fixed)} cannot change at a branch, whose checkpoint was made for the parent's; launch a run "
            f"of its own; fixed: {', '.join(sorted(UNCHANGEABLE_GROUPS))}"
        )
    classes = [str(form.get("optimizer", {}).get("choice")) for form in (theirs, ours)]
    if origin.optimizer == KEPT and classes[0] != classes[1]:
        raise ConfigurationError(
            f"branch.optimizer: kept, and the optimizer changes from {classes[0]} to {classes[1]}, which has other "
            "states; give branch.optimizer=fresh"
        )
    if steps <= origin.step:
        raise ConfigurationError(f"budget.steps: {steps} must be above branch.step={origin.step}")
    return changed


def check_checkpoint(origin: Parent) -> None:
    """Check that the parent has a checkpoint at the branching step.

    Raises:
        ConfigurationError: the checkpoint is missing; the message lists the steps of the parent's checkpoints.
    """
    if origin.checkpoint.exists():
        return
    steps = [step_of(path) for path in reversed(checkpoints(origin.checkpoint.parent))]
    have = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
    raise ConfigurationError(
        f"branch.step: {origin.folder} has no checkpoint of step {origin.step}, {have}; launch the parent with "
        f"checkpoint.keep_steps=[{origin.step}]"
    )


# --- start ---------------------------------------------------------------------------------------------------


def branch_of(spec: RunSpec) -> Branch | None:
    """Return group `branch` of a member's configuration; None if the member is not a branch."""
    values = {key: value for key, value in (spec.config.get(GROUP) or {}).items() if key != "_target_"}
    return Branch(**values) if values.get("run") else None


def begin(run_dir: Path, spec: RunSpec, branch: Branch) -> None:
    """Copy the parent's checkpoint and records into a branch's folder. Do nothing if the branch has a journal.

    The journal is written last and is renamed to its final name when it is complete. So if a journal exists, everything
    was copied.

    Raises:
        UserError: the parent no longer exists, or lacks the checkpoint or a record up to the branching step.
    """
    if (run_dir / JOURNAL_FILE).exists():
        return
    copy_checkpoint(run_dir, branch)
    parent, view = Path(str(branch.folder)), _parent_journal(branch)
    assert branch.step is not None
    _copy_passes(parent, run_dir, branch.step)
    unfinished = run_dir / f"begin.{uuid.uuid4().hex[:8]}.part"
    moment = float(view.header["time"])
    journal = Journal(unfinished, clock=lambda: moment)
    header = {key: value for key, value in view.header.items() if key not in ("kind", "time")}
    journal.header(**{**header, **spec.header()})
    for record in view.records:
        if record.step <= branch.step:
            moment = record.time
            journal.record(record.kind, record.step, record.metrics)
    journal.checkpoint(branch.step)
    journal.close()
    (unfinished / JOURNAL_FILE).replace(run_dir / JOURNAL_FILE)
    shutil.rmtree(unfinished)


def _parent_journal(branch: Branch) -> JournalView:
    """Read the parent's journal, which must have all records up to the branching step."""
    assert branch.step is not None
    try:
        view = read_journal(str(branch.folder))
    except JournalError as error:
        raise UserError(f"branch.run: the journal of the parent {branch.folder} cannot be read ({error})") from error
    if view.header.get("run") != branch.run:
        raise UserError(f"branch.run: {branch.folder} holds run {view.header.get('run')}, not the parent {branch.run}")
    reached = {record.step for record in view.records if record.kind == "train"}
    if missing := [step for step in range(1, branch.step + 1) if step not in reached]:
        raise UserError(
            f"branch.step: the journal of the parent {branch.folder} lacks step {missing[0]} of {branch.step}; branch "
            "at an earlier step"
        )
    return view


def copy_checkpoint(run_dir: Path, branch: Branch) -> Path:
    """Put the parent's checkpoint into the branch's folder, by hard links if possible, and return its path.

    Raises:
        UserError: the checkpoint no longer exists.
    """
    assert branch.step is not None
    source, target = checkpoint_at(Path(str(branch.folder)), branch.step), checkpoint_at(run_dir, branch.step)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.stem}.{uuid.uuid4().hex[:8]}.part")
    try:
        if source.is_dir():
            shutil.copytree(source, unfinished, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(source), str(unfinished))
    except FileNotFoundError as error:
        raise UserError(
            f"branch.run: the parent's checkpoint {source} is not there; restore it, or branch from another run"
        ) from error
    unfinished.replace(target)
    return target


def shared_checkpoint(branch: Branch | None) -> tuple[str, int] | None:
    """Return run and step of the parent's checkpoint from which a branch starts; None for a run without a parent."""
    return None if branch is None else (str(branch.run), int(branch.step or 0))


def parent_checkpoint(run_dir: Path, branch: Branch, covered: int, leads: bool) -> Path:
    """Return the path of the parent's checkpoint, for a branch that has no later checkpoint.

    Args:
        run_dir: the branch's folder.
        branch: parent and step of the branch.
        covered: the last step that the branch's journal covers.
        leads: whether this process writes for the run. A process of another rank may call this before the checkpoint is
            copied; it then reads the checkpoint in the parent's folder.

    Raises:
        UserError: the journal is damaged within the records that the branch shares with its parent.
    """
    assert branch.step is not None
    if not leads:
        own_copy = checkpoint_at(run_dir, branch.step)
        return own_copy if own_copy.exists() else checkpoint_at(Path(str(branch.folder)), branch.step)
    if covered < branch.step:
        raise UserError(
            f"{run_dir / JOURNAL_FILE}: damaged before step {branch.step}, where this branch begins; delete the "
            "folder, and launch the branch again"
        )
    return copy_checkpoint(run_dir, branch)


def _link_or_copy(source: str, target: str) -> str:
    """Hard-link a file, or copy it if linking fails. A link is safe, as checkpoints are never changed in place."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
    return target


def _copy_passes(parent: Path, run_dir: Path, step: int) -> None:
    """Copy the parent's evaluation results per prompt (`Passes`), up to a step."""
    try:
        entries = parse_lines((parent / PASSES_FILE).read_bytes())
    except FileNotFoundError:
        return
    # An earlier attempt that was killed may have left a copy.
    (run_dir / PASSES_FILE).unlink(missing_ok=True)
    append_lines(run_dir / PASSES_FILE, [each for each in entries if each.get("step", step + 1) <= step], checksum=True)
