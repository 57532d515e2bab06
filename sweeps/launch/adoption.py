"""Adopt runs of other trainers: make them members of a study, with journals in our format.

An adopted member has a folder like any other, but is never started. Its journal contains the points that were read from
the source, and the journal's header names the source (`adopted`: source, run, columns, digest). The specification has
the values that identify the recipe. The ledger's event `adopted` is written last; after a kill, the same command
completes what is missing. If a run is adopted again, its new points are appended to its journal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.as_json import AsJson
from sweeps.errors import UserError, errors_naming
from sweeps.launch.adopted import agree, hold_study_lease, journal_header, recipe_values
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import LEDGER_FILE, RUNS_DIR, Ledger, adopted_state, member_fields
from sweeps.launch.members import LEASE_NAME
from sweeps.redact import redact
from sweeps.run.files import write_atomically
from sweeps.run.journal import CONFIG_FILE, Journal, JournalView, find_runs
from sweeps.run.progress import check_journal_owner, journal_or_none
from sweeps.run.spec import RunSpec, digest
from sweeps.source.collected import FAILED, FINISHED, RUNNING, ForeignRun, show_one_run
from sweeps.source.foreign_runs import SEED, Points, axis_of, columns_of, points_of, read_runs
from sweeps.source.journals import compared_by
from sweeps.source.places import Kind, Place
from sweeps.source.run_names import seed_in_name
from sweeps.source.text import short
from sweeps.terminal import counted

# Default reward of a study that has no evaluation yet.
METRIC = "eval/heldout/pass_rate"
# Trackers whose runs have unique names.
_TRACKERS = ("wandb:", "mlflow:", "trackio:")
_MAX_LISTED = 3


@dataclass(frozen=True)
class RunResult(AsJson):
    """Result of adopting one run.

    Attributes:
        run: identity of the member; "" if the run did not become one.
        recipe, seed: label and seed of the member; "" and None if there is no member.
        what: `adopted` (a new member), `grown` (new points were appended), `unchanged` or `skipped`.
        points: number of the member's evaluations after this adoption.
        source, name: where the run was read, and its name there.
        reason: why the run was skipped, or another remark; None without a remark.
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
    """Results of an adoption, run by run, and notes on how the sources were read."""

    study: str
    axis: str
    metric: str
    runs: list[RunResult] = field(default_factory=list)
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
    """Adopt runs as members of a study. Runs that were adopted before get their new points.

    Args:
        directory: folder of the study, new or existing.
        sources: where to read the runs: sources as for `scalerl fit`, or folders of logs.
        by: names of the columns that identify recipes and seeds, see `columns_of`.
        metric, x, y, seed_from: how to read the sources, see `sweeps.source.load`.
        unit: unit of the compute column (`UNITS`); None to infer it from the column's name.
        running: whether to adopt runs that are still running, with their points so far.
        evaluation_set: store the reward as the pass rate of the evaluation set with this name; None for the set that
            the study already uses, or `heldout` if the study has no evaluations yet.

    Raises:
        UserError: a source cannot be read, the folder is not a study, the study is running, or compute is in another
            unit than in the study.
    """
    columns = columns_of(by)
    runs, notes = read_runs(sources, columns, metric, x, y, seed_from)
    where = ", ".join(map(str, sources))
    axes = {axis_of(run.axis, unit): run.axis for run in runs}
    if len(axes) > 1:
        raise UserError(f"{short(where)}: compute is {' and '.join(axes.values())}; choose one column with --x")
    _check_folder(directory, sources)
    (axis,) = axes
    with hold_study_lease(directory):
        metric = None if evaluation_set is None else f"eval/{evaluation_set}/pass_rate"
        folder = _StudyMembers(directory, axis, metric, short(where))
        result = Adoption(str(directory), folder.axis, folder.metric, notes=notes)
        for run in runs:
            try:
                result.runs.append(_adopt_run(folder, run, columns, running))
            except UserError as error:
                result.runs.append(_skipped(run, str(error)))
        result.notes += folder.shared_seed_warnings([each.run for each in result.runs if each.run])
    return result


def label_of(values: Mapping[str, str]) -> str:
    """Make a recipe's label from its values, such as `loss=grpo+lr=1e-05`; a value named `recipe` stands alone."""
    return "+".join(value if name == "recipe" else f"{name}={value}" for name, value in values.items())


def _check_folder(directory: Path, sources: Sequence[str]) -> None:
    """Raise UserError if a folder has files but no study, or if it contains one of the sources."""
    with errors_naming("STUDY"):
        # A new folder may contain a lease's files: a process holds the lease, or was killed before adopting its first
        # run. List the folder before checking for a ledger, because another process may make it a study in between.
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


def _skipped(run: ForeignRun, reason: str) -> RunResult:
    return RunResult(
        run="", recipe="", seed=None, what="skipped", points=0, source=run.where, name=run.name, reason=reason
    )


def _adopt_run(folder: _StudyMembers, run: ForeignRun, columns: Mapping[str, str], include_running: bool) -> RunResult:
    """Adopt one run, or add its new points to its member. Raises UserError if the run cannot become a member."""
    if run.state == RUNNING and not include_running:
        return _skipped(run, "still running, or ended without recording it; --running adopts its points so far")
    points = points_of(run)
    if not points.steps:
        return _skipped(run, "no points")
    key = run.key or f"{_resolved(run.where)}#{run.name}"
    values, seed_named = _recipe_values_and_seed(run, columns)
    if (duplicate := folder.member_with_points(points, key, values)) is not None and (
        result := _unchanged_member(folder, duplicate, values, seed_named, run)
    ) is not None:
        return result
    like = folder.member_with_values(values)
    curve = like.curve if like is not None else digest({"adopted": values})
    source = {"source": redact(run.where), "run": run.name, "key": key, "by_step": points.by_step}
    earlier = folder.adopted_member(key, values, seed_named, duplicate)
    if earlier is not None:  # earlier versions did not read the steps of tables, so `by_step` may have changed
        was_adopted = {**earlier.config["adopted"], "by_step": points.by_step}
        earlier = replace(earlier, config={**earlier.config, "adopted": was_adopted})
    if duplicate is not None and earlier is not None and earlier.config["adopted"]["key"] != key:
        member = folder.members[duplicate]
        if member.view.status == FINISHED and len(points.steps) <= len(member.points.steps):
            run = replace(run, state=FINISHED)  # a copy that ends early does not reopen the finished run
    seed = earlier.seed if earlier is not None else seed_named if seed_named is not None else folder.free_seed(curve)
    identity = {"adopted": {"key": key, "values": values}, "seed": seed}
    spec = earlier or RunSpec(
        run=digest(identity),
        curve=curve,
        recipe=like.recipe if like is not None else label_of(values),
        baseline=like.baseline if like is not None else run.labels.get("baseline", "") if "recipe" in values else "",
        departures=dict(like.departures) if like is not None else {},
        settings=dict(like.settings) if like is not None else dict(values),
        seed=seed,
        steps=points.steps[-1],
        config={"adopted": source, "values": values, "seed": seed, "budget": {"steps": points.steps[-1]}},
        reference={},
    )
    if earlier is None:
        check_labels(folder.directory / RUNS_DIR, [spec], folder.states)
    return _write_member(
        folder, spec, run, points, remark=None if seed_named is not None else f"no seed found; it gets seed {seed}"
    )


def _resolved(where: str) -> str:
    path = Path(where)
    return str(path.resolve()) if path.exists() else where


def _recipe_values_and_seed(run: ForeignRun, columns: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """Return the values that identify a run's recipe, and its seed; None if no column or name has the seed.

    Raises:
        UserError: the seed is not an integer.
    """
    names = [name for name in columns if name != SEED]
    first = columns[names[0]] if names else None
    values = {name: run.labels["recipe"] if columns[name] == first else run.labels[columns[name]] for name in names}
    text = run.labels.get(columns.get(SEED, SEED))
    recipe = run.labels["recipe"]
    if text is None and (hidden := seed_in_name(run.name if values else recipe)) is not None:
        # In a name such as `run-s1`, the `s` may also stand for "stage": use the number only after the word `seed`.
        text, recipe = (hidden[1], hidden[0] or recipe) if hidden[2] else (None, recipe)
    if text is not None and not re.fullmatch(r"-?\d+(\.0)?", text.strip()):
        raise UserError(f"seed {short(text, 40)!r} is no whole number; name another column with --by seed=COLUMN")
    return values or {"recipe": recipe}, None if text is None else int(float(text))


def _unchanged_member(
    folder: _StudyMembers, duplicate: str, values: Mapping[str, str], seed: int | None, run: ForeignRun
) -> RunResult | None:
    """Return the result `unchanged` for a run whose points are already those of a launched member.

    Returns None if the member was itself adopted from this run, because the run may have new points since then.

    Raises:
        UserError: the same points were adopted under other values or another seed.
    """
    member = folder.members[duplicate]
    spec = member.spec
    header = member.view.header
    label, number = str(header.get("recipe", duplicate)), header.get("seed")
    if spec is not None and "adopted" in spec.config:
        if folder.values[duplicate] == values and seed in (None, spec.seed):
            return None
        raise UserError(
            f"has the points of {label} seed {number} ({duplicate}): a run counts once; --by as then finds it again"
        )
    if "adopted" in header:
        return None  # being adopted: an earlier process was killed before it wrote the ledger
    return RunResult(
        run=duplicate,
        recipe=label,
        seed=int(number or 0),
        what="unchanged",
        points=len(member.points.steps),
        source=run.where,
        name=run.name,
        reason="already a member of this study",
    )


def _write_member(
    folder: _StudyMembers, spec: RunSpec, run: ForeignRun, points: Points, remark: str | None
) -> RunResult:
    """Write journal, specification and ledger entry of a member, in this order, if they are missing or outdated.

    `remark` becomes the result's reason unless there is a more important one.

    Raises:
        UserError: the folder has another run's journal, or the run was adopted from other columns.
    """
    run_dir = folder.directory / RUNS_DIR / spec.run
    check_journal_owner(run_dir, spec.run)
    view = journal_or_none(run_dir)
    old, new = [] if view is None else folder.points(view).rows, points.rows
    origin = {**spec.config["adopted"], "axis": run.axis, "metric": run.metric, "digest": points.digest}
    _check_columns({} if view is None else view.header.get("adopted", {}), origin)
    # Number of points, from the first on, that are equal in the journal and in the source.
    common = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    status = {FAILED: "failed", RUNNING: "running"}.get(run.state, "finished")
    recorded = spec.run in folder.states
    if common == len(new) < len(old):  # the source lost points, e.g. back to a checkpoint: keep all
        what, count, remark = "unchanged", len(old), "has fewer points than when it was adopted"
    # The steps in the specification are compared too, because an earlier process may have been killed between writing
    # the journal and writing the specification.
    elif common == len(new) and view is not None and view.status == status and spec.steps == points.steps[-1]:
        what, count = "unchanged" if recorded else "adopted", len(new)
        if not recorded:
            _record_in_ledger(folder, spec, status, origin, count)
    else:
        what, count = "grown" if old and recorded else "adopted", len(new)
        spec = replace(spec, steps=points.steps[-1], config={**spec.config, "budget": {"steps": points.steps[-1]}})
        journal = Journal(run_dir)
        try:
            journal.header(**_header(spec, folder, origin))
            if common < len(old) or (view is not None and view.status != "running" == status):
                journal.resume(old[common - 1][0] if common else -1)
            for at in range(common, len(new)):
                error = {f"{folder.metric}_se": points.sd[at]} if points.sd else {}
                metrics = {folder.metric: points.reward[at], **error, folder.axis: points.compute[at]}
                journal.record("eval", points.steps[at], metrics)
            if status != "running":
                why = f"failed in {origin['source']}" if status == "failed" else run.final
                journal.end(points.steps[-1], status, why, final=run.final is not None)
        finally:
            journal.close()
        _record_in_ledger(folder, spec, status, origin, count)
        if common < len(old):
            remark = f"{counted(len(old) - common, 'point')} replaced, because the source has other values now"
    if status != "finished":
        remark = "failed in its source" if status == "failed" else "still running; adopt it again for later points"
    folder.add(spec)
    return RunResult(
        run=spec.run,
        recipe=spec.recipe,
        seed=spec.seed,
        what=what,
        points=count,
        source=run.where,
        name=run.name,
        reason=remark,
    )


def _check_columns(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a run is now read from other columns than at its adoption, `earlier` (empty if it is new)."""
    for name, option in (("axis", "--x"), ("metric", "--metric or --y")):
        if earlier and earlier.get(name) != now[name]:
            raise UserError(
                f"was adopted by {earlier.get(name)!r}, and is now read by {now[name]!r}: keep to it with {option}"
            )


def _header(spec: RunSpec, folder: _StudyMembers, origin: Mapping[str, Any]) -> dict[str, Any]:
    return {**journal_header(spec), "adopted": dict(origin), "axis": folder.axis, "compute_is": folder.measured}


def _record_in_ledger(
    folder: _StudyMembers, spec: RunSpec, status: str, origin: Mapping[str, Any], points: int
) -> None:
    run_dir = folder.directory / RUNS_DIR / spec.run
    spec.write(run_dir)
    # `scalerl fit` and similar commands can group runs by the values in this file. JSON is valid YAML.
    write_atomically(run_dir / CONFIG_FILE, json.dumps({**spec.config["values"], **spec.config}, indent=1))
    reason = {"failed": "failed in its source", "running": "still running in its source"}.get(status)
    entry = {
        **member_fields(spec, spec.checksum()),
        **{"state": {"running": "stopped"}.get(status, status), "reason": reason},
        **{key: origin[key] for key in ("source", "digest")},
        "points": points,
    }
    folder.ledger.append("adopted", **entry)
    folder.states[spec.run] = adopted_state(entry)


@dataclass
class _Member:
    """A member and the points of its journal. `spec` is None if the specification cannot be read."""

    spec: RunSpec | None
    view: JournalView
    points: Points


class _StudyMembers:
    """Members of a study while runs are adopted into it. The caller must hold the study's lease.

    Attributes:
        axis, metric: compute axis and reward metric of the study's journals.
        measured: description of how compute is measured.
        states, specs, values: of each member in the ledger, by identity: its state, its specification, and the values
            that identify its recipe.
        members: members with a journal, by identity.
    """

    def __init__(self, directory: Path, axis: str, metric: str | None, where: str) -> None:
        self.directory, self.ledger = directory, Ledger(directory)
        self.states = self.ledger.fold()
        self.specs: dict[str, RunSpec] = {}
        self.values: dict[str, Mapping[str, str]] = {}
        views = {
            run_dir.name: view for run_dir in find_runs(directory) if (view := journal_or_none(run_dir)) is not None
        }
        evaluated = [view for view in views.values() if view.of_kind("eval")]
        self.metric, self.axis, self.measured = metric or METRIC, axis, axis
        if evaluated:
            study_axis, study_metric = compared_by(evaluated)
            self.metric = metric or study_metric
            if study_axis != axis:
                raise UserError(
                    f"{directory}: its runs are compared by {study_axis}, and {where} counts {axis}; choose a column "
                    "of that unit with --x, say with --unit what the column counts, or adopt into a study of its own"
                )
            # Take the text from any header: `compared_by` has refused runs that describe the same axis differently.
            headers = [view.header for view in evaluated if view.header.get("axis") == axis]
            self.measured = next((str(header["compute_is"]) for header in headers if "compute_is" in header), axis)
        for run in self.states:
            try:
                self._add_spec(RunSpec.read(directory / RUNS_DIR / run))
            except UserError:
                continue  # the specification cannot be read (another version wrote it): its values are unknown
        self.members = {run: _Member(self.specs.get(run), view, self.points(view)) for run, view in views.items()}

    def _add_spec(self, spec: RunSpec) -> None:
        self.specs[spec.run], self.values[spec.run] = spec, dict(recipe_values(spec))

    def add(self, spec: RunSpec) -> None:
        self._add_spec(spec)
        if (view := journal_or_none(self.directory / RUNS_DIR / spec.run)) is not None:
            self.members[spec.run] = _Member(spec, view, self.points(view))

    def points(self, view: JournalView) -> Points:
        """Return the points of a journal: step, compute on the study's axis, and reward."""
        known = [
            (record.step, record.metrics[self.axis], record.metrics[self.metric])
            for record in view.of_kind("eval")
            if self.axis in record.metrics and self.metric in record.metrics
        ]
        steps, compute, reward = zip(*known, strict=True) if known else ((), (), ())
        return Points(steps, compute, reward)

    def member_with_points(self, points: Points, key: str, values: Mapping[str, str]) -> str | None:
        """Return the identity of a member that has the same points as a run; None if there is no such member.

        If one has more points than the other, only as many points as the shorter has are compared. Within one tracker
        (W&B, MLflow, Trackio), equal points alone do not make a run a copy: a resumed run begins with the points of the
        run that it resumes, and two recipes may learn identically. There, the number of points and the values of `--by`
        must be equal too. A member that was adopted with this `key` is preferred.
        """
        duplicates = []
        for run, member in self.members.items():
            member_points, common = member.points, min(len(points.steps), len(member.points.steps))
            if (
                points.reward[:common] != member_points.reward[:common]
                or points.compute[:common] != member_points.compute[:common]
                or not show_one_run(points.reward[:common])
            ):
                continue
            config = {} if member.spec is None else member.spec.config
            known = config.get("adopted", {}).get("key", "")
            if key == known:
                return run
            in_one_tracker = any(key.startswith(prefix) and known.startswith(prefix) for prefix in _TRACKERS)
            is_copy = len(points.steps) == len(member_points.steps) and config.get("values") == values
            if not in_one_tracker or is_copy:
                duplicates.append(run)
        return duplicates[0] if duplicates else None

    def member_with_values(self, values: Mapping[str, str]) -> RunSpec | None:
        """Return a member with these values and any seed; None if none matches, or members of several curves do."""
        matches = [(self.specs[run], known) for run, known in self.values.items() if agree(values, known)]
        exact = [spec for spec, known in matches if len(known) == len(values)] or [spec for spec, _ in matches]
        return exact[0] if len({spec.curve for spec in exact}) == 1 else None

    def adopted_member(
        self, key: str, values: Mapping[str, str], seed: int | None, duplicate: str | None
    ) -> RunSpec | None:
        """Return the member that an earlier adoption made of this run; None if the run is new.

        The member must have these values, and this seed unless `seed` is None. With `duplicate`, only that member can
        be returned; without it, the member must have been adopted with the same `key`.
        """
        for run, spec in self.specs.items():
            source = spec.config.get("adopted")
            is_same = source is not None and (run == duplicate if duplicate is not None else source["key"] == key)
            if is_same and self.values[run] == values and seed in (None, spec.seed):
                return spec
        return None

    def shared_seed_warnings(self, runs: Sequence[str]) -> list[str]:
        """Return one warning, in a list, if some of `runs` share recipe and seed with another member, else []."""
        pairs = []
        for run in dict.fromkeys(run for run in runs if run in self.specs):
            spec = self.specs[run]
            others = [o for o in self.specs.values() if (o.curve, o.seed) == (spec.curve, spec.seed) and o.run != run]
            if others:
                sources = [str(other.config.get("adopted", {}).get("source", "this study")) for other in others]
                places = [f"{other.run} from {short(where)}" for other, where in zip(others, sources, strict=True)]
                pairs.append(f"{spec.title} ({run}, and {', '.join(places)})")
        if not pairs:
            return []
        listed = "; ".join(pairs[:_MAX_LISTED])
        more = f"; and {len(pairs) - _MAX_LISTED} more" if len(pairs) > _MAX_LISTED else ""
        return [
            f"warning: several members have one recipe and seed, and all of them count: {listed}{more}; if "
            "one corrects the other, adopt only the corrected data, into a new study; if both are runs of their own, "
            "give them seeds"
        ]

    def free_seed(self, curve: str) -> int:
        """Return the smallest seed, from 0 on, that no member of a curve has."""
        taken = {spec.seed for spec in self.specs.values() if spec.curve == curve}
        return next(seed for seed in range(len(taken) + 1) if seed not in taken)
