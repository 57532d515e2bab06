"""Forecasts on noisy traces of somebody else: cut at two thirds, the mean of the rest is foretold.

    python benchmarks/traces.py TABLE [--out docs/measured/traces.md]

TABLE has columns recipe, seed, compute and reward, a short noisy training trace a recipe. Yardsticks are the last value
and the mean of the last five.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from sweeps.curve import Curve, make_curve
from sweeps.fit.fit import fit_curves
from sweeps.fit.predict import predict_mean
from sweeps.source import load


def cut(curve: Curve) -> tuple[Curve, Curve]:
    """The first two thirds of a curve's compute, and the rest."""
    early = curve.compute <= 2 / 3 * curve.compute.max()
    first, rest = (
        make_curve(curve.recipe, curve.compute[part], curve.reward[part], curve.seed[part]) for part in (early, ~early)
    )
    return first, rest


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = [cut(curve) for curve in load([str(options.table)]).curves]
    rows, verdicts = [], Counter[str]()
    for fit, (first, rest) in zip(fit_curves([first for first, _ in parts]), parts, strict=True):
        value, low, high = predict_mean(fit, rest.compute)
        came = float(rest.reward.mean())
        five, last = float(first.reward[-5:].mean()), float(first.reward[-1])
        verdicts[fit.verdict] += 1
        rows.append((abs(value - came), abs(five - came), abs(last - came), low <= came <= high, high - low))
    error, five, last, held, width = np.mean(np.array(rows, dtype=float), axis=0)
    lines = [
        "# Forecasts on noisy traces of another project",
        "",
        "How well forecasts hold on short training traces of tiny batches.",
        "",
        f"Written by `python benchmarks/traces.py {options.table.name}`: {len(rows)} training traces of 30 to 49 steps "
        "with tiny batches, cut at two thirds; the mean of the rest is foretold.",
        "",
        "| | mean absolute error |",
        "|---|---|",
        f"| forecast | {error:.3f} |",
        f"| mean of the last five | {five:.3f} |",
        f"| last value | {last:.3f} |",
        "",
        f"{round(held * len(rows))} of {len(rows)} intervals ({held:.0%}) hold what came; mean width {width:.3f}. "
        + "Verdicts: "
        + ", ".join(f"{name} {count}" for name, count in verdicts.most_common())
        + ".",
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
