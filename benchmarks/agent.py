"""Does an agent with a calculator learn to call the tool, and does credit per turn help?

Runs or continues the study `experiment=agent` and writes the tables of docs/measured/agent.md between its marks. The
text around the marks is written by hand.

    python benchmarks/agent.py [--parallel 2]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from benchmarks.marks import rewrite
from sweeps.run.journal import JournalView
from sweeps.source import load

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "agent.md"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
RATE = "eval/heldout/pass_rate"
METRICS = (
    "environment/turns",
    "environment/calls",
    "environment/malformed",
    "environment/raised",
    "environment/failed",
)


def rates(views: list[JournalView]) -> list[str]:
    """Return pass rates before training, after 20 and 50 steps and at the end, as means over seeds."""
    by_step = [{record.step: record.metrics[RATE] for record in view.of_kind("eval")} for view in views]
    steps = [0, 20, 50, max(by_step[0])]
    return [f"{fmean(row[step] for row in by_step):.3f}" for step in steps]


def last(views: list[JournalView], metric: str) -> str:
    """Return a metric's mean over the last ten steps and all seeds, or "" if it is not recorded."""
    records = [record.metrics for view in views for record in view.of_kind("train")[-10:]]
    return f"{fmean(record[metric] for record in records):.3f}" if metric in records[-1] else ""


def main() -> int:
    """Run the study and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    launch = f"launch.max_parallel={parser.parse_args().parallel}"
    subprocess.run([SCALERL, "train", "--multirun", "experiment=agent", launch], check=True, cwd=ROOT)
    by_recipe: dict[str, list[JournalView]] = {}
    for view in load([ROOT / "outputs" / "agent"]).runs:
        by_recipe.setdefault(str(view.header["recipe"]), []).append(view)
    head = [
        "recipe",
        "seeds",
        "pass rate at step 0",
        "at step 20",
        "at step 50",
        "at the end",
        *(f"`{name}`" for name in METRICS),
    ]
    rows = [
        [recipe, str(len(views)), *rates(views), *(last(views, name) for name in METRICS)]
        for recipe, views in sorted(by_recipe.items(), key=lambda item: len(item[0]))
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    ranking = subprocess.run([SCALERL, "rank", "outputs/agent"], check=True, cwd=ROOT, capture_output=True, text=True)
    rewrite(PAGE, "measured", [*lines, "", "```", ranking.stdout.strip(), "```"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
