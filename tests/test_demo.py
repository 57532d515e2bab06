"""End-to-end test of the demo script with a small study."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.paths import ROOT

ROWS = 'hydra.sweeper.rows=[[],["variant=loss_dapo"]]'


@pytest.mark.slow
def test_the_demo_writes_report_ranking_and_mlflow_runs(tmp_path: Path) -> None:
    small = [
        "model.batches=30",
        "model.width=32",
        "model.layers=1",
        "budget.steps=48",
        "batch.prompts=4",
        "batch.completions=4",
        "evaluation.samples=1",
        "evaluation.prompts=40",
        "evaluation.every_n_steps=6",
    ]
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), *small, ROWS, "seed=0,1"]
    environment = {**os.environ, "SCALERL_CACHE": str(tmp_path / "cache")}
    done = forked.run(command, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    output = tmp_path / "outputs" / "demo"
    assert re.search(r"Expected: about \d+ minutes", done.stdout)
    assert re.search(r"#/experiments/\d+/runs\?viewStateShareKey=", done.stdout)
    assert "mlflow" in done.stdout and "--backend-store-uri" in done.stdout
    page = (output / "report.html").read_text()
    assert "Learned: " in done.stdout and (output / "report_overlay.png").is_file()
    assert "<svg" in page and not re.search(r'(src|href)="https?://', page)
    rows = list(csv.DictReader((output / "ranking.csv").open()))
    assert {row["recipe"] for row in rows} == {"scalerl", "scalerl+loss=dapo"}
    assert {"recipe", "verdict", "A", "A_low", "A_high", "B", "C_mid", "p_best"} <= set(rows[0])
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    members = [run for run in runs if run.data.tags.get("kind") == "member"]
    assert len(members) == 4
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags["recipe"] for run in runs if run.data.tags.get("kind") == "fit"} == {
        "scalerl",
        "scalerl+loss=dapo",
    }
    # Nine evaluations per member. The one at compute 0 is not published: it has no place on a logarithmic axis.
    points = [client.get_metric_history(run.info.run_id, "eval/heldout/pass_rate") for run in members]
    assert [len(history) for history in points] == [8] * 4
