"""Simulate examples/study: possible journals of two recipes with two seeds. These are not measurements.

python examples/make_study.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from sweeps.run.journal import Journal

HERE = Path(__file__).parent / "study"
# recipe: A, B, C_mid in virtual device hours
RECIPES = {"scalerl": (0.75, 1.8, 2.0), "scalerl+loss=dapo": (0.68, 1.7, 2.2)}
R0, SAMPLES, END, EVALS = 0.15, 4000, 12.0, 17


def main() -> None:
    """Write one run directory per member."""
    shutil.rmtree(HERE, ignore_errors=True)
    rng = np.random.default_rng(2510)
    for recipe, (a, b, c_mid) in RECIPES.items():
        for seed in (0, 1):
            name = f"{recipe.replace('+', '_').replace('=', '_')}-{seed}"
            ticks = iter(range(10**6))
            journal = Journal(HERE / "runs" / name, clock=lambda ticks=ticks: float(next(ticks)))
            journal.header(
                run=name, curve=recipe, recipe=recipe, seed=seed, baseline="scalerl", device="cpu", simulated=True
            )
            seed_asymptote = a + 0.004 * rng.standard_normal()
            for step, hours in enumerate(np.linspace(0.0, END, EVALS)):
                share = 0.0 if hours == 0 else 1 / (1 + (c_mid / hours) ** b)
                rate = float(rng.binomial(SAMPLES, R0 + (seed_asymptote - R0) * share)) / SAMPLES
                error = float(np.sqrt(rate * (1 - rate) / SAMPLES))
                metrics = {
                    "eval/heldout/pass_rate": rate,
                    "eval/heldout/pass_rate_se": round(error, 6),
                    "compute/virtual_device_hours": float(hours),
                    "compute/flops": float(hours) * 1e15,
                }
                journal.record("eval", 10 * step, metrics)
            journal.checkpoint(10 * (EVALS - 1))
            journal.end(10 * (EVALS - 1), "finished", None)
            journal.close()


if __name__ == "__main__":
    main()
