"""Compare our sampling in this process with transformers' `generate` and `generate_batch`, and vLLM if installed.

Measured with one rollout per prompt, and with groups.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from benchmarks.speed.pairs import Record, compared, in_turns
from benchmarks.speed.setting import SIZES, VOCABULARY, save_model
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings
from lightning_scalerl.generator.torch.generator import TorchGenerator

# Prompts, rollouts per prompt, prompt tokens, new tokens.
SETTINGS = ((64, 1, 16, 64), (16, 8, 8, 16), (8, 16, 64, 32), (8, 16, 256, 32))
# With more prompt tokens than this, `generate_batch` takes minutes per turn on a CPU, so it is left out.
PAGED_TOKENS = 10_000
_keys = count()
ROOT = Path(__file__).resolve().parent.parent.parent


def ours(generator: TorchGenerator, prompts: torch.Tensor, rollouts: int) -> float:
    """Return the seconds until all rollouts of all prompts are finished."""
    started_at = time.perf_counter()
    for prompt in prompts.tolist():
        key = next(_keys)
        generator.submit(GroupRequest(key, tuple(prompt), rollouts, (key,)))
    while generator.in_flight:
        generator.step()
    return time.perf_counter() - started_at


def theirs(model: Any, prompts: torch.Tensor, rollouts: int, new_tokens: int) -> float:
    """Return the seconds of the same with `generate`, one row per rollout."""
    started_at = time.perf_counter()
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
    return time.perf_counter() - started_at


def theirs_in_pages(model: Any, prompts: torch.Tensor, rollouts: int, new_tokens: int) -> float:
    """Return the seconds of the same with `generate_batch`, which keeps keys and values in as many pages as needed."""
    rows = prompts.repeat_interleave(rollouts, 0)
    # A page holds 256 tokens. By default pages fill the machine's memory, and allocating them takes half a minute. The
    # mask has the size of a pass times the cache: 16 GB with all prompts in one pass. 1,024 tokens are the fastest.
    pages = len(rows) * -(-(rows.shape[1] + new_tokens) // 256)
    sampling = copy.deepcopy(model.generation_config)
    sampling.update(do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    started_at = time.perf_counter()
    paged = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=min(rows.numel(), 1024))
    done = model.generate_batch(rows.tolist(), sampling, paged)
    elapsed_s = time.perf_counter() - started_at
    assert all(len(each.generated_tokens) == new_tokens for each in done.values())
    return elapsed_s


@contextmanager
def vllm(folder: str) -> Iterator[Callable[[tuple[int, int, int, int]], float] | None]:
    """Start vLLM on one thread; yield a function that returns the seconds of a setting, or None if not installed."""
    if importlib.util.find_spec("vllm") is None:
        yield None
        return
    command = [sys.executable, "-m", "benchmarks.speed.sample_vllm", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        output = engine.stdout
        # It prints other lines while it starts.
        while (line := output.readline()).strip() != "ready":
            if not line:
                raise RuntimeError("vllm did not start; run the command of benchmarks.speed.sample_vllm by hand")

        def seconds(setting: tuple[int, int, int, int]) -> float:
            engine.stdin.write(" ".join(map(str, setting)) + "\n")  # type: ignore[union-attr]
            return float(output.readline())

        yield seconds
        engine.stdin.close()


def measure(rounds: int) -> list[Record]:
    """Return one record per model size, setting and other side."""
    torch.set_num_threads(1)
    records = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), size)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            paged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            with vllm(folder) as engine:
                for setting in SETTINGS:
                    records += _setting(size, setting, model, paged, engine, rounds)
    return records


def _setting(
    size: str,
    setting: tuple[int, int, int, int],
    model: Any,
    paged: Any,
    engine: Callable[[tuple[int, int, int, int]], float] | None,
    rounds: int,
) -> list[Record]:
    """Return the records of one setting, with sides measured in turns."""
    number, rollouts, prompt_tokens, new_tokens = setting
    prompts = torch.randint(1, VOCABULARY - 1, (number, prompt_tokens))
    generator = TorchGenerator(
        model,
        Precision("fp32"),
        SamplingSettings(max_prompt_tokens=prompt_tokens, max_new_tokens=new_tokens),
        slots=number * rollouts,
    )
    sides = {
        "ours": partial(ours, generator, prompts, rollouts),
        "transformers' `generate`": partial(theirs, model, prompts, rollouts, new_tokens),
        **({"vLLM": partial(engine, setting)} if engine is not None else {}),
    }
    if prompts.numel() * rollouts <= PAGED_TOKENS:
        sides["transformers' `generate_batch`"] = partial(theirs_in_pages, paged, prompts, rollouts, new_tokens)
    for side in sides.values():
        side()  # warm-up
    label = f"sampling, {size} parameters, {number} prompts of {prompt_tokens} tokens x {rollouts}"
    return compared(in_turns(sides, rounds), "ours", f"{label}, {new_tokens} new tokens")
