"""In-process generator: continuous batching over a preallocated KV cache, deterministic under a seed.

A fixed number of slots decode together, one token per step. When the rollout of a slot ends, the next rollout takes the
slot at once. A prompt is prefilled once, and its keys and values are copied to all of its rollouts. Weights can change
between any two tokens, and every token records the version that sampled it. After a change, rollouts in flight continue
with their stale keys and values, or with recomputed ones. If a rollout thinks for too long, a phrase that ends its
thinking is forced, token by token. At the end of a turn a rollout may wait for an insertion (`waiting`), whose tokens
are prefilled onto its cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.generator import memory
from lightning_scalerl.generator.base import (
    GroupRequest,
    SamplingSettings,
    StepReport,
    StopText,
    WaitingRollout,
    request_from,
    request_state,
    set_aside,
)
from lightning_scalerl.generator.insertion import check_answer
from lightning_scalerl.generator.torch.decodable import check_decodable
from lightning_scalerl.generator.torch.policy import GeneratorPolicy
from lightning_scalerl.generator.torch.slot_cache import SlotCache, decode, encode, extend
from lightning_scalerl.generator.torch.slots import Slots, host
from lightning_scalerl.generator.torch.waiting import PausedRollouts
from lightning_scalerl.model.head import backbone, text_config
from lightning_scalerl.model.policy import MAX_LOGITS

# Number of prompts prefilled in one forward pass, ahead of the slots they will need.
PREFILL_PROMPTS = 16
# Replaces a temperature of 0: at this temperature the most likely token gets all of the probability.
MIN_TEMPERATURE = 1e-6
# Number of rollouts whose cache is recomputed in one forward pass.
RECOMPUTED_ROLLOUTS = 64


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution, so that one uniform number decides one token.

    Shapes: logits (n, V) FP32, uniform (n,) FP64 in [0, 1), temperature a number or (n, 1) -> tokens (n,),
    log-probabilities (n, V) FP32.
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    # Sum in FP64, because an FP32 sum over a vocabulary rounds away its rare tokens.
    cumulative = logprobs.double().exp().cumsum(-1)
    # Scale by the actual sum, which rounding leaves slightly off 1. The clamp below handles a product that rounds up
    # to the sum.
    below = cumulative <= uniform.unsqueeze(1) * cumulative[:, -1:]
    return below.sum(-1).clamp(max=logits.shape[1] - 1), logprobs


@dataclass
class _Pending:
    """Rollouts of a group that wait for slots: those from index `start` up to, but not including, `end`."""

    request: GroupRequest
    start: int
    end: int

    def state(self) -> tuple[Any, ...]:
        """Return the record as plain values for a checkpoint; `end` is left out if it is the number of completions."""
        end = [] if self.end == self.request.completions else [self.end]
        return (request_state(self.request), self.start, *end)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> _Pending:
        request = request_from(state[0])
        return cls(request, state[1], state[2] if len(state) > 2 else request.completions)


@dataclass
class _Prefilled:
    """Prefilled prompt with its keys and values, and the rollouts of this prompt that wait for slots."""

    pending: _Pending
    keys_values: list[tuple[Tensor, Tensor]]
    logits: Tensor
    uniform: Tensor


class TorchGenerator:
    """Samples rollouts from any causal language model of transformers in this process.

    Args:
        model: the trainer's model; its weights are copied.
        precision: dtypes of the copy and of its head.
        sampling: sampling settings; the longest prompt and completion bound the cache.
        slots: number of rollouts that decode together.
        cache_gib: memory for keys and values, in GiB; None for all free memory.
        waiting_keeps: resources that a rollout keeps while it waits for an insertion: "slot", "cache" or "nothing"
            (`PausedRollouts`).

    Raises:
        ConfigurationError: the model cannot be decoded token by token or over this context length (`decodable`), or
            the cache of all slots at full length would not fit into memory.
    """

    # Settings that do not change results and so are not part of a run's identity.
    operational_parameters: ClassVar[tuple[str, ...]] = ("cache_gib",)
    added: ClassVar[Mapping[str, Any]] = {"waiting_keeps": "cache"}

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        sampling: SamplingSettings,
        *,
        slots: int,
        cache_gib: float | None = None,
        waiting_keeps: str = "cache",
    ) -> None:
        whole_number("generator.slots", slots)
        self._paused_rollouts = PausedRollouts(sampling, waiting_keeps)
        self.check_model(model, sampling)
        self._check_memory(model, precision, slots, sampling.capacity, cache_gib)
        self.policy = GeneratorPolicy(model, precision)
        self.device = next(model.parameters()).device
        self.sampling = sampling
        self.can_score = True
        self._version = 0
        self._stop = torch.tensor(sorted(sampling.stop_tokens), device=self.device)
        cache = SlotCache(int(text_config(model).num_hidden_layers), slots, sampling.capacity)
        self._slots = Slots(cache, slots, sampling, self.device)
        self._queue: deque[_Pending] = deque()
        self._prefilled: deque[_Prefilled] = deque()
        # Work of recomputing caches that no report contains yet: tokens, and tokens attended to.
        self._unreported = [0, 0]

    @staticmethod
    def check_model(model: nn.Module, sampling: SamplingSettings, **_: Any) -> None:
        """Check that a model can be decoded token by token. Takes the same arguments as the constructor.

        A trainer calls this with its own FP32 weights. The weights of an engine in another process are rounded, which
        makes the comparison too inexact.

        Raises:
            ConfigurationError: the model cannot be decoded.
        """
        check_decodable(model, sampling.capacity)

    @staticmethod
    def _check_memory(
        model: nn.Module, precision: Precision, slots: int, capacity: int, allowed_gib: float | None
    ) -> None:
        """Refuse at startup a cache that would not fit once all rollouts have full length."""
        needed = memory.cache_gib(model, precision.policy_dtype, slots * capacity)
        available = memory.free_gib(next(model.parameters()).device) if allowed_gib is None else allowed_gib
        if needed > available:
            fit = int(slots * available / needed)
            remedy = f"generator.slots={fit} fit" if fit else "not one of them fits: lower context.max_new_tokens"
            raise ConfigurationError(
                f"generator.slots: {slots} sequences of {capacity} tokens take {needed:.3g} GiB of keys and values, "
                f"{'free are' if allowed_gib is None else 'cache_gib allows'} {available:.3g} GiB; {remedy}"
            )

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of optimizer steps that produced them."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not finished."""
        return self._pending_count + self._slots.active + len(self._paused_rollouts)

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens sampled so far for the rollouts in flight."""
        return int(self._slots.counts.sum()) + self._paused_rollouts.sampled

    @property
    def free_slots(self) -> int:
        """Number of slots that no submitted rollout occupies or waits for."""
        claimed = self._pending_count + self._slots.active + self._paused_rollouts.claimed_slots
        return max(0, self._slots.size - claimed)

    @property
    def idle(self) -> bool:
        """True if `step` has nothing to do or report: all rollouts with a slot wait, and queued ones cannot start."""
        may_start = self._pending_count > 0 and self._paused_rollouts.held_slots < self._slots.size
        return not (may_start or self._slots.active or self._paused_rollouts.due)

    @property
    def waiting(self) -> list[WaitingRollout]:
        """All rollouts that wait for `insert` or `end`, in the order in which they began to wait."""
        return self._paused_rollouts.reports

    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Insert the tokens of an environment's answer into a waiting rollout and continue it.

        Raises:
            KeyError: the rollout does not wait.
            ValueError: a token is not in the vocabulary, or there is no room for the tokens.
        """
        check_answer(tokens, vocabulary_size(self.policy))
        self._paused_rollouts.insert(key, index, tokens)

    def end(self, key: int, index: int, truncated: bool = False) -> None:
        """End a waiting rollout; the next step reports it as finished.

        Raises:
            KeyError: the rollout does not wait.
        """
        self._paused_rollouts.end(key, index, truncated)

    def restart(self, key: int, index: int) -> None:
        """Forget the tokens of a waiting rollout and sample it again from its prompt, with the same random numbers.

        Raises:
            KeyError: the rollout does not wait.
        """
        request = self._paused_rollouts.remove(key, index).insertions.request
        self._queue.appendleft(_Pending(request, index, index + 1))

    @property
    def _pending_count(self) -> int:
        """Number of rollouts that wait for their first slot."""
        return sum(
            pending.end - pending.start for pending in (*self._queue, *(entry.pending for entry in self._prefilled))
        )

    @torch.no_grad()
    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight keep their stale keys and values, unless `recompute_kv` recomputes them.
        """
        self.policy.load(weights)
        self._version = version
        # Prefill again the rollouts that have no token yet, so that the new weights sample their first token as well.
        self._queue.extendleft(entry.pending for entry in reversed(self._prefilled))
        self._prefilled.clear()
        if recompute_kv:
            self._recompute_cache()

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities (T,) of a completion under the weights in use, by one forward pass."""
        return self.score_all([(prompt_tokens, tokens)])[0]

    @torch.no_grad()
    def score_all(self, completions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """Return log-probabilities (T,) of each of several completions, by one forward pass."""
        sequences = [[*prompt, *tokens[:-1]] for prompt, tokens in completions]
        width = max(map(len, sequences))
        # Pad on the right: attention is causal, so no real token sees the padding.
        padded = torch.tensor(
            [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device=self.device
        )
        hidden = backbone(self.policy.model)(input_ids=padded, use_cache=False).last_hidden_state
        # Compute the logits in parts: with a real vocabulary, those of a long completion would be the largest tensor in
        # memory.
        size = max(1, MAX_LOGITS // vocabulary_size(self.policy))
        logprobs = []
        for states, (prompt, tokens) in zip(hidden, completions, strict=True):
            predicting = states[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
            targets = torch.tensor(tokens, device=self.device).unsqueeze(1)
            parts = [
                torch.log_softmax(self.policy.logits(part) / self.sampling.temperature, dim=-1).gather(1, token)
                for part, token in zip(torch.split(predicting, size), torch.split(targets, size), strict=True)
            ]
            logprobs.append(torch.cat(parts).squeeze(1))
        return logprobs

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; its rollouts start as slots become free.

        Raises:
            ConfigurationError: the prompt is empty or too long for the cache, or the request has interruptions but no
                phrase is set.
        """
        self.sampling.check(request)
        self._queue.append(_Pending(request, 0, request.completions))

    @torch.no_grad()
    def step(self) -> StepReport:
        """Sample one token for every rollout that has a slot, and return the rollouts that ended."""
        decoding = self._slots.active
        finished = self._paused_rollouts.collect()
        new_logits, prefill_tokens, prefill_context, prefilled = self._fill_slots()
        if self._slots.active == 0:
            return StepReport(finished, prefill_tokens, prefill_context, prefilled=prefilled)
        logits, context = self._decode(decoding)
        if new_logits:
            logits = torch.cat([logits, torch.stack(new_logits)])
        tokens, logprobs = sample_tokens(logits, self._slots.next_uniform(), self._temperature())
        forced = self._slots.append(tokens, logprobs, self._version)
        # The phrase that ends thinking never ends a completion or a turn: the model's answer follows it.
        stopped = torch.isin(tokens, self._stop) & ~forced
        if self.sampling.stop_text is not None:
            stopped |= self._holds_stop_text(self.sampling.stop_text) & ~forced
        ending = torch.nonzero(stopped | self._slots.at_limit).flatten().tolist()
        ended, paused = self._slots.release(ending, stopped, self._paused_rollouts.cached)
        self._paused_rollouts.hold(paused)
        # `outside` stays 0: `decodable` refuses models whose attention windows are shorter than a sequence.
        return StepReport(
            finished=[*finished, *ended],
            prefill_tokens=prefill_tokens,
            prefill_context=prefill_context,
            decoded_tokens=decoding,
            decoded_context=context,
            prefilled=prefilled,
            waiting=self._paused_rollouts.reported(paused),
        )

    def _temperature(self) -> float | Tensor:
        """Return the sampling temperature: a number for all slots, or (active, 1) if some requests set it."""
        default = self.sampling.temperature
        requested = [occupant.request.temperature for occupant in self._slots.occupants]
        if all(temperature is None for temperature in requested):
            return default
        chosen = [default if temperature is None else max(temperature, MIN_TEMPERATURE) for temperature in requested]
        return torch.tensor(chosen, dtype=torch.float32, device=self.device).unsqueeze(1)

    def _holds_stop_text(self, stop_text: StopText) -> Tensor:
        """Return a mask (active,) of the rollouts whose last sampled tokens contain a stop text.

        Only tokens that the model has sampled since the last insertion count: an observation may quote a stop text.
        """
        last_tokens = (self._slots.sampled_last(slot, stop_text.window) for slot in range(self._slots.active))
        return torch.tensor([stop_text(tokens) for tokens in last_tokens], dtype=torch.bool, device=self.device)

    def _decode(self, active: int) -> tuple[Tensor, int]:
        """Return next-token logits (active, V) of the first `active` slots, and the number of tokens attended to."""
        if active == 0:
            return torch.empty(0, vocabulary_size(self.policy), device=self.device), 0
        tokens, position = self._slots.last_tokens(active)
        hidden = decode(self.policy.model, self._slots.cache, tokens, position)
        return self.policy.logits(hidden), int((position + 1).sum())

    def _fill_slots(self) -> tuple[list[Tensor], int, int, int]:
        """Give free slots to rollouts that continue after a turn, then to new rollouts.

        Returns:
            Prefill logits of all these rollouts, and the prefill work: tokens, tokens attended to, and number of
            prompts and insertions.
        """
        (tokens, context), self._unreported = self._unreported, [0, 0]
        logits, new_tokens, new_context = self._resume_answered()
        tokens, context, prompts = tokens + new_tokens, context + new_context, len(logits)
        # Slots that are kept for waiting rollouts are not free.
        available = self._slots.size - self._paused_rollouts.held_slots
        while self._slots.active < available and (self._prefilled or self._queue):
            if not self._prefilled:
                new_tokens, new_context = self._prefill()
                tokens, context, prompts = tokens + new_tokens, context + new_context, prompts + len(self._prefilled)
            entry = self._prefilled[0]
            pending = entry.pending
            number = min(available - self._slots.active, pending.end - pending.start)
            self._slots.occupy(pending.request, pending.start, number, entry.keys_values, entry.uniform)
            # All rollouts of a prompt sample their first token from the same logits.
            logits += [entry.logits] * number
            pending.start += number
            if pending.start == pending.end:
                self._prefilled.popleft()
        return logits, tokens, context, prompts

    def _resume_answered(self) -> tuple[list[Tensor], int, int]:
        """Give slots to waiting rollouts for which the environment's answer has arrived.

        Returns:
            Their next-token logits, and the prefill work: tokens, and tokens attended to.
        """
        logits: list[Tensor] = []
        tokens = context = 0
        answered = self._paused_rollouts.answered
        # With waiting_keeps="slot", every one of these rollouts still has its slot, so all continue at once.
        while answered and (room := self._slots.size - self._slots.active) > 0:
            resumed = [answered.popleft() for _ in range(min(room, RECOMPUTED_ROLLOUTS, len(answered)))]
            hidden, caches, (new_tokens, new_context) = extend(
                self.policy.model, [paused.prefill_input for paused in resumed], self.device
            )
            logits += list(self.policy.logits(hidden))
            tokens, context = tokens + new_tokens, context + new_context
            for paused, keys_values in zip(resumed, caches, strict=True):
                self._slots.resume(paused, keys_values, self._version)
        return logits, tokens, context

    def _prefill(self) -> tuple[int, int]:
        """Prefill the next queued prompts; return the work: tokens, and tokens attended to."""
        batch = [self._queue.popleft() for _ in range(min(PREFILL_PROMPTS, len(self._queue)))]
        hidden, caches, computed = encode(
            self.policy.model, [pending.request.prompt_tokens for pending in batch], self.device
        )
        logits = self.policy.logits(hidden)
        for number, pending in enumerate(batch):
            self._prefilled.append(_Prefilled(pending, caches[number], logits[number], self._draw(pending.request)))
        return computed

    def _recompute_cache(self) -> None:
        # Waiting rollouts are recomputed once they continue, because newer weights may be published before that.
        self._paused_rollouts.drop_caches()
        for first in range(0, self._slots.active, RECOMPUTED_ROLLOUTS):
            slots = range(first, min(first + RECOMPUTED_ROLLOUTS, self._slots.active))
            _, caches, computed = encode(
                self.policy.model, [self._slots.cached_tokens(slot) for slot in slots], self.device
            )
            for slot, keys_values in zip(slots, caches, strict=True):
                self._slots.cache.fill(slice(slot, slot + 1), keys_values)
            self._unreported = [total + increment for total, increment in zip(self._unreported, computed, strict=True)]

    def _draw(self, request: GroupRequest) -> Tensor:
        """Draw the uniform numbers (completions, max_new_tokens) that decide all tokens of a group."""
        # The seed is the group's key alone, so slots, batching and resuming do not change the numbers, and a checkpoint
        # need not store them for waiting prompts.
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(request.random_key)))
        return torch.from_numpy(random.random((request.completions, self.sampling.max_new_tokens))).to(self.device)

    def aside(self) -> AbstractContextManager[None]:
        """Move the rollouts in flight to host memory while the context is open, then resume them unchanged."""
        return set_aside(self, self.clear)

    def clear(self) -> None:
        """Drop everything in flight."""
        self._queue.clear()
        self._prefilled.clear()
        self._slots.occupants.clear()
        self._paused_rollouts.clear()
        self._unreported = [0, 0]

    def close(self) -> None:
        """Do nothing: all memory of this generator belongs to this process."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, with the weights and the (possibly stale) cache needed to continue exactly."""
        return {
            "version": self._version,
            # Save the weights even with nothing in flight: the next rollouts may be sampled with them.
            "weights": self.policy.weights(),
            "owed": list(self._unreported),
            "queue": [pending.state() for pending in self._queue],
            "prefilled": [
                {
                    **dict(zip(("request", "started", "end"), entry.pending.state(), strict=False)),
                    "keys_values": [(host(keys), host(values)) for keys, values in entry.keys_values],
                    "logits": host(entry.logits),
                }
                for entry in self._prefilled
            ],
            **self._slots.state_dict(),
            **self._paused_rollouts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`, to continue exactly where it was saved."""
        self._version = state["version"]
        self.policy.load_weights(state["weights"])
        self._unreported = list(state["owed"])
        self._queue = deque(map(_Pending.from_state, state["queue"]))
        self._prefilled = deque()
        for entry in state["prefilled"]:
            pending = _Pending.from_state([entry[name] for name in ("request", "started", "end") if name in entry])
            pairs = [(keys.to(self.device), values.to(self.device)) for keys, values in entry["keys_values"]]
            logits = entry["logits"].to(self.device)
            self._prefilled.append(_Prefilled(pending, pairs, logits, self._draw(pending.request)))
        self._slots.load_state_dict(state)
        self._paused_rollouts.load_state_dict(state, self.device)


def vocabulary_size(policy: GeneratorPolicy) -> int:
    """Return the vocabulary size from the model's configuration."""
    return int(text_config(policy.model).vocab_size)
