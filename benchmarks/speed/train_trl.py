"""Measure seconds per batch of TRL's `GRPOTrainer` in its own environment: arguments FOLDER PROMPT_TOKENS BATCHES.

The environment is that of tests/parity/peers.txt. From this project it imports only setting.py, whose two functions
need nothing but the standard library.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from setting import ANSWER_TOKENS, COMPLETIONS, PROMPTS, reward, words
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records the time after every optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record a step."""
        self.ends.append(time.perf_counter())


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Return the reward that all sides share."""
    return [reward(text) for text in completions]


def main() -> None:
    """Train, and print the seconds per batch."""
    folder, prompt_tokens, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output,
            max_steps=2 * (batches + 1),
            per_device_train_batch_size=PROMPTS * COMPLETIONS // 2,
            steps_per_generation=2,
            num_generations=COMPLETIONS,
            max_completion_length=ANSWER_TOKENS,
            loss_type="cispo",
            epsilon_high=5.0,
            scale_rewards="batch",
            beta=0.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            folder,
            reward_funcs=rewards,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": text} for text in words(0, prompt_tokens)]),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    print((clock.ends[-1] - clock.ends[1]) / batches)


if __name__ == "__main__":
    main()
