"""Names of families and methods for the command line, in a module that imports neither NumPy nor SciPy."""

from __future__ import annotations

# The families of `sweeps.fit.family`, in its order; a test compares them.
FAMILY_NAMES = ("sigmoid", "sigmoid_zero", "logistic", "exponential", "power_law", "constant")
METHOD = "scalerl-a5"  # the published procedure, `sweeps.fit.published`
