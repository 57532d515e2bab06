"""Commands that decide between recipes: rank, plan, compare, decide, effects, race.

Each command reads and fits (`sweeps.cli.curves`), computes its result with `sweeps.decide`, and prints it as JSON, or
as text made by `sweeps.report`. `decide` reads final values and fits nothing.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.cli.curves import (
    check_figure,
    check_sets,
    compare_over_sets,
    compared_at_k,
    fit_all,
    fit_options,
    fit_study,
    load_sources,
    margin,
    read_and_fit,
    read_study,
    source_arguments,
)
from sweeps.cli.output import print_json, warn
from sweeps.errors import UserError
from sweeps.redact import redact
from sweeps.report.plain import one_line
from sweeps.source import LoadedStudy
from sweeps.source.places import Place

if TYPE_CHECKING:
    from sweeps.as_json import AsJson
    from sweeps.decide.by_axis import ByAxis
    from sweeps.decide.keep_discard import ChangeVerdict
    from sweeps.decide.pairwise import Comparisons
    from sweeps.decide.plan import Plan
    from sweeps.decide.rank import Ranking
    from sweeps.fit.fit import Fit


def rank_command(options: argparse.Namespace) -> None:
    """Rank recipes by asymptote, ties by efficiency, and print the tables (`scalerl rank`)."""
    _check_axes(options)
    check_sets(options)
    study = read_study(options)
    signal, aggregate = compare_over_sets(options, study)
    fits = fit_study(options, study)
    from sweeps.parallel import cores
    from sweeps.report.ranking_text import rank_text
    from sweeps.run.health import code_changes, idle_variants, optimizer_differences

    axes = _axes(options, study)
    ranking = ranked(options, fits, cores())
    ranks_by_axis = None if axes is None else _by_axis(options, axes, fits)
    at_k = compared_at_k(options, study, ranking)
    warn([*code_changes(study.runs), *optimizer_differences(study.runs), *idle_variants(study.runs)])
    if options.json:
        print_json(rank_json(ranking, ranks_by_axis, at_k, signal, aggregate))
        return
    print(rank_text(ranking, ranks_by_axis, at_k, signal, aggregate))
    if ranking.undecided:
        print(f"\nnext: scalerl plan {one_line(redact(shlex.join(source_arguments(options))))}")


def ranked(options: argparse.Namespace, fits: Sequence[Fit], workers: int) -> Ranking:
    """Rank the fitted recipes with the command's options. Details that only `--json` prints are left out without it."""
    from sweeps.decide.rank import rank

    return rank(
        fits,
        margin=margin(options),
        budget=options.budget,
        baseline=options.baseline,
        workers=workers,
        brief=not options.json,
    )


def rank_json(ranking: Ranking, *others: AsJson | None) -> dict[str, Any]:
    """Return the object of `scalerl rank --json`.

    Args:
        ranking: the ranking.
        others: results by axis, for pass@k, of signal to noise, and over sets, in this order; None for a missing one.
    """
    names = ("by_axis", "pass_at_k", "signal", "sets")
    return {
        **ranking.to_json(),
        **{name: None if one is None else one.to_json() for name, one in zip(names, others, strict=True)},
    }


def _check_axes(options: argparse.Namespace) -> None:
    if options.axes is None and options.rate is not None:
        raise UserError(f"--rate {options.rate:g}: a price of device hours, for --axes")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise UserError(f"--rate {options.rate:g}: must be a positive price of a device hour")
    if options.axes is not None and (options.min_compute is not None or options.max_compute is not None):
        raise UserError("--axes: a window on one axis cuts no other; leave out --min-compute and --max-compute")


def _axes(options: argparse.Namespace, study: LoadedStudy) -> list[str] | None:
    from sweeps.source.journals import axes_of

    if options.axes is None:
        return None
    named = [axis.strip() for axis in options.axes.split(",") if axis.strip()]
    axes = list(dict.fromkeys(named)) or (axes_of(study.runs) if study.runs else [])
    if not axes:
        raise UserError("--axes: a source that is no study of ours says no axes; name its columns: --axes step,hours")
    return axes


def _by_axis(options: argparse.Namespace, axes: Sequence[str], fits: Sequence[Fit]) -> ByAxis:
    """Rank along every axis. `fits` are used for the axis that they are on; other axes are fitted here."""
    from sweeps.decide.by_axis import by_axis

    own = fits[0].curve.axis
    fits_by_axis = {
        axis: fits if axis == own else fit_all(load_sources(options, x=axis).curves, options) for axis in axes
    }
    return by_axis(fits_by_axis, options.rate)


def plan_command(options: argparse.Namespace) -> None:
    """Print next runs, the compute for a target, the use of a budget, or a study's design (`scalerl plan`)."""
    if options.design is not None:
        _design(options)
        return
    if not options.sources:
        options.refuse("give a SOURCE, or --design with the overrides of a planned study")
    if options.like is not None or options.rate is not None:
        options.refuse("--like and --rate: only for a planned study; give --design")
    if options.output is not None and options.size is None:
        options.refuse("-o: the figure shows model sizes; name their column with --size")
    figure = check_figure(options)
    options.group = [name for name in (options.rollouts, options.difficulty, *options.group) if name is not None]
    study, fits = read_and_fit(options)
    plan, commands = planned(options, study, fits)
    warn([f"{sizes.recipe}: {note}" for sizes in plan.sizes for note in sizes.warnings])
    if figure is not None:
        from sweeps.report.frontier import write_frontier

        write_frontier(figure, plan, fits, options.size)
    if options.json:
        print_json(plan_json(plan, commands))
        return
    from sweeps.report.plan_text import plan_text

    print(plan_text(plan, commands))


def planned(options: argparse.Namespace, study: LoadedStudy, fits: Sequence[Fit]) -> tuple[Plan, list[str | None]]:
    """Make a plan with the command's options. Return it with the command of each next step (None if unknown)."""
    from sweeps.decide.plan import FactorColumns, make_plan
    from sweeps.launch.resume_command import command

    losses = any(fit.curve.lower_is_better for fit in fits)
    if losses and options.target is not None and options.target > 0 >= max(fit.curve.reward.max() for fit in fits):
        raise UserError(f"--target {options.target:g}: rewards are minus the metric; give {-options.target:g}")
    if losses and options.size is not None:
        raise UserError("--size: laws across sizes are of pass rates; give 1 - error rate, without --lower-is-better")
    factors = FactorColumns(
        size=options.size,
        rollouts=options.rollouts,
        difficulty=options.difficulty,
        more_sizes=tuple(text for text in options.sizes.split(",") if text.strip()),
    )
    plan = make_plan(fits, target=options.target, budget=options.budget, margin=margin(options), factors=factors)
    return plan, [command(step, study.runs, fits[0].curve.axis) for step in plan.next]


def plan_json(plan: Plan, commands: Sequence[str | None]) -> dict[str, Any]:
    """Return the object of `scalerl plan --json`: the plan, with the command of each next step."""
    entry = plan.to_json()
    for step, line in zip(entry["next"], commands, strict=True):
        step["command"] = line
    return entry


def _design(options: argparse.Namespace) -> None:
    """Replace this process with `scalerl train --multirun`, where `launch.design` makes it only print the cost."""
    from sweeps.cli.study_commands import train_command
    from sweeps.launch.resume_command import quoted

    if options.sources:
        options.refuse(f"--design: {options.sources[0]} is a source; give an earlier study with --like")
    words = [*options.design, f"launch.design={'json' if options.json else 'text'}"]
    for name in ("like", "rate", "margin"):
        if (value := getattr(options, name)) is not None:
            text = quoted(value) if isinstance(value, str) else value
            words.append(f"launch.{name}={text}")
    train_command(["--multirun", *words])


def compare_command(options: argparse.Namespace) -> None:
    """Print differences between pairs of recipes in reward, asymptote and compute (`scalerl compare`)."""
    options.sources, named = _sources_and_recipes(options.sources)
    study, fits = read_and_fit(options)
    from sweeps.report.comparison_text import comparisons_text

    comparisons = compared(options, study, fits, named)
    warn(comparisons.notes)
    if options.json:
        print_json(comparisons.to_json())
        return
    print(comparisons_text(comparisons, fits[0].curve))


def compared(
    options: argparse.Namespace, study: LoadedStudy, fits: Sequence[Fit], recipes: Sequence[str]
) -> Comparisons:
    """Compare two named recipes; with one name, all others with it; without names, all others with the baseline."""
    from sweeps.decide.pairwise import compare, why_incomparable
    from sweeps.source.held_out import passes_by

    curve = fits[0].curve
    pairs = _pairs(recipes, fits)
    compared_recipes = {recipe for pair in pairs for recipe in pair}
    left_out = [fit for fit in fits if len(recipes) < 2 and fit.recipe not in compared_recipes]
    notes = [f"{reason}; left out" for fit in left_out if (reason := why_incomparable(fit)) is not None]
    found = compare(
        fits,
        pairs,
        budget=options.budget,
        margin=margin(options),
        passes=passes_by(study.runs, curve.axis, curve.metric),
    )
    return replace(found, notes=(*notes, *found.notes))


def _sources_and_recipes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into sources and, at the end, up to two recipes: words that are neither sources nor URLs."""
    sources = list(words)
    named: list[str] = []
    while len(sources) > 1 and len(named) < 2 and _is_recipe(sources[-1]):
        named.insert(0, sources.pop())
    return sources, named


def _is_recipe(word: str) -> bool:
    # Whether a folder exists is not tested, because one without runs may have a recipe's name.
    return not Place(word).is_known and "://" not in word


def _pairs(named: Sequence[str], fits: Sequence[Fit]) -> list[tuple[str, str]]:
    """Return the pairs of recipes to compare, see `compared`.

    Raises:
        UserError: there is no recipe to compare with.
    """
    from sweeps.decide.pairwise import why_incomparable
    from sweeps.decide.rank import baseline_of

    if len(named) == 2:
        return [(named[0], named[1])]
    recipes = [fit.recipe for fit in fits]
    if named and named[0] not in recipes:
        raise UserError(f"{named[0]}: no source with runs, and no such recipe; the sources have {', '.join(recipes)}")
    if len(recipes) < 2:
        raise UserError(f"{recipes[0]}: the only recipe; give a source with another one to compare it with")
    # A recipe without a forecast is an error only if it was named, or if nothing is left to compare.
    comparable = [fit.recipe for fit in fits if why_incomparable(fit) is None]
    against = named[0] if named else baseline_of(fits) or recipes[0]
    if not named and against not in comparable:
        against = next(iter(comparable), against)
    pairs = [(recipe, against) for recipe in recipes if recipe != against]
    return [pair for pair in pairs if pair[0] in comparable] or pairs


def decide_command(options: argparse.Namespace) -> None:
    """Print whether to keep a change, judged from the final values of its runs (`scalerl decide`)."""
    choice = decided(options)
    warn(choice.notes)
    if options.json:
        print_json(choice.to_json())
        return
    from sweeps.report.comparison_text import choice_text

    print(choice_text(choice))


def decided(options: argparse.Namespace) -> ChangeVerdict:
    """Read the table of the options and decide between its two recipes."""
    from sweeps.source.run_values import FAILED, read_run_values

    failed = FAILED if options.failed is None else options.failed.split(",")
    table = read_run_values(
        Path(options.source), options.by, options.y, options.status, failed, options.lower_is_better
    )
    from sweeps.decide.keep_discard import keep_or_discard

    return keep_or_discard(table, options.baseline, options.candidate, options.margin, options.lower_is_better)


def effects_command(options: argparse.Namespace) -> None:
    """Print the effect of each axis of a grid on asymptote and compute, over the whole grid (`scalerl effects`)."""
    figure = check_figure(options)
    _, fits = read_and_fit(options)
    from sweeps.decide.effects import effects

    grid = effects(fits, options.interaction)
    notes = grid.notes if grid.effects else ()  # if there are no effects, the notes are the result, printed below
    warn([*notes, *(f"{recipe}: has no usable fit; left out" for recipe in grid.left_out)])
    if figure is not None:
        if not grid.effects:
            raise UserError(f"-o {figure}: nothing to draw; {grid.notes[0]}")
        from sweeps.report.drawing import write_figure
        from sweeps.report.forest import forest_figure

        write_figure(forest_figure(grid), figure)
    if options.json:
        print_json(grid.to_json())
        return
    from sweeps.report.comparison_text import effects_text

    print(effects_text(grid))


def race_command(options: argparse.Namespace) -> None:
    """Replay a race over the sources, and print which recipes need not run to the budget (`scalerl race`)."""
    from sweeps.decide.rules import Rules

    rules = Rules(
        budget=options.budget,
        p_ahead=options.p_ahead,
        looks=options.looks,
        first=options.first,
        growth=options.growth,
        loss=options.loss,
    )
    study = read_study(options)
    earliest = min((float(level) for curve in study.curves for level in curve.compute if level > 0), default=0.0)
    if options.budget < earliest:
        raise UserError(
            f"--budget {options.budget:.4g}: the earliest evaluation is at compute {earliest:.4g}; give the compute of "
            "a whole run"
        )
    from sweeps.decide.race import run_race, run_states
    from sweeps.parallel import cores

    states = run_states(study.curves, study.runs)
    race = run_race(
        study.curves,
        rules,
        options=fit_options(options),
        ended=states.ended,
        workers=cores(),
        failed=states.failed,
        lost=states.lost,
    )
    warn(study.all_warnings)
    if options.json:
        print_json(race.to_json())
        return
    from sweeps.report.comparison_text import race_text

    print(race_text(race))
