"""Names that the command line offers, where NumPy and SciPy need not be imported for them."""

from __future__ import annotations

# The families of `sweeps.fit.family`, in its order; a test compares them.
FAMILY_NAMES = ("sigmoid", "sigmoid_zero", "logistic", "exponential", "power_law", "constant")
METHOD = "scalerl-a5"  # the published procedure, `sweeps.fit.published`
