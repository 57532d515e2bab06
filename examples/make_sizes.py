"""Simulates examples/sizes.csv: what one recipe at four model sizes could look like. Not measurements.

Test loss 1 - R follows the power law of arXiv 2509.25300 with k_max = 0.35 and N_0 = 1e9, and an intercept for
which larger models start behind at equal compute. Each seed has its own level (sd 0.004 in R), a wandering
policy (AR(1), sd 0.003) and sampling error (sd 0.005). Compute is in invented GPU-hours.

    python examples/make_sizes.py > examples/sizes.csv
"""

from __future__ import annotations

import csv
import sys

import numpy as np

K_MAX, N_0 = 0.35, 1e9
SIZES = ("0.5B", "1.5B", "3B", "7B")
# The law has no start: below this compute the untrained model's loss stands.
START = 100.0


def loss(parameters: float, compute: float) -> float:
    """The law's test loss."""
    k = K_MAX / (1 + N_0 / parameters)
    level = np.log(0.55) + 0.12 * np.log(parameters / 1e9)
    return float(np.exp(level - k * np.log(max(compute, START) / 300.0)))


def main() -> None:
    """Write the table to standard output."""
    rng = np.random.default_rng(25300)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["recipe", "size", "seed", "compute", "reward"])
    for size in SIZES:
        for seed in (0, 1):
            own = 0.004 * rng.standard_normal()
            wander = 0.0
            for compute in np.linspace(0.0, 12000.0, 31):
                reward = 1 - loss(float(size[:-1]) * 1e9, compute) + own + wander + 0.005 * rng.standard_normal()
                out.writerow(["scalerl", size, seed, f"{compute:g}", f"{np.clip(reward, 0, 1):.4f}"])
                wander = 0.6 * wander + 0.8 * 0.003 * rng.standard_normal()


if __name__ == "__main__":
    main()
