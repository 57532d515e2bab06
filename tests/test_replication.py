"""The replication study's page says what its committed curves say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "replication.md"


def verdicts(page: Path) -> dict[tuple[str, ...], str]:
    """What the page says of each finding of the paper."""
    (section,) = [part.split("<!-- /findings -->")[0] for part in page.read_text().split("<!-- findings -->")[1:]]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return {(number, *row[:2]): row[2] for number, row in enumerate(rows)}  # type: ignore[misc]


@pytest.mark.slow
def test_the_page_is_made_from_committed_curves(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "replication.py"), "--page", str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    made, committed = verdicts(page), verdicts(PAGE)
    assert list(made) == list(committed)
    # Another processor rounds otherwise: one that lies on a border may fall to its other side.
    assert sum(made[key] != committed[key] for key in made) <= 2
    assert sum(said != "undecided" for said in made.values()) >= 4
    assert (tmp_path / "replication" / "curves.png").stat().st_size > 10_000
