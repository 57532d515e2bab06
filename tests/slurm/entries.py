"""Verifiers that fail in a job; the node imports them by name."""

from __future__ import annotations

import os
import resource
import time

from tests.place import odd_digits

_calls = 0


def _is_later_call() -> bool:
    """Count a call; return whether the run is in about its third step."""
    global _calls
    _calls += 1
    return _calls > 40


def explode(completion: str, answer: str) -> float:
    """Raise an error of the user's code with a secret in its message."""
    if _is_later_call():
        raise ValueError(f"no such verifier at https://me:{os.environ['SERVICE_PASSWORD']}@example.org")
    return odd_digits(completion, answer)


def hoard(completion: str, answer: str) -> float:
    """Take memory until the scheduler kills the job."""
    if _is_later_call():
        hoarded = []
        while True:
            hoarded.append(bytearray(os.urandom(1 << 20)) * 64)
            time.sleep(0.05)
    return odd_digits(completion, answer)


def starve(completion: str, answer: str) -> float:
    """Take memory until Python raises MemoryError."""
    if _is_later_call():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 33)
    return odd_digits(completion, answer)
