"""Measure memory and time of the head, which computes log-probabilities at a real vocabulary, whole and in chunks.

Bytes are counted on fake tensors at 8k tokens x 152k x 1,024. Seconds are CPU time of one thread, at a size that a CPU
can handle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.speed.pairs import Record, compared, in_turns, seconds
from lightning_scalerl.measure.memory import LiveBytes
from lightning_scalerl.model.chunked_head import Scaling, chunked_scores
from lightning_scalerl.model.policy import MAX_LOGITS

# Tokens, vocabulary and width for counting bytes and for timing, both in the same number of chunks.
COUNTED, TIMED = (8192, 151_936, 1024), (1024, 19_000, 128)
GIB = 2**30

Way = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Compute in chunks whose gradient overwrites their logits."""
    return chunked_scores(hidden, weight, None, targets, Scaling(), torch.float32, chunk, False)[0]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, _: int) -> Tensor:
    """Compute all logits at once."""
    logits = F.linear(hidden, weight)
    return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def recomputed(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Compute in chunks that torch recomputes, each with its own gradient of the weights."""
    parts = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    return torch.cat(
        [checkpoint(whole, part, weight, chunk_targets, 0, use_reentrant=False) for part, chunk_targets in parts]
    )


WAYS: Mapping[str, Way] = {
    "in chunks, the gradient over the logits": ours,
    "in chunks, recomputed by torch's checkpoint": recomputed,
    "all logits at once": whole,
}


def chunk_of(sizes: tuple[int, int, int]) -> int:
    """Return the chunk size that gives as many chunks as the policy makes for COUNTED."""
    tokens, _, _ = sizes
    return max(1, MAX_LOGITS // COUNTED[1] * tokens // COUNTED[0])


def tensors(sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states, weights and targets."""
    tokens, vocabulary, width = sizes
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width) / width**0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.arange(tokens) % vocabulary


def peak(way: Way) -> int:
    """Return the peak of live bytes in a forward and backward pass, including inputs and weights."""
    with FakeTensorMode():
        hidden, weight, targets = tensors(COUNTED)
        live = LiveBytes()
        with live:
            for each in (hidden, weight):
                live.watch(each)
            way(hidden, weight, targets, chunk_of(COUNTED)).sum().backward()  # type: ignore[no-untyped-call]
    return live.peak


def step_s(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Return the CPU seconds of a forward and a backward pass."""
    hidden.grad = weight.grad = None
    started_at = time.process_time()
    way(hidden, weight, targets, chunk_of(TIMED)).sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started_at


def measure(rounds: int) -> list[Record]:
    """Return one record per way."""
    torch.set_num_threads(1)
    tokens, vocabulary, width = COUNTED
    needed = 4 * (2 * tokens * width + 2 * vocabulary * width + chunk_of(COUNTED) * vocabulary)
    inputs = tensors(TIMED)
    sides = {name: partial(step_s, way, *inputs) for name, way in WAYS.items()}
    times = in_turns(sides, rounds)
    first = next(iter(WAYS))
    comparisons = {each["other"]: each for each in compared(times, first, "head")}
    return [
        {
            "way": name,
            "gib": round(peak(way) / GIB, 2),
            "of_needed": round(peak(way) / needed, 2),
            "seconds": sorted(times[name])[rounds // 2],
            "ratios": comparisons[name]["ratios"] if name in comparisons else [],
        }
        for name, way in WAYS.items()
    ]


def section(kept: Mapping[str, Any]) -> list[str]:
    """Return the section of the page."""
    tokens, vocabulary, width = (f"{size:,}" for size in COUNTED)
    timed = " x ".join(f"{size:,}" for size in TIMED)
    lines = [
        "## Head\n",
        f"{kept['date']}, {kept['machine']}; {kept['rounds']} rounds.\n",
        "The head is the last layer, which computes logits from hidden states.\n",
        f"- **peak**: memory in use with {tokens} tokens, a vocabulary of {vocabulary} and a width of {width} in FP32.",
        "- **relative to need**: this memory divided by that of inputs, weights, their gradients and one chunk of "
        "logits.",
        f"- **time**: CPU seconds with {timed}, in the same number of chunks. **times ours**: relative to the first "
        "row.\n",
        "| log-probabilities, forward and backward | peak | relative to need | time | times ours |",
        "|---|---|---|---|---|",
    ]
    for each in kept["records"]:
        ratios = sorted(each["ratios"])
        times = f"**{ratios[len(ratios) // 2]:.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "1"
        cells = [each["way"], f"{each['gib']:.2f} GiB", f"{each['of_needed']:.2f}", seconds(each["seconds"]), times]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
