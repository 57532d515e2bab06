"""Ten steps of the demo's task on a GPU beside the same steps on the CPU: every metric that no clock is in."""

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
OF_THEIR_OWN = ("bf16", "live", "vllm", "vllm_live")  # curves that are not the CPU's
# Of these no two runs are alike; and the probe's distances are nothing but rounding.
LEFT_OUT = ("time/", "compute/device_hours", "compute/wasted_device_hours", "train/probe_")

Metrics = dict[tuple[str, int], dict[str, float]]


def train(folder: Path, name: str) -> None:
    """Train one of the runs, its outputs under `folder`."""
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
    """Return of each run on the GPU how far it is from the CPU's, and what its probe found."""
    ours = metrics_of(folder, ON_CPU)
    found = []
    for name in RUNS:
        theirs = metrics_of(folder, name)
        if name == ON_CPU:
            continue
        gaps = [
            (abs(value - theirs[key][metric]) / max(1e-3, abs(value)), metric, key[1])
            for key, metrics in ours.items()
            for metric, value in metrics.items()
            if not metric.startswith(LEFT_OUT) and metric in theirs[key]
        ]
        last = theirs[("train", STEPS)]
        record: dict[str, Any] = {"run": name, "overrides": list(RUNS[name])}
        record["pass_rate"] = theirs[("eval", STEPS)]["eval/heldout/pass_rate"]
        if name not in OF_THEIR_OWN:
            furthest, metric, step = max(gaps)
            record |= {"values": len(gaps), "furthest": furthest, "metric": metric, "step": step}
        record |= {key: last[f"train/{key}"] for key in ("probe_gap_mean", "probe_gap_p99") if f"train/{key}" in last}
        found.append(record)
    return found
