"""Fit compute curves: A, B and C_mid with intervals, a verdict and forecasts. Works on arrays, not files.

    points     the window, R0
    seen       evaluations without units
    posterior  the model and its joint draws
    forecast   the draws in the curve's units
    fit        estimates, with seeds (spread between seeds) and verdict

`predict` looks ahead from a fit and `history` repeats fits at growing compute. `compare`, `sensitivity` and `published`
fit under other assumptions. A new family is an entry in `family.FAMILIES` and its name in `names`. Every claim about
intervals is measured in `benchmarks/coverage.py`; docs/reference/methods.md lists where their level of 95% is set.

May import: `curve`.
"""
