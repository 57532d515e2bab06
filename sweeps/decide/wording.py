"""Describe the outcome and reasons of a ranking in words; the results are computed elsewhere.

These sentences are fields of the `--json` records, and a running search writes them to its journal. So they are not in
`sweeps.report`, which makes tables and pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from sweeps.decide.standing import Outcome, Standing
from sweeps.fit.fit import Fit, Interval, format_interval
from sweeps.fit.predict import chance


def outcome_sentence(standing: Standing) -> str:
    """Return one sentence on the current choice between recipes."""
    outcome, leader, margin = standing.outcome, standing.leader, standing.margin
    total, unranked = len(standing.verdicts), _describe_unranked(standing)
    if outcome is Outcome.UNKNOWN or leader is None:
        only = next(iter(standing.verdicts), "")
        whose = f"none of the {total} recipes is" if total > 1 else f"{only}, the only recipe, is not"
        return f"undecided: the asymptote of {whose} identifiable{unranked}"
    if outcome is Outcome.ALONE or standing.p_wrong is None:
        return f"{leader} is the only recipe: nothing to compare"
    p, p_right = standing.p_best[leader], 1 - standing.p_wrong
    identifiable = leader in standing.ranked
    not_named = "" if identifiable else f", though it may not be named yet ({standing.verdicts[leader]})"
    is_within = f"is within {margin:g} of the best has {chance(p_right)}"
    margin_text = f"that it {is_within}"
    if outcome is Outcome.HIGHEST:
        text = f"{leader} has the highest asymptote with {chance(p)}{not_named}; {margin_text}"
        return f"{text}{unranked if identifiable else ''}"
    if outcome is Outcome.FLAT:
        return f"undecided: nothing to choose yet: {'both' if total == 2 else f'all {total}'} flat"
    if outcome is Outcome.BEST_SO_FAR:
        cost = f"choosing it costs {standing.losses[leader]:.3f} on average"
        text = f"{leader} is the best choice so far{not_named}: highest with {chance(p)}, {cost}, and {margin_text}"
        return f"undecided: {text}{unranked}"
    names = ", ".join(standing.tied)
    if outcome is Outcome.TIED_UNSURE:
        why = f"that {leader} is within {margin:g} of the best A is uncertain ({chance(p_right)})"
        return f"undecided: {names} are tied in A within {margin:g}, and {why}{unranked}"
    surely = f"{names} are tied in A within {margin:g}, above all others (that {leader} {is_within})"
    if not standing.slower:
        return f"{surely}, and compute to 90% of the way there does not separate them: take any of them{unranked}"
    either = " or ".join(filter(None, [", ".join(standing.choices[:-1]), standing.choices[-1]]))
    return f"same ceiling; {either}: {_describe_slower(standing)}; {surely}{unranked}"


def headline(standing: Standing, names: Mapping[str, str]) -> str:
    """Return the choice in one short line, without probabilities; names: the name to show for each recipe."""
    outcome, leader = standing.outcome, standing.leader
    if outcome is Outcome.UNKNOWN or leader is None:
        return "undecided: no asymptote is identifiable yet"
    if outcome is Outcome.ALONE:
        return f"{names[leader]} is the only recipe"
    if outcome is Outcome.HIGHEST:
        return f"choose {names[leader]}: its asymptote is within {standing.margin:g} of the best"
    if outcome is Outcome.FLAT:
        return "undecided: no reward rises yet"
    if outcome is Outcome.BEST_SO_FAR:
        return f"undecided: {names[leader]} is the best choice so far ({chance(standing.p_best[leader])})"
    if outcome is Outcome.TIED_UNSURE:
        return f"undecided: {len(standing.tied)} recipes share the lead"
    chosen = [names[recipe] for recipe in standing.choices]
    either = " or ".join(chosen) if len(chosen) < 3 else f"any of {len(chosen)} recipes"
    if not standing.slower:
        return f"choose {either}: neither ceiling nor compute separates them"
    return f"choose {either}: {_describe_slower(standing).removesuffix(' to 90% of the way there')} to the same ceiling"


def horizon_sentence(standing: Standing) -> str:
    """Return one sentence on the choice at the horizon; empty if there is nothing to compare."""
    horizon = standing.horizon
    if horizon is None or horizon.leader is None or horizon.p_wrong is None or standing.outcome is Outcome.FLAT:
        return ""
    where = f"at {horizon.windows:.3g} windows (compute {horizon.compute:.4g})"
    margin_text = f"within {standing.margin:g} of the highest reward with {chance(1 - horizon.p_wrong)}"
    if horizon.decided:
        return f"decided {where}: {horizon.leader} is {margin_text}"
    return f"undecided {where}: {horizon.leader} is first, {margin_text}"


# Number words by count, to follow "the other"; empty for one recipe.
_NUMBERS = ("", "", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")


def _describe_slower(standing: Standing) -> str:
    """Describe how many times the compute the slower tied recipes need, to 90% of the way to their ceiling."""
    slower, count = standing.slower, len(standing.slower)
    ratios = [ratio for recipe in slower if (ratio := standing.ratio(recipe)) is not None]
    subject = f"the other{_NUMBERS[count] if count < len(_NUMBERS) else f' {count}'}"
    verb = "takes" if count == 1 else "take"
    if count == 1 and ratios[0].value is not None:
        return f"{subject} takes {format_interval(ratios[0], '.2f')} times the compute to 90% of the way there"
    ordered = sorted(ratios, key=lambda each: (each.value is None, each.value or each.low or 0.0))
    lowest, highest = multiple(ordered[0]), multiple(ordered[-1])
    times = lowest if lowest == highest else f"{lowest} to {highest}"
    return f"{subject} {verb} {times} times the compute to 90% of the way there"


def multiple(ratio: Interval) -> str:
    """Format a ratio of computes by its median, or by its lower bound if the median is infinite."""
    return f"at least {ratio.low or 0.0:.2g}" if ratio.value is None else f"{ratio.value:.2g}"


def _describe_unranked(standing: Standing) -> str:
    """Describe how many recipes cannot be ranked, and which of them could be best; empty if all are ranked."""
    total = len(standing.verdicts)
    unranked_count = total - len(standing.ranked)
    text = f"; {unranked_count} of {total} recipes cannot be ranked" if unranked_count and total > 1 else ""
    rivals = [recipe for recipe in standing.rivals if recipe != standing.leader]
    if rivals:
        named_rivals = ", ".join(f"{recipe} ({chance(standing.p_best[recipe])})" for recipe in rivals[:4])
        return f"{text}, and of these {named_rivals}{' and others' if len(rivals) > 4 else ''} could be best"
    if text and not standing.rivals:
        text += ", and none of them is likely to be best"
    return text


def place_reason(gap: float, recipe: str, standing: Standing) -> str:
    """Return why a ranked recipe has its place; gap: the best A minus this recipe's A."""
    if recipe in standing.efficiencies and standing.shared_a is not None:
        first, shared = standing.tied[0], f"90% of the way to A {standing.shared_a:.3f}"
        text = f"A within {standing.margin:g} of the best; "
        if recipe == first:
            return f"{text}first by the compute to {shared}"
        ratio = standing.ratio(recipe)
        if ratio is None:
            return f"{text}neither it nor {first} is known to get {shared}"
        times = multiple(ratio) if ratio.value is None else format_interval(ratio, ".2f")
        return f"{text}{times} times the compute of {first} to {shared}"
    return "highest A" if gap <= 0 else f"A lower than the best by {gap:.3f}"


def contrast_reason(fit: Fit, comparable: bool, margin: float) -> str:
    """Return how a variant is compared with the baseline, or why it is not."""
    if not fit.identifiable:
        return f"{fit.verdict}: {fit.reason}"
    if comparable:
        return f"A within {margin:g}: compared by the compute to 90% of the way there"
    return f"A differs by more than {margin:g}: compute to a shared A cannot be compared"
