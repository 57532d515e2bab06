"""Do recipes learn the arithmetic task if choices change what is sampled or how credit is given?

Runs or continues three studies with the public command: ScaleRL with one change each, the same on a quarter of the
pool, and PPO with its critic. Writes table and figure of docs/measured/learning.md between its marks. The text around
the marks is written by hand.

    python benchmarks/learning.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.marks import between
from sweeps.run.journal import JournalView
from sweeps.source import LoadedStudy, load

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "learning.md"
FIGURE = ROOT / "docs" / "measured" / "learning.png"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
STEPS = 160
STUDIES = {
    "learning": (
        "variant=none,curriculum_linear,curriculum_exponential,curriculum_staged_length,filter_dynamic_sampling",
    ),
    # allocation_by_difficulty needs prompts that repeat: a quarter of the pool, used three times.
    "learning_reuse": ("task.train=[20,500,200,100]", "variant=none,allocation_by_difficulty"),
    "learning_ppo": ("recipe=ppo",),
}
AXIS = "compute/flops"


def study(name: str, seeds: str, parallel: int, *overrides: str) -> LoadedStudy:
    """Run or continue a study and read it over FLOPs."""
    settings = (f"study={name}", f"seed={seeds}", f"budget.steps={STEPS}", f"launch.max_parallel={parallel}")
    subprocess.run([SCALERL, "train", "--multirun", *settings, *overrides], check=True, cwd=ROOT)
    return load([ROOT / "outputs" / name], x=AXIS)


def ends(views: list[JournalView]) -> tuple[float, float]:
    """Return pass rates before the first step and over the last three evaluations, as means over seeds."""
    rates = [[record.metrics["eval/heldout/pass_rate"] for record in view.of_kind("eval")] for view in views]
    return float(np.mean([row[0] for row in rates])), float(np.mean([row[-3:] for row in rates]))


def over_runs(views: list[JournalView], metric: str) -> str:
    """Return a metric's mean over steps and seeds, or "" if it is not recorded."""
    recorded = [r.metrics[metric] for view in views for r in view.of_kind("train") if metric in r.metrics]
    return f"{np.mean(recorded):.3f}" if recorded else ""


def mechanism(views: list[JournalView]) -> str:
    """Return the share of steps in which the changed choice had an effect, from the mechanism counters."""
    last = views[0].of_kind("train")[-1].metrics
    shares = [f"{value:.2f}" for name, value in last.items() if name.startswith("mechanism/")]
    return ", ".join(shares)


def main() -> int:
    """Run the studies, and write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    lines = [
        f"| recipe | pass rate before training | after {STEPS} steps | TFLOPs per run "
        "| share of steps in which the choice had an effect | groups dropped | truncated "
        "| critic: explained variance | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, overrides in STUDIES.items():
        loaded = study(name, options.seeds, options.parallel, *overrides)
        for curve in loaded.curves:
            views = [view for view in loaded.runs if view.header["recipe"] == curve.recipe]
            before, after = ends(views)
            cost = np.mean([view.of_kind("train")[-1].metrics[AXIS] for view in views])
            label = curve.recipe if name != "learning_reuse" else f"{curve.recipe}, a quarter of the pool"
            cells = [
                label,
                f"{before:.3f}",
                f"{after:.3f}",
                f"{cost / 1e12:.2f}",
                mechanism(views),
                over_runs(views, "train/groups_dropped"),
                over_runs(views, "train/truncated"),
                over_runs(views, "train/explained_variance"),
                over_runs(views, "train/kl"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
            seeds = sorted(set(curve.seed))
            rows = [(curve.compute[curve.seed == seed], curve.reward[curve.seed == seed]) for seed in seeds]
            shortest = min(len(compute) for compute, _ in rows)
            mean = [np.mean([row[part][:shortest] for row in rows], axis=0) for part in (0, 1)]
            axes.plot(mean[0], mean[1], label=label, linewidth=1.5)
    axes.set_xlabel("FLOPs")
    axes.set_ylabel("held-out pass rate, mean of seeds")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)
    head = f"Written by `python benchmarks/learning.py --seeds {options.seeds}`."
    section = [head, "", *lines, "", f"![learning curves]({FIGURE.name})"]
    PAGE.write_text(between(PAGE.read_text(), "measured", section))
    print("\n".join(section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
