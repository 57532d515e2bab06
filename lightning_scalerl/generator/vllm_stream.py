"""Answers of a server of vLLM to requests for tokens, as events for whoever reads them in another thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from lightning_scalerl.generator.vllm_http import Connection, EngineLostError

# Route that takes and gives token ids: no tokenizer of the server's has a say.
ROUTE = "/inference/v1/generate"


@dataclass(frozen=True)
class Tokens:
    """Tokens that a request has sampled, with their log-probabilities."""

    name: str
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class End:
    """End of a request: why, which weights sampled its tokens (version, from, before), and its prompt's cached part."""

    name: str
    reason: str
    versions: list[tuple[int, int, int]]
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

    async def follow(self, name: str, body: dict[str, Any]) -> None:
        """Follow one request to its end, in the connection's thread."""
        end = End(name, "", [], 0)
        try:
            async for part in self.connection.stream(ROUTE, body):
                self.heard = time.monotonic()
                end = self._taken(part, end)
            self.events.put(end)
        except EngineLostError as error:
            self.events.put(Lost(name, error))
        except Exception as error:
            message = f"generator: {self.connection.address} answers what cannot be read ({error!r})"
            self.events.put(Lost(name, EngineLostError(message)))

    def _taken(self, part: dict[str, Any], end: End) -> End:
        """Pass the tokens of a part on and return what is known of the end."""
        reason, versions, cached = end.reason, end.versions, end.cached
        for choice in part.get("choices") or ():
            tokens = choice.get("token_ids") or []
            entries = (choice.get("logprobs") or {}).get("content") or []
            if [entry["token_id"] for entry in entries] != tokens:
                raise EngineLostError(
                    f"generator: {self.connection.address} gives log-probabilities of other tokens than it samples"
                )
            if tokens:
                self.events.put(Tokens(end.name, tokens, [float(entry["logprob"]) for entry in entries]))
            reason = choice.get("finish_reason") or reason
            spans = choice.get("weight_versions") or ()
            versions = [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans] or versions
        if part.get("usage"):
            cached = int((part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return End(end.name, reason, versions, cached)
