"""Rollouts under way in an engine of vLLM, in this process or behind HTTP: what to ask next, and when one is over.

A rollout is sampled by one request after another: the first ends at its interruption, if it has one, and each that
follows goes on behind the tokens that are there, whose log-probabilities and versions stay those of their sampling.
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
    """Rollout under way, with its tokens so far."""

    request: GroupRequest
    index: int
    rollout: Rollout = field(
        default_factory=lambda: Rollout(
            tokens=[], generator_logprobs=[], weight_versions=[], forced=[], finish_reason="length"
        )
    )
    looked: bool = False  # whether its thinking has ended has been asked, once
    computed: int = 0  # tokens whose keys and values its request has, of this version of it

    @property
    def sequence(self) -> list[int]:
        """Token ids of the prompt, and of the completion so far."""
        return [*self.request.prompt_tokens, *self.rollout.tokens]

    def append(self, tokens: Sequence[int], logprobs: Iterable[float], version: int, forced: bool = False) -> None:
        """Add tokens, with the log-probabilities and the version of the weights that they were sampled under."""
        self.rollout.tokens += tokens
        self.rollout.generator_logprobs += logprobs
        self.rollout.weight_versions += [version] * len(tokens)
        self.rollout.forced += [forced] * len(tokens)

    def finished(self, reason: str) -> FinishedRollout:
        """Return the rollout as one that has ended."""
        self.rollout.finish_reason = reason
        return FinishedRollout(self.request.key, self.index, self.rollout)


@dataclass
class Computed:
    """Counts of tokens that went through the model, of their context, and of context outside attention windows."""

    tokens: int = 0
    context: int = 0
    outside: int = 0

    def add(self, start: int, end: int, windows: Sequence[Window]) -> None:
        """Count the tokens of a sequence from `start` to before `end`."""
        self.tokens += end - start
        self.context += (end * (end + 1) - start * (start + 1)) // 2
        self.outside += outside(windows, start, end)


def report(finished: list[FinishedRollout], prefill: Computed, decoded: Computed, prefilled: int) -> StepReport:
    """Return what a step has done, prefill and decoding counted apart."""
    left_out = prefill.outside + decoded.outside
    return StepReport(
        finished=finished,
        prefill_tokens=prefill.tokens,
        prefill_context=prefill.context,
        decoded_tokens=decoded.tokens,
        decoded_context=decoded.context,
        prefilled=prefilled,
        outside=left_out,
    )


class Sampling:
    """Rules that follow from the settings of sampling for rollouts under way at vLLM.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings

    def queue(self, request: GroupRequest) -> list[Sampled]:
        """Return a group's rollouts, before their first token.

        Raises:
            ConfigurationError: the prompt is empty or longer than the engine was made for, or an interruption is
                asked for and there is no phrase.
        """
        self.settings.check(request)
        return [Sampled(request, index) for index in range(request.completions)]

    def wanted(self, each: Sampled) -> dict[str, Any]:
        """Return the sampling parameters of the request that takes a rollout to its end, or to its interruption."""
        so_far = len(each.rollout.tokens)
        until = each.request.limit(self.settings.max_new_tokens)
        if each.request.interrupt_at and not each.looked:
            until = min(until, max(each.request.interrupt_at[each.index], so_far + 1))
        # With the tokens so far in the key: a rollout that goes on must not draw the numbers of its beginning again.
        seed = np.random.SeedSequence((*each.request.random_key, each.index, so_far)).generate_state(1, np.uint64)
        return {
            "temperature": self.settings.temperature,
            "max_tokens": until - so_far,
            "stop_token_ids": sorted(self.settings.stop_tokens),
            "ignore_eos": True,
            "logprobs": 0,
            "seed": int(seed[0]) >> 1,
            "detokenize": False,
        }

    def stopped(self, each: Sampled) -> bool:
        """Return whether a rollout's last tokens hold a text that ends it."""
        return self.settings.stop_text is not None and self.settings.stop_text(each.rollout.tokens)

    def ended(self, each: Sampled, reason: str, version: int) -> bool:
        """Return whether the rollout is over; one past its thinking limit gets the phrase, and goes on."""
        if reason == "stop":
            return True
        if reason != "length":
            raise RuntimeError(f"vllm ended a request with {reason!r}")
        tokens, limit = each.rollout.tokens, each.request.limit(self.settings.max_new_tokens)
        if len(tokens) < limit and not each.looked:
            each.looked = True
            if not self.settings.thinking_ended(list(tokens)):
                phrase = list(self.settings.phrase[: limit - len(tokens)])
                # Nothing was sampled: forced tokens are in neither loss nor ratio, and have no log-probability.
                each.append(phrase, [0.0] * len(phrase), version, forced=True)
        return len(tokens) >= limit


class InFlight:
    """Books of a generator that samples with vLLM: rollouts that wait, those under way, and reports not taken yet.

    Args:
        sampling: of the run.
        slots: number of rollouts that are under way together.
    """

    def __init__(self, sampling: SamplingSettings, slots: int) -> None:
        self.sampling, self._sampling, self._slots = sampling, Sampling(sampling), slots
        # vLLM gives log-probabilities of prompt tokens at temperature 1 only.
        self.can_score = sampling.temperature == 1.0
        self._version = 0
        self._waiting: deque[Sampled] = deque()
        self._ahead: deque[StepReport] = deque()
        # Work of recomputing caches, not reported yet.
        self._owed = Computed()
        self._weights: dict[str, Tensor] = {}
        # The last state, once the generator is closed.
        self._closed: dict[str, Any] | None = None

    def _started(self) -> list[Sampled]:
        """Return the rollouts that have a slot."""
        raise NotImplementedError

    def _under_way(self) -> list[Sampled]:
        return [*self._started(), *self._waiting]

    @property
    def version(self) -> int:
        """Version of the weights in use: the optimizer steps behind them."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not reported as finished."""
        return len(self._under_way()) + sum(len(report.finished) for report in self._ahead)

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens that rollouts in flight have so far."""
        return sum(len(each.rollout.tokens) for each in self._under_way())

    @property
    def free_slots(self) -> int:
        """Number of slots that no rollout has or waits for."""
        return max(0, self._slots - self.in_flight)

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; its rollouts start as slots become free.

        Raises:
            ConfigurationError: the prompt is empty or longer than the run allows, or an interruption is asked for and
                there is no phrase.
        """
        self._waiting += self._sampling.queue(request)

    def _state(self) -> dict[str, Any]:
        """Return everything in flight and the weights, for a checkpoint."""
        ahead = [finished for report in self._ahead for finished in report.finished]
        return state_of(self._under_way(), ahead, self._weights, self._version)

    def _restore(self, state: dict[str, Any]) -> None:
        """Queue the rollouts of a state, with the tokens they had; what had ended is reported first."""
        under_way, ended = from_state(state)
        self._waiting += under_way
        if ended:
            self._ahead.append(
                StepReport(finished=ended, prefill_tokens=0, prefill_context=0, decoded_tokens=0, decoded_context=0)
            )


def state_of(
    under_way: Sequence[Sampled], ahead: Sequence[FinishedRollout], weights: dict[str, Tensor], version: int
) -> dict[str, Any]:
    """Return everything in flight and the weights, for a checkpoint; keys and values are recomputed on resuming."""
    rollouts = [each.rollout for each in under_way] + [finished.rollout for finished in ahead]
    return {
        "version": version,
        "weights": dict(weights),
        "under_way": [(request_state(each.request), each.index, each.looked) for each in under_way],
        "finished": [(finished.key, finished.index) for finished in ahead],
        "rollouts": packed(rollouts),
    }


def from_state(state: dict[str, Any]) -> tuple[list[Sampled], list[FinishedRollout]]:
    """Return the rollouts under way of a state, with the tokens they had, and those that had ended."""
    rollouts = iter(unpacked(state["rollouts"]))
    under_way = [
        Sampled(request_from(request), index, next(rollouts), looked) for request, index, looked in state["under_way"]
    ]
    return under_way, [FinishedRollout(key, index, next(rollouts)) for key, index in state["finished"]]
