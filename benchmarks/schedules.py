"""What does compute count for once the learning rate decays? Forecasts with the rate, without it, and the last value.

Every run of `experiment=schedules` is cut at 0.4, 0.55 and 0.7 of its compute; its last quarter's mean is foretold.

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
    "The runs of `experiment=schedules`: three seeds per recipe on the arithmetic task. Each is cut at 0.4, 0.55 and "
    "0.7 of its compute, and the mean of the last quarter is forecast. The columns have mean absolute errors:",
    "",
    "- **with the rate**: forecast over compute that counts less at a low learning rate (`sweeps/fit/schedule.py`).",
    "- **by compute alone**: forecast over compute.",
    "- **the last value**: the last evaluation before the cut.",
    "- **truth in the interval**: how many 95% intervals of the forecasts with the rate contain the truth.",
    "",
)


def cut(run: Curve, share: float) -> dict[str, tuple[float, bool]]:
    """Error, and whether the interval held, by rule; the last value's has none."""
    end = float(run.compute.max())
    late, early = run.compute > LATE * end, run.compute <= share * end
    came = float(run.reward[late].mean())
    found = {}
    for name, curve in (("with the rate", run), ("by compute alone", replace(run, at_peak=None))):
        value, low, high = predict_mean(fit_curve(curve.take(early)), run.compute[late])
        found[name] = (value - came, low <= came <= high)
    last = run.reward[early][np.argsort(run.compute[early])][-1]
    return {**found, "the last value": (float(last) - came, True)}


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", nargs="+", default=["outputs/schedules"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, bool]]]] = {}
    for curve in load(options.source).curves:
        if curve.at_peak is None:
            continue
        rules = found.setdefault(curve.recipe, defaultdict(list))
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
    for recipe, rules in found.items():
        errors = [f"{np.mean([abs(error) for error, _ in rules[name]]):.4f}" for name in names]
        held = [inside for _, inside in rules[names[0]]]
        lines.append(
            f"| {recipe.removeprefix('scalerl+precision=fp32+')} | {' | '.join(errors)} | {sum(held)} of {len(held)} |"
        )
    every = {name: [abs(error) for rules in found.values() for error, _ in rules[name]] for name in names}
    lines.append(f"| all | {' | '.join(f'{np.mean(every[name]):.4f}' for name in names)} | |")
    print("\n".join(lines))
    rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
