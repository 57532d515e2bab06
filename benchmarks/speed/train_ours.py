"""Measure seconds per batch of this project's trainer: arguments FOLDER PROMPT_TOKENS BATCHES [--parts].

It is used as in a user's script. With `--parts` also prints the seconds by part, measured by timing calls, and the
counted FLOPs per batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks.speed.setting import ANSWER_TOKENS, COMPLETIONS, PROMPTS, reward, words
from lightning_scalerl import Prompt, RolloutDataModule, ScaleRL, Task
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.verify.pool import VerifierPool

OVERRIDES = [
    "async_mode=ppo_off_policy",
    "async_mode.k=2",
    f"batch.prompts={PROMPTS // 2}",
    f"batch.completions={COMPLETIONS}",
    f"batch.micro_batch={PROMPTS // 2 * COMPLETIONS}",
    "precision=fp32",
    "length_control=none",
    "truncated=keep",
    "filter=none",
    "resampling=uniform",
    "scaled_for=null",
    "optimizer.lr=1e-4",
    f"context.max_new_tokens={ANSWER_TOKENS}",
]


class Words(Task):
    """A task with prompts of words, and a reward computed from the answer."""

    def __init__(self, prompt_tokens: int) -> None:
        self._texts = words(0, prompt_tokens)

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the pool of 256 prompts."""
        return [Prompt(f"train-{number}", text) for number, text in enumerate(self._texts)]

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return a set that is never evaluated. A task needs one."""
        return {"heldout": [Prompt("heldout-0", "w1 w2 w3")]}

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return the reward that all sides share."""
        return reward(completion)


class Clock(Callback):
    """Records the time after every optimizer step. Everything before the end of the second step is set-up."""

    def __init__(self, spent: dict[str, float]) -> None:
        self.ends: list[float] = []
        self.flops_before: Mapping[str, float] = {}
        self._spent = spent

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Record a step; after the second one, reset the counters."""
        self.ends.append(time.perf_counter())
        if len(self.ends) == 2:
            self._spent.update(dict.fromkeys(self._spent, 0.0))
            self.flops_before = pl_module.meter.metrics()


def timed(owner: Any, name: str, part: str, spent: dict[str, float]) -> None:
    """Make a method add its seconds to `spent[part]`."""
    original = getattr(owner, name)
    spent[part] = 0.0

    @wraps(original)
    def measured(*args: Any, **kwargs: Any) -> Any:
        started_at = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - started_at

    setattr(owner, name, measured)


def parts() -> dict[str, float]:
    """Start measuring; return the dictionary of seconds by part, which keeps growing."""
    spent: dict[str, float] = {}
    timed(TorchGenerator, "step", "sampling", spent)
    timed(VerifierPool, "wait", "waiting for rewards", spent)
    timed(Policy, "forward", "the trainer's forward pass", spent)
    timed(torch.Tensor, "backward", "the backward pass", spent)
    timed(torch.optim.AdamW, "step", "the optimizer", spent)
    return spent


def main() -> None:
    """Train, and print the seconds per batch."""
    spent = parts() if "--parts" in sys.argv else {}
    folder, prompt_tokens, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    clock = Clock(spent)
    trainer = Trainer(
        max_steps=2 * (batches + 1),
        accelerator="cpu",
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ScaleRL(folder, "scalerl", [*OVERRIDES, f"context.max_prompt_tokens={prompt_tokens}"])
    trainer.fit(module, datamodule=RolloutDataModule(Words(prompt_tokens)))
    for part, seconds in spent.items():
        print(f"part {part} {seconds / batches}")
    for name in ("compute/flops_train", "compute/flops_generate"):
        print(f"{name} {(module.meter.metrics()[name] - clock.flops_before[name]) / batches}")
    print(f"part whole batch {(clock.ends[-1] - clock.ends[1]) / batches}")


if __name__ == "__main__":
    main()
