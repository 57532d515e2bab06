"""The notebooks of examples/ run from their first cell to their last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebooks import NOTEBOOKS, run
from tests.printed import check_printed


def named(name: str) -> Path:
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    return path


def test_notebooks_have_outputs_and_nothing_of_this_machine() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert notebook["nbformat"] == 4
        assert any(cell.get("outputs") for cell in notebook["cells"]), "as somebody sees it who only looks"
        assert "Traceback" not in path.read_text() and "/tmp" not in path.read_text()


def test_fitting_logs() -> None:
    """What it shows is what the cells compute: nothing random, nothing of this machine."""
    path = named("fit_your_logs")
    computed, stored = run(path)["cells"], json.loads(path.read_text())["cells"]
    assert [cell["source"] for cell in computed] == [cell["source"] for cell in stored]
    check_printed(json.dumps(computed), json.dumps(stored))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read_rollouts", pytest.param("study_to_decision", marks=pytest.mark.full)])
def test_those_that_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    cells = run(named(name))["cells"]
    stored = json.loads(named(name).read_text())["cells"]
    assert [len(cell.get("outputs", ())) for cell in cells] == [len(cell.get("outputs", ())) for cell in stored]
