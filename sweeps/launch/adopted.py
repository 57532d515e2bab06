"""Let adopted members (runs trained elsewhere) replace the members of a launch that have the same recipe and seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, errors_naming
from sweeps.launch.ledger import RUNS_DIR, Ledger, member_fields
from sweeps.launch.members import LEASE_NAME, take_lease
from sweeps.run.files import make_private
from sweeps.run.journal import Journal, JournalView, read_journal
from sweeps.run.lease import Lease
from sweeps.run.progress import final_reason
from sweeps.run.spec import RunSpec, flatten_config, learning_config

# Keys of a command member's configuration that this package sets, and not the user.
_SETTINGS_KEYS = ("command", "cluster", "member")
# An adopted run replaces a member if it has at least this fraction of the member's steps. Less than 1, because its
# steps are counted up to its last evaluation, and a complete run may have trained a little longer.
_MIN_STEPS_FRACTION = 0.9


def _equal(first: str, second: str) -> bool:
    """Return whether two values are equal: as numbers (1e-5 and 0.00001), or as texts ignoring case."""
    if first.strip().casefold() == second.strip().casefold():
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def agree(known: Mapping[str, str], values: Mapping[str, str]) -> bool:
    """Return whether `values` contains every name of `known` with an equal value; False if `known` is empty."""
    return bool(known) and all(name in values and _equal(value, values[name]) for name, value in known.items())


def recipe_values(spec: RunSpec) -> Mapping[str, str]:
    """Return the values that identify a member's recipe, without the seed.

    For an adopted run these are the values given at its adoption. For a member that runs another trainer's command,
    they are the recipe's label and the user's own configuration keys. For a member trained by this package they are
    empty, so that no adopted run can replace it.
    """
    if "adopted" in spec.config:
        return dict(spec.config["values"])
    if "command" not in spec.config:
        return {}
    config_values = flatten_config(
        {key: value for key, value in learning_config(spec.config).items() if key not in _SETTINGS_KEYS}
    )
    return {
        "recipe": spec.recipe,
        **{key: v if isinstance(v, str) else json.dumps(v) for key, v in config_values.items()},
    }


def journal_header(spec: RunSpec) -> dict[str, Any]:
    """Return the journal header of an adopted run, without `baseline` and `departures` if these are empty."""
    return {key: value for key, value in spec.header().items() if value or key not in ("baseline", "departures")}


@contextmanager
def hold_study_lease(directory: Path) -> Iterator[None]:
    """Hold the study's lease in a `with` block, so that no other process runs it meanwhile."""
    lease = Lease(directory, LEASE_NAME)
    with errors_naming("STUDY"):
        make_private(directory)
        take_lease(lease, f"{directory}:")
    try:
        yield
    finally:
        lease.release()


def substitute_adopted_runs(
    directory: Path, specs: Sequence[RunSpec], measurement_of: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[list[RunSpec], list[str]]:
    """Replace members of a launch by adopted runs with the same recipe values and seed.

    An adopted run gets the label and curve of the launched recipe that has the same values, so that both form one
    curve. It replaces the member with the same seed if it has nearly as many steps, or is final (it cannot be
    continued). If it is still running elsewhere, the member is dropped from the launch.

    Args:
        directory: the study's folder.
        specs: members of the launch.
        measurement_of: returns a member's compute axis, a description of how compute is measured, and the name of the
            metric that is the reward.

    Returns:
        The members of the study after replacement, and lines about the replacements to print.

    Raises:
        UserError: the adopted runs measure compute in another unit, or have another reward, than the launch; or the
            study is running.
    """
    commands = [spec for spec in specs if "command" in spec.config]
    if not commands or not any(state.adopted for state in Ledger(directory).fold().values()):
        return list(specs), []
    with hold_study_lease(directory):
        substitutes, notes = find_substitutes(directory, commands, measurement_of)
    count = sum(spec is not None for spec in substitutes.values())
    if count:
        notes.insert(0, f"{count} of {len(specs)} members ran elsewhere and were adopted; they are not started")
    members = [substitutes.get(spec.run, spec) for spec in specs]
    return [spec for spec in members if spec is not None], notes


def find_substitutes(
    directory: Path, members: Sequence[RunSpec], measurement_of: Callable[[RunSpec], tuple[str, str, str]]
) -> tuple[dict[str, RunSpec | None], list[str]]:
    """Find the adopted runs that replace members of a launch, and give them the label and curve of those members.

    Rules as for `substitute_adopted_runs`. The caller must hold the study's lease.

    Returns:
        A dictionary and lines to print about the replacements. The dictionary maps the identity of each replaced member
        to the adopted run, or to None while that run is still running elsewhere. Members that are not replaced are
        missing.

    Raises:
        UserError: the adopted runs measure compute in another unit, or have another reward, than the launch.
    """
    axis, text, metric = measurement_of(members[0])
    substitutes: dict[str, RunSpec | None] = {}
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
        matching = _with_same_values(spec, members)
        if len({member.curve for member in matching}) > 1:
            names = ", ".join(dict.fromkeys(member.recipe for member in matching))
            notes.append(
                f"{spec.title} could be any of {names}, so it replaces none; adopt it --by all values in which they "
                "differ"
            )
            matching = []
        spec = _relabel(directory, spec, matching[0] if matching else spec, view, text)
        member = next((candidate for candidate in matching if candidate.seed == spec.seed), None)
        if member is None or member.run in substitutes or state.state == "failed":
            continue
        if state.state != "finished":
            substitutes[member.run] = None
            notes.append(f"{member.title} is running elsewhere ({spec.config['adopted']['source']}) and is not started")
        elif not (_has_enough_steps(spec, member) or view.final):
            notes.append(f"{member.title} was adopted with {spec.steps} of {member.steps} steps and is started anew")
        else:
            substitutes[member.run] = spec
    return substitutes, notes


def replaced_members(directory: Path, specs: Sequence[RunSpec]) -> set[str]:
    """Return the identities of the members that adopted runs replace (rules: `substitute_adopted_runs`).

    Writes nothing.
    """
    members = [spec for spec in specs if "command" in spec.config]
    replaced = set()
    for run, state in Ledger(directory).fold().items() if members else ():
        if not state.adopted or state.state == "failed":
            continue
        spec = RunSpec.read(directory / RUNS_DIR / run)
        matching = _with_same_values(spec, members)
        member = next((candidate for candidate in matching if candidate.seed == spec.seed), None)
        if member is not None and len({candidate.curve for candidate in matching}) == 1:
            complete = _has_enough_steps(spec, member) or final_reason(directory / RUNS_DIR / run)
            replaced |= {member.run} if state.state != "finished" or complete else set()
    return replaced


def _with_same_values(spec: RunSpec, members: Sequence[RunSpec]) -> list[RunSpec]:
    return [member for member in members if agree(recipe_values(spec), recipe_values(member))]


def _has_enough_steps(spec: RunSpec, member: RunSpec) -> bool:
    return not spec.config["adopted"]["by_step"] or spec.steps >= _MIN_STEPS_FRACTION * member.steps


def _relabel(directory: Path, spec: RunSpec, template: RunSpec, view: JournalView, text: str) -> RunSpec:
    """Give an adopted member the label and curve of `template`, on disk too, and return its new specification.

    `text` describes how compute is measured.
    """
    relabelled = replace(
        spec,
        recipe=template.recipe,
        curve=template.curve,
        baseline=template.baseline,
        departures=dict(template.departures),
        settings=dict(template.settings),
        # Copied because `scalerl plan` builds the commands for further runs of the recipe from them.
        folders=template.folders,
        overrides=template.overrides,
    )
    if relabelled == spec and view.header.get("compute_is") == text:
        return spec
    run_dir = directory / RUNS_DIR / spec.run
    header = {key: value for key, value in view.header.items() if key not in ("kind", "time")}
    journal = Journal(run_dir)
    try:
        journal.header(**{**header, **journal_header(relabelled), "compute_is": text})
    finally:
        journal.close()
    relabelled.write(run_dir)
    state = Ledger(directory).fold()[spec.run]
    entry = {"state": state.state, "reason": state.reason}
    Ledger(directory).append("adopted", **{**member_fields(relabelled, relabelled.checksum()), **entry})
    return relabelled
