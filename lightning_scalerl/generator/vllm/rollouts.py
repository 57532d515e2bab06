"""Rollouts in progress in a vLLM engine, in this process or behind HTTP: their next request, and when they have ended.

A rollout may take several requests. The first ends at the rollout's interruption, if it has one. Each later request
continues after the existing tokens, which keep the log-probabilities and versions they were sampled with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lightning_scalerl.generator.base import (
    FinishedRollout,
    GroupRequest,
    SamplingSettings,
    StepReport,
    request_from,
    request_state,
)
from lightning_scalerl.model.windows import Window, outside
from lightning_scalerl.rollouts.rollout import Rollout, packed, unpacked


@dataclass(eq=False)
class Sampled:
    """Rollout in progress, with its tokens so far."""

    request: GroupRequest
    index: int
    rollout: Rollout = field(
        default_factory=lambda: Rollout(
            tokens=[], generator_logprobs=[], weight_versions=[], forced=[], finish_reason="length"
        )
    )
    looked: bool = False  # the test for the end of thinking was made; it is made once
    computed: int = 0  # tokens whose keys and values the current request has computed

    @property
    def sequence(self) -> list[int]:
        """Token ids of the prompt and the completion so far."""
        return [*self.request.prompt_tokens, *self.rollout.tokens]

    def append(self, tokens: Sequence[int], logprobs: Iterable[float], version: int, forced: bool = False) -> None:
        """Add tokens with their log-probabilities, and the version of the weights that sampled them."""
        self.rollout.tokens += tokens
        self.rollout.generator_logprobs += logprobs
        self.rollout.weight_versions += [version] * len(tokens)
        self.rollout.forced += [forced] * len(tokens)

    def finished(self, reason: str) -> FinishedRollout:
        """Return the rollout as finished, for the given reason."""
        self.rollout.finish_reason = reason
        return FinishedRollout(self.request.key, self.index, self.rollout)


@dataclass
class Computed:
    """Counts of tokens computed by the model, of their context, and of the context outside attention windows."""

    tokens: int = 0
    context: int = 0
    outside: int = 0

    def add(self, start: int, end: int, windows: Sequence[Window]) -> None:
        """Count the tokens of a sequence from `start` up to, but not including, `end`."""
        self.tokens += end - start
        self.context += (end * (end + 1) - start * (start + 1)) // 2
        self.outside += outside(windows, start, end)


def report(finished: list[FinishedRollout], prefill: Computed, decoded: Computed, prefilled: int) -> StepReport:
    """Return the report of a step, with separate counts for prefill and decoding."""
    return StepReport(
        finished=finished,
        prefill_tokens=prefill.tokens,
        prefill_context=prefill.context,
        decoded_tokens=decoded.tokens,
        decoded_context=decoded.context,
        prefilled=prefilled,
        outside=prefill.outside + decoded.outside,
    )


class InFlight:
    """Bookkeeping of a generator that samples with vLLM: waiting and running rollouts, and reports not returned yet.

    Args:
        sampling: the run's sampling settings.
        slots: number of rollouts that run together.
    """

    def __init__(self, sampling: SamplingSettings, slots: int) -> None:
        self.sampling, self._slots = sampling, slots
        # vLLM returns log-probabilities of prompt tokens at temperature 1 only.
        self.can_score = sampling.temperature == 1.0
        self._version = 0
        self._waiting: deque[Sampled] = deque()
        self._ahead: deque[StepReport] = deque()
        # Unreported work of recomputing caches.
        self._owed = Computed()
        self._weights: dict[str, Tensor] = {}
        # State at the time of closing; None while the generator is open.
        self._closed: dict[str, Any] | None = None

    def _started(self) -> list[Sampled]:
        """Return the rollouts that have a slot."""
        raise NotImplementedError

    def _under_way(self) -> list[Sampled]:
        return [*self._started(), *self._waiting]

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of optimizer steps that produced them."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not reported as finished."""
        return len(self._under_way()) + sum(len(report.finished) for report in self._ahead)

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens sampled so far for the rollouts in flight."""
        return sum(len(each.rollout.tokens) for each in self._under_way())

    @property
    def free_slots(self) -> int:
        """Number of slots that no submitted rollout occupies or waits for."""
        return max(0, self._slots - self.in_flight)

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; its rollouts start as slots become free.

        Raises:
            ConfigurationError: the prompt is empty or longer than the run allows, or the request has interruptions but
                no phrase is set.
        """
        self.sampling.check(request)
        self._waiting += [Sampled(request, index) for index in range(request.completions)]

    def _wanted(self, each: Sampled) -> dict[str, Any]:
        """Return the sampling parameters of the request that continues a rollout to its interruption, or to its end."""
        so_far = len(each.rollout.tokens)
        until = each.request.limit(self.sampling.max_new_tokens)
        if each.request.interrupt_at and not each.looked:
            until = min(until, max(each.request.interrupt_at[each.index], so_far + 1))
        # Include the token count in the key: a continued rollout must not draw the numbers of its beginning again.
        seed = np.random.SeedSequence((*each.request.random_key, each.index, so_far)).generate_state(1, np.uint64)
        own = each.request.temperature
        return {
            "temperature": self.sampling.temperature if own is None else own,
            "max_tokens": until - so_far,
            "stop_token_ids": sorted(self.sampling.stop_tokens),
            "ignore_eos": True,
            "logprobs": 0,
            "seed": int(seed[0]) >> 1,
            "detokenize": False,
        }

    def _stopped(self, each: Sampled) -> bool:
        """Return whether a rollout's last tokens contain a stop text."""
        return self.sampling.stop_text is not None and self.sampling.stop_text(each.rollout.tokens)

    def _has_ended(self, each: Sampled, reason: str) -> bool:
        """Return whether the rollout has ended; one past its thinking limit gets the phrase and continues."""
        if reason == "stop":
            return True
        if reason != "length":
            raise RuntimeError(f"vllm ended a request with {reason!r}")
        tokens, limit = each.rollout.tokens, each.request.limit(self.sampling.max_new_tokens)
        if len(tokens) < limit and not each.looked:
            each.looked = True
            if not self.sampling.thinking_ended(list(tokens)):
                phrase = list(self.sampling.phrase[: limit - len(tokens)])
                # Forced tokens are not sampled and count in neither loss nor ratio: record 0 as log-probability.
                each.append(phrase, [0.0] * len(phrase), self._version, forced=True)
        return len(tokens) >= limit

    def _state(self) -> dict[str, Any]:
        """Return everything in flight and the weights, for a checkpoint; keys and values are recomputed on resuming."""
        under_way = self._under_way()
        ahead = [finished for report in self._ahead for finished in report.finished]
        return {
            "version": self._version,
            "weights": dict(self._weights),
            "under_way": [(request_state(each.request), each.index, each.looked) for each in under_way],
            "finished": [(finished.key, finished.index) for finished in ahead],
            "rollouts": packed([each.rollout for each in under_way] + [finished.rollout for finished in ahead]),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Queue the rollouts of a saved state with their tokens; rollouts that had ended are reported first."""
        rollouts = iter(unpacked(state["rollouts"]))
        self._waiting += [
            Sampled(request_from(request), index, next(rollouts), looked)
            for request, index, looked in state["under_way"]
        ]
        if ended := [FinishedRollout(key, index, next(rollouts)) for key, index in state["finished"]]:
            self._ahead.append(StepReport(ended))
