"""Read the record of a study's race, which `sweeps.search.race` and `sweeps.search.optuna_search` write."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.curve import UNITS
from sweeps.decide.race import Look
from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.errors import UserError
from sweeps.run import fields
from sweeps.run.files import named_lines, numbered_lines
from sweeps.terminal import counted

RACE_FILE = "race.jsonl"


@dataclass(frozen=True)
class RaceRecord:
    """Content of a study's `race.jsonl`.

    Attributes:
        rules, axis, metric: rules of the race, compute axis and reward; None before the race has begun.
        looks: the looks taken, in order.
        mode: `live` or `dry_run`, at the last look.
        pruned: why each pruned trial of a search was pruned, by run.
        members: run identities of the racing members, as recorded; None in a file of an earlier version.
        damaged: line numbers of the incomplete or damaged lines; the first line is 1.
    """

    rules: Rules | None = None
    axis: str | None = None
    metric: str | None = None
    looks: tuple[Look, ...] = ()
    mode: str = "live"
    pruned: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] | None = None
    damaged: tuple[int, ...] = ()

    @classmethod
    def read(cls, study: Path, members: Collection[str] | None = None) -> RaceRecord:
        """Read the record of the study in a folder; empty if there was no race. Damaged lines are left out.

        Args:
            study: folder of the study.
            members: identities of members; races of other members in the same folder are left out. None for the members
                of the newest race.
        """
        lines, damaged = numbered_lines(study / RACE_FILE)
        valid_lines = []
        for number, entry in lines:
            try:
                valid_lines.append(_Line.of(entry))
            except (ValueError, TypeError, UserError):  # no version writes such a line
                damaged.append(number)
        if members is None:
            members = next((line.runs for line in reversed(valid_lines) if line.runs is not None), None)
        record, is_other_race = cls(damaged=tuple(sorted(damaged))), False
        for line in valid_lines:
            if line.runs is not None:
                # Launches may share a folder. The lines up to the next line of members belong to this race.
                is_other_race = members is not None and not set(members) & set(line.runs)
                record = record if is_other_race else replace(record, members=line.runs)
            elif not is_other_race:
                record = line.added_to(record)
        return record

    @property
    def trouble(self) -> str | None:
        """One sentence on the damaged lines of the record; None without damage."""
        if not self.damaged:
            return None
        return (
            f"{RACE_FILE}: {named_lines(self.damaged)} torn or damaged; looks and decisions that were only there are "
            "lost, and recipes that they stopped may run until a later look stops them"
        )

    @property
    def stopped(self) -> dict[str, Look]:
        """The look that stopped each stopped recipe, by recipe."""
        return {name: look for look in self.looks for name in look.stopped}

    @property
    def sentence(self) -> str:
        """One sentence on the race (budget, stopped recipes, looks) or the pruned trials, and on damaged lines."""
        return "; ".join(filter(None, [self._race_sentence, self.trouble]))

    @property
    def _race_sentence(self) -> str:
        if self.rules is None:
            return f"{counted(len(self.pruned), 'trial')} pruned" if self.pruned else "no race"
        verb = "would be stopped (a dry run)" if self.mode == "dry_run" else "stopped"
        unit = UNITS.get(self.axis or "", self.axis or "")
        last = f", the last at {self.looks[-1].compute:.4g}" if self.looks else ""
        gone = counted(len(self.stopped), "recipe")
        limit = f", with an expected loss of at most {self.rules.loss:g}" if self.rules.loss < NO_LIMIT else ""
        return (
            f"a race to {self.rules.budget:.4g} {unit} per run: {gone} {verb} in "
            f"{counted(len(self.looks), 'look')}{last}; rule: stop a recipe if its probability of ending ahead of the "
            f"favourite is below {self.rules.p_ahead:g}, after at least {self.rules.first:.0%} of the budget{limit}"
        )


@dataclass(frozen=True)
class _Line:
    """A checked line of the record: its kind, its fields, and values parsed from the fields.

    Attributes:
        runs: identities in a line of members; None for other lines.
    """

    kind: object
    entry: Mapping[str, Any]
    runs: tuple[str, ...] | None = None
    rules: Rules | None = None
    look: Look | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Line:
        """Check the fields of a line.

        Raises:
            ValueError, TypeError, UserError: a field is missing, of another type or out of range.
        """
        kind = entry.get("kind")
        if kind == "members":
            return cls(kind, entry, runs=fields.texts(entry, "runs"))
        if kind == "race":
            fields.text(entry, "axis"), fields.text(entry, "metric")
            return cls(kind, entry, rules=Rules.of_json(fields.group(entry, "rules")))
        if kind == "look":
            if "time" in entry:
                fields.number(entry, "time")
            if "mode" in entry:
                fields.text(entry, "mode")
            return cls(kind, entry, look=Look.of_json(fields.group(entry, "look")))
        if kind == "pruned":
            fields.text(entry, "run"), fields.text(entry, "why")
        return cls(kind, entry)

    def added_to(self, record: RaceRecord) -> RaceRecord:
        entry = self.entry
        if self.rules is not None:
            return replace(record, rules=self.rules, axis=entry["axis"], metric=entry["metric"])
        if self.look is not None:
            return replace(record, looks=(*record.looks, self.look), mode=entry.get("mode", record.mode))
        if self.kind == "pruned":
            return replace(record, pruned={**record.pruned, entry["run"]: entry["why"]})
        return record
