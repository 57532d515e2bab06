"""Answers of a server of vLLM to requests for tokens, as events for whoever reads them in another thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from lightning_scalerl.generator.vllm.answers import Answer, WrongAnswerError
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError

# Route that takes and gives token ids: no tokenizer of the server's has a say.
ROUTE = "/inference/v1/generate"
# Longest answer: so much, and so much more for each token that was asked for.
ROOM_BYTES = 2**20
TOKEN_BYTES = 2**12


@dataclass(frozen=True)
class Tokens:
    """Tokens that a request has sampled, with their log-probabilities."""

    name: str
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class End:
    """End of a request: why, which weights sampled each of its tokens, and its prompt's cached part."""

    name: str
    reason: str
    versions: list[int]
    cached: int


@dataclass(frozen=True)
class Lost:
    """Request whose answer broke off, or cannot be read."""

    name: str
    error: EngineLostError


@dataclass
class Streams:
    """Requests at a server and what has come of them.

    Attributes:
        connection: way to the server.
        events: what has come, in order.
        heard: when something came last, by the monotonic clock.
    """

    connection: Connection
    events: SimpleQueue[Tokens | End | Lost] = field(default_factory=SimpleQueue)
    heard: float = field(default_factory=time.monotonic)

    async def follow(self, body: dict[str, Any], answer: Answer) -> None:
        """Follow one request to its end, in the connection's thread; each part of its answer is checked first."""
        name, address = answer.name, self.connection.address
        # A token with its log-probability takes some 150 bytes.
        most = ROOM_BYTES + TOKEN_BYTES * answer.limit
        try:
            async for part in self.connection.stream(ROUTE, body, most):
                self.heard = time.monotonic()
                tokens, logprobs = answer.take(part)
                if tokens:
                    self.events.put(Tokens(name, tokens, logprobs))
            self.events.put(End(name, answer.reason, answer.versions, answer.cached))
        except EngineLostError as error:
            self.events.put(Lost(name, error))
        except Exception as error:
            wrong = str(error) if isinstance(error, WrongAnswerError) else f"answers what cannot be read ({error!r})"
            self.events.put(Lost(name, EngineLostError(self.connection.words(f"generator: {address} {wrong}"))))
