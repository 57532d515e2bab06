"""Sampling: ours in this process beside transformers' `generate`, with one rollout a prompt and with groups."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.speed.pairs import Record, compared, in_turns
from benchmarks.speed.setting import SIZES, VOCABULARY, save_model
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.generator.torch_generator import TorchGenerator

# Prompts, rollouts of each, tokens of a prompt, new tokens.
SETTINGS = ((64, 1, 16, 64), (16, 8, 8, 16), (8, 16, 64, 32), (8, 16, 256, 32))
_keys = count()


def ours(generator: TorchGenerator, prompts: torch.Tensor, rollouts: int) -> float:
    """Seconds until all rollouts of all prompts are there."""
    began = time.perf_counter()
    for prompt in prompts.tolist():
        key = next(_keys)
        generator.submit(GroupRequest(key, tuple(prompt), rollouts, (key,)))
    while generator.in_flight:
        generator.step()
    return time.perf_counter() - began


def theirs(model: Any, prompts: torch.Tensor, rollouts: int, new_tokens: int) -> float:
    """The same by `generate`, one row a rollout."""
    began = time.perf_counter()
    rows = prompts.repeat_interleave(rollouts, 0)
    with torch.no_grad():
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
    return time.perf_counter() - began


def measure(rounds: int) -> list[Record]:
    """One record a size and setting."""
    torch.set_num_threads(1)
    records = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), size)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        for number, rollouts, prompt_tokens, new_tokens in SETTINGS:
            prompts = torch.randint(1, VOCABULARY - 1, (number, prompt_tokens))
            generator = TorchGenerator(
                model,
                Precision("fp32"),
                slots=number * rollouts,
                max_prompt_tokens=prompt_tokens,
                max_new_tokens=new_tokens,
                stop_tokens=[],
            )
            sides = {
                "ours": partial(ours, generator, prompts, rollouts),
                "transformers' `generate`": partial(theirs, model, prompts, rollouts, new_tokens),
            }
            for side in sides.values():
                side()  # warms up
            what = f"sampling, {size} parameters, {number} prompts of {prompt_tokens} tokens x {rollouts}"
            records += compared(in_turns(sides, rounds), "ours", f"{what}, {new_tokens} new tokens")
    return records
