"""What a run measures and says of itself: compute, metrics of a step, mechanism counters, semantics, alarms."""
