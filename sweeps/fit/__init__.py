"""Fit compute curves: A, B and C_mid with intervals, a verdict and forecasts. Works on arrays, not files.

    points     selection of the points of a fit: the compute window, and the role of R0
    seen       the points, rescaled to be without units
    posterior  the model and its joint draws
    forecast   the draws in the curve's units
    fit        estimates from the draws, with the help of seeds (spread between seeds) and verdict

`predict` forecasts from a fit, and `history` repeats fits at growing compute. `compare`, `sensitivity` and `published`
fit under other assumptions. To add a family, add an entry to `family.FAMILIES` and its name to `names`. Every claim
about intervals is measured in `benchmarks/coverage.py`; docs/reference/methods.md lists the places in the code that set
the intervals' level of 95%.

May import: `curve`.
"""
