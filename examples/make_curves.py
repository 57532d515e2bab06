"""Simulate examples/curves.csv: possible evaluations of four recipes. These are not measurements.

The ScaleRL row uses the parameters of arXiv 2510.13786, Table 1; the other parameters are invented. Each seed has its
own asymptote (standard deviation 0.004), AR(1) noise of the policy (0.006) and sampling error (0.006).

    python examples/make_curves.py > examples/curves.csv
"""

from __future__ import annotations

import csv
import sys

import numpy as np

R0 = 0.30
# recipe: A, B, C_mid (GPU-hours), compute of the last evaluation
RECIPES = {
    "scalerl": (0.610, 1.92, 2542.0, 16000.0),
    "scalerl+aggregation=token": (0.600, 1.75, 9000.0, 6000.0),
    "scalerl+loss=dapo": (0.530, 1.80, 2700.0, 16000.0),
    "scalerl+normalization=prompt": (0.606, 1.50, 3300.0, 16000.0),
}


def main() -> None:
    """Write the table to standard output."""
    rng = np.random.default_rng(2510)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["recipe", "baseline", "seed", "compute", "reward"])
    for recipe, (a, b, c_mid, end) in RECIPES.items():
        for seed in (0, 1):
            seed_asymptote = a + 0.004 * rng.standard_normal()
            policy_noise = 0.0
            for compute in np.linspace(0.0, end, 33):
                share = 0.0 if compute == 0 else 1 / (1 + (c_mid / compute) ** b)
                reward = R0 + (seed_asymptote - R0) * share + policy_noise + 0.006 * rng.standard_normal()
                out.writerow([recipe, "scalerl", seed, f"{compute:g}", f"{np.clip(reward, 0, 1):.4f}"])
                policy_noise = 0.6 * policy_noise + 0.8 * 0.006 * rng.standard_normal()


if __name__ == "__main__":
    main()
