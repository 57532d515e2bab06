"""Checks of a vLLM server's answers to sampling requests, before their tokens enter a rollout.

A server may have another version, be a proxy, or be damaged. Without checks we would train on its mistakes: a token id
outside the vocabulary, a log-probability of NaN, a weight version that never existed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

# Reasons for which vLLM ends a request without an error. "abort" answers our own abort call.
REASONS = ("stop", "length", "abort")
# Largest log-probability above 0 that rounding in a log-softmax can cause.
ROUNDING = 1e-4
# Lower bound for the log-probability of a sampled token: below it, a token is practically never sampled.
LEAST_LOGPROB = -1e4
# Number of stream parts without tokens that an answer may have: its end, its usage, and some spare.
SPARE_PARTS = 64


class WrongAnswerError(ValueError):
    """Raised when an answer does not fit its request; the message is one line."""


@dataclass
class Answer:
    """Answer to one request. It arrives in parts (server-sent events), each of which is checked.

    Args:
        name: the request's name.
        prompt: number of tokens of the request's prompt.
        limit: largest number of tokens that the request asks for.
        vocabulary: size of the model's vocabulary.
        stop_tokens: ids that end a completion.
        labels: labels of all published weights in order; the list grows with each publish.
        since: index in `labels` of the weights in use when the request was made.

    Attributes:
        tokens: number of tokens received so far.
        reason: reason for the end; "" while the request is running.
        versions: version of the weights that sampled each token; set at the end.
        cached: number of prompt tokens whose keys and values were in the server's cache.
    """

    name: str
    prompt: int
    limit: int
    vocabulary: int
    stop_tokens: Sequence[int] = ()
    labels: Sequence[str] = ()
    since: int = 0
    tokens: int = 0
    reason: str = ""
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    _last: int | None = None
    _parts: int = 0

    def take(self, part: Any) -> tuple[list[int], list[float]]:
        """Check the next part and return its tokens with their log-probabilities.

        Raises:
            WrongAnswerError: the part is invalid, or does not fit the request.
        """
        self._parts += 1
        if self._parts > self.limit + SPARE_PARTS:
            raise WrongAnswerError(f"{self._parts} parts for at most {self.limit} tokens")
        part = _mapping("the answer", part)
        request_id = part.get("request_id")
        if request_id is not None and not (isinstance(request_id, str) and request_id.endswith(self.name)):
            raise WrongAnswerError(f"request_id: {_shown(request_id)} is another request than {self.name}")
        choices = _sequence("choices", part.get("choices"))
        if len(choices) > 1:
            raise WrongAnswerError(f"choices: {len(choices)} of them, and one completion was asked for")
        tokens: list[int] = []
        logprobs: list[float] = []
        for choice in choices:
            tokens, logprobs = self._take_choice(_mapping("choices", choice))
        if part.get("usage") is not None:
            self._take_usage(_mapping("usage", part["usage"]))
        return tokens, logprobs

    def _take_choice(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        if not _is_int_between(choice.get("index", 0), 0, 0):
            raise WrongAnswerError(f"index: {_shown(choice['index'])}, and one completion was asked for")
        tokens = [self._checked_token(token) for token in _sequence("token_ids", choice.get("token_ids"))]
        content = _sequence("logprobs", _mapping("logprobs", choice.get("logprobs") or {}).get("content"))
        entries = [_mapping("logprobs", entry) for entry in content]
        if [entry.get("token_id") for entry in entries] != tokens:
            raise WrongAnswerError("gives log-probabilities of other tokens than it samples")
        logprobs = [checked_logprob(entry.get("logprob")) for entry in entries]
        if tokens and self.reason:
            raise WrongAnswerError("has sampled more tokens than asked for, behind the end that it declared")
        self.tokens += len(tokens)
        if self.tokens > self.limit:
            raise WrongAnswerError(f"has sampled more tokens than asked for, {self.tokens} of at most {self.limit}")
        # A stop token must be the last token of the whole answer, across parts.
        if tokens:
            if any(token in self.stop_tokens for token in (self._last, *tokens[:-1])):
                raise WrongAnswerError("goes on behind a token that ends the completion")
            self._last = tokens[-1]
        reason = choice.get("finish_reason")
        if reason is not None:
            self._take_end(reason, choice.get("weight_versions"))
        return tokens, logprobs

    def _checked_token(self, token: Any) -> int:
        if not _is_int_between(token, 0, self.vocabulary - 1):
            raise WrongAnswerError(f"token_ids: {_shown(token)} is no id of the model's {self.vocabulary} tokens")
        return int(token)

    def _take_end(self, reason: Any, spans: Any) -> None:
        if reason not in REASONS:
            raise WrongAnswerError(f"finish_reason: {_shown(reason)} is unknown; valid: {', '.join(REASONS)}")
        if self.reason:
            raise WrongAnswerError(f"finish_reason: {reason}, behind {self.reason}")
        if reason == "stop" and (self._last is None or self._last not in self.stop_tokens):
            raise WrongAnswerError(f"finish_reason: stop, and the last token, {self._last}, ends no completion")
        if reason == "length" and self.tokens < self.limit:
            raise WrongAnswerError(f"finish_reason: length, after {self.tokens} of {self.limit} tokens")
        self.reason = reason
        self.versions = self._versions(_sequence("weight_versions", spans))

    def _versions(self, spans: Sequence[Any]) -> list[int]:
        """Check the server's spans and return each token's weight version.

        A span is a range of tokens with the label of the weights that sampled them. Spans must be contiguous, and their
        labels must be in the order in which weights were published.
        """
        versions: list[int] = []
        # After an abort, the spans may include tokens that the server has not sent.
        named_limit = self.limit if self.reason == "abort" else self.tokens
        label_index = self.since
        for span in spans:
            span = _mapping("weight_versions", span)
            start, end, label = span.get("start"), span.get("end"), span.get("version")
            if not (_is_int_between(start, len(versions), len(versions)) and _is_int_between(end, start, named_limit)):
                raise WrongAnswerError(
                    f"weight_versions: a span from {_shown(start)} to {_shown(end)}, behind {len(versions)} of "
                    f"{self.tokens} tokens"
                )
            if not isinstance(label, str) or label not in self.labels[label_index:]:
                raise WrongAnswerError(f"weight_versions: {_shown(label)} labels no weights that it has had")
            label_index = self.labels.index(label, label_index)
            versions += [int(label)] * (end - start)
        if len(versions) < self.tokens:
            raise WrongAnswerError(f"names the weights of {len(versions)} of {self.tokens} tokens")
        return versions[: self.tokens]

    def _take_usage(self, usage: dict[str, Any]) -> None:
        prompt = usage.get("prompt_tokens", self.prompt)
        if not _is_int_between(prompt, self.prompt, self.prompt):
            raise WrongAnswerError(f"usage: a prompt of {_shown(prompt)} tokens, and this one has {self.prompt}")
        sampled = usage.get("completion_tokens", self.tokens)
        if not _is_int_between(sampled, self.tokens, self.limit):
            raise WrongAnswerError(f"usage: {_shown(sampled)} tokens sampled, and {self.tokens} have come")
        details = _mapping("usage", usage.get("prompt_tokens_details") or {})
        cached = details.get("cached_tokens")
        if cached is not None and not _is_int_between(cached, 0, self.prompt):
            raise WrongAnswerError(f"usage: {_shown(cached)} cached tokens of a prompt of {self.prompt}")
        self.cached = int(cached or 0)


def checked_logprob(value: Any) -> float:
    """Check the log-probability of a sampled token and return it, clipped to at most 0.

    Raises:
        WrongAnswerError: the value is not a finite number, or outside the range possible for a sampled token.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and LEAST_LOGPROB <= value <= ROUNDING):  # also refuses NaN
        raise WrongAnswerError(f"logprob: {_shown(value)} is no log-probability of a sampled token")
    return min(0.0, float(value))


def _is_int_between(value: Any, low: int, high: int) -> TypeGuard[int]:
    # Refuse bool, which is a subclass of int: JSON's true is not a number.
    return type(value) is int and low <= value <= high


def _mapping(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongAnswerError(f"{field}: {_shown(value)} is no object")
    return value


def _sequence(field: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise WrongAnswerError(f"{field}: {_shown(value)} is no list")
    return value or []


def _shown(value: Any) -> str:
    """Return a value for a message; for a container, which may be huge or deeply nested, only its type."""
    text = f"a {type(value).__name__}" if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
