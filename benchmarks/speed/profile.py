"""Where a training step's time goes, and how far that is from what this machine multiplies matrices with."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.pairs import Record
from benchmarks.speed.setting import save_model

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE, PROMPT_TOKENS, BATCHES = "0.5M", 8, 20


def peak_gflops(size: int = 1024, repeats: int = 10) -> float:
    """Billions of operations a second of a product of two FP32 matrices on one thread; the best of some."""
    torch.set_num_threads(1)
    first, second = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        first @ second
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


def measure() -> list[Record]:
    """One record: seconds of a batch by what is done, in a process of its own."""
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
    return [{"peak_gflops": peak_gflops(), "parts": record}]


def section(found: Record) -> list[str]:
    """Markdown."""
    (record,) = found["records"]
    parts = record["parts"]
    whole = parts.pop("whole batch")
    lines = [
        "## Where a batch's time goes\n",
        f"{found['date']}, {found['machine']}; {record['peak_gflops']:.0f} GFLOP/s in a product of two FP32 matrices "
        f'of 1,024 on one thread. A batch of the setting "training, {SIZE} parameters, prompts of {PROMPT_TOKENS} '
        f'tokens" took {seconds_of(whole)} here.\n',
        "| part | seconds | share |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {seconds_of(value)} | {value / whole:.0%} |" for name, value in parts.items()]
    lines += [
        f"| the rest: assembly, records, Lightning | {seconds_of(rest := whole - sum(parts.values()))} "
        f"| {rest / whole:.0%} |",
        "",
    ]
    return lines


def seconds_of(value: float) -> str:
    """Milliseconds."""
    return f"{1000 * value:.1f} ms"
