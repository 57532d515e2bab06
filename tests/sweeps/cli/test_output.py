"""Tests of the output at the end of a study, and of output to closed or unusual streams."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.cli.launchers import _margin
from sweeps.cli.main import main
from sweeps.cli.output import show_results
from sweeps.errors import UserError
from sweeps.run.journal import find_runs, read_journal
from sweeps.source import load
from tests.paths import ROOT


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "study", tmp_path / "mine"))


@pytest.mark.full
def test_in_a_pipe_a_tracked_study_ends_with_the_same_lines_and_the_mlflow_links(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_results(study, f"sqlite:///{tmp_path}/mlflow.db")
    folder, ranking, next_command, command, chart, recipes, runs = capsys.readouterr().out.splitlines()
    assert folder == f"study: {study}" and ranking.startswith("ranking: ") and next_command.startswith("next: ")
    assert command.startswith("mlflow ui ") and " --host 127.0.0.1 " in command
    address = r"http://127\.0\.0\.1:5000/#/experiments/1/runs\?viewStateShareKey"
    assert re.match(rf"points, curves and bands: {address}=scaling-\w+&compareRunsMode=CHART", chart)
    assert re.match(rf"one row per recipe: +{address}=recipes-\w+&compareRunsMode=TABLE", recipes)
    assert re.match(rf"runs by rank: +{address}=ranking-\w+&compareRunsMode=TABLE", runs)


def test_in_a_pipe_a_study_ends_with_folder_ranking_and_next_command(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_results(study, None)
    folder, ranking, next_command = capsys.readouterr().out.splitlines()
    assert folder == f"study: {study}" and ranking.startswith("ranking: ") and "scalerl" in ranking
    assert next_command == f"next: scalerl rank {study}; scalerl report {study} -o {study}/report.html"


def test_a_study_of_one_seed_warns_that_the_spread_is_assumed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in find_runs(study):
        if read_journal(run).header["seed"] != 0:
            shutil.rmtree(run)
    show_results(study, None)
    captured = capsys.readouterr()
    assert "warning: one seed per recipe: the spread between seeds is assumed" in captured.err
    assert "ranking: " in captured.out


@pytest.mark.slow
def test_a_study_is_ranked_with_the_margin_of_its_launch(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def margin(*words: str) -> float:
        assert main(["rank", str(study), *words, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["margin"])

    assert margin() == 0.02
    (study / "launch.json").write_text('{"margin": 0.25}')
    assert margin() == 0.25 and margin("--margin", "0.1") == 0.1
    show_results(study, None)
    assert "within 0.25" in capsys.readouterr().out
    (study / "launch.json").write_text("[]")
    assert margin() == 0.02


@pytest.mark.parametrize("value", ["0.05", True, 0, -1.0, float("nan")])
def test_an_invalid_margin_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserError, match=r"launch\.margin: .* positive number"):
        _margin(value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_on_a_terminal_a_study_ends_with_one_table_and_the_figures_path(
    study: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", screen)
    show_results(study, None)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()
    table = [line for line in lines if re.match(r"(rank| +\d) ", line)]
    assert len(table) == 3 and "P(best)" in table[0] and all(len(line) <= width for line in table)
    assert re.match(r" +1 +scalerl +(1\.00|0\.9\d) +0\.\d{3}", table[1]) and "loss=dapo" in table[2]
    assert ("▁" in table[1]) is (width == 120)
    assert f"figure: {study / 'report_overlay.png'}" in lines and (study / "report_overlay.png").stat().st_size > 10_000
    assert lines[-1].startswith("report: scalerl report ")


def test_the_status_of_a_study_fits_the_width_of_the_terminal(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", str(study)]) == 0
    unlimited = capsys.readouterr().out
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["status", str(study)]) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()
    rows = [line for line in lines if line.startswith("finished ")]
    assert len(rows) == 4 and all(len(row) <= 40 for row in rows)
    assert "attempts" in unlimited and len(max(unlimited.splitlines(), key=len)) > 40


@pytest.mark.parametrize("words", [("status",), ("clean",), ("status", "--json")])
def test_a_closed_standard_output_is_not_an_error(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    """Python sets sys.stdout to None if the stream was closed by the shell (`>&-`)."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main([words[0], str(ROOT / "examples" / "study"), *words[1:]]) == 0


def test_no_file_gets_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    """Otherwise a child process would print into that file."""
    code = f"open_streams(); os.write(2, b'%d' % os.open({str(tmp_path)!r}, 0))"
    command = f'{sys.executable} -S -c "import os; from sweeps.terminal import open_streams; {code}" <&- >&-'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert int(done.stderr) > 2


@pytest.mark.parametrize("name", ["plain.jsonl", "caf\udce9.jsonl"])
def test_a_lone_surrogate_becomes_the_replacement_character(tmp_path: Path, name: str) -> None:
    """JSON may contain a lone surrogate, and a file name bytes that are not UTF-8. Neither can be printed."""
    rows = [
        f'{{"compute": {c}, "reward": 0.{c}, "recipe": "a\\ud800 \\ud83d\\ude00 \\\\ud800"}}\n' for c in range(1, 9)
    ]
    path = tmp_path / name
    path.write_text("".join(rows))
    (curve,) = load([path]).curves
    assert curve.recipe == "a\ufffd \U0001f600 \\ud800"
    path.write_text("".join(row.replace("recipe", "note") for row in rows))
    (curve,) = load([path]).curves
    assert curve.recipe == path.stem.replace("\udce9", "\ufffd")
