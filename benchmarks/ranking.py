"""Are rankings right when they are sure? Simulates studies whose best recipe is known, and ranks and plans them.

python -m benchmarks.ranking [--studies 60] [--out docs/measured/ranking.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Array, Curve, make_curve
from sweeps.decide.next_run import find_next_steps, make_choice
from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curves
from sweeps.parallel import cores, parallel_map

MARGIN = 0.02
SEED_SD = 0.015


@dataclass(frozen=True)
class Recipe:
    """One recipe of a study: its curve, the end of its window, its number of seeds, and whether one seed collapses."""

    a: float
    b: float
    c_mid: float
    end: float
    seeds: int = 2
    bad: bool = False


def crossing(source: np.random.Generator) -> list[Recipe]:
    """The slower recipes have the higher ceilings, and every window ends at 2 to 4 times the C_mid of the fastest."""
    end = source.uniform(2.0, 4.0)
    return [Recipe(0.5 + 0.05 * i, 1.8, 1.0 + 0.6 * i, end) for i in range(4)]


def slower_is_better(source: np.random.Generator) -> list[Recipe]:
    """Two recipes; the window of the better one ends at 2 C_mid."""
    return [Recipe(0.55, 1.8, 1.0, 6.0), Recipe(source.uniform(0.6, 0.7), 1.5, 3.0, 6.0)]


def ties(source: np.random.Generator) -> list[Recipe]:
    """Four recipes with the same A."""
    a = source.uniform(0.5, 0.7)
    return [Recipe(a, source.uniform(1.2, 2.2), 1.0, 6.0) for _ in range(4)]


def many(source: np.random.Generator) -> list[Recipe]:
    """Forty recipes, most of them similar and some better."""
    return [Recipe(float(a), 1.7, float(source.uniform(0.7, 1.4)), 6.0, 1) for a in source.normal(0.6, 0.03, 40)]


def bad_seed(source: np.random.Generator) -> list[Recipe]:
    """The best recipe has three seeds, and one of them collapses."""
    return [
        Recipe(0.66, 1.8, 1.0, 6.0, 3, bad=True),
        *(Recipe(source.uniform(0.5, 0.6), 1.8, 1.0, 6.0, 3) for _ in "123"),
    ]


def unequal(source: np.random.Generator) -> list[Recipe]:
    """Windows of very different length."""
    return [Recipe(source.uniform(0.5, 0.68), 1.8, 1.0, float(np.exp(source.uniform(0.2, 2.2)))) for _ in range(5)]


def clear(source: np.random.Generator) -> list[Recipe]:
    """The best A is at least three margins above the others, and all windows end at 4 C_mid."""
    return [
        Recipe(0.64, 1.8, 1.0, 4.0),
        *(Recipe(source.uniform(0.5, 0.58), source.uniform(1.4, 2.2), 1.0, 4.0) for _ in "123"),
    ]


def parallel(source: np.random.Generator) -> list[Recipe]:
    """As *clear*, but all recipes have the same B and C_mid, and three seeds each."""
    return [Recipe(0.64, 1.8, 1.0, 4.0, 3), *(Recipe(source.uniform(0.5, 0.58), 1.8, 1.0, 4.0, 3) for _ in "123")]


KINDS = (crossing, slower_is_better, ties, many, bad_seed, unequal, clear, parallel)


def run(recipe: Recipe, name: str, source: np.random.Generator) -> Curve:
    """Simulate a recipe: 30 evaluations of 300 prompts per seed, and AR(1) noise with a standard deviation of 0.008."""
    x = np.linspace(0, recipe.end, 31)
    rates: list[Array] = []
    for seed in range(recipe.seeds):
        a = recipe.a + SEED_SD * source.standard_normal()
        with np.errstate(divide="ignore"):
            mean = 0.2 + (a - 0.2) / (1 + (recipe.c_mid / x) ** recipe.b)
        if recipe.bad and seed == 0:
            mean = np.where(x > recipe.end / 2, 0.2, mean)
        decay = np.exp(-20 / 30)
        wander = [0.0]
        for _ in x[1:]:
            wander.append(decay * wander[-1] + 0.008 * np.sqrt(1 - decay**2) * source.standard_normal())
        rates.append(source.binomial(300, np.clip(mean + np.array(wander), 0.001, 0.999)) / 300)
    y = np.concatenate(rates)
    smoothed = (300 * y + 1) / 302
    labels = [f"{name}-{seed}" for seed in range(recipe.seeds) for _ in x]
    return make_curve(name, np.tile(x, recipe.seeds), y, labels, np.sqrt(smoothed * (1 - smoothed) / 300))


@dataclass(frozen=True)
class Outcome:
    """Result of one study.

    Attributes:
        sure: some recipe has P(best) > 0.9.
        right: that recipe is the best.
        decided: the ranking names a leader.
        within: the leader's A is within the margin of the best.
        refused: a truly best recipe has no rank.
        agreed: ranking and plan agree.
        regret: best A minus the leader's A.
        by_chance, by_last: the same for the recipe with the highest P(best), and with the highest last values.
    """

    sure: bool
    right: bool
    decided: bool
    within: bool
    refused: bool
    agreed: bool
    regret: float
    by_chance: float
    by_last: float


def _last(curve: Curve) -> float:
    """Return the mean over seeds of the last evaluation."""
    return float(np.mean([curve.reward[curve.seed == seed][-1] for seed in np.unique(curve.seed)]))


def study(which: tuple[int, int]) -> Outcome:
    """Simulate and rank one study; `which` is (index in KINDS, number)."""
    source = np.random.default_rng((7, *which))
    recipes = KINDS[which[0]](source)
    names = [f"r{i:02d}" for i in range(len(recipes))]
    curves = [run(recipe, name, source) for recipe, name in zip(recipes, names, strict=True)]
    fits = fit_curves(curves)
    ranking, settlement = rank(fits, brief=True), find_next_steps(make_choice(fits))
    truth = {name: recipe.a for name, recipe in zip(names, recipes, strict=True)}
    best = max(truth.values())
    sure = [entry.recipe for entry in ranking.ranking if (entry.p_best or 0.0) > 0.9]
    leader = ranking.leader
    likeliest = max(ranking.ranking, key=lambda entry: entry.p_best or 0.0).recipe
    last = max(curves, key=_last).recipe
    refused = {entry.recipe for entry in ranking.ranking if entry.rank is None}
    return Outcome(
        bool(sure),
        bool(sure) and truth[sure[0]] >= best - 1e-12,
        not ranking.undecided,
        leader is not None and truth[leader] >= best - MARGIN,
        any(name in refused for name, a in truth.items() if a == best),
        settlement.leader == leader and settlement.settled == (not ranking.undecided),
        *(np.inf if name is None else best - truth[name] for name in (leader, likeliest, last)),
    )


def excess_regret(outcomes: Sequence[Outcome]) -> str:
    """Return the mean of the leader's regret minus the last value's, paired by study, with its 95% interval."""
    excess = np.array([outcome.regret - outcome.by_last for outcome in outcomes])
    mean, half = float(excess.mean()), 1.96 * float(excess.std(ddof=1)) / len(excess) ** 0.5
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    sure, decided = [o for o in outcomes if o.sure], [o for o in outcomes if o.decided]

    def share(part: Sequence[bool]) -> str:
        return f"{np.mean(part):.2f}" if part else "-"

    cells = [
        name.replace("_", " "),
        share([o.refused for o in outcomes]),
        f"{len(sure) / len(outcomes):.2f}",
        share([o.right for o in sure]),
        f"{len(decided) / len(outcomes):.2f}",
        share([o.within for o in decided]),
        *(f"{np.mean([getattr(o, pick) for o in outcomes]):.3f}" for pick in ("regret", "by_chance", "by_last")),
        excess_regret(outcomes),
    ]
    return f"| {' | '.join(cells)} |"


def set_up(studies: int) -> list[str]:
    """Return the text that explains the table."""
    return wrapped(
        f"{studies} simulated studies per row, with 30 evaluations of 300 prompts per seed and a standard deviation of "
        f"{SEED_SD} between seeds of a recipe. `scalerl rank` and `scalerl plan` agreed on every study (the "
        "script checks this). The studies:",
        "",
        *(f"- *{kind.__name__.replace('_', ' ')}*: {kind.__doc__}" for kind in KINDS),
        "",
        "The columns:",
        "",
        "- **best unranked**: the ranking gives the truly best recipe no rank, because its curve does not show its A.",
        "- **P(best) > 0.9**: the ranking gives a recipe more than 0.9; **and true**: in these studies it is the best.",
        f"- **decided**: the ranking names a recipe; **and within the margin**: in these studies its A is within "
        f"{MARGIN} (the margin) of the best.",
        "- **regret**: the best A minus the A of the recipe that is picked, averaged over studies. There are three "
        "ways to pick: the ranking's leader, the highest P(best), and the highest last value.",
        "- **leader - last value**: the leader's regret minus that of the last value, paired by study, with its 95% "
        "interval.",
        "",
    )


def main() -> None:
    """Print the table, and write it with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    all_studies = [(place, number) for place in range(len(KINDS)) for number in range(options.studies)]
    outcomes = parallel_map(partial(study), all_studies, cores())
    assert all(outcome.agreed for outcome in outcomes), "ranking and plan contradict each other"
    lines = [
        *set_up(options.studies),
        "| studies | best unranked | P(best) > 0.9 | and true | decided | and within the margin "
        "| regret of the leader | regret by P(best) | regret by last value | leader - last value |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, kind in enumerate(KINDS):
        lines.append(row(kind.__name__, outcomes[place * options.studies : (place + 1) * options.studies]))
    lines.append(row("**all**", outcomes))
    print("\n".join(lines))
    if options.out:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
