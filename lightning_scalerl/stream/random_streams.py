"""Numbers of the independent random streams that are derived from a run's seed."""

from __future__ import annotations

# A random key is (seed, stream, ...). Streams have different values, so that they never share random numbers.
TRAINING_STREAM = 0


EVALUATION_STREAM = 1


PROMPT_STREAM = 2


INTERRUPTION_STREAM = 3


PROBE_STREAM = 4


PREDICTION_STREAM = 5


SELECTION_STREAM = 6
