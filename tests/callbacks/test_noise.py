"""What a script of a user's shows beside what it prints."""

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

logging.basicConfig(level="INFO")  # Lightning's own is shown or not by who has set up logging before it
logging.getLogger("lightning.pytorch").setLevel("INFO")
module = ScaleRL(model=sys.argv[1], recipe="scalerl_core", overrides=sys.argv[2:])
trainer = Trainer(max_steps=2, accelerator="cpu", logger=False)
trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
assert is_progress_bar_enabled()
"""
NOISE = ("Loading weights", "litlogger", "litmodels", "LeafSpec", "in train mode", "in eval mode")


@pytest.mark.slow
def test_a_script_shows_no_noise_of_libraries(tiny_model_path: str, tmp_path: Path) -> None:
    """Its own lines and the table of the model: no advice to install, no bar of loading, no deprecation."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, tiny_model_path, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "training 2/2" in said and "Trainable params" in said
    assert [words for words in NOISE if words in said] == []


MADE_BEFORE_THE_TRAINER: dict[str, Callable[[Path], Any]] = {
    "Evaluate": lambda folder: Evaluate(),
    "RunLog": lambda folder: RunLog(folder / "run"),
    "ResumableCheckpoint": lambda folder: ResumableCheckpoint(folder / "checkpoints", every_n_steps=1),
}


@pytest.mark.parametrize("name", MADE_BEFORE_THE_TRAINER)
def test_a_trainer_made_before_the_module_gives_no_tips(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning advises to install litlogger when a Trainer is made, which the README's script does first."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").removeFilter(is_no_tip)
        caplog.set_level("INFO", package)
    Trainer(accelerator="cpu", logger=False)
    assert "litlogger" in caplog.text, "Lightning gives it otherwise"
    caplog.clear()
    Trainer(accelerator="cpu", logger=False, callbacks=[MADE_BEFORE_THE_TRAINER[name](tmp_path)])
    assert "litlogger" not in caplog.text


class AskedError(Exception):
    """In place of a run of W&B."""


def test_wandb_is_not_given_what_it_warns_of(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning passes `anonymous` though its user did not: W&B calls it deprecated, whatever its value."""
    given: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        given.append(settings)
        raise AskedError

    monkeypatch.setattr("wandb.init", init)
    for named in ({}, {"anonymous": True}):
        with pytest.raises(AskedError):
            fit(tiny_model_path, logger=WandbLogger("a", save_dir=tmp_path, offline=True, **named))
    assert ["anonymous" in settings for settings in given] == [False, True]
