"""Command `scalerl fit`: fit curves, with verdicts, other families of curves, and sensitivity refits."""

from __future__ import annotations

import argparse

from sweeps.cli.curves import read_and_fit
from sweeps.cli.output import print_json
from sweeps.errors import UserError
from sweeps.fit.names import METHOD


def fit_command(options: argparse.Namespace) -> None:
    """Fit a curve per recipe and print its parameters, intervals and verdict (`scalerl fit`)."""
    if options.sensitivity and options.method == METHOD:
        raise UserError(f"--sensitivity: refits with intervals; leave out --method {METHOD}")
    _, fits = read_and_fit(options)
    from sweeps.fit.compare import compare
    from sweeps.fit.sensitivity import sensitivity
    from sweeps.report.fit_text import families_text, fits_table, sensitivity_text, units_line, verdict_line

    comparisons = [compare(fit.curve, fit.options) for fit in fits] if options.family == "all" else []
    refits = [sensitivity(fit) for fit in fits] if options.sensitivity else []
    if options.json:
        entries = [fit.to_json() for fit in fits]
        for entry, rows in zip(entries, refits, strict=False):
            entry["sensitivity"] = [row.to_json() for row in rows]
        for entry, comparison in zip(entries, comparisons, strict=False):
            entry["families"] = comparison.to_json()
        print_json(entries)
        return
    print(fits_table(fits))
    bounds = "the published procedure, no intervals" if options.method == METHOD else "95% intervals, within these runs"
    print(f"\n{units_line(fits, bounds)}")
    for fit in fits:
        print(verdict_line(fit))
    for comparison in comparisons:
        print(f"\n{families_text(comparison)}")
    for fit, rows in zip(fits, refits, strict=False):
        print(f"\n{sensitivity_text(fit.recipe, rows)}")
