"""What stands at the end of a study."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from sweeps.cli.output import show_results
from tests.paths import ROOT


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "study", tmp_path / "mine"))


@pytest.mark.full
def test_the_ranking_stands_above_the_link(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_results(study, f"sqlite:///{tmp_path}/mlflow.db")
    said = capsys.readouterr().out
    assert "scalerl+loss=dapo" in said and "P(best)" in said
    assert 0 < said.index("P(best)") < said.index("http")


def test_untracked_it_is_for_somebody_at_a_terminal(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_results(study, None)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_results(study, None)
    assert "P(best)" in capsys.readouterr().out
