"""Rollouts in progress in a vLLM engine, in this process or behind HTTP: their next request, and when they have ended.

A rollout may take several requests. The first ends at the rollout's interruption or at the end of its first turn, if it
has one. Each later request continues after the existing tokens, which keep the log-probabilities and versions they were
sampled with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lightning_scalerl.generator.base import (
    FinishedRollout,
    GroupRequest,
    SamplingSettings,
    StepReport,
    WaitingRollout,
)
from lightning_scalerl.generator.insertion import Insertions, Next, check_answer
from lightning_scalerl.model.windows import Window, outside
from lightning_scalerl.rollouts.rollout import Rollout, Source, packed, unpacked


@dataclass(eq=False)
class Sampled:
    """Rollout in progress, with its tokens so far."""

    insertions: Insertions
    rollout: Rollout = field(
        default_factory=lambda: Rollout(
            tokens=[], generator_logprobs=[], weight_versions=[], sources=[], finish_reason="length"
        )
    )
    looked: bool = False  # whether the test for the end of thinking was made; it is made once
    computed: int = 0  # tokens whose keys and values the current request has computed

    @property
    def request(self) -> GroupRequest:
        """Request of the rollout's group."""
        return self.insertions.request

    @property
    def index(self) -> int:
        """Number of the rollout in its group."""
        return self.insertions.index

    @property
    def sequence(self) -> list[int]:
        """Token ids of the prompt and the completion so far."""
        return [*self.request.prompt_tokens, *self.rollout.tokens]

    def append(self, tokens: Sequence[int], logprobs: Iterable[float], version: int) -> None:
        """Add tokens with their log-probabilities, and the version of the weights that sampled them."""
        self.rollout.tokens += tokens
        self.rollout.generator_logprobs += logprobs
        self.rollout.weight_versions += [version] * len(tokens)
        self.rollout.sources += [Source.SAMPLED] * len(tokens)

    def insert(self, tokens: Sequence[int], version: int, source: Source) -> None:
        """Add tokens that were not sampled, with 0 as log-probability: they count in neither loss nor ratio."""
        self.append(tokens, [0.0] * len(tokens), version)
        start = len(self.rollout.tokens) - len(tokens)
        self.rollout.sources[start:] = [source] * len(tokens)

    def waiting(self) -> WaitingRollout:
        """Return a copy of the rollout for a report that it waits."""
        return self.insertions.waiting(self.rollout)

    def finished(self, reason: str) -> FinishedRollout:
        """Return the rollout as finished, for the given reason."""
        self.rollout.finish_reason = reason
        return FinishedRollout(self.request.key, self.index, self.rollout)


@dataclass
class Ended:
    """Rollouts that ended, and rollouts that ended a turn, in one step."""

    finished: list[FinishedRollout] = field(default_factory=list)
    waiting: list[WaitingRollout] = field(default_factory=list)


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


def report(ended: Ended, prefill: Computed, decoded: Computed, prefilled: int) -> StepReport:
    """Return the report of a step, with separate counts for prefill and decoding."""
    return StepReport(
        finished=ended.finished,
        waiting=ended.waiting,
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
        vocabulary: number of tokens that the model knows.
    """

    def __init__(self, sampling: SamplingSettings, slots: int, vocabulary: int) -> None:
        self.sampling, self._slots, self._vocabulary = sampling, slots, vocabulary
        # vLLM returns log-probabilities of prompt tokens at temperature 1 only.
        self.can_score = sampling.temperature == 1.0
        self._version = 0
        self._waiting: deque[Sampled] = deque()
        self._ahead: deque[StepReport] = deque()
        # Rollouts that wait for an insertion. They have no slot; vLLM's prefix cache may keep their keys and values.
        self._held: dict[tuple[int, int], Sampled] = {}
        # Unreported work of recomputing caches.
        self._unreported = Computed()
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
        return len(self._under_way()) + len(self._held) + sum(len(report.finished) for report in self._ahead)

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens sampled so far for the rollouts in flight."""
        return sum(len(each.rollout.tokens) for each in (*self._under_way(), *self._held.values()))

    @property
    def free_slots(self) -> int:
        """Number of slots that no submitted rollout occupies or waits for."""
        return max(0, self._slots - self.in_flight + len(self._held))

    @property
    def idle(self) -> bool:
        """Return whether `step` has nothing to do or to report: everything in flight waits."""
        return not (self._under_way() or self._ahead)

    @property
    def waiting(self) -> list[WaitingRollout]:
        """All rollouts that wait for `insert` or `end`, in the order in which they began to wait."""
        return [each.waiting() for each in self._held.values()]

    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Continue a waiting rollout behind these tokens.

        Raises:
            KeyError: the rollout does not wait.
            ValueError: a token is not in the vocabulary, or there is no room for the tokens.
        """
        check_answer(tokens, self._vocabulary)
        each = self._held_rollout(key, index)
        each.insertions.answer(len(each.rollout.tokens), tokens)
        each.insert(tokens, self._version, Source.ENVIRONMENT)
        self._waiting.appendleft(self._held.pop((key, index)))

    def end(self, key: int, index: int, truncated: bool = False) -> None:
        """End a waiting rollout; a later step reports it as finished.

        Raises:
            KeyError: the rollout does not wait.
        """
        each = self._held_rollout(key, index)
        del self._held[key, index]
        self._ahead.append(StepReport([each.finished("length" if truncated else each.rollout.finish_reason)]))

    def restart(self, key: int, index: int) -> None:
        """Forget the tokens of a waiting rollout and sample it again from its prompt, with the same random numbers.

        Raises:
            KeyError: the rollout does not wait.
        """
        request = self._held_rollout(key, index).request
        del self._held[key, index]
        self._waiting.appendleft(Sampled(self._rules(request, index)))

    def _held_rollout(self, key: int, index: int) -> Sampled:
        if (key, index) not in self._held:
            raise KeyError(f"rollout {index} of group {key} does not wait for an insertion")
        return self._held[key, index]

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; its rollouts start as slots become free.

        Raises:
            ConfigurationError: the prompt is empty or longer than the run allows, or the request has interruptions but
                no phrase is set.
        """
        self.sampling.check(request)
        self._waiting += [Sampled(self._rules(request, index)) for index in range(request.completions)]

    def _rules(self, request: GroupRequest, index: int) -> Insertions:
        return Insertions(request, index, self.sampling)

    def _sampling_parameters(self, each: Sampled) -> dict[str, Any]:
        """Return the sampling parameters of the request that continues a rollout to its interruption or turn's end."""
        so_far = len(each.rollout.tokens)
        until = each.insertions.turn_limit
        if not each.looked:
            until = min(until, max(each.insertions.point, so_far + 1))
        # Include the token count in the key: a continued rollout must not reuse the random numbers of its beginning.
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

    def _turn_ends(self, each: Sampled, reason: str, ended: Ended) -> bool:
        """Return whether a rollout's turn has ended; if so add it to `ended`, else insert the phrase if it is due.

        Args:
            each: the rollout, whose request has ended.
            reason: "stop" or "length", as the request has ended.
            ended: the step's rollouts that ended or wait.
        """
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vllm ended a request with {reason!r}")
        rules, length = each.insertions, len(each.rollout.tokens)
        if reason == "length" and not each.looked and rules.point <= length < rules.limit:
            each.looked = True
            phrase = rules.phrase(list(each.rollout.tokens))
            each.insert(phrase[: rules.limit - length], self._version, Source.FORCED)
        following = rules.after(len(each.rollout.tokens), reason == "stop")
        if following is Next.GO_ON:
            return False
        each.rollout.finish_reason = reason
        if following is Next.WAIT:
            self._held[rules.place] = each
            ended.waiting.append(each.waiting())
        else:
            ended.finished.append(each.finished(reason))
        return True

    def _state(self) -> dict[str, Any]:
        """Return everything in flight and the weights, for a checkpoint; keys and values are recomputed on resuming."""
        under_way, held = self._under_way(), list(self._held.values())
        ahead = [finished for report in self._ahead for finished in report.finished]
        rollouts = [*(each.rollout for each in (*under_way, *held)), *(finished.rollout for finished in ahead)]
        return {
            "version": self._version,
            "weights": dict(self._weights),
            "under_way": [_state_of_rollout(each) for each in under_way],
            **({"waiting": [_state_of_rollout(each) for each in held]} if held else {}),
            "finished": [(finished.key, finished.index) for finished in ahead],
            "rollouts": packed(rollouts),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Queue the rollouts of a saved state with their tokens; rollouts that had ended are reported first."""
        rollouts = iter(unpacked(state["rollouts"]))

        def restored(entries: Iterable[Any]) -> list[Sampled]:
            return [
                Sampled(Insertions.from_state((request, index, *answers), self.sampling), next(rollouts), looked)
                for request, index, looked, *answers in entries
            ]

        self._waiting += restored(state["under_way"])
        self._held = {each.insertions.place: each for each in restored(state.get("waiting", ()))}
        ended = [FinishedRollout(key, index, next(rollouts)) for key, index in state["finished"]]
        if ended:
            self._ahead.append(StepReport(ended))

    @contextmanager
    def _reports_kept(self, aside: AbstractContextManager[None]) -> Iterator[None]:
        """Wrap `aside` so that rollouts that began to wait before it are still reported after it."""
        # A saved state lacks these reports, because the caller of `load_state_dict` reads `waiting`; that of `aside`
        # does not.
        unreported = [each for report in self._ahead for each in report.waiting]
        with aside:
            yield
        if unreported:
            self._ahead.append(StepReport((), waiting=unreported))


def _state_of_rollout(each: Sampled) -> tuple[Any, ...]:
    """Return a rollout in progress as plain values, without its tokens."""
    request, index, *answers = each.insertions.state()
    return (request, index, each.looked, *answers)
