"""Environments in text form for tests of whole runs. Nothing here imports this project."""

from __future__ import annotations

import os
import time
from typing import Any

LONGEST = 3


class Adding:
    """Answers each turn with a sum and rewards odd digits. Over after three turns or at a 9."""

    seconds = 0.02

    def reset(self, seed: int) -> None:
        self.seed, self.turn = seed % 97, 0

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        time.sleep(float(os.environ.get("ENVIRONMENT_S", "0")))
        self.turn += 1
        odd = sum(character in "13579" for character in text) / 6
        over = self.turn == LONGEST or "9" in text
        return f"{self.seed}+{self.turn}=", odd, over, False, {"odd": odd}


class AddingOnce(Adding):
    """`Adding`, but declared as not replayable."""

    replayable = False


class Shares(Adding):
    """`Adding`, but rewarded by 0.7, 0.2 and 0.1, whose sum from left to right is just below 1."""

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        observation, _, _, truncated, info = super().step(text)
        return observation, (0.7, 0.2, 0.1)[self.turn - 1], self.turn == LONGEST, truncated, info


class Failing(Adding):
    """`Adding`, but some turns fail; the text decides in which way."""

    def step(self, text: str) -> Any:
        ways = ("hang", "die", "flood", "raise", "shape", *("none" for _ in range(23)))
        match ways[sum(map(ord, text)) % len(ways)]:
            case "hang":
                time.sleep(100)
            case "die":
                os._exit(3)
            case "flood":
                return "7" * 2**20, 0.5, False, False, {}
            case "raise":
                raise ValueError("not today")
            case "shape":
                return text
        return super().step(text)


class Slow(Adding):
    """`Adding`, but each answer takes an hour of virtual time."""

    seconds = 3600.0
