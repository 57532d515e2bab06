"""The environment of guess_server.py with its action as a tool, as a user would write it."""

from __future__ import annotations

from openenv_server import OpenEnvTools


class GuessTools(OpenEnvTools):
    def guess(self, number: int) -> str:
        """
        Guesses a number.

        Args:
            number: The number.
        """
        return self._step(number=number)
