"""Verifiers of a task that goes wrong in a job: looked up by name on the node."""

from __future__ import annotations

import os
import resource
import time

from tests.place import odd_digits

_calls = 0


def _later() -> bool:
    """Whether the run has come into its third step or so."""
    global _calls
    _calls += 1
    return _calls > 40


def explode(completion: str, answer: str) -> float:
    """An error of the user's own code, whose text holds a secret."""
    if _later():
        raise ValueError(f"no such verifier at https://me:{os.environ['SERVICE_PASSWORD']}@example.org")
    return odd_digits(completion, answer)


def hoard(completion: str, answer: str) -> float:
    """Takes memory until the scheduler notices."""
    if _later():
        hoarded = []
        while True:
            hoarded.append(bytearray(os.urandom(1 << 20)) * 64)
            time.sleep(0.05)
    return odd_digits(completion, answer)


def starve(completion: str, answer: str) -> float:
    """Takes memory until Python is refused more."""
    if _later():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 33)
    return odd_digits(completion, answer)
