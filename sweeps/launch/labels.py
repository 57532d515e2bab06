"""Keep labels unique: a curve keeps its label over all launches, and a label belongs to one curve only.

A label consists of the settings that differ within a launch. A launch of fewer members would label the same curve
differently, so new members get the label that their curve already has in the study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sweeps.errors import UserError
from sweeps.launch.ledger import RUNS_DIR, Ledger, MemberState
from sweeps.run.spec import SPEC_FILE, RunSpec, curve_of, flatten_config, learning_config

_SHOWN = 4  # number of differing keys to list
_NO_KEY = object()
# Prefix of the keys with the digests of the files that a command names, such as its script.
_FILE_OF_A_COMMAND = "command.named."


def labelled_as_before(directory: Path, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the specs, each with the label that its curve already has in the study, if any.

    Args:
        directory: the study's folder, which may not exist yet.
        specs: members to launch.
    """
    labels: dict[str, str] = {}
    named: dict[str, str] = {}  # by curve, a run with the curve's label
    for state in Ledger(directory).fold().values():
        if state.recipe and (curve := state.curve or curve_of(directory / RUNS_DIR / state.run)):
            labels.setdefault(curve, state.recipe)
            named.setdefault(curve, state.run)
    others: dict[str, RunSpec] = {}
    for spec in specs:
        # A run that was started alone is not in the ledger: read its own folder.
        run_dir = directory / RUNS_DIR / named.get(spec.curve, spec.run)
        if labels.get(spec.curve) != spec.recipe and spec.curve not in others and (run_dir / SPEC_FILE).exists():
            with suppress(UserError):  # an unreadable specification is reported by the code that needs it
                others[spec.curve] = RunSpec.read(run_dir)
    return [spec.labelled_like(others[spec.curve]) if spec.curve in others else spec for spec in specs]


def check_labels(runs_dir: Path, specs: Sequence[RunSpec], states: Mapping[str, MemberState]) -> None:
    """Check that no new member has the label of another curve, because fits group runs by label.

    Args:
        runs_dir: the study's `runs` folder.
        specs: members to launch. Members that are already in the study are not checked.
        states: states of the study's members, by identity.

    Raises:
        UserError: a new member has the label of another curve; the message names the difference.
    """
    new = [spec for spec in specs if spec.run not in states]
    labels = {spec.recipe for spec in new}
    curves_of: dict[str, dict[str, str]] = {}
    for state in states.values():
        if state.recipe in labels and (curve := state.curve or curve_of(runs_dir / state.run)):
            curves_of.setdefault(state.recipe, {}).setdefault(curve, state.run)
    for spec in new:
        known = curves_of.get(spec.recipe, {})
        # In a study of an earlier version, several curves may have one label. Each of them may get new members.
        if known and spec.curve not in known:
            difference, is_setting = _describe_difference(spec, runs_dir / next(iter(known.values())))
            remedy = (
                "or sweep both values in one launch into a new folder, which labels them apart"
                if is_setting
                else "or restore the file to continue its runs"
            )
            raise UserError(
                f"recipe: {spec.recipe!r} already stands for other runs in {runs_dir.parent}: {difference}; "
                f"give these a folder of their own (study=NAME), {remedy}"
            )


def _describe_difference(spec: RunSpec, other: Path) -> tuple[str, bool]:
    """Describe how a spec differs from the run in the folder `other`. Also return whether a setting differs.

    If no setting differs, a file does.
    """
    try:
        other_values = flatten_config(learning_config(RunSpec.read(other).config))
    except UserError:
        return f"their configuration differs ({other})", True
    values = flatten_config(learning_config(spec.config))
    keys = [
        key
        for key in [*values, *(key for key in other_values if key not in values)]
        if _differ(values, other_values, key)
    ]
    keys.sort(
        key=lambda key: key not in values or key not in other_values
    )  # keys that both configurations have come first
    if not keys:
        return f"the values are the same, but a file that they name (a model, data, code) is not ({other})", False
    differences = [
        f"the command's file {key.removeprefix(_FILE_OF_A_COMMAND)} has changed"
        if key.startswith(_FILE_OF_A_COMMAND)
        else f"{key} is {_shown(values, key)}, there {_shown(other_values, key)}"
        for key in keys[:_SHOWN]
    ]
    is_setting = any(not key.startswith(_FILE_OF_A_COMMAND) for key in keys)
    return "; ".join(differences) + (f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""), is_setting


def _differ(values: Mapping[str, object], other_values: Mapping[str, object], key: str) -> bool:
    return values.get(key, _NO_KEY) != other_values.get(key, _NO_KEY)


def _shown(config: Mapping[str, object], key: str) -> str:
    return str(config[key])[:80] if key in config else "missing"
