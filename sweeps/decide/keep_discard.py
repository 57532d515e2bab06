"""Keep or discard a change by the final values of a few runs (`scalerl decide`), for users who do not record curves.

The difference of two recipes is tested against the noise floor: the spread between repeated runs. If every
change that improved a single run is kept, noise is mistaken for progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from scipy.special import chdtri, nctdtr, stdtrit

from sweeps.as_json import AsJson
from sweeps.decide.pairwise import MOST_SEEDS, POWER
from sweeps.errors import UserError
from sweeps.fit.fit import Interval, format_interval
from sweeps.source.run_values import RunTable, RunValues
from sweeps.terminal import counted

KEEP, DISCARD, UNDECIDED = "keep", "discard", "undecided"
# Where both recipes have this many runs, each recipe's own spread is used. Otherwise all recipes are assumed to have
# the same spread.
_MIN_RUNS_OWN_SPREAD = 3
# Recommended number of runs of the baseline where nothing was repeated. With 5 runs, the 95% interval of the noise
# floor is 0.6 to 2.9 times its value.
_REPEATS = 5
_TAIL = 0.025
_POWER = 0.8


@dataclass(frozen=True)
class Side(AsJson):
    """One of the two recipes that are compared.

    Attributes:
        recipe: name of the recipe in the table.
        runs: number of runs that finished.
        failed: number of runs that failed.
        mean: mean of the finished runs, in the unit of the table; None if no run finished.
        spread: standard deviation of the finished runs; None with fewer than two.
    """

    recipe: str
    runs: int
    failed: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True)
class ChangeVerdict(AsJson):
    """Verdict on a change, with its evidence.

    Attributes:
        verdict: `keep` or `discard` if the 95% interval of the difference excludes 0, else `undecided`.
        sentence: the verdict with its reason.
        remedy: what to run to reach a decision; None unless the verdict is `undecided`.
        baseline: the current recipe.
        candidate: the changed recipe, which may replace the baseline.
        value: name of the value that is compared.
        lower_is_better: whether the value is a loss.
        sides: baseline and candidate.
        difference: gain of the candidate over the baseline, positive where it is better; None without a spread.
        spread: source of the spread behind the interval: `own` (the two recipes' runs) or `noise floor`; None without
            an interval.
        noise_floor: pooled standard deviation between repeated runs of one recipe; None without repeated runs.
        degrees: degrees of freedom of the noise floor.
        margin: smallest difference that matters. Without a given margin it is the noise floor; None if that is unknown.
        runs_needed: runs of each recipe to detect the margin at 5% with 80% power; None if unknown or over 10,000.
        statuses: number of rows of the table by status.
        failed: number of failed runs in the table.
        notes: remarks on runs that failed or are identical.
    """

    verdict: str
    sentence: str
    remedy: str | None
    baseline: str
    candidate: str
    value: str
    lower_is_better: bool
    sides: tuple[Side, ...]
    difference: Interval | None
    spread: str | None
    noise_floor: Interval | None
    degrees: int
    margin: float | None
    runs_needed: int | None
    statuses: Mapping[str, int]
    failed: int
    notes: tuple[str, ...]

    JSON: ClassVar = {"sides": "recipes"}

    @property
    def margin_text(self) -> str:
        """The words for the margin after "to detect" in a sentence; empty if the margin is unknown."""
        return "" if self.margin is None else _describe_margin(self.margin, self.noise_floor)


@dataclass(frozen=True)
class _Estimate:
    """Gain of the candidate, its standard error, that error's degrees of freedom, and the source of the spread."""

    value: float
    error: float
    degrees: float
    spread: str

    @property
    def interval(self) -> Interval:
        half = self.error * -float(stdtrit(self.degrees, _TAIL))
        return Interval(self.value, self.value - half, self.value + half)

    @property
    def verdict(self) -> str:
        """`keep` if the interval is above 0, `discard` if it is below 0, `undecided` if it contains 0."""
        interval = self.interval
        assert interval.low is not None and interval.high is not None
        return KEEP if interval.low > 0 else DISCARD if interval.high < 0 else UNDECIDED


def keep_or_discard(
    table: RunTable, baseline: str, candidate: str, margin: float | None = None, lower_is_better: bool = False
) -> ChangeVerdict:
    """Decide whether the candidate replaces the baseline.

    With three or more finished runs of each recipe, the interval is Welch's, from the spreads of these two recipes.
    With fewer it is Student's, from the noise floor: the spread of all repeated runs in the table, pooled on the
    assumption that it is the same for all recipes.

    Args:
        table: runs of all recipes; runs of other recipes help to estimate the noise floor.
        baseline: the current recipe.
        candidate: the changed recipe, which may replace the baseline.
        margin: smallest difference that matters, from which the number of runs needed is computed; None for the noise
            floor.
        lower_is_better: whether the compared value is a loss.

    Raises:
        UserError: a recipe is unknown or compared with itself, or the margin is not positive.
    """
    by_name = {runs.recipe: runs for runs in table.recipes}
    for name in (baseline, candidate):
        if name not in by_name:
            raise UserError(f"{name}: no such recipe; the table has {_list_names(by_name)}")
    if baseline == candidate:
        raise UserError(f"{baseline}: is compared with itself; name two recipes")
    if margin is not None and not 0 < margin < math.inf:
        raise UserError(f"--margin {margin:g}: give a positive difference")
    base_runs, candidate_runs = by_name[baseline], by_name[candidate]
    values = {name: _drop_identical(runs.values) for name, runs in by_name.items()}
    squares = sum(_sum_of_squares(group) for group in values.values())
    degrees = sum(max(len(group) - 1, 0) for group in values.values())
    floor = _noise_floor(squares, degrees)
    sign = -1.0 if lower_is_better else 1.0
    margin = margin if margin is not None or floor is None else floor.value
    run_count = None if not degrees or margin is None else runs_needed(math.sqrt(squares / degrees), margin)
    estimate = _estimate(values[baseline], values[candidate], sign, squares, degrees)
    verdict, doubt = UNDECIDED, ""
    if estimate is not None:
        verdict = estimate.verdict
        doubt = (
            _reason_to_doubt(base_runs, candidate_runs, values, sign, squares, degrees) if verdict != UNDECIDED else ""
        )
        verdict = UNDECIDED if doubt else verdict
    sentence = _sentence(verdict, base_runs, candidate_runs, estimate, margin, doubt)
    return ChangeVerdict(
        verdict=verdict,
        sentence=sentence,
        remedy=_remedy(base_runs, candidate_runs, values, floor, margin, run_count, doubt)
        if verdict == UNDECIDED
        else None,
        baseline=baseline,
        candidate=candidate,
        value=table.value,
        lower_is_better=lower_is_better,
        sides=(_summarize_runs(base_runs), _summarize_runs(candidate_runs)),
        difference=None if estimate is None else estimate.interval,
        spread=None if estimate is None else estimate.spread,
        noise_floor=floor,
        degrees=degrees,
        margin=margin,
        runs_needed=run_count,
        statuses=table.statuses,
        failed=sum(runs.failed for runs in table.recipes),
        notes=(*table.notes, *_notes(by_name, values)),
    )


def runs_needed(spread: float, margin: float) -> int | None:
    """Return the runs of each recipe needed to detect a difference at 5% (two-sided t test) with 80% power.

    Args:
        spread: standard deviation between runs of one recipe, above 0.
        margin: difference to detect, in the same unit.

    Returns:
        A number of 2 or more; None if it is above 10,000.
    """
    # The normal distribution's answer is a lower bound, because Student's t is wider: start the search there.
    count = max(math.ceil(2 * (POWER * spread / margin) ** 2), 2) if spread / margin < MOST_SEEDS else MOST_SEEDS + 1
    while count <= MOST_SEEDS:
        degrees = 2 * count - 2
        shift = margin / spread * math.sqrt(count / 2)
        if nctdtr(degrees, shift, -stdtrit(degrees, _TAIL)) <= 1 - _POWER:
            return count
        count += 1
    return None


def _drop_identical(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return the values, or only the first if all are equal: runs that repeat one seed show no spread."""
    same = values and max(values) - min(values) <= 1e-12 * max(map(abs, values))
    return values[:1] if same else values


def _sum_of_squares(values: Sequence[float]) -> float:
    mean = fmean(values) if values else 0.0
    return math.fsum((value - mean) ** 2 for value in values)


def _noise_floor(squares: float, degrees: int) -> Interval | None:
    """Return the pooled standard deviation with its chi-squared interval; None without repeated runs."""
    if not degrees:
        return None
    # chdtri inverts the upper tail.
    low, high = (math.sqrt(squares / float(chdtri(degrees, tail))) for tail in (_TAIL, 1 - _TAIL))
    return Interval(math.sqrt(squares / degrees), low, high)


def _estimate(
    base_values: Sequence[float], candidate_values: Sequence[float], sign: float, squares: float, degrees: int
) -> _Estimate | None:
    """Return the gain of the candidate; None if a recipe has no finished run, or no recipe was run twice."""
    if not base_values or not candidate_values or not degrees:
        return None
    gain = sign * (fmean(candidate_values) - fmean(base_values))
    if min(len(base_values), len(candidate_values)) < _MIN_RUNS_OWN_SPREAD:
        error = math.sqrt(squares / degrees * (1 / len(base_values) + 1 / len(candidate_values)))
        return _Estimate(gain, error, degrees, "noise floor")
    variances = [_sum_of_squares(group) / (len(group) - 1) / len(group) for group in (base_values, candidate_values)]
    # Do not pool the variances (Welch-Satterthwaite), because a change may also change the spread between runs.
    parts = [
        variance**2 / (len(group) - 1)
        for variance, group in zip(variances, (base_values, candidate_values), strict=True)
    ]
    return _Estimate(gain, math.sqrt(sum(variances)), sum(variances) ** 2 / sum(parts), "own")


def _reason_to_doubt(
    base_runs: RunValues,
    candidate_runs: RunValues,
    values: Mapping[str, tuple[float, ...]],
    sign: float,
    squares: float,
    degrees: int,
) -> str:
    """Return why failed runs cast doubt on a decided difference; empty if they do not.

    A run that fails would often have had a bad value. So more than half of the better recipe's runs must have finished,
    and the difference must remain if its failed runs are given the other recipe's mean.
    """
    base_values, candidate_values = list(values[base_runs.recipe]), list(values[candidate_runs.recipe])
    candidate_leads = sign * (fmean(candidate_values) - fmean(base_values)) > 0
    leader, other = (candidate_runs, base_runs) if candidate_leads else (base_runs, candidate_runs)
    if not leader.failed:
        return ""
    if candidate_leads:
        candidate_values += [fmean(base_values)] * leader.failed
    else:
        base_values += [fmean(candidate_values)] * leader.failed
    estimate = _estimate(base_values, candidate_values, sign, squares, degrees)
    assert estimate is not None
    total = leader.failed + len(leader.values)
    text = f"{leader.recipe} is ahead in the runs that finished, but {leader.failed} of its {total} runs failed"
    if leader.failed >= len(leader.values):
        return text
    if estimate.verdict == UNDECIDED:
        return f"{text}, and the difference would not hold if these had ended like {other.recipe}"
    return ""


def _summarize_runs(runs: RunValues) -> Side:
    count = len(runs.values)
    return Side(
        recipe=runs.recipe,
        runs=count,
        failed=runs.failed,
        mean=fmean(runs.values) if count else None,
        spread=math.sqrt(_sum_of_squares(runs.values) / (count - 1)) if count > 1 else None,
    )


def _sentence(
    verdict: str,
    base_runs: RunValues,
    candidate_runs: RunValues,
    estimate: _Estimate | None,
    margin: float | None,
    doubt: str,
) -> str:
    one, two = base_runs.recipe, candidate_runs.recipe
    for runs in (base_runs, candidate_runs):
        if not runs.values:
            return f"undecided: no run of {runs.recipe} finished ({counted(runs.failed, 'run')} failed)"
    if estimate is None:
        repeated = max(len(base_runs.values), len(candidate_runs.values)) > 1
        why = "all repeated runs are identical" if repeated else "nothing was repeated"
        return f"undecided: {why}, so the noise floor is unknown and any difference may be noise"
    interval = estimate.interval
    if verdict != UNDECIDED:
        word = "better" if verdict == KEEP else "worse"
        return f"{verdict} {two}: {word} than {one}, by {format_interval(interval, '+.4g')}"
    if doubt:
        return f"undecided: {doubt}"
    assert interval.low is not None and interval.high is not None
    if margin is not None and -margin < interval.low and interval.high < margin:
        return f"undecided: {two} and {one} are the same within {margin:.4g}: {format_interval(interval, '+.4g')}"
    return f"undecided: {two} and {one} cannot be told apart: {format_interval(interval, '+.4g')}"


def _remedy(
    base_runs: RunValues,
    candidate_runs: RunValues,
    values: Mapping[str, tuple[float, ...]],
    floor: Interval | None,
    margin: float | None,
    run_count: int | None,
    doubt: str,
) -> str:
    for runs in (base_runs, candidate_runs):
        if not runs.values:
            return f"fix and repeat {runs.recipe}, or leave it out: a change that did not run cannot be kept"
    if floor is None or margin is None:
        repeat = f"run {base_runs.recipe} {counted(_REPEATS, 'time')}, each with another seed"
        return f"{repeat}, and give every run its own row"
    if doubt:
        return "repeat the failed runs with other seeds, or find out why they failed"
    if run_count is None:
        return f"a difference of {margin:.4g} needs more than {MOST_SEEDS:,} runs of each; look for a larger one"
    more = {runs.recipe: run_count - len(values[runs.recipe]) for runs in (base_runs, candidate_runs)}
    missing = [f"{name} {counted(count, 'more time')}" for name, count in more.items() if count > 0]
    goal = _describe_margin(margin, floor)
    if not missing:
        return f"the runs are enough to detect {goal}: take the simpler recipe, or give a smaller --margin"
    text = f"detecting {goal} needs {run_count} runs of each: run {' and '.join(missing)}, each with another seed"
    return (
        f"{text}; or give the difference that matters to you with --margin" if _is_noise_floor(margin, floor) else text
    )


def _describe_margin(margin: float, floor: Interval | None) -> str:
    text = f"as large as the noise floor ({margin:.4g})" if _is_noise_floor(margin, floor) else f"of {margin:.4g}"
    return f"a difference {text}"


def _is_noise_floor(margin: float, floor: Interval | None) -> bool:
    return floor is not None and margin == floor.value


def _notes(by_name: Mapping[str, RunValues], values: Mapping[str, tuple[float, ...]]) -> list[str]:
    notes = [
        f"{name}: its {len(runs.values)} runs are identical and count as one; give each another seed"
        for name, runs in by_name.items()
        if len(values[name]) < len(runs.values)
    ]
    failed = [
        f"{name} {runs.failed} of {runs.failed + len(runs.values)}" for name, runs in by_name.items() if runs.failed
    ]
    if failed:
        more = f" and {len(failed) - 6} others" if len(failed) > 6 else ""
        notes.append(f"failed runs: {', '.join(failed[:6])}{more}; their values are not used")
    return notes


def _list_names(names: Mapping[str, RunValues]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:12])}{f' and {len(listed) - 12} others' if len(listed) > 12 else ''}" or "no row"
