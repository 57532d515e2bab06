"""Tests that the page of the replication study agrees with its committed curves."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from replication import FASTER, HIGHER, SAME, UNDECIDED, verdict

PAGE = ROOT / "docs" / "measured" / "replication.md"


def verdicts(page: Path) -> dict[tuple[str, ...], str]:
    """Return the page's verdict on each finding of the paper."""
    (section,) = [part.split("<!-- /findings -->")[0] for part in page.read_text().split("<!-- findings -->")[1:]]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return {(number, *row[:2]): row[2] for number, row in enumerate(rows)}  # type: ignore[misc]


@pytest.mark.full
def test_the_page_is_reproduced_from_committed_curves(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "replication.py"), "--page", str(page)]
    done = forked.run(command, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    recomputed, committed = verdicts(page), verdicts(PAGE)
    assert list(recomputed) == list(committed)
    # Rounding differs between processors, so a finding at the border of two verdicts may change.
    assert sum(recomputed[key] != committed[key] for key in recomputed) <= 2
    assert sum(text != "undecided" for text in recomputed.values()) >= 3
    assert (tmp_path / "replication" / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("claim", "low", "high", "expected"),
    [
        (HIGHER, 0.001, 0.4, "**replicates**"),
        (HIGHER, -0.4, -0.001, "**the other way round**"),
        (HIGHER, -0.1, 0.019, "**does not show**"),
        (HIGHER, -0.1, 0.021, UNDECIDED),
        (SAME, -0.019, 0.019, "**replicates**"),
        (SAME, 0.001, 0.01, "**replicates**"),
        (SAME, 0.001, 0.1, "**the ceiling moves**"),
        (SAME, -0.1, -0.001, "**the ceiling moves**"),
        (SAME, -0.1, 0.01, UNDECIDED),
        (FASTER, 0.1, 0.99, "**replicates**"),
        (FASTER, 1.01, math.inf, "**the other way round**"),
        (FASTER, 0.5, math.inf, UNDECIDED),
        (FASTER, math.nan, math.nan, UNDECIDED),
    ],
)
def test_verdicts_of_intervals(claim: str, low: float, high: float, expected: str) -> None:
    assert verdict(claim, low, high) == expected
