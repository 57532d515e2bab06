"""Commands about curves: fit, rank, plan, compare, effects, race, report, watch, publish.

Sources are read before anything that fits, ranks or draws is imported, so that a wrong file fails at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.cli.output import print_json, print_ranking, warn
from sweeps.errors import UserError
from sweeps.fit.names import METHOD
from sweeps.report.plain import one_line, table
from sweeps.run.journal import JournalView, read_journal
from sweeps.source import LoadedStudy, load
from sweeps.terminal import counted

if TYPE_CHECKING:
    from sweeps.decide.by_axis import ByAxis
    from sweeps.decide.plan import Plan
    from sweeps.decide.watch import News
    from sweeps.fit.fit import Fit
    from sweeps.fit.points import FitOptions


def _check_window(options: argparse.Namespace) -> None:
    """Check the compute window of the command line before any data are read.

    Raises:
        UserError: the window is empty.
    """
    low, high = options.min_compute, options.max_compute
    if low is not None and high is not None and low >= high:
        raise UserError(f"--min-compute {low:g} is not below --max-compute {high:g}; nothing lies between them")


def _check_place(path: Path) -> None:
    """Check before the fits that the output file can be written; the probe file and folders are removed again.

    Raises:
        UserError: the file cannot be written.
    """
    made: list[Path] = []
    try:
        if path.exists():
            if path.is_dir() or path.is_file():  # a pipe is opened once, when there is something to say
                path.open("ab").close()
            return
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        path.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _fit_options(options: argparse.Namespace) -> FitOptions:
    from sweeps.fit.points import FitOptions

    return FitOptions(
        r0=options.r0,
        min_compute=options.min_compute,
        max_compute=options.max_compute,
        family=getattr(options, "family", "sigmoid").replace("all", "sigmoid"),
        robust=options.robust,
    )


def _load(options: argparse.Namespace, read: Callable[[Path], JournalView] = read_journal) -> LoadedStudy:
    factors = [name for name in (options.size, *options.group) if name is not None]
    return load(
        options.sources,
        metric=options.metric,
        x=options.x,
        y=options.y,
        by=options.by,
        factors=factors,
        seed_from=options.seed_from,
        read=read,
    )


def _fitted(options: argparse.Namespace, regions: bool = False) -> tuple[LoadedStudy, list[Fit]]:
    """Read the sources and fit every recipe; `regions`, about a megabyte per recipe, are needed only by figures."""
    _check_window(options)
    study = _load(options)
    if getattr(options, "margin", 0.0) is None and len(options.sources) == 1:
        from sweeps.launch.settings import LaunchSettings

        options.margin = LaunchSettings.margin_of(Path(options.sources[0]))
    for line in study.shown:
        print(f"source: {one_line(line)}", file=sys.stderr)
    how = _fit_options(options)
    if getattr(options, "method", "posterior") == METHOD:
        from sweeps.fit.published import fit_literal

        return study, [fit_literal(curve, how) for curve in study.curves]
    from sweeps.fit.fit import fit_curves
    from sweeps.parallel import cores

    return study, fit_curves(study.curves, how, workers=cores(), regions=regions)


def fit_command(options: argparse.Namespace) -> int:
    """Fit a curve per recipe and print its parameters, intervals and verdict (`scalerl fit`)."""
    if options.sensitivity and options.method == METHOD:
        raise UserError(f"--sensitivity: refits with intervals; leave out --method {METHOD}")
    study, fits = _fitted(options)
    from sweeps.fit.compare import compare
    from sweeps.fit.fit import shown
    from sweeps.fit.sensitivity import sensitivity, summary
    from sweeps.report.text import refit_row

    warn(study.warnings)
    comparisons = [compare(fit.curve, fit.options) for fit in fits] if options.family == "all" else []
    refitted = [sensitivity(fit.curve, fit.options) for fit in fits] if options.sensitivity else []
    if options.json:
        objects = [fit.to_json() for fit in fits]
        for entry, refits in zip(objects, refitted, strict=False):
            entry["sensitivity"] = [row.to_json() for row in refits]
        for entry, found in zip(objects, comparisons, strict=False):
            entry["families"] = found.to_json()
        print_json(objects)
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
    print(table(head, rows))
    bounds = "the published procedure, no intervals" if options.method == METHOD else "95% intervals, within these runs"
    print(f"\ncompute: {fits[0].curve.unit}; reward: {fits[0].curve.metric}; {bounds}")
    for fit in fits:
        print(f"{one_line(fit.recipe)}: {fit.reason}{_r0_effect(fit)}")
        warn([f"{fit.recipe}: {note}" for note in fit.warnings])
    for found in comparisons:
        print(f"\n{one_line(found.recipe)}: {found.sentence}")
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
        print(table(["family", "A", "AICc above least", "error on later compute", "R^2"], lines))
    for fit, refits in zip(fits, refitted, strict=False):
        print(f"\n{one_line(fit.recipe)}: {summary(refits)}")
        print(table(["setting", "A", "shift", "B", "C_mid", "n", "verdict"], [refit_row(row) for row in refits]))
    return 0


def _r0_effect(fit: Fit) -> str:
    """Describe how A and B change with a shifted R0; return "" if A is not identifiable or the effect is not known."""
    effect = fit.R0_effect
    if effect is None or not fit.identifiable:
        return ""
    sides = zip(("lower", "higher"), effect.A, effect.B, strict=True)
    moved = [f"{side} A {a:.3f}, B {b:.3g}" for side, a, b in sides if a is not None and b is not None]
    return f"; with R0 {effect.step:g} {'; '.join(moved)}" if moved else ""


def _shape_names(fits: Sequence[Fit]) -> list[str]:
    """Return all shape parameter names of the fitted family, also those that no fit could identify."""
    from sweeps.fit.family import FAMILIES

    return list(FAMILIES[fits[0].family].names)


def rank_command(options: argparse.Namespace) -> int:
    """Rank recipes by asymptote, ties by efficiency, and print the tables (`scalerl rank`)."""
    _check_axes(options)
    study, fits = _fitted(options)
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import shown
    from sweeps.parallel import cores
    from sweeps.run.health import code_changes, idle_variants

    axes = _axes(options, study)
    ranking = rank(
        fits,
        margin=options.margin,
        budget=options.budget,
        baseline=options.baseline,
        workers=cores(),
        brief=not options.json,
    )
    sided = None if axes is None else _by_axis(options, axes, fits)
    warn([*study.warnings, *code_changes(study.runs)])
    if options.json:
        print_json({**ranking.to_json(), "by_axis": None if sided is None else sided.to_json()})
        return 0
    print_ranking(ranking)
    if sided is not None:
        from sweeps.report.text import axis_rows

        print(f"\n{one_line(sided.sentence)}\n")
        print(table(*axis_rows(sided)))
    if ranking.leave_one_out:
        print(f"\nagainst {one_line(ranking.baseline or '')}:")
        rows = [
            [entry.recipe, shown(entry.delta_a, "+.3f"), shown(entry.delta_b, "+.3g"), entry.reason]
            for entry in ranking.leave_one_out
        ]
        print(table(["variant", "delta A", "delta B at shared A", "note"], rows))
    for note in idle_variants(study.runs):
        warn([note])
    return 0


def _check_axes(options: argparse.Namespace) -> None:
    """Check `--axes`, `--rate` and the compute window against each other before any data are read."""
    if options.axes is None and options.rate is not None:
        raise UserError(f"--rate {options.rate:g}: a price of device hours, for --axes")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise UserError(f"--rate {options.rate:g}: must be a positive price of a device hour")
    if options.axes is not None and (options.min_compute is not None or options.max_compute is not None):
        raise UserError("--axes: a window on one axis cuts no other; leave out --min-compute and --max-compute")


def _axes(options: argparse.Namespace, study: LoadedStudy) -> list[str] | None:
    """Return the compute axes to rank along; None if `--axes` was not given."""
    from sweeps.source.journals import axes_of

    if options.axes is None:
        return None
    named = [axis.strip() for axis in options.axes.split(",") if axis.strip()]
    axes = list(dict.fromkeys(named)) or (axes_of(study.runs) if study.runs else [])
    if not axes:
        raise UserError("--axes: a source that is no study of ours says no axes; name its columns: --axes step,hours")
    return axes


def _by_axis(options: argparse.Namespace, axes: Sequence[str], fits: Sequence[Fit]) -> ByAxis:
    """Rank on every axis; `fits` are reused for the axis that they are along, the others are fitted here."""
    from sweeps.decide.by_axis import by_axis
    from sweeps.fit.fit import fit_curves
    from sweeps.parallel import cores

    found: dict[str, Sequence[Fit]] = {}
    for axis in axes:
        if axis == fits[0].curve.axis:
            found[axis] = fits
            continue
        options.x = axis
        found[axis] = fit_curves(_load(options).curves, _fit_options(options), workers=cores(), regions=False)
    return by_axis(found, options.rate)


def plan_command(options: argparse.Namespace) -> int:
    """Print the compute that a target or budget takes and the next runs, or a study's design (`scalerl plan`)."""
    if options.design is not None:
        return _design(options)
    if not options.sources:
        options.refuse("give a SOURCE, or --design with the overrides of a study to come")
    if options.target is None and options.budget is None:
        options.refuse("one of the arguments --target --budget --design is required")
    if options.like is not None or options.rate is not None:
        options.refuse("--like and --rate: of a study to come; give --design")
    if options.output is not None:
        if options.size is None:
            options.refuse("-o: the figure is of model sizes; name their column with --size")
        from sweeps.report.drawing import check_format

        check_format(Path(options.output))
        _check_place(Path(options.output))
    options.group = [name for name in (options.rollouts, options.difficulty, *options.group) if name is not None]
    study, fits = _fitted(options)
    from sweeps.decide.plan import Factors, make_plan
    from sweeps.report.text import sections

    more = tuple(text for text in options.sizes.split(",") if text.strip())
    factors = Factors(options.size, options.rollouts, options.difficulty, more)
    plan = make_plan(fits, options.target, options.budget, options.margin, factors)
    from sweeps.launch.again import command

    commands = [command(step, study.runs, fits[0].curve.axis) for step in plan.next]
    warn(study.warnings)
    if options.output is not None:
        _draw_frontier(plan, fits, options.size, Path(options.output))
    if options.json:
        entry = plan.to_json()
        for step, line in zip(entry["next"], commands, strict=True):
            step["command"] = line
        print_json(entry)
        return 0
    blocks = []
    for heading, head, rows in sections(plan):
        blocks.append(one_line(heading) + ("\n" + table(head, rows) if rows else ""))
    print("\n\n".join(blocks))
    if any(commands):
        # Not in a table: a line to paste must stay whole.
        print("\nto paste:")
        for line in filter(None, commands):
            print(f"  {one_line(line)}")
    for sizes in plan.sizes:
        warn([f"{sizes.recipe}: {note}" for note in sizes.warnings])
    return 0


def _draw_frontier(plan: Plan, fits: Sequence[Fit], column: str, path: Path) -> None:
    """Draw the best model size over budgets, for the plan's only recipe.

    Raises:
        UserError: there are several recipes, or no sigmoid across the sizes.
    """
    from sweeps.decide.power_law import sized
    from sweeps.report.drawing import write_figure
    from sweeps.report.frontier import frontier_figure

    if len(plan.sizes) != 1:
        names = ", ".join(sizes.recipe for sizes in plan.sizes)
        raise UserError(f"{path}: the figure is of one recipe's sizes, and there are {names}; give a source with one")
    sizes = plan.sizes[0]
    if sizes.joint is None:
        raise UserError(
            f"{path}: no figure, for a size of {sizes.recipe} has too few points for a curve; evaluate more"
        )
    by_size = sized(fits, column)[sizes.recipe]
    write_figure(frontier_figure(sizes.joint, sizes.frontier, list(by_size.values())), path)


def _design(options: argparse.Namespace) -> int:
    """Replace this process by `scalerl train --multirun` with `launch.design` set, which only prints the cost."""
    from sweeps.cli.study_commands import train_command

    if options.sources:
        options.refuse(f"--design: {options.sources[0]} is a source; an earlier study is named with --like")
    words = [*options.design, f"launch.design={'json' if options.json else 'text'}"]
    for name in ("like", "rate", "margin"):
        if (value := getattr(options, name)) is not None:
            text = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if isinstance(value, str) else value
            words.append(f"launch.{name}={text}")
    return train_command(["--multirun", *words])


def compare_command(options: argparse.Namespace) -> int:
    """Print differences of pairs of recipes in reward, asymptote and compute (`scalerl compare`)."""
    options.sources, named = _sources_and_recipes(options.sources)
    study, fits = _fitted(options)
    from sweeps.decide.pairwise import compare
    from sweeps.fit.fit import shown
    from sweeps.source.held_out import passes_by

    pairs = _pairs(named, fits)
    passes = passes_by(study.runs, fits[0].curve.axis, fits[0].curve.metric)
    found = compare(fits, pairs, options.budget, options.margin, passes)
    warn(study.warnings)
    if options.json:
        print_json(found.to_json())
        return 0
    columns = {
        "recipe": [row.recipe for row in found.rows],
        "against": [row.other for row in found.rows],
        "compute": [f"{row.compute:.4g}" for row in found.rows],
        "reward": [shown(row.R, "+.3f") for row in found.rows],
    }
    if any("prompt" in row.paired for row in found.rows):
        columns["on other prompts"] = [shown(row.R_on_prompts, "+.3f") for row in found.rows]
    if found.budget is not None:
        columns[f"at {found.budget:.4g}"] = [shown(row.R_at_budget, "+.3f") for row in found.rows]
    columns["asymptote"] = [shown(row.A, "+.3f") for row in found.rows]
    columns["times the compute"] = [shown(row.ratio, ".2f") for row in found.rows]
    print(table(list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]))
    together = f"; bounds hold for all {len(found.rows)} together" if found.simultaneous else ""
    print(f"\ncompute: {fits[0].curve.unit}; reward: {fits[0].curve.metric}; 95% intervals, over all seeds{together}")
    for row in found.rows:
        print(one_line(row.sentence))
    warn(found.notes)
    return 0


def _sources_and_recipes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into sources and up to two recipes after them: words that are no existing path and no URL."""
    sources = list(words)
    named: list[str] = []
    while len(sources) > 1 and len(named) < 2 and not Path(sources[-1]).exists() and "://" not in sources[-1]:
        named.insert(0, sources.pop())
    return sources, named


def _pairs(named: Sequence[str], fits: Sequence[Fit]) -> list[tuple[str, str]]:
    """Return the pairs to compare: the two named, else all others against the one named or against the baseline.

    Raises:
        UserError: there is no recipe to compare with.
    """
    from sweeps.decide.rank import baseline_of

    if len(named) == 2:
        return [(named[0], named[1])]
    recipes = [fit.recipe for fit in fits]
    against = named[0] if named else baseline_of(fits) or recipes[0]
    if against not in recipes:
        raise UserError(f"{against}: no such source, and no such recipe; the sources have {', '.join(recipes)}")
    if len(recipes) < 2:
        raise UserError(f"{recipes[0]}: the only recipe; give a source with another one to compare it with")
    return [(recipe, against) for recipe in recipes if recipe != against]


def effects_command(options: argparse.Namespace) -> int:
    """Print the effect of each axis of a grid on asymptote and compute, over the whole grid (`scalerl effects`)."""
    if options.output is not None:
        from sweeps.report.drawing import check_format

        check_format(Path(options.output))
        _check_place(Path(options.output))
    study, fits = _fitted(options)
    from sweeps.decide.effects import effects
    from sweeps.fit.fit import shown

    found = effects(fits, options.interaction)
    warn(study.warnings)
    if options.output is not None:
        from sweeps.report.drawing import write_figure
        from sweeps.report.forest import forest_figure

        write_figure(forest_figure(found), Path(options.output))
    if options.json:
        print_json(found.to_json())
        return 0
    head = ["axis", "choice", "against", "recipes", "asymptote", "P(raises it)", "times the compute to half"]
    rows = [
        [
            each.axis,
            each.level,
            each.against,
            str(each.cells),
            shown(each.A, "+.3f"),
            f"{each.p_positive:.2f}",
            shown(each.compute, ".2f"),
        ]
        for each in found.effects
    ]
    print(table(head, rows))
    print(
        f"\non average over {found.cells} recipes, drawn to zero as far as the others are small; 95% intervals; "
        f"recipes differ by {found.own:.3f} beyond that"
    )
    if found.next:
        print("\nto run next, by what of the main effects' variance goes:")
        axes = list(found.next[0].levels)
        print(table([*axes, "gain"], [[*each.levels.values(), f"{each.gain:.0%}"] for each in found.next]))
    warn([*found.notes, *(f"{recipe}: nothing can be read off it; left out" for recipe in found.left)])
    return 0


def race_command(options: argparse.Namespace) -> int:
    """Replay a race over the sources: print which recipes need not run to the budget (`scalerl race`)."""
    from sweeps.decide.rules import Rules

    rules = Rules(options.budget, options.p_ahead, options.looks, options.first, options.growth)
    _check_window(options)
    study = _load(options)
    for line in study.shown:
        print(f"source: {one_line(line)}", file=sys.stderr)
    from sweeps.decide.race import run_race
    from sweeps.fit.fit import shown
    from sweeps.parallel import cores

    runs: dict[str, dict[str, str]] = {}  # by recipe and seed, how it stands
    for view in study.runs:
        runs.setdefault(str(view.header.get("recipe")), {})[str(view.header.get("seed"))] = view.status
    # With --size and --group a label goes on behind the recipe's.
    of = {each.recipe: runs.get(each.recipe, runs.get(each.recipe.split(" ")[0], {})) for each in study.curves}
    failed = [recipe for recipe, found in of.items() if set(found.values()) == {"failed"}]
    ended = [recipe for recipe, found in of.items() if "running" not in found.values()]
    lost = {recipe: [seed for seed, status in found.items() if status == "failed"] for recipe, found in of.items()}
    race = run_race(study.curves, rules, _fit_options(options), ended, cores(), failed, lost)
    warn(study.warnings)
    if options.json:
        print_json(race.to_json())
        return 0
    head = ["recipe", "stopped at", "best", "ahead", f"reward at {rules.budget:.4g}", "spent"]
    rows = [
        [
            each.recipe,
            "-" if each.stopped_at is None else f"{each.stopped_at:.4g}",
            "-" if each.p_best is None else f"{each.p_best:.2f}",
            "-" if each.p_ahead is None else f"{each.p_ahead:.2f}",
            "-" if each.R is None else shown(each.R, ".3f"),
            f"{each.spent:.4g}",
        ]
        for each in race.runners
    ]
    print(table(head, rows))
    print(
        f"\ncompute: {race.unit}; best, ahead: chance of being best and of ending ahead of the favourite, at the last "
        "look that the recipe was part of"
    )
    for each in race.runners:
        print(f"{one_line(each.recipe)}: {one_line(each.reason)}")
    print(one_line(race.sentence))
    return 0


def report_command(options: argparse.Namespace) -> int:
    """Write the HTML report with its figures and `ranking.csv` (`scalerl report`)."""
    page = Path(options.output)
    _check_place(page)
    study, fits = _fitted(options, regions=True)
    # Matplotlib takes a second to import: only where something is drawn.
    from sweeps.decide.rank import rank
    from sweeps.fit.compare import compare
    from sweeps.report.write import histories, write_ranking_csv, write_report

    ranking = rank(fits, margin=options.margin, budget=options.budget, baseline=options.baseline)
    first = options.sources[0]
    title = options.title or (first.rpartition("#")[2] if first.startswith("mlflow:") else Path(first).resolve().stem)
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
    warn(study.warnings)
    print(one_line(ranking.sentence))
    for path in written:
        print(path)
    return 0


def watch_command(options: argparse.Namespace) -> int:
    """Fit again as evaluations arrive, and print a line for each new snapshot until interrupted (`scalerl watch`)."""
    from sweeps.decide.watch import Watch, default_path, waiting
    from sweeps.run.tail import Tails

    if not options.interval > 0:
        raise UserError(f"--interval {options.interval:g}: must be positive; give seconds")
    path = default_path(options.sources) if options.out is None else Path(options.out)
    told: set[str] = set()
    journals = Tails({"train": sys.maxsize})  # only evaluations are fitted

    def read() -> LoadedStudy:
        """Load the sources; print each note about them once, not at every poll."""
        study = _load(options, journals)
        for note in (*(f"source: {line}" for line in study.shown), *(f"warning: {note}" for note in study.warnings)):
            if note not in told:
                told.add(note)
                print(one_line(note), file=sys.stderr)
        return study

    _check_window(options)
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
                    warn([said])
            except UserError as error:
                # What could be read once may be unreadable while it is rewritten; at the start it is a mistake.
                if options.once or not started:
                    raise
                if str(error) != said:
                    said = str(error)
                    warn([said])
            if options.once:
                return 0
            time.sleep(options.interval)
    except KeyboardInterrupt:
        # How one stops watching.
        return 0


def _print_news(news: News, as_json: bool) -> None:
    """Print one snapshot on one line and flush, for stdout may be a pipe."""
    from sweeps.fit.fit import shown

    snapshot, check = news.snapshot, news.snapshot.check
    if as_json:
        print(json.dumps({**snapshot.to_json(), "warning": news.warning}, allow_nan=False), flush=True)
    else:
        parts = [counted(snapshot.n, "evaluation"), snapshot.verdict, f"A {shown(snapshot.A, '.3f')}"]
        if check is not None:
            parts.append(
                f"came {check.actual:.3f}, predicted {check.predicted:.3f} [{check.low:.3f}, {check.high:.3f}] "
                f"at {check.made_at:.4g}{'' if check.inside else ', outside'}"
            )
        print(one_line(f"{snapshot.recipe}: compute {snapshot.compute_end:.4g}, {', '.join(parts)}"), flush=True)
    if news.warning:
        warn([f"{snapshot.recipe}: {news.warning}"])


def publish_command(options: argparse.Namespace) -> int:
    """Log fits, bands and figures to MLflow and print the link to the chart (`scalerl publish`)."""
    # MLflow is slow to import and not needed elsewhere.
    from sweeps.report.publish import publish

    publish(options.sources, options.mlflow)
    return 0
