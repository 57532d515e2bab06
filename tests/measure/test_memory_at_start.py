"""A run that does not fit its device is refused before it allocates memory. A run that fits reports its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.session import memory

SIZES = ["scale=tiny", "batch.prompts=2", "batch.completions=2"]


def trainer() -> Trainer:
    return Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


@pytest.fixture
def set_device_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the apparent memory of the device, in bytes."""
    return lambda size: monkeypatch.setattr(memory, "device_bytes", lambda device: size)


def test_a_run_that_does_not_fit_is_refused_before_models_are_placed(
    tiny_model_path: str, set_device_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device_bytes(2**20)
    placing = "lightning_scalerl.session.setup.place_policy"
    monkeypatch.setattr(placing, lambda models: pytest.fail("the model was placed"))
    message = r"memory: this run takes about .* fullest device, which has 0\.0 \(.*Adam.s moments .*\); it would"
    with pytest.raises(ConfigurationError, match=message):
        trainer().fit(ScaleRL(tiny_model_path, "scalerl", SIZES), datamodule=RolloutDataModule("arithmetic"))


def test_a_run_that_fits_reports_its_memory(tiny_model_path: str, set_device_bytes: Any) -> None:
    set_device_bytes(80 * 2**30)
    module = ScaleRL(tiny_model_path, "scalerl", SIZES)
    trainer().fit(module, datamodule=RolloutDataModule("arithmetic"))
    assert module.began[0].startswith("memory: about 0.") and "of 80.0 GiB on the fullest device (" in module.began[0]
    assert "its keys and values" in module.began[0]


def test_runs_on_a_cpu_are_not_checked(tiny_model_path: str) -> None:
    assert memory.device_bytes(torch.device("cpu")) is None
    module = ScaleRL(tiny_model_path, "scalerl", SIZES)
    trainer().fit(module, datamodule=RolloutDataModule("arithmetic"))
    assert not any(line.startswith("memory:") for line in module.began)


def test_a_model_that_cannot_be_analysed_is_trained_and_the_log_says_so(
    tiny_model_path: str, set_device_bytes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise NotImplementedError("needs data")

    set_device_bytes(2**20)
    monkeypatch.setattr(memory, "memory_and_advice", fails)
    trainer().fit(ScaleRL(tiny_model_path, "scalerl", SIZES), datamodule=RolloutDataModule("arithmetic"))
    assert "memory: cannot be predicted for this model (NotImplementedError('needs data'))" in caplog.text
