"""Describe the outcome and reasons of a ranking in words; the results are computed elsewhere.

These sentences are fields of the `--json` records, and a running search writes them to its journal. So they are not in
`sweeps.report`, which makes tables and pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sweeps.decide.standing import Outcome, Standing
from sweeps.fit.fit import Fit, Interval, format_interval
from sweeps.fit.verdict import chance


def outcome_sentence(standing: Standing) -> str:
    """Return one sentence on the current choice between recipes."""
    outcome, leader, margin = standing.outcome, standing.leader, standing.margin
    total, unranked = len(standing.verdicts), _describe_unranked(standing)
    if outcome is Outcome.UNKNOWN or leader is None:
        only = next(iter(standing.verdicts), "")
        if total > 1:
            return f"undecided: none of the {total} recipes has an identifiable asymptote{unranked}"
        return f"undecided: the asymptote of {only}, the only recipe, is not identifiable{unranked}"
    if outcome is Outcome.ALONE or standing.p_wrong is None:
        return f"{leader} is the only recipe: nothing to compare"
    p, p_right = standing.p_best[leader], 1 - standing.p_wrong
    identifiable = leader in standing.ranked
    not_named = f"its A is not identifiable yet ({standing.verdicts[leader]})"
    is_within = f"is within {margin:g} of the best with {chance(p_right)}"
    if outcome is Outcome.HIGHEST:
        text = f"{leader} has the highest asymptote with {chance(p)} and {is_within}"
        return f"{text}{unranked}" if identifiable else f"{text}; {not_named}"
    if outcome is Outcome.FLAT:
        flat = "both recipes are" if total == 2 else f"all {total} recipes are"
        return f"undecided: nothing to choose yet, because {flat} flat"
    if outcome is Outcome.BEST_SO_FAR:
        text = f"{leader} is the best choice so far: it has the highest A with {chance(p)} and {is_within}"
        cost = f"its expected loss is {standing.losses[leader]:.3f}{'' if identifiable else f', and {not_named}'}"
        return f"undecided: {text}; {cost}{unranked}"
    names = _join(standing.tied, "and")
    if outcome is Outcome.TIED_UNSURE:
        why = f"it is uncertain whether {leader} is within {margin:g} of the best A ({chance(p_right)})"
        return f"undecided: {names} are tied in A within {margin:g}, but {why}{unranked}"
    others = ", above all others" if len(standing.tied) < total else ""
    if outcome is Outcome.FASTER_UNSURE:
        text = f"{leader} has the surest ceiling: it {is_within}"
        return f"{text}. {_describe_faster(standing)}{unranked}"
    surely = f"{names} are tied in A within {margin:g}{others} ({leader} {is_within})"
    if not standing.slower:
        return f"{surely}. Compute to 90% of the gain does not separate them: take any of them{unranked}"
    choices = _join(standing.choices, "or")
    return f"same ceiling: choose {choices}, because {_describe_slower(standing)}. {surely}{unranked}"


def headline(standing: Standing, names: Mapping[str, str]) -> str:
    """Return the choice in one short line, without probabilities. `names` has the name to show for each recipe."""
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
    if outcome is Outcome.FASTER_UNSURE:
        faster = _name_alternatives([names[recipe] for recipe in standing.faster])
        return f"choose {names[leader]} for the surest ceiling; {faster} for less compute and a less sure one"
    either = _name_alternatives([names[recipe] for recipe in standing.choices])
    if not standing.slower:
        return f"choose {either}: neither ceiling nor compute separates them"
    return f"choose {either}: {_describe_slower(standing).removesuffix(' to 90% of the gain')} to the same ceiling"


def horizon_sentence(standing: Standing) -> str:
    """Return one sentence on the choice by the reward at the horizon; empty if there is nothing to compare."""
    horizon = standing.horizon
    if horizon is None or horizon.leader is None or horizon.p_wrong is None or standing.outcome is Outcome.FLAT:
        return ""
    where = f"at {windows_text(horizon.windows)} (compute {horizon.compute:.4g})"
    margin_text = f"within {standing.margin:g} of the highest reward with {chance(1 - horizon.p_wrong)}"
    if horizon.decided:
        return f"decided {where}: {horizon.leader} is {margin_text}"
    return f"undecided {where}: {horizon.leader} leads and is {margin_text}"


def windows_text(windows: float) -> str:
    """Format a multiple of the evaluated compute, `Horizon.windows`: `1 window`, `2 windows`."""
    number = f"{windows:.3g}"
    return f"{number} window{'' if number == '1' else 's'}"


def _join(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _name_alternatives(names: Sequence[str]) -> str:
    return _join(names, "or") if len(names) < 3 else f"any of {len(names)} recipes"


# Words to follow "the other", by number of recipes; empty for one recipe.
_NUMBERS = ("", "", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")


def _describe_slower(standing: Standing) -> str:
    slower, count = standing.slower, len(standing.slower)
    ratios = [ratio for recipe in slower if (ratio := standing.ratio(recipe)) is not None]
    subject = f"the other{_NUMBERS[count] if count < len(_NUMBERS) else f' {count}'}"
    verb = "takes" if count == 1 else "take"
    if count == 1 and ratios[0].value is not None:
        return f"{subject} takes {format_interval(ratios[0], '.2f')} times the compute to 90% of the gain"
    ordered = sorted(ratios, key=lambda each: (each.value is None, each.value or each.low or 0.0))
    lowest, highest = multiple(ordered[0]), multiple(ordered[-1])
    times = lowest if lowest == highest else f"{lowest} to {highest}"
    return f"{subject} {verb} {times} times the compute to 90% of the gain"


def _describe_faster(standing: Standing) -> str:
    descriptions = []
    for recipe in standing.faster:
        ratio = standing.ratio(recipe)
        assert ratio is not None, "a faster recipe has a ratio"
        p_within = chance(1 - standing.p_wrong_by_recipe[recipe])
        descriptions.append(
            f"{recipe}, tied with it in A, needs {_format_ratio(ratio)} times its compute to 90% of the gain, but is "
            f"within {standing.margin:g} of the best only with {p_within}"
        )
    return "; ".join(descriptions)


def _format_ratio(ratio: Interval) -> str:
    """Format a ratio of computes with its interval, or by its lower bound if the median is infinite."""
    return multiple(ratio) if ratio.value is None else format_interval(ratio, ".2f")


def multiple(ratio: Interval) -> str:
    """Format a ratio of computes by its median, or by its lower bound if the median is infinite."""
    return f"at least {ratio.low or 0.0:.2g}" if ratio.value is None else f"{ratio.value:.2g}"


def _describe_unranked(standing: Standing) -> str:
    total = len(standing.verdicts)
    unranked_count = total - len(standing.ranked)
    text = f". {unranked_count} of {total} recipes cannot be ranked" if unranked_count and total > 1 else ""
    rivals = [recipe for recipe in standing.rivals if recipe != standing.leader and total > 1]
    if rivals:
        named_rivals = [f"{recipe} ({chance(standing.p_best[recipe])})" for recipe in rivals[:4]]
        if len(rivals) == 1:
            return f"{text}; of these, {rivals[0]} could be the best ({chance(standing.p_best[rivals[0]])})"
        listed = _join([*named_rivals, "others"] if len(rivals) > 4 else named_rivals, "and")
        return f"{text}; of these, {listed} could be the best"
    if text and not standing.rivals:
        text += f"; {'it is not' if unranked_count == 1 else 'none of these is'} likely to be the best"
    return text


def rank_reason(gap: float, recipe: str, standing: Standing) -> str:
    """Return why a ranked recipe has its place. `gap` is the best A minus this recipe's A."""
    if recipe in standing.efficiencies and standing.shared_a is not None:
        first, shared = standing.tied[0], f"90% of the way to A {standing.shared_a:.3f}"
        within = f"A within {standing.margin:g} of the best"
        text = f"{within}; "
        if recipe == first:
            # The leader is the most efficient of the recipes that are surely within the margin. Other recipes may need
            # less compute.
            ratios = [ratio for other in standing.tied if (ratio := standing.ratio(other)) is not None]
            faster = any(ratio.value is not None and ratio.value < 1 for ratio in ratios)
            return f"surely {within}" if faster else f"{text}least compute to {shared}"
        ratio = standing.ratio(recipe)
        if ratio is None:
            return f"{text}neither it nor {first} is known to reach {shared}"
        return f"{text}{_format_ratio(ratio)} times the compute of {first} to {shared}"
    return "highest A" if gap <= 0 else f"A lower than the best by {gap:.3f}"


def contrast_reason(fit: Fit, comparable: bool, margin: float) -> str:
    """Return by what a variant is compared with the baseline, or why it is not compared."""
    if not fit.identifiable:
        return f"{fit.verdict}: {fit.reason}"
    if comparable:
        return f"A within {margin:g}: compared by the compute to 90% of the gain"
    return f"A differs by more than {margin:g}: compute to a shared A cannot be compared"
