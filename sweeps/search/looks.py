"""Race without a controller: each run reads its rivals' journals and decides when to stop itself.

This is for runs that are started one by one, by Lightning (`lightning_scalerl.Race`) or any other training loop
(`sweeps.stopping`). Runs whose folders exist before the first look take the same looks at the same evaluations, so they
decide alike. A run that begins later finds more rivals at its looks than the other runs did. No run pauses for another:
it continues, and takes a look when all existing runs have reached the look's compute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sweeps.decide.race import Look, next_look
from sweeps.decide.rules import Rules
from sweeps.errors import UserError
from sweeps.run import fields
from sweeps.run.files import append_lines, named_lines, numbered_lines
from sweeps.run.journal import JOURNAL_FILE, JournalView, find_runs
from sweeps.search.journals import Journals, compute_reached
from sweeps.search.race_log import RACE_FILE
from sweeps.source.namesakes import NAME_RUNS


class RaceWithoutController:
    """Take a race's looks for one run, and append them to `race.jsonl` in its directory.

    Args:
        study: folder that contains the folders of all runs, including this one; later runs take part as soon as they
            exist.
        run_dir: folder of this run.
        rules: when looks are taken and recipes stopped.
        metric, axis: reward and compute axis of the comparison; None for the defaults of `sweeps.source.load`.
        log: logger for warnings; None for this module's.
        name: the run's name in warnings; "" if the log has only one run.
        members: fewest runs that must exist before a look is taken.

    Raises:
        UserError: the run is not in the folder, the folder is itself a run, or earlier looks used other rules.
    """

    def __init__(
        self,
        study: Path,
        run_dir: Path,
        rules: Rules,
        metric: str | None = None,
        axis: str | None = None,
        log: logging.Logger | None = None,
        name: str = "",
        members: int = 1,
    ) -> None:
        self._study, self._run_dir, self._rules = study.resolve(), run_dir.resolve(), rules
        self._metric, self.axis, self._members = metric, axis, members
        self._log, self._prefix = log or logging.getLogger(__name__), f"race: {name}: " if name else "race: "
        self._warned: set[str] = set()
        if self._study not in self._run_dir.parents:
            raise UserError(f"study: {run_dir} is not in {study}; give the folder that holds the run and its rivals")
        if (self._study / JOURNAL_FILE).is_file():
            raise UserError(f"study: {study} is a run itself ({JOURNAL_FILE}), so no run below it is seen")
        self._path = run_dir / RACE_FILE
        self._journals = Journals(self._study)
        self._looks: list[Look] = []
        lines, damaged = numbered_lines(self._path)
        for number, line in lines:
            try:
                begun = Rules.of_json(line["rules"])
            except (KeyError, TypeError, ValueError, UserError):  # written by another version
                begun = None
            self._rules = rules if begun is None else rules.resumed_from(begun)
            if self._rules != begun:
                raise UserError(f"{self._path}: looked by other rules; go on with {line.get('rules')}, or remove it")
            try:
                self._looks.append(Look.of_json(fields.group(line, "look")))
            except ValueError:
                damaged.append(number)
        if damaged:
            self.warn(
                f"{self._path}: {named_lines(sorted(damaged))} torn or damaged; looks that were only there are lost"
            )

    def warn(self, text: str) -> None:
        """Log a warning, unless it was logged before."""
        if text not in self._warned:
            self._warned.add(text)
            self._log.warning("%s%s", self._prefix, text)

    def take(self) -> str | None:
        """Take the looks that are due. Return the reason if this run's recipe is stopped, else None.

        If evaluations cannot be compared, a warning is logged and no look is taken, because a fault of a rival must not
        end this run.
        """
        names = {str(path.resolve().relative_to(self._study)): path for path in find_runs(self._study)}
        if len(names) < self._members:
            return None
        self._journals.update(list(names))
        views = {name: view for name in names if (view := self._journals.view(name)) is not None}
        labels = {name: str(view.header.get("recipe", names[name].name)) for name, view in views.items()}
        own_name = str(self._run_dir.relative_to(self._study))
        self._warn_of_namesakes(own_name, labels, views)
        try:
            curves = self._journals.curves(list(views), self._metric, self.axis)
        except UserError as error:
            self.warn(f"no look: {error}")
            return None
        if not curves:
            return None
        reached, failed = compute_reached(
            (labels[name], view.status, self._journals.compute(name, curves[0].axis)) for name, view in views.items()
        )
        while isinstance(look := next_look(curves, self._rules, reached, self._looks, failed=failed), Look):
            # The look is written before the run acts on it, so that a resumed run continues from the recorded looks.
            line = {"rules": self._rules.to_json(), "look": look.to_json()}
            append_lines(self._path, [line], durable=True, checksum=True)
            self._looks.append(look)
        label = labels[own_name]
        return next((look.why(label, self._rules) for look in self._looks if label in look.stopped), None)

    def _warn_of_namesakes(self, own: str, labels: Mapping[str, str], views: Mapping[str, JournalView]) -> None:
        """Warn if all runs have this run's label, or another has its label and seed: these do not race each other."""
        seeds = [view.header.get("seed") for name, view in views.items() if labels[name] == labels.get(own)]
        if len(seeds) > 1 and (len(seeds) == len(views) or seeds.count(views[own].header.get("seed")) > 1):
            self.warn(
                f"{len(seeds)} runs in {self._study} have the label {labels[own]!r}, and do not race each other: runs "
                f"of one label are seeds of one recipe; {NAME_RUNS}"
            )
