"""Comparison of two rankings of one study: by pass@1 (right answers) and by pass@k (problems solved in k tries).

A recipe can be first by pass@1 and behind another by pass@k. It is then right more often on problems that the model
could already solve, but does not solve more problems (Yue et al. 2025, arXiv 2504.13837). So a study with several
completions per held-out prompt is ranked by both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.decide.rank import Ranking, rank
from sweeps.decide.reward import RewardRow
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.verdict import chance
from sweeps.source import LoadedStudy
from sweeps.source.held_out import metric_at_k
from sweeps.source.journals import curves_of


@dataclass(frozen=True)
class MetricPosition(AsJson):
    """A recipe's positions in the two orders of one metric, which is pass@1 or pass@k.

    Attributes:
        place: position by reward at common compute, from 1; None where this reward is unknown.
        R, p_best: reward at common compute, and the probability that it is the highest.
        rank, A: position by asymptote, and the asymptote; None where the asymptote is not identifiable.
    """

    place: int | None
    R: Interval | None
    p_best: float | None
    rank: int | None
    A: Interval | None


@dataclass(frozen=True)
class Places(AsJson):
    """A recipe's positions by pass@1 and by pass@k."""

    recipe: str
    at_1: MetricPosition
    at_k: MetricPosition


@dataclass(frozen=True)
class AtK(AsJson):
    """Rankings by pass@1 and by pass@k, side by side.

    Attributes:
        k, metric: number of attempts, and the metric's name, such as `eval/heldout/pass@8`.
        compute: largest compute that all recipes have spent, at which rewards are compared.
        differs: whether the two metrics order the recipes differently, by reward at `compute` or by asymptote.
        sentence: whether the orders differ, in words.
        rows: recipes in the order of pass@1.
    """

    k: int
    metric: str
    compute: float
    differs: bool
    sentence: str
    rows: tuple[Places, ...]


def at_k(by_one: Ranking, by_k: Ranking, metric: str) -> AtK | None:
    """Compare a ranking by pass@1 with one of the same recipes by pass@k.

    Args:
        by_one: ranking by the pass rate.
        by_k: ranking of the same runs by `metric`.
        metric: name of the metric, which ends with `pass@k`.

    Returns:
        The comparison; None with fewer than two recipes, or if a ranking has no rewards at common compute.
    """
    if by_one.rewards is None or by_k.rewards is None or len(by_one.ranking) < 2:
        return None
    recipes = dict.fromkeys(row.recipe for row in by_one.rewards.rows)
    recipes |= dict.fromkeys(entry.recipe for entry in by_one.ranking)
    rows = tuple(Places(recipe, _place_of(by_one, recipe), _place_of(by_k, recipe)) for recipe in recipes)
    with_places = [row for row in rows if row.at_1.place is not None and row.at_k.place is not None]
    with_ranks = [row for row in rows if row.at_1.rank is not None and row.at_k.rank is not None]
    differs = _orders_differ(with_places, "place") or _orders_differ(with_ranks, "rank")
    k = int(metric.rpartition("@")[2])
    leaders = by_one.rewards.rows[0], by_k.rewards.rows[0]
    sentence = _sentence(k, leaders, differs)
    return AtK(k=k, metric=metric, compute=by_one.rewards.compute, differs=differs, sentence=sentence, rows=rows)


def study_at_k(study: LoadedStudy, ranking: Ranking, fit: Callable[[Sequence[Curve]], Sequence[Fit]]) -> AtK | None:
    """Rank a study by pass@k and compare with its ranking by pass@1; None if not all runs have pass@k.

    Args:
        study: the study as it was read for `ranking`.
        ranking: ranking of the study by the pass rate.
        fit: function that fits curves, with the options that `ranking` was computed with.
    """
    if not study.curves or len(ranking.ranking) < 2:
        return None
    curve = study.curves[0]
    metric = metric_at_k(study.runs, curve.metric)
    if metric is None:
        return None
    curves = curves_of(study.runs, metric, curve.axis, tuple(curve.factors))
    return at_k(ranking, rank(fit(curves), margin=ranking.margin, brief=True), metric)


def _place_of(ranking: Ranking, recipe: str) -> MetricPosition:
    rows = () if ranking.rewards is None else ranking.rewards.rows
    place, row = next(((at, row) for at, row in enumerate(rows, 1) if row.recipe == recipe), (None, None))
    entry = next((entry for entry in ranking.ranking if entry.recipe == recipe), None)
    is_ranked = entry is not None and entry.rank is not None
    return MetricPosition(
        place=place,
        R=None if row is None else row.R,
        p_best=None if row is None else row.p_best,
        rank=entry.rank if entry is not None and is_ranked else None,
        A=entry.A if entry is not None and is_ranked else None,
    )


def _orders_differ(rows: Sequence[Places], field: str) -> bool:
    """Return whether pass@1 and pass@k order the recipes differently by their `field`: `place` or `rank`."""

    def order(by: str) -> list[str]:
        return [row.recipe for row in sorted(rows, key=lambda row: getattr(getattr(row, by), field))]

    return order("at_1") != order("at_k")


def _sentence(k: int, leaders: tuple[RewardRow, RewardRow], differs: bool) -> str:
    """Describe whether the rankings differ. `leaders` are the first recipes by pass@1 and by pass@k."""
    one, many = leaders
    if one.recipe != many.recipe:
        return (
            f"the two rankings differ: {one.recipe} is ahead by pass@1 ({chance(one.p_best)}), and {many.recipe} by "
            f"pass@{k} ({chance(many.p_best)}); a gain in pass@1 alone means that right answers become "
            "more frequent, not that more problems are solved"
        )
    if differs:
        return f"{one.recipe} is ahead by pass@1 and by pass@{k}; the order of the other recipes differs"
    return f"the order is the same by pass@1 and by pass@{k}"
