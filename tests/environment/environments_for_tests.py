"""Environments as users write them. Nothing here imports this project."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any


class Calculator:
    """TRL's form, as in its documentation: `reset(**row)`, tools, `get_reward()`."""

    def __init__(self) -> None:
        self.calls = 0
        self.result: int | None = None

    def reset(self, answer: int, **kwargs: Any) -> str | None:
        self.answer = answer
        return kwargs.get("hint")

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their sum.
        """
        self.calls += 1
        self.result = a + b
        return self.result

    async def later(self, text: str) -> str:
        """
        Repeats a text.

        Args:
            text: The text.
        """
        await asyncio.sleep(0)
        return text

    def divide(self, a: int, b: int = 0) -> float:
        """
        Divides two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a / b

    def get_reward(self) -> float:
        return float(self.result == self.answer)

    def _not_a_tool(self) -> None:
        raise AssertionError


class SelfSampled:
    """TRL's form with its own task: `reset` draws it and returns the prompt."""

    def reset(self, **kwargs: Any) -> str | None:
        self.total, self.wanted = 0, random.randint(2, 9)
        return f"Count to {self.wanted}."

    def get_reward(self) -> float:
        return float(self.total == self.wanted)

    def count(self, steps: int) -> int:
        """
        Counts on.

        Args:
            steps: How far.

        Returns:
            The number that is reached.
        """
        self.total += steps
        return self.total


class Obedient:
    """Text form. The first word of each text says what to do."""

    def reset(self, seed: int) -> str:
        self.seed, self.turns = seed, 0
        if seed == 13:
            raise RuntimeError("no such level")
        return f"level {seed}"

    def step(self, text: str) -> Any:
        self.turns += 1
        word, _, rest = text.partition(" ")
        if word == "spin":
            while True:
                pass
        if word == "deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(100)
        if word == "late":
            time.sleep(float(rest))
        if word == "die":
            print("the last thing it said", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit":
            raise SystemExit(int(rest))
        if word == "raise":
            raise ValueError(rest)
        if word == "memory":
            return " " * 2**34, 0.0, False, False, {}
        if word == "print":
            for _ in range(int(rest)):
                print("x" * 1023)
        if word == "shout":
            while True:
                print("x" * 1023)
        if word == "flood":
            return "y" * int(rest), 0.0, False, False, {}
        if word == "surrogate":
            return "\ud800", 0.0, False, False, {}
        if word == "reward":
            return "so be it", float(rest), False, False, {}
        if word == "shape":
            return "only a text"
        if word == "child":
            subprocess.Popen(["sleep", rest])
            time.sleep(100)
        if word == "pid":
            return str(os.getpid()), 0.0, False, False, {}
        if word == "draw":
            return str(random.random()), 0.0, False, False, {}
        if word == "clock":
            return str(time.time_ns()), 0.0, False, False, {}
        over = text == "end"
        return f"{self.seed}.{self.turns}: {text}", 0.5, over, False, {"turns": self.turns, "skipped": object()}


class Once(Obedient):
    replayable = False
    seconds = 2.5


class Undocumented:
    def reset(self, **kwargs: Any) -> None: ...

    def add(self, a: int, b: int) -> int:
        return a + b


class Formless:
    def reset(self) -> None: ...


def broken() -> Any:
    raise OSError("the service is away")


class Seeded:
    def reset(self, seed: int) -> str:
        return f"seed {seed!r}"

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        return "", 0.0, True, False, {}


class Rows:
    """TRL's form, which has no seed; its data may have any column of that name."""

    def reset(self, prompt: str, answer: str) -> str:
        return f"row {prompt} {answer}"

    def add(self, a: int) -> int:
        """Add.

        Args:
            a: a number.
        """
        return a
