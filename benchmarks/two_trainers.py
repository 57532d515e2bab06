"""Compare CISPO, GRPO and DAPO on the arithmetic task, trained here and with TRL's `GRPOTrainer`.

Every member runs in a separate process. Its result is written to benchmarks/results/two_trainers.json as soon as it is
done, so the command can be stopped and continued. Without `--python` only the page is written.

    python -m benchmarks.two_trainers --python /path/to/trl/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.marks import between
from sweeps import api
from sweeps.report.drawing import STYLE, png
from sweeps.run.journal import read_journal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "two_trainers.md"
FIGURE = ROOT / "docs" / "measured" / "two_trainers.png"
RESULTS = ROOT / "benchmarks" / "results" / "two_trainers.json"
OUTPUTS = ROOT / "outputs" / "two_trainers"
TRAINERS = ("ours", "TRL")
# CISPO has two more seeds, because with three its interval was 0.104 wide, more than NARROW.
SEEDS = {"CISPO": (0, 1, 2, 3, 4), "GRPO": (0, 1, 2), "DAPO": (0, 1, 2)}
STEPS = 120
# Two passes over a batch: in the first one the ratio is 1, so the three losses are the same.
COMMON = (
    *("recipe=scalerl_core", "async_mode=on_policy", "filter=none", "normalization=prompt", "normalization.eps=1e-4"),
    *("reward=zero_one", "epochs.count=2", "schedule.warmup_steps=0", "batch.micro_batch=128"),
    *("optimizer.weight_decay=0", "optimizer.lr=3e-4", "optimizer.clip_norm=1.0", "evaluation.every_n_steps=6"),
    # Sums of one and two digits, like the demo's (conf/sums_of_two_digits.yaml).
    *("model.digits=2", "task.train=[50,2000,300]", "task.heldout=[40,80,30]", "context.max_new_tokens=16"),
    *("thinking.interrupt_from=9", "thinking.interrupt_to=11"),
)
RECIPES = {
    "CISPO": ("loss=cispo", "aggregation=token"),
    "GRPO": ("loss=ppo", "aggregation=sample"),
    "DAPO": ("loss=dapo", "loss.clip_high=0.28", "aggregation=token"),
}
NARROW = 0.1  # target for the width of a comparison's interval


@dataclass(frozen=True)
class Member:
    """One run: a recipe, a trainer and a seed."""

    recipe: str
    trainer: str
    seed: int

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.recipe} {self.trainer} {self.seed}"

    def run(self, python: str, steps: int) -> list[dict[str, float]]:
        """Train, and return the evaluations: step, compute, reward."""
        folder = OUTPUTS / self.name.replace(" ", "_")
        overrides = [*COMMON, *RECIPES[self.recipe], f"seed={self.seed}", f"budget.steps={steps}"]
        module = "lightning_scalerl.translate.trl_member" if self.trainer == "TRL" else "lightning_scalerl.train"
        trl_arguments = ["--python", python, "--folder", str(folder)] if self.trainer == "TRL" else []
        if self.trainer == "ours":
            overrides += [f"output_dir={folder}", "rollouts.groups=0"]
        command = [sys.executable, "-m", module, *trl_arguments, *overrides]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.name}: {done.stderr[-2000:]}")
        return list(of_trl(folder) if self.trainer == "TRL" else of_ours(folder))


def of_trl(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the evaluations of a member trained with TRL."""
    for line in (folder / "evaluations.jsonl").read_text().splitlines():
        yield {name: json.loads(line)[name] for name in ("step", "compute", "reward")}


def of_ours(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the evaluations of a member trained here."""
    (run,) = (folder / "runs").iterdir()
    for record in read_journal(run).of_kind("eval"):
        values = record.metrics
        yield {"step": record.step, "compute": values["compute/flops"], "reward": values["eval/heldout/pass_rate"]}


def measure(python: str, steps: int, parallel: int) -> None:
    """Run every member that has no result yet."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    # Seed by seed, so that partial results have both trainers.
    members = [
        Member(recipe, trainer, seed)
        for seed in sorted({seed for seeds in SEEDS.values() for seed in seeds})
        for recipe in RECIPES
        for trainer in TRAINERS
        if seed in SEEDS[recipe]
    ]

    def one(member: Member) -> None:
        results[member.name] = member.run(python, steps)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=None, separators=(",", ":")) + "\n")
        print(member.name, results[member.name][-1], flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, [member for member in members if member.name not in results]))


def table() -> pd.DataFrame:
    """Return all evaluations, one per row; recipe names include the trainer."""
    rows = []
    for name, points in json.loads(RESULTS.read_text()).items():
        recipe, trainer, seed = name.split()
        rows += [{"recipe": f"{recipe}, {trainer}", "seed": int(seed), **point} for point in points]
    return pd.DataFrame(rows)


def compared(recipe: str, points: pd.DataFrame) -> dict[str, Any]:
    """Compare a recipe trained with TRL with the same recipe trained here, like `scalerl compare`."""
    pair = [f"{recipe}, TRL", f"{recipe}, ours"]
    # Fit all recipes together, so that seeds are paired and the noise is pooled.
    (comparison,) = api.compare(points, recipes=pair).to_json()["comparisons"]
    return dict(comparison)


def shown(interval: dict[str, Any] | None) -> str:
    """Format an interval."""
    if interval is None or interval["low"] is None or interval["high"] is None:
        return "open"
    return f"{interval['value']:+.3f} ({interval['low']:+.3f} to {interval['high']:+.3f})"


def lines(points: pd.DataFrame) -> list[str]:
    """Return the tables of the page."""
    late = points[points.step > points.step.max() - 30]
    table_lines = [
        "| recipe | seeds | steps | ours, last 30 steps | TRL, last 30 steps | TRL minus ours at the end "
        "| A, TRL minus ours | difference at the end: interval contains 0 | width of that interval |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for recipe in RECIPES:
        ours, theirs = (late[late.recipe == f"{recipe}, {trainer}"] for trainer in TRAINERS)
        seeds = sorted(set(ours.seed) & set(theirs.seed))
        if not seeds:
            continue
        row = compared(recipe, points)
        reward = row["R"]
        holds = reward["low"] <= 0 <= reward["high"]
        width = reward["high"] - reward["low"]
        cells = [recipe, str(len(seeds)), str(int(points.step.max())), f"{ours.reward.mean():.3f}"]
        cells += [f"{theirs.reward.mean():.3f}", shown(reward), shown(row["A"]), "yes" if holds else "no"]
        narrow = "" if width < NARROW else f", not below {NARROW:g}"
        table_lines.append(f"| {' | '.join([*cells, f'{width:.3f}{narrow}'])} |")
    spread = points[points.step == 0].groupby("recipe").reward.mean()
    table_lines += [
        "",
        f"Pass rates before the first step, with the same weights: {spread.min():.3f} to {spread.max():.3f} by recipe "
        "and trainer.",
    ]
    cost = points[points.step == points.step.max()].groupby("recipe").compute.mean()
    return [*table_lines, f"FLOPs of a run: {cost.min():.4g} to {cost.max():.4g}."]


def figure(points: pd.DataFrame) -> Figure:
    """Draw one panel per recipe: every evaluation, and the mean over seeds, by trainer."""
    with rc_context(STYLE):
        canvas = Figure(figsize=(9.5, 3.2), layout="constrained")
        panels = canvas.subplots(1, len(RECIPES), sharey=True)
        for panel, recipe in zip(panels, RECIPES, strict=True):
            for trainer, colour in zip(TRAINERS, ("C0", "C1"), strict=True):
                trainer_points = points[points.recipe == f"{recipe}, {trainer}"]
                panel.plot(trainer_points.compute, trainer_points.reward, ".", color=colour, alpha=0.35, markersize=4)
                mean = trainer_points.groupby("step")[["compute", "reward"]].mean()
                panel.plot(mean.compute, mean.reward, color=colour, label=trainer)
            panel.set_title(recipe)
            panel.set_xlabel("FLOPs")
        panels[0].set_ylabel("pass rate on 150 held-out prompts")
        panels[0].legend(loc="lower right")
    return canvas


def write_page() -> None:
    """Write the tables between the page's marks, and the figure next to the page."""
    points = table()
    FIGURE.write_bytes(png(figure(points)))
    section = [*lines(points), "", f"![curves of both trainers]({FIGURE.name})"]
    PAGE.write_text(between(PAGE.read_text(), "measured", section))
    print("\n".join(section))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter that has TRL; without it, what is measured is written again")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    if options.python:
        measure(options.python, options.steps, options.parallel)
    write_page()
