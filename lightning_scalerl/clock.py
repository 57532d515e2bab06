"""The clock that the compute meter reads; injected, so that tests can say what time it is."""

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
