"""Tests that the notebooks of examples/ run from the first to the last cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebooks import NOTEBOOKS, run
from tests.printed import check_printed


def notebook_called(name: str) -> Path:
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    return path


def test_notebooks_have_outputs_without_paths_or_errors() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert notebook["nbformat"] == 4
        assert any(cell.get("outputs") for cell in notebook["cells"]), (
            "outputs are stored, for readers who do not run it"
        )
        assert "Traceback" not in path.read_text() and "/tmp" not in path.read_text()


def test_the_notebook_on_fitting_logs_computes_its_stored_outputs() -> None:
    """Running the cells reproduces the stored outputs: nothing depends on chance or on the machine."""
    path = notebook_called("fit_your_logs")
    computed, stored = run(path)["cells"], json.loads(path.read_text())["cells"]
    assert [cell["source"] for cell in computed] == [cell["source"] for cell in stored]
    check_printed(json.dumps(computed), json.dumps(stored))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read_rollouts", pytest.param("study_to_decision", marks=pytest.mark.full)])
def test_notebooks_that_train_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    cells = run(notebook_called(name))["cells"]
    stored = json.loads(notebook_called(name).read_text())["cells"]
    assert [len(cell.get("outputs", ())) for cell in cells] == [len(cell.get("outputs", ())) for cell in stored]
