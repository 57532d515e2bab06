"""Pipeline, PPO-off-policy and on-policy on virtual time: idle shares, staleness, curves, and what is fitted to them.

Runs (or adopts) `experiment=async_modes` through the public command, and some of its modes on two other clusters;
fits every mode over virtual device hours; and writes tables and figure of docs/measured/async_modes.md between its
marks. The words there are ours.

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
# A pass rate that all modes pass on the steep part of the curve: efficiency without a model of it.
REACHED = 0.6
# The same number of devices, but shared in turns; and a cluster whose trainer is the bottleneck. Two seeds each.
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
    """`scalerl` is PipelineRL-8; variants name theirs."""
    name = recipe.partition("+async_mode=")[2] or "pipeline_8"
    return name if name[-1].isdigit() or name == "on_policy" else f"{name}_8"


def study(name: str, seeds: str, *overrides: str) -> LoadedStudy:
    """Run (or adopt) a study and read it over virtual device hours."""
    command = [SCALERL, "train", "--multirun", f"study={name}", f"seed={seeds}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT)
    return over(name, VIRTUAL_HOURS)


def over(name: str, axis: str) -> LoadedStudy:
    """A study's curves over an axis, named and sorted by mode."""
    loaded = load([ROOT / "outputs" / name], x=axis)
    curves = [dataclasses.replace(curve, recipe=mode_of(curve.recipe)) for curve in loaded.curves]
    return dataclasses.replace(loaded, curves=sorted(curves, key=lambda curve: curve.recipe))


def distinct(curves: list[Curve]) -> list[Curve]:
    """One curve for modes that turned out to be one run under two names: ranked twice, they would share chances."""
    kept: list[Curve] = []
    for curve in curves:
        twin = next((n for n, other in enumerate(kept) if np.array_equal(curve.reward, other.reward)), None)
        if twin is None:
            kept.append(curve)
        else:
            kept[twin] = dataclasses.replace(kept[twin], recipe=f"{kept[twin].recipe} = {curve.recipe}")
    return kept


def last(view: JournalView, metric: str) -> float:
    """A metric at the end of a run."""
    return view.of_kind("train")[-1].metrics[metric]


def over_run(view: JournalView, metric: str) -> float:
    """A metric's mean over a run's steps."""
    return float(np.mean([record.metrics[metric] for record in view.of_kind("train")]))


def hours_to(curve: Curve, reward: float) -> float | None:
    """Virtual device hours until the mean of three evaluations in a row reaches `reward`; over seeds, or None."""
    found = []
    for seed in sorted(set(curve.seed)):
        mine = curve.seed == seed
        smooth = np.convolve(curve.reward[mine], np.ones(3) / 3, mode="valid")
        above = np.flatnonzero(smooth >= reward)
        if not above.size:
            return None
        found.append(float(curve.compute[mine][above[0] + 1]))
    return float(np.mean(found))


def shown(interval: Interval | None, form: str) -> str:
    """An interval as text; an open end says so."""
    if interval is None or interval.value is None:
        return ""
    low, high = (format(end, form) if end is not None else "open" for end in (interval.low, interval.high))
    return f"{format(interval.value, form)} ({low} to {high})"


def scheduling(loaded: LoadedStudy) -> list[str]:
    """What the schedule does, before any curve is fitted."""
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
    """A, B and C_mid over an axis, with B at the A that the tied modes share."""
    shared = "" if ranking.shared_a is None else f" {ranking.shared_a:.3f}"
    lines = [f"| mode | verdict | A | B | C_mid | B at the shared A{shared} |", "|---|---|---|---|---|---|"]
    at_shared = {entry.recipe: entry.B_at_shared_A for entry in ranking.ranking}
    for fit in fits:
        cells = [shown(fit.A, ".3f"), shown(fit.B, ".2f"), shown(fit.C_mid, ".3g")]
        cells = [fit.recipe, fit.verdict, *cells, shown(at_shared[fit.recipe], ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Ranking: {ranking.sentence}."]


def main() -> int:
    """Run, fit, write."""
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
