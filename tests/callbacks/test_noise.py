"""Log lines and warnings of other libraries that a user's script must not show."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger

from lightning_scalerl import Evaluate, ResumableCheckpoint, RunLog
from lightning_scalerl.callbacks.base import is_no_tip
from tests.helpers import SMALL, fit

SCRIPT = """
import logging
import sys

from lightning.pytorch import Trainer
from transformers.utils.logging import is_progress_bar_enabled

from lightning_scalerl import RolloutDataModule, ScaleRL
from tests.helpers import CountingTask

logging.basicConfig(level="INFO")  # so that Lightning's own log lines are shown
logging.getLogger("lightning.pytorch").setLevel("INFO")
module = ScaleRL(model=sys.argv[1], recipe="scalerl_core", overrides=sys.argv[2:])
trainer = Trainer(max_steps=2, accelerator="cpu", logger=False)
trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
assert is_progress_bar_enabled()
"""
NOISE = ("Loading weights", "litlogger", "litmodels", "LeafSpec", "in train mode", "in eval mode")


@pytest.mark.full
def test_a_script_shows_no_noise_of_libraries(tiny_model_path: str, tmp_path: Path) -> None:
    """The output has the script's lines and the model table, but no installation tips, loading bars or deprecations."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, tiny_model_path, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "training 2/2" in output and "Trainable params" in output
    assert [text for text in NOISE if text in output] == []


MADE_BEFORE_THE_TRAINER: dict[str, Callable[[Path], Any]] = {
    "Evaluate": lambda folder: Evaluate(),
    "RunLog": lambda folder: RunLog(folder / "run"),
    "ResumableCheckpoint": lambda folder: ResumableCheckpoint(folder / "checkpoints", every_n_steps=1),
}


@pytest.mark.parametrize("name", MADE_BEFORE_THE_TRAINER)
def test_a_trainer_made_before_the_module_gives_no_tips(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning advises to install litlogger when a Trainer is created, which the README's script does first."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").removeFilter(is_no_tip)
        caplog.set_level("INFO", package)
    Trainer(accelerator="cpu", logger=False)
    assert "litlogger" in caplog.text, "without our callbacks Lightning gives the tip"
    caplog.clear()
    Trainer(accelerator="cpu", logger=False, callbacks=[MADE_BEFORE_THE_TRAINER[name](tmp_path)])
    assert "litlogger" not in caplog.text


class InitCalledError(Exception):
    """Raised instead of starting a W&B run."""


def test_wandb_does_not_get_a_deprecated_setting(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning passes `anonymous` even if its user did not. W&B warns that it is deprecated, whatever its value."""
    calls: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        calls.append(settings)
        raise InitCalledError

    monkeypatch.setattr("wandb.init", init)
    for options in ({}, {"anonymous": True}):
        with pytest.raises(InitCalledError):
            fit(tiny_model_path, logger=WandbLogger("a", save_dir=tmp_path, offline=True, **options))
    assert ["anonymous" in settings for settings in calls] == [False, True]
