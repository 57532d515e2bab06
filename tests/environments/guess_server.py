"""An OpenEnv environment as a user would write it: guess a number from 1 to 20. Nothing here imports this project.

Served by `python guess_server.py PORT SESSIONS`.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, largest: int = 20, **kwargs: Any) -> Hint:
        self._answer = random.Random(seed).randint(1, largest)
        self._guesses = 0
        return Hint(text=f"Guess a number from 1 to {largest}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.number == 0:
            os._exit(1)  # a server that crashes
        self._guesses += 1
        if action.number == self._answer:
            return Hint(text="Found.", reward=1.0, done=True)
        text = "Higher." if action.number < self._answer else "Lower."
        return Hint(text=text, reward=-0.125, done=self._guesses == 6)

    @property
    def state(self) -> State:
        return State(step_count=self._guesses)


if __name__ == "__main__":
    app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
