"""Print JSON, warnings, tables, rankings and chart links, for all commands."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.errors import UserError
from sweeps.report.plain import one_line, table
from sweeps.terminal import Cell, Column, fitted, is_interactive

if TYPE_CHECKING:
    from sweeps.decide.rank import Ranking
    from sweeps.fit.fit import Fit


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON to stdout and flush it; with `indent=None` on one line.

    All commands print their `--json` here. The format is described by the command's file in sweeps/schemas.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    print(json.dumps(value, indent=indent, allow_nan=False), flush=True)


def warn(notes: Sequence[str]) -> None:
    """Print warnings to stderr, so that stdout has only data."""
    for note in notes:
        print(f"warning: {one_line(note)}", file=sys.stderr)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. On a terminal it is fitted to the width and states are coloured; elsewhere it is complete."""
    if not is_interactive(sys.stdout):
        print(table([column.name for column in columns], rows))
        return
    from rich.console import Console

    from sweeps.launch.observer import STYLES

    console = Console(highlight=False)
    coloured: list[list[Cell]] = [[(row[0], STYLES.get(row[0], "")), *row[1:]] for row in rows]
    console.print(fitted(columns, coloured, console.width))


def show_results(study: Path, tracking: str | None) -> None:
    """Print the ranking of a finished study and, if it is tracked, the link to its chart in MLflow."""
    if tracking:
        show_chart(study, tracking)
    else:
        show_ranking(study)


def show_chart(study: Path, tracking: str) -> None:
    """Print the ranking, publish the chart in MLflow, and print its link; or print why there is no chart yet."""
    # MLflow is slow to import and optional.
    from sweeps.report.publish import publish

    try:
        publish([str(study)], tracking, partial(_show_outcome, study))
    except UserError as error:
        print(f"no chart in MLflow yet: {error}", file=sys.stderr)


def print_ranking(study: Path, fits: Sequence[Fit], ranking: Ranking) -> None:
    """Print the fits' warnings and the ranking; on a terminal also a figure's path and the report's command."""
    from sweeps.fit.fit import warnings_of

    warn(warnings_of(fits))
    if not is_interactive(sys.stdout):
        from sweeps.report.ranking_text import ranking_text

        print(ranking_text(ranking))
        return
    from rich.console import Console

    from sweeps.report.watch_screen import mean_curve, ranking_table

    console = Console(highlight=False)
    console.print(one_line(ranking.sentence), "", markup=False, sep="\n")
    console.print(ranking_table(ranking, {fit.recipe: mean_curve(fit.curve) for fit in fits}, console.width))
    print()
    if (figure := _figure(study, fits, ranking)) is not None:
        print(f"figure: {one_line(str(figure))}")
    place = shlex.quote(str(study))
    print(f"report: scalerl report {place} -o {place}/report.html")


def _figure(study: Path, fits: Sequence[Fit], ranking: Ranking) -> Path | None:
    """Draw the study in one figure in its folder, and return the path; None if it cannot be drawn or written."""
    path = study / "report_overlay.png"
    try:
        # Imported here, because Matplotlib takes a second.
        from sweeps.report.drawing import write_figure
        from sweeps.report.overlay import overlay_figure

        write_figure(overlay_figure([fit.curve for fit in fits], fits, ranking), path)
    except (ImportError, OSError) as error:
        warn([f"no figure: {error}"])
        return None
    return path


def show_ranking(study: Path) -> None:
    """Fit a study and print its ranking, or a warning if it cannot be ranked yet."""
    # Imported here, because they need SciPy.
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import fit_curves
    from sweeps.launch.settings import LaunchSettings
    from sweeps.parallel import cores
    from sweeps.source import load

    try:
        loaded = load([str(study)])
        fits = fit_curves(loaded.curves, workers=cores())
        ranking = rank(fits, margin=LaunchSettings.margin_of(study), workers=cores(), brief=True)
    except UserError as error:
        warn([f"no ranking yet: {error}"])
        return
    warn(loaded.warnings)
    _show_outcome(study, fits, ranking)


def _show_outcome(study: Path, fits: Sequence[Fit], ranking: Ranking) -> None:
    """Print the ranking. Without a terminal, print the study's folder, its outcome in one line, and next commands."""
    from sweeps.fit.fit import warnings_of

    if is_interactive(sys.stderr):
        print()
        print_ranking(study, fits, ranking)
        return
    warn(warnings_of(fits))
    place = shlex.quote(str(study))
    print(f"study: {place}")
    print(f"ranking: {one_line('; '.join(ranking.outcome))}")
    print(f"next: scalerl rank {place}; scalerl report {place} -o {place}/report.html")
