"""Axes of the design space, one module each: pure functions and the callbacks that carry them, nothing else."""
