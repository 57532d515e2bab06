"""A curve -> A, B, C_mid with intervals, a verdict, forecasts. Knows arrays, not files."""
