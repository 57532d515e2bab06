"""Sensitivity of A to the settings of the fit: the same points refitted under changed settings.

    early cut       leave out the points below 5, 10, 20 or 30% of the largest compute, or no points. The percentages
                    are of compute, not of its logarithm: for evenly spaced evaluations they are fractions of the points
    R0              as the first evaluation, free, and fixed one step below and above the fitted one
    robust          give points far from the curve less weight
    window's end    leave out the points above 75 or 50% of the largest compute: would A have been the same with less
                    compute?

Settings that change neither the points nor the role of R0, or leave too few points, are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.fit.checks import R0_STEP
from sweeps.fit.fit import Fit, FitOptions, Interval, fit_curve
from sweeps.fit.points import R0Mode, select

_CUTS = (0.05, 0.10, 0.20, 0.30)
_ENDS = (0.75, 0.50)
# Families whose R0 is treated as the options say. R0 of a power law or a constant has another meaning.
_WITH_R0 = ("sigmoid", "logistic", "exponential")
_UNFITTED = ("too_few_points", "degenerate")
MAIN, CUT, R0, ROBUST, END = "main", "early cut", "R0", "robust", "window's end"


@dataclass(frozen=True)
class Row(AsJson):
    """Result of a fit under one setting.

    Attributes:
        kind: changed setting; `main` for the unchanged fit, which comes first.
        setting, short: the setting in words, and as a short column header.
        A, B, C_mid, verdict: results of the fit under this setting.
        shift: A under this setting minus A of the unchanged fit, in reward; None where either is None.
        n: number of points that were fitted.
    """

    kind: str
    setting: str
    short: str
    A: Interval
    B: Interval
    C_mid: Interval
    verdict: str
    shift: float | None
    n: int

    JSON: ClassVar = {"short": None}


def sensitivity(main: Fit) -> tuple[Row, ...]:
    """Refit a recipe under every changed setting that leaves enough points. Return the unchanged fit and the refits.

    Args:
        main: the fit of one recipe, as `fit_curve` or `fit_curves` returns it. Refits use its pool, so that only the
            setting differs.
    """
    curve = main.curve
    rows = [_make_row(main, MAIN, "as fitted", "as fitted", main)]
    keys = [_points_key(curve, main.options)]
    for kind, setting, short, options in _settings(main):
        # A cut below the first point changes nothing: its row would look like evidence that cuts do not matter.
        key = _points_key(curve, options)
        if key in keys or not key[0]:
            continue
        keys.append(key)
        fit = fit_curve(curve, options, pool=main.pool)
        if fit.verdict not in _UNFITTED:
            rows.append(_make_row(fit, kind, setting, short, main))
    return tuple(rows)


def _points_key(curve: Curve, options: FitOptions) -> tuple[tuple[float, ...], FitOptions]:
    """Return a key that is equal for settings that fit the same points: the points' computes, and the other options.

    `first` and `free` count as one option, because they differ only in the points, at most by each seed's first one.
    """
    r0: R0Mode = "free" if isinstance(options.r0, str) else options.r0
    points = select(curve, options)
    return tuple(points.compute.tolist()), replace(options, r0=r0, min_compute=None, max_compute=None)


def _settings(main: Fit) -> Iterator[tuple[str, str, str, FitOptions]]:
    """Yield for each changed setting its kind, its description, a short column header, and the options."""
    options = main.options
    end = float(main.curve.compute.max()) if main.window is None else main.window[1]
    if options.min_compute is not None:
        yield CUT, "no early cut", "no cut", replace(options, min_compute=None)
    for share in _CUTS:
        cut = replace(options, min_compute=share * end)
        yield CUT, f"from compute {share * end:.5g} ({share:.0%} of the end)", f"cut {share:.0%}", cut
    if options.family in _WITH_R0:
        yield R0, "R0 as the first evaluation", "R0 first", replace(options, r0="first")
        yield R0, "R0 free", "R0 free", replace(options, r0="free")
        step = R0_STEP * (main.curve.scale)
        for by in (-step, step):
            if main.R0 is not None and main.bounds[0] <= main.R0 + by <= main.bounds[1]:
                fixed = main.R0 + by
                yield R0, f"R0 fixed at {fixed:.3f} ({by:+.3g})", f"R0 {by:+.3g}", replace(options, r0=fixed)
    if not options.robust:
        yield ROBUST, "robust: points far from the curve count less", "robust", replace(options, robust=True)
    for share in _ENDS:
        early = replace(options, max_compute=share * end)
        yield END, f"up to compute {share * end:.5g} ({share:.0%} of the end)", f"end {share:.0%}", early


def _make_row(fit: Fit, kind: str, setting: str, short: str, main: Fit) -> Row:
    shift = None if fit.A.value is None or main.A.value is None else fit.A.value - main.A.value
    return Row(
        kind=kind,
        setting=setting,
        short=short,
        A=fit.A,
        B=fit.B,
        C_mid=fit.C_mid,
        verdict=fit.verdict,
        shift=shift,
        n=fit.n,
    )


def summary(rows: Sequence[Row]) -> str:
    """Return one sentence: the largest shift of A among the early cuts, and whether it is within A's interval.

    Args:
        rows: from `sensitivity`.
    """
    main = rows[0].A
    cuts = [row for row in rows if row.kind == CUT]
    shifts = [(abs(row.shift), row) for row in cuts if row.shift is not None]
    if main.value is None:
        return f"A is not named ({rows[0].verdict}), so it cannot shift"
    if not shifts:
        return "too few points remain after any early cut to refit A"
    _, largest = max(shifts, key=lambda item: item[0])
    assert largest.A.value is not None
    is_within = _contains(main, largest.A.value)
    text = (
        f"leaving out early points moves A by at most {abs(largest.shift or 0.0):.3f} ({largest.short}), "
        f"{'within' if is_within else 'outside'} its 95% interval"
    )
    if not is_within and _contains(largest.A, main.value):
        # With fewer points A is less certain, and may move for that reason alone.
        text += ", but the refit's own interval contains the A as fitted"
    unidentifiable = [row.short for row in cuts if row.verdict != rows[0].verdict]
    if rows[0].verdict == "identifiable" and unidentifiable:
        text += f"; A is not identifiable with {', '.join(unidentifiable)}"
    return text


def _contains(interval: Interval, value: float) -> bool:
    return (interval.low is None or interval.low <= value) and (interval.high is None or value <= interval.high)


def signed(value: float) -> str:
    """Format a difference of rewards with its sign, which is left out if it rounds to 0."""
    return "0.000" if abs(value) < 0.0005 else f"{value:+.3f}"
