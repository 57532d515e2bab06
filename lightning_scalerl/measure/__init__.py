"""Measurements of a run: compute, metrics of a step, mechanism counters, semantics, alarms."""
