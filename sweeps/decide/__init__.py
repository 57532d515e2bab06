"""Decisions from fits: ranking, planning, the next run, racing, model sizes, and following a live study."""
