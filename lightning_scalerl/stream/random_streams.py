"""Streams of random numbers of one seed, which must never meet."""

from __future__ import annotations

# Streams of random numbers of one seed must never meet: the first number after the seed tells them apart.
TRAINING_STREAM = 0


EVALUATION_STREAM = 1


PROMPT_STREAM = 2


INTERRUPTION_STREAM = 3


PROBE_STREAM = 4


PREDICTION_STREAM = 5
