"""A ranking's outcome and reasons in words, made of results that are computed elsewhere; nothing is decided here.

These words are fields of the records behind `--json`, and a running search journals them, so they are made below
`sweeps.report`; tables and pages are its work.
"""

from __future__ import annotations

from sweeps.decide.standing import Outcome, Standing
from sweeps.fit.fit import Fit
from sweeps.fit.predict import chance


def outcome_sentence(standing: Standing) -> str:
    """Return one sentence on the choice between recipes as it stands."""
    outcome, leader, margin = standing.outcome, standing.leader, standing.margin
    total, unranked = len(standing.verdicts), _unranked(standing)
    if outcome is Outcome.UNKNOWN or leader is None:
        only = next(iter(standing.verdicts), "")
        whose = f"none of the {total} recipes is" if total > 1 else f"{only}, the only recipe, is not"
        return f"undecided: the asymptote of {whose} identifiable{unranked}"
    if outcome is Outcome.ALONE or standing.p_wrong is None:
        return f"{leader} is the only recipe: nothing to compare"
    p, p_right = standing.p_best[leader], 1 - standing.p_wrong
    identifiable = leader in standing.ranked
    not_named = "" if identifiable else f", though it may not be named yet ({standing.verdicts[leader]})"
    within = f"that it is within {margin:g} of the best has {chance(p_right)}"
    if outcome is Outcome.HIGHEST:
        text = f"{leader} has the highest asymptote with {chance(p)}{not_named}; {within}"
        return f"{text}{unranked if identifiable else ''}"
    if outcome is Outcome.BEST_SO_FAR:
        cost = f"choosing it costs {standing.losses[leader]:.3f} on average"
        text = f"{leader} is the best choice so far{not_named}: highest with {chance(p)}, {cost}, and {within}"
        return f"undecided: {text}{unranked}"
    names = ", ".join(standing.tied)
    if outcome is Outcome.TIED_UNSURE:
        why = f"that {leader} is within {margin:g} of the best A is uncertain ({chance(p_right)})"
        return f"undecided: {names} are tied in A within {margin:g}, and {why}{unranked}"
    efficient = chance(standing.p_most_efficient or 0.0)
    if outcome is Outcome.MOST_EFFICIENT:
        return (
            f"{leader} is best: {names} are tied in A within {margin:g}, and it has the highest B at the shared A "
            f"with {efficient}{unranked}"
        )
    return (
        f"{names} are tied in A within {margin:g}, above all others ({within}), and B does not separate them "
        f"({efficient} for {leader}): take any of them{unranked}"
    )


def _unranked(standing: Standing) -> str:
    """Return how many recipes cannot be ranked and which of them could be best; empty where all are ranked."""
    total = len(standing.verdicts)
    refused = total - len(standing.ranked)
    text = f"; {refused} of {total} recipes cannot be ranked" if refused and total > 1 else ""
    could_be = [recipe for recipe in standing.rivals if recipe != standing.leader]
    if could_be:
        could = ", ".join(f"{recipe} ({chance(standing.p_best[recipe])})" for recipe in could_be[:4])
        return f"{text}, and of these {could}{' and others' if len(could_be) > 4 else ''} could be best"
    if text and not standing.rivals:
        text += ", and none of them is likely to be best"
    return text


def place_reason(gap: float, refitted: Fit | None, shared_a: float | None, margin: float) -> str:
    """Return why a ranked recipe has its place.

    Args:
        gap: the best A less the recipe's own.
        refitted: the recipe's fit at the shared A; None where it is not tied with the best.
        shared_a: A at which tied recipes were refitted; None without a tie.
        margin: of a tie.
    """
    if refitted is not None and shared_a is not None:
        b = "unknown" if refitted.B.value is None else f"{refitted.B.value:.3g}"
        return f"A within {margin:g} of the best; B {b} at the shared A {shared_a:.3f}"
    return "highest A" if gap <= 0 else f"A lower than the best by {gap:.3f}"


def contrast_reason(fit: Fit, comparable_b: bool, margin: float) -> str:
    """Return on what a variant is compared with the baseline, or why it is not."""
    if not fit.identifiable:
        return f"{fit.verdict}: {fit.reason}"
    if comparable_b:
        return f"A within {margin:g}: compared on B"
    return f"A differs by more than {margin:g}, so B is not comparable"
