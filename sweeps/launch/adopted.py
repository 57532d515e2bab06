"""Adopted members: by which values they are told apart, and for which members of a launch they stand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, naming
from sweeps.launch.ledger import RUNS_DIR, Ledger
from sweeps.launch.study import LEASE_NAME
from sweeps.run.files import make_private
from sweeps.run.journal import Journal, JournalView, read_journal
from sweeps.run.lease import Lease, LeaseHeldError
from sweeps.run.progress import why_final
from sweeps.run.spec import RunSpec, leaves, science

# Keys of a command's configuration that are no values of the user's.
_OF_COMMANDS = ("command", "cluster", "member")
# Share of a launch's steps to which a run must have come to stand for its member: a last evaluation may lie before.
_WHOLE = 0.9


def same(one: str, other: str) -> bool:
    """Return whether two values are the same: numbers as numbers (1e-5 and 0.00001), truth in any case."""
    if one.strip().casefold() == other.strip().casefold():
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def agree(known: Mapping[str, str], cell: Mapping[str, str]) -> bool:
    """Return whether a cell has all the values that are known of a run."""
    return bool(known) and all(name in cell and same(value, cell[name]) for name, value in known.items())


def values_of(spec: RunSpec) -> Mapping[str, str]:
    """Return the values by which a member is told apart, its seed left out; empty where there are none to match by.

    Of another trainer's command they are the user's own keys, as its words have them, and the recipe's label.
    """
    if "adopted" in spec.config:
        return dict(spec.config["values"])
    if "command" not in spec.config:
        return {}
    own = leaves({key: value for key, value in science(spec.config).items() if key not in _OF_COMMANDS})
    return {"recipe": spec.recipe, **{key: v if isinstance(v, str) else json.dumps(v) for key, v in own.items()}}


def fields_of(spec: RunSpec) -> dict[str, Any]:
    """Return the header's fields of an adopted run; what is not known of it is left out."""
    return {key: value for key, value in spec.header().items() if value or key not in ("baseline", "departures")}


def named(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of the ledger's entry that name a member."""
    names = {"run": spec.run, "recipe": spec.recipe, "seed": spec.seed, "curve": spec.curve}
    return {**names, "checksum": spec.checksum()}


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Context manager: hold the study's lease, so that nobody launches or collects it meanwhile."""
    lease = Lease(directory, LEASE_NAME)
    try:
        with naming("STUDY"):
            make_private(directory)
            lease.acquire(2.0)
    except LeaseHeldError as error:
        raise UserError(
            f"{directory}: is being run by another process ({lease.holder()}); wait for it, or end it first"
        ) from error
    try:
        yield
    finally:
        lease.release()


def count_adopted(
    directory: Path, specs: Sequence[RunSpec], measured: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[list[RunSpec], list[str]]:
    """Let adopted runs stand for the members of a launch that have their values; return who is to take part.

    An adopted run takes the label and the curve of the recipe whose values it has, so that they are one curve. It
    stands for the member of its seed if it has finished and come as far, or cannot be continued; one that is at work
    elsewhere is not started a second time.

    Args:
        directory: the study's folder.
        specs: members of the launch.
        measured: of a member, the axis of its compute, how that is measured, and the reward that it is compared by.

    Returns:
        The members that take part, adopted ones in the place of those for which they stand, and lines on them.

    Raises:
        UserError: adopted runs count another unit of compute or have another reward, or the study is being run.
    """
    cells = [spec for spec in specs if "command" in spec.config]
    if not cells or not any(state.adopted for state in Ledger(directory).fold().values()):
        return list(specs), []
    with held(directory):
        taken, notes = stand_ins(directory, cells, measured)
    stand = sum(spec is not None for spec in taken.values())
    if stand:
        notes.insert(0, f"{stand} of {len(specs)} members ran elsewhere and were adopted; they are not started")
    found = [taken.get(spec.run, spec) for spec in specs]
    return [spec for spec in found if spec is not None], notes


def stand_ins(
    directory: Path, cells: Sequence[RunSpec], measured: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[dict[str, RunSpec | None], list[str]]:
    """Return the adopted run that stands for each of these members, None for one at work elsewhere, and lines on them.

    Adopted runs are relabelled; see `count_adopted`. The study's lease is held by whoever calls this.

    Raises:
        UserError: adopted runs count another unit of compute, or have another reward.
    """
    axis, text, metric = measured(cells[0])
    taken: dict[str, RunSpec | None] = {}  # by the member that is not started
    notes: list[str] = []
    states = Ledger(directory).fold()
    for run in [run for run, state in states.items() if state.adopted]:
        spec, state = RunSpec.read(directory / RUNS_DIR / run), states[run]
        view = read_journal(directory / RUNS_DIR / run)
        if view.header.get("axis") != axis:
            raise UserError(
                f"{directory}: its adopted runs count {view.header.get('axis')}, and this launch {axis}; measure "
                "alike (command.compute), or launch into a study of its own (study=NAME)"
            )
        if not any(metric in record.metrics for record in view.of_kind("eval")):
            name = metric.removeprefix("eval/").removesuffix("/pass_rate")
            raise UserError(
                f"{directory}: its adopted runs have no {metric}, by which this launch is compared; adopt them "
                f"with --set {name} into a study of their own, or name the set so in command.metrics.reward"
            )
        alike = _alike(spec, cells)
        if len({cell.curve for cell in alike}) > 1:
            names = ", ".join(dict.fromkeys(cell.recipe for cell in alike))
            notes.append(f"{spec.title} may be {names}: it stands for none; adopt by all values that these differ in")
            alike = []
        spec = _relabelled(directory, spec, alike[0] if alike else spec, view, text)
        cell = next((each for each in alike if each.seed == spec.seed), None)
        if cell is None or cell.run in taken or state.state == "failed":
            continue
        if state.state != "finished":
            taken[cell.run] = None
            notes.append(f"{cell.title} is running elsewhere ({spec.config['adopted']['source']}) and is not started")
        elif not (_whole(spec, cell) or view.final):
            notes.append(f"{cell.title} was adopted with {spec.steps} of {cell.steps} steps and is started anew")
        else:
            taken[cell.run] = spec
    return taken, notes


def stood_for(directory: Path, specs: Sequence[RunSpec]) -> set[str]:
    """Return the members of a launch that adopted runs will stand for, or that run elsewhere; nothing is written."""
    cells = [spec for spec in specs if "command" in spec.config]
    found = set()
    for run, state in Ledger(directory).fold().items() if cells else ():
        if not state.adopted or state.state == "failed":
            continue
        spec = RunSpec.read(directory / RUNS_DIR / run)
        alike = _alike(spec, cells)
        cell = next((each for each in alike if each.seed == spec.seed), None)
        if cell is not None and len({each.curve for each in alike}) == 1:
            whole = _whole(spec, cell) or why_final(directory / RUNS_DIR / run)
            found |= {cell.run} if state.state != "finished" or whole else set()
    return found


def _alike(spec: RunSpec, cells: Sequence[RunSpec]) -> list[RunSpec]:
    return [cell for cell in cells if agree(values_of(spec), values_of(cell))]


def _whole(spec: RunSpec, cell: RunSpec) -> bool:
    return not spec.config["adopted"]["by_step"] or spec.steps >= _WHOLE * cell.steps


def _relabelled(directory: Path, spec: RunSpec, like: RunSpec, view: JournalView, text: str) -> RunSpec:
    """Give an adopted member the label and curve of a recipe, and the launch's words on how compute is measured."""
    new = replace(
        spec,
        recipe=like.recipe,
        curve=like.curve,
        baseline=like.baseline,
        departures=dict(like.departures),
        settings=dict(like.settings),
        # By which further runs of the recipe are planned.
        folders=like.folders,
        overrides=like.overrides,
    )
    if new == spec and view.header.get("compute_is") == text:
        return spec
    run_dir = directory / RUNS_DIR / spec.run
    kept = {key: value for key, value in view.header.items() if key not in ("kind", "time")}
    journal = Journal(run_dir)
    try:
        journal.header(**{**kept, **fields_of(new), "compute_is": text})
    finally:
        journal.close()
    new.write(run_dir)
    state = Ledger(directory).fold()[spec.run]
    entry = {"state": state.state, "reason": state.reason}
    Ledger(directory).append("adopted", **{**named(new), **entry})
    return new
