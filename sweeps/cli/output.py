"""Printing of JSON, warnings, rankings and chart links, shared by the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.errors import UserError
from sweeps.report.plain import one_line

if TYPE_CHECKING:
    from sweeps.decide.rank import Ranking


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout; raise ValueError rather than print NaN or infinity."""
    print(json.dumps(value, indent=2, allow_nan=False))


def warn(notes: Sequence[str]) -> None:
    """Print warnings to stderr, so that piped stdout stays data."""
    for note in notes:
        print(f"warning: {one_line(note)}", file=sys.stderr)


def show_results(study: Path, tracking: str | None) -> None:
    """Print a finished study's ranking, followed by the link to the chart in MLflow if it is tracked.

    Without tracking the ranking is computed only if stderr is a terminal.
    """
    if tracking:
        show_chart(study, tracking)
    elif sys.stderr.isatty():
        show_ranking(study)


def show_chart(study: Path, tracking: str) -> None:
    """Print the ranking, publish the chart in MLflow and print its link; a study that cannot be fitted yet is noted."""
    # MLflow is slow to import and optional.
    from sweeps.report.publish import publish

    try:
        publish([str(study)], tracking, print_ranking)
    except UserError as error:
        print(f"no chart in MLflow yet: {error}", file=sys.stderr)


def print_ranking(ranking: Ranking) -> None:
    """Print a ranking as the end of a study shows it."""
    from sweeps.report.ranking_text import ranking_text

    print(ranking_text(ranking))


def show_ranking(study: Path) -> None:
    """Fit a study and print its ranking; print a warning if it cannot be ranked yet."""
    # Imported late, for they need SciPy.
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import fit_curves
    from sweeps.launch.settings import LaunchSettings
    from sweeps.parallel import cores
    from sweeps.source import load

    try:
        fits = fit_curves(load([str(study)]).curves, workers=cores(), regions=False)
        ranking = rank(fits, margin=LaunchSettings.margin_of(study), workers=cores(), brief=True)
    except UserError as error:
        warn([f"no ranking yet: {error}"])
    else:
        print()
        print_ranking(ranking)
