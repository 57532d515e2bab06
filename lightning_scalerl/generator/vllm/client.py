"""Generator that samples with vLLM's HTTP server, on this machine or another; `serve` starts one.

A rollout is a stream of token ids with log-probabilities (`/inference/v1/generate`). This client decides when a rollout
ends, as `generator` does with an engine in this process. The server reports which weights sampled a token, by labels
that we set while the server is paused. A server has one client at a time: at its start, a client aborts all requests
that an earlier client left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError, positive, whole_number
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings, StepReport, set_aside
from lightning_scalerl.generator.vllm.answers import Answer, checked_logprob
from lightning_scalerl.generator.vllm.checks import CALL_S, check_answer, check_server, wait_for_server
from lightning_scalerl.generator.vllm.engine import meta_model
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError, RefusedError
from lightning_scalerl.generator.vllm.rollouts import ActiveRollout, Computed, StepEnds, VLLMBookkeeping, report
from lightning_scalerl.generator.vllm.stream import ROUTE, End, Lost, Streams, Tokens
from lightning_scalerl.generator.vllm.weights import TRANSFERS, TransferRoutes, new_sender
from lightning_scalerl.model.head import text_config
from lightning_scalerl.model.windows import attention_windows

_log = logging.getLogger(__name__)

# Longest wait of a step for an event, in seconds.
POLL_S = 0.02
# Interval at which a server's health is checked, in seconds.
HEALTH_S = 1.0
# Prefix that the server adds to a request's name.
PREFIX = "generate-tokens-"


@dataclass
class _Stream:
    """Open request at the server, which samples one part of a rollout.

    Attributes:
        active: the rollout.
        start: number of tokens that the rollout had before this request.
        context: length of the request's prompt: the group's prompt plus `start` tokens.
        work: the running call; None until it is started.
        end_cause: why this client ends the request: "stop" at a stop text, "restart" to continue in another request; ""
            if this client does not end it.
        received: number of tokens received.
    """

    active: ActiveRollout
    start: int
    context: int
    work: Future[None] | None = None
    end_cause: str = ""
    received: int = 0


class VLLMServerGenerator(VLLMBookkeeping):
    """Generator that samples rollouts with a vLLM server.

    Published weights are kept by reference: the caller must not change them until new weights are published. Weights
    mapped from a file (`driver=live`) satisfy this.

    Args:
        model: the trainer's model, or another model of its class; its configuration and initial weights are used.
        precision: dtypes of the engine's weights and head; the server must have been started with the same.
        sampling: sampling settings.
        address: the server's address, such as `http://node7:8000`.
        token: the server's token; None if it requires none.
        slots: number of rollouts in flight at the server.
        cache_gib: not used: the server's cache is sized when it starts (`serve`).
        transfer: how weights reach a server that accepts files and HTTP: "file", "http" or "auto" (file if possible).
        folder: a folder for weights that the server's workers can also see; None to try this machine's shared memory.
        bucket_mib: size of one bucket of weights, in MiB.
        silence_s: seconds without an answer after which a server is lost; also the timeout for loading a bucket.
        away_s: seconds that a server may take to answer for the first time.

    Raises:
        ConfigurationError: the server was started with settings that do not fit the run.
        EngineLostError: the server cannot be reached.
    """

    # Settings that do not change results and so are not part of a run's identity.
    operational_parameters: ClassVar[tuple[str, ...]] = tuple(
        ["cache_gib", "address", "token", "transfer", "folder", "bucket_mib", "silence_s", "away_s"]
    )

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        sampling: SamplingSettings,
        *,
        address: str,
        token: str | None = None,
        slots: int,
        cache_gib: float | None = None,
        transfer: str = "auto",
        folder: str | None = None,
        bucket_mib: float = 256.0,
        silence_s: float = 60.0,
        away_s: float = 120.0,
    ) -> None:
        whole_number("generator.slots", slots)
        if transfer not in TRANSFERS:
            raise ConfigurationError(f"generator.transfer: {transfer!r} is unknown; valid: {', '.join(TRANSFERS)}")
        positive("generator.silence_s", silence_s)
        positive("generator.bucket_mib", bucket_mib)
        super().__init__(sampling, slots, int(text_config(model).vocab_size))
        self._model = meta_model(model)
        self._silence_s = silence_s
        self._windows = attention_windows(text_config(model))
        self._labels: list[str] = []  # labels of the weights published to this server, in order
        self._run = secrets.token_hex(4)
        self._number = count()
        self._running: dict[str, _Stream] = {}
        # Version counters of the published tensors, to detect changes in place before a checkpoint.
        self._version_counters: dict[str, int] = {}
        self._asleep = False
        self._healthy = time.monotonic()
        # Close connection and sender again if any later step fails.
        with ExitStack() as undo:
            self._connection = Connection(address, token or "")
            undo.callback(self._connection.close)
            self._streams = Streams(self._connection)
            wait_for_server(self._connection, away_s)
            info = check_server(self._connection, precision, slots, sampling.capacity + 1)
            self._can_sleep = bool(info["model_config"].get("enable_sleep_mode"))
            self._abort_all()
            weights = dict(model.state_dict())
            total = sum(tensor.numel() for tensor in weights.values()) * precision.policy_dtype.itemsize
            self._sender = new_sender(
                TransferRoutes(self._connection, silence_s),
                (info["weight_transfer_config"] or {}).get("backend"),
                address,
                model=self._model,
                dtype=precision.policy_dtype,
                device=next(model.parameters()).device,
                transfer=transfer,
                folder=None if folder is None else Path(folder),
                bucket_bytes=max(1, min(int(bucket_mib * 2**20), total)),
            )
            undo.callback(self._sender.close)
            _log.info("generator: weights are sent to %s by %s", address, self._sender.method)
            self.publish(weights, 0)
            trial = ActiveRollout(self._insertions(GroupRequest(-1, (0,), 1, (0,), max_new_tokens=1), 0))
            check_answer(self._connection, self._body(self._name("trial"), trial, stream=False), 0)
            undo.pop_all()
        self._connection.start(self._watch())

    # --- the protocol of a generator ---------------------------------------------------------------------

    def step(self) -> StepReport:
        """Collect the tokens that the server has sampled since the last step; if there are none, wait briefly.

        Raises:
            EngineLostError: the server is unreachable, silent, or gives invalid answers; everything in flight is lost.
        """
        return self._report_queue.popleft() if self._report_queue else self._advance(POLL_S)

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight keep their stale keys and values, unless `recompute_kv` recomputes them.

        Raises:
            EngineLostError: the server did not load all weights. It stays paused, because it may hold a mixture of old
                and new weights.
        """
        # With clear_cache, vLLM keeps the requests but drops and recomputes their keys and values.
        self._call("POST", "/pause", mode="keep", clear_cache=str(recompute_kv).lower())
        # Collect the tokens sampled under the old weights; the next `step` returns them.
        self._report_queue.append(self._advance(0.0, refill=False))
        # Restart rollouts without a token, so that the new weights also compute the keys and values of their prompts.
        self._abort([name for name, stream in self._running.items() if not stream.received], "restart")
        self._labels.append(str(version))
        try:
            self._sender.send(self._model, weights, str(version))
        except RefusedError as error:
            raise EngineLostError(f"{error}; are its weights of this model? It stays paused") from error
        self._weights = weights
        self._version_counters = {name: tensor._version for name, tensor in weights.items()}
        self._version = version
        if recompute_kv:
            for stream in self._running.values():
                if stream.received:
                    self._unreported.add(0, len(stream.active.sequence), self._windows)
        # Call this only once per pause: vLLM does not ignore a second resume.
        self._call("POST", "/resume")
        self._streams.heard_at = time.monotonic()

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities (T,) of a completion under the weights in use, by one forward pass."""
        sampling_params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        body = {
            "request_id": self._name("score"),
            "token_ids": [*prompt_tokens, *tokens],
            "sampling_params": sampling_params,
            "cache_salt": self._salt(),
        }
        answer = self._connection.call("POST", ROUTE, body, timeout_s=self._silence_s)
        try:
            entries = answer["prompt_logprobs"][len(prompt_tokens) :]
            logprobs = [
                checked_logprob(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            message = f"generator: {self._connection.address} scores without {error!r}"
            raise EngineLostError(self._connection.safe_line(message)) from error
        return torch.tensor(logprobs, dtype=torch.float32)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Pause the rollouts in flight while the context is open, then resume them with the earlier weights."""
        self._end_requests()
        with self._keep_reports(set_aside(self, self._clear)):
            yield

    def sleep(self) -> None:
        """Release the engine's memory for a trainer on the same GPU; rollouts in flight pause.

        Raises:
            ConfigurationError: the server was started without sleep mode.
        """
        if not self._can_sleep:
            raise ConfigurationError(
                f"generator: {self._connection.address} cannot sleep; start it with --enable-sleep-mode"
            )
        self._end_requests()
        # Level 1 moves the weights to host memory and drops keys and values, which are recomputed later.
        self._call("POST", "/sleep", level="1", mode="abort")
        self._asleep = True

    def wake(self) -> None:
        """Take the engine's memory back; rollouts in flight continue after the tokens they have."""
        if self._asleep:
            self._connection.call("POST", "/wake_up", timeout_s=self._silence_s)
            self._asleep = False

    def close(self) -> None:
        """Disconnect from the server, which keeps running idle; everything in flight is kept for `state_dict`."""
        if self._closed is None:
            self._closed = self.state_dict()
            with suppress(EngineLostError):
                self._abort_all()
            self._sender.close()
            self._connection.close()

    # --- state -------------------------------------------------------------------------------------------

    def _running_rollouts(self) -> list[ActiveRollout]:
        return [stream.active for stream in self._running.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, with the weights; keys and values are recomputed on resuming.

        Raises:
            RuntimeError: the published weights have been modified since.
        """
        if self._closed is not None:
            return self._closed
        changed = [name for name, tensor in self._weights.items() if tensor._version != self._version_counters[name]]
        if changed:
            raise RuntimeError(f"weights were changed in place after they were published: {changed[0]}")
        return self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the rollouts with the tokens they had."""
        self._clear()
        self.publish(state["weights"], state["version"])
        self._report_queue.clear()
        self._restore(state)

    def _clear(self) -> None:
        self._end_requests()
        self._waiting.clear()
        self._between_turns.clear()
        self._report_queue.clear()
        self._unreported = Computed()

    def _end_requests(self) -> None:
        """End all requests at the server; each rollout keeps the tokens it has."""
        self._abort(list(self._running), "restart")
        deadline = time.monotonic() + self._silence_s
        while self._running:
            self._report_queue.append(self._advance(POLL_S, refill=False))
            if time.monotonic() > deadline:
                raise EngineLostError(f"generator: {self._connection.address} does not end requests that are aborted")

    # --- steps -------------------------------------------------------------------------------------------

    def _advance(self, wait_s: float, refill: bool = True) -> StepReport:
        """Handle the server's events, and start requests for rollouts that have a slot."""
        while refill and not self._asleep and self._waiting and len(self._running) < self._slots:
            self._start(self._waiting.popleft())
        ended = StepEnds()
        prefill, self._unreported = self._unreported, Computed()
        decoded = Computed()
        prefilled = 0
        for event in self._events(wait_s):
            if isinstance(event, Lost):
                if event.name in self._running:
                    raise event.error
                continue
            if (stream := self._running.get(event.name)) is None:  # the request's end was already handled
                continue
            if isinstance(event, Tokens):
                self._add_tokens(stream, event, decoded)
                continue
            self._set_versions(stream, event)
            if stream.received:
                prefill.add(min(event.cached, stream.context), stream.context, self._windows)
                prefilled += 1
            del self._running[event.name]
            active = stream.active
            reason = "stop" if stream.end_cause == "stop" else event.reason
            # This client has ended the request itself, so the rollout continues in a new request.
            if reason == "abort" and stream.end_cause:
                self._waiting.appendleft(active)
            elif reason not in ("stop", "length"):
                raise EngineLostError(f"generator: {self._connection.address} has ended a request with {reason!r}")
            elif not self._turn_ends(active, reason, ended):
                self._waiting.appendleft(active)
        if self._running and not ended.finished:
            self._check_alive()
        return report(ended, prefill, decoded, prefilled)

    def _events(self, wait_s: float) -> Iterator[Tokens | End | Lost]:
        """Yield the events that have arrived; wait up to `wait_s` for the first one."""
        with suppress(Empty):
            yield self._streams.events.get(timeout=wait_s) if wait_s else self._streams.events.get_nowait()
            while True:
                yield self._streams.events.get_nowait()

    def _add_tokens(self, stream: _Stream, event: Tokens, decoded: Computed) -> None:
        """Add new tokens to their rollout, up to a stop text."""
        active = stream.active
        for token, logprob in zip(event.tokens, event.logprobs, strict=True):
            if stream.end_cause == "stop":
                return
            # A request's first token comes from its prefill, which is counted at the request's end.
            if stream.received:
                length = len(active.sequence)
                decoded.add(length - 1, length, self._windows)
            stream.received += 1
            active.append([token], [logprob], self._version)
            if self._has_stop_text(active):
                self._abort([event.name], "stop")

    def _set_versions(self, stream: _Stream, event: End) -> None:
        """Set the tokens' weight versions as the server reports them: only it knows when new weights took effect."""
        versions = stream.active.rollout.weight_versions
        # Cut to the received tokens: the server may have sampled more after a stop text.
        versions[stream.start : stream.start + stream.received] = event.versions[: stream.received]

    def _check_alive(self) -> None:
        """Raise `EngineLostError` if no token, or no answer to a health check, has arrived for `silence_s` seconds."""
        now = time.monotonic()
        silent_s = now - min(self._streams.heard_at, self._healthy)
        if silent_s > self._silence_s:
            raise EngineLostError(f"generator: {self._connection.address} was silent for {silent_s:.0f} s")

    # --- requests ----------------------------------------------------------------------------------------

    def _salt(self) -> str:
        """Return the salt that keeps vLLM's prefix cache from sharing keys and values between versions or runs."""
        return f"{self._run}-{self._version}"

    def _name(self, purpose: str) -> str:
        """Return a new request name, unique among all runs that use the server."""
        return f"{self._run}-{purpose}-{next(self._number)}"

    def _body(self, name: str, active: ActiveRollout, stream: bool) -> dict[str, Any]:
        body = {
            "request_id": name,
            "token_ids": active.sequence,
            "sampling_params": self._sampling_parameters(active),
            "cache_salt": self._salt(),
            # From vLLM 0.33 on, the server reports versions only on request.
            "return_weight_versions": True,
        }
        return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body

    def _start(self, active: ActiveRollout) -> None:
        """Request a rollout's next tokens, up to its interruption point or the limit of its turn."""
        name = self._name(f"group{active.request.key}-rollout{active.index}-version{self._version}")
        body = self._body(name, active, stream=True)
        if not self._running:
            self._streams.heard_at = time.monotonic()
        stream = _Stream(active, len(active.rollout.tokens), len(active.sequence))
        self._running[name] = stream
        answer = Answer(
            name=name,
            prompt=stream.context,
            limit=body["sampling_params"]["max_tokens"],
            vocabulary=self._vocabulary,
            stop_tokens=body["sampling_params"]["stop_token_ids"],
            labels=self._labels,
            since=len(self._labels) - 1,
        )
        stream.work = self._connection.start(self._streams.follow(body, answer))

    def _abort(self, names: Sequence[str], cause: str) -> None:
        """Ask the server to end requests; their last events still report the weight versions of their tokens.

        A request without a token is dropped at once by closing its connection, because the server may not have
        received it yet.
        """
        names_at_server = []
        for name in names:
            stream = self._running[name]
            if not stream.received:
                del self._running[name]
                if stream.work is not None:
                    stream.work.cancel()
                self._waiting.appendleft(stream.active)
            elif not stream.end_cause:
                stream.end_cause = cause
                names_at_server.append(PREFIX + name)
        if names_at_server:
            self._call("POST", "/inference/v1/abort_requests", {"request_ids": names_at_server})

    def _call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return self._connection.call(method, path, body, timeout_s=min(CALL_S, self._silence_s), query=query or None)

    def _abort_all(self) -> None:
        """Ask the server to end all requests, including those left by an earlier client."""
        self._call("POST", "/abort_requests", {"request_ids": []})

    async def _watch(self) -> None:
        """Poll the server's health, because a suspended server keeps its connections open."""
        while True:
            try:
                await self._connection.ask("GET", "/health", timeout_s=self._silence_s)
                self._healthy = time.monotonic()
            except EngineLostError:
                pass
            await asyncio.sleep(HEALTH_S)
