"""A gradient step on rows of mixed lengths, packed and padded, in passes of at most the same number of tokens.

The third side packs them too, and leaves the mask to transformers, as for rows longer than a window: attention then
costs the square of the whole pass. Seconds are a thread's own (CPU time), so that a busy machine does not blur them.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.speed.pairs import Record, compared, in_turns
from benchmarks.speed.setting import VOCABULARY, save_model
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model import packed
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, PassSize, Rollout, TrainBatch
from lightning_scalerl.stream.credit import lay_out

GROUPS, ROLLOUTS, PROMPT_TOKENS, SHORTEST, LONGEST = 2, 8, 8, 16, 512
# Size of a pass (`batch.micro_tokens`), by the size of the model.
PASSES = {"0.5M": (512, 1024, 2048, 4096), "10M": (1024, 4096)}


def rows(seed: int = 0) -> TrainBatch:
    """Groups of rollouts whose lengths, the prompt's included, are drawn from `SHORTEST` to `LONGEST` alike."""
    source = random.Random(seed)
    laid: list[tuple[Group, Rollout, list[float], int, int]] = []
    for number in range(GROUPS):
        prompt = [source.randrange(1, VOCABULARY - 1) for _ in range(PROMPT_TOKENS)]
        lengths = [source.randint(SHORTEST, LONGEST) - PROMPT_TOKENS for _ in range(ROLLOUTS)]
        rollouts = [
            Rollout([source.randrange(1, VOCABULARY - 1) for _ in range(n)], [0.0] * n, [0] * n, [False] * n, "stop")
            for n in lengths
        ]
        group = Group(number, Prompt(str(number), "", ""), prompt, rollouts)
        laid += [(group, rollout, [1.0], 1, len(laid) + place) for place, rollout in enumerate(rollouts)]
    return lay_out(laid)


def step_s(policy: Policy, batch: TrainBatch, tokens: int, by_row: bool = True) -> float:
    """Seconds of forward and backward passes over all rows; unless `by_row`, under transformers' mask."""
    ours = packed.row_mask
    policy.zero_grad()
    began = time.process_time()
    try:
        packed.row_mask = ours if by_row else lambda *_: None
        for part in batch.micro_batches(PassSize(batch.rollouts, tokens)):
            policy(part)[0].sum().backward()
    finally:
        packed.row_mask = ours
    return time.process_time() - began


def measure(rounds: int) -> list[Record]:
    """One record a size of the model, size of a pass, and other side."""
    torch.set_num_threads(1)
    padded = rows()
    line = replace(padded, packed=True)
    records = []
    for size, passes in PASSES.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), size)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        policy = Policy(model, Precision("fp32"))
        step_s(policy, line, passes[0])  # warms up
        for tokens in passes:
            sides = {
                "packed": partial(step_s, policy, line, tokens),
                "padded rows": partial(step_s, policy, padded, tokens),
                "packed, one mask for the pass": partial(step_s, policy, line, tokens, by_row=False),
            }
            what = f"{size} parameters, {padded.rollouts} rows of {SHORTEST} to {LONGEST} tokens"
            records += compared(in_turns(sides, rounds), "packed", f"{what}, {tokens} a pass")
    return records
