"""Measure memory and speed of training steps of a Qwen3-0.6B with random weights, one configuration per process."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.gpu.replayed import Replayed, Words, new_model, words
from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.model import policy

GIB = 2**30
STEPS = 4  # the first one is warm-up
COMMON = (
    "scale=0.6b",
    "scaled_for=null",
    "async_mode=on_policy",
    "length_control=none",
    "truncated=keep",
    "filter=none",
    "resampling=uniform",
    "batch.micro_tokens=16384",
    "batch.micro_batch=256",
    "verify.on_error=stop",
)
LONG = ("context.max_prompt_tokens=512", "context.max_new_tokens=15872", "batch.prompts=1", "batch.completions=4")
SHORT = ("context.max_prompt_tokens=512", "context.max_new_tokens=1024", "batch.prompts=16", "batch.completions=8")


@dataclass(frozen=True)
class Way:
    """A way to train: overrides of the recipe, whether the head computes all logits of a pass at once, and TF32."""

    overrides: tuple[str, ...]
    whole_head: bool = False
    tf32: bool = False


FP32_HEAD, BF16_HEAD = "precision=bf16", "precision=bf16_head"
WAYS = {
    "16k, BF16 head": Way((*LONG, BF16_HEAD)),
    "16k, FP32 head": Way((*LONG, FP32_HEAD)),
    "16k, FP32 head, all logits at once": Way((*LONG, FP32_HEAD), whole_head=True),
    "16k, FP32 head, its products in TF32": Way((*LONG, FP32_HEAD), tf32=True),
    "16k, BF16 head, nothing recomputed": Way((*LONG, BF16_HEAD, "batch.recompute=false")),
    "16k, BF16 head, layers' inputs on the host": Way((*LONG, BF16_HEAD, "batch.offload=true")),
    "128 rows of 576 to 1,536, padded, BF16 head": Way((*SHORT, BF16_HEAD)),
    "128 rows of 576 to 1,536, packed, BF16 head": Way((*SHORT, BF16_HEAD, "batch.packed=true")),
}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
TINY |= {"num_key_value_heads": 2}


class Clock(Callback):
    """Measures the seconds of each training step, including the device's work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.flops = 0.0
        self._began = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
        """Start the clock. The batch is already there."""
        wait(module.device)
        if module.device.type == "cuda" and len(self.seconds) == 1:
            torch.cuda.reset_peak_memory_stats()
        self.flops = module.meter.metrics()["compute/flops_train"]
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        """Stop the clock."""
        wait(module.device)
        self.seconds.append(time.perf_counter() - self._began)
        self.flops = module.meter.metrics()["compute/flops_train"] - self.flops


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def lengths_of(overrides: tuple[str, ...]) -> Callable[[int], int]:
    """Return the function from a rollout's number to its tokens: always the maximum, or random from 64 to 1,024."""
    max_tokens = int(next(each for each in overrides if "max_new_tokens" in each).partition("=")[2])
    if max_tokens > 1024:
        return lambda index: max_tokens
    return lambda index: random.Random(index).randint(64, max_tokens)


def measure(name: str, tiny: bool = False) -> dict[str, Any]:
    """Train a few steps and return their seconds, tokens, FLOPs and memory, measured and predicted."""
    way = WAYS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    overrides = list(COMMON + way.overrides)
    if tiny:
        overrides += ["context.max_prompt_tokens=8", "context.max_new_tokens=24"]
    if way.whole_head:
        policy.MAX_LOGITS = 2**50
    torch.backends.cuda.matmul.allow_tf32 = way.tf32
    recipe = load_recipe("scalerl", overrides)
    lengths = (lambda index: 24) if tiny else lengths_of(way.overrides)
    recipe = replace(recipe, generator=lambda model, **options: Replayed(lengths, 4096))
    module = ScaleRL(new_model(device, **(TINY if tiny else {})), recipe, tokenizer=words())
    clock = Clock()
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=RolloutDataModule(Words(8 if tiny else 512)))
    rollouts_per_step = recipe.batch.prompts * recipe.batch.completions
    prompt = 8 if tiny else 512
    counts = [
        sum(prompt + lengths(step * rollouts_per_step + row) for row in range(rollouts_per_step))
        for step in range(STEPS)
    ]
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return {
        "way": name,
        "seconds": clock.seconds,
        "tokens": counts,
        "flops": clock.flops,
        "peak_gib": peak,
        "foretold": module.memory,
        "tokens_a_second": sum(counts[1:]) / sum(clock.seconds[1:]),
        "flops_a_second": clock.flops / clock.seconds[-1],
    }


def main() -> None:
    """Measure the way named on the command line, and print the record in one line."""
    print("RECORD " + json.dumps(measure(sys.argv[1], "--tiny" in sys.argv)), flush=True)


if __name__ == "__main__":
    main()
