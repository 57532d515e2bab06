"""Decisions from fits: ranking, planning, the next run, racing, model sizes, and watching a live study."""
