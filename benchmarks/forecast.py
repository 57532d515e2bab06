"""Does a fit to the first half of a study's compute foretell its end? And are the controls refused?

For each set of seeds, the leave-one-out is run with those seeds (adopting what is there). For every recipe, a
sigmoid is fitted to the evaluations up to half of its compute, and the mean reward of the last quarter is
predicted with a 95% interval (the noise of that mean included). Two controls go through the same commands: the
recipe at a learning rate of 0, and the recipe cut off before its bend; neither may be `identifiable`.

    python benchmarks/forecast.py --seeds 0,1 2,3 4,5 --out docs/measured/forecast.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.curve import UNITS, Curve
from sweeps.fit.fit import fit_curves
from sweeps.fit.predict import predict_mean
from sweeps.run.health import mechanism_counters
from sweeps.run.journal import find_runs, read_journal
from sweeps.run.spec import RunSpec
from sweeps.source import load

SCALERL = str(Path(sys.executable).with_name("scalerl"))


def run_study(name: str, *overrides: str) -> Path:
    """Run (or adopt) a study through the public command."""
    command = [
        SCALERL,
        "train",
        "--multirun",
        "experiment=leave_one_out",
        f"study={name}",
        "mlflow.uri=null",
        *overrides,
    ]
    subprocess.run(command, check=True)
    return Path("outputs") / name


def forecasts(curves: list[Curve]) -> list[dict[str, Any]]:
    """One forecast a recipe: what was predicted from the first half, what came."""
    # The spread between seeds is pooled over recipes, so all are fitted together, each to its own first half.
    fits = {
        fit.recipe: fit
        for fit in fit_curves([curve.take(curve.compute <= curve.compute.max() / 2) for curve in curves])
    }
    rows = []
    for curve in curves:
        fit = fits[curve.recipe]
        tail = curve.compute > 0.75 * curve.compute.max()
        actual = float(curve.reward[tail].mean())
        value, low, high = predict_mean(fit, curve.compute[tail])
        half = curve.compute <= float(curve.compute.max()) / 2
        last = np.mean([curve.reward[half & (curve.seed == seed)][-1] for seed in np.unique(curve.seed)])
        rows.append(
            {
                "recipe": curve.recipe,
                "verdict_half": fit.verdict,
                "predicted": value,
                "low": low,
                "high": high,
                "actual": actual,
                "last": float(last),
                "inside": bool(low <= actual <= high),
            }
        )
    return rows


def recipe_by_command(source: Path, *options: str) -> dict[str, Any]:
    """The recipe itself (no variant) as `scalerl fit --json` gives it."""
    command = [SCALERL, "fit", str(source), "--json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return next(fit for fit in json.loads(done.stdout) if "+" not in fit["recipe"])


def controls(seeds: str) -> list[tuple[str, str]]:
    """Learning rate 0, and a window that ends just before the bend; neither may have a named asymptote."""
    name = f"forecast_control_{seeds.replace(',', '_')}"
    still = run_study(name, "variant=none", f"seed={seeds}", "optimizer.lr=0", "budget.steps=160")
    study = Path("outputs") / study_name(seeds)
    fit = recipe_by_command(study)
    cut = 0.9 * fit["C_mid"]["value"]
    verdicts = [
        ("learning rate 0", recipe_by_command(still)["verdict"]),
        (
            f"cut at 0.9 C_mid ({cut:.3g} {UNITS[fit['compute_axis']]})",
            recipe_by_command(study, "--max-compute", str(cut))["verdict"],
        ),
    ]
    assert all(verdict != "identifiable" for _, verdict in verdicts), verdicts
    return verdicts


def mechanisms(study: Path) -> list[str]:
    """What each variant changed, and how often that acted; every one departs on one axis and acts, or this raises."""
    lines = ["| variant | departs on | acted in this share of steps |", "|---|---|---|"]
    counters = mechanism_counters([read_journal(run_dir) for run_dir in find_runs(study)])
    specs = {spec.recipe: spec for spec in map(RunSpec.read, find_runs(study))}
    for recipe, spec in specs.items():
        if recipe == spec.baseline:
            continue
        (axis,) = spec.departures
        share = counters[recipe][axis]
        assert share > 0, f"{recipe} changed nothing"
        lines.append(f"| {recipe} | {axis} | {share:.2f} |")
    return lines


def study_name(seeds: str) -> str:
    """One a set of seeds."""
    return f"forecast_{seeds.replace(',', '_')}"


def main() -> int:
    """Run all sets, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", default=["0,1", "2,3", "4,5"], help="one set a word")
    parser.add_argument("--out", default="docs/measured/forecast.md", help="Markdown file to write")
    parser.add_argument("--no-controls", action="store_true", help="leave the controls out: they train, too")
    options = parser.parse_args()
    lines = [
        "# Forecasts from half the compute",
        "",
        "How well a fit to half of a run's compute foretells its last quarter, on sets of two seeds each.",
        "",
        f"Written by `python benchmarks/forecast.py`. {HOW}",
        "",
    ]
    everything: list[dict[str, Any]] = []
    for seeds in options.seeds:
        study = run_study(study_name(seeds), f"seed={seeds}")
        rows = forecasts(load([str(study)]).curves)
        everything += rows
        lines += [f"## Seeds {seeds}", "", *table(rows), "", *summary(rows), ""]
        lines += [*mechanisms(study), ""]
        if not options.no_controls:
            lines += [f"Control, {what}: `{verdict}`." for what, verdict in controls(seeds)] + [""]
    lines += ["## All sets", "", *summary(everything), ""]
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


HOW = (
    "Each recipe is fitted to the evaluations in the first half of its compute, and the mean of those in the last "
    "quarter is predicted, with a 95% interval that includes the noise of that mean."
)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    head = [
        "| recipe | verdict at half | last value | predicted | 95% interval | came | inside |",
        "|---|---|---|---|---|---|---|",
    ]
    return head + [
        f"| {row['recipe']} | {row['verdict_half']} | {row['last']:.3f} | {row['predicted']:.3f} "
        f"| {row['low']:.3f} to {row['high']:.3f} | {row['actual']:.3f} | {'yes' if row['inside'] else '**no**'} |"
        for row in rows
    ]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Coverage, error and width."""
    inside = sum(row["inside"] for row in rows)
    errors = np.array([row["predicted"] - row["actual"] for row in rows])
    last = float(np.mean([abs(row["last"] - row["actual"]) for row in rows]))
    width = float(np.median([row["high"] - row["low"] for row in rows]))
    return [
        f"{inside} of {len(rows)} intervals ({inside / len(rows):.0%}) hold what came; "
        f"mean absolute error {np.abs(errors).mean():.3f} (the last value's: {last:.3f}), mean error "
        f"{errors.mean():+.3f}, median width {width:.3f}."
    ]


if __name__ == "__main__":
    sys.exit(main())
