"""The design space: one module an axis, its pure functions and the callbacks that carry them, nothing else."""
