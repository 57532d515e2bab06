"""Forecasts of layouts, checked: idle shares that are foretold beside those of live runs, and splits of 80 devices.

The live runs are real (processes, published weights, the ledger of PipelineRL-8), but their steps are paced: a step of
a generator or of the trainer takes a stated time, in which a process sleeps. So a busy machine does not disturb them.
Writes docs/measured/layouts.md; five minutes of two cores.

    python -m benchmarks.layouts
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # here and in the generators' processes

import numpy as np
from lightning.pytorch import Trainer, seed_everything

from benchmarks.paced import PacedTrainer
from lightning_scalerl import RolloutDataModule, ScaleRL, arithmetic_base_model
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.layouts import Layout, Measured, Workload, calibrated, foretell
from lightning_scalerl.task.arithmetic import ArithmeticTask

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measured" / "layouts.md"
TASK = ArithmeticTask(train=[80, 2000, 800, 400], heldout=[16, 60, 24, 20], seed=0)
PACE = {"decode_s": 0.05, "decode_rollout_s": 0.002}
TRAINERS = (0.8, 2.0)  # seconds of an optimizer step
PROMPTS, COMPLETIONS, SLOTS = 8, 4, 32
WARM_UP, STEPS = 16, 24
# Splits of 80 devices that are always shown: the paper's (arXiv 2510.13786).
PAPER = (64, 16)
TEXT = """\
# Layouts: how many devices generate, and how many train

What `scalerl layouts` foretells beside live runs, and which split of 80 devices wastes least.

Written by `python -m benchmarks.layouts`. The command is in [engines.md](../guide/engines.md#how-many-engines).

## Foretold and measured

Live runs of PipelineRL-8 with {prompts} prompts of {completions} completions a step, {slots} slots an engine, on one
machine; {steps} steps after {warm_up} in which queues fill. The processes, the published weights and the ledger are
real; the time of a step is set: a decoding step takes {decode_ms} ms and {rollout_ms} ms for each rollout, a training
step what the table says, and the process sleeps up to then. So idle shares do not depend on what else the machine
does, but for what takes longer than its time. *Foretold by the run with* 1 or 2 engines: only that run's busy times
are known, as `scalerl layouts --run` has them, not the pace.

{checked}

## 80 devices

Virtual devices with the rates of one CPU core (`cost_model=cpu`), the arithmetic task's model and lengths, 48 prompts
of 16 completions, 64 slots an engine; engines of four devices exchange sums for 0.2 ms a token. Where the best split
lies follows from these rates: with a larger model and longer completions generation takes the greater share, and the
paper's 64 + 16 is for those. Idle generators are those with nothing in flight; engines that are half empty waste too,
which the time of a step shows.

{many}
"""


class Times(Recorder):
    """Seconds that have passed, in which the trainer worked, and in which all engines together did, by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, tuple[float, Mapping[str, float], Mapping[str, float]]] = {}
        self.module: Any = None

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keep them."""
        if kind == "train":
            self.by_step[step] = time.monotonic(), self.module.driver.state_dict(), dict(metrics)


def live(engines: int, train_s: float) -> tuple[Measured, float]:
    """Train with so many paced engines; return what was measured after the queues had filled, and the mean length."""
    times = Times()
    overrides = ["generator._target_=benchmarks.paced.PacedGenerator", f"generator.slots={SLOTS}", "precision=fp32"]
    overrides += [f"+generator.{name}={value}" for name, value in PACE.items()]
    overrides += ["driver=live", f"driver.generators={engines}", "driver.probe_every=1000", "filter=none"]
    overrides += [f"batch.prompts={PROMPTS}", f"batch.completions={COMPLETIONS}", "resampling=uniform"]
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_steps=WARM_UP + STEPS,
        accelerator="cpu",
        logger=False,
        callbacks=[PacedTrainer(train_s), times],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = times.module = ScaleRL(arithmetic_base_model(), "scalerl", overrides)
    trainer.fit(module, datamodule=RolloutDataModule(TASK, seed=0))
    (first, before, _), (last, after, _) = times.by_step[WARM_UP], times.by_step[WARM_UP + STEPS]
    passed, trained, generated = (after[name] - before[name] for name in ("passed", "trained", "generated"))
    each = [metrics for step, (_, _, metrics) in times.by_step.items() if step > WARM_UP]
    pause = float(np.median([metrics["live/publish_s"] for metrics in each]))
    length = float(np.mean([metrics["train/completion_tokens"] for metrics in each]))
    return Measured((last - first) / STEPS, 1 - trained / passed, 1 - generated / passed / engines, pause), length


def said(layout: Layout | Measured) -> str:
    """Return a step and both idle shares as cells of a table."""
    return f"{layout.step_s:.2f} | {layout.trainer_idle:.0%} | {layout.generator_idle:.0%}"


def check() -> list[str]:
    """Return the table of live runs beside what was foretold of them."""
    lines = [
        "| engines | a training step | | seconds a step | trainer idle | generators idle |",
        "|---|---|---|---|---|---|",
    ]
    steps, trainer, generators = [], [], []
    for train_s in TRAINERS:
        runs = {engines: live(engines, train_s) for engines in (1, 2)}
        for engines, (found, length) in runs.items():
            rates = CostModel(
                **PACE,
                generator_devices=engines,
                trainer_devices=1,
                colocated=False,
                decode_context_s=0.0,
                prefill_token_s=0.0,
                train_s=train_s,
                train_token_s=0.0,
                publish_s=found.publish_s,
                source="paced",
            )
            recipe = build_recipe(compose(["filter=none", "resampling=uniform"]), "")
            work = Workload(recipe.choices, PROMPTS, COMPLETIONS, SLOTS, 8.0, length, recipe.context.max_new_tokens)
            other = 3 - engines
            measured_there = calibrated(work, replace(rates, generator_devices=other), runs[other][0])
            from_other = foretell(work, replace(measured_there, generator_devices=engines))
            by_pace = foretell(work, rates)
            first = f"| {engines} | {train_s} s"
            lines.append(f"{first} | measured | {said(found)} |")
            lines.append(f"{first} | foretold by the pace | {said(by_pace)} |")
            lines.append(f"{first} | foretold by the run with {other} | {said(from_other)} |")
            for layout in (by_pace, from_other):
                steps.append(abs(layout.step_s / found.step_s - 1))
                trainer.append(abs(layout.trainer_idle - found.trainer_idle))
                generators.append(abs(layout.generator_idle - found.generator_idle))
    return [
        *lines,
        "",
        f"Largest gaps between what was foretold and what was measured: {max(steps):.0%} of a step's seconds, "
        f"{100 * max(trainer):.0f}",
        f"points of the trainer's idle share, {100 * max(generators):.0f} of the generators'. The clock shares "
        "rollouts evenly, so its engines are idle",
        "together; live, a group goes whole to one engine, and the other may be idle meanwhile. Which split is faster, "
        "and by how much,",
        "is the seconds' to say.",
    ]


def many() -> list[str]:
    """Return the table of splits of 80 devices, with the rates of `cost_model=cpu`."""
    recipe = build_recipe(compose([]), "")
    work = Workload(recipe.choices, 48, 16, 64, 10.0, 13.0, recipe.context.max_new_tokens)
    lines = [
        "| generators + trainer | tensor parallel | ms a step | generators idle | trainer idle | device hours of 1,000 "
        "steps |",
        "|---|---|---|---|---|---|",
    ]
    for generators in (8, 16, 24, 32, 40, 48, 56, 64, 72):
        for partners in (1, 4):
            split = {"generator_devices": generators, "trainer_devices": 80 - generators, "tensor_parallel": partners}
            layout = foretell(work, replace(recipe.cost_model, **split, tensor_parallel_s=2e-4))
            mark = " (the paper's)" if (generators, 80 - generators) == PAPER else ""
            lines.append(
                f"| {generators} + {80 - generators}{mark} | {partners} | {1000 * layout.step_s:.1f} "
                f"| {layout.generator_idle:.0%} | {layout.trainer_idle:.0%} | {layout.device_hours:.2f} |"
            )
    return lines


def main() -> None:
    """Measure, foretell, write the page."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    text = TEXT.format(
        prompts=PROMPTS,
        completions=COMPLETIONS,
        slots=SLOTS,
        steps=STEPS,
        warm_up=WARM_UP,
        decode_ms=round(1000 * PACE["decode_s"]),
        rollout_ms=round(1000 * PACE["decode_rollout_s"]),
        checked="\n".join(check()),
        many="\n".join(many()),
    )
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
