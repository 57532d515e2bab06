"""Repeat the published table of how fits depend on the window (arXiv 2510.13786, A.4 and A.7) with simulated runs.

The runs have the parameters of the paper's longest run (A 0.645, B 1.70, C_mid 10,909 GPU-hours, 74 evaluations up to
100,000), R0 0.30, and noise with a standard deviation of 0.004. The table has medians over simulated runs next to the
published values. They need not be equal, because the data of the real run are not available.

    python -m benchmarks.robustness --out docs/measured/robustness.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import make_curve
from sweeps.fit.fit import FitOptions, fit_curve

A, B, C_MID, R0, SD = 0.645, 1.70, 10909.0, 0.30, 0.004
# Window in GPU-hours, family, published B and A.
ROWS = (
    (1500.0, 50000.0, "sigmoid", "1.70", "0.645"),
    (0.0, 50000.0, "sigmoid", "1.7", "0.645"),
    (5000.0, 50000.0, "sigmoid", "1.67", "0.645"),
    (0.0, 100000.0, "sigmoid", "1.56", "0.655"),
    (1500.0, 50000.0, "power_law", "-", "1.0"),
    (5000.0, 50000.0, "power_law", "-", "0.74"),
    (30000.0, 60000.0, "power_law", "-", "recovers the ceiling"),
)


def set_up(runs: int) -> list[str]:
    """Return the text that explains the table."""
    return wrapped(
        f"{runs} runs were simulated with the parameters of the longest run of arXiv 2510.13786: A {A}, B {B}, C_mid "
        f"{C_MID:g} and R0 {R0}. They have evaluations up to 100,000 GPU-hours, and white noise with a standard "
        f"deviation of {SD}. *B* and *A* are medians over the runs, and *range of A* has the smallest and the largest "
        "A. *Verdicts* counts the runs by verdict. The published values are those of the paper's real run (its "
        "sections A.4 and A.7).",
        "",
    )


def main() -> None:
    """Print the table, and write it with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    compute = np.linspace(0.0, 100000.0, 75)
    with np.errstate(divide="ignore"):
        truth = R0 + (A - R0) / (1 + (C_MID / compute) ** B)
    lines = [
        *set_up(options.runs),
        "| window (GPU-h) | family | B | A | range of A | verdicts | published B | published A |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for low, high, family, their_b, their_a in ROWS:
        a, b, verdicts = [], [], []
        for rng in range(options.runs):
            reward = truth + SD * np.random.default_rng(rng).standard_normal(len(compute))
            fit_options = FitOptions(min_compute=low, max_compute=high, family=family)
            fit = fit_curve(make_curve("run", compute, reward), fit_options)
            verdicts.append(fit.verdict)
            if fit.A.value is not None and fit.B.value is not None:
                a.append(fit.A.value)
                b.append(fit.B.value)
        counted = ", ".join(f"{name} {verdicts.count(name)}" for name in sorted(set(verdicts)))
        lines.append(
            f"| {low / 1000:g}k to {high / 1000:g}k | {family} | {np.median(b):.2f} | {np.median(a):.3f} | "
            f"{min(a):.3f} to {max(a):.3f} | {counted} | {their_b} | {their_a} |"
        )
    print("\n".join(lines))
    if options.out:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
