"""The examples run as they stand."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest

from sweeps.run.journal import read_journal
from tests import forked
from tests.paths import ROOT

RATE = "eval/heldout/pass_rate"


def own_run(folder: Path, steps: int) -> str:
    command = [sys.executable, str(ROOT / "examples" / "own_run.py"), "--batches", "200", "--steps", str(steps)]
    environment = {**os.environ, "SCALERL_CACHE": str(folder / "cache"), "WANDB_SILENT": "true"}
    done = forked.run(command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_run_of_ones_own(tmp_path: Path) -> None:
    """Three loggers, Lightning's callbacks, a task and a loss that are not ours; a second call goes on."""
    own_run(tmp_path, 10)
    said = own_run(tmp_path, 15)
    output = tmp_path / "outputs" / "own_run"
    view = read_journal(output)
    assert [record.step for record in view.of_kind("eval")] == [0, 5, 10, 15] and view.status == "finished"
    rates = {record.step: record.metrics[RATE] for record in view.of_kind("eval")}
    assert f"pass rate {rates[15]:.3f} after 15 steps" in said
    best = max(rates, key=lambda step: (rates[step], -step) if step else (-1.0, 0))
    assert f"best: {rates[best]:.3f} in {output}/best/step={best}.ckpt" in said
    logged = {}
    for path in sorted(output.glob("csv/*/metrics.csv")):
        logged |= {int(line["step"]): float(line[RATE]) for line in csv.DictReader(path.open()) if line[RATE]}
    assert logged == rates
    assert len(list(output.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert "PatientCISPO" in (output / "semantics.json").read_text()
