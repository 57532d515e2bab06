"""Progress output: the training bar, the creation of the base model, and the model table."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_scalerl.callbacks.progress import StepProgress
from lightning_scalerl.callbacks.trainer import ParameterSummary
from sweeps.run.journal import read_journal
from sweeps.terminal import Bar
from tests.helpers import fit


@pytest.mark.slow
def test_the_bar_shows_steps_pass_rate_reward_and_compute(
    tiny_model_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_scalerl.callbacks.progress.Bar", partial(Bar, every_s=0.0))
    fit(tiny_model_path, tmp_path, 3, checkpoint_every=3, enable_progress_bar=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("training")]
    assert lines[0] == "training 0/3"
    number = r"\d\.\d{3}"
    spent = r"\d\.\d\de\+\d\d FLOPs, (?!0\.00 )\d\S* device (?:seconds|minutes)"
    assert re.fullmatch(rf"training 0/3: heldout {number} \(step 0\), {spent}", lines[1])
    evaluated = rf"heldout {number} \(step 0\)"
    pattern = rf"training 2/3: {evaluated}, pass rate {number}, reward -?{number}, {spent}(?:, \d+ s left)?"
    assert any(re.fullmatch(pattern, line) for line in lines), lines
    last = read_journal(tmp_path).records[-1].metrics
    assert lines[-1].startswith(f"training 3/3: heldout {last['eval/heldout/pass_rate']:.3f} (step 3)")
    fit(tiny_model_path, tmp_path, 5, resume=True, enable_progress_bar=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("training")]
    assert lines[0] == "training 3/5" and lines[-1].startswith("training 5/5: ")
    assert not any("Epoch" in line for line in lines)


@pytest.mark.parametrize(
    ("reward", "printed"), [(0.12345, "0.123"), (-999.5, "-999.500"), (123456.789, "123457"), (1e300, "1e+300")]
)
def test_a_large_reward_is_printed_in_few_digits(reward: float, printed: str) -> None:
    texts: list[str] = []
    bar = StepProgress()
    bar._bar = SimpleNamespace(update=lambda step, *parts: texts.extend(parts))  # type: ignore[assignment]
    bar.on_record("train", 1, {"train/reward": reward, "compute/device_hours": 1.0, "compute/flops": 1.0})
    assert texts[0] == f"reward {printed}"


@pytest.mark.slow
def test_a_users_own_bar_is_kept(tiny_model_path: str) -> None:
    class Own(TQDMProgressBar):
        pass

    def bars(**options: Any) -> list[str]:
        callbacks = fit(tiny_model_path, steps=1, **options).trainer.callbacks  # type: ignore[attr-defined]
        return [
            type(callback).__name__ for callback in callbacks if isinstance(callback, StepProgress | TQDMProgressBar)
        ]

    assert bars(enable_progress_bar=True, callbacks=[Own()]) == ["Own"]
    assert bars(enable_progress_bar=True) == ["StepProgress"]
    assert bars() == []


def test_creating_the_base_model_shows_progress(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_scalerl.task.arithmetic_base import arithmetic_base_model, is_arithmetic_base

    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    path = arithmetic_base_model(width=32, layers=1, batches=3, batch_size=4)
    lines = [line for line in capfd.readouterr().err.splitlines() if "base model" in line]
    assert lines == ["making the base model (once) 0/3", "making the base model (once) 3/3"]
    assert is_arithmetic_base(path) and not is_arithmetic_base(str(tmp_path))


def test_the_model_table_omits_flops_of_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning counts FLOPs on an example input. Our module has none, because it samples its own data."""
    columns = [("Name", ["policy"]), ("Params", ["27.8 K"]), ("FLOPs", ["0"])]
    with caplog.at_level("INFO", logger="lightning.pytorch.callbacks.model_summary"):
        ParameterSummary.summarize(columns, 27_800, 27_800, 0.1, {"train": 1, "eval": 0}, 0)
    assert "Trainable params" in caplog.text and "flops" not in caplog.text.lower()


def test_the_model_table_of_a_run_has_no_flops(
    tiny_model_path: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table is logged, or printed if Rich is installed. Lightning's own table would end with a line on FLOPs."""
    with caplog.at_level("INFO", logger="lightning.pytorch.callbacks.model_summary"):
        fit(tiny_model_path, steps=1, enable_model_summary=True)
    output = "".join([caplog.text, *capfd.readouterr()])
    assert "Trainable params" in output
    # Only at the end of a line: an error report of `logging` quotes source lines that contain the same words.
    assert not [line for line in output.lower().splitlines() if line.rstrip(" 0123456789:").endswith("total flops")]
