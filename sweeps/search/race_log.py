"""The record of a study's race, as `sweeps.search.race` and `sweeps.search.optuna_search` write it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.curve import UNITS
from sweeps.decide.race import Look
from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.run.files import parse_lines
from sweeps.terminal import counted

RACE_FILE = "race.jsonl"


@dataclass(frozen=True)
class RaceRecord:
    """Content of a study's `race.jsonl`.

    Attributes:
        rules, axis, metric: rules of the race, compute axis and reward; None before it has begun.
        looks: the looks taken.
        freed: record of the runs that freed compute pays for; None before they are planned.
        mode: `live` or `dry_run`, as of the last look.
        pruned: for each pruned trial of a search, by run, the reason.
        taken: for each look, its time in seconds and its mode.
        members: identities of the racing members, in their order; None where an earlier version began the race.
    """

    rules: Rules | None = None
    axis: str | None = None
    metric: str | None = None
    looks: tuple[Look, ...] = ()
    freed: Mapping[str, Any] | None = None
    mode: str = "live"
    pruned: Mapping[str, str] = field(default_factory=dict)
    taken: tuple[tuple[float, str], ...] = ()
    members: tuple[str, ...] | None = None

    @classmethod
    def read(cls, study: Path, members: Collection[str] | None = None) -> RaceRecord:
        """Read the record of the study in a folder; an empty one if there was no race.

        Args:
            study: folder of the study.
            members: identities of members; races of other members that share the folder are left out. None for the
                members of the newest race.
        """
        path = study / RACE_FILE
        lines = parse_lines(path.read_bytes()) if path.exists() else []
        if members is None:
            members = next((line["runs"] for line in reversed(lines) if line.get("kind") == "members"), None)
        found, theirs = cls(), False
        for line in lines:
            kind = line.get("kind")
            if kind == "members":
                # Launches may share a folder: all lines up to the next of this kind are of these members' race.
                theirs = members is not None and not set(members) & set(line["runs"])
                found = found if theirs else replace(found, members=tuple(line["runs"]))
            elif theirs:
                continue
            elif kind == "race":
                found = replace(found, rules=Rules.of_json(line["rules"]), axis=line["axis"], metric=line["metric"])
            elif kind == "look":
                mode = line.get("mode", found.mode)
                looks, taken = (*found.looks, Look.of_json(line["look"])), (*found.taken, (line.get("time", 0.0), mode))
                found = replace(found, looks=looks, mode=mode, taken=taken)
            elif kind == "freed":
                found = replace(found, freed=line)
            elif kind == "pruned":
                found = replace(found, pruned={**found.pruned, line["run"]: line["why"]})
        return found

    @property
    def stopped(self) -> dict[str, Look]:
        """The look that stopped each stopped recipe, by recipe."""
        return {name: look for look in self.looks for name in look.stopped}

    @property
    def sentence(self) -> str:
        """One sentence on the race's budget, stopped recipes and looks, or on the pruned trials."""
        if self.rules is None:
            return f"{len(self.pruned)} trials were pruned" if self.pruned else "no race"
        verb = "would be stopped (a dry run)" if self.mode == "dry_run" else "stopped"
        unit = UNITS.get(self.axis or "", self.axis or "")
        last = f", the last at {self.looks[-1].compute:.4g}" if self.looks else ""
        gone = counted(len(self.stopped), "recipe")
        limit = f", for an expected loss of {self.rules.loss:g} at most" if self.rules.loss < NO_LIMIT else ""
        return (
            f"a race to {self.rules.budget:.4g} {unit} a run: {gone} {verb} at "
            f"{counted(len(self.looks), 'look')}{last}; below a chance of {self.rules.p_ahead:g} of ending ahead "
            f"of the favourite, from {self.rules.first:.0%} of the budget on{limit}"
        )
