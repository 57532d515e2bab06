"""Tests of runs whose code has changed since: they continue or are refused, and finished ones say so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_scalerl.train import _run_alone
from sweeps.run.journal import JOURNAL_FILE, Journal, read_journal
from sweeps.run.provenance import code_facts
from sweeps.run.spec import RunSpec
from tests.paths import ROOT
from tests.place import Place

PACKAGES = ("lightning_scalerl", "sweeps", "hydra_plugins", "conf")


@pytest.mark.full
def test_changed_code_is_refused_if_strict_and_recorded_otherwise(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "launched"]):
        subprocess.run([*git, *arguments], check=True, timeout=60)
    place = Place(tmp_path)
    environment = {**place.environment(), "PYTHONPATH": f"{checkout}:{ROOT}"}

    def train(steps: int, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lightning_scalerl.train", *place.overrides("out"), f"budget.steps={steps}", *more],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    first_run = train(2)
    assert first_run.returncode == 0, first_run.stderr[-2000:]
    (run_dir,) = (tmp_path / "out" / "runs").iterdir()
    launched = read_journal(run_dir).header["code"]
    assert launched["commit"] and launched["diff"] is None

    module = checkout / "lightning_scalerl" / "module.py"
    tripled = module.read_text().replace("loss_scale.scaled(losses.sum())", "loss_scale.scaled(3 * losses.sum())")
    assert tripled != module.read_text()
    module.write_text(tripled)
    before = (run_dir / JOURNAL_FILE).read_bytes()
    refused = train(3, "launch.strict_code=true")
    assert refused.returncode == 1
    assert "launch.strict_code: the code is not the one that this run was made with until step 2" in refused.stderr
    assert (run_dir / JOURNAL_FILE).read_bytes() == before

    warned = train(3)
    assert warned.returncode == 0, warned.stderr[-2000:]
    resume = json.loads(next(line for line in (run_dir / JOURNAL_FILE).read_text().splitlines() if '"resume"' in line))
    change_text = f"uncommitted changes none -> {resume['code']['diff']}"
    assert f"warning: from step 2 the run continues with changed code: {change_text}" in warned.stderr.splitlines()
    assert [(change.step, change.what) for change in read_journal(run_dir).code_changes] == [(2, (change_text,))]
    assert resume["code"]["commit"] == launched["commit"] and resume["code"]["files"] != launched["files"]


def test_a_finished_run_says_that_the_users_code_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_losses.py").write_text("SCALE = 1\n")
    spec = RunSpec(
        run="a", curve="c", recipe="mine", baseline="", departures={}, settings={}, seed=0, steps=2,
        config={"output_dir": str(tmp_path / "out")}, reference={}, folders=(str(folder),),
    )  # fmt: skip
    journal = Journal(tmp_path / "out" / "runs" / "a")
    journal.header(**spec.header(), code=code_facts([folder]))
    journal.record("train", 2, {})
    journal.end(2, "finished")
    journal.close()

    def never(run_dir: Path, progress: bool) -> None:
        raise AssertionError("the run is done")

    _run_alone(spec, never)
    printed = capsys.readouterr()
    assert "mine seed 0: done already" in printed.out and printed.err == ""
    (folder / "my_losses.py").write_text("SCALE = 100\n")
    _run_alone(spec, never)
    printed = capsys.readouterr()
    assert "done already" in printed.out
    assert f"warning: mine seed 0 was trained with other code: {folder} " in printed.err
    assert printed.err.endswith("study=NAME trains it with this code\n")
