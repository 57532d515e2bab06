"""Test of how much a training step computes. Counting guards its speed without depending on a clock or a machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.verify.pool import VerifierPool
from tests.helpers import SMALL, CountingTask, quiet

PROMPTS, COMPLETIONS = 3, 4
# Settings under which one pass holds the whole batch, and every rollout is trained on.
WHOLE = (
    "async_mode=on_policy",
    "batch.micro_batch=12",
    "generator.slots=12",
    "filter=none",
    "truncated=keep",
    "resampling=uniform",
    "length_control=none",
    "precision=fp32",
)
WORDS = "1+1=1+1=1+1="


class LongPrompts(CountingTask):
    """Prompts of 12 tokens: long enough that a group's shared prompt is computed once."""

    trusted = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = [Prompt(each.prompt_id, WORDS, "1") for each in self.pool]


class Counts(Callback):
    """Counts computations from the end of the first step on, and keeps the batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, int] = {}
        self.batches: list[TrainBatch] = []
        forward = torch.nn.Embedding.forward

        def counted(module: torch.nn.Embedding, tokens: Tensor) -> Tensor:
            self.add("trained" if module.weight.requires_grad else "sampled", tokens.numel())
            return forward(module, tokens)

        monkeypatch.setattr(torch.nn.Embedding, "forward", counted)
        for owner, name in (
            (torch.Tensor, "backward"),
            (torch.optim.AdamW, "step"),
            (TorchGenerator, "step"),
            (VerifierPool, "submit"),
        ):
            monkeypatch.setattr(owner, name, self.counting(f"{owner.__name__}.{name}", getattr(owner, name)))

    def add(self, name_of_count: str, number: int) -> None:
        self.seen[name_of_count] = self.seen.get(name_of_count, 0) + number

    def counting(self, name_of_count: str, method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.add(name_of_count, 1)
            return method(*args, **kwargs)

        return called

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: TrainBatch, number: int) -> None:
        if number == 0:
            self.seen.clear()
        else:
            self.batches.append(batch)


@pytest.mark.slow
def test_a_step_computes_each_prompt_once_and_nothing_twice(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    module = ScaleRL(tiny_model_path, "scalerl_core", [*SMALL[:-1], *WHOLE])
    trainer = Trainer(max_steps=4, callbacks=[counts], **quiet())
    trainer.fit(module, datamodule=RolloutDataModule(LongPrompts()))
    steps = len(counts.batches)
    lengths = [(batch.lengths - batch.completion_start) for batch in counts.batches]
    longest = [int(each.max()) for each in lengths]
    prompt_tokens = int(counts.batches[0].completion_start[0])
    assert steps == 3 and prompt_tokens == len(WORDS)
    rollouts = PROMPTS * COMPLETIONS
    assert counts.seen == {
        # Prompts once per group; completions without their last token, padded to the longest one.
        "trained": sum(PROMPTS * prompt_tokens + rollouts * (width - 1) for width in longest),
        # Prompts once per group; each sampled token except a rollout's last one is fed back.
        "sampled": sum(PROMPTS * prompt_tokens + int((each - 1).sum()) for each in lengths),
        "Tensor.backward": steps,
        "AdamW.step": steps,
        "TorchGenerator.step": sum(longest),
        "VerifierPool.submit": steps * rollouts,
    }
