"""Simulate examples/sizes.csv: possible evaluations of one recipe at four model sizes. These are not measurements.

The test loss 1 - R follows the power law of arXiv 2509.25300 with k_max = 0.35 and N_0 = 1e9. Its intercept makes
larger models start behind at equal compute. Each seed has its own level (standard deviation 0.004 in R), AR(1) noise of
the policy (0.003) and sampling error (0.005). Compute is in invented GPU-hours.

    python examples/make_sizes.py > examples/sizes.csv
"""

from __future__ import annotations

import csv
import sys

import numpy as np

K_MAX, N_0 = 0.35, 1e9
SIZES = ("0.5B", "1.5B", "3B", "7B")
# The power law diverges at compute 0. Below this compute the loss is that of the untrained model.
START = 100.0


def loss(parameters: float, compute: float) -> float:
    """Return the test loss of the law."""
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
            seed_level = 0.004 * rng.standard_normal()
            policy_noise = 0.0
            for compute in np.linspace(0.0, 12000.0, 31):
                reward = (
                    1
                    - loss(float(size[:-1]) * 1e9, compute)
                    + seed_level
                    + policy_noise
                    + 0.005 * rng.standard_normal()
                )
                out.writerow(["scalerl", size, seed, f"{compute:g}", f"{np.clip(reward, 0, 1):.4f}"])
                policy_noise = 0.6 * policy_noise + 0.8 * 0.003 * rng.standard_normal()


if __name__ == "__main__":
    main()
