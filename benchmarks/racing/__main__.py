"""Does racing beat current stopping rules at the same compute? Simulated studies with known truth.

A study has eight recipes, one run each, evaluated twenty times up to the budget on the same held-out prompts. Methods
stop runs early, and pay for all compute that they observed. They are compared by three numbers: regret (how far the
true reward at the budget of the recipe that they name is below the best), compute, and false kills (stopped recipes
whose true reward at the budget exceeds that of every remaining recipe by more than 0.02).

Racing is compared with:

- no stopping;
- successive halving with all runs in parallel, and Optuna's ASHA (eta 2, 3, 4 and many grace periods; later ones are
  halving with more compute, arXiv 2508.14818);
- Optuna's Hyperband;
- the median rule, Optuna's and one with all runs in parallel;
- a signed-rank test over prompts, as in Optuna's WilcoxonPruner;
- Syne Tune's DyHPO and MOBSTER;
- racing by the last value instead of the forecast.

Finished studies are kept in `--work`. A later run continues there and reports all studies in the folder, so some
settings may have more of them than others. The last version of Syne Tune with these methods requires an old NumPy, so
it needs a separate environment:

    python -m venv syne && syne/bin/pip install "syne-tune[gpsearchers]==0.13.0" "numpy<2"
    python -m benchmarks.racing [--studies 2000] [--settings NAME ...] [--syne syne/bin/python]
        [--out docs/measured/racing.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from benchmarks.racing import ours, rivals
from benchmarks.racing.simulate import SYNE_STUDIES, of_syne_tune, simulate, together
from benchmarks.racing.studies import (
    EVALUATIONS,
    PROMPTS,
    RECIPES,
    SAMPLES,
    SEED_SD,
    SETTINGS,
    WANDER,
    Setting,
)
from sweeps.curve import Array

NO_STOPPING = "all runs to the budget"


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the methods that no other beats in both regret and compute, the cheapest first."""
    return sorted(
        (
            name
            for name, (regret, compute) in points.items()
            if not any(r < regret and c < compute for r, c in points.values())
        ),
        key=lambda name: points[name][1],
    )


def _row(name: str, rows: Array) -> str:
    error = rows[:, 0].std() / np.sqrt(len(rows))
    return (
        f"| {name} | {rows[:, 1].mean():.3f} | {rows[:, 0].mean():.4f} ± {error:.4f} | {rows[:, 2].mean():.1f} "
        f"| {rows[:, 3].sum() / max(rows[:, 2].sum(), 1):.2%} |"
    )


def table(rows_by_method: Mapping[str, Array]) -> Iterator[str]:
    """Yield the table of a setting: the frontier, and all other races and Hyperband variants with what beats them."""
    points = {name: (float(rows[:, 0].mean()), float(rows[:, 1].mean())) for name, rows in rows_by_method.items()}
    best = frontier(points)
    always_listed = [name for name in points if name.startswith(("racing", "Optuna's Hyperband"))]
    yield "| method | compute | regret | stopped per study | false kills | on the frontier |"
    yield "|---|---|---|---|---|---|"
    for name in sorted({*best, *always_listed, NO_STOPPING}, key=lambda name: points[name][1]):
        regret, compute = points[name]
        beaten = [other for other, (r, c) in points.items() if r < regret and c < compute]
        on_frontier = "yes" if not beaten else f"no: {min(beaten, key=lambda other: points[other][0])}"
        yield f"{_row(name, rows_by_method[name])} {on_frontier} |"


def comparison_table(rows_of_methods: Mapping[str, Array], names: Sequence[str]) -> Iterator[str]:
    """Yield the table of some methods on the same few studies."""
    yield "| method | compute | regret | stopped per study | false kills |"
    yield "|---|---|---|---|---|"
    yield from (
        _row(name, rows_of_methods[name])
        for name in sorted(names, key=lambda name: float(rows_of_methods[name][:, 1].mean()))
    )


SET_UP = wrapped(
    f"- **Studies** are simulated. A study has {RECIPES} recipes with one run each. A run has {EVALUATIONS} "
    f"evaluations of {PROMPTS} held-out prompts with {SAMPLES} samples each. All runs have the same prompts.",
    f"- **Differences**: recipes differ in A, B and C_mid. Between runs of one recipe, A has a standard deviation of "
    f"{SEED_SD}. The pass rate drifts around its curve with a standard deviation of {WANDER}.",
    "- **compute** counts all compute that was observed. **regret**: mean and standard error over studies.",
    "- **on the frontier**: a cell with *no* names a method that has both less regret and less compute.",
    "- **Rows**: the tables list the methods on the frontier, all races, and all variants of Hyperband. The other "
    "methods are tuned, because many variants of them were tried. Halving was tried with three rates and ten grace "
    "periods, and the median rule with ten grace periods, each both with all runs in parallel and as Optuna's pruner "
    "(ASHA for halving). Signed ranks were tried with four levels and four grace periods.",
    "- **racing**: a race stops a recipe if its probability of ending ahead of the favourite is below `p` at `looks` "
    "looks in a row. `loss` is the limit on the expected cost of all stops together. Rows without `loss` have no "
    f"limit. The default is `{ours.DEFAULT}`.",
    "- **last value**: the same rule with the last values instead of forecasts.",
    "- **halving** keeps one in `eta` of the recipes at each stop, by their last values. **median** stops a recipe "
    "whose best value is below the median of the other recipes' means. `grace` is the share of the budget before the "
    "first stop.",
    "- **signed rank** stops a recipe if the favourite passes more of the same prompts by Wilcoxon's test at level "
    "`p`.",
)


def page(studies: int, settings: Sequence[Setting], work: Path, syne: str | None) -> dict[str, list[str]]:
    """Simulate missing studies; return the page's sections: all methods, and Syne Tune's if `syne` is given."""
    lines: list[str] = list(SET_UP)
    few_lines: list[str] = []
    for setting in settings:
        others = simulate("rivals", rivals.outcomes, setting, studies, work)
        racing = simulate("ours", ours.outcomes, setting, studies, work)
        outcomes_by_method = together(others, racing)
        lines += [
            "",
            f"## {setting.name}",
            "",
            f"{len(outcomes_by_method[NO_STOPPING])} studies.",
            "",
            *table(outcomes_by_method),
        ]
        if syne is not None:
            few = simulate("syne", partial(of_syne_tune, syne), setting, min(studies, SYNE_STUDIES), work)
            same = together(others, racing, few)
            few_lines += syne_section(setting.name, same, [*few[0], ours.DEFAULT, NO_STOPPING])
    return {"measured": lines, **({"syne": few_lines[1:]} if syne is not None else {})}


def syne_section(name: str, same: Mapping[str, Array], names: Sequence[str]) -> list[str]:
    """Return the table of Syne Tune's methods and others on the first studies of a setting."""
    few_studies = len(same[NO_STOPPING])
    return [
        *(
            "",
            f"### {name}",
            "",
            f"All methods of this table were applied to the first {few_studies} studies.",
            "",
        ),
        *comparison_table(same, names),
    ]


def main() -> None:
    """Simulate, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--settings", nargs="+", choices=[each.name for each in SETTINGS], metavar="NAME")
    parser.add_argument("--syne", help="the Python of an environment with Syne Tune 0.13; without it, it is left out")
    parser.add_argument("--work", type=Path, default=Path("outputs/racing"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [each for each in SETTINGS if options.settings is None or each.name in options.settings]
    for mark, lines in page(options.studies, chosen, options.work, options.syne).items():
        print("\n".join(lines))
        if options.out is not None:
            rewrite(options.out, mark, lines)


if __name__ == "__main__":
    main()
