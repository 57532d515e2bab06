"""Fitting of compute curves: A, B and C_mid with intervals, a verdict and forecasts, from arrays and no files."""
