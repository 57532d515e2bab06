"""Names of families and methods for the command line.

This module imports neither NumPy nor SciPy, so that commands start fast.
"""

from __future__ import annotations

# The families of `sweeps.fit.family`, in the same order; a test compares them.
FAMILY_NAMES = ("sigmoid", "sigmoid_zero", "logistic", "exponential", "power_law", "constant")
METHOD = "scalerl-a5"  # the published procedure, `sweeps.fit.published`
