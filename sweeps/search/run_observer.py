"""Race without a decider: a run watches its rivals and decides for itself when to stop.

For runs that are started one by one, without a controller. Runs whose folders exist before the first look take the same
looks at the same evaluations, and so decide alike. A run that begins later sees more rivals than the others did. No run
pauses for another: each continues, and takes a look once all existing runs have reached its compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sweeps.decide.race import Look, next_look
from sweeps.decide.rules import Rules
from sweeps.errors import UserError
from sweeps.run import fields
from sweeps.run.files import append_lines, numbered_lines
from sweeps.run.journal import JOURNAL_FILE, JournalView, find_runs
from sweeps.search.journals import Journals, how_far
from sweeps.search.race_log import RACE_FILE


class RunObserver:
    """Takes a race's looks for one run, and appends them to `race.jsonl` in its directory.

    Args:
        study: folder that contains the folders of all runs, this one included; later runs take part once they exist.
        run_dir: folder of this run.
        rules: when looks are taken and recipes stopped.
        metric, axis: reward and compute to compare by, see `sweeps.source.load`; None for the defaults.

    Raises:
        UserError: the run is not in the folder, the folder is itself a run, or earlier looks used other rules.
    """

    def __init__(
        self, study: Path, run_dir: Path, rules: Rules, metric: str | None = None, axis: str | None = None
    ) -> None:
        self._study, self._run_dir, self._rules = study.resolve(), run_dir.resolve(), rules
        self._metric, self._axis = metric, axis
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
            self._rules = rules if begun is None else rules.going_on(begun)
            if self._rules != begun:
                raise UserError(f"{self._path}: looked by other rules; go on with {line.get('rules')}, or remove it")
            try:
                self._looks.append(Look.of_json(fields.group(line, "look")))
            except ValueError:
                damaged.append(number)
        self.damaged: str | None = None
        if damaged:
            named = ", ".join(map(str, sorted(damaged)))
            self.damaged = f"{self._path}: line {named} torn or damaged; a look that was only there is lost"
        self.waits_for: tuple[str, ...] = ()
        self.trouble: str | None = None
        self.namesakes: str | None = None

    def look(self) -> str | None:
        """Take the looks that are due; return why this run's recipe is stopped, or None.

        If evaluations cannot be compared, no look is taken and `trouble` has the reason: a rival's journal must not end
        this run. `namesakes` is a warning if other runs with this one's label are not rivals; else None.
        """
        run_dirs = find_runs(self._study)
        names = {str(run_dir.resolve().relative_to(self._study)): run_dir for run_dir in run_dirs}
        self._journals.update(list(names))
        views = {name: view for name in names if (view := self._journals.view(name)) is not None}
        self.namesakes = self._share_a_label(views)
        try:
            curves, self.trouble = self._journals.curves(list(views), self._metric, self._axis), None
        except UserError as error:
            self.trouble = str(error)
            return None
        if not curves:
            return None
        axis = curves[0].axis
        reached, failed = how_far(
            (
                str(view.header.get("recipe", names[name].name)),
                view.status,
                ([0.0] + [record.metrics.get(axis, 0.0) for record in self._journals.evaluations(name)])[-1],
            )
            for name, view in views.items()
        )
        while isinstance(found := next_look(curves, self._rules, reached, self._looks, failed=failed), Look):
            # Written before the run acts on it, so that a resumed run starts from the recorded looks.
            line = {"rules": self._rules.to_json(), "look": found.to_json()}
            append_lines(self._path, [line], durable=True, checksum=True)
            self._looks.append(found)
        self.waits_for = found
        mine = views[str(self._run_dir.relative_to(self._study))].header.get("recipe", self._run_dir.name)
        return next((look.why(str(mine), self._rules) for look in self._looks if mine in look.stopped), None)

    def _share_a_label(self, views: Mapping[str, JournalView]) -> str | None:
        """Warn of runs that do not race because of a common label: all runs have it, or two with the same seed."""
        name = str(self._run_dir.relative_to(self._study))
        told = {each: (str(view.header.get("recipe", each)), view.header.get("seed")) for each, view in views.items()}
        if name not in told:
            return None
        label, seed = told[name]
        same = [each for each, (theirs, _) in told.items() if theirs == label]
        if len(same) < 2 or (len(same) < len(told) and [told[each] for each in same].count((label, seed)) < 2):
            return None
        return (
            f"{len(same)} runs in {self._study} have the label {label!r}, and do not race each other: runs of one "
            "label are seeds of one recipe; give each recipe its own, RunLog(run_dir, {'recipe': NAME})"
        )
