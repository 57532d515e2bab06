"""Branches: a member that starts from another run's checkpoint, with at most one choice changed.

A branch has the parent's weights, optimizer, prompts, work in flight, random states, step and compute. Its journal
begins with the parent's records up to the branching step, marked as shared by the header's field `branch`. With nothing
changed, it continues exactly as its parent did.

    plan    `parent_of`, `inherited`, `change_of`: the parent's overrides, and the branch's change of them
    start   `begin`: the branch gets the parent's checkpoint and records as its first ones
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
FIXED = frozenset(
    {"model", "adapter", "critic", "advantage", "task", "batch", "context", "thinking", "chat", "environment"}
    | {"generator", "driver", "async_mode", "allocation", "length_control", "cost_model", "precision"}
)
# Operational keys that a branch takes from its parent, unless they are given.
_INHERITED = frozenset({"seed", "budget", "scaled_for"})
_LAUNCH_KEYS = (OPERATIONAL_KEYS | {GROUP, "cluster", "trainer"}) - _INHERITED


@dataclass(frozen=True)
class Branch:
    """Start of a run: anew, or from a checkpoint of another run.

    Args:
        run: identity of the parent; on the command line also its folder, or the folder of a study that has one run of
            the same seed. None for a run that starts anew. The identity contains `curve` instead.
        step: completed optimizer steps of the parent's checkpoint.
        optimizer: "kept" to start with the parent's optimizer state, "fresh" to start with none.
        folder: the parent's folder, from which the branch is started; not part of the identity.
        ancestors: the parent and its own ancestors, each with the last step that this run shares with it; not part of
            the identity, because the parent's identity implies them.
        curve: identity of the parent's curve. It is the same for all seeds, so the seeds of a branch are one curve.
    """

    neutral: ClassVar[Mapping[str, Any]] = {"choice": "Branch", "step": None}
    added: ClassVar[Mapping[str, Any]] = {"optimizer": KEPT, "curve": None}
    remarks: ClassVar[tuple[str, ...]] = ("run", "folder", "ancestors")

    run: str | None = None
    step: int | None = None
    optimizer: str = KEPT
    folder: str | None = None
    ancestors: Mapping[str, int] = field(default_factory=dict)
    curve: str | None = None


@dataclass(frozen=True)
class Parent:
    """Run that a branch starts from, and the step of its checkpoint."""

    folder: Path
    spec: RunSpec
    step: int
    optimizer: str

    @property
    def label(self) -> str:
        """Label of the branch that changes nothing, such as `scalerl@60`."""
        return f"{self.spec.recipe}@{self.step}"

    @property
    def checkpoint(self) -> Path:
        """The parent's checkpoint at the step."""
        return checkpoint_at(self.folder, self.step)

    @property
    def values(self) -> dict[str, Any]:
        """Group `branch` of the branch's configuration."""
        above: Mapping[str, int] = self.spec.config.get(GROUP, {}).get("ancestors") or {}
        return {
            "_target_": f"lightning_scalerl.{Branch.__name__}",
            "run": self.spec.run,
            "step": self.step,
            "optimizer": self.optimizer,
            "folder": str(self.folder),
            "ancestors": {self.spec.run: self.step, **above},
            "curve": self.spec.curve,
        }


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of a run's checkpoint of a step."""
    return folder / "checkpoints" / checkpoint_name(step)


# --- planning ------------------------------------------------------------------------------------------------


def parent_of(overrides: Sequence[str], output_dir: Path, seed: int | None) -> Parent | None:
    """Find the run that a member's overrides branch from; None if they name none.

    Args:
        overrides: the member's overrides.
        output_dir: folder of its study; identities are looked up there and in the studies next to it.
        seed: the seed that the overrides give; None if they give none.

    Raises:
        ConfigurationError: the parent is not there, has another seed or a later start, or a value is invalid.
    """
    given = _given(overrides)
    if given.get("run") is None:
        if len(given) > (1 if "run" in given else 0):
            raise ConfigurationError("branch.run: needs a value; give the folder or the identity of the parent run")
        return None
    if unknown := sorted(given.keys() - {"run", "step", "optimizer"}):
        raise ConfigurationError(f"branch.{unknown[0]}: unknown; valid: run, step, optimizer")
    optimizer = given.get("optimizer", KEPT)
    if optimizer not in (KEPT, FRESH):
        raise ConfigurationError(f"branch.optimizer: {optimizer!r} is unknown; valid: {KEPT}, {FRESH}")
    step = whole_number("branch.step", given.get("step"))
    folder = _folder_of(str(given["run"]), output_dir, seed)
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


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the branch that overrides give, as `branch.run=...` or `branch={run: ..., step: ...}`."""
    words = [word for word in overrides if word.lstrip("+").split("=")[0].split(".")[0] == GROUP and "=" in word]
    given: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides([word.lstrip("+") for word in words]):
        _, _, name = override.key_or_group.partition(".")
        value = override.value()
        if not name and value is not None and not isinstance(value, Mapping):
            raise ConfigurationError(f"branch: {value!r} must be {{run: ..., step: ...}}")
        given |= {name: value} if name else dict(value or {})
    return given


def _folder_of(name: str, output_dir: Path, seed: int | None) -> Path:
    """Find a run by its folder, its study's folder and the seed, or its identity."""
    place = Path(name).expanduser()
    if (place / SPEC_FILE).is_file():
        return place.resolve()
    if (place / "runs").is_dir():
        runs = [path.parent for path in sorted(place.glob(f"runs/*/{SPEC_FILE}"))]
        specs = {run: RunSpec.read(run) for run in runs}
        named = {run: spec for run, spec in specs.items() if seed in (None, spec.seed)}
        if len(named) == 1:
            return next(iter(named)).resolve()
        have = ", ".join(f"{run.name} ({spec.title})" for run, spec in named.items()) or "none"
        of_seed = "" if seed is None else f" of seed {seed}"
        raise ConfigurationError(
            f"branch.run: {place} must have one run{of_seed}, and has {have}; give the folder or identity of one"
        )
    found = [path.parent for path in sorted(output_dir.parent.glob(f"*/runs/{name}/{SPEC_FILE}"))] if name else []
    if found:
        return found[0].resolve()
    raise ConfigurationError(
        f"branch.run: {name!r} is no run here: neither a folder with {SPEC_FILE} nor the identity of a run in "
        f"{output_dir.parent}/*/runs; copy the parent's folder to this machine, and give its path"
    )


def own_overrides(overrides: Sequence[str], parent: Parent) -> list[str]:
    """Return a branch's own overrides, without its parent's and those of group `branch`."""
    return [entry for entry in overrides if _key(entry).split(".")[0] != GROUP and entry not in parent.spec.overrides]


def inherited(overrides: Sequence[str], parent: Parent) -> list[str]:
    """Return the parent's overrides that the branch does not replace, then the branch's own."""
    own = {_key(entry) for entry in overrides}
    replaced = {key for key in own if "." not in key}
    kept = [
        entry
        for entry in parent.spec.overrides
        if _key(entry) not in own
        and _key(entry).split(".")[0] not in _LAUNCH_KEYS | replaced
        and not entry.lstrip("+").startswith("hydra")
    ]
    if not any(_key(entry).split(".")[0] == "budget" for entry in [*kept, *overrides]):
        kept.append(f"budget.steps={parent.spec.steps}")
    if not any(_key(entry) == "seed" for entry in [*kept, *overrides]):
        kept.append(f"seed={parent.spec.seed}")
    return [*kept, *overrides]


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0].split("@")[0]


def change_of(identity: Mapping[str, Any], parent: Mapping[str, Any], steps: int, origin: Parent) -> tuple[str, ...]:
    """Return the configuration group in which a branch differs from its parent, as a tuple of one entry or none.

    Args:
        identity, parent: identity forms of the branch and of its parent.
        steps: the branch's budget in steps.
        origin: the parent.

    Raises:
        ConfigurationError: several groups are changed, or one that a branch cannot change, or the budget ends before
            the branch begins.
    """
    ours, theirs = ({key: value for key, value in form.items() if key != GROUP} for form in (identity, parent))
    changed = changed_keys(ours, theirs)
    if len(changed) > 1:
        raise ConfigurationError(
            f"branch: {', '.join(changed)} differ from the parent {origin.folder}; a branch changes one of them"
        )
    if fixed := FIXED & set(changed):
        raise ConfigurationError(
            f"branch: {min(fixed)} cannot change at a branch, whose checkpoint was made for the parent's; launch a run "
            f"of its own; fixed: {', '.join(sorted(FIXED))}"
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
        ConfigurationError: it has none; the message lists the steps that it has.
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
    """Return the branch that a member's configuration describes; None if the member starts anew."""
    values = {key: value for key, value in (spec.config.get(GROUP) or {}).items() if key != "_target_"}
    return Branch(**values) if values.get("run") else None


def begin(run_dir: Path, spec: RunSpec, branch: Branch) -> None:
    """Give a branch its parent's checkpoint and records, unless it has begun already.

    The journal is written last and gets its name when it is complete. So a branch that has a journal has begun.

    Raises:
        UserError: the parent is not there any more, or it has no checkpoint or not all records up to that step.
    """
    if (run_dir / JOURNAL_FILE).exists():
        return
    fetch_checkpoint(run_dir, branch)
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


def fetch_checkpoint(run_dir: Path, branch: Branch) -> Path:
    """Put the parent's checkpoint into the branch's folder, by hard links where the file system allows them.

    Raises:
        UserError: the parent has no such checkpoint any more.
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
    """Return run and step of the parent's checkpoint from which a branch starts; None for a run that starts anew."""
    return None if branch is None else (str(branch.run), int(branch.step or 0))


def start_again(run_dir: Path, branch: Branch, covered: int, leads: bool) -> Path:
    """Return the checkpoint from which a branch starts when it has none of its own.

    Args:
        run_dir: the branch's folder.
        branch: where it starts.
        covered: the last step that its journal covers.
        leads: whether this process writes for the run. Another rank may get here before the writing rank has copied the
            checkpoint; it then reads the parent's.

    Raises:
        UserError: the journal is damaged within the records that the branch shares with its parent.
    """
    assert branch.step is not None
    if not leads:
        own = checkpoint_at(run_dir, branch.step)
        return own if own.exists() else checkpoint_at(Path(str(branch.folder)), branch.step)
    if covered < branch.step:
        raise UserError(
            f"{run_dir / JOURNAL_FILE}: damaged before step {branch.step}, where this branch begins; delete the "
            "folder, and launch the branch again"
        )
    return fetch_checkpoint(run_dir, branch)


def _link_or_copy(source: str, target: str) -> str:
    """Link a file; copy it where it cannot be linked. Checkpoints are never changed in place, so a link is safe."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
    return target


def _copy_passes(parent: Path, run_dir: Path, step: int) -> None:
    """Copy the results per prompt up to a step."""
    try:
        entries = parse_lines((parent / PASSES_FILE).read_bytes())
    except FileNotFoundError:
        return
    # A start that was killed may have copied them before.
    (run_dir / PASSES_FILE).unlink(missing_ok=True)
    append_lines(run_dir / PASSES_FILE, [each for each in entries if each.get("step", step + 1) <= step], checksum=True)
