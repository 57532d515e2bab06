"""The console script `scalerl`.

Exit codes: 0 done (a refusal to name an asymptote is an answer), 1 a failure with one line that says what and
the remedy, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.decide.rank import MARGIN, Ranking, rank
from sweeps.errors import UserError
from sweeps.fit.compare import compare
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import Fit, FitOptions, fit_curves, shown
from sweeps.fit.points import R0Mode
from sweeps.fit.published import METHOD, fit_literal
from sweeps.fit.sensitivity import Row as SensitivityRow
from sweeps.fit.sensitivity import sensitivity, signed, summary
from sweeps.parallel import cores
from sweeps.run.health import idle_variants, mechanism_counters
from sweeps.run.lease import LeaseLostError
from sweeps.source import LoadedStudy, load

if TYPE_CHECKING:
    from sweeps.decide.watch import News
    from sweeps.executor.scheduler import Scheduler
    from sweeps.launch.status import MemberView

Handler = Callable[[argparse.Namespace], int]

ROWS = 40  # members in a table
FAILURES = 3  # members whose logs are shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is returned, for `sys.exit`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Hydra's own options (--multirun, --cfg) must arrive untouched, so argparse does not see them.
    if arguments[:1] == ["train"] and arguments[1:] not in (["-h"], ["--help"]):
        return _train(arguments[1:])
    options = _parser().parse_args(arguments)
    handler: Handler = options.handler
    try:
        code = handler(options)
        sys.stdout.flush()
        return code
    except (UserError, LeaseLostError) as error:
        print(f"scalerl: {_one_line(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("scalerl: interrupted", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scalerl",
        description="Run RL recipes, fit their compute curves, rank them and say how sure that is.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(handler=handler)
        return added

    train = command(
        "train",
        lambda options: _train(options.overrides),
        "train one run, or a grid with --multirun (Hydra's overrides and options)",
        "scalerl train variant=loss_dapo seed=1 --cfg job   (shows the configuration; without --cfg job it trains)",
    )
    train.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m lightning_scalerl.train")

    fit = command(
        "fit",
        _fit,
        "fit a compute curve per recipe: A, B, C_mid with intervals, and a verdict",
        "scalerl fit examples/curves.csv --max-compute 8000",
    )
    _add_source(fit)
    fit.add_argument("--json", action="store_true", help="print a JSON list, an object a recipe")
    fit.add_argument(
        "--family",
        choices=[*FAMILIES, "all"],
        default="sigmoid",
        metavar="F",
        help=f"{', '.join(FAMILIES)}; all: the sigmoid, and how every family compares on forecasts and AICc",
    )
    fit.add_argument(
        "--method",
        choices=["profile", METHOD],
        default="profile",
        help=f"{METHOD}: the published procedure, its grid included, in GPU-hours (seconds a recipe; no intervals); "
        "default: %(default)s",
    )
    fit.add_argument(
        "--sensitivity",
        action="store_true",
        help="also refit with early cuts, other rules for R0, robust weights and less of the window: does A hold?",
    )

    ranking = command(
        "rank",
        _rank,
        "rank recipes by asymptote, ties by efficiency; says undecided when the data do not decide",
        "scalerl rank examples/curves.csv --budget 16000",
    )
    _add_source(ranking)
    _add_ranking(ranking)
    ranking.add_argument("--json", action="store_true", help="print a JSON object")

    planning = command(
        "plan",
        _plan,
        "say what a target or a budget takes: compute, what to run next to settle the choice, model size",
        "scalerl plan examples/curves.csv --target 0.6",
    )
    _add_source(planning)
    _add_planning(planning)
    planning.add_argument("--json", action="store_true", help="print a JSON object")

    report = command(
        "report",
        _report,
        "write one self-contained HTML page, with figures and ranking.csv beside it",
        "scalerl report examples/study -o report.html",
    )
    _add_source(report)
    _add_ranking(report)
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: %(default)s")
    report.add_argument("--title", help="the study's name; default: the first source's")
    report.add_argument(
        "--history",
        action="store_true",
        help="also A as fitted at growing compute, and its forecasts against what came (about a second a recipe)",
    )

    watch = command(
        "watch",
        _watch,
        "re-fit as evaluations come: A over time, forecasts against what came, a warning on departure",
        "scalerl watch examples/curves.csv --once",
    )
    _add_source(watch)
    watch.add_argument("--interval", type=_number, default=30.0, metavar="S", help="seconds; default: %(default)g")
    watch.add_argument("--once", action="store_true", help="go through what is there and exit")
    watch.add_argument("--json", action="store_true", help="print a JSON object a line")
    watch.add_argument(
        "--out",
        metavar="FILE",
        help="append every snapshot to this and adopt what it holds; default: fits.jsonl in a run or sweep directory, "
        "nothing for tables and several sources",
    )

    publish = command(
        "publish",
        _publish,
        "put fits, bands and figures into MLflow and print the link to the chart",
        "scalerl publish examples/study --mlflow sqlite:///mlflow.db",
    )
    publish.add_argument("sources", nargs="+", metavar="SOURCE", help="a run or sweep directory")
    publish.add_argument("--mlflow", required=True, metavar="URI", help="tracking URI")

    status = command(
        "status",
        _status,
        "say what runs, waits, is done or failed and why; only looks",
        "scalerl status examples/study",
    )
    status.add_argument("study", metavar="SWEEP", help="the folder that a --multirun wrote to")
    status.add_argument("--all", action="store_true", help=f"every member; default: the {ROWS} that matter most")
    status.add_argument("--json", action="store_true", help="print a JSON object")

    collect = command(
        "collect",
        _collect,
        "take stock of a study on a cluster: judge what ended, submit what is left, feed MLflow, rank",
        "scalerl collect examples/study",
    )
    collect.add_argument("study", metavar="SWEEP", help="the folder that a --multirun wrote to")
    collect.add_argument("--wait", action="store_true", help="stay until everything is done")
    collect.add_argument("--again", action="store_true", help="give members that failed another chance")
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    """What to read, and how to fit it."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a run or sweep directory, mlflow:URI#experiment, a CSV, JSONL or Parquet table, TensorBoard event files, "
        "or a log of TRL, verl or W&B (docs/sources.md)",
    )
    parser.add_argument(
        "--r0",
        type=_r0,
        default="first",
        metavar="X|first|free",
        help="reward before training: a number, the first evaluation (default), or fitted",
    )
    parser.add_argument("--robust", action="store_true", help="give evaluations far from the curve less weight")
    parser.add_argument("--min-compute", type=_number, metavar="C", help="leave out what lies below")
    parser.add_argument("--max-compute", type=_number, metavar="C", help="leave out what lies above")
    parser.add_argument(
        "--metric",
        metavar="M",
        help="the reward: eval/<set>/pass_rate of journals (default: the first set), a metric of a log; "
        "all: a curve a set",
    )
    parser.add_argument("--x", metavar="COL", help="compute column (default: compute), or axis of journals and logs")
    parser.add_argument("--y", metavar="COL", help="reward column (default: reward)")
    parser.add_argument("--by", metavar="COL", help="recipe column (default: recipe), or tag or parameter in MLflow")
    parser.add_argument("--size", metavar="COL", help="model size: a column or configuration key; a curve a size")
    parser.add_argument(
        "--group", action="append", default=[], metavar="COL", help="a curve for every value of this too; repeatable"
    )


def _add_ranking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=_number, metavar="C", help="also give the reward at this compute")
    parser.add_argument(
        "--margin",
        type=_number,
        metavar="A",
        help=f"A within this are tied; default: {MARGIN:g} of the reward's scale",
    )


def _add_planning(parser: argparse.ArgumentParser) -> None:
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--target", type=_finite, metavar="R", help="reward to reach")
    goal.add_argument(
        "--budget",
        type=_number,
        metavar="C",
        help="compute still to spend over all recipes; with --size, --rollouts or --group, compute of one run",
    )
    parser.add_argument(
        "--margin",
        type=_number,
        metavar="A",
        help=f"A within this of the best is no wrong choice; default: {MARGIN:g} of the reward's scale",
    )
    parser.add_argument(
        "--sizes", default="", metavar="LIST", help="model sizes not seen to answer for, with --size: 1e9,14B"
    )
    parser.add_argument("--rollouts", metavar="COL", help="rollouts a prompt, where varied: a column or key")
    parser.add_argument("--difficulty", metavar="COL", help="difficulty of the evaluated prompts, with --rollouts")


def _number(text: str) -> float:
    """A finite number that is not negative."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _finite(text: str) -> float:
    """A number, and no infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _r0(text: str) -> R0Mode:
    """`first`, `free` or a reward."""
    if text == "first":
        return "first"
    if text == "free":
        return "free"
    try:
        return _finite(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor first or free") from error


def _one_line(text: str) -> str:
    """A message on one printable line, whatever a file name or cell in it holds."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


# --- commands -----------------------------------------------------------------------------------------------


def _train(overrides: Sequence[str]) -> int:
    """Become the training process, so that signals and the exit code are its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "lightning_scalerl.train", *overrides])


def _fit_options(options: argparse.Namespace) -> FitOptions:
    low, high = options.min_compute, options.max_compute
    if low is not None and high is not None and low >= high:
        raise UserError(f"--min-compute {low:g} is not below --max-compute {high:g}; nothing lies between them")
    return FitOptions(
        r0=options.r0,
        min_compute=low,
        max_compute=high,
        family=getattr(options, "family", "sigmoid").replace("all", "sigmoid"),
        robust=options.robust,
    )


def _load(options: argparse.Namespace) -> LoadedStudy:
    factors = [name for name in (options.size, *options.group) if name is not None]
    return load(options.sources, metric=options.metric, x=options.x, y=options.y, by=options.by, factors=factors)


def _fitted(options: argparse.Namespace) -> tuple[LoadedStudy, list[Fit]]:
    how = _fit_options(options)
    study = _load(options)
    for line in study.shown:
        print(f"source: {_one_line(line)}", file=sys.stderr)
    if getattr(options, "method", "profile") == METHOD:
        return study, [fit_literal(curve, how) for curve in study.curves]
    # What only figures need costs a megabyte a recipe.
    return study, fit_curves(study.curves, how, workers=cores(), regions=options.handler is _report)


def _fit(options: argparse.Namespace) -> int:
    if options.sensitivity and options.method == METHOD:
        raise UserError(f"--sensitivity: refits with intervals; leave out --method {METHOD}")
    study, fits = _fitted(options)
    _warn(study.warnings)
    comparisons = [compare(fit.curve, fit.options) for fit in fits] if options.family == "all" else []
    refitted = [sensitivity(fit.curve, fit.options) for fit in fits] if options.sensitivity else []
    if options.json:
        objects = [fit.to_json() for fit in fits]
        for entry, refits in zip(objects, refitted, strict=False):
            entry["sensitivity"] = [row.to_json() for row in refits]
        for entry, found in zip(objects, comparisons, strict=False):
            entry["families"] = found.to_json()
        _print_json(objects)
        return 0
    head = ["recipe", "verdict", "A", *_shape_names(fits), "R0", "rmse", "n", "seeds"]
    rows = [
        [
            fit.recipe,
            fit.verdict,
            shown(fit.A, ".3f"),
            *(shown(fit.shape.get(name), ".4g") for name in _shape_names(fits)),
            "-" if fit.R0 is None else f"{fit.R0:.3f}",
            "-" if fit.rmse is None else f"{fit.rmse:.4f}",
            str(fit.n),
            str(fit.seeds),
        ]
        for fit in fits
    ]
    print(_table(head, rows))
    bounds = "the published procedure, no intervals" if options.method == METHOD else "95% intervals, within these runs"
    print(f"\ncompute: {fits[0].curve.unit}; reward: {fits[0].curve.metric}; {bounds}")
    for fit in fits:
        print(f"{_one_line(fit.recipe)}: {fit.reason}{_r0_effect(fit)}")
        _warn([f"{fit.recipe}: {note}" for note in fit.warnings])
    for found in comparisons:
        print(f"\n{_one_line(found.recipe)}: {found.sentence}")
        lines = [
            [
                row.family,
                "-" if row.A is None else f"{row.A:.3f}",
                f"{row.delta_aicc:.1f}",
                "-" if row.held_out is None else f"{row.held_out:.4f}",
                "-" if row.r2 is None else f"{row.r2:.4f}",
            ]
            for row in found.rows
        ]
        print(_table(["family", "A", "AICc above least", "error on later compute", "R^2"], lines))
    for fit, refits in zip(fits, refitted, strict=False):
        print(f"\n{_one_line(fit.recipe)}: {summary(refits)}")
        print(_table(["setting", "A", "shift", "B", "C_mid", "n", "verdict"], [_refit_row(row) for row in refits]))
    return 0


def _refit_row(row: SensitivityRow) -> list[str]:
    return [
        row.setting,
        shown(row.A, ".3f"),
        "-" if row.shift is None else signed(row.shift),
        shown(row.B, ".3g"),
        shown(row.C_mid, ".4g"),
        str(row.n),
        row.verdict,
    ]


def _r0_effect(fit: Fit) -> str:
    """What a shifted R0 does to a named A; nothing where there is none."""
    effect = fit.R0_effect
    if effect is None or not fit.identifiable:
        return ""
    sides = zip(("lower", "higher"), effect.A, effect.B, strict=True)
    moved = [f"{side} A {a:.3f}, B {b:.3g}" for side, a, b in sides if a is not None and b is not None]
    return f"; with R0 {effect.step:g} {'; '.join(moved)}" if moved else ""


def _shape_names(fits: Sequence[Fit]) -> list[str]:
    """Shape parameters of the fitted family, whatever could be named."""
    return list(FAMILIES[fits[0].family].names)


def _rank(options: argparse.Namespace) -> int:
    study, fits = _fitted(options)
    ranking = rank(fits, margin=options.margin, budget=options.budget, workers=cores(), brief=not options.json)
    _warn(study.warnings)
    if options.json:
        _print_json(ranking.to_json())
        return 0
    print(f"{_one_line(ranking.sentence)}\n")
    print(_table(*_ranking_rows(ranking)))
    if ranking.leave_one_out:
        print(f"\nagainst {_one_line(ranking.baseline or '')}:")
        rows = [
            [entry.recipe, shown(entry.delta_a, "+.3f"), shown(entry.delta_b, "+.3g"), entry.reason]
            for entry in ranking.leave_one_out
        ]
        print(_table(["variant", "delta A", "delta B at shared A", "note"], rows))
    for note in idle_variants(mechanism_counters(study.runs)):
        _warn([note])
    return 0


def _ranking_rows(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    head = ["rank", "recipe", "P(best)", "A", "B at shared A"]
    if ranking.budget is not None:
        head.append(f"R at {ranking.budget:.4g}")
    head.append("why")
    rows = []
    for entry in ranking.ranking:
        named = entry.rank is not None
        row = [
            str(entry.rank) if named else "-",
            entry.recipe,
            "-" if entry.p_best is None else f"{entry.p_best:.2f}",
            shown(entry.A if named else None, ".3f"),
            shown(entry.B_at_shared_A, ".3g"),
        ]
        if ranking.budget is not None:
            row.append(shown(entry.R_at_budget, ".3f"))
        rows.append([*row, entry.reason if named else f"{entry.verdict}: {entry.reason}"])
    return head, rows


def _plan(options: argparse.Namespace) -> int:
    from sweeps.decide.plan import Factors, make_plan
    from sweeps.report.text import sections

    more = tuple(text for text in options.sizes.split(",") if text.strip())
    factors = Factors(options.size, options.rollouts, options.difficulty, more)
    options.group = [name for name in (options.rollouts, options.difficulty, *options.group) if name is not None]
    study, fits = _fitted(options)
    plan = make_plan(fits, options.target, options.budget, options.margin, factors)
    _warn(study.warnings)
    if options.json:
        _print_json(plan.to_json())
        return 0
    blocks = []
    for heading, head, rows in sections(plan):
        blocks.append(_one_line(heading) + ("\n" + _table(head, rows) if rows else ""))
    print("\n\n".join(blocks))
    for sizes in plan.sizes:
        _warn([f"{sizes.recipe}: {note}" for note in sizes.warnings])
    return 0


def _report(options: argparse.Namespace) -> int:
    # Matplotlib takes a second to import: only where something is drawn.
    from sweeps.report.write import histories, write_ranking_csv, write_report

    study, fits = _fitted(options)
    ranking = rank(fits, margin=options.margin, budget=options.budget)
    first = options.sources[0]
    title = options.title or (first.rpartition("#")[2] if first.startswith("mlflow:") else Path(first).resolve().stem)
    page = Path(options.output)
    known = {found.recipe: found for found in ranking.comparisons}
    written = write_report(
        page,
        study.curves,
        fits,
        ranking,
        study.runs,
        title,
        study.warnings,
        comparisons=[
            known.get(fit.recipe) or compare(fit.curve, fit.options) for fit in fits if fit.A.value is not None
        ],
        mapping=study.mapping,
        histories=histories(fits) if options.history else None,
    )
    written.append(write_ranking_csv(page.with_name("ranking.csv"), fits, ranking))
    _warn(study.warnings)
    print(_one_line(ranking.sentence))
    for path in written:
        print(path)
    return 0


def _watch(options: argparse.Namespace) -> int:
    from sweeps.decide.watch import Watch, default_path, waiting

    if not options.interval > 0:
        raise UserError(f"--interval {options.interval:g}: must be positive; give seconds")
    path = default_path(options.sources) if options.out is None else Path(options.out)
    told: set[str] = set()

    def read() -> LoadedStudy:
        """What is to be said about the sources is said once, not at every poll."""
        study = _load(options)
        for note in (*(f"source: {line}" for line in study.shown), *(f"warning: {note}" for note in study.warnings)):
            if note not in told:
                told.add(note)
                print(_one_line(note), file=sys.stderr)
        return study

    watch = Watch(read, options.sources, _fit_options(options), path)
    said: str | None = None
    started = False
    try:
        while True:
            try:
                if options.once or started or not waiting(options.sources):
                    for news in watch.poll():
                        _print_news(news, options.json)
                    started, said = True, None
                elif said is None:
                    said = "no evaluation yet; waiting for the first"
                    _warn([said])
            except UserError as error:
                # What could be read once may be unreadable while it is rewritten; at the start it is a mistake.
                if options.once or not started:
                    raise
                if str(error) != said:
                    said = str(error)
                    _warn([said])
            if options.once:
                return 0
            time.sleep(options.interval)
    except KeyboardInterrupt:
        # How one stops watching.
        return 0


def _print_news(news: News, as_json: bool) -> None:
    """One line, at once: what watches this may be a pipe."""
    snapshot, check = news.snapshot, news.snapshot.check
    if as_json:
        print(json.dumps({**snapshot.to_json(), "warning": news.warning}, allow_nan=False), flush=True)
    else:
        parts = [f"{snapshot.n} evaluations", snapshot.verdict, f"A {shown(snapshot.A, '.3f')}"]
        if check is not None:
            parts.append(
                f"came {check.actual:.3f}, predicted {check.predicted:.3f} [{check.low:.3f}, {check.high:.3f}] "
                f"at {check.made_at:.4g}{'' if check.inside else ', outside'}"
            )
        print(_one_line(f"{snapshot.recipe}: compute {snapshot.compute_end:.4g}, {', '.join(parts)}"), flush=True)
    if news.warning:
        _warn([f"{snapshot.recipe}: {news.warning}"])


def _publish(options: argparse.Namespace) -> int:
    # MLflow is slow to import and not needed elsewhere.
    from sweeps.report.publish import publish

    publish(options.sources, options.mlflow)
    return 0


def _status(options: argparse.Namespace) -> int:
    from sweeps.launch.status import counts, log_tail, overview, to_json

    study = Path(options.study)
    views = overview(study, _scheduler(study))
    if options.json:
        print(to_json(study, views))
        return 0
    print(f"{study}: {counts(views)}\n")
    print(_table(*_status_rows(views, None if options.all else ROWS)))
    for view in [view for view in views if view.state == "failed"][:FAILURES]:
        print(f"\n{view.recipe} seed {view.seed}, the end of {study}/runs/{view.run}/log.txt:")
        for line in log_tail(study, view):
            print(f"    {_one_line(line)}")
    return 0


def _status_rows(views: Sequence[MemberView], limit: int | None) -> tuple[list[str], list[list[str]]]:
    from sweeps.launch.status import STATES

    views = sorted(views, key=lambda view: STATES.index(view.state))
    rows = []
    for view in views[:limit]:
        step = "-" if view.step is None else f"{view.step}/{view.steps}" if view.steps else str(view.step)
        rate = "-" if view.pass_rate is None else f"{view.pass_rate:.3f}"
        place = " on ".join(filter(None, (view.job, view.node)))
        row = [view.state, view.recipe, str(view.seed), step, rate, str(view.attempts), place or "-"]
        rows.append([*row, view.reason or ""])
    if limit is not None and len(views) > limit:
        rows.append([f"and {len(views) - limit} more (--all)", *[""] * 7])
    return ["state", "recipe", "seed", "step", "pass rate", "attempts", "job", "why"], rows


def _scheduler(study: Path) -> Scheduler | None:
    """Of the cluster that a study was launched on, if it was, and can be asked from here."""
    from sweeps.launch.settings import LAUNCH_FILE, LaunchPlan

    if not (study / LAUNCH_FILE).is_file() or LaunchPlan.kind_of(study) != "slurm":
        return None
    from sweeps.executor.scheduler import Slurm

    try:
        return Slurm()
    except UserError as error:
        _warn([str(error)])
        return None


def _collect(options: argparse.Namespace) -> int:
    from sweeps.launch.settings import LAUNCH_FILE, LaunchPlan, report_failures, run_study
    from sweeps.launch.status import counts, overview
    from sweeps.launch.study import Study

    directory = Path(options.study)
    states = None
    if (directory / LAUNCH_FILE).is_file():
        study = Study.read(directory)
        plan = LaunchPlan.read(directory)
        if plan.kind != "slurm" and not options.wait:
            _warn([f"{directory} runs on one machine; --wait goes on with what is not done"])
        else:
            states = run_study(study, plan, detach=not options.wait, again=options.again)
    views = overview(directory, _scheduler(directory))
    print(f"{directory}: {counts(views)}\n")
    print(_table(*_status_rows(views, ROWS)))
    if any(view.step is not None for view in views):
        try:
            fits = fit_curves(load([str(directory)]).curves, workers=cores(), regions=False)
            ranking = rank(fits, workers=cores(), brief=True)
        except UserError as error:
            _warn([f"no ranking yet: {error}"])
        else:
            print(f"\n{_one_line(ranking.sentence)}\n")
            print(_table(*_ranking_rows(ranking)))
    if states is not None:
        report_failures(study, states)
    return 0


# --- text ---------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _warn(notes: Sequence[str]) -> None:
    """Warnings go to stderr, so that what is piped stays data."""
    for note in notes:
        print(f"warning: {_one_line(note)}", file=sys.stderr)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, never cut: a pipe has no width, and a terminal wraps the last column only."""
    cells = [[_one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
