"""The study of docs/measured/real_model.md with longer runs on one GPU of 80 GB, with our own sampler and with vLLM.

    python -m benchmarks.gpu.real_model MODEL.gguf [SECOND_HALF] [--out FOLDER] [--minutes 8] [--steps 400]

After --minutes the current run stops at its next step, and the remaining runs are skipped.
The file may come in two halves (`split -n 2 MODEL.gguf`). The folder gets a journal of each run and
results.json: tokens per second, the share of the GPU's peak, and the held-out pass rates.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from sweeps.run.journal import JournalView, read_journal

ROOT = Path(__file__).resolve().parent.parent.parent
DENSE_BF16 = 989e12  # FLOPs per second of an H100 or H200 by its data sheet, without sparsity
# For the GPU: BF16, 64 prompts x 16 per step, and passes as large as its memory allows.
SETTINGS = (
    *("experiment=real_model", "precision=bf16", "batch.prompts=64", "batch.completions=16"),
    *("batch.micro_batch=1024", "batch.micro_tokens=65536", "generator.slots=1024", "evaluation.every_n_steps=20"),
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "dapo": ("loss=dapo",),
    "quarter": ("batch.prompts=16",),
    "kl": ("kl=fixed",),
    "lora": ("adapter=lora", "optimizer.lr=2e-4"),
    **({"vllm": ("generator=vllm", "driver=live")} if find_spec("vllm") else {}),
}
# Time for a run to finish its step and save after SIGTERM.
STOPS_IN_S = 60.0


def joined(parts: Sequence[Path], folder: Path) -> Path:
    """Join the parts of the model in this order into one file, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.gguf").open("wb") as joined_file:
        for part in parts:
            with part.open("rb") as handle:
                shutil.copyfileobj(handle, joined_file)
    return folder


def train(name: str, model: Path, folder: Path, steps: int, end: float, overrides: Sequence[str]) -> None:
    """Train one of the runs until its steps are done or the time is up. A failed run is not retried."""
    run_settings = [f"model.path={model}", f"budget.steps={steps}", f"output_dir={folder / name}"]
    command = [sys.executable, "-m", "lightning_scalerl.train", *SETTINGS, *RUNS[name], *run_settings, *overrides]
    with (folder / f"{name}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        for stop_process in (process.terminate, process.kill):
            try:
                process.wait(max(0.0, end - time.monotonic()))
                return
            except subprocess.TimeoutExpired:
                stop_process()
                end = time.monotonic() + STOPS_IN_S


def summary(journal: JournalView) -> dict[str, Any]:
    """Return a run's steps, tokens per second, share of the peak, and pass rates."""
    steps, evaluations = journal.of_kind("train"), journal.of_kind("eval")
    run_summary: dict[str, Any] = {
        "status": journal.status,
        "steps": len(steps),
        "pass_rate": [[each.step, each.metrics.get("eval/heldout/pass_rate")] for each in evaluations],
    }
    if steps:
        last = steps[-1].metrics
        spent = {part: 3600 * last[f"compute/device_hours_{part}"] for part in ("generate", "train")}
        tokens = last["verify/scored"] * fmean(each.metrics["train/completion_tokens"] for each in steps)
        run_summary |= {
            "seconds": spent,
            "tokens_a_second": tokens / spent["generate"] if spent["generate"] else None,
            "share_of_the_peak_in_training": last["compute/flops_train"] / spent["train"] / DENSE_BF16,
        }
    return run_summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs one after the other, and write results.json after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", type=Path, help="the GGUF file, or its two halves")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "real_model_gpu")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", default=",".join(RUNS), help="of these alone, with commas")
    parser.add_argument("--override", action="append", default=[], help="of every run")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    model = joined(options.model, options.out / "model")
    results: dict[str, Any] = {}
    chosen = options.runs.split(",")
    for number, name in enumerate(chosen):
        # Equal shares of the remaining time: a run that ends early leaves more to the others.
        remaining_s = begin + 60 * options.minutes - STOPS_IN_S - time.monotonic()
        if remaining_s <= 0:
            break
        train(
            name,
            model,
            options.out,
            options.steps,
            time.monotonic() + remaining_s / (len(chosen) - number),
            options.override,
        )
        for journal in options.out.glob(f"{name}/runs/*/metrics.jsonl"):
            results[name] = summary(read_journal(journal.parent))
            shutil.copyfile(journal, options.out / f"{name}.jsonl")
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
