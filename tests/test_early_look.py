"""Tests of the early-look benchmark: how a look is judged, its tables, and the committed page."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import early_look
from benchmarks.early_look import Look, counts, misleading, most_misleading, spent_by_both, summary
from sweeps.curve import make_curve
from tests.paths import ROOT

# Recipe a is ahead at the look with three of four seeds, but ends lower.
MISLED = Look(("a", "b"), 0.25, np.array([0.2, 0.1, -0.1, 0.1]), np.full(4, -0.05), None, 0.6, 8.0)
RIGHT = Look(("a", "c"), 0.25, np.full(4, 0.1), np.full(4, 0.03), "a", 0.97, 8.0)


def test_a_look_is_judged_by_the_final_values() -> None:
    assert (MISLED.ahead, MISLED.winner, MISLED.misled_seeds, MISLED.matters) == ("a", "b", 3, True)
    assert (RIGHT.ahead, RIGHT.winner, RIGHT.misled_seeds) == ("a", "a", 0)
    tie = replace(MISLED, end=np.full(4, -0.01))
    assert not tie.matters and most_misleading([tie, RIGHT, MISLED]) is MISLED
    summary_text = summary([MISLED, RIGHT, tie])
    assert "2 pairs" in summary_text and "in 1 (with one seed per recipe in 3 of 8)" in summary_text
    assert "in 1 pairs, none of them wrongly" in summary([MISLED, RIGHT])
    assert "in 2 pairs, 1 of them wrongly" in summary([replace(MISLED, named="a"), RIGHT])


def test_tables_count_pairs_and_list_the_misleading_ones() -> None:
    rows = [line.split(" | ") for line in counts([MISLED, RIGHT, replace(MISLED, end=np.full(4, -0.01))])]
    assert rows[2][1:] == ["all, 3", "last value of one seed each (12 cases)", "6", "6", "- |"]
    assert rows[7][1:] == ["end more than 0.02 apart, 2", "`scalerl rank`, four seeds", "1", "0", "1 |"]
    (row,) = misleading([MISLED, RIGHT])[2:]
    assert row == "| `a` | `b` | 0.075 | 3 | 0.050 | undecided, P = 0.60 for the one ahead |"


def test_a_pair_is_compared_at_compute_that_all_its_runs_reached() -> None:
    compute = [0.0, 1.0, 2.0, 0.0, 1.0, 3.0]
    curves = [
        make_curve(name, compute, [0.1, 0.2, 0.3, 0.1, 0.2, 0.5], ["0", "0", "0", "1", "1", "1"]) for name in ("a", "b")
    ]
    assert spent_by_both(*curves) == 2.0
    assert early_look.by_seed(curves[0], 2.0, 1).tolist() == [0.3, 0.2]
    assert early_look.by_seed(curves[0], 3.0, 2) == pytest.approx([0.25, 0.35])


@pytest.mark.full
def test_the_page_is_reproduced_from_the_committed_curves(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.early_look", "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, timeout=1200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert page.read_text() == early_look.PAGE.read_text() and page.with_suffix(".png").stat().st_size > 10_000
