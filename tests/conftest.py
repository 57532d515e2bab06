"""Shared fixtures: tiny models with random weights, and a task whose rewards vary."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from lightning_scalerl.task.arithmetic_base import new_model, tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of the arithmetic task, saved as a user's model would be."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    new_model(width=32, layers=2, seed=3).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def tiny_model(tiny_model_path: str) -> Any:
    from lightning_scalerl.model.load import load_model

    return load_model(tiny_model_path)
