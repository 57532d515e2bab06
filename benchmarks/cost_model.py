"""Measure the rates of conf/cost_model/cpu.yaml: how long one CPU core takes to decode, prefill, train and publish.

Uses the arithmetic task's base model in FP32 with one thread. Sizes alternate, so that other load on the machine
affects all of them, and the median of each size is used. The rates are a non-negative least-squares fit to these
medians, in which relative errors have equal weight.

    python benchmarks/cost_model.py             prints sizes, seconds and rates
    python benchmarks/cost_model.py --write     puts the rates into conf/cost_model/cpu.yaml
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.composition import conf_dir
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, PassSize, Rollout
from lightning_scalerl.stream.credit import to_tensors
from lightning_scalerl.task.arithmetic_base import arithmetic_base_model

FP32 = Precision("fp32", True, True)
ROUNDS = 15
PROMPT_TOKENS = 10
NEW_TOKENS = 24
ROLLOUTS = (16, 32, 64, 128, 256)


def decode_rows(model: Any, rollouts: int) -> list[tuple[list[float], float]]:
    """Generate this many rollouts; return ([1, rollouts, context], seconds) per decoding step, without the prefill."""
    generator = TorchGenerator(
        model, FP32, SamplingSettings(max_prompt_tokens=16, max_new_tokens=NEW_TOKENS), slots=rollouts
    )
    generator.submit(GroupRequest(0, tuple(range(1, PROMPT_TOKENS + 1)), rollouts, (0,)))
    rows = []
    while generator.in_flight:
        begin = time.perf_counter()
        report = generator.step()
        seconds = time.perf_counter() - begin
        if report.decoded_tokens:
            rows.append(([1.0, float(report.decoded_tokens), float(report.decoded_context)], seconds))
    return rows


def prefill_s(model: Any, prompts: int) -> float:
    """Return the seconds of prefilling this many prompts."""
    generator = TorchGenerator(model, FP32, SamplingSettings(max_prompt_tokens=16, max_new_tokens=1), slots=prompts)
    for key in range(prompts):
        generator.submit(GroupRequest(key, tuple(range(1, PROMPT_TOKENS + 1)), 1, (key,)))
    begin = time.perf_counter()
    generator.step()
    return time.perf_counter() - begin


def train_s(model: Any, rollouts: int) -> tuple[int, float]:
    """Return tokens and seconds of one optimizer step in micro-batches of 64."""
    policy = Policy(model, FP32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    tokens = list(range(1, 14)) + [1] * 5
    rollout = Rollout(tokens, [-1.0] * len(tokens), [0] * len(tokens), [False] * len(tokens), "stop")
    group = Group(0, Prompt("p", "", ""), list(range(1, PROMPT_TOKENS + 1)), [rollout])
    batch = to_tensors([(group, rollout, [1.0], len(tokens), row) for row in range(rollouts)])
    begin = time.perf_counter()
    for micro_batch in batch.micro_batches(PassSize(64)):
        logprobs, _ = policy(micro_batch)
        (logprobs * micro_batch.loss_mask).sum().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return int(batch.lengths.sum()), time.perf_counter() - begin


def publish_s(model: Any) -> float:
    """Return the seconds of one publish with nothing in flight."""
    generator = TorchGenerator(model, FP32, SamplingSettings(max_prompt_tokens=16, max_new_tokens=1), slots=1)
    begin = time.perf_counter()
    generator.publish(dict(model.state_dict()), 1)
    return time.perf_counter() - begin


def rates_of(rows: dict[tuple[float, ...], list[float]]) -> np.ndarray[Any, Any]:
    """Fit non-negative rates of the columns to the median seconds."""
    columns = np.array(list(rows))
    seconds = np.array([statistics.median(values) for values in rows.values()])
    return np.asarray(nnls(columns / seconds[:, None], np.ones(len(seconds)))[0])


def measure() -> dict[str, float]:
    """Measure all rates, in seconds. The first two rounds are warm-up."""
    model = load_model(arithmetic_base_model())
    decode: dict[tuple[float, ...], list[float]] = defaultdict(list)
    prefill: dict[tuple[float, ...], list[float]] = defaultdict(list)
    train: dict[tuple[float, ...], list[float]] = defaultdict(list)
    publish = []
    for number in range(ROUNDS + 2):
        warm = number >= 2
        for rollouts in ROLLOUTS:
            for columns, seconds in decode_rows(model, rollouts):
                if warm:
                    decode[tuple(columns)].append(seconds)
        for prompts in (16, 64, 256):
            seconds = prefill_s(model, prompts)
            if warm:
                prefill[(float(prompts * PROMPT_TOKENS),)].append(seconds)
        for rollouts in (32, 64, 128):
            tokens, seconds = train_s(model, rollouts)
            if warm:
                train[1.0, float(tokens)].append(seconds)
        publish.append(publish_s(model))
    for name, rows in (("prefill: tokens", prefill), ("train: step, tokens", train)):
        for counts, values in rows.items():
            print(f"{name} {counts}: {1e3 * statistics.median(values):.2f} ms")
    per_step, per_rollout, per_context = rates_of(decode)
    (per_prefill,) = rates_of(prefill)
    train_step, train_token = rates_of(train)
    return {
        "decode_s": per_step,
        "decode_rollout_s": per_rollout,
        "decode_context_s": per_context,
        "prefill_token_s": per_prefill,
        "train_s": train_step,
        "train_token_s": train_token,
        "publish_s": statistics.median(publish),
    }


def main() -> None:
    """Measure and print the rates; write them if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the rates into conf/cost_model/cpu.yaml")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    rates = measure()
    path = conf_dir() / "cost_model" / "cpu.yaml"
    text = path.read_text()
    replace: Callable[[str, float, str], str] = lambda name, value, old: re.sub(  # noqa: E731
        rf"^{name}: .*$", f"{name}: {value:.2e}", old, flags=re.MULTILINE
    )
    for name, value in rates.items():
        print(f"{name}: {value:.2e}")
        text = replace(name, value, text)
    if write:
        path.write_text(text)


if __name__ == "__main__":
    main()
