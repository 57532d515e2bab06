"""Tests of races in the report and in MLflow, during the race and after `scalerl publish`."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.cli.main import main
from sweeps.launch.study import Study
from sweeps.launch.tracked import TrackingObserver
from sweeps.search.race import LiveRace
from sweeps.tracking import Tracker
from tests.sweeps.report.test_report import words
from tests.sweeps.search.runners import AXIS, Runners
from tests.sweeps.search.test_live_race import LIVE, LOSERS, four, raced


@pytest.mark.full
def test_the_report_shows_stopped_recipes_with_reasons(tmp_path: Path) -> None:
    raced(tmp_path / "study", four(), rules=LIVE)
    assert main(["report", str(tmp_path / "study"), "-o", str(tmp_path / "report.html")]) == 0
    text = re.sub(r"\s+", " ", words((tmp_path / "report.html").read_text()))
    assert "A race to 1 virtual device hours per run: 2 recipes stopped in 8 looks, the last at 0.86" in text
    table = text.partition("Stopped at P(ahead)")[2].partition("Forecasts at 1 as they stood")[0]
    assert all(f" {recipe.removeprefix('scalerl+')} a=0.7" in table for recipe in LOSERS), (
        "labels are short, as in every table"
    )


@pytest.mark.full
def test_the_report_of_a_dry_run_says_would_be_stopped(tmp_path: Path) -> None:
    raced(tmp_path / "study", four(), rules=replace(LIVE, mode="dry_run"))
    assert main(["report", str(tmp_path / "study"), "-o", str(tmp_path / "report.html")]) == 0
    assert "2 recipes would be stopped (a dry run)" in words((tmp_path / "report.html").read_text())


@pytest.mark.full
def test_mlflow_shows_stopped_members_with_reasons(schema: Path, tmp_path: Path) -> None:
    shutil.copy(schema, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    study = Study(tmp_path / "study", four())
    race = LiveRace(study, LIVE)
    states = study.run(Runners(slots=8), [TrackingObserver(study, uri, AXIS)], decider=race)
    tracker = Tracker(uri, "study", AXIS)
    experiment = tracker.prepare()

    def tracked() -> dict[str, tuple[str, str | None]]:
        runs = tracker.client.search_runs([experiment], "tags.kind = 'member'", max_results=100)
        tags = {run.data.tags["scalerl.run"]: run for run in runs}
        return {name: (run.info.status, run.data.tags.get("stopped.reason")) for name, run in tags.items()}

    expected = {
        run: ("KILLED", state.reason) if state.state == "stopped" else ("FINISHED", None)
        for run, state in states.items()
    }
    assert tracked() == expected and {status for status, _ in expected.values()} == {"KILLED", "FINISHED"}
    assert main(["publish", str(tmp_path / "study"), "--mlflow", uri]) == 0
    assert tracked() == expected, "publishing afterwards changes nothing"
    # A stopped member that was continued to its end is no longer shown as stopped.
    continued = Study(tmp_path / "study", four())
    continued.run(Runners(slots=8), [TrackingObserver(continued, uri, AXIS)])
    assert set(tracked().values()) == {("FINISHED", None)}
    (parent,) = tracker.client.search_runs([experiment], "tags.kind = 'sweep'")
    assert "race.jsonl" in {file.path for file in tracker.client.list_artifacts(parent.info.run_id)}


@pytest.mark.full
def test_publish_removes_the_stop_reason_of_continued_runs(schema: Path, tmp_path: Path) -> None:
    """A later launch continued these runs, so MLflow must no longer call them stopped."""
    shutil.copy(schema, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    raced(tmp_path / "study", four())
    tracker = Tracker(uri, "study", AXIS)

    def reasons() -> int:
        assert main(["publish", str(tmp_path / "study"), "--mlflow", uri]) == 0
        runs = tracker.client.search_runs([tracker.prepare()], "tags.kind = 'member'", max_results=100)
        return sum("stopped.reason" in run.data.tags for run in runs)

    assert reasons() > 0
    Study(tmp_path / "study", four()).run(Runners(slots=8), [])
    assert reasons() == 0
