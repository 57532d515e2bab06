"""How fast training, generation and fits are beside others: `make bench`.

Every comparison is a module with a function `measure`, which returns its record, and can be run alone. Both sides of a
pair run one after the other, in turns, on one thread: what else a machine does touches both, and the ratio of a pair
is kept. Records go to benchmarks/results/, the one table made from them to docs/measured/speed.md.
"""
