"""Compare pipeline, PPO-off-policy and on-policy modes in virtual time: idle shares, staleness, and fitted curves.

Runs or continues `experiment=async_modes` with the public command, and some of its modes on two other clusters. Fits
every mode over virtual device hours, and writes tables and figure of docs/measured/async_modes.md between its marks.
The text around the marks is written by hand.

    python benchmarks/async_modes.py --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.marks import between
from sweeps.curve import FLOPS, VIRTUAL_HOURS, Curve
from sweeps.decide.rank import Ranking, rank
from sweeps.fit.fit import Fit, Interval, fit_curves
from sweeps.report.drawing import png
from sweeps.report.figures import curves_figure
from sweeps.run.journal import JournalView
from sweeps.source import LoadedStudy, load

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "async_modes.md"
FIGURE = ROOT / "docs" / "measured" / "async_modes.png"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
# A pass rate on the steep part of every mode's curve. The hours to reach it measure efficiency without a fit.
REACHED = 0.6
# Two other clusters, two seeds each: devices shared in turns, and a cluster whose trainer is the bottleneck.
OTHERS = (
    (
        "### Four devices that generate and train in turns",
        "async_colocated",
        (
            "cost_model.colocated=true",
            "cost_model.generator_devices=4",
            "cost_model.trainer_devices=4",
            "variant=async_mode_on_policy,async_mode_ppo_off_policy",
        ),
    ),
    (
        "### One generator, one trainer",
        "async_one_trainer",
        (
            "cost_model.trainer_devices=1",
            "variant=none,async_mode_pipeline_4,async_mode_pipeline_1,async_mode_ppo_off_policy",
        ),
    ),
)


def mode_of(recipe: str) -> str:
    """Return a recipe's mode. `scalerl` is PipelineRL-8; the labels of variants contain theirs."""
    name = recipe.partition("+async_mode=")[2] or "pipeline_8"
    return name if name[-1].isdigit() or name == "on_policy" else f"{name}_8"


def study(name: str, seeds: str, *overrides: str) -> LoadedStudy:
    """Run or continue a study and read it over virtual device hours."""
    command = [SCALERL, "train", "--multirun", f"study={name}", f"seed={seeds}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT)
    return over(name, VIRTUAL_HOURS)


def over(name: str, axis: str) -> LoadedStudy:
    """Read a study's curves over an axis, named and sorted by mode."""
    loaded = load([ROOT / "outputs" / name], x=axis)
    curves = [dataclasses.replace(curve, recipe=mode_of(curve.recipe)) for curve in loaded.curves]
    return dataclasses.replace(loaded, curves=sorted(curves, key=lambda curve: curve.recipe))


def distinct(curves: list[Curve]) -> list[Curve]:
    """Merge curves of modes whose runs are the same. Ranked twice, they would share their chance of being best."""
    merged: list[Curve] = []
    for curve in curves:
        twin = next(
            (n for n, earlier_curve in enumerate(merged) if np.array_equal(curve.reward, earlier_curve.reward)), None
        )
        if twin is None:
            merged.append(curve)
        else:
            merged[twin] = dataclasses.replace(merged[twin], recipe=f"{merged[twin].recipe} = {curve.recipe}")
    return merged


def last(view: JournalView, metric: str) -> float:
    """Return a metric at the end of a run."""
    return view.of_kind("train")[-1].metrics[metric]


def over_run(view: JournalView, metric: str) -> float:
    """Return a metric's mean over a run's steps."""
    return float(np.mean([record.metrics[metric] for record in view.of_kind("train")]))


def hours_to(curve: Curve, reward: float) -> float | None:
    """Return virtual device hours until the mean of three successive evaluations reaches `reward`, averaged over seeds.

    Returns None if a seed does not reach it.
    """
    hours_by_seed = []
    for seed in sorted(set(curve.seed)):
        mine = curve.seed == seed
        smooth = np.convolve(curve.reward[mine], np.ones(3) / 3, mode="valid")
        above = np.flatnonzero(smooth >= reward)
        if not above.size:
            return None
        hours_by_seed.append(float(curve.compute[mine][above[0] + 1]))
    return float(np.mean(hours_by_seed))


def shown(interval: Interval | None, form: str) -> str:
    """Format an interval; an end without a bound is written as "open"."""
    if interval is None or interval.value is None:
        return ""
    low, high = (format(end, form) if end is not None else "open" for end in (interval.low, interval.high))
    return f"{format(interval.value, form)} ({low} to {high})"


def scheduling(loaded: LoadedStudy) -> list[str]:
    """Return the table of idle shares, staleness and hours, which needs no fit."""
    lines = [
        "| mode | virtual device hours | trainer idle | generator idle | staleness: mean (in flight + queued) | p95 "
        f"| max | hours to a pass rate of {REACHED} | pass rate at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for curve in loaded.curves:
        mine = [view for view in loaded.runs if mode_of(str(view.header["recipe"])) == curve.recipe]

        def mean(metric: str, mine: list[JournalView] = mine) -> float:
            return float(np.mean([over_run(view, metric) for view in mine]))

        ends = [curve.reward[curve.seed == seed][-3:].mean() for seed in sorted(set(curve.seed))]
        reached = hours_to(curve, REACHED)
        cells = [
            curve.recipe,
            f"{np.mean([last(view, VIRTUAL_HOURS) for view in mine]):.4f}",
            f"{np.mean([last(view, 'virtual/trainer_idle') for view in mine]):.0%}",
            f"{np.mean([last(view, 'virtual/generator_idle') for view in mine]):.0%}",
            f"{mean('train/staleness_mean'):.1f} ({mean('train/staleness_in_flight_mean'):.1f} + "
            f"{mean('train/staleness_queued_mean'):.1f})",
            f"{mean('train/staleness_p95'):.1f}",
            f"{max(max(r.metrics['train/staleness_max'] for r in view.of_kind('train')) for view in mine):.0f}",
            f"{reached:.4f}" if reached else "not reached",
            f"{np.mean(ends):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def fitted(fits: list[Fit], ranking: Ranking) -> list[str]:
    """Return the table of A, B and C_mid over an axis, with B at the A that tied modes share."""
    shared = "" if ranking.shared_a is None else f" {ranking.shared_a:.3f}"
    lines = [f"| mode | verdict | A | B | C_mid | B at the shared A{shared} |", "|---|---|---|---|---|---|"]
    at_shared = {entry.recipe: entry.B_at_shared_A for entry in ranking.ranking}
    for fit in fits:
        cells = [shown(fit.A, ".3f"), shown(fit.B, ".2f"), shown(fit.C_mid, ".3g")]
        cells = [fit.recipe, fit.verdict, *cells, shown(at_shared[fit.recipe], ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Ranking: {ranking.sentence}."]


def main() -> int:
    """Run the studies, fit them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = parser.parse_args().seeds
    lines = ["### One generator, three trainers (`cost_model=cpu`)", ""]
    measured = study("async_modes", seeds, "experiment=async_modes")
    lines += [*scheduling(measured), ""]
    for axis, unit in ((VIRTUAL_HOURS, "virtual device hours"), (FLOPS, "FLOPs")):
        curves = distinct(over("async_modes", axis).curves)
        fits = list(fit_curves(curves))
        ranking = rank(fits)
        if axis == VIRTUAL_HOURS:
            FIGURE.write_bytes(png(curves_figure(curves, fits, ranking)))
        lines += [f"Fitted over {unit}, each distinct run once:", "", *fitted(fits, ranking), ""]
    lines += [f"![curves over virtual device hours]({FIGURE.name})", ""]
    for title, name, overrides in OTHERS:
        lines += [title, "", *scheduling(study(name, "0,1", *overrides)), ""]
    head = f"Written by `python benchmarks/async_modes.py --seeds {seeds}`."
    section = [head, "", *lines]
    PAGE.write_text(between(PAGE.read_text(), "measured", section))
    print("\n".join(section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
