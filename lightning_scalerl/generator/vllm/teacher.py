"""Teacher of axis `kl` behind vLLM's OpenAI-compatible server: log-probabilities of given tokens.

The user starts the server with the teacher's weights. Its route `/v1/completions` takes token ids and returns the
log-probability of each of them (`prompt_logprobs`) at temperature 1. It also samples one token, which is not used.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.vllm.answers import WrongAnswerError, checked_logprob
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError, RefusedError
from lightning_scalerl.generator.vllm.plugin import TOKEN
from lightning_scalerl.rollouts.rollout import TrainBatch

T = TypeVar("T")

SETTING = "kl.reference"
MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
# Largest number of concurrent requests of a rank.
CONCURRENT = 32
# Statuses after which the same request may succeed: a timeout, too many requests, a server that fails or restarts.
RETRIED_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
# First pause before a retry, and longest pause, in seconds; each pause is twice as long as the one before it.
PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class VLLMTeacher:
    """Computes log-probabilities of completions with the model that a vLLM server serves.

    Args:
        address: the server's address, such as `http://node7:8000`.
        capacity: tokens of the longest sequence.
        timeout_s: limit in seconds on one answer, all attempts included.
        token: the server's key; None to read it from the environment variable `VLLM_API_KEY`, if it is set.

    Raises:
        ConfigurationError: the server serves no model, does not take sequences of this length, or gives no
            log-probabilities of given tokens.
        EngineLostError: the server cannot be reached.
    """

    def __init__(self, address: str, capacity: int, timeout_s: float, token: str | None = None) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._connection = Connection(address, os.environ.get(TOKEN, "") if token is None else token, SETTING)
        try:
            self._model = self._served_model(capacity)
            self._run(self._logprobs([0], [0]))
        except RefusedError as error:
            self.close()
            remedy = {401: f"; give its key in {TOKEN}", 404: "; is it a server of vllm?"}
            raise ConfigurationError(f"{error}{remedy.get(error.status, '')}") from error
        except BaseException:
            self.close()
            raise

    def score(self, rows: TrainBatch) -> Tensor:
        """Return the log-probabilities of the completion tokens, (R, T), zero after a completion's end.

        Raises:
            EngineLostError: the server does not answer in time, or gives an invalid answer.
        """
        table = torch.zeros_like(rows.generator_logprobs)
        starts, ends = rows.completion_start.tolist(), rows.lengths.tolist()
        sequences = [tokens[:end] for tokens, end in zip(rows.tokens.tolist(), ends, strict=True)]
        for row, logprobs in enumerate(self._run(self._logprobs_of_all(sequences, starts), max(1, len(starts)))):
            table[row, : len(logprobs)] = torch.tensor(logprobs, dtype=table.dtype)
        return table

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _served_model(self, capacity: int) -> str:
        """Return the name of the served model, after checking that it takes sequences of `capacity` tokens."""
        answer = self._run(self._ask_with_retries("GET", MODELS, None))
        try:
            (entry, *_) = answer["data"]
            name, longest = str(entry["id"]), int(entry.get("max_model_len") or capacity + 1)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{SETTING}: {self.address}{MODELS} names no model; give the address of a server of vllm"
            ) from error
        if longest <= capacity:
            raise ConfigurationError(
                f"{SETTING}: {self.address} holds {longest} tokens of a sequence; start it with --max-model-len "
                f"{capacity + 1} (context.max_prompt_tokens + max_new_tokens + 1), and with "
                f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if the model has {capacity} positions"
            )
        return name

    def _run(self, work: Coroutine[Any, Any, T], calls: int = 1) -> T:
        """Run a coroutine that makes `calls` calls. Its time limit is `timeout_s` per `CONCURRENT` calls, plus 5 s."""
        return self._connection.run(work, self._timeout_s * -(-calls // CONCURRENT) + 5)

    async def _logprobs_of_all(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[float]]:
        semaphore = asyncio.Semaphore(CONCURRENT)

        async def logprobs(sequence: list[int], start: int) -> list[float]:
            async with semaphore:
                return await self._logprobs(sequence[:start], sequence[start:])

        return await asyncio.gather(*map(logprobs, sequences, starts))

    async def _logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `tokens` after `prompt`."""
        body = {
            "model": self._model,
            "prompt": [*prompt, *tokens],
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        answer = await self._ask_with_retries("POST", COMPLETIONS, body)
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"][len(prompt) :]
            return [checked_logprob(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens, strict=True)]
        except (KeyError, TypeError, ValueError, WrongAnswerError) as error:
            message = f"{SETTING}: {self.address}{COMPLETIONS} gives no log-probabilities of given tokens ({error!r})"
            raise EngineLostError(self._connection.safe_line(f"{message}; is it a server of vllm?")) from error

    async def _ask_with_retries(self, method: str, path: str, body: Any) -> Any:
        """Return the answer to a call; retry transient failures within the time limit."""
        deadline, pause_s = time.monotonic() + self._timeout_s, PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._connection.ask(method, path, body, timeout_s=max(0.1, left_s))
            except EngineLostError as error:
                if isinstance(error, RefusedError) and error.status not in RETRIED_STATUSES:
                    raise
                if time.monotonic() + pause_s >= deadline:
                    message = f"{error}; given up after kl.timeout_s={self._timeout_s:g}"
                    raise EngineLostError(message) from error
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
