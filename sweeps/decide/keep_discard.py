"""Keep or discard a change by the final values of a few runs, for loops that do not record curves (`scalerl decide`).

The difference of two recipes is tested against the spread between repeated runs. Loops that keep every change that
improved in a single run mistake that spread, the noise floor, for progress.
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
from sweeps.fit.fit import Interval, shown
from sweeps.source.run_values import RunTable, RunValues
from sweeps.terminal import counted

KEEP, DISCARD, UNDECIDED = "keep", "discard", "undecided"
# From this many runs of each recipe their own spread is used; with fewer, all recipes are assumed to spread equally.
_OWN_SPREAD = 3
# Runs of the baseline to recommend if nothing was repeated: the 95% interval of the noise floor is then 0.6 to 2.9
# times its value.
_REPEATS = 5
_TAIL = 0.025
_POWER = 0.8


@dataclass(frozen=True)
class Side(AsJson):
    """One of the two recipes.

    Attributes:
        recipe: its name in the table.
        runs: number of runs that finished.
        failed: number of runs that failed.
        mean: mean of the finished runs, as in the table; None without one.
        spread: standard deviation of the finished runs; None with fewer than two.
    """

    recipe: str
    runs: int
    failed: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True)
class Choice(AsJson):
    """Verdict on a change, with its evidence.

    Attributes:
        verdict: `keep` or `discard` if the 95% interval of the difference excludes 0, else `undecided`.
        sentence: the verdict with its reason.
        remedy: runs to make for a decision; None if it is decided.
        baseline: recipe to keep so far.
        candidate: recipe that may take its place.
        value: name of the value.
        lower_is_better: whether the value is a loss.
        sides: baseline and candidate.
        difference: gain of the candidate over the baseline, positive where it is better; None without a spread.
        spread: source of the interval's spread: `own` (the runs of the two) or `noise floor`; None without an interval.
        noise_floor: pooled standard deviation between repeated runs of one recipe; None without repeated runs.
        degrees: degrees of freedom of the noise floor.
        margin: difference worth telling; the noise floor if none was given, None if that is unknown.
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
    def difference_to_tell(self) -> str:
        """The margin in words; empty if it is unknown."""
        return "" if self.margin is None else _difference_to_tell(self.margin, self.noise_floor)


@dataclass(frozen=True)
class _Estimate:
    """A difference, its standard error and the standard error's degrees of freedom."""

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
        interval = self.interval
        assert interval.low is not None and interval.high is not None
        return KEEP if interval.low > 0 else DISCARD if interval.high < 0 else UNDECIDED


def keep_or_discard(
    table: RunTable, baseline: str, candidate: str, margin: float | None = None, lower_is_better: bool = False
) -> Choice:
    """Decide whether the candidate is kept in place of the baseline.

    With three finished runs of each, the interval is Welch's, from their own spreads. With fewer it is Student's with
    the noise floor: the spread of all repeated runs of the table, which assumes that all recipes spread equally.

    Args:
        table: runs of all recipes; runs of other recipes help to estimate the noise floor.
        baseline: recipe to keep so far.
        candidate: recipe that may take its place.
        margin: difference worth telling, for the number of runs needed; None for the noise floor.
        lower_is_better: whether the value is a loss.

    Raises:
        UserError: a recipe is unknown or compared with itself, or the margin is not positive.
    """
    by_name = {runs.recipe: runs for runs in table.recipes}
    for name in (baseline, candidate):
        if name not in by_name:
            raise UserError(f"{name}: no such recipe; the table has {_listed(by_name)}")
    if baseline == candidate:
        raise UserError(f"{baseline}: is compared with itself; name two recipes")
    if margin is not None and not 0 < margin < math.inf:
        raise UserError(f"--margin {margin:g}: give a positive difference")
    kept, changed = by_name[baseline], by_name[candidate]
    values = {name: _distinct(runs.values) for name, runs in by_name.items()}
    squares = sum(_squares(each) for each in values.values())
    degrees = sum(max(len(each) - 1, 0) for each in values.values())
    floor = _noise_floor(squares, degrees)
    sign = -1.0 if lower_is_better else 1.0
    margin = margin if margin is not None or floor is None else floor.value
    needed = None if not degrees or margin is None else runs_needed(math.sqrt(squares / degrees), margin)
    estimate = _estimate(values[baseline], values[candidate], sign, squares, degrees)
    verdict, doubt = UNDECIDED, ""
    if estimate is not None:
        verdict = estimate.verdict
        doubt = _doubt(kept, changed, values, sign, squares, degrees) if verdict != UNDECIDED else ""
        verdict = UNDECIDED if doubt else verdict
    sentence = _sentence(verdict, kept, changed, estimate, margin, doubt)
    return Choice(
        verdict=verdict,
        sentence=sentence,
        remedy=_remedy(kept, changed, values, floor, margin, needed, doubt) if verdict == UNDECIDED else None,
        baseline=baseline,
        candidate=candidate,
        value=table.value,
        lower_is_better=lower_is_better,
        sides=(_side(kept), _side(changed)),
        difference=None if estimate is None else estimate.interval,
        spread=None if estimate is None else estimate.spread,
        noise_floor=floor,
        degrees=degrees,
        margin=margin,
        runs_needed=needed,
        statuses=table.statuses,
        failed=sum(runs.failed for runs in table.recipes),
        notes=(*table.notes, *_notes(by_name, values)),
    )


def runs_needed(spread: float, margin: float) -> int | None:
    """Return the runs of each recipe to detect a difference at 5% (two-sided t test) with 80% power.

    Args:
        spread: standard deviation between runs of one recipe, above 0.
        margin: difference to detect, in the same unit.

    Returns:
        At least 2; None above 10,000.
    """
    # The normal's answer is a lower bound: Student's t is wider.
    count = max(math.ceil(2 * (POWER * spread / margin) ** 2), 2) if spread / margin < MOST_SEEDS else MOST_SEEDS + 1
    while count <= MOST_SEEDS:
        degrees = 2 * count - 2
        shift = margin / spread * math.sqrt(count / 2)
        if nctdtr(degrees, shift, -stdtrit(degrees, _TAIL)) <= 1 - _POWER:
            return count
        count += 1
    return None


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return the values; only one if all are equal up to rounding: such runs repeat one seed and show no spread."""
    same = values and max(values) - min(values) <= 1e-12 * max(map(abs, values))
    return values[:1] if same else values


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squared distances from the mean."""
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
    kept: Sequence[float], changed: Sequence[float], sign: float, squares: float, degrees: int
) -> _Estimate | None:
    """Return the gain of `changed` over `kept`; None if one has no run, or nothing was repeated."""
    if not kept or not changed or not degrees:
        return None
    gain = sign * (fmean(changed) - fmean(kept))
    if min(len(kept), len(changed)) < _OWN_SPREAD:
        error = math.sqrt(squares / degrees * (1 / len(kept) + 1 / len(changed)))
        return _Estimate(gain, error, degrees, "noise floor")
    variances = [_squares(each) / (len(each) - 1) / len(each) for each in (kept, changed)]
    # Welch and Satterthwaite: a change may also change the spread between runs.
    parts = [variance**2 / (len(each) - 1) for variance, each in zip(variances, (kept, changed), strict=True)]
    return _Estimate(gain, math.sqrt(sum(variances)), sum(variances) ** 2 / sum(parts), "own")


def _doubt(
    kept: RunValues,
    changed: RunValues,
    values: Mapping[str, tuple[float, ...]],
    sign: float,
    squares: float,
    degrees: int,
) -> str:
    """Return why failed runs leave a decided difference in doubt; empty if they do not.

    Runs often fail because they go badly. So at least half of the runs of the better recipe must have finished. The
    difference must also remain if its failed runs count as if they had ended at the other recipe's mean.
    """
    ours, theirs = list(values[kept.recipe]), list(values[changed.recipe])
    ahead_is_changed = sign * (fmean(theirs) - fmean(ours)) > 0
    ahead, other = (changed, kept) if ahead_is_changed else (kept, changed)
    if not ahead.failed:
        return ""
    if ahead_is_changed:
        theirs += [fmean(ours)] * ahead.failed
    else:
        ours += [fmean(theirs)] * ahead.failed
    estimate = _estimate(ours, theirs, sign, squares, degrees)
    assert estimate is not None
    total = ahead.failed + len(ahead.values)
    text = f"{ahead.recipe} is ahead in the runs that finished, but {ahead.failed} of its {total} runs failed"
    if ahead.failed > len(ahead.values):
        return text
    if estimate.verdict == UNDECIDED:
        return f"{text}, and the difference does not hold if those had ended like {other.recipe}"
    return ""


def _side(runs: RunValues) -> Side:
    count = len(runs.values)
    return Side(
        recipe=runs.recipe,
        runs=count,
        failed=runs.failed,
        mean=fmean(runs.values) if count else None,
        spread=math.sqrt(_squares(runs.values) / (count - 1)) if count > 1 else None,
    )


def _sentence(
    verdict: str, kept: RunValues, changed: RunValues, estimate: _Estimate | None, margin: float | None, doubt: str
) -> str:
    one, two = kept.recipe, changed.recipe
    for runs in (kept, changed):
        if not runs.values:
            return f"undecided: no run of {runs.recipe} finished ({counted(runs.failed, 'run')} failed)"
    if estimate is None:
        repeated = max(len(kept.values), len(changed.values)) > 1
        why = "all repeated runs are identical" if repeated else "nothing was repeated"
        return f"undecided: {why}, so the noise floor is unknown and any difference may be noise"
    interval = estimate.interval
    if verdict != UNDECIDED:
        word = "better" if verdict == KEEP else "worse"
        return f"{verdict} {two}: {word} than {one}, by {shown(interval, '+.4g')}"
    if doubt:
        return f"undecided: {doubt}"
    assert interval.low is not None and interval.high is not None
    if margin is not None and -margin < interval.low and interval.high < margin:
        return f"undecided: {two} and {one} are the same within {margin:.4g}: {shown(interval, '+.4g')}"
    return f"undecided: {two} and {one} are not told apart: {shown(interval, '+.4g')}"


def _remedy(
    kept: RunValues,
    changed: RunValues,
    values: Mapping[str, tuple[float, ...]],
    floor: Interval | None,
    margin: float | None,
    needed: int | None,
    doubt: str,
) -> str:
    for runs in (kept, changed):
        if not runs.values:
            return f"mend and repeat {runs.recipe}, or leave it out: what did not run cannot be kept"
    if floor is None or margin is None:
        again = f"run {kept.recipe} {counted(_REPEATS, 'time')}, each with another seed"
        return f"{again}, and give every run its own row"
    if doubt:
        return "repeat the failed runs with other seeds, or find out why they failed"
    if needed is None:
        return f"a difference of {margin:.4g} takes more runs than anybody makes; look for a larger one"
    more = {runs.recipe: needed - len(values[runs.recipe]) for runs in (kept, changed)}
    missing = [f"{name} {counted(count, 'more time')}" for name, count in more.items() if count > 0]
    told = f"to tell {_difference_to_tell(margin, floor)}"
    if not missing:
        return f"the runs suffice {told}: take the simpler one, or give a smaller --margin"
    text = f"{told} takes {needed} runs of each: run {' and '.join(missing)}, each with another seed"
    return f"{text}; or give the difference that matters to you with --margin" if _is_floor(margin, floor) else text


def _difference_to_tell(margin: float, floor: Interval | None) -> str:
    """Return the margin in words, which say if it is the noise floor: the default, or given as exactly that number."""
    return f"a difference as large as the noise floor ({margin:.4g})" if _is_floor(margin, floor) else f"{margin:.4g}"


def _is_floor(margin: float, floor: Interval | None) -> bool:
    return floor is not None and margin == floor.value


def _notes(by_name: Mapping[str, RunValues], values: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Return remarks on identical runs and on failed runs."""
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


def _listed(names: Mapping[str, RunValues]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:12])}{f' and {len(listed) - 12} others' if len(listed) > 12 else ''}" or "no row"
