"""Turns the streamed answers of a vLLM server into events, for a reader in another thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from lightning_scalerl.generator.vllm.answers import Answer, WrongAnswerError
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError

# Route with token ids in and out, so that the server's tokenizer is not involved.
ROUTE = "/inference/v1/generate"
# Size limit of an answer: a constant, plus an amount per requested token.
ROOM_BYTES = 2**20
TOKEN_BYTES = 2**12


@dataclass(frozen=True)
class Tokens:
    """Event: a request has sampled these tokens, with these log-probabilities."""

    name: str
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class End:
    """Event: a request has ended, with the reason, each token's weight version, and the number of cached tokens."""

    name: str
    reason: str
    versions: list[int]
    cached: int


@dataclass(frozen=True)
class Lost:
    """Event: a request's answer broke off or was invalid."""

    name: str
    error: EngineLostError


@dataclass
class Streams:
    """Open requests at a server, and the events that they have produced.

    Attributes:
        connection: connection to the server.
        events: events in order of arrival.
        heard_at: monotonic time at which the last part of an answer arrived.
    """

    connection: Connection
    events: SimpleQueue[Tokens | End | Lost] = field(default_factory=SimpleQueue)
    heard_at: float = field(default_factory=time.monotonic)

    async def follow(self, body: dict[str, Any], answer: Answer) -> None:
        """Turn the answer to one request into events, in the connection's thread. Each part of it is checked first."""
        name, address = answer.name, self.connection.address
        # A token with its log-probability takes about 150 bytes.
        max_bytes = ROOM_BYTES + TOKEN_BYTES * answer.limit
        try:
            async for part in self.connection.stream(ROUTE, body, max_bytes):
                self.heard_at = time.monotonic()
                tokens, logprobs = answer.take(part)
                if tokens:
                    self.events.put(Tokens(name, tokens, logprobs))
            self.events.put(End(name, answer.reason, answer.versions, answer.cached))
        except EngineLostError as error:
            self.events.put(Lost(name, error))
        except Exception as error:
            problem = str(error) if isinstance(error, WrongAnswerError) else f"answers what cannot be read ({error!r})"
            self.events.put(Lost(name, EngineLostError(self.connection.safe_line(f"generator: {address} {problem}"))))
