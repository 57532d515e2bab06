"""`scalerl layouts`: splits by overrides, and by what a live run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_scalerl.member.identify import plan_members
from sweeps.cli import main as cli
from sweeps.run.journal import Journal

QUICK = ("batch.prompts=2", "batch.completions=2", "model.batches=2")


def live_run(folder: Path, *, live: bool = True, steps: int = 12) -> Path:
    """The journal of a run that took 2 s a step, half of them idle, beside two engines without a moment of rest."""
    (spec,) = plan_members([[*QUICK, "driver=live", "driver.generators=2"]])
    spec.write(folder)
    now = iter([float(2 * number) for number in range(100)])
    journal = Journal(folder, clock=lambda: next(now))
    journal.header(run=spec.run, recipe=spec.recipe, seed=0, ranks=1)
    metrics = {"train/completion_tokens": 10.0}
    if live:
        metrics |= {"live/trainer_idle": 0.5, "live/generator_idle": 0.02, "live/publish_s": 0.01}
        metrics |= {"live/engine0_idle": 0.0, "live/engine1_idle": 0.04}
    for step in range(1, steps + 1):
        journal.record("train", step, metrics)
    journal.close()
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["layouts", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_live_run_says_what_its_rates_come_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = live_run(tmp_path / "run")
    shown = said(capsys, "--run", str(run), "--devices", "3", "--all")
    lines = shown.splitlines()
    assert str(run) in lines[0] and "2 prompts of 2 completions" in lines[0] and "10 tokens" in lines[0]
    assert {line.split()[0] for line in lines[3:]} == {"1", "2"} and len(lines) == 5
    found = json.loads(said(capsys, "--run", str(run), "--devices", "3", "--json"))
    best = found["layouts"][0]
    (own,) = [each for each in found["layouts"] if each["generator_devices"] == 2]
    assert own["step_s"] == pytest.approx(2, rel=0.05) and own["trainer_idle"] == pytest.approx(0.5, abs=0.03)
    assert best["step_s"] <= own["step_s"] and found["rates"]["publish_s"] == 0.01
    assert best["device_hours_of_1000_steps"] == pytest.approx(best["step_s"] * 3 * 1000 / 3600)


def test_overrides_have_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("cost_model.train_token_s=9", "cost_model.source=a_guess")
    shown = said(capsys, *QUICK, *slow, "--devices", "5", "--tensor-parallel", "1", "2", "--tokens", "6", "--all")
    assert "rates: a_guess" in shown and "6 tokens each" in shown
    first = shown.splitlines()[3].split()
    assert first[:3] == ["1", "+", "4"], "training takes the time, so all but one train"
    assert {line.split()[3] for line in shown.splitlines()[3:]} == {"1", "2"}


@pytest.mark.slow
def test_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live_run(tmp_path / "virtual", live=False)
    live_run(tmp_path / "short", steps=2)
    cases = {
        ("--devices", "1"): "--devices: 1 cannot be split",
        ("--devices", "4", "--tensor-parallel", "4"): "--devices: 4 cannot be split",
        ("--run", str(tmp_path / "virtual"), "--devices", "4"): "driver=live",
        ("--run", str(tmp_path / "short"), "--devices", "4"): "no live run of some steps",
        ("--run", str(tmp_path), "--devices", "4"): str(tmp_path),
        ("--run", str(tmp_path / "short"), "--devices", "4", "seed=1"): "--run has the configuration",
        ("no_such=1", "--devices", "4"): "no_such",
    }
    for words, message in cases.items():
        assert cli.main(["layouts", *words]) == 1
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err
