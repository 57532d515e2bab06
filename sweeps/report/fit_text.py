"""Format fits as text for a terminal: the output of `scalerl fit` and its options, and of `scalerl watch`."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.fit.compare import Comparison
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import Fit, format_interval
from sweeps.fit.history import Snapshot
from sweeps.fit.sensitivity import Row as SensitivityRow
from sweeps.fit.sensitivity import signed, summary
from sweeps.report.plain import one_line, table, units
from sweeps.terminal import counted


def fits_table(fits: Sequence[Fit]) -> str:
    """Format a table of fits: verdict, parameters with intervals, RMSE, and numbers of points and seeds."""
    # All shape parameters of the family, including those that no fit could identify.
    names = list(FAMILIES[fits[0].family].names)
    head = ["recipe", "verdict", "A", *names, "R0", "rmse", "n", "seeds"]
    rows = [
        [
            fit.recipe,
            fit.verdict,
            format_interval(fit.A, ".3f"),
            *(format_interval(fit.shape.get(name), ".4g") for name in names),
            "-" if fit.R0 is None else f"{fit.R0:z.3f}",
            "-" if fit.rmse is None else f"{fit.rmse:.4f}",
            str(fit.n),
            str(fit.seeds),
        ]
        for fit in fits
    ]
    return table(head, rows)


def units_line(fits: Sequence[Fit], bounds: str) -> str:
    """Format the names of compute and rewards. `bounds` is text on the meaning of the bounds."""
    pool, metrics = fits[0].pool, dict.fromkeys(fit.curve.metric for fit in fits)
    pooled = [f"the scale of the walks is pooled over {pool.size} recipes"] if pool is not None else []
    return "; ".join([*units(fits[0].curve.unit, ", ".join(metrics)), bounds, *pooled])


def verdict_line(fit: Fit) -> str:
    """Format the reason of a fit's verdict and, if A is identifiable, A and B under a shifted R0."""
    line = f"{one_line(fit.recipe)}: {fit.reason}"
    effect = fit.R0_effect
    if effect is None or not fit.identifiable:
        return line
    sides = zip(("lower", "higher"), effect.A, effect.B, strict=True)
    known = [(side, a, b) for side, a, b in sides if a is not None and b is not None]
    changes = [
        f"if R0 were {effect.step:g} {side}, A would be {a:.3f} and B {b:.3g}"
        if number == 0
        else f"if {effect.step:g} {side}, {a:.3f} and {b:.3g}"
        for number, (side, a, b) in enumerate(known)
    ]
    return "; ".join([line, *changes])


def families_text(comparison: Comparison) -> str:
    """Format the comparison of all families on one recipe: a sentence and a table."""
    head = ["family", "A", "AICc above lowest", "error on later compute", "R^2"]
    rows = [
        [
            row.family,
            "-" if row.A is None else f"{row.A:.3f}",
            f"{row.delta_aicc:.1f}",
            "-" if row.held_out is None else f"{row.held_out:.4f}",
            "-" if row.r2 is None else f"{row.r2:.4f}",
        ]
        for row in comparison.rows
    ]
    return f"{one_line(comparison.recipe)}: {comparison.sentence}\n{table(head, rows)}"


def sensitivity_text(recipe: str, refits: Sequence[SensitivityRow]) -> str:
    """Format the refits of one recipe under other settings: a sentence and a table."""
    head = ["setting", "A", "shift", "B", "C_mid", "n", "verdict"]
    return f"{one_line(recipe)}: {summary(refits)}\n{table(head, [_refit_row(row) for row in refits])}"


def _refit_row(row: SensitivityRow) -> list[str]:
    return [
        row.setting,
        format_interval(row.A, ".3f"),
        "-" if row.shift is None else signed(row.shift),
        format_interval(row.B, ".3g"),
        format_interval(row.C_mid, ".4g"),
        str(row.n),
        row.verdict,
    ]


def snapshot_line(snapshot: Snapshot) -> str:
    """Format a snapshot of a running study as one line, with the check of the previous forecast."""
    parts = [counted(snapshot.n, "evaluation"), snapshot.verdict, f"A {format_interval(snapshot.A, '.3f')}"]
    check = snapshot.check
    if check is not None:
        parts.append(
            f"observed {check.actual:.3f}, predicted at {check.made_at:.4g}: {check.predicted:.3f} "
            f"[{check.low:.3f}, {check.high:.3f}]{'' if check.inside else ', outside'}"
        )
    return one_line(f"{snapshot.recipe}: compute {snapshot.compute_end:.4g}, {', '.join(parts)}")
