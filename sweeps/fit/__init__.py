"""Fit compute curves: A, B and C_mid with intervals, a verdict and forecasts. Works on arrays, not files.

    points         the evaluations that a fit uses: the range of compute, and the role of R0
    scaled_points  the same evaluations, rescaled to be without units
    posterior      the model and its joint draws
    forecast       the draws in the curve's units
    fit            estimates from the draws, with the help of seeds (spread between seeds) and verdict

`predict` forecasts from a fit, and `history` repeats fits at growing compute. `compare`, `sensitivity` and `published`
fit under other assumptions. To add a family of curves, add an entry to `family.FAMILIES` and its name to `names`.
`benchmarks/coverage.py` measures every claim about intervals. docs/reference/methods.md lists the places in the code
that set the intervals' level of 95%.

May import: `curve`.
"""
