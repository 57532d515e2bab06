"""What a script of a user's shows beside what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import SMALL

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
