"""The clock that the rollout stream and the compute meter read; injected, so that time can be simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time in seconds from an arbitrary origin, monotone."""

    def now(self) -> float:
        """Seconds."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        """Seconds of the monotonic system clock."""
        return time.monotonic()


class ManualClock:
    """Time that moves only when told to: for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        """Seconds so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
