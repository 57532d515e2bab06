"""Does a race keep a winner that starts last? Simulated studies whose best recipe is the worst at a quarter.

    python -m benchmarks.racing.staircases [--studies 200] [--settings NAME ...] [--out docs/measured/staircases.md]

Studies are drawn one by one. A study is raced if the recipe with the highest true reward at the budget has the lowest
at a quarter of it. That recipe survives if the race does not stop it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from benchmarks.racing import rivals
from benchmarks.racing.studies import COMPUTE, MARGIN, SETTINGS, Setting, Study, make_study
from sweeps.curve import Array, make_curve
from sweeps.decide.race import run_race
from sweeps.decide.rules import Rules
from sweeps.parallel import cores, parallel_map

CROSS = next(each for each in SETTINGS if each.crossing)
STAIRS = Setting("stairs", 0.06, stairs=True)


def race(study: Study) -> Array:
    """Race by the default rules; return the compute spent on each recipe, (R,)."""
    curves = [make_curve(str(i), COMPUTE, rate, sd=study.sd[i]) for i, rate in enumerate(study.rate)]
    stopped = run_race(curves, Rules(1.0), ended=[each.recipe for each in curves]).stopped
    return np.array([stopped.get(each.recipe, 1.0) for each in curves])


METHODS: dict[str, Callable[[Study], Array]] = {
    "race": race,
    "halving, first at a quarter": lambda study: rivals.halving(study, 2, 0.25),
}


def late_winners(setting: Setting) -> Iterator[int]:
    """Yield the numbers of studies whose best recipe at the budget is the worst at a quarter of it."""
    for number in count():
        study = make_study(setting, number)
        if study.truth.argmax() == study.early.argmin():
            yield number


def outcomes(setting: Setting, number: int) -> list[list[float]]:
    """Return for each method [best survives, one within the margin survives, reward lost, compute]."""
    study = make_study(setting, number)
    outcomes_by_method = []
    for method in METHODS.values():
        spent = method(study)
        lost = study.truth.max() - study.truth[spent == 1].max()
        outcomes_by_method.append([float(lost == 0), float(lost <= MARGIN), float(lost), float(spent.mean())])
    return outcomes_by_method


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of a share of n."""
    z = 1.96
    middle, half = share + z**2 / (2 * n), z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return float((middle - half) / (1 + z**2 / n)), float((middle + half) / (1 + z**2 / n))


def set_up(studies: int) -> list[str]:
    """Return the text that explains the table."""
    return wrapped(
        f"{studies} simulated studies of each kind are raced. A study is used only if the recipe with the highest true "
        "reward at the budget has the lowest at a quarter of it. Evaluations are as in [racing.md](racing.md).",
        "",
        "- *Stairs* rise part of the way early, and the rest in a steep step between 0.25 and 0.9 of the budget.",
        "- A recipe *survives* if the method does not stop it before the budget.",
        "- Numbers in brackets are 95% intervals (Wilson).",
        "",
    )


def page(settings: list[Setting], studies: int) -> list[str]:
    """Race `studies` studies of each setting; return the page's lines."""
    lines = [
        *set_up(studies),
        f"| studies | method | best recipe survives | it or one within {MARGIN:g} of it survives | mean loss "
        "| compute |",
        "|---|---|---|---|---|---|",
    ]
    for setting in settings:
        numbers = list(islice(late_winners(setting), studies))
        outcome_array = np.array(parallel_map(partial(outcomes, setting), numbers, cores()))
        for name, (best_share, near_share, lost, compute) in zip(METHODS, outcome_array.mean(axis=0), strict=True):
            shares = " | ".join(
                f"{share:.3f} [{low:.3f}, {high:.3f}]"
                for share in (best_share, near_share)
                for low, high in [wilson(share, studies)]
            )
            lines.append(f"| {setting.name} | {name} | {shares} | {lost:.4f} | {compute:.2f} |")
    return lines


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200)
    known = {setting.name: setting for setting in (CROSS, STAIRS)}
    parser.add_argument("--settings", nargs="+", choices=list(known), default=list(known), metavar="NAME")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = page([known[name] for name in options.settings], options.studies)
    print("\n".join(lines))
    if options.out is not None:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
