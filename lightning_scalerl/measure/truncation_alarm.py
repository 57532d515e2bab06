"""Alarm for truncated completions: runs with 10 to 15% truncated completions become unstable and do not recover."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

log = logging.getLogger(__name__)

# arXiv 2510.13786, A.15: stable runs stayed below 5 to 7% truncated completions; runs at 10 to 15% never recovered.
ALARM_SHARE = 0.10
UNSTABLE_SHARE = 0.15
WINDOW_STEPS = 16
# In floating point, a mean of exactly 15% may come out slightly below 0.15.
ROUNDING = 1e-9


class TruncationAlarm:
    """Monitors the share of truncated completions over the last `WINDOW_STEPS` steps.

    The level is 0 below 10%, 1 from 10% and 2 from 15%; until `WINDOW_STEPS` steps have been observed it is 0. The
    level is recorded with every step, and an increase is logged.
    """

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._level = 0

    def observe(self, truncated: float, step: int) -> dict[str, float]:
        """Add one step's share of truncated completions; return the metric `alarm/truncated`."""
        self._shares.append(truncated)
        mean = sum(self._shares) / len(self._shares)
        is_full = len(self._shares) == WINDOW_STEPS
        level = sum(mean >= share - ROUNDING for share in (ALARM_SHARE, UNSTABLE_SHARE)) if is_full else 0
        if level > self._level:
            log.warning(
                "step %d: %.0f%% of the completions of the last %d steps were truncated (alarm at %.0f%%): "
                "training may become unstable; raise context.max_new_tokens or use length_control=interruption",
                step, 100 * mean, WINDOW_STEPS, 100 * ALARM_SHARE,
            )  # fmt: skip
        self._level = level
        return {"alarm/truncated": float(level)}

    def state_dict(self) -> dict[str, Any]:
        """Return the recent shares of truncated completions and the level of the alarm."""
        return {"shares": list(self._shares), "level": self._level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._shares = deque(state["shares"], maxlen=WINDOW_STEPS)
        self._level = state["level"]
