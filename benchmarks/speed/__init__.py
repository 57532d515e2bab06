"""Compare the speed of training, generation and fits with other programs: `make bench`.

Every comparison is a module with a function `measure` that returns its records, and can be run alone. Both sides of a
pair run in turns on one thread, so that other load on the machine affects both, and the ratio is recorded. Records go
to benchmarks/results/, and the tables made from them to docs/measured/speed.md.
"""
