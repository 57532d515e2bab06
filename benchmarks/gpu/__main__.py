"""Measure on a GPU and write docs/measured/gpu.md from benchmarks/results/gpu.json.

python -m benchmarks.gpu           needs a GPU of 80 GB for a quarter of an hour; with vLLM, measures its server too
python -m benchmarks.gpu --page    only writes the page
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.curves import RUNS, STEPS, compared, train

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "measured" / "gpu.md"
DENSE_BF16 = 989e12  # FLOPs per second of an H100 or H200 according to its data sheet, without sparsity
HEAD = """# On a GPU

Does this project run correctly on a GPU, how fast is a training step, and how fast does a vLLM server take new
weights?

Written by `python -m benchmarks.gpu` from [benchmarks/results/gpu.json](../../benchmarks/results/gpu.json), measured
on {machine}, {date}. The machine had no model weights and no data sets. So models have random weights, prompts and
completions are meaningless words, and the page says nothing about learning.

Not tried yet: training on several GPUs, sending weights to an engine over NCCL, FlashAttention's own kernels in the
trainer, and models of 8B or more.
"""
CURVES = """## The same run as on a CPU

The runs use the demo's task and model, and take {steps} steps of PipelineRL. Each is compared with the same run on
the CPU.

- **furthest from the CPU**: the largest relative difference of a metric between the two runs, and the name of this
  metric. All metrics of all records are compared, except times and probes. In the denominator, values below 0.001
  count as 0.001. The column is empty for the live run and the BF16 run, because they sample other tokens than the
  CPU.
- **probe**: difference between the log-probabilities of trainer and generator at the last step, as mean and as 99th
  percentile. The live run has too few steps for a probe.
"""
AFTER_CURVES = """In FP32 the GPU samples the same tokens as the CPU up to the last step. `strategy=fsdp2` has a
single rank here, with NCCL.
"""
TRAINING = """## Training steps at 0.6B

The model has the shape of Qwen3-0.6B, with FP32 weights, gradients and Adam moments, BF16 autocast and torch's
`scaled_dot_product_attention`. A step has four passes of 16,384 tokens. Each pass is one row of 512 prompt tokens
and 15,872 completion tokens. Rates are means of three steps after one warm-up step.

- **setting**: the *head* is the last layer, from hidden states to logits. By default the layers' activations are
  recomputed in the backward pass; *layers' inputs on the host* also keeps the layers' inputs in the CPU's memory.
- **TFLOP/s**: without the FLOPs of recomputation.
- **share of the peak**: relative to the {peak:.0f} TFLOP/s of the data sheet. For comparison, a product of two
  matrices of 8,192 x 8,192 runs at {bf16:.0f} TFLOP/s in BF16 and at {fp32:.0f} TFLOP/s in FP32 on this GPU.
- **memory**: the most that torch allocated at once. **forecast**: the value of `scalerl memory`, printed at the
  start of the run.
"""
AFTER_TRAINING = """- An FP32 head costs a third of the speed, because a quarter of this small model's parameters
  belong to the vocabulary. With `torch.backends.cuda.matmul.allow_tf32` most of the speed returns. The loss of
  precision is small: hidden states are in BF16 anyway, and the head's weights are rounded to 11 bits.
- If nothing is recomputed, the memory forecast is a third too high.
- An attempt to compute all logits of a pass (2.5 billion) at once ended in an error. So packed and padded rows were
  not compared.
- For comparison: for this model size and length, prime-rl reports 11.9k tokens per second, 11% of the peak and 12.5
  GiB on one H100.
"""

ENGINE = """## A server of vLLM on the trainer's GPU

A vLLM {vllm} server samples from the same 0.6B model in BF16 with an FP32 head. It has 256 slots for rollouts and 16
GiB of KV cache. A *publish* is a transfer of new weights to the server. The trainer keeps two models on the same
GPU: one with the weights before a publish, one with the weights after it. Each row is one run of
`python -m benchmarks.gpu.engine`.

- *Weights sent by*: the way of the transfer, and whether the server runs in vLLM's eager mode or with CUDA graphs.
  Rows with a star were measured while other engines used the same GPU. So their memory is left out, and their speed
  is a lower bound.
- *Publish*: the time of a publish, which moves 1.2 GB. It pauses the server, loads every tensor, and resumes with
  the rollouts in flight. *In the middle*: the time of a publish while rollouts are half done.
- *Gap*: the mean absolute difference between the log-probabilities of the server and those of the trainer's model
  with the published weights. *To the other weights*: the same difference to the trainer's other model. If the first
  is small and the second large, the right weights have arrived.
- *Tokens per second*: {rollouts} rollouts of 512 tokens that start at the same time.
- *Memory awake, asleep*: the GPU memory of all processes, in both cases. *Sleep, wake*: the time to put the server
  to sleep, and to wake it.
"""
AFTER_ENGINE = """Rollouts that were half done at a publish contain tokens of both versions of the weights, as
intended. While asleep, the server keeps about 1 GiB. When it wakes, it has the weights that it had before, and
accepts new ones.

These runs found three faults that do not occur on a CPU. All three are fixed:

- CUDA IPC refused a tensor larger than `bucket_mib`, such as the embeddings. The row of CUDA IPC above was measured
  with the fix.
- With `generator=vllm` the engine runs in the trainer's own process. Its first CUDA graph ended in an illegal memory
  access, because Lightning freed cuBLAS's workspaces after the engine had captured them. **The fix was not run on a
  GPU.**
- In FP32, vLLM's attention rounded to TF32. This changed log-probabilities by 2e-5 on average and by 1e-4 at the
  99th percentile, so the probe ended an FP32 run with an error. **The fix was not run on a GPU.**
"""


def records(module: str) -> list[dict[str, Any]]:
    """Run a module in a new process and return its records. `module` may be followed by arguments, tab-separated."""
    print("measuring:", module, flush=True)
    done = subprocess.run([sys.executable, "-m", *module.split("\t")], capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
    if not lines:
        print(done.stderr[-2000:], file=sys.stderr)
    return [json.loads(line.removeprefix("RECORD ")) for line in lines]


def products() -> list[dict[str, Any]]:
    """Return the FLOPs per second of a product of two 8,192 x 8,192 matrices, for each type."""
    import torch

    measured = []
    for dtype in (torch.bfloat16, torch.float32):
        one, two = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        for _ in range(3):
            one @ two
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for _ in range(10):
            one @ two
        torch.cuda.synchronize()
        rate = 10 * 2 * 8192**3 / (time.perf_counter() - started_at)
        measured.append({"type": str(dtype).removeprefix("torch."), "flops_a_second": rate})
    return measured


def measure() -> dict[str, Any]:
    """Measure everything that this machine supports."""
    import torch
    import transformers

    from benchmarks.gpu.training import WAYS

    device = torch.cuda.get_device_properties(0)
    machine = f"one {device.name}, torch {torch.__version__}, transformers {transformers.__version__}"
    measured: dict[str, Any] = {"date": str(date.today()), "machine": machine, "products": products()}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            train(Path(folder), name)
        measured["curves"] = compared(Path(folder))
    measured["training"] = [record for way in WAYS for record in records(f"benchmarks.gpu.training\t{way}")]
    measured["engine"] = []
    if find_spec("vllm"):
        measured["vllm"] = version("vllm")
        measured["engine"] = records("benchmarks.gpu.engine") + records("benchmarks.gpu.engine\t--\t--enforce-eager")
    return measured


def table(head: str, rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown."""
    columns = head.split(" | ")
    return [f"| {head} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows), ""]


def page(measured: dict[str, Any]) -> str:
    """Return the page."""
    rates = {each["type"]: each["flops_a_second"] / 1e12 for each in measured["products"]}
    curves = [
        [
            f"`{' '.join(each['overrides'])}`" if each["overrides"] else "FP32, as on the CPU",
            f"{each['furthest']:.0e} (`{each['metric']}`, of {each['values']} values)" if "furthest" in each else "-",
            f"{each['pass_rate']:.3f}",
            *(f"{each[key]:.0e}" if key in each else "-" for key in ("probe_gap_mean", "probe_gap_p99")),
        ]
        for each in measured["curves"]
    ]
    steps = [
        [
            each["way"].removeprefix("16k, "),
            f"{each['tokens_a_second']:,.0f}",
            f"{each['flops_a_second'] / 1e12:.0f}",
            f"{each['flops_a_second'] / DENSE_BF16:.0%}",
            f"{each['peak_gib']:.1f} GiB",
            f"{float(each['foretold'].split()[2]):.1f} GiB",
        ]
        for each in measured["training"]
    ]
    engines = [  # the key `beside` was added to records by hand: it names other engines on the GPU
        [
            f"{each['way']}, {'eager' if '--enforce-eager' in each['flags'] else 'CUDA graphs'}"
            + (" *" if "beside" in each else ""),
            f"{mean(each['publish_s']):.2f} s",
            f"{each['in_the_middle_s']:.2f} s",
            f"{mean(each['gaps']):.4f}",
            f"{mean(each['other_gaps']):.2f}",
            f"{each['tokens_a_second']:,.0f}",
            "-" if "beside" in each else f"{each['awake_gib']:.1f} GiB, {each['asleep_gib']:.1f}",
            f"{each['sleep_s']:.1f} s, {each['wake_s']:.2f} s",
        ]
        for each in measured["engine"]
        if "error" not in each
    ]
    lines = [
        HEAD.format(**measured),
        CURVES.format(steps=STEPS),
        *table("on the GPU | furthest from the CPU | held-out pass rate | probe, mean | probe, 99%", curves),
        AFTER_CURVES,
        TRAINING.format(bf16=rates["bfloat16"], fp32=rates["float32"], peak=DENSE_BF16 / 1e12),
        *table("setting | tokens per second | TFLOP/s | share of the peak | memory | forecast", steps),
        AFTER_TRAINING,
    ]
    if engines:
        head = (
            "weights sent by | publish | in the middle | gap | to the other weights | tokens per second | "
            "memory awake, asleep | sleep, wake"
        )
        rollouts = measured["engine"][0]["rollouts"]
        lines += [ENGINE.format(vllm=measured["vllm"], rollouts=rollouts), *table(head, engines), AFTER_ENGINE]
    return "\n".join(lines)


def main() -> None:
    """Measure, unless --page is given, and write the page."""
    if "--page" not in sys.argv:
        RECORDS.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RECORDS.read_text())).rstrip() + "\n")


if __name__ == "__main__":
    main()
