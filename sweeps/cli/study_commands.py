"""Commands `train`, `status`, `collect`, `adopt`, `clean` and `export`: run and manage a study's members."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.cli.output import print_json, print_table, show_chart, show_ranking, warn
from sweeps.errors import UserError, require_training
from sweeps.executor.base import load_entry
from sweeps.report.plain import one_line, table
from sweeps.terminal import Column, duration

if TYPE_CHECKING:
    from sweeps.executor.clusters import Scheduler
    from sweeps.launch.status import MemberView

ROWS = 40  # largest number of members in a table
STATUS = (
    Column("state"), Column("recipe", soft=True), Column("seed"), Column("step", 50), Column("pass rate", 70),
    Column("attempts", 110), Column("job", 100), Column("why", 70, soft=True),
)  # fmt: skip
SIDES = (Column("side"), Column("where", 60, soft=True), Column("state"), Column("idle"), Column("tokens/s"))
SILENT_S = 60.0  # seconds after which `status` reports that a member records no activity
FAILURES = 3  # number of members that are shown in detail: logs, trainer and engines, changes of code


def train_command(overrides: Sequence[str]) -> None:
    """Replace this process with the training process (exec), so that it gets the signals and sets the exit code.

    Raises:
        UserError: the training packages are not installed (docs/guide/installation.md).
    """
    require_training("scalerl train")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "lightning_scalerl.train", *overrides])


def status_command(options: argparse.Namespace) -> None:
    """Print state, progress and failure reasons of a study's members (`scalerl status`)."""
    from sweeps.launch.status import counts, log_tail, overview, to_json

    study = Path(options.study)
    views = overview(study, _scheduler(study))
    if options.json:
        print_json(to_json(study, views))
        return
    print(f"{study}: {counts(views)}\n")
    print_table(STATUS, _status_rows(views, None if options.all else ROWS))
    live = [view for view in views if view.sides and (options.all or view.state == "running")]
    for view in live if options.all else live[:FAILURES]:
        print(f"\n{view.recipe} seed {view.seed}, trainer and engines:\n")
        print_table(SIDES, _side_rows(view))
    if len(live) > FAILURES and not options.all:
        print(f"and {len(live) - FAILURES} more members (--all)")
    changed = [view for view in views if view.code]
    for view in changed if options.all else changed[:FAILURES]:
        print(f"\n{view.recipe} seed {view.seed} was continued with other code: {one_line(view.code or '')}")
    if len(changed) > FAILURES and not options.all:
        print(f"and {len(changed) - FAILURES} more members (--all)")
    for view in [view for view in views if view.state == "failed"][:FAILURES]:
        if lines := log_tail(study, view):  # a run that was started alone has no log
            print(f"\n{view.recipe} seed {view.seed}, the last lines of {study}/runs/{view.run}/log.txt:")
        for line in lines:
            print(f"    {one_line(line)}")


def _status_rows(views: Sequence[MemberView], limit: int | None) -> list[list[str]]:
    """Return the rows of the table `STATUS`, the most important members first; with `limit` None, all members."""
    from sweeps.launch.status import STATES

    views = sorted(views, key=lambda view: STATES.index(view.state))
    rows = []
    for view in views[:limit]:
        step = "-" if view.step is None else f"{view.step}/{view.steps}" if view.steps else str(view.step)
        rate = "-" if view.pass_rate is None else f"{view.pass_rate:.3f}"
        place = " on ".join(filter(None, (view.job, view.node)))
        row = [view.state, view.recipe, str(view.seed), step, rate, str(view.attempts), place or "-"]
        rows.append([*row, view.reason or inactivity_note(view)])
    if limit is not None and len(views) > limit:
        rows.append([f"and {len(views) - limit} more (--all)", *[""] * 7])
    return rows


def _side_rows(view: MemberView) -> list[list[str]]:
    rows = []
    for side in view.sides:
        idle = "-" if side.idle is None else f"{side.idle:.0%}"
        rate = "-" if side.tokens_s is None else f"{side.tokens_s:,.0f}"
        rows.append([side.side, side.where or "-", side.state, idle, rate])
    return rows


def inactivity_note(view: MemberView) -> str:
    """Return a note if a running member has recorded no activity for `SILENT_S` seconds; else ""."""
    if view.idle_s is None or view.idle_s < SILENT_S:
        return ""
    return f"no sign of life for {duration(view.idle_s)} (last activity: {view.doing})"


def _scheduler(study: Path) -> Scheduler | None:
    """Return the scheduler of the study's cluster; None if there is none, or it cannot be queried from here."""
    from sweeps.launch.settings import LaunchSettings

    try:
        return LaunchSettings.scheduler_of(study)
    except UserError as error:
        warn([str(error)])
        return None


def adopt_command(options: argparse.Namespace) -> None:
    """Adopt runs of other programs as members of a study, and print what became of each (`scalerl adopt`)."""
    from sweeps.launch.adoption import adopt

    done = adopt(
        Path(options.study),
        options.sources,
        options.by,
        metric=options.metric,
        x=options.x,
        y=options.y,
        seed_from=options.seed_from,
        unit=options.unit,
        running=options.running,
        evaluation_set=options.set,
    )
    for note in done.notes:
        print(one_line(note if note.startswith("warning: ") else f"source: {note}"), file=sys.stderr)
    if options.json:
        print_json(done.to_json())
        return
    count = Counter(each.what for each in done.runs)
    counts = ", ".join(f"{count[what]} {what}" for what in ("adopted", "grown", "unchanged", "skipped") if count[what])
    print(f"{options.study}: {counts}; compute is {done.axis}, reward {done.metric}\n")
    rows = [
        [
            each.what,
            each.recipe or "-",
            "-" if each.seed is None else str(each.seed),
            str(each.points),
            each.name,
            each.reason or "",
        ]
        for each in done.runs
    ]
    print(table(["", "recipe", "seed", "points", "original name", ""], rows))


def clean_command(options: argparse.Namespace) -> None:
    """List a study's removable files with their sizes; with `--yes` remove them (`scalerl clean`)."""
    from sweeps.launch.clean import KINDS, USUAL, clean, format_size, inventory

    study = Path(options.study)
    kinds = [kind for kind in KINDS if getattr(options, kind)] or [*USUAL]
    result = clean(study, kinds, options.keep) if options.yes else inventory(study, options.keep)
    at_work = f", {result.at_work} running" if result.at_work else ""
    print(f"{study}: {result.finished} of {result.finished + result.others} members finished{at_work}\n")
    rows = [
        [
            kind,
            str(len(result.removable[kind])),
            format_size(result.size(kind)),
            "" if kind in kinds else f"with --{kind}",
            what,
        ]
        for kind, what in KINDS.items()
        if kind in kinds or not options.yes
    ]
    print(table(["deleted" if options.yes else "can be deleted", "files", "size", "", ""], rows))
    print(
        "\nJournals, specifications, configurations, the ledger and launch.json are kept, and everything that an "
        "unfinished member needs to continue."
    )
    if result.linked:
        warn([f"{path} is a symbolic link: its target is kept" for path in result.linked])
    if result.removable["checkpoints"] and "checkpoints" in kinds and not options.keep:
        print(
            "A run without a checkpoint cannot be continued with a larger budget, exported or evaluated again; "
            "--keep 1 keeps the newest of each."
        )
    if not options.yes:
        print("Nothing was deleted; --yes deletes these files.")


def export_command(options: argparse.Namespace) -> None:
    """Write a run's model as a folder that transformers can load (`scalerl export`)."""
    from sweeps.run.spec import run_folder

    run = run_folder(options.run)
    require_training("scalerl export")
    export = load_entry("lightning_scalerl.member.export:export_run")
    print(export(run, Path(options.directory), options.dtype, options.step, options.trust))


def collect_command(options: argparse.Namespace) -> None:
    """Continue a study: classify ended jobs, submit the rest, print status and ranking (`scalerl collect`)."""
    from sweeps.launch.ledger import LEDGER_FILE, all_finished_or_stopped
    from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study, report_failures
    from sweeps.launch.status import counts, overview
    from sweeps.launch.study import Study
    from sweeps.launch.trust import check_study
    from sweeps.search.deciders import decider_of

    directory = Path(options.study)
    states = None
    if (directory / LAUNCH_FILE).is_file():
        study = Study.read(directory)
        plan = LaunchSettings.read(directory)
        if not plan.outlives and not options.wait:
            warn([f"{directory} runs on one machine; --wait continues its unfinished members"])
        else:
            # A race continues only with --wait, because its decisions need a process that keeps running.
            require_training("scalerl collect")
            if not options.trust:
                check_study(study, plan)
            decider = decider_of(study, plan) if options.wait else None
            with prepare_study(study, plan, again=options.again, decider=decider) as prepared:
                states = prepared.commit(detach=not options.wait)
    elif (directory / LEDGER_FILE).is_file():
        # The study's controller died before the launch was accepted and the settings were written.
        warn([f"{directory} has no {LAUNCH_FILE}; the command that launched it finds its jobs and continues them"])
    views = overview(directory, _scheduler(directory))
    print(f"{directory}: {counts(views)}\n")
    print_table(STATUS, _status_rows(views, ROWS))
    if states is not None and plan.tracking and all_finished_or_stopped(states):
        show_chart(directory, plan.tracking)
    elif any(view.step is not None for view in views):
        show_ranking(directory)
    if states is not None:
        report_failures(study, states)
