"""Compare ten steps of the demo's task on a GPU with the same steps on the CPU, in every metric except times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STEPS = 10
SETTINGS = ("experiment=demo", "mlflow.uri=null", "evaluation.every_n_steps=5", f"budget.steps={STEPS}")
ON_CPU = "cpu"
RUNS: Mapping[str, tuple[str, ...]] = {
    ON_CPU: (),
    "gpu": (),
    "fsdp2": ("strategy=fsdp2",),
    "bf16": ("precision=bf16",),
    "live": ("driver=live",),
    **({"vllm": ("generator=vllm",), "vllm_live": ("driver=live", "generator=vllm")} if find_spec("vllm") else {}),
}
NOT_COMPARABLE = ("bf16", "live", "vllm", "vllm_live")  # runs whose curves may differ from the CPU's
# Metrics that are not compared: times differ between any two runs, and the probe's values are only rounding.
LEFT_OUT = ("time/", "compute/device_hours", "compute/wasted_device_hours", "train/probe_")

Metrics = dict[tuple[str, int], dict[str, float]]


def train(folder: Path, name: str) -> None:
    """Train one of the runs, with outputs under `folder`."""
    start = [sys.executable, "-m"]
    if name == "fsdp2":
        start += ["torch.distributed.run", "--nproc_per_node", "1", "-m"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if name == ON_CPU else None
    command = [*start, "lightning_scalerl.train", *SETTINGS, f"study={name}", *RUNS[name]]
    subprocess.run(command, check=True, cwd=folder, env=environment)


def metrics_of(folder: Path, name: str) -> Metrics:
    """Return a run's records by kind and step."""
    (journal,) = folder.glob(f"outputs/{name}/runs/*/metrics.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return {(each["kind"], each["step"]): each["metrics"] for each in records if "metrics" in each and "step" in each}


def compared(folder: Path) -> list[dict[str, Any]]:
    """Return for each run on the GPU its largest difference from the CPU's, and its probe's values."""
    on_cpu = metrics_of(folder, ON_CPU)
    comparisons = []
    for name in RUNS:
        on_gpu = metrics_of(folder, name)
        if name == ON_CPU:
            continue
        gaps = [
            (abs(value - on_gpu[key][metric]) / max(1e-3, abs(value)), metric, key[1])
            for key, metrics in on_cpu.items()
            for metric, value in metrics.items()
            if not metric.startswith(LEFT_OUT) and metric in on_gpu[key]
        ]
        last = on_gpu[("train", STEPS)]
        record: dict[str, Any] = {"run": name, "overrides": list(RUNS[name])}
        record["pass_rate"] = on_gpu[("eval", STEPS)]["eval/heldout/pass_rate"]
        if name not in NOT_COMPARABLE:
            furthest, metric, step = max(gaps)
            record |= {"values": len(gaps), "furthest": furthest, "metric": metric, "step": step}
        record |= {key: last[f"train/{key}"] for key in ("probe_gap_mean", "probe_gap_p99") if f"train/{key}" in last}
        comparisons.append(record)
    return comparisons
