"""Compute curves: reward over compute, as arrays. They are what is fitted.

A curve has all evaluations of one recipe: for every seed, rewards and cumulative compute. A run's first evaluation is
at compute 0, and measures R0, the reward before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.errors import UserError

Array = NDArray[np.float64]

# Largest absolute value of compute and reward, because squares and ratios of larger values may overflow.
_LARGEST = 1e100
# If the largest reward is below this, rewards are not taken for percentages.
_LEAST_PERCENT = 3.0

DEVICE_HOURS, VIRTUAL_HOURS, FLOPS = "compute/device_hours", "compute/virtual_device_hours", "compute/flops"


def default_axis(on_gpu: bool) -> str:
    """Return the default compute axis of a study: device hours on GPUs, virtual device hours on a CPU."""
    return DEVICE_HOURS if on_gpu else VIRTUAL_HOURS


# Compute axes of runs of other trainers.
TOKENS, STEPS = "compute/tokens", "compute/steps"
# Compute axes of judges that run as services.
JUDGE_HOURS, JUDGE_TOKENS, JUDGE_COST = "compute/judge_hours", "compute/judge_tokens", "compute/judge_cost"
UNITS = {
    DEVICE_HOURS: "device hours",
    VIRTUAL_HOURS: "virtual device hours",
    FLOPS: "FLOPs",
    TOKENS: "tokens",
    STEPS: "steps",
    JUDGE_HOURS: "judge hours",
    JUDGE_TOKENS: "judge tokens",
    JUDGE_COST: "judge cost",
}


@dataclass(frozen=True, eq=False)
class Curve:
    """All points of one recipe, sorted by seed and compute.

    Attributes:
        recipe: label of the recipe.
        compute: compute, in the unit of the axis, (n,).
        reward: rewards, (n,).
        seed: labels of the seeds, (n,).
        sd: standard error of each reward, (n,); None if unknown.
        axis, metric: names of the columns of compute and reward.
        warnings: warnings to the user about the points.
        factors: columns, such as `size`, by which the user has also grouped the points: value of each as text, by name.
        baseline: recipe with which this one is compared, perhaps itself; None if the source does not name one.
        at_peak: effective compute if the learning rate decays: the compute at the peak rate to which `compute` is
            equivalent (`sweeps.fit.schedule`), (n,). None if the rate does not decay or is unknown.
        ended: whether a run of the recipe finished before its budget and cannot be continued (prompts exhausted).
        limits: lowest and highest possible reward, as given by the user or the source; None to infer them.
        seen: lowest and highest reward of the whole study (`with_shared_scale`); None to use those of this curve.
        lower_is_better: whether the source's metric is a loss. Rewards are then minus the metric, and `metric` is
            `-loss`.
        origin: for branches of runs, the compute at the branching point (mean over seeds), from which `compute` counts;
            0 for other runs.
    """

    recipe: str
    compute: Array
    reward: Array
    seed: NDArray[np.str_]
    sd: Array | None = None
    axis: str = "compute"
    metric: str = "reward"
    warnings: tuple[str, ...] = ()
    factors: Mapping[str, str] = field(default_factory=dict)
    baseline: str | None = None
    at_peak: Array | None = None
    ended: bool = False
    limits: tuple[float, float] | None = None
    seen: tuple[float, float] | None = None
    lower_is_better: bool = False
    origin: float = 0.0

    @cached_property
    def range(self) -> tuple[float, float] | None:
        """Lowest and highest value of the reward's scale: `limits`, else (0, 1), (-1, 1) or (0, 100); None if unknown.

        Without `limits` it is inferred from the study's rewards. Rewards whose maximum is below `_LEAST_PERCENT` are
        not taken for percentages. For a loss nothing is inferred, because its values do not show whether it is an error
        rate.
        """
        if self.limits is not None or self.lower_is_better:
            return self.limits
        low, high = self.seen or (float(self.reward.min()), float(self.reward.max()))
        for bottom, top in ((0.0, 1.0), (-1.0, 1.0)):
            if low >= bottom and high <= top:
                return bottom, top
        return (0.0, 100.0) if low >= 0 and _LEAST_PERCENT <= high <= 100 else None

    @property
    def notes(self) -> tuple[str, ...]:
        """The `warnings`, and one more if the reward's scale was inferred and is not [0, 1]."""
        if self.limits is not None or self.lower_is_better or self.range == (0, 1):
            return self.warnings
        low, high = self.seen or (self.reward.min(), self.reward.max())
        consequence = "A has no bounds; set them with --bounds"
        if self.range is not None:
            consequence = "a scale from {:g} to {:g} is assumed; set another with --bounds".format(*self.range)
        note = f"rewards range from {low:.4g} to {high:.4g}, outside [0, 1], so {consequence}"
        return (*self.warnings, note)

    @property
    def values(self) -> Array:
        """Values of the metric as in the source, (n,): the rewards, or minus the rewards if the metric is a loss."""
        return -self.reward if self.lower_is_better else self.reward

    @property
    def column(self) -> str:
        """Name of the metric in the source."""
        return self.metric.removeprefix("-") if self.lower_is_better else self.metric

    @property
    def scale(self) -> float:
        """Width of the reward's scale. Constants that were chosen for pass rates are multiplied by it.

        It is 1 for rewards in [0, 1], 2 in [-1, 1], 100 in [0, 100] (percent), or the width of given limits; otherwise
        the range of the observed rewards.
        """
        low, high = self.range or (float(self.reward.min()), float(self.reward.max()))
        return high - low

    @property
    def bounds(self) -> tuple[float, float]:
        """Limits of R0 and A in a fit: the lowest and highest value of the reward's scale.

        If the scale is unknown, they are the range of observed rewards, extended by twice its width on both sides.
        """
        low, high = float(self.reward.min()), float(self.reward.max())
        return self.range or (low - 2 * (high - low), high + 2 * (high - low))

    @property
    def unit(self) -> str:
        """Name of the compute axis for output, such as "device hours"; the column's name if it is not in `UNITS`."""
        unit = UNITS.get(self.axis, self.axis)
        return f"{unit} after branching" if self.origin else unit

    def take(self, keep: NDArray[np.bool_]) -> Curve:
        """Return the curve with only the points that a mask (n,) selects."""
        sd = None if self.sd is None else self.sd[keep]
        at_peak = None if self.at_peak is None else self.at_peak[keep]
        return replace(
            self, compute=self.compute[keep], reward=self.reward[keep], seed=self.seed[keep], sd=sd, at_peak=at_peak
        )


def make_curve(
    recipe: str,
    compute: Sequence[float] | Array,
    reward: Sequence[float] | Array,
    seed: Sequence[str] | NDArray[np.str_] | None = None,
    sd: Sequence[float] | Array | None = None,
    axis: str = "compute",
    metric: str = "reward",
    warnings: Sequence[str] = (),
    factors: Mapping[str, str] | None = None,
    baseline: str | None = None,
    at_peak: Sequence[float] | Array | None = None,
    bounds: tuple[float, float] | None = None,
    lower_is_better: bool = False,
) -> Curve:
    """Check arrays and make a curve of them, sorted by seed and compute. Repeated rows are dropped, with a warning.

    Different rewards of one seed at the same compute are all kept, with a warning.

    Args:
        bounds: lowest and highest possible value in `reward`; None to infer them.
        lower_is_better: whether `reward` has losses or error rates. The curve's rewards are then minus these.

    Raises:
        UserError: there are no points, lengths differ, a compute, reward or error is negative, not finite or too large,
            or a reward is outside the bounds.
    """
    c, y = np.asarray(compute, dtype=float), np.asarray(reward, dtype=float)
    s = np.full(len(c), "0") if seed is None else np.asarray(seed, dtype=str)
    e = None if sd is None else np.asarray(sd, dtype=float)
    if not len(c):
        raise UserError(f"recipe {recipe!r}: no points; give a source with evaluations")
    if not len(c) == len(y) == len(s) == (len(c) if e is None else len(e)):
        raise UserError(f"recipe {recipe!r}: compute, reward and seed differ in length ({len(c)}, {len(y)}, {len(s)})")
    for name, values in ((axis, c), (metric, y), ("standard error", e)):
        if values is not None and not np.isfinite(values).all():
            raise UserError(
                f"recipe {recipe!r}: {name} is not finite at {(~np.isfinite(values)).sum()} points; drop them"
            )
    if (c < 0).any():
        raise UserError(f"recipe {recipe!r}: {axis} is negative at {(c < 0).sum()} points; compute starts at 0")
    if e is not None and (e < 0).any():
        raise UserError(f"recipe {recipe!r}: the standard error is negative at {(e < 0).sum()} points")
    if bounds is not None:
        _check_bounds(recipe, metric, c, y, bounds)
    order = np.lexsort((y, c, s))
    repeated = np.zeros(len(c), dtype=bool)
    cs, ys, ss = c[order], y[order], s[order]
    repeated[1:] = (cs[1:] == cs[:-1]) & (ys[1:] == ys[:-1]) & (ss[1:] == ss[:-1])
    notes = list(warnings)
    if repeated.any():
        rows = "1 repeated row" if repeated.sum() == 1 else f"{repeated.sum()} repeated rows"
        notes.append(f"dropped {rows} (same recipe, seed, compute and reward)")
    if ((cs[1:] == cs[:-1]) & (ss[1:] == ss[:-1]) & ~repeated[1:]).any():
        notes += conflicts(cs[~repeated], ys[~repeated], ss[~repeated])
    if np.abs(y).max() > _LARGEST or c.max() > _LARGEST or (e is not None and e.max() > _LARGEST):
        raise UserError(f"recipe {recipe!r}: {axis} or {metric} exceeds {_LARGEST:g}; give it in a larger unit")
    kept = order[~repeated]
    sd = None if e is None else e[kept]
    peak = None if at_peak is None else np.asarray(at_peak, dtype=float)[kept]
    return Curve(
        recipe=recipe,
        compute=c[kept],
        reward=0.0 - y[kept] if lower_is_better else y[kept],  # `-y` would turn 0 into -0
        seed=s[kept],
        sd=sd,
        axis=axis,
        metric=f"-{metric}" if lower_is_better else metric,
        warnings=tuple(notes),
        factors=dict(factors or {}),
        baseline=baseline,
        at_peak=peak,
        limits=_negated(bounds) if lower_is_better else bounds,
        lower_is_better=lower_is_better,
    )


def with_shared_scale(curves: Sequence[Curve]) -> list[Curve]:
    """Give all curves of a study with the same metric one `range`, inferred from all their rewards.

    Otherwise the fit of a recipe whose rewards stay below 1 would be bounded by 1, although another recipe reaches 2.
    """
    ends: dict[str, tuple[float, float]] = {}
    for curve in curves:
        low, high = ends.get(curve.metric, (np.inf, -np.inf))
        ends[curve.metric] = min(low, float(curve.reward.min())), max(high, float(curve.reward.max()))
    return [replace(curve, seen=ends[curve.metric]) for curve in curves]


def _negated(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (0.0 - ends[1], 0.0 - ends[0])


def _check_bounds(recipe: str, metric: str, compute: Array, reward: Array, bounds: tuple[float, float]) -> None:
    outside = np.flatnonzero((reward < bounds[0]) | (reward > bounds[1]))
    if len(outside):
        first = outside[0]
        raise UserError(
            f"--bounds {bounds[0]:g} {bounds[1]:g}: recipe {recipe!r} has {metric} {reward[first]:g} at compute "
            f"{compute[first]:g}, outside them (so {len(outside)} of {len(reward)} points); give bounds that hold all"
        )


# Largest number of seeds with conflicts that a warning lists.
_MAX_LISTED = 3


def conflicts(compute: Array, reward: Array, seed: NDArray[np.str_]) -> list[str]:
    """Return warnings for seeds with different rewards at the same compute. Rows must be sorted and unique."""
    again = np.zeros(len(compute), dtype=bool)
    again[1:] = (compute[1:] == compute[:-1]) & (seed[1:] == seed[:-1])
    starts = np.flatnonzero(~again)
    sizes = np.diff(np.append(starts, len(again)))
    starts, sizes = starts[sizes > 1], sizes[sizes > 1]
    notes = []
    seeds = list(dict.fromkeys(seed[starts].tolist()))
    for label in seeds[:_MAX_LISTED]:
        mask = seed[starts] == label
        first, most, values = starts[mask][0], sizes[mask].max(), int(mask.sum())
        notes.append(
            f"{label if label.startswith(UNNAMED) else f'seed {label}'}: "
            f"{values} compute {'value has' if values == 1 else 'values have'} "
            f"{'two' if most == 2 else f'up to {most}'} different rewards "
            f"(first at {compute[first]:g}: {reward[first]:.4g} and {reward[first + 1]:.4g}); "
            "do two runs share one name? give them seeds, or use --by"
        )
    if len(seeds) > _MAX_LISTED:
        more = len(seeds) - _MAX_LISTED
        notes.append(f"{more} more {'seed has' if more == 1 else 'seeds have'} such values")
    return notes


# Prefix of the label of a run whose seed is unknown.
UNNAMED = "run "
