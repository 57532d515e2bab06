"""Environments of an OpenEnv server.

    pip install openenv-core==0.3.0

Start the server first. Each process of the pool has one session, so the server's `max_concurrent_envs` must be at
least the number of processes:

    uvicorn server.app:app --host 127.0.0.1 --port 8000

Then subclass one of the two classes. `OpenEnvText` sends the model's text as one field of an action, and the server
ends the conversation:

    class Echo(OpenEnvText):
        field = "message"

`OpenEnvTools` has one tool per action, as TRL documents it for OpenEnv. The model ends the conversation:

    class Echo(OpenEnvTools):
        def echo(self, message: str) -> str:
            \"\"\"
            Sends a message.

            Args:
                message: The message.
            \"\"\"
            return self._step(message=message)

The server gets the seed of the conversation. The same seed and turns give the same conversation if its environment
uses the seed. Set `replayable = False` in the subclass if it does not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed

Action = Mapping[str, Any]


class _Session:
    """Session with a server, for one episode after the other.

    The client's background thread answers the server's pings while the model writes.
    """

    def __init__(self, url: str) -> None:
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        try:
            result = self._client.reset(seed=seed, **row)
        except (ConnectionError, ConnectionClosed):
            # The server was started again, or has ended a session that was idle.
            self._client.disconnect()
            result = self._client.reset(seed=seed, **row)
        return _text(result.observation)

    def step(self, action: Action) -> tuple[str, float | None, bool]:
        result = self._client.step(dict(action))
        return _text(result.observation), result.reward, result.done


@cache
def _session(url: str) -> _Session:
    return _Session(url)


class OpenEnvText:
    """Text form: each turn is an action whose only field is the text.

    Attributes:
        url: address of the server.
        field: name of the action's field.
    """

    url = "http://127.0.0.1:8000"
    field = "message"

    def reset(self, seed: int) -> str:
        """Begin an episode."""
        return _session(self.url).reset(seed, {})

    def step(self, text: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Send a turn. A text that the server refuses as an action is answered with the server's error."""
        try:
            answer, reward, done = _session(self.url).step({self.field: text})
        except RuntimeError as error:  # how the client raises an error that the server has sent
            return str(error), None, False, False, {"refused": 1}
        return answer, reward, done, False, {}


class OpenEnvTools:
    """TRL's form: a subclass adds a tool per action. The reward is the sum of the server's rewards.

    Attributes:
        url: address of the server.
    """

    url = "http://127.0.0.1:8000"

    def reset(self, **row: Any) -> str:
        """Begin an episode. The server gets the columns of the row except the prompt, and ignores unknown ones."""
        self._reward, self._done = 0.0, False
        columns = {name: value for name, value in row.items() if name not in ("prompt", "seed")}
        # The worker process has seeded `random` with the conversation's seed.
        return _session(self.url).reset(row.get("seed", random.getrandbits(31)), columns)

    def get_reward(self) -> float:
        """Return the sum of all rewards."""
        return self._reward

    def _step(self, **action: Any) -> str:
        """Send an action. An error of the server is raised, and so is the tool's answer to the model."""
        if self._done:
            raise ValueError("the episode is over")
        try:
            text, reward, self._done = _session(self.url).step(action)
        except RuntimeError:
            raise
        except Exception as error:
            # The connection is lost. The process ends, and the rollout has no reward.
            raise SystemExit(f"{self.url}: {type(error).__name__}: {error}") from error
        self._reward += reward or 0.0
        return text


def _text(observation: Mapping[str, Any]) -> str:
    """Return the only field of an observation if that is a text, and JSON otherwise."""
    values = list(observation.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)
