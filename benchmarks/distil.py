"""Distil a small model from a larger one, or train it by RL? Compared at equal compute, including the teacher's passes.

Trains the teacher (the demo's model) by RL, exports it, runs or continues the study `experiment=distil_or_rl`, and
writes the tables of docs/measured/distil.md between its marks. The text around the marks is written by hand.

    python benchmarks/distil.py [--parallel 2]
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
PAGE = ROOT / "docs" / "measured" / "distil.md"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
FLOPS, RATE = "compute/flops", "eval/heldout/pass_rate"
TEACHER = ROOT / "outputs" / "teacher"
NAMES = {"kl.estimate=full": "distillation, whole vocabulary", "kl=distil": "distillation, sampled tokens", "": "RL"}


def scalerl(*arguments: str) -> str:
    """Run a `scalerl` command and return its output."""
    return subprocess.run([SCALERL, *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def train_teacher() -> JournalView:
    """Train the teacher by RL and export it, unless it exists; return its journal."""
    study = ROOT / "outputs" / "distil_teacher"
    scalerl(
        "train",
        "--multirun",
        "experiment=distil_or_rl",
        "model.width=64",
        "study=distil_teacher",
        "hydra.sweeper.rows=[[]]",
        "seed=0",
    )
    (view,) = load([study]).runs
    if not TEACHER.exists():
        scalerl("export", str(view.path.parent), str(TEACHER))
    return view


def name_of(view: JournalView) -> str:
    """Return the short name of a recipe of the study."""
    return next(name for part, name in NAMES.items() if part in str(view.header["recipe"]))


def rate_at(view: JournalView, flops: float) -> float:
    """Return the mean pass rate of the last three evaluations up to this compute."""
    rates = [record.metrics[RATE] for record in view.of_kind("eval") if record.metrics[FLOPS] <= flops]
    return fmean(rates[-3:])


def main() -> int:
    """Run the studies and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parallel = parser.parse_args().parallel
    teacher = train_teacher()
    scalerl("train", "--multirun", "experiment=distil_or_rl", f"launch.max_parallel={parallel}")
    by_name: dict[str, list[JournalView]] = {}
    for view in load([ROOT / "outputs" / "distil_or_rl"]).runs:
        by_name.setdefault(name_of(view), []).append(view)
    spent = min(view.of_kind("eval")[-1].metrics[FLOPS] for views in by_name.values() for view in views)
    grid = [share * spent for share in (0.25, 0.5, 0.75, 1.0)]
    head = ["model", "seeds", *(f"pass rate at {flops:.2g} FLOPs" for flops in grid)]
    rows = []
    for name, views in sorted(by_name.items(), key=lambda item: list(NAMES.values())[::-1].index(item[0])):
        rates = [f"{fmean(rate_at(view, flops) for view in views):.3f}" for flops in grid]
        rows.append([f"student, {name}", str(len(views)), *rates])
    last = teacher.of_kind("eval")[-1].metrics
    rows.append([f"teacher, RL to {last[FLOPS]:.2g} FLOPs", "1", "", "", "", f"{rate_at(teacher, last[FLOPS]):.3f}"])
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    ranking = scalerl("rank", "outputs/distil_or_rl", "--x", FLOPS)
    rewrite(PAGE, "measured", [*lines, "", "```", ranking.strip(), "```"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
