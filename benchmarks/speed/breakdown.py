"""Measure where a training step's time goes, the machine's rate of matrix products, and the cost of a start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.pairs import Record, seconds
from benchmarks.speed.setting import save_model

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE, PROMPT_TOKENS, BATCHES = "0.5M", 8, 20


def peak_gflops(size: int = 1024, repeats: int = 10) -> float:
    """Return the GFLOP/s of a product of two FP32 matrices on one thread, the best of several."""
    torch.set_num_threads(1)
    first, second = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        started_at = time.perf_counter()
        first @ second
        best = min(best, time.perf_counter() - started_at)
    return 2 * size**3 / best / 1e9


def command_s(cache: str, *words: str) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of `scalerl train ...` from start to end, children included.

    Args:
        cache: folder of base models, so that only the first of several commands makes the model.
        words: further overrides.
    """
    command = [str(Path(sys.executable).with_name("scalerl")), "train", "budget.steps=1", "model.batches=30"]
    command += ["evaluation.every_n_steps=1000", *words]
    usage_before, started_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SCALERL_CACHE": cache}
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return time.perf_counter() - started_at, spent


def study_s(cache: str, seeds: int) -> float:
    """Return wall-clock seconds of a study with this many runs of one step each, one at a time."""
    return command_s(cache, "--multirun", f"seed=range({seeds})", "launch.max_parallel=1", "mlflow.uri=null")[0]


def measure() -> list[Record]:
    """Return one record: seconds of a batch by part, measured in a new process, and the cost of starts."""
    with tempfile.TemporaryDirectory() as cache:
        command_s(cache)  # makes the base model
        one_member_cpu_s = min(command_s(cache)[1] for _ in range(3))
        first, fifth = (min(study_s(cache, seeds) for _ in range(3)) for seeds in (1, 5))
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SIZE)
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.train_ours",
            folder,
            str(PROMPT_TOKENS),
            str(BATCHES),
            "--parts",
        ]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    parts = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines() if line.startswith("part "))
    record: dict[str, Any] = {name.removeprefix("part "): float(value) for name, value in parts.items()}
    flops = dict(line.split(" ") for line in run.stdout.splitlines() if line.startswith("compute/"))
    operations = {name.removeprefix("compute/flops_"): float(value) for name, value in flops.items()}
    starts = {"one_member_cpu_s": one_member_cpu_s, "further_member_s": (fifth - first) / 4}
    return [{"peak_gflops": peak_gflops(), "parts": record, "flops": operations, **starts}]


def section(stored: Record) -> list[str]:
    """Return the section of the page."""
    (record,) = stored["records"]
    parts = {name: value for name, value in record["parts"].items() if name != "whole batch"}
    whole = record["parts"]["whole batch"]
    gradient_s = parts["the trainer's forward pass"] + parts["the backward pass"]
    reached = {
        "sampling": record["flops"]["generate"] / parts["sampling"],
        "forward and backward pass": record["flops"]["train"] / gradient_s,
        "a batch": sum(record["flops"].values()) / whole,
    }
    lines = [
        "## Where a batch's time goes\n",
        f"{stored['date']}, {stored['machine']}.\n",
        f'The table splits the time of a batch in the row "training, {SIZE} parameters, prompts of {PROMPT_TOKENS} '
        f'tokens" of the first table. Here it took {seconds(whole)}. On this machine, a product of two FP32 matrices '
        f"of 1,024 x 1,024 runs at {record['peak_gflops']:.0f} GFLOP/s on one thread.\n",
        "| part | seconds | share |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {seconds(value)} | {value / whole:.0%} |" for name, value in parts.items()]
    lines += [
        f"| the rest: assembly, records, Lightning | {seconds(remaining_s := whole - sum(parts.values()))} "
        f"| {remaining_s / whole:.0%} |",
        "",
    ]
    shares = ", ".join(f"{name} {rate / 1e9 / record['peak_gflops']:.0%}" for name, rate in reached.items())
    lines += [f"FLOPs per second, as a share of the rate of that matrix product: {shares}.", ""]
    lines += [
        "## Start\n",
        f"`scalerl train budget.steps=1` takes {record['one_member_cpu_s']:.1f} s of CPU from its start to its end, "
        f"with its verifier processes. Each further run of a study takes {record['further_member_s']:.2f} s of wall "
        "clock, including its step and two evaluations.",
        "",
    ]
    return lines
