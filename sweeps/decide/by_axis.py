"""Comparison of recipes at equal steps, tokens, device hours and cost.

A recipe with longer answers, or with a stale policy, may gain more per step but less per hour. So recipes are compared
at the largest compute that all recipes reached, on each compute axis that the source records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sweeps.as_json import AsJson
from sweeps.curve import DEVICE_HOURS, JUDGE_HOURS, UNITS
from sweeps.decide.reward import RewardRow, rewards
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.verdict import chance

_AXIS_NAMES = {**UNITS, "step": "steps"}


@dataclass(frozen=True)
class AxisComparison(AsJson):
    """Recipes compared on one compute axis.

    Attributes:
        axis, name: name of the axis in the journal, and in words.
        compute: largest compute that every recipe has spent, in the axis's unit.
        rows: recipes with their rewards at `compute`, the highest first.
    """

    axis: str
    name: str
    compute: float
    rows: tuple[RewardRow, ...]

    @property
    def first(self) -> RewardRow:
        """Row of the recipe with the highest reward."""
        return self.rows[0]

    def row(self, recipe: str) -> tuple[int, RewardRow] | None:
        """Return a recipe's place, from 1, and its row; None if the axis has no row for it."""
        return next(((place, row) for place, row in enumerate(self.rows, 1) if row.recipe == recipe), None)


@dataclass(frozen=True)
class ByAxis(AsJson):
    """Comparison of recipes on all compute axes. agreed: whether one recipe has the highest reward on each axis."""

    columns: tuple[AxisComparison, ...]
    agreed: bool
    sentence: str

    @property
    def recipes(self) -> list[str]:
        """Names of all recipes, in the order of the first axis."""
        return list(dict.fromkeys(row.recipe for column in self.columns for row in column.rows))


def by_axis(fits: Mapping[str, Sequence[Fit]], rate: float | None = None) -> ByAxis:
    """Compare recipes on every compute axis.

    Args:
        fits: for each compute axis, the fits of all recipes on it.
        rate: price of a device hour, which adds an axis `cost`. Cost is computed from device hours or, where these were
            not recorded, from another axis in hours. None adds no axis.

    Raises:
        UserError: the rate is not positive, no axis is in hours, or no axis has enough evaluations.
    """
    columns = []
    for axis, axis_fits in fits.items():
        result = rewards(axis_fits)
        if result is not None:
            columns.append(
                AxisComparison(axis, _AXIS_NAMES.get(axis, axis.rpartition("/")[2]), result.compute, result.rows)
            )
    if rate is not None:
        if not 0 < rate < float("inf"):
            raise UserError(f"--rate {rate:g}: must be a positive price of a device hour")
        hour_columns = [column for column in columns if column.axis.casefold().rstrip("s").endswith("hour")]
        device_columns = [
            column for column in hour_columns if column.axis != JUDGE_HOURS
        ]  # leave out the hours of a judge service, whose price is not that of a device
        # Prefer device hours over other axes in hours.
        hours = min(device_columns, key=lambda column: column.axis != DEVICE_HOURS, default=None)
        if hours is None:
            raise UserError(f"--rate {rate:g}: no axis in hours among {', '.join(fits)}; name one in --axes")
        cost_rows = tuple(replace(row, C=_multiply(row.C, rate)) for row in hours.rows)
        columns.append(AxisComparison("cost", "cost", rate * hours.compute, cost_rows))
    if not columns:
        raise UserError("--axes: no recipe has evaluations enough on any of them")
    firsts = {column.first.recipe for column in columns}
    return ByAxis(tuple(columns), len(firsts) == 1, _sentence(columns))


def _multiply(interval: Interval | None, factor: float) -> Interval | None:
    """Multiply an estimate and its bounds by a factor. An estimate or bound of None stays None."""
    if interval is None:
        return None
    value, low, high = (
        None if bound is None else factor * bound for bound in (interval.value, interval.low, interval.high)
    )
    return Interval(value, low, high)


def _sentence(columns: Sequence[AxisComparison]) -> str:
    by_first: dict[str, list[AxisComparison]] = {}
    for column in columns:
        by_first.setdefault(column.first.recipe, []).append(column)
    parts = [
        f"{recipe} at equal {_join_names([column.name for column in columns_of])} "
        f"({_chance_of_all([column.first.p_best for column in columns_of])})"
        for recipe, columns_of in by_first.items()
    ]
    if len(parts) == 1:
        return f"the same recipe is ahead on every axis: {parts[0]}"
    return f"which recipe is ahead depends on the axis: {'; '.join(parts)}"


def _chance_of_all(probabilities: Sequence[float]) -> str:
    text = chance(min(probabilities))
    return text if ">" in text or len(probabilities) == 1 else f"{text} or higher"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
