"""Write the report's files: one self-contained page, its figures, and the ranking as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sweeps.curve import Curve
from sweeps.decide.at_k import AtK
from sweeps.decide.next_run import Choice, find_next_steps, group_alternatives, make_choice
from sweeps.decide.rank import Ranking
from sweeps.errors import UserError
from sweeps.fit.compare import Comparison, compare
from sweeps.fit.constants import MIN_COMPUTES
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.history import GROWTH, Snapshot, history
from sweeps.fit.sensitivity import sensitivity
from sweeps.launch.resume_command import command
from sweeps.parallel import parallel_map
from sweeps.run.journal import JournalView
from sweeps.run.rollouts import pick_examples
from sweeps.search.race_log import RaceRecord
from sweeps.source.held_out import prompt_shares

if TYPE_CHECKING:
    from sweeps.decide.aggregate import Aggregate
    from sweeps.decide.signal import Signal
    from sweeps.report.page import OtherStudy

# Approximate number of fits per recipe in `histories`, which take most of a report's time.
_PREFIXES = 12

# Characters with which spreadsheets begin a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_report(
    path: str | Path,
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView] = (),
    title: str | None = None,
    warnings: Sequence[str] = (),
    comparisons: Sequence[Comparison] = (),
    mapping: Sequence[str] = (),
    histories: Mapping[str, Sequence[Snapshot]] | None = None,
    workers: int = 1,
    beside: OtherStudy | None = None,
    at_k: AtK | None = None,
    signal: Signal | None = None,
    aggregate: Aggregate | None = None,
) -> list[Path]:
    """Write the page, and next to it each figure as `<stem>_<figure>.svg`, `.png` and `.pdf`.

    This also computes the runs to make next, and the sensitivity of every recipe whose A is identifiable or open: about
    half a second per recipe.

    Args:
        path: path of the HTML file; its folder is created.
        curves, fits: one per recipe, of the same recipes.
        ranking: ranking of these fits.
        runs: journals behind the curves, for mechanism counters and provenance; empty for other sources.
        title: name of the study; None for the file's name.
        warnings: warnings about the sources as a whole.
        comparisons: comparisons of families of curves, one per recipe; if empty, those of the ranking.
        mapping: one line per source on how it was read.
        histories: snapshots by recipe, see `histories`; None for none.
        workers: number of processes that share the refits, see `sweeps.parallel`.
        beside: another study to show next to this one; None for none.
        at_k: the ranking by pass@k, to show next to `ranking`; None for none.
        signal, aggregate: comparisons of the study's evaluation sets; None for none.

    Returns:
        Paths of the written files, the page first.

    Raises:
        UserError: a file cannot be written.
    """
    from sweeps.report.drawing import panels_of, pdf, png, svg, without_glyph_warnings
    from sweeps.report.figures import (
        asymptotes_figure,
        curves_figure,
        history_figure,
        performance_figure,
        profile_figure,
        residuals_figure,
    )
    from sweeps.report.overlay import overlay_figure
    from sweeps.report.page import NAMED, Findings, render
    from sweeps.report.prompts_figure import prompts_figure
    from sweeps.report.thinning import points_as_dots

    page = Path(path)
    settlements = [
        find_next_steps(_choice(group, fits, ranking)) for group in group_alternatives(fits) if len(group) > 1
    ]
    steps = [step for settlement in settlements for step in settlement.steps]
    commands = [(step, command(step, runs, curves[0].axis)) for step in steps]
    with_asymptote = [fit for fit in fits if fit.verdict in NAMED]
    findings = Findings(
        sensitivity=dict(
            zip((fit.recipe for fit in with_asymptote), parallel_map(sensitivity, with_asymptote, workers), strict=True)
        ),
        settlements=settlements,
        comparisons=comparisons or ranking.comparisons,
        histories=histories or {},
        mapping=mapping,
        commands={step: line for step, line in commands if line is not None},
        rollouts=pick_examples((str(view.header.get("recipe", "")), view.path.parent) for view in runs),
        races=_races(runs),
        at_k=at_k,
        prompts=prompt_shares(runs, curves[0].axis, curves[0].metric),
        signal=signal,
        aggregate=aggregate,
    )
    figures = {
        "overlay": overlay_figure(curves, fits, ranking),
        "beside": None if beside is None else overlay_figure(beside.curves, beside.fits, beside.ranking),
        "curves": curves_figure(curves, fits, ranking),
        "asymptotes": asymptotes_figure(fits, ranking),
        "profile": profile_figure(fits, ranking),
        "residuals": residuals_figure(fits, ranking),
        "prompts": prompts_figure(findings.prompts, ranking, curves[0].unit),
        "performance": performance_figure(aggregate, ranking),
        "history": history_figure(findings.histories, ranking, curves[0].unit),
    }
    figures_drawn = {name: figure for name, figure in figures.items() if figure is not None}
    files: dict[Path, bytes] = {page: b""}
    documents, dots, panels = {}, {}, {}
    with without_glyph_warnings():
        for name, figure in figures_drawn.items():
            files[page.with_name(f"{page.stem}_{name}.pdf")] = pdf(figure)
            # The layout is final now. Computing it again for each format would take most of the time.
            figure.set_layout_engine("none")
            files[page.with_name(f"{page.stem}_{name}.png")] = png(figure)
            panels[name] = panels_of(figure)
            # The SVG comes last, because `points_as_dots` replaces the markers that the PNG shows.
            dots[name] = points_as_dots(figure)
            documents[name] = svg(figure)
            files[page.with_name(f"{page.stem}_{name}.svg")] = documents[name].encode("utf-8", errors="replace")
    html = render(
        title=title or page.stem,
        curves=curves,
        fits=fits,
        ranking=ranking,
        runs=runs,
        documents=documents,
        warnings=warnings,
        findings=findings,
        dots=dots,
        panels=panels,
        beside=beside,
    )
    files[page] = html.encode("utf-8", errors="replace")
    for target, content in files.items():
        _write(target, content)
    return list(files)


def _compare_families(fit: Fit) -> Comparison:
    return compare(fit.curve, fit.options)


def _choice(group: Sequence[Fit], fits: Sequence[Fit], ranking: Ranking) -> Choice:
    """Return the choice between a group of recipes. For a group of all recipes, the ranking's standing is reused."""
    if ranking.standing is not None and list(group) == list(fits):
        return Choice(group, ranking.standing)
    return make_choice(group, ranking.margin)


def _races(runs: Sequence[JournalView]) -> list[RaceRecord]:
    """Read the race records of the runs' studies. Studies without looks or pruned trials are left out."""
    studies = dict.fromkeys(view.path.parent.parent.parent for view in runs)
    records = [RaceRecord.read(study) for study in studies]
    return [record for record in records if record.looks or record.pruned]


def all_comparisons(fits: Sequence[Fit], ranking: Ranking, workers: int = 1) -> list[Comparison]:
    """Compare families of curves for every recipe whose A has a value. Comparisons in the ranking are reused."""
    known = {comparison.recipe: comparison for comparison in ranking.comparisons}
    with_asymptote = [fit for fit in fits if fit.A.value is not None]
    others = [fit for fit in with_asymptote if fit.recipe not in known]
    known |= dict(zip((fit.recipe for fit in others), parallel_map(_compare_families, others, workers), strict=True))
    return [known[fit.recipe] for fit in with_asymptote]


def histories(fits: Sequence[Fit]) -> dict[str, list[Snapshot]]:
    """Fit every recipe at growing compute, about a dozen times, for `write_report`. This takes a second per recipe."""
    result = {}
    for fit in fits:
        computes = np.unique(fit.curve.compute[fit.curve.compute > 0])
        growth = GROWTH
        if len(computes) > MIN_COMPUTES:
            growth = max(growth, float(computes[-1] / computes[MIN_COMPUTES - 1]) ** (1 / (_PREFIXES - 1)))
        result[fit.recipe] = history(fit.curve, fit.options, growth, pool=fit.pool)
    return result


def write_ranking_csv(path: str | Path, fits: Sequence[Fit], ranking: Ranking) -> Path:
    """Write a CSV row per recipe, in the ranking's order. Open bounds and unidentifiable values are empty cells.

    A text that a spreadsheet would read as a formula gets an apostrophe in front.

    Raises:
        UserError: the file cannot be written.
    """
    by_recipe = {fit.recipe: fit for fit in fits}
    text = StringIO()
    rows = [_csv_row(by_recipe[entry.recipe], ranking, at) for at, entry in enumerate(ranking.ranking)]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["recipe"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _quote_formula(value) for name, value in row.items()} for row in rows)
    _write(Path(path), text.getvalue().encode("utf-8", errors="replace"))
    return Path(path)


def _csv_row(fit: Fit, ranking: Ranking, index: int) -> dict[str, Any]:
    """Return the row of a recipe, by column. `index` is the recipe's position in the ranking."""
    entry = ranking.ranking[index]
    shared, budget, unknown = entry.B_at_shared_A, entry.R_at_budget, Interval(None, None, None)
    return {
        "recipe": fit.recipe,
        "rank": entry.rank,
        "verdict": fit.verdict,
        "p_best": entry.p_best,
        "tied_with_best": entry.tied_with_best,
        **_cells("A", fit.A),
        "A_total_low": fit.A_total[0],
        "A_total_high": fit.A_total[1],
        **_cells("B", fit.B),
        **_cells("efficiency", entry.efficiency or unknown),
        **_cells("efficiency_half", entry.efficiency_half or unknown),
        **_cells("ratio", entry.ratio or unknown),
        **_cells("B_at_shared_A", shared or unknown),
        **_cells("C_mid_at_shared_A", entry.C_mid_at_shared_A or unknown),
        **_cells("C_mid", fit.C_mid),
        "R0": fit.R0,
        "R0_source": fit.R0_source,
        **_cells("R_at_budget", budget or unknown),
        "family": fit.family,
        "rmse": fit.rmse,
        "r2": fit.r2,
        "n": fit.n,
        "seeds": fit.seeds,
        "extrapolation_error": fit.extrapolation_error,
        "compute_axis": fit.curve.axis,
        "reason": entry.reason,
    }


def _quote_formula(value: Any) -> Any:
    """Quote a text that a spreadsheet would evaluate, because labels and reasons may come from other people's files."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def _cells(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
