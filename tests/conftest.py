"""Shared fixtures: tiny models with random weights, and a task whose rewards vary."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from lightning_scalerl.rollout import Group, Prompt, Rollout
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
    from lightning_scalerl.policy import load_model

    return load_model(tiny_model_path)


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """Groups with random lengths, log-probabilities and given rewards."""

    def make(
        rewards: list[float], admission: int = 0, version: int = 0, seed: int = 0, prompt_length: int = 4
    ) -> Group:
        source = random.Random(f"{seed} {admission}")
        rollouts = []
        for reward in rewards:
            length = source.randint(1, 7)
            rollouts.append(
                Rollout(
                    tokens=[source.randint(1, 15) for _ in range(length)],
                    generator_logprobs=[-source.uniform(0.05, 3.0) for _ in range(length)],
                    weight_versions=[version] * length,
                    forced=[False] * length,
                    finish_reason="stop",
                    reward=reward,
                    correct=reward >= 1,
                )
            )
        prompt = Prompt(f"p{admission}", "1+1=", "2")
        return Group(admission, prompt, [source.randint(1, 15) for _ in range(prompt_length)], rollouts)

    return make


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
