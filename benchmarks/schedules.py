"""Should compute count less once the learning rate decays? Compares forecasts with and without the rate.

Every run of `experiment=schedules` is cut at 0.4, 0.55 and 0.7 of its compute, and the mean of its last quarter is
forecast. The last value is the baseline.

    scalerl train --multirun experiment=schedules
    python -m benchmarks.schedules --out docs/measured/schedules.md
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.predict import predict_mean
from sweeps.source.load import load

CUTS = (0.4, 0.55, 0.7)
LATE = 0.75
SET_UP = wrapped(
    "The runs are those of `experiment=schedules`: three seeds per recipe on the arithmetic task. Each run is cut at "
    "0.4, 0.55 and 0.7 of its compute. From the evaluations before the cut, the mean reward of the last quarter of "
    "the run is forecast. Three columns show mean absolute errors of forecasts:",
    "",
    "- **with the rate**: by a curve over compute that counts for less at a low learning rate "
    "(`sweeps/fit/schedule.py`).",
    "- **by compute alone**: by a curve over compute that always counts in full.",
    "- **the last value**: the last evaluation before the cut, taken as the forecast.",
    "",
    "**Truth in the interval** is the number of forecasts with the rate whose 95% interval contains the truth.",
    "",
)


def cut(run: Curve, share: float) -> dict[str, tuple[float, bool]]:
    """Return (error, whether the interval contains the truth) by rule. The last value has no interval."""
    end = float(run.compute.max())
    late, early = run.compute > LATE * end, run.compute <= share * end
    later_mean = float(run.reward[late].mean())
    results_by_rule = {}
    for name, curve in (("with the rate", run), ("by compute alone", replace(run, at_peak=None))):
        value, low, high = predict_mean(fit_curve(curve.take(early)), run.compute[late])
        results_by_rule[name] = (value - later_mean, low <= later_mean <= high)
    last = run.reward[early][np.argsort(run.compute[early])][-1]
    return {**results_by_rule, "the last value": (float(last) - later_mean, True)}


def main() -> None:
    """Print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", nargs="+", default=["outputs/schedules"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    by_recipe: dict[str, dict[str, list[tuple[float, bool]]]] = {}
    for curve in load(options.source).curves:
        if curve.at_peak is None:
            continue
        rules = by_recipe.setdefault(curve.recipe, defaultdict(list))
        for seed in np.unique(curve.seed):
            for share in CUTS:
                for name, each in cut(curve.take(curve.seed == seed), share).items():
                    rules[name].append(each)
    names = ["with the rate", "by compute alone", "the last value"]
    lines = [
        *SET_UP,
        f"| recipe | {' | '.join(names)} | truth in the interval |",
        "|---|---|---|---|---|",
    ]
    for recipe, rules in by_recipe.items():
        errors = [f"{np.mean([abs(error) for error, _ in rules[name]]):.4f}" for name in names]
        hits = [inside for _, inside in rules[names[0]]]
        lines.append(
            f"| {recipe.removeprefix('scalerl+precision=fp32+')} | {' | '.join(errors)} | {sum(hits)} of {len(hits)} |"
        )
    all_errors = {name: [abs(error) for rules in by_recipe.values() for error, _ in rules[name]] for name in names}
    lines.append(f"| all | {' | '.join(f'{np.mean(all_errors[name]):.4f}' for name in names)} | |")
    print("\n".join(lines))
    rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
