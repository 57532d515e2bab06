"""Simulate examples/grid.csv: seven recipes of a grid of three axes at two levels. These are not measurements.

Each recipe follows a sigmoid with white noise. kl=fixed lowers the asymptote by 0.08, precision=fp32 raises it by 0.03,
and aggregation=token takes 1.6 times the compute. The eighth recipe, with all three changes, is left out.

    python examples/make_grid.py > examples/grid.csv
"""

from __future__ import annotations

from itertools import product

import numpy as np

COMPUTE = np.array([0, 250, 500, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000])
SEEDS = 2
START, TOP, MIDDLE, EXPONENT = 0.25, 0.62, 900.0, 1.8
NOISE = 0.006


def main() -> None:
    """Print the grid as CSV."""
    rng = np.random.default_rng(3)
    print("recipe,seed,compute,reward")
    for token, kl, fp32 in product((False, True), repeat=3):
        if token and kl and fp32:
            continue
        label = (
            "scalerl" + "+aggregation=token" * token + "+kl=fixed+kl.coefficient=0.2" * kl + "+precision=fp32" * fp32
        )
        top, middle = TOP - 0.08 * kl + 0.03 * fp32, MIDDLE * (1.6 if token else 1.0)
        for seed in range(SEEDS):
            compute_ratio = np.where(COMPUTE > 0, middle / np.maximum(COMPUTE, 1), np.inf)
            reward = START + (top - START) / (1 + compute_ratio**EXPONENT) + NOISE * rng.standard_normal(len(COMPUTE))
            for c, r in zip(COMPUTE, reward, strict=True):
                print(f"{label},{seed},{c},{r:.4f}")


if __name__ == "__main__":
    main()
