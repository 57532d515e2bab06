"""Measure vLLM's server on its trainer's GPU: weights by CUDA IPC and by file, a publish mid-rollout, sleep and wake.

    python -m benchmarks.gpu.engine [--tiny] [--no-sleep] [--bf16-head] [--only=WAY] [-- FLAGS of vLLM's server]

The model is Qwen3-0.6B with random weights in BF16.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.replayed import QWEN3_0_6B
from benchmarks.gpu.training import TINY
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, SamplingSettings
from lightning_scalerl.generator.vllm.client import VLLMServerGenerator
from lightning_scalerl.generator.vllm.serve import prepare

GIB = 2**30
PROMPT = tuple(range(5, 69))


def new_model(device: str, seed: int, tiny: bool) -> nn.Module:
    """Make a model with random weights, wide enough that its tokens differ in probability."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**{**QWEN3_0_6B, **(TINY if tiny else {})}))
    evaluated: nn.Module = model.eval()
    return evaluated


@torch.no_grad()
def trainers(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return log-probabilities (T,) of a completion as the trainer computes them."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    logits = torch.nn.functional.linear(hidden.float(), model.lm_head.weight.float())
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def gap(model: nn.Module, finished: Sequence[FinishedRollout]) -> float:
    """Return the mean absolute difference of log-probabilities between engine and trainer."""
    gaps = [
        (torch.tensor(each.rollout.generator_logprobs) - trainers(model, PROMPT, each.rollout.tokens)).abs()
        for each in finished
    ]
    return float(torch.cat(gaps).mean())


def drained(generator: Any) -> list[FinishedRollout]:
    """Step until nothing is in flight."""
    measured: list[FinishedRollout] = []
    while generator.in_flight:
        measured += generator.step().finished
    return measured


def used_gib() -> float | None:
    """Return the GPU memory that all processes use, in GiB."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def timed(call: Any, *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    started_at = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started_at


def measure(backend: str, tiny: bool, sleeps: bool, fp32_head: bool, flags: Sequence[str]) -> dict[str, Any]:
    """Start a server, publish three times, sample, and put it to sleep once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slots, longest = (8, 32) if tiny else (256, 512)
    one, two = (new_model(device, seed, tiny) for seed in (1, 2))
    measured: dict[str, Any] = {"backend": backend, "fp32_head": fp32_head, "flags": flags, "trainers_gib": used_gib()}
    token, log = secrets.token_hex(8), None
    precision = Precision("bf16", fp32_head_trainer=fp32_head, fp32_head_generator=fp32_head)
    server = prepare(
        one,
        precision,
        slots=slots,
        capacity=len(PROMPT) + longest + 1,
        cache_gib=0.25 if tiny else 16.0,
        token=token,
        backend=backend,
        sleep=sleeps,
    )
    server.command += flags
    generator = None
    try:
        server.start()
        log = server.log.open(errors="replace")
        measured["start_s"] = timed(server.wait, 280)
        generator = VLLMServerGenerator(
            one,
            precision,
            SamplingSettings(max_prompt_tokens=len(PROMPT), max_new_tokens=longest, stop_tokens=[1]),
            address=server.address,
            token=token,
            slots=slots,
        )
        measured["way"], measured["awake_gib"] = generator._sender.method, used_gib()
        measured["publish_s"], measured["gaps"], measured["other_gaps"] = [], [], []
        for version, (model, other) in enumerate([(two, one), (one, two), (two, one)], 1):
            measured["publish_s"].append(timed(generator.publish, dict(model.state_dict()), version))
            generator.submit(GroupRequest(version, PROMPT, 4, (0, version), max_new_tokens=32))
            rollouts = drained(generator)
            measured["gaps"].append(gap(model, rollouts))
            measured["other_gaps"].append(gap(other, rollouts))
        measured["bytes"] = getattr(generator._sender, "bytes_sent", None)
        # Publish during rollouts: they continue, and their later tokens come from the new weights.
        generator.submit(GroupRequest(10, PROMPT, 8, (0, 10)))
        early: list[Any] = []
        while generator.sampled_in_flight < 8 * min(64, longest // 4):
            early += generator.step().finished
        measured["in_the_middle_s"] = timed(generator.publish, dict(one.state_dict()), 4)
        versions = [each.rollout.weight_versions for each in early + drained(generator)]
        measured["versions"] = sorted({tuple(sorted(set(each))) for each in versions})
        started_at = time.perf_counter()
        groups = max(1, slots // 8)
        for number in range(groups):
            generator.submit(GroupRequest(20 + number, PROMPT[: 16 + number % 32], 8, (0, 20 + number)))
        tokens = sum(len(each.rollout.tokens) for each in drained(generator))
        measured["tokens_a_second"], measured["rollouts"] = tokens / (time.perf_counter() - started_at), 8 * groups
        if sleeps:
            measured["sleep_s"], measured["asleep_gib"] = timed(generator.sleep), used_gib()
            measured["wake_s"], measured["woken_gib"] = timed(generator.wake), used_gib()
            generator.submit(GroupRequest(90, PROMPT, 4, (0, 90), max_new_tokens=32))
            measured["gap_after_sleep"] = gap(one, drained(generator))
            measured["publish_after_sleep_s"] = timed(generator.publish, dict(two.state_dict()), 5)
            generator.submit(GroupRequest(91, PROMPT, 4, (0, 91), max_new_tokens=32))
            measured["gap_after_that"] = gap(two, drained(generator))
    except Exception as error:
        measured["error"] = f"{type(error).__name__}: {error}"[:2000]
        measured["log"] = log.read()[-6000:] if log else ""
    finally:
        if generator is not None:
            generator.close()
        server.close()
    return measured


def main() -> None:
    """Measure the ways of sending weights that this machine supports, one after the other."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    our_flags, flags = sys.argv[1:place], sys.argv[place + 1 :]
    on_gpu = torch.cuda.is_available()
    sleeps, fp32_head = on_gpu and "--no-sleep" not in our_flags, "--bf16-head" not in our_flags
    only = [each.removeprefix("--only=") for each in our_flags if each.startswith("--only=")]
    for backend in only or (("ipc", "scalerl") if on_gpu else ("scalerl",)):
        measured = measure(backend, "--tiny" in our_flags, sleeps, fp32_head, flags)
        print("RECORD " + json.dumps(measured), flush=True)
        if "start_s" not in measured:  # a server that did not start will not start with another backend either
            break


if __name__ == "__main__":
    main()
