"""Facts at the top of a report: date, model, task, launch command, cost, and failed runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sweeps.curve import DEVICE_HOURS, UNITS
from sweeps.launch.resume_command import folder_arguments
from sweeps.run.files import read_json, read_yaml
from sweeps.run.journal import JournalView, finite
from sweeps.run.spec import SPEC_FILE

# Largest number of different models or tasks that are listed.
_MAX_LISTED = 3
# The year 2000, in seconds since 1970. Earlier times come from simulations, or from clocks that were never set.
_YEAR_2000 = 946_684_800.0


class Facts:
    """Facts about the runs behind a report, from their journals and stored configurations. Other sources have none."""

    def __init__(self, runs: Sequence[JournalView]) -> None:
        self._runs = runs

    @cached_property
    def configs(self) -> list[Mapping[str, Any]]:
        """Resolved configuration of each run, in order; an empty mapping where it cannot be read."""
        return [_part(read_json(view.path.parent / SPEC_FILE), "config") for view in self._runs]

    @cached_property
    def rate(self) -> float | None:
        """Price of a device hour (`launch.rate`); None if runs have different prices, or no price."""
        rates = {finite(_part(config, "launch").get("rate")) for config in self.configs}
        return rates.pop() if len(rates) == 1 else None

    @cached_property
    def lines(self) -> list[tuple[str, str]]:
        """Name and text of each known fact: date, model, task, cost."""
        if not self._runs:
            return []
        pairs = [
            ("Date", self._dates()),
            ("Model", _join_distinct(_describe(_part(config, "model")) for config in self.configs)),
            ("Task", _join_distinct(_describe(_part(config, "task")) for config in self.configs)),
            ("Cost", self._cost()),
        ]
        return [(name, text) for name, text in pairs if text]

    @cached_property
    def commands(self) -> list[str]:
        """Launch command of each study for which Hydra stored it."""
        first_runs = {view.path.parent.parent.parent: view.path.parent for view in reversed(self._runs)}
        commands = []
        for study, run in reversed(first_runs.items()):
            overrides = _part(_part(read_yaml(study / "multirun.yaml"), "hydra"), "overrides").get("task")
            if isinstance(overrides, list):
                folders = read_json(run / SPEC_FILE).get("folders") or ()
                words = ["scalerl", "train", *folder_arguments(list(map(str, folders))), "--multirun"]
                commands.append(shlex.join([*words, *map(str, overrides)]))
        return commands

    @cached_property
    def crashes(self) -> list[JournalView]:
        """Journals of failed runs."""
        return [view for view in self._runs if view.status == "failed"]

    def _dates(self) -> str:
        times = [record.time for view in self._runs for record in (*view.records[:1], *view.records[-1:])]
        if not times or min(times) < _YEAR_2000:
            return ""
        first, last = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") for at in (min(times), max(times)))
        return first if first == last else f"{first} to {last}"

    def _cost(self) -> str:
        """Return the compute that all runs spent together, on every axis, and its price if known."""
        spent = {axis: sum(_spent(view, axis) for view in self._runs) for axis in UNITS}
        texts = [f"{spent[axis]:.3g} {unit}" for axis, unit in UNITS.items() if spent[axis]]
        if self.rate and spent[DEVICE_HOURS]:
            texts.insert(0, f"{self.rate * spent[DEVICE_HOURS]:,.2f} at {self.rate:g} per device hour")
        return ", ".join(texts)


def _spent(view: JournalView, axis: str) -> float:
    """Return the compute that a run has spent; 0 if its journal lacks this axis."""
    return max((float(record.metrics.get(axis, 0.0)) for record in view.records[-2:]), default=0.0)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _describe(part: Mapping[str, Any]) -> str:
    """Describe a configured object: its class or function, and its path, data or name."""
    target = str(part.get("_target_", "")).rsplit(".", 1)[-1]
    details = [str(part[key]) for key in ("path", "name", "train", "dataset") if isinstance(part.get(key), str)]
    return f"{target} ({', '.join(details)})" if target and details else target


def _join_distinct(texts: Iterable[str]) -> str:
    """Join the distinct texts. Beyond `_MAX_LISTED`, give only the number of the others."""
    different = list(dict.fromkeys(text for text in texts if text))
    more = f" and {len(different) - _MAX_LISTED} more" if len(different) > _MAX_LISTED else ""
    return ", ".join(different[:_MAX_LISTED]) + more
