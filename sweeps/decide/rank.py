"""Ranking of recipes: by asymptote with its uncertainty, ties by efficiency, or "undecided".

- Recipes are compared on A by joint draws that include the spread between seeds.
- Recipes within the margin of the best A are tied. The margin is 0.02 because three runs of one recipe differ by up to
  0.015 in A (arXiv 2510.13786, A.7).
- Ties are broken by the compute to gain 90% of the way from R0 to the tied recipes' mean A
  (`sweeps.decide.efficiency`). B is shown alongside, from the draws whose A is near that mean.
- A recipe whose asymptote is not identifiable is listed last, unranked, with the reason. It still counts in P(best),
  with all its uncertainty (`sweeps.decide.standing`).
- Recipes that share seeds are compared in pairs, so that a seed's common effect cancels.
- Rewards at common compute, which need no asymptote, are reported alongside (`sweeps.decide.reward`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.decide.efficiency import Ratio, efficiencies
from sweeps.decide.reach import check_budget
from sweeps.decide.resolution import Resolution, resolve
from sweeps.decide.reward import Rewards, rewards
from sweeps.decide.standing import (
    Horizon,
    Outcome,
    Standing,
    asymptote_of,
    find_standing,
    margin_of,
    shared_asymptote,
    spreads_of,
)
from sweeps.decide.wording import contrast_reason, horizon_sentence, outcome_sentence, rank_reason
from sweeps.errors import UserError
from sweeps.fit.compare import Comparison, compare
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.points import FitOptions
from sweeps.fit.predict import asymptote_draws_over_seeds, quantiles, reward_at
from sweeps.fit.seeds import Pairing, SeedSpread
from sweeps.parallel import parallel_map


@dataclass(frozen=True)
class Ranked(AsJson):
    """One recipe's place in the ranking; intervals are 95%.

    Attributes:
        rank: place, from 1; None where A is not identifiable.
        p_best: probability that its asymptote is the highest of all recipes, ranked or not.
        p_best_at_horizon: probability that its reward is the highest at `Ranking.horizon`; None without a horizon.
        expected_loss: highest asymptote minus this recipe's asymptote, averaged over joint draws, in reward.
        tied_with_best: whether it is tied with the best A, see `sweeps.decide.standing.Standing.tied`.
        A, A_total: asymptote for the given runs, and its bounds including the spread between seeds.
        efficiency, efficiency_half: compute to gain 90%, and half, of the way from R0 to the tied recipes' mean A; None
            if not tied.
        ratio: `efficiency` divided by that of the first tied recipe, with bounds that hold for all pairs at once; None
            for the first, and if not tied.
        p_neither: fraction of the draws in which neither this recipe nor the first tied one gains 90%; `ratio` leaves
            these draws out. None without a ratio.
        B_at_shared_A, C_mid_at_shared_A: from the draws whose A is near the tied recipes' mean; None if not tied.
        R_at_budget: forecast reward; None without a budget, or where the fit may not be used there.
    """

    recipe: str
    rank: int | None
    p_best: float | None
    p_best_at_horizon: float | None
    expected_loss: float
    tied_with_best: bool
    A: Interval
    A_total: tuple[float | None, float | None]
    efficiency: Interval | None
    efficiency_half: Interval | None
    ratio: Interval | None
    p_neither: float | None
    B_at_shared_A: Interval | None
    C_mid_at_shared_A: Interval | None
    R_at_budget: Interval | None
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return one entry of the list `ranking` in `scalerl rank --json`."""
        return {**super().to_json(), "A_total": {"low": self.A_total[0], "high": self.A_total[1]}}


@dataclass(frozen=True)
class Contrast(AsJson):
    """A variant compared with the baseline.

    Attributes:
        delta_a: difference of A, including the spread between seeds.
        ratio: compute of the variant, to gain 90% of the way from R0 to a shared A, divided by that of the baseline.
        delta_b: difference of B at that A. ratio and delta_b are None where the two A differ by more than the margin.
        reason: basis of the comparison, or why there is none.
    """

    recipe: str
    delta_a: Interval | None
    ratio: Interval | None
    delta_b: Interval | None
    reason: str

    JSON: ClassVar = {"delta_a": "delta_A", "delta_b": "delta_B_at_shared_A"}


@dataclass(frozen=True)
class Ranking(AsJson):
    """Ranking of all recipes, the best first, with the outcome in one sentence.

    Attributes:
        baseline: recipe that the others are compared with; None without one.
        margin, budget: as passed to `rank`.
        undecided: whether the data leave the choice open.
        leader: recipe to choose, see `sweeps.decide.standing.Standing`; None where nothing is known.
        sentence: the choice by asymptote in words.
        shared_a: mean A of the tied recipes; None without a tie.
        ranking: all recipes, those without an identifiable asymptote last.
        leave_one_out: variants compared with the baseline.
        pairing: seeds by which recipes were compared in pairs; None unless all identifiable recipes have the same
            seeds, with enough of them (`paired_seed_spread`).
        comparisons: forecasts by every family of curves for each identifiable recipe; empty if `rank` was called with
            `brief`.
        horizon, horizon_sentence: the choice by the reward at the budget (without a budget, at twice the largest
            compute of any recipe), and the same in words.
        rewards: comparison that needs no asymptote. resolution: smallest difference that the study can detect.
        standing: the state of the choice, with the draws that the ranking is computed from; not printed.
    """

    baseline: str | None
    margin: float
    budget: float | None
    undecided: bool
    leader: str | None
    sentence: str
    shared_a: float | None
    ranking: tuple[Ranked, ...]
    leave_one_out: tuple[Contrast, ...]
    pairing: Pairing | None = None
    comparisons: tuple[Comparison, ...] = ()
    horizon: Horizon | None = None
    horizon_sentence: str = ""
    rewards: Rewards | None = None
    resolution: Resolution | None = None
    standing: Standing | None = field(default=None, compare=False, repr=False)

    @property
    def outcome(self) -> tuple[str, ...]:
        """Sentences on the choice by A, on the choice at the horizon and, if undecided, on the study's resolution.

        If no recipe's reward rises, the resolution comes first.
        """
        sentences = [self.sentence] if not self.horizon_sentence else [self.sentence, self.horizon_sentence]
        if self.undecided and self.resolution is not None:
            flat = self.standing is not None and self.standing.outcome is Outcome.FLAT
            sentences.insert(0 if flat else len(sentences), self.resolution.sentence)
        return tuple(sentences)

    JSON: ClassVar = {"shared_a": "shared_A", "pairing": "paired", "comparisons": "forecasts", "standing": None}


def rank(
    fits: Sequence[Fit],
    margin: float | None = None,
    budget: float | None = None,
    workers: int = 1,
    brief: bool = False,
    baseline: str | None = None,
) -> Ranking:
    """Rank recipes by asymptote. Tied recipes are ordered by efficiency; those without an identifiable A come last.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them (with the spread between seeds pooled).
        margin: largest difference from the best A, in reward, at which a recipe is tied with the best; None for 0.02 of
            the reward's scale.
        budget: compute at which rewards are forecast as well, in the curves' unit; None for no forecast.
        workers: number of processes that share the comparison of families of curves, by far the most work; see
            `sweeps.parallel`.
        brief: leave out the comparison of families, on which the ranking does not depend.
        baseline: recipe that the others are compared with; None for the recipe that most others name as their baseline.

    Raises:
        UserError: margin or budget is not positive, there are no fits, the baseline does not exist, or there are
            several evaluation sets.
    """
    if not fits:
        raise UserError("nothing to rank: give at least one recipe")
    margin = margin_of(fits, margin)
    check_budget(budget)
    sets = sorted({fit.curve.factors["set"] for fit in fits if "set" in fit.curve.factors})
    if len(sets) > 1:
        raise UserError(f"evaluation sets {', '.join(sets)} have asymptotes of their own; choose one with --metric")
    standing = find_standing(fits, margin, budget)
    by_recipe = {fit.recipe: fit for fit in fits}
    ordered = [by_recipe[recipe] for recipe in standing.ranked]
    unranked = sorted((fit for fit in fits if not fit.identifiable), key=lambda fit: fit.recipe)
    comparisons: tuple[Comparison, ...] = ()
    if not brief:
        comparisons = tuple(parallel_map(_compare_families, [(fit.curve, fit.options) for fit in ordered], workers))
    best = max((asymptote_of(fit) for fit in ordered), default=0.0)
    entries = [_make_entry(fit, place, best, standing, budget) for place, fit in enumerate(ordered, start=1)]
    entries += [_make_entry(fit, None, best, standing, budget) for fit in unranked]
    baseline = baseline_of(fits, baseline)
    pairing = standing.pairing
    spreads = spreads_of(ordered, pairing)
    return Ranking(
        baseline=baseline,
        margin=margin,
        budget=budget,
        undecided=not standing.decided,
        leader=standing.leader,
        sentence=outcome_sentence(standing),
        shared_a=standing.shared_a,
        ranking=tuple(entries),
        leave_one_out=() if baseline is None else tuple(_leave_one_out(fits, spreads, baseline, margin)),
        pairing=pairing,
        comparisons=comparisons,
        horizon=standing.horizon,
        horizon_sentence=horizon_sentence(standing),
        rewards=rewards(fits, budget),
        resolution=resolve(fits, standing.leader, margin),
        standing=standing,
    )


def _make_entry(fit: Fit, place: int | None, best: float, standing: Standing, budget: float | None) -> Ranked:
    """Return a recipe's entry.

    Args:
        fit: fit of the recipe.
        place: rank of the recipe; None if its A is not identifiable.
        best: highest identifiable A.
        standing: state of the choice between all recipes.
        budget: compute of the forecast; None for none.
    """
    efficiency = standing.efficiencies.get(fit.recipe)
    ratio = standing.ratios.get(fit.recipe)
    return Ranked(
        recipe=fit.recipe,
        rank=place,
        p_best=standing.p_best[fit.recipe],
        p_best_at_horizon=None if standing.horizon is None else standing.horizon.p_best[fit.recipe],
        expected_loss=standing.losses[fit.recipe],
        tied_with_best=efficiency is not None,
        A=fit.A,
        A_total=fit.A_total,
        efficiency=None if efficiency is None else quantiles(efficiency.to_most),
        efficiency_half=None if efficiency is None else quantiles(efficiency.to_half),
        ratio=standing.ratio(fit.recipe),
        p_neither=None if ratio is None else ratio.p_neither,
        B_at_shared_A=None if efficiency is None else quantiles(efficiency.B),
        C_mid_at_shared_A=None if efficiency is None else quantiles(efficiency.C_mid),
        R_at_budget=None if budget is None else reward_at(fit, budget),
        verdict=fit.verdict,
        reason=fit.reason if place is None else rank_reason(best - asymptote_of(fit), fit.recipe, standing),
    )


def _compare_families(curve_and_options: tuple[Curve, FitOptions]) -> Comparison:
    return compare(*curve_and_options)


def baseline_of(fits: Sequence[Fit], name: str | None = None) -> str | None:
    """Return the baseline: the given recipe, or else the one that most recipes name as their baseline.

    Raises:
        UserError: no recipe has the given name.
    """
    recipes = sorted(fit.recipe for fit in fits)
    if name is not None:
        if name not in recipes:
            raise UserError(f"--baseline {name!r}: no such recipe; there are {', '.join(recipes)}")
        return name
    return named_baseline([fit.curve for fit in fits])


def named_baseline(curves: Sequence[Curve]) -> str | None:
    """Return the recipe of these curves that most of them name as their baseline; None if none is named."""
    counts = Counter(curve.baseline for curve in curves)
    recipes = sorted(curve.recipe for curve in curves if counts[curve.recipe])
    return max(recipes, key=lambda recipe: counts[recipe], default=None)


def _leave_one_out(
    fits: Sequence[Fit], between: Mapping[str, SeedSpread], baseline: str, margin: float
) -> list[Contrast]:
    """Compare every variant of the baseline with the baseline. `between` is the spread of A between seeds, by recipe.

    If no recipe names this baseline (it was passed to `rank`), all other recipes are compared with it.
    """
    base = next(fit for fit in fits if fit.recipe == baseline)
    others = sorted((fit for fit in fits if fit is not base), key=lambda fit: fit.recipe)
    variants = [fit for fit in others if fit.curve.baseline == baseline] or others
    if baseline not in between:
        reason = f"the baseline's A is not identifiable ({base.verdict})"
        return [Contrast(recipe=fit.recipe, delta_a=None, ratio=None, delta_b=None, reason=reason) for fit in variants]
    identifiable = [fit for fit in variants if fit.recipe in between]
    # The tolerance keeps a difference of exactly the margin from being decided by rounding.
    comparable = [fit for fit in identifiable if abs(asymptote_of(fit) - asymptote_of(base)) <= margin + 1e-12]
    # `Ranking.shared_a` may differ, because it is the mean over other recipes.
    shared_a = shared_asymptote([base, *comparable])
    efficiency_by_recipe = {} if shared_a is None else efficiencies([base, *comparable], shared_a, between)
    contrasts = []
    for fit in variants:
        delta_a = ratio = delta_b = None
        if fit in identifiable:
            variant_a, base_a = (asymptote_draws_over_seeds(one, spread=between[one.recipe]) for one in (fit, base))
            delta_a = quantiles(variant_a - base_a)
        if fit in comparable:
            ratio = Ratio.of(
                efficiency_by_recipe[fit.recipe].to_most, efficiency_by_recipe[baseline].to_most
            ).interval()
            delta_b = quantiles(efficiency_by_recipe[fit.recipe].B - efficiency_by_recipe[baseline].B)
        reason = contrast_reason(fit, fit in comparable, margin)
        contrasts.append(Contrast(recipe=fit.recipe, delta_a=delta_a, ratio=ratio, delta_b=delta_b, reason=reason))
    return contrasts
