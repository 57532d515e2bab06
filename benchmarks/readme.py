"""Write the demo's results into docs/measured/demo.md: table, figures and curves, and how they were measured.

make demo && .venv/bin/python -m benchmarks.readme
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

from benchmarks.marks import between
from benchmarks.replication import POINT, points, write_table
from sweeps.curve import UNITS
from sweeps.decide.at_k import study_at_k
from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curves
from sweeps.launch.settings import LaunchSettings
from sweeps.report.ranking_text import at_k_rows
from sweeps.source import load

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "demo.md"
KEPT = ROOT / "docs" / "measured" / "demo"


def main() -> None:
    """Copy table, figures and curves to docs/measured/demo, and rewrite the page between its marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="outputs/demo", help="the demo's output (default: %(default)s)")
    study = Path(parser.parse_args().study)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in ("ranking.csv", "report_overlay.png", "report_prompts.png"):
        shutil.copy(study / name, KEPT / name)
    runs = sorted(load([str(study)]).runs, key=lambda view: (view.header["recipe"], view.header["seed"]))
    write_table(KEPT / "curves.csv", POINT, (point for view in runs for point in points(view)))
    lines = [*describe(study), "", *table(KEPT / "ranking.csv"), "", *several_attempts(study)]
    PAGE.write_text(between(PAGE.read_text(), "demo", lines))


def describe(study: Path) -> list[str]:
    """Return the text on the runs, with the first and last pass rate of every seed of the base recipe."""
    loaded = load([str(study)])
    recipe = next(curve for curve in loaded.curves if "+" not in curve.recipe)
    ends = []
    for seed in sorted(set(recipe.seed)):
        rewards = recipe.reward[recipe.seed == seed]
        ends.append(f"{rewards[0]:.2f} to {rewards[-1]:.2f} (seed {seed})")
    head = loaded.runs[0].header
    return [
        f"The study has {len(loaded.runs)} runs of {len(loaded.curves)} recipes. Each run trains a model of "
        f"{head['parameters']:,} parameters on one CPU core. The held-out pass rate of `{recipe.recipe}` rises from "
        f"{' and from '.join(ends)}. Other processors round differently, so the same seeds reach other pass rates "
        "there. Written by `benchmarks/readme.py` from `make demo`.",
        "",
        "In the table, A is the estimated ceiling with its 95% interval. The interval is for these runs; it does not "
        f"include the spread between seeds. Compute is in {UNITS[recipe.axis]}. *Compute to 90%* is the compute to "
        "gain 90% of the way from R0 to the ceiling that the tied recipes share. It is empty for recipes that are not "
        "tied. The [glossary](../README.md#glossary) explains the other columns.",
    ]


def table(path: Path) -> list[str]:
    """Return the ranking as a Markdown table."""
    rows = list(csv.DictReader(path.open()))
    lines = ["| recipe | verdict | A | P(best) | compute to 90% | B | C_mid |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        low, high = (number(row[key], ".3f") or "open" for key in ("A_low", "A_high"))
        asymptote = f"{number(row['A'], '.3f')} ({low} to {high})" if row["A"] else ""
        chance = number(row["p_best"], ".2f")
        shape = [number(row[key], form) for key, form in (("efficiency", ".2e"), ("B", ".2f"), ("C_mid", ".2e"))]
        cells = [row["recipe"], row["verdict"], asymptote, chance, *shape]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def several_attempts(study: Path) -> list[str]:
    """Return the rankings by pass@1 and by pass@k, and the figure of shares of prompts."""
    loaded = load([str(study)])
    margin = LaunchSettings.margin_of(study)
    fits = fit_curves(loaded.curves)
    ranked_at_k = study_at_k(loaded, rank(fits, margin=margin), fit_curves)
    assert ranked_at_k is not None, "the demo's runs are evaluated with several completions per prompt"
    head, rows = at_k_rows(ranked_at_k)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return [
        f"Recipes can also be ranked by pass@k, the share of prompts with a right answer in k attempts (`scalerl rank "
        f"outputs/demo`). Here {ranked_at_k.sentence}.",
        "",
        f"The columns *at {ranked_at_k.compute:.4g}* compare the recipes at {ranked_at_k.compute:.4g} "
        f"{UNITS[loaded.curves[0].axis]}, which all of them have spent. The number before a value is the recipe's "
        "place in the ranking by that column.",
        "",
        *lines,
        "",
        "The last figure shows the shares of held-out prompts that always pass (dark), sometimes pass (light) and "
        "never pass (white), as means over the two seeds:",
        "",
        "![shares of the demo's held-out prompts that always, sometimes and never pass](demo/report_prompts.png)",
    ]


def number(text: str, form: str) -> str:
    """Format a cell of the table; an empty cell stays empty."""
    return format(float(text), form) if text else ""


if __name__ == "__main__":
    main()
