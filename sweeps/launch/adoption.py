"""Adoption: runs that others have made become members of a study, with journals of ours.

A member that was adopted has a folder as any other has: the journal holds the points that were read, its header says
from where (`adopted`: source, run, columns, digest), the specification the values by which the run is told apart. It is
never started. The ledger's event `adopted` comes last, so that after a kill the same command goes on with what is
there. Nothing that a journal holds is taken back: a run that has grown is appended to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.as_json import AsJson
from sweeps.errors import UserError, naming
from sweeps.launch.adopted import agree, fields_of, held, named, values_of
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import LEDGER_FILE, RUNS_DIR, Ledger, adopted
from sweeps.launch.study import LEASE_NAME
from sweeps.redact import redact
from sweeps.run.files import write_atomically
from sweeps.run.journal import CONFIG_FILE, Journal, JournalView, find_runs
from sweeps.run.progress import check_own, journal_or_none
from sweeps.run.spec import RunSpec, digest
from sweeps.source.collected import FAILED, RUNNING, ForeignRun
from sweeps.source.foreign_runs import SEED, Points, axis_of, columns_of, points_of, read_runs
from sweeps.source.journals import compared_by
from sweeps.source.places import Kind, Place
from sweeps.source.run_names import hidden_seed
from sweeps.source.text import short

# Reward of a study that has no evaluation yet.
METRIC = "eval/heldout/pass_rate"
# Points, and different rewards among them, that two runs must share to be known for one by what they hold.
_ALIKE, _REWARDS = 5, 3
# Trackers that give each run a name of its own.
_TRACKERS = ("wandb:", "mlflow:", "trackio:")


@dataclass(frozen=True)
class Taken(AsJson):
    """Result of an adoption for one run of the sources.

    Attributes:
        run: identity of the member; "" where there is none.
        recipe, seed: label and seed of the member; "" and None where there is none.
        what: `adopted`, `grown`, `unchanged` or `skipped`.
        points: number of evaluations that the member has now.
        source, name: where the run was read, and its name there.
        reason: why it was skipped, or what else is to be known of it; None for nothing.
    """

    run: str
    recipe: str
    seed: int | None
    what: str
    points: int
    source: str
    name: str
    reason: str | None = None


@dataclass
class Adoption(AsJson):
    """Results of an adoption, run by run, with lines on how the sources were read."""

    study: str
    axis: str
    metric: str
    runs: list[Taken] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def adopt(
    directory: Path,
    sources: Sequence[str],
    by: Sequence[str] = (),
    metric: str | None = None,
    x: str | None = None,
    y: str | None = None,
    seed_from: str | None = None,
    unit: str | None = None,
    running: bool = False,
    evaluation_set: str | None = None,
) -> Adoption:
    """Take the runs of sources into a study as members; what is there already is found again.

    Args:
        directory: folder of the study, new or existing.
        sources: what `scalerl fit` reads; a folder of logs too.
        by: names that tell the recipes and seeds apart, see `columns_of`.
        metric, x, y, seed_from: see `sweeps.source.load`.
        unit: what the column of compute counts (`UNITS`); None where its name says it.
        running: whether runs that are still at work are taken, as far as they have come.
        evaluation_set: name of the evaluation set whose reward it is; None for the study's, `heldout` in a new one.

    Raises:
        UserError: a source cannot be read, the folder is no study or is being run, or compute is in another unit.
    """
    columns = columns_of(by)
    runs, notes = read_runs(sources, columns, metric, x, y, seed_from)
    where = ", ".join(map(str, sources))
    axes = {axis_of(run.axis, unit): run.axis for run in runs}
    if len(axes) > 1:
        raise UserError(f"{short(where)}: compute is {' and '.join(axes.values())}; choose one column with --x")
    _check_place(directory, sources)
    (axis,) = axes
    with held(directory):
        metric = None if evaluation_set is None else f"eval/{evaluation_set}/pass_rate"
        folder = _Folder(directory, axis, metric, short(where))
        done = Adoption(str(directory), folder.axis, folder.metric, notes=notes)
        for run in runs:
            try:
                done.runs.append(_take(folder, run, columns, running))
            except UserError as error:
                done.runs.append(_skipped(run, str(error)))
    return done


def label_of(values: Mapping[str, str]) -> str:
    """Make a recipe's label from its values: `loss=grpo+lr=1e-05`; of a recipe's own name that name."""
    return "+".join(value if name == "recipe" else f"{name}={value}" for name, value in values.items())


def _check_place(directory: Path, sources: Sequence[str]) -> None:
    """Check that a folder is a study, or new, and that no source lies in it.

    Raises:
        UserError: it is something else, or one does.
    """
    with naming("STUDY"):
        # A lease's files lie in a new one that somebody holds, or was killed in before its first run was taken. Listed
        # before it is asked whether it is a study, which it may become at this moment.
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        used = any(not name.startswith(f".{LEASE_NAME}.") for name in names)
        if used and not ((directory / LEDGER_FILE).is_file() or (directory / RUNS_DIR).is_dir()):
            raise UserError(f"{directory}: no study (no {LEDGER_FILE}, no {RUNS_DIR}/); give one, or a new folder")
    for source in sources:
        place = Place(source)
        if place.kind in (Kind.FOLDER, Kind.FILE, Kind.JOURNAL):
            inner, outer = place.path.resolve(), directory.resolve()
            if inner == outer or outer in inner.parents:
                raise UserError(f"--from {source}: lies in {directory}, where its runs are members already")


def _skipped(run: ForeignRun, reason: str) -> Taken:
    return Taken("", "", None, "skipped", 0, run.where, run.name, reason)


def _take(folder: _Folder, run: ForeignRun, by: Mapping[str, str], running: bool) -> Taken:
    """Take one run into the study, or find it again there.

    Raises:
        UserError: it cannot be a member.
    """
    if run.state == RUNNING and not running:
        return _skipped(run, "still running, or ended without a word; --running takes it as far as it has come")
    points = points_of(run)
    if not points.steps:
        return _skipped(run, "no point")
    key = run.key or f"{_resolved(run.where)}#{run.name}"
    values, given = _values(run, by)
    if (twin := folder.alike(points, key)) is not None and (found := _as(folder, twin, values, given, run)) is not None:
        return found
    kin = folder.kin(values)
    curve = kin.curve if kin is not None else digest({"adopted": values})
    source = {"source": redact(run.where), "run": run.name, "key": key, "by_step": points.by_step}
    earlier = folder.known(key, values, given, twin)
    seed = earlier.seed if earlier is not None else given if given is not None else folder.free_seed(curve)
    identity = {"adopted": {"key": key, "values": values}, "seed": seed}
    spec = earlier or RunSpec(
        run=digest(identity),
        curve=curve,
        recipe=kin.recipe if kin is not None else label_of(values),
        baseline=kin.baseline if kin is not None else run.labels.get("baseline", "") if "recipe" in values else "",
        departures=dict(kin.departures) if kin is not None else {},
        settings=dict(kin.settings) if kin is not None else dict(values),
        seed=seed,
        steps=points.steps[-1],
        config={"adopted": source, "values": values, "seed": seed, "budget": {"steps": points.steps[-1]}},
        reference={},
    )
    if earlier is None:
        check_labels(folder.directory / RUNS_DIR, [spec], folder.states)
    return _write(
        folder, spec, run, points, told=None if given is not None else f"no seed was named: it counts as {seed}"
    )


def _resolved(where: str) -> str:
    path = Path(where)
    return str(path.resolve()) if path.exists() else where


def _values(run: ForeignRun, by: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """Return the values by which a run is told apart, and its seed; None where nothing names it.

    Raises:
        UserError: the seed is no whole number.
    """
    columns = [name for name in by if name != SEED]
    first = by[columns[0]] if columns else None
    values = {name: run.labels["recipe"] if by[name] == first else run.labels[by[name]] for name in columns}
    text = run.labels.get(by.get(SEED, SEED))
    recipe = run.labels["recipe"]
    if text is None and (hidden := hidden_seed(run.name if values else recipe)) is not None:
        # A letter may as well be a stage's: the word has to be there.
        text, recipe = (hidden[1], hidden[0] or recipe) if hidden[2] else (None, recipe)
    if text is not None and not re.fullmatch(r"-?\d+(\.0)?", text.strip()):
        raise UserError(f"seed {short(text, 40)!r} is no whole number; name another column with --by seed=COLUMN")
    return values or {"recipe": recipe}, None if text is None else int(float(text))


def _as(folder: _Folder, twin: str, values: Mapping[str, str], seed: int | None, run: ForeignRun) -> Taken | None:
    """Return what is to be said of a run whose points a member holds; None if it is that member, adopted as now."""
    member = folder.members[twin]
    spec = member.spec
    header = member.view.header
    label, number = str(header.get("recipe", twin)), header.get("seed")
    if spec is not None and "adopted" in spec.config:
        if folder.values[twin] == values and seed in (None, spec.seed):
            return None
        raise UserError(
            f"has the points of {label} seed {number} ({twin}): a run counts once; --by as then finds it again"
        )
    if "adopted" in header:
        return None  # by a process that was killed before it could say so
    return Taken(
        run=twin,
        recipe=label,
        seed=int(number or 0),
        what="unchanged",
        points=len(member.points.steps),
        source=run.where,
        name=run.name,
        reason="a member of this study already",
    )


def _write(folder: _Folder, spec: RunSpec, run: ForeignRun, points: Points, told: str | None) -> Taken:
    """Write journal, specification and ledger of a member, in this order, as far as they are not there yet.

    Raises:
        UserError: the folder holds another run's journal, or the run was read by other columns before.
    """
    run_dir = folder.directory / RUNS_DIR / spec.run
    check_own(run_dir, spec.run)
    view = journal_or_none(run_dir)
    old, new = [] if view is None else folder.points(view).rows, points.rows
    about = {**spec.config["adopted"], "axis": run.axis, "metric": run.metric, "digest": points.digest}
    _check_columns({} if view is None else view.header.get("adopted", {}), about)
    alike = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    status = {FAILED: "failed", RUNNING: "running"}.get(run.state, "finished")
    recorded = spec.run in folder.states
    if alike == len(new) < len(old):  # an earlier checkpoint, say: what is known stays
        what, count, told = "unchanged", len(old), "has come less far than it was adopted with"
    # The specification is written after the journal: one that is behind tells of a process that was killed.
    elif alike == len(new) and view is not None and view.status == status and spec.steps == points.steps[-1]:
        what, count = "unchanged" if recorded else "adopted", len(new)
        if not recorded:
            _record(folder, spec, status, about, count)
    else:
        what, count = "grown" if old and recorded else "adopted", len(new)
        spec = replace(spec, steps=points.steps[-1], config={**spec.config, "budget": {"steps": points.steps[-1]}})
        journal = Journal(run_dir)
        try:
            journal.header(**_header(spec, folder, about))
            if alike < len(old) or (view is not None and view.status != "running" == status):
                journal.resume(old[alike - 1][0] if alike else -1)
            for at in range(alike, len(new)):
                error = {f"{folder.metric}_se": points.sd[at]} if points.sd else {}
                metrics = {folder.metric: points.reward[at], **error, folder.axis: points.compute[at]}
                journal.record("eval", points.steps[at], metrics)
            if status != "running":
                why = f"failed in {about['source']}" if status == "failed" else run.final
                journal.end(points.steps[-1], status, why, final=run.final is not None)
        finally:
            journal.close()
        _record(folder, spec, status, about, count)
        if alike < len(old):
            told = f"{len(old) - alike} points were logged anew; those are used"
    if status != "finished":
        told = "failed where it ran" if status == "failed" else "still running: adopt it again to take the rest"
    folder.note(spec)
    return Taken(
        run=spec.run,
        recipe=spec.recipe,
        seed=spec.seed,
        what=what,
        points=count,
        source=run.where,
        name=run.name,
        reason=told,
    )


def _check_columns(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run is read by the columns by which it was adopted.

    Raises:
        UserError: it is read by another.
    """
    for name, option in (("axis", "--x"), ("metric", "--metric or --y")):
        if before and before.get(name) != now[name]:
            raise UserError(
                f"was adopted by {before.get(name)!r}, and is now read by {now[name]!r}: keep to it with {option}"
            )


def _header(spec: RunSpec, folder: _Folder, about: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields_of(spec), "adopted": dict(about), "axis": folder.axis, "compute_is": folder.measured}


def _record(folder: _Folder, spec: RunSpec, status: str, about: Mapping[str, Any], points: int) -> None:
    """Freeze a member's specification, and put it into the ledger."""
    run_dir = folder.directory / RUNS_DIR / spec.run
    spec.write(run_dir)
    # So that values can be grouped by, as of any run; JSON is YAML.
    write_atomically(run_dir / CONFIG_FILE, json.dumps({**spec.config["values"], **spec.config}, indent=1))
    reason = {"failed": "failed where it ran", "running": "still running where it was adopted from"}.get(status)
    entry = {
        **named(spec),
        **{"state": {"running": "stopped"}.get(status, status), "reason": reason},
        **{key: about[key] for key in ("source", "digest")},
        "points": points,
    }
    folder.ledger.append("adopted", **entry)
    folder.states[spec.run] = adopted(entry)


@dataclass
class _Member:
    """A member that a run may be found again as, with the points of its journal."""

    spec: RunSpec | None
    view: JournalView
    points: Points


class _Folder:
    """A study's folder while runs are adopted into it; its lease is held.

    Attributes:
        axis, metric: compute and reward of its journals; measured: how that compute is measured, in words.
        states, specs, values: of the members in its ledger, by identity.
        members: those with a journal, by identity.
    """

    def __init__(self, directory: Path, axis: str, metric: str | None, where: str) -> None:
        self.directory, self.ledger = directory, Ledger(directory)
        self.states = self.ledger.fold()
        self.specs: dict[str, RunSpec] = {}
        self.values: dict[str, Mapping[str, str]] = {}
        views = {each.name: view for each in find_runs(directory) if (view := journal_or_none(each)) is not None}
        evaluated = [view for view in views.values() if view.of_kind("eval")]
        self.metric, self.axis, self.measured = metric or METRIC, axis, axis
        if evaluated:
            theirs, first = compared_by(evaluated)
            self.metric = metric or first
            if theirs != axis:
                raise UserError(
                    f"{directory}: its runs are compared by {theirs}, and {where} counts {axis}; choose a column of "
                    "that unit with --x, say with --unit what the column counts, or adopt into a study of its own"
                )
            # Of one unit: runs that say different things of it are not compared.
            said = [view.header for view in evaluated if view.header.get("axis") == axis]
            self.measured = next((str(each["compute_is"]) for each in said if "compute_is" in each), axis)
        for run in self.states:
            try:
                self._know(RunSpec.read(directory / RUNS_DIR / run))
            except UserError:
                continue  # frozen by another version: it is none to be matched
        self.members = {run: _Member(self.specs.get(run), view, self.points(view)) for run, view in views.items()}

    def _know(self, spec: RunSpec) -> None:
        self.specs[spec.run], self.values[spec.run] = spec, dict(values_of(spec))

    def note(self, spec: RunSpec) -> None:
        """Take note of a member that was adopted just now."""
        self._know(spec)
        if (view := journal_or_none(self.directory / RUNS_DIR / spec.run)) is not None:
            self.members[spec.run] = _Member(spec, view, self.points(view))

    def points(self, view: JournalView) -> Points:
        """Return the points in a journal, along the study's axis and reward."""
        known = [
            (record.step, record.metrics[self.axis], record.metrics[self.metric])
            for record in view.of_kind("eval")
            if self.axis in record.metrics and self.metric in record.metrics
        ]
        steps, compute, reward = zip(*known, strict=True) if known else ((), (), ())
        return Points(steps, compute, reward)

    def alike(self, points: Points, key: str) -> str | None:
        """Return the member that holds the same points, as far as the shorter of both goes; None if none does."""
        for run, member in self.members.items():
            theirs, common = member.points, min(len(points.steps), len(member.points.steps))
            if (
                common < _ALIKE
                or points.reward[:common] != theirs.reward[:common]
                or points.compute[:common] != theirs.compute[:common]
                or len(set(points.reward[:common])) < _REWARDS
            ):
                continue
            known = "" if member.spec is None else member.spec.config.get("adopted", {}).get("key", "")
            if key == known or not any(key.startswith(each) and known.startswith(each) for each in _TRACKERS):
                return run
        return None

    def kin(self, values: Mapping[str, str]) -> RunSpec | None:
        """Return a member of the same values, whatever its seed: whose label and curve a new one takes."""
        found = [(self.specs[run], theirs) for run, theirs in self.values.items() if agree(values, theirs)]
        exact = [spec for spec, theirs in found if len(theirs) == len(values)] or [spec for spec, _ in found]
        return exact[0] if len({spec.curve for spec in exact}) == 1 else None

    def known(self, key: str, values: Mapping[str, str], seed: int | None, twin: str | None) -> RunSpec | None:
        """Return the member that a run was adopted as: by its points, or by its key, under the same values."""
        for run, spec in self.specs.items():
            source = spec.config.get("adopted")
            found = source is not None and (run == twin if twin is not None else source["key"] == key)
            if found and self.values[run] == values and seed in (None, spec.seed):
                return spec
        return None

    def free_seed(self, curve: str) -> int:
        """Return the first seed that no member of a curve has."""
        taken = {spec.seed for spec in self.specs.values() if spec.curve == curve}
        return next(seed for seed in range(len(taken) + 1) if seed not in taken)
