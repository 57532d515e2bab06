"""One-player games of TextArena as environments.

    pip install textarena==0.7.4

Name the game in a subclass, and give the subclass to the pool of environments:

    class FrozenLake(TextArenaGame):
        game = "FrozenLake-v0"

The seed decides the game: the same seed and turns give the same conversation. Games that download word lists when they
are made (Wordle, Hangman, WordLadder and others) need a network in each worker process.

TextArena's default wrapper repeats the whole conversation in each observation. This class sends new messages only,
because the conversation already is in the rollout.
"""

from __future__ import annotations

from typing import Any

import textarena
from textarena import ObservationType


class TextArenaGame:
    """Text form of a game: a turn is a move, and the reward comes with the last one.

    Attributes:
        game: TextArena's name of the game, without the suffix of a wrapper (`-train`, `-raw`).
    """

    game = "GuessTheNumber-v0"

    def reset(self, seed: int) -> str:
        """Start a game and return its rules, with the board if it has one."""
        self._game = textarena.make(f"{self.game}-raw")
        self._game.reset(num_players=1, seed=seed)
        return self._new_messages()

    def step(self, text: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Make a move, which the text holds in square brackets."""
        over, _ = self._game.step(text)
        if not over:
            return self._new_messages(), None, False, False, {}
        rewards, players = self._game.close()
        info = {"reason": players[0]["reason"], "moves": players[0]["turn_count"]}
        return self._new_messages(), rewards[0], True, False, info

    def _new_messages(self) -> str:
        """Return the game's messages since the last call, without the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind is not ObservationType.PLAYER_ACTION)
