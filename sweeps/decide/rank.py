"""Which recipe is best: by asymptote with its uncertainty, within a margin by efficiency, or "undecided".

Recipes are compared on A by joint draws that include the spread between seeds. Those within the margin of the
best A are tied; ties are broken by B after refitting with A fixed to their mean, as the paper does (arXiv
2510.13786, A.7: three runs of one recipe differ by up to 0.015 in A, hence the margin 0.02). A recipe whose
asymptote is not identifiable is listed last, unranked, with the reason; so is one whose later compute no family of
curves foretells better than the last value does. Recipes that share seeds are compared in pairs: what a seed does to
all of them alike drops out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.decide.margin import MARGIN
from sweeps.errors import UserError
from sweeps.fit.compare import Comparison, compare
from sweeps.fit.fit import Fit, Interval, refit
from sweeps.fit.least_squares import Array
from sweeps.fit.points import FitOptions
from sweeps.fit.predict import chance, predict, total_draws
from sweeps.fit.seeds import Pairing, SeedSpread, paired_seed_spread
from sweeps.parallel import mapped

# What counts as decided.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ranked(AsJson):
    """One recipe's place; rank and p_best are None where A may not be named. Intervals are 95%."""

    recipe: str
    rank: int | None
    p_best: float | None
    tied_with_best: bool
    A: Interval
    A_total: tuple[float | None, float | None]
    B_at_shared_A: Interval | None
    C_mid_at_shared_A: Interval | None
    R_at_budget: Interval | None
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """One entry of `scalerl rank --json`."""
        return {**super().to_json(), "A_total": {"low": self.A_total[0], "high": self.A_total[1]}}


@dataclass(frozen=True)
class Contrast(AsJson):
    """A variant against the baseline: delta_a with the spread between seeds, delta_b at a shared A.

    delta_b is None where the two A differ by more than the margin, for B then means different things.
    """

    recipe: str
    delta_a: Interval | None
    delta_b: Interval | None
    reason: str

    JSON: ClassVar = {"delta_a": "delta_A", "delta_b": "delta_B_at_shared_A"}


@dataclass(frozen=True)
class Ranking(AsJson):
    """All recipes in order.

    sentence says the outcome; shared_a is the A at which tied ones were refitted; pairing the seeds by which they were
    compared, if they share any; comparisons the families' forecasts of each identifiable recipe.
    """

    baseline: str | None
    margin: float
    budget: float | None
    undecided: bool
    sentence: str
    shared_a: float | None
    ranking: tuple[Ranked, ...]
    leave_one_out: tuple[Contrast, ...]
    pairing: Pairing | None = None
    comparisons: tuple[Comparison, ...] = ()

    JSON: ClassVar = {"shared_a": "shared_A", "pairing": "paired", "comparisons": "forecasts"}


def rank(
    fits: Sequence[Fit],
    margin: float | None = None,
    budget: float | None = None,
    workers: int = 1,
    brief: bool = False,
    baseline: str | None = None,
) -> Ranking:
    """Order recipes.

    Args:
        fits: one a recipe, as `fit_curves` returns them (so that the spread between seeds is pooled).
        margin: recipes whose A lies within this of the best are tied, in reward units; 0.02 of the reward's scale if
            not given.
        budget: compute at which to give the reward as well, in the curves' unit.
        brief: leave out what the ranking does not depend on: how every family forecasts.
        workers: processes to share the comparisons of families, by far the most work; see `sweeps.parallel`.
        baseline: recipe to hold the others against; if not given, the one that most of them name as theirs.

    Raises:
        UserError: margin or budget is not positive, nothing to rank, a baseline that is not there, or several
            evaluation sets at once.
    """
    if not fits:
        raise UserError("nothing to rank: give at least one recipe")
    margin = margin_of(fits, margin)
    if budget is not None and not (np.isfinite(budget) and budget > 0):
        raise UserError(f"--budget {budget:g}: must be positive, in the unit of the compute axis")
    sets = sorted({fit.curve.factors["set"] for fit in fits if "set" in fit.curve.factors})
    if len(sets) > 1:
        raise UserError(f"evaluation sets {', '.join(sets)} have asymptotes of their own; choose one with --metric")
    judged = [fit for fit in fits if fit.identifiable]
    found = mapped(partial(_compared, brief=brief), [(fit.curve, fit.options) for fit in judged], workers)
    comparisons = {fit.recipe: comparison for fit, comparison in zip(judged, found, strict=True)}
    # Too little held-out compute to judge by is no reason to refuse; a forecast that is worse than none is.
    blind = {name: found.sentence for name, found in comparisons.items() if found.beats_last is False}
    named = [(fit, _value(fit.A)) for fit in fits if fit.identifiable and fit.recipe not in blind]
    baseline = _baseline(fits, baseline)
    contenders = [fit for fit, _ in named]
    refused = sorted((fit for fit in fits if fit not in contenders), key=lambda fit: fit.recipe)
    pairing = pairing_of(contenders)
    between = {fit.recipe: fit.seed_spread if pairing is None else pairing.spread for fit in contenders}
    p_best = _p_best([total_draws(fit, spread=between[fit.recipe]) for fit in contenders])
    best = max((a for _, a in named), default=0.0)
    tied = [fit for fit, a in named if best - a <= margin + 1e-12]
    shared_a, at_shared = _at_shared(tied)

    def order(item: tuple[Fit, float]) -> tuple[bool, float, str]:
        fit, a = item
        refitted = at_shared.get(fit.recipe)
        efficiency = None if refitted is None else refitted.B.value
        return fit not in tied, -(efficiency or 0.0) if fit in tied and at_shared else -a, fit.recipe

    ordered = [fit for fit, _ in sorted(named, key=order)]
    undecided, sentence = _outcome(
        ordered, tied, refused, dict(zip(contenders, p_best, strict=True)), at_shared, margin
    )
    entries = []
    for place, fit in enumerate(ordered, start=1):
        p = p_best[contenders.index(fit)]
        refitted = at_shared.get(fit.recipe)
        gap = best - _value(fit.A)
        if refitted is not None and shared_a is not None:
            b = "unknown" if refitted.B.value is None else f"{refitted.B.value:.3g}"
            reason = f"A within {margin:g} of the best; B {b} at the shared A {shared_a:.3f}"
        else:
            reason = "highest A" if gap <= 0 else f"A lower than the best by {gap:.3f}"
        entries.append(
            Ranked(
                fit.recipe,
                place,
                p,
                refitted is not None,
                fit.A,
                fit.A_total,
                None if refitted is None else refitted.B,
                None if refitted is None else refitted.C_mid,
                _at_budget(fit, budget),
                fit.verdict,
                reason,
            )
        )
    entries += [
        Ranked(
            fit.recipe,
            None,
            None,
            False,
            fit.A,
            fit.A_total,
            None,
            None,
            _at_budget(fit, budget),
            fit.verdict,
            blind.get(fit.recipe, fit.reason),
        )
        for fit in refused
    ]
    contrasts = () if baseline is None else tuple(_leave_one_out(fits, blind, between, baseline, margin))
    return Ranking(
        baseline,
        margin,
        budget,
        undecided,
        sentence,
        shared_a,
        tuple(entries),
        contrasts,
        pairing,
        () if brief else tuple(comparisons.values()),
    )


def _compared(asked: tuple[Curve, FitOptions], brief: bool) -> Comparison:
    return compare(*asked, brief=brief)


def pairing_of(fits: Sequence[Fit]) -> Pairing | None:
    """The seeds by which identifiable recipes are compared, if they are the same for all."""
    return paired_seed_spread([fit.seed_excess for fit in fits], max((fit.curve.scale for fit in fits), default=1.0))


def margin_of(fits: Sequence[Fit], margin: float | None) -> float:
    """The margin of a tie, in reward units: the paper's 0.02, carried over to the reward's scale, if not given.

    Raises:
        UserError: it is negative or no number.
    """
    if margin is None:
        return MARGIN * max((fit.curve.scale for fit in fits), default=1.0)
    if not (np.isfinite(margin) and margin >= 0):
        raise UserError(f"--margin {margin:g}: must be 0 or more, in reward units")
    return margin


def _value(interval: Interval) -> float:
    """An estimate that the verdict lets be named."""
    assert interval.value is not None
    return interval.value


def _baseline(fits: Sequence[Fit], asked: str | None) -> str | None:
    """The recipe that the others depart from: the one asked for, or else that most of them name."""
    recipes = sorted(fit.recipe for fit in fits)
    if asked is not None:
        if asked not in recipes:
            raise UserError(f"--baseline {asked!r}: no such recipe; there are {', '.join(recipes)}")
        return asked
    named = Counter(fit.curve.baseline for fit in fits)
    return max((recipe for recipe in recipes if named[recipe]), key=lambda recipe: named[recipe], default=None)


def _p_best(draws: Sequence[Array]) -> list[float]:
    """Share of joint draws in which each is highest; equal values (a common bound) share the draw."""
    if not draws:
        return []
    stacked = np.stack(draws)
    top = stacked == stacked.max(axis=0)
    return [float(p) for p in (top / top.sum(axis=0)).mean(axis=1)]


def _at_shared(tied: Sequence[Fit]) -> tuple[float | None, dict[str, Fit]]:
    """The mean A of tied recipes and their refits at it; nothing where there is no tie."""
    if len(tied) < 2:
        return None, {}
    shared = float(np.mean([_value(fit.A) for fit in tied]))
    return shared, {fit.recipe: refit(fit, shared) for fit in tied}


def _p_more_efficient(leader: Fit, others: Sequence[Fit]) -> float:
    """Share of draws in which the leader's B is the highest, all at one A."""
    if leader.draws is None or any(fit.draws is None for fit in others):
        return 0.0
    return _p_best([fit.draws.B for fit in (leader, *others) if fit.draws is not None])[0]


def _outcome(
    ordered: Sequence[Fit],
    tied: Sequence[Fit],
    refused: Sequence[Fit],
    p_best: dict[Fit, float],
    at_shared: dict[str, Fit],
    margin: float,
) -> tuple[bool, str]:
    """Whether the data decide, and one sentence that says so."""
    total = len(ordered) + len(refused)
    unranked = f"; {len(refused)} of {total} recipes cannot be ranked" if refused else ""
    if not ordered:
        return True, f"undecided: the asymptote of none of the {total} recipes is identifiable"
    leader = ordered[0]
    if len(ordered) == 1:
        if not refused:
            return False, f"{leader.recipe} is the only recipe: nothing to compare"
        return True, f"undecided: only the asymptote of {leader.recipe} is identifiable{unranked}"
    if len(tied) == 1:
        p = p_best[leader]
        if p >= CONFIDENCE:
            return False, f"{leader.recipe} has the highest asymptote with {chance(p)}{unranked}"
        return True, f"undecided: {leader.recipe} has the highest asymptote with {chance(p)} only{unranked}"
    # The margin already stands for the spread between seeds, so whether the leader is within it is a question
    # to the runs given.
    runs = np.stack([fit.draws.A for fit in ordered if fit.draws is not None])
    within = float((runs[0] >= runs.max(axis=0) - margin).mean())
    others = [at_shared[fit.recipe] for fit in tied if fit is not leader]
    efficient = _p_more_efficient(at_shared[leader.recipe], others)
    names = ", ".join(fit.recipe for fit in ordered if fit in tied)
    if within >= CONFIDENCE and efficient >= CONFIDENCE:
        return False, (
            f"{leader.recipe} is best: {names} are tied in A within {margin:g}, and it has the highest B "
            f"at the shared A with {chance(efficient)}{unranked}"
        )
    why = (
        f"B does not separate them ({chance(efficient)} for {leader.recipe})"
        if within >= CONFIDENCE
        else f"that {leader.recipe} is within {margin:g} of the best A is uncertain ({chance(within)})"
    )
    return True, f"undecided: {names} are tied in A within {margin:g}, and {why}{unranked}"


def _at_budget(fit: Fit, budget: float | None) -> Interval | None:
    """The runs' reward at the budget, if the recipe has a fit at all."""
    if budget is None or fit.draws is None:
        return None
    band = predict(fit, [budget])
    return Interval(float(band.mean[0]), float(band.low[0]), float(band.high[0]))


def _leave_one_out(
    fits: Sequence[Fit], blind: Mapping[str, str], between: Mapping[str, SeedSpread], baseline: str, margin: float
) -> list[Contrast]:
    """Every recipe that departs from the baseline against it. `between`: spread of A between seeds.

    Where none says what it departs from (the baseline was asked for by name), all others.
    """
    base = next(fit for fit in fits if fit.recipe == baseline)
    others = sorted((fit for fit in fits if fit is not base), key=lambda fit: fit.recipe)
    variants = [fit for fit in others if fit.curve.baseline == baseline] or others
    if baseline not in between:
        why = blind.get(baseline, f"the baseline's A is not identifiable ({base.verdict})")
        return [Contrast(fit.recipe, None, None, why) for fit in variants]
    named = [fit for fit in variants if fit.recipe in between]
    close = [fit for fit in named if abs(_value(fit.A) - _value(base.A)) <= margin + 1e-12]
    _, at_shared = _at_shared([base, *close])
    table = []
    for fit in variants:
        if fit not in named:
            table.append(Contrast(fit.recipe, None, None, blind.get(fit.recipe, f"{fit.verdict}: {fit.reason}")))
            continue
        ours_a, theirs_a = (total_draws(one, spread=between[one.recipe]) for one in (fit, base))
        delta_a = _difference(_value(fit.A) - _value(base.A), ours_a, theirs_a)
        delta_b = None
        reason = f"A differs by more than {margin:g}, so B is not comparable"
        if fit in close:
            ours, theirs = at_shared[fit.recipe], at_shared[baseline]
            reason = f"A within {margin:g}: compared on B"
            if ours.draws and theirs.draws and ours.B.value is not None and theirs.B.value is not None:
                delta_b = _difference(ours.B.value - theirs.B.value, ours.draws.B, theirs.draws.B)
        table.append(Contrast(fit.recipe, delta_a, delta_b, reason))
    return table


def _difference(value: float, ours: Array, theirs: Array) -> Interval:
    low, high = np.quantile(ours - theirs, [0.025, 0.975])
    return Interval(value, float(low), float(high))
