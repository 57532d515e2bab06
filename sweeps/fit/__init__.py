"""Fit compute curves: A, B and C_mid with intervals, a verdict and forecasts. Works on arrays, not files."""
