"""What a command prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.errors import UserError
from sweeps.report.plain import one_line, table

if TYPE_CHECKING:
    from sweeps.decide.rank import Ranking


def print_json(value: Any) -> None:
    """To stdout; raises ValueError rather than print NaN or infinity."""
    print(json.dumps(value, indent=2, allow_nan=False))


def warn(notes: Sequence[str]) -> None:
    """Warnings go to stderr, so that what is piped stays data."""
    for note in notes:
        print(f"warning: {one_line(note)}", file=sys.stderr)


def show_results(study: Path, tracking: str | None) -> None:
    """What a finished study has come to: its ranking, and below it the link to the chart in MLflow if it is tracked.

    Without either a chart or somebody at a terminal to read it, the ranking is not computed.
    """
    if tracking:
        show_chart(study, tracking)
    elif sys.stderr.isatty():
        show_ranking(study)


def show_chart(study: Path, tracking: str) -> None:
    """The ranking, the finished chart in MLflow and the link to it; a study that cannot be fitted yet is no failure."""
    # MLflow is slow to import and optional.
    from sweeps.report.publish import publish

    try:
        publish([str(study)], tracking, print_ranking)
    except UserError as error:
        print(f"no chart in MLflow yet: {error}", file=sys.stderr)


def print_ranking(ranking: Ranking) -> None:
    """Its sentence, and the table."""
    from sweeps.report.text import ranking_rows, reward_rows

    print(one_line(ranking.sentence))
    if ranking.undecided and ranking.resolution is not None:
        print(one_line(ranking.resolution.sentence))
    if ranking.rewards is not None and len(ranking.rewards.rows) > 1:
        print(f"{one_line(ranking.rewards.sentence)}\n")
        print(table(*reward_rows(ranking.rewards)))
        print("\nby asymptote:")
    else:
        print()
    print(table(*ranking_rows(ranking)))


def show_ranking(study: Path) -> None:
    """The ranking so far, if there is one."""
    # SciPy: a study that is not there, or has no evaluation yet, is answered without.
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import fit_curves
    from sweeps.parallel import cores
    from sweeps.source import load

    try:
        fits = fit_curves(load([str(study)]).curves, workers=cores(), regions=False)
        ranking = rank(fits, workers=cores(), brief=True)
    except UserError as error:
        warn([f"no ranking yet: {error}"])
    else:
        print()
        print_ranking(ranking)
