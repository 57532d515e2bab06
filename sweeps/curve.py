"""Compute curves: the plain arrays that a fit gets as its input.

A curve is one recipe's evaluations: reward against cumulative compute, for every seed. A run's first
evaluation is at compute 0 and observes the reward before training, R0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.errors import UserError

Array = NDArray[np.float64]

# Beyond this, squares and ratios leave what a float can hold.
_LARGEST = 1e100
# Rewards from 0 up to less than this are no percentages.
_LEAST_PERCENT = 3.0

DEVICE_HOURS, VIRTUAL_HOURS, FLOPS = "compute/device_hours", "compute/virtual_device_hours", "compute/flops"


def default_axis(on_gpu: bool) -> str:
    """Return the default compute axis of a study: device hours on GPUs, virtual device hours on a CPU."""
    return DEVICE_HOURS if on_gpu else VIRTUAL_HOURS


# Of other trainers' runs: what they count.
TOKENS, STEPS = "compute/tokens", "compute/steps"
UNITS = {
    DEVICE_HOURS: "device hours",
    VIRTUAL_HOURS: "virtual device hours",
    FLOPS: "FLOPs",
    TOKENS: "tokens",
    STEPS: "steps",
}


@dataclass(frozen=True, eq=False)
class Curve:
    """One recipe's points, by seed and compute.

    Shapes: compute, reward, seed (labels) and sd are (n,). sd is the standard error of each reward, None if
    unknown. axis and metric name the columns; compute is in the unit of the axis. factors: what else groups the
    points, as text by name (`size`, say), where the source was asked to group by it. baseline: the recipe that this one
    departs from, or is; None where the source does not say. at_peak: what compute amounts to at the peak of the
    learning rate (`sweeps.fit.schedule`), None where the rate does not decay or is not known. ended: whether a run of
    it is finished before its budget and cannot be continued, such as one whose pool of prompts is exhausted.
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

    @cached_property
    def range(self) -> tuple[float, float] | None:
        """The ends of the reward's scale: 0 and 1, -1 and 1, or 0 and 100 (percent); None if it is none of these.

        It is inferred from the rewards. A maximum below `_LEAST_PERCENT` is not taken for percent.
        """
        low, high = float(self.reward.min()), float(self.reward.max())
        for bottom, top in ((0.0, 1.0), (-1.0, 1.0)):
            if low >= bottom and high <= top:
                return bottom, top
        return (0.0, 100.0) if low >= 0 and _LEAST_PERCENT <= high <= 100 else None

    @property
    def scale(self) -> float:
        """The width of the reward's scale; constants known for pass rates are multiplied by it.

        1 for rewards in [0, 1], 2 in [-1, 1], 100 in [0, 100] (percent), else the range of the rewards seen.
        """
        low, high = self.range or (float(self.reward.min()), float(self.reward.max()))
        return high - low

    @property
    def bounds(self) -> tuple[float, float]:
        """Limits on R0 and A in a fit: the ends of the reward's scale, else two ranges beyond the rewards seen."""
        low, high = float(self.reward.min()), float(self.reward.max())
        return self.range or (low - 2 * (high - low), high + 2 * (high - low))

    @property
    def unit(self) -> str:
        """Name of the compute axis for output, such as "device hours"; the column's name if it is not in `UNITS`."""
        return UNITS.get(self.axis, self.axis)

    def take(self, keep: NDArray[np.bool_]) -> Curve:
        """Return the curve with only the points that the mask keep, (n,), selects."""
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
) -> Curve:
    """Make a curve from arrays: validated, sorted by seed and compute, repeated rows dropped with a warning.

    Two different rewards of one seed at one compute are both kept and warned of.

    Raises:
        UserError: no points, unequal lengths, or a compute, reward or error that is negative, not finite or too large.
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
    order = np.lexsort((y, c, s))
    repeated = np.zeros(len(c), dtype=bool)
    cs, ys, ss = c[order], y[order], s[order]
    repeated[1:] = (cs[1:] == cs[:-1]) & (ys[1:] == ys[:-1]) & (ss[1:] == ss[:-1])
    notes = list(warnings)
    if repeated.any():
        notes.append(f"{repeated.sum()} repeated rows (same recipe, seed, compute and reward) were dropped")
    if ((cs[1:] == cs[:-1]) & (ss[1:] == ss[:-1]) & ~repeated[1:]).any():
        notes += _conflicts(cs[~repeated], ys[~repeated], ss[~repeated])
    if y.min() < 0 or y.max() > 1:
        scale = Curve(recipe, c, y, s).range
        told = "A has no bounds" if scale is None else f"taken for a scale from {scale[0]:g} to {scale[1]:g}"
        notes.append(f"rewards run from {y.min():.4g} to {y.max():.4g}, outside [0, 1]: {told}")
    if np.abs(y).max() > _LARGEST or c.max() > _LARGEST or (e is not None and e.max() > _LARGEST):
        raise UserError(f"recipe {recipe!r}: {axis} or {metric} exceeds {_LARGEST:g}; give it in a larger unit")
    kept = order[~repeated]
    sd = None if e is None else e[kept]
    peak = None if at_peak is None else np.asarray(at_peak, dtype=float)[kept]
    return Curve(recipe, c[kept], y[kept], s[kept], sd, axis, metric, tuple(notes), dict(factors or {}), baseline, peak)


# At most this many conflicting seeds are named in a warning.
_SAID_OF = 3


def _conflicts(compute: Array, reward: Array, seed: NDArray[np.str_]) -> list[str]:
    """Return warnings for seeds with different rewards at one compute; rows are sorted and free of repeats."""
    again = np.zeros(len(compute), dtype=bool)
    again[1:] = (compute[1:] == compute[:-1]) & (seed[1:] == seed[:-1])
    starts = np.flatnonzero(~again)
    sizes = np.diff(np.append(starts, len(again)))
    starts, sizes = starts[sizes > 1], sizes[sizes > 1]
    notes = []
    seeds = list(dict.fromkeys(seed[starts].tolist()))
    for label in seeds[:_SAID_OF]:
        own = seed[starts] == label
        first, most, values = starts[own][0], sizes[own].max(), int(own.sum())
        notes.append(
            f"{label if label.startswith(UNNAMED) else f'seed {label}'}: "
            f"{values} compute {'value has' if values == 1 else 'values have'} "
            f"{'two' if most == 2 else f'up to {most}'} different rewards "
            f"(first at {compute[first]:g}: {reward[first]:.4g} and {reward[first + 1]:.4g}); "
            "are two runs under one name? give them seeds or --by"
        )
    if len(seeds) > _SAID_OF:
        notes.append(f"so have {len(seeds) - _SAID_OF} more seeds")
    return notes


# Begins the label of a run whose seed is not known.
UNNAMED = "run "
