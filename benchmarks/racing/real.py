"""Race real studies to several budgets: how much compute is saved, and how much reward is lost?

The true reward of a recipe at a budget is the mean over the last tenth of compute before it, averaged over seeds. Only
recipes that reached the budget count. Regret is how far the true reward of the recipe named at the end is below the
best. False stops are recipes that were stopped although their true reward is more than 0.02 above all remaining ones.
Two other rules see the same evaluations: successive halving (half are kept at a quarter and at half of the budget), and
taking the best at a fifth of the budget, where a race has its first look.

    python -m benchmarks.racing.real [--also FILE:BUDGET ...] [--out docs/measured/real_races.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Curve
from sweeps.decide.race import run_race
from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.parallel import cores, parallel_map
from sweeps.source.load import load

STUDIES: tuple[tuple[str, tuple[float, ...]], ...] = (
    # An old version of `experiment=replication` with a higher learning rate in BF16: recipes cross and runs collapse.
    ("benchmarks/racing/replication_hot.csv", (2e11, 3e11, 4.5e11, 6.07e11, 8e11, 1e12)),
    ("benchmarks/real/train_rasbt.csv", (250.0, 500.0)),
    ("benchmarks/real/eval_rasbt_ch07_math500.csv", (250.0, 500.0)),
    ("benchmarks/real/train_marinfold_exp237.csv", (80.0, 180.0)),
    ("benchmarks/real/train_nhockid_openrs.csv", (50.0,)),
)
# The current `experiment=replication`. It was not used for setting the rules.
HELD_OUT = (("docs/measured/replication/curves.csv", (1.5e11, 2e11, 3e11, 4.5e11, 5.9e11, 8e11)),)
LATE, MARGIN = 0.9, 0.02
RULES: dict[str, dict[str, Any]] = {
    "race": {},
    "race, --loss 0.003": {"loss": 0.003},
    "race, --loss 1": {"loss": NO_LIMIT},
}
LOOK, RUNGS = 0.2, (0.25, 0.5)


def reward_near(curve: Curve, compute: float) -> float:
    """Return the mean over seeds of the reward in the last tenth before a compute, at least of the last evaluation."""
    means = []
    for seed in np.unique(curve.seed):
        seed_points = (curve.seed == seed) & (curve.compute <= compute)
        if seed_points.any():
            late = seed_points & (curve.compute >= min(LATE * compute, float(curve.compute[seed_points].max())))
            means.append(float(curve.reward[late].mean()))
    return float(np.mean(means))


def halving(curves: Mapping[str, Curve], budget: float) -> tuple[str, float, list[str]]:
    """Return the winner of successive halving, its share of compute, and the stopped recipes."""
    remaining, spent, stopped = list(curves), 0.0, []
    previous_rung = 0.0
    for rung in (*RUNGS, 1.0):
        spent += len(remaining) * (rung - previous_rung)
        previous_rung = rung
        by = sorted(remaining, key=lambda name: -reward_near(curves[name], rung * budget))
        keep = 1 if rung == 1.0 else -(-len(remaining) // 2)
        stopped += [] if rung == 1.0 else by[keep:]
        remaining = by[:keep]
    return remaining[0], spent / len(curves), stopped


def rows(study: tuple[str, float]) -> list[str]:
    """Return the table's rows of a study and budget: races, halving, and the best at a fifth of the budget."""
    source, budget = study
    cut_curves = [curve.take(curve.compute <= budget) for curve in load([source]).curves]
    curves = {curve.recipe: curve for curve in cut_curves if curve.compute.max() >= LATE * budget}
    truth = {name: reward_near(curve, budget) for name, curve in curves.items()}
    early = max(curves, key=lambda name: reward_near(curves[name], LOOK * budget))
    winner, share, stopped_by_halving = halving(curves, budget)
    results = []
    for method, rule_settings in RULES.items():
        race = run_race(list(curves.values()), Rules(budget, **rule_settings), ended=list(curves))
        stopped = [runner.recipe for runner in race.runners if runner.stopped_at is not None]
        named = max((name for name in curves if name not in stopped), key=lambda name: truth[name])
        results.append((method, named, 1 - race.saved / race.full, stopped))
    results += [
        ("halving", winner, share, stopped_by_halving),
        ("the best at a fifth", early, LOOK + (1 - LOOK) / len(curves), [name for name in curves if name != early]),
    ]
    lines = []
    for method, name, spent, stopped_recipes in results:
        best = max(truth[each] for each in curves if each not in stopped_recipes)
        false = [each for each in stopped_recipes if truth[each] > best + MARGIN]
        regret = max(truth.values()) - truth[name]
        lines.append(
            f"| {Path(source).parent.name}/{Path(source).stem} | {len(curves)} | {budget:g} | {method} | {spent:.2f} "
            f"| {regret:.4f} | {len(stopped_recipes)} | {len(false)} |"
        )
    return lines


def means_of(lines: Sequence[str], title: str) -> list[str]:
    """Return a table of the means of each method's rows."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    table = ["", f"| {title} | compute | regret | stopped in total | false |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(row[3] for row in cells):
        method_rows = [[float(cell) for cell in row[4:]] for row in cells if row[3] == method]
        spent, regret, stopped_recipes, false = np.array(method_rows).T
        table.append(
            f"| {method} | {spent.mean():.2f} | {regret.mean():.4f} | {stopped_recipes.sum():.0f} | {false.sum():.0f} |"
        )
    return table


SET_UP = wrapped(
    "The recipes of all studies were trained to the end. The recorded evaluations were then replayed as races to "
    "several budgets. The method *race* has the default rules, *race, --loss 0.003* a stricter limit on the expected "
    "loss, and *race, --loss 1* no limit.",
    "",
    "- **true reward** of a recipe at a budget: its mean reward over the last tenth of compute before the budget, "
    "averaged over seeds.",
    "- **regret**: a race names the recipe with the highest true reward among those that it did not stop.",
    f"- **stopped, false**: number of stopped recipes, and how many of them have a true reward more than {MARGIN} "
    "above that of every remaining recipe.",
    "- **used for tuning, held out**: the limit on the expected loss was chosen with the races on the first five "
    "files. The other files were not used for any rule. They are the current replication, and files given by "
    "`--also`, whose licences do not allow copying them into the repository.",
    "",
)


def page(studies: Sequence[tuple[str, float]], held_out: Sequence[tuple[str, float]]) -> list[str]:
    """Return the page: explanation, and tables of all studies and budgets."""
    head = [
        *SET_UP,
        "| study | recipes | budget | method | compute | regret | stopped | false |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows_by_part = [
        [line for lines in parallel_map(rows, part, cores()) for line in lines] for part in (studies, held_out)
    ]
    parts = zip(rows_by_part, (studies, held_out), ("used for tuning", "held out"), strict=True)
    means = [line for lines, part, which in parts for line in means_of(lines, f"mean of {len(part)}, {which}")]
    return [*head, *rows_by_part[0], *rows_by_part[1], *means]


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--also", nargs="+", default=[], metavar="FILE:BUDGET")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    studies, held_out = (
        [(source, budget) for source, budgets in part for budget in budgets] for part in (STUDIES, HELD_OUT)
    )
    held_out += [(text.rpartition(":")[0], float(text.rpartition(":")[2])) for text in options.also]
    lines = page(studies, held_out)
    print("\n".join(lines))
    if options.out is not None:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
