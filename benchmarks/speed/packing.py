"""Compare gradient steps on packed and padded rows of mixed lengths, in passes with the same limit of tokens.

The third side also packs rows, but uses transformers' mask, as for rows longer than a window. Attention then costs the
square of the whole pass. Seconds are CPU time of one thread, so other load on the machine does not count.
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
from lightning_scalerl.stream.credit import to_tensors

GROUPS, ROLLOUTS, PROMPT_TOKENS, SHORTEST, LONGEST = 2, 8, 8, 16, 512
# Sizes of a pass (`batch.micro_tokens`) by the size of the model.
PASSES = {"0.5M": (512, 1024, 2048, 4096), "10M": (1024, 4096)}


def rows(seed: int = 0) -> TrainBatch:
    """Make groups of rollouts with lengths, including the prompt, uniform from `SHORTEST` to `LONGEST`."""
    source = random.Random(seed)
    row_specs: list[tuple[Group, Rollout, list[float], int, int]] = []
    for number in range(GROUPS):
        prompt = [source.randrange(1, VOCABULARY - 1) for _ in range(PROMPT_TOKENS)]
        lengths = [source.randint(SHORTEST, LONGEST) - PROMPT_TOKENS for _ in range(ROLLOUTS)]
        rollouts = [
            Rollout([source.randrange(1, VOCABULARY - 1) for _ in range(n)], [0.0] * n, [0] * n, [False] * n, "stop")
            for n in lengths
        ]
        group = Group(number, Prompt(str(number), "", ""), prompt, rollouts)
        row_specs += [(group, rollout, [1.0], 1, len(row_specs) + place) for place, rollout in enumerate(rollouts)]
    return to_tensors(row_specs)


def step_s(policy: Policy, batch: TrainBatch, tokens: int, by_row: bool = True) -> float:
    """Return the CPU seconds of forward and backward passes over all rows; `by_row=False` uses transformers' mask."""
    ours = packed.row_mask
    policy.zero_grad()
    started_at = time.process_time()
    try:
        packed.row_mask = ours if by_row else lambda *_: None
        for part in batch.micro_batches(PassSize(batch.rollouts, tokens)):
            policy(part)[0].sum().backward()
    finally:
        packed.row_mask = ours
    return time.process_time() - started_at


def measure(rounds: int) -> list[Record]:
    """Return one record per model size, pass size and other side."""
    torch.set_num_threads(1)
    padded = rows()
    packed_rows = replace(padded, packed=True)
    records = []
    for size, passes in PASSES.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), size)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        policy = Policy(model, Precision("fp32"))
        step_s(policy, packed_rows, passes[0])  # warm-up
        for tokens in passes:
            sides = {
                "packed": partial(step_s, policy, packed_rows, tokens),
                "padded rows": partial(step_s, policy, padded, tokens),
                "packed, one mask for the pass": partial(step_s, policy, packed_rows, tokens, by_row=False),
            }
            label = f"{size} parameters, {padded.rollouts} rows of {SHORTEST} to {LONGEST} tokens"
            records += compared(in_turns(sides, rounds), "packed", f"{label}, {tokens} a pass")
    return records
