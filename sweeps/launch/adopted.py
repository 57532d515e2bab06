"""Adopted members: the values that identify their recipe, and the members of a launch that they replace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, naming
from sweeps.launch.ledger import RUNS_DIR, Ledger, member_fields
from sweeps.launch.members import LEASE_NAME, take_lease
from sweeps.run.files import make_private
from sweeps.run.journal import Journal, JournalView, read_journal
from sweeps.run.lease import Lease
from sweeps.run.progress import why_final
from sweeps.run.spec import RunSpec, leaves, science

# Keys of a command's configuration that are not the user's values.
_OF_COMMANDS = ("command", "cluster", "member")
# Share of a launch's steps that a run must have reached to replace its member; its last evaluation may be earlier.
_WHOLE = 0.9


def same(one: str, other: str) -> bool:
    """Return whether two values are equal: as numbers (1e-5 and 0.00001), or as texts ignoring case."""
    if one.strip().casefold() == other.strip().casefold():
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def agree(known: Mapping[str, str], cell: Mapping[str, str]) -> bool:
    """Return whether a cell has all the known values of a run."""
    return bool(known) and all(name in cell and same(value, cell[name]) for name, value in known.items())


def values_of(spec: RunSpec) -> Mapping[str, str]:
    """Return the values that identify a member apart from its seed; empty if there are none to match by.

    For another trainer's command they are the user's own keys, as in its overrides, and the recipe's label.
    """
    if "adopted" in spec.config:
        return dict(spec.config["values"])
    if "command" not in spec.config:
        return {}
    config_values = leaves({key: value for key, value in science(spec.config).items() if key not in _OF_COMMANDS})
    return {
        "recipe": spec.recipe,
        **{key: v if isinstance(v, str) else json.dumps(v) for key, v in config_values.items()},
    }


def fields_of(spec: RunSpec) -> dict[str, Any]:
    """Return the header fields of an adopted run, without unknown ones."""
    return {key: value for key, value in spec.header().items() if value or key not in ("baseline", "departures")}


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Context manager: hold the study's lease, so that no process launches or collects it meanwhile."""
    lease = Lease(directory, LEASE_NAME)
    with naming("STUDY"):
        make_private(directory)
        take_lease(lease, f"{directory}:")
    try:
        yield
    finally:
        lease.release()


def count_adopted(
    directory: Path, specs: Sequence[RunSpec], measured: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[list[RunSpec], list[str]]:
    """Let adopted runs replace the members of a launch with the same values; return the members to run.

    An adopted run takes the label and the curve of the recipe with its values, so that they form one curve. It replaces
    the member with its seed if it has finished as many steps, or cannot be continued. A member whose adopted run is
    still running elsewhere is not started.

    Args:
        directory: the study's folder.
        specs: members of the launch.
        measured: returns, for a member, its compute axis, how compute is measured, and the reward to compare by.

    Returns:
        The members that take part, with adopted ones in place of those they replace, and lines about them.

    Raises:
        UserError: adopted runs have another unit of compute or another reward, or the study is running.
    """
    cells = [spec for spec in specs if "command" in spec.config]
    if not cells or not any(state.adopted for state in Ledger(directory).fold().values()):
        return list(specs), []
    with held(directory):
        taken, notes = find_substitutes(directory, cells, measured)
    count = sum(spec is not None for spec in taken.values())
    if count:
        notes.insert(0, f"{count} of {len(specs)} members ran elsewhere and were adopted; they are not started")
    members = [taken.get(spec.run, spec) for spec in specs]
    return [spec for spec in members if spec is not None], notes


def find_substitutes(
    directory: Path, cells: Sequence[RunSpec], measured: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[dict[str, RunSpec | None], list[str]]:
    """Return, for each member that is not started, the adopted run that replaces it (None if it runs elsewhere), and
    notes.

    Adopted runs are relabelled, see `count_adopted`. The caller holds the study's lease.

    Raises:
        UserError: adopted runs have another unit of compute, or another reward.
    """
    axis, text, metric = measured(cells[0])
    taken: dict[str, RunSpec | None] = {}  # by member
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
        matching = _with_same_values(spec, cells)
        if len({cell.curve for cell in matching}) > 1:
            names = ", ".join(dict.fromkeys(cell.recipe for cell in matching))
            notes.append(f"{spec.title} may be {names}: it stands for none; adopt by all values that these differ in")
            matching = []
        spec = _relabelled(directory, spec, matching[0] if matching else spec, view, text)
        cell = next((candidate for candidate in matching if candidate.seed == spec.seed), None)
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


def replaced_members(directory: Path, specs: Sequence[RunSpec]) -> set[str]:
    """Return the members that adopted runs will replace, or that run elsewhere. Writes nothing."""
    cells = [spec for spec in specs if "command" in spec.config]
    replaced = set()
    for run, state in Ledger(directory).fold().items() if cells else ():
        if not state.adopted or state.state == "failed":
            continue
        spec = RunSpec.read(directory / RUNS_DIR / run)
        matching = _with_same_values(spec, cells)
        cell = next((candidate for candidate in matching if candidate.seed == spec.seed), None)
        if cell is not None and len({candidate.curve for candidate in matching}) == 1:
            whole = _whole(spec, cell) or why_final(directory / RUNS_DIR / run)
            replaced |= {cell.run} if state.state != "finished" or whole else set()
    return replaced


def _with_same_values(spec: RunSpec, cells: Sequence[RunSpec]) -> list[RunSpec]:
    return [cell for cell in cells if agree(values_of(spec), values_of(cell))]


def _whole(spec: RunSpec, cell: RunSpec) -> bool:
    return not spec.config["adopted"]["by_step"] or spec.steps >= _WHOLE * cell.steps


def _relabelled(directory: Path, spec: RunSpec, like: RunSpec, view: JournalView, text: str) -> RunSpec:
    """Give an adopted member a recipe's label and curve, and the launch's description of how compute is measured."""
    new = replace(
        spec,
        recipe=like.recipe,
        curve=like.curve,
        baseline=like.baseline,
        departures=dict(like.departures),
        settings=dict(like.settings),
        # Further runs of the recipe are planned from these.
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
    Ledger(directory).append("adopted", **{**member_fields(new, new.checksum()), **entry})
    return new
