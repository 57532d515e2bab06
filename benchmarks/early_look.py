"""Does a look at a quarter of the compute show which of two recipes is better? Tested on all pairs of 24 recipes.

The recipes are those of the replication, and the page is docs/measured/early_look.md. Two recipes are compared up to
the compute that both have spent. At a quarter of it, one judge names the recipe with the higher last value, and the
other is `scalerl rank`, which forecasts the reward at the end. The truth is the mean of each run's last three
evaluations at the end, over four seeds.

    python -m benchmarks.early_look [--workers 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.marks import between
from benchmarks.replication import BASE, CURVES
from sweeps.curve import Array, Curve
from sweeps.decide.margin import MARGIN
from sweeps.decide.rank import Ranking, rank
from sweeps.decide.standing import draw_rewards
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.points import FitOptions
from sweeps.fit.predict import quantiles
from sweeps.parallel import cores, parallel_map
from sweeps.source import load

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "early_look.md"
FIGURE = PAGE.with_suffix(".png")
AXIS = "virtual_device_hours"
# Shares of the common compute at which looks are taken. The figure and the README show the first.
SHARES = (0.25, 0.5)
# A run's result is the mean of this many final evaluations.
LAST = 3
COLOURS = ("#D55E00", "#0072B2")


@dataclass(frozen=True)
class Look:
    """An early look at two recipes. Differences are first minus second recipe, one per seed.

    Attributes:
        pair: the recipes.
        share: share of the common compute at which the look is taken.
        at: difference of the last values at the look, (seeds,).
        end: difference of the results at the common compute, (seeds,).
        named: recipe that `rank` names at the look; None if it is undecided.
        p_first: `rank`'s probability that the first recipe has the higher reward at the common compute.
        compute: the common compute, which both recipes have spent.
    """

    pair: tuple[str, str]
    share: float
    at: Array
    end: Array
    named: str | None
    p_first: float
    compute: float

    @property
    def winner(self) -> str:
        """Recipe that is higher at the end."""
        return self.pair[0] if self.end.mean() > 0 else self.pair[1]

    @property
    def ahead(self) -> str:
        """Recipe with the higher last value at the look, over all seeds."""
        return self.pair[0] if self.at.mean() > 0 else self.pair[1]

    @property
    def matters(self) -> bool:
        """Whether the recipes end further apart than the margin of a tie."""
        return bool(abs(self.end.mean()) > MARGIN)

    @property
    def misled_seeds(self) -> int:
        """Number of seeds whose last values at the look favour the recipe that ends lower."""
        return int((self.at * self.end.mean() < 0).sum())


def by_seed(curve: Curve, compute: float, count: int) -> Array:
    """Return each seed's mean of the last evaluations up to this compute, (seeds,)."""
    seeds = sorted(set(curve.seed))
    return np.array([curve.reward[(curve.seed == seed) & (curve.compute <= compute)][-count:].mean() for seed in seeds])


def spent_by_both(first: Curve, second: Curve) -> float:
    """Return the compute that every run of both recipes has spent."""
    return float(min(each.compute[each.seed == seed].max() for each in (first, second) for seed in set(each.seed)))


def ranked(pair: Sequence[Curve], compute: float, share: float) -> tuple[list[Fit], Ranking]:
    """Fit two recipes up to a share of this compute, and rank their forecast rewards at the whole of it."""
    fits = list(fit_curves(pair, FitOptions(max_compute=share * compute)))
    return fits, rank(fits, budget=compute, brief=True)


def look(task: tuple[Curve, Curve, float]) -> Look:
    """Compare two recipes at a share of the compute that both have spent."""
    first, second, share = task
    compute = spent_by_both(first, second)
    horizon = ranked((first, second), compute, share)[1].horizon
    assert horizon is not None
    return Look(
        (first.recipe, second.recipe),
        share,
        by_seed(first, share * compute, 1) - by_seed(second, share * compute, 1),
        by_seed(first, compute, LAST) - by_seed(second, compute, LAST),
        horizon.leader if horizon.decided else None,
        horizon.p_best[first.recipe],
        compute,
    )


def most_misleading(looks: Iterable[Look]) -> Look:
    """Return the look whose leader falls furthest behind at the end."""
    wrong = [each for each in looks if each.ahead != each.winner]
    return max(wrong, key=lambda each: abs(each.end.mean()))


def summary(looks: Sequence[Look]) -> str:
    """Return the sentence on how often each judge is right at the first look, for pairs that end apart."""
    pairs = [each for each in looks if each.matters and each.share == SHARES[0]]
    seeds = sum(len(each.at) for each in pairs)
    named = [each for each in pairs if each.named is not None]
    wrong = sum(each.named != each.winner for each in named)
    return (
        f"{len(pairs)} pairs of recipes end more than {MARGIN} apart. At a quarter of the compute, the recipe with the "
        "higher last evaluation (mean of four seeds) is the wrong choice in "
        f"{sum(each.ahead != each.winner for each in pairs)} (with one seed per recipe in "
        f"{sum(each.misled_seeds for each in pairs)} of {seeds}). At the same compute our ranking names a recipe in "
        f'{len(named)} pairs, {wrong or "none"} of them wrongly, and says "undecided" in the other '
        f"{len(pairs) - len(named)}."
    )


def counts(looks: Sequence[Look]) -> list[str]:
    """Return the table of how often each judge names the higher, the lower or neither recipe."""
    lines = [
        "| share of compute | pairs | judged by | names the higher | names the lower | undecided |",
        "|---|---|---|---|---|---|",
    ]
    for share in SHARES:
        for condition, chosen in (
            ("all", [*looks]),
            (f"end more than {MARGIN} apart", [each for each in looks if each.matters]),
        ):
            pairs = [each for each in chosen if each.share == share]
            seeds, misled = sum(len(each.at) for each in pairs), sum(each.misled_seeds for each in pairs)
            wrong = sum(each.ahead != each.winner for each in pairs)
            named = [each for each in pairs if each.named is not None]
            lost = sum(each.named != each.winner for each in named)
            head = f"| {share:g} | {condition}, {len(pairs)}"
            lines += [
                f"{head} | last value of one seed each ({seeds} cases) | {seeds - misled} | {misled} | - |",
                f"{head} | last value, mean of four seeds | {len(pairs) - wrong} | {wrong} | - |",
                f"{head} | `scalerl rank`, four seeds | {len(named) - lost} | {lost} | {len(pairs) - len(named)} |",
            ]
    return lines


def misleading(looks: Sequence[Look]) -> list[str]:
    """Return the table of pairs that end apart and whose leader at the first look ends lower."""
    lines = [
        "| ahead at a quarter | higher at the end | ahead by | seeds | ends lower by | `scalerl rank` at a quarter |",
        "|---|---|---|---|---|---|",
    ]
    wrong = [each for each in looks if each.share == SHARES[0] and each.matters and each.ahead != each.winner]
    for each in sorted(wrong, key=lambda one: -abs(one.end.mean())):
        p_ahead = each.p_first if each.ahead == each.pair[0] else 1 - each.p_first
        verdict_text = "undecided" if each.named is None else f"names {shown(each.named)}"
        lines.append(
            f"| `{shown(each.ahead)}` | `{shown(each.winner)}` | {abs(each.at.mean()):.3f} | {each.misled_seeds} | "
            f"{abs(each.end.mean()):.3f} | {verdict_text}, P = {p_ahead:.2f} for the one ahead |"
        )
    return lines


def shown(recipe: str) -> str:
    """Return a recipe's label without the common base."""
    return recipe.removeprefix(f"{BASE}+") if recipe != BASE else BASE


def mean_curve(curve: Curve) -> tuple[Array, Array]:
    """Return compute and reward, averaged over seeds. All seeds have the same steps."""
    seeds = [curve.seed == seed for seed in sorted(set(curve.seed))]
    length = min(int(each.sum()) for each in seeds)
    compute, reward = (np.mean([row[each][:length] for each in seeds], axis=0) for row in (curve.compute, curve.reward))
    return compute, reward


def draw(curves: dict[str, Curve], one: Look, path: Path) -> None:
    """Draw the curves up to the look with the ranking's forecasts for the end, next to the whole curves."""
    pair = [curves[one.ahead], curves[one.winner]]
    fits, _ = ranked(pair, one.compute, one.share)
    forecasts = [quantiles(draws) for draws in draw_rewards(fits, one.compute)]
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 3.9), sharex=True, sharey=True, layout="constrained")
    p_ahead = one.p_first if one.ahead == one.pair[0] else 1 - one.p_first
    ranking_text = "undecided" if one.named is None else f"{shown(one.named)} is higher"
    for place, (curve, forecast, colour) in enumerate(zip(pair, forecasts, COLOURS, strict=True)):
        compute, reward = mean_curve(curve)
        share = compute / one.compute
        seen = share <= one.share
        for panel, chosen in zip(panels, (seen, share <= 1), strict=True):
            panel.plot(share[chosen], reward[chosen], color=colour, linewidth=2, label=shown(curve.recipe))
        panels[0].plot(share[seen][-1], reward[seen][-1], "o", color=colour)
        bar_position = 1 - 0.03 * place
        panels[0].plot(
            [bar_position, bar_position], [forecast.low, forecast.high], color=colour, linewidth=5, alpha=0.45
        )
    ahead, behind = (f"{by_seed(curve, one.share * one.compute, 1).mean():.2f}" for curve in pair)
    lower, higher = (f"{by_seed(curve, one.compute, LAST).mean():.2f}" for curve in pair)
    panels[0].set_title(
        f"At a quarter: the last value says orange, {ahead} to {behind};\n`scalerl rank` says {ranking_text}"
    )
    panels[1].set_title(f"At the end: blue is higher,\n{higher} to {lower}")
    note = f"bars: our 95% forecasts for the end\nP = {p_ahead:.2f} that orange ends higher"
    panels[0].text(0.97, 0.03, note, ha="right", fontsize=9, transform=panels[0].transAxes)
    for panel in panels:
        panel.axvline(one.share, color="0.6", linewidth=1, linestyle=":")
        panel.set_xlabel("share of the compute that both spent")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("held-out pass rate, mean of four seeds")
    panels[1].legend(loc="lower right", fontsize=9, frameon=False)
    figure.suptitle("The recipe ahead at a quarter of the compute can lose", fontweight="bold")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Write the page and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: all cores)")
    parser.add_argument("--page", type=Path, default=PAGE, help="written instead of docs/measured/early_look.md")
    options = parser.parse_args()
    curves = {curve.recipe: curve for curve in load([CURVES], x=AXIS, y="reward").curves}
    tasks = [(curves[a], curves[b], share) for share in SHARES for a, b in combinations(curves, 2)]
    looks = parallel_map(look, tasks, options.workers)
    example = most_misleading([each for each in looks if each.share == SHARES[0]])
    draw(curves, example, options.page.with_suffix(".png"))
    lines = [
        summary(looks),
        "",
        *counts(looks),
        "",
        f"Pairs that end more than {MARGIN} apart and whose leader loses:",
        "",
        *misleading(looks),
    ]
    options.page.write_text(between(PAGE.read_text(), "looks", lines))


if __name__ == "__main__":
    main()
