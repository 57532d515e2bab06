"""Rollouts in progress in a vLLM engine, in this process or behind HTTP: their next request, and when they have ended.

A rollout may take several requests. The first one ends at the rollout's interruption point, if it has one, or at the
end of its first turn. Each later request continues after the existing tokens, which keep the log-probabilities and
versions they were sampled with.
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
from lightning_scalerl.rollouts.rollout import Rollout, Source, packed, unpack_rollouts


@dataclass(eq=False)
class ActiveRollout:
    """Rollout in progress, with its tokens so far.

    Attributes:
        insertions: the rollout's insertion rules.
        rollout: the tokens so far, with their log-probabilities, versions and sources.
        thinking_checked: whether the test for the end of thinking was made; it is made once.
        computed: number of tokens whose keys and values the current request has computed.
    """

    insertions: Insertions
    rollout: Rollout = field(
        default_factory=lambda: Rollout(
            tokens=[], generator_logprobs=[], weight_versions=[], sources=[], finish_reason="length"
        )
    )
    thinking_checked: bool = False
    computed: int = 0

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
        """Add tokens that were not sampled, with 0 as log-probability; they enter neither the loss nor the ratio."""
        self.append(tokens, [0.0] * len(tokens), version)
        start = len(self.rollout.tokens) - len(tokens)
        self.rollout.sources[start:] = [source] * len(tokens)

    def waiting_report(self) -> WaitingRollout:
        """Return the report that the rollout waits for an insertion, with a copy of it."""
        return self.insertions.waiting_report(self.rollout)

    def finish(self, reason: str) -> FinishedRollout:
        """Set the finish reason ("stop" or "length") and return the finished rollout."""
        self.rollout.finish_reason = reason
        return FinishedRollout(self.request.key, self.index, self.rollout)


@dataclass
class StepEnds:
    """Rollouts that ended in one step, and rollouts that began to wait for an insertion."""

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


def report(ended: StepEnds, prefill: Computed, decoded: Computed, prefilled: int) -> StepReport:
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


class VLLMBookkeeping:
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
        self._waiting: deque[ActiveRollout] = deque()
        self._report_queue: deque[StepReport] = deque()
        # Rollouts that wait for an insertion. They have no slot; vLLM's prefix cache may keep their keys and values.
        self._between_turns: dict[tuple[int, int], ActiveRollout] = {}
        # Work of recomputing caches that no report contains yet.
        self._unreported = Computed()
        self._weights: dict[str, Tensor] = {}
        # State at the time of closing; None while the generator is open.
        self._closed: dict[str, Any] | None = None

    def _running_rollouts(self) -> list[ActiveRollout]:
        """Return the rollouts that have a slot."""
        raise NotImplementedError

    def _unfinished(self) -> list[ActiveRollout]:
        """Return the rollouts that have a slot or wait for one."""
        return [*self._running_rollouts(), *self._waiting]

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of optimizer steps that produced them."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not reported as finished."""
        return (
            len(self._unfinished())
            + len(self._between_turns)
            + sum(len(report.finished) for report in self._report_queue)
        )

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens sampled so far for the rollouts in flight."""
        return sum(len(active.rollout.tokens) for active in (*self._unfinished(), *self._between_turns.values()))

    @property
    def free_slots(self) -> int:
        """Number of slots that no submitted rollout occupies or waits for."""
        return max(0, self._slots - self.in_flight + len(self._between_turns))

    @property
    def idle(self) -> bool:
        """True if `step` has nothing to do or report: everything in flight waits for an insertion."""
        return not (self._unfinished() or self._report_queue)

    @property
    def waiting(self) -> list[WaitingRollout]:
        """All rollouts that wait for `insert` or `end`, in the order in which they began to wait."""
        return [active.waiting_report() for active in self._between_turns.values()]

    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Insert the tokens of an environment's answer into a waiting rollout and continue it.

        Raises:
            KeyError: the rollout does not wait.
            ValueError: a token is not in the vocabulary, or there is no room for the tokens.
        """
        check_answer(tokens, self._vocabulary)
        active = self._waiting_rollout(key, index)
        active.insertions.record_answer(len(active.rollout.tokens), tokens)
        active.insert(tokens, self._version, Source.ENVIRONMENT)
        self._waiting.appendleft(self._between_turns.pop((key, index)))

    def end(self, key: int, index: int, truncated: bool = False) -> None:
        """End a waiting rollout; a later step reports it as finished.

        Raises:
            KeyError: the rollout does not wait.
        """
        active = self._waiting_rollout(key, index)
        del self._between_turns[key, index]
        self._report_queue.append(StepReport([active.finish("length" if truncated else active.rollout.finish_reason)]))

    def restart(self, key: int, index: int) -> None:
        """Forget the tokens of a waiting rollout and sample it again from its prompt, with the same random numbers.

        Raises:
            KeyError: the rollout does not wait.
        """
        request = self._waiting_rollout(key, index).request
        del self._between_turns[key, index]
        self._waiting.appendleft(ActiveRollout(self._insertions(request, index)))

    def _waiting_rollout(self, key: int, index: int) -> ActiveRollout:
        if (key, index) not in self._between_turns:
            raise KeyError(f"rollout {index} of group {key} does not wait for an insertion")
        return self._between_turns[key, index]

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; its rollouts start as slots become free.

        Raises:
            ConfigurationError: the prompt is empty or longer than the run allows, or the request has interruptions but
                no phrase is set.
        """
        self.sampling.check(request)
        self._waiting += [ActiveRollout(self._insertions(request, index)) for index in range(request.completions)]

    def _insertions(self, request: GroupRequest, index: int) -> Insertions:
        return Insertions(request, index, self.sampling)

    def _sampling_parameters(self, active: ActiveRollout) -> dict[str, Any]:
        """Return the sampling parameters for a rollout's next request.

        The request ends at the rollout's interruption point or at the limit of its turn, whichever comes first.
        """
        length = len(active.rollout.tokens)
        limit = active.insertions.turn_limit
        if not active.thinking_checked:
            limit = min(limit, max(active.insertions.interruption_point, length + 1))
        # Include the token count in the key: a continued rollout must not reuse the random numbers of its beginning.
        seed = np.random.SeedSequence((*active.request.random_key, active.index, length)).generate_state(1, np.uint64)
        temperature = active.request.temperature
        return {
            "temperature": self.sampling.temperature if temperature is None else temperature,
            "max_tokens": limit - length,
            "stop_token_ids": sorted(self.sampling.stop_tokens),
            "ignore_eos": True,
            "logprobs": 0,
            "seed": int(seed[0]) >> 1,
            "detokenize": False,
        }

    def _has_stop_text(self, active: ActiveRollout) -> bool:
        """Return whether a rollout's last tokens contain a stop text."""
        # Ignore tokens up to the last observation that was inserted, because an observation may quote a stop text.
        stop_text = self.sampling.stop_text
        return stop_text is not None and stop_text(active.rollout.sampled_last(stop_text.window))

    def _turn_ends(self, active: ActiveRollout, reason: str, ended: StepEnds) -> bool:
        """Handle the end of a rollout's request: force the end of thinking if it is due, or end the turn.

        Args:
            active: the rollout.
            reason: reason for the request's end, "stop" or "length".
            ended: gets the rollout if its turn has ended.

        Returns:
            Whether the turn has ended; otherwise the rollout needs another request.
        """
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vllm ended a request with {reason!r}")
        rules, length = active.insertions, len(active.rollout.tokens)
        if reason == "length" and not active.thinking_checked and rules.interruption_point <= length < rules.limit:
            active.thinking_checked = True
            phrase = rules.phrase(list(active.rollout.tokens))
            active.insert(phrase[: rules.limit - length], self._version, Source.FORCED)
        decision = rules.decide_next(len(active.rollout.tokens), reason == "stop")
        if decision is Next.GO_ON:
            return False
        active.rollout.finish_reason = reason
        if decision is Next.WAIT:
            self._between_turns[rules.rollout_id] = active
            ended.waiting.append(active.waiting_report())
        else:
            ended.finished.append(active.finish(reason))
        return True

    def _state(self) -> dict[str, Any]:
        """Return everything in flight and the weights, for a checkpoint; keys and values are recomputed on resuming."""
        unfinished, waiting = self._unfinished(), list(self._between_turns.values())
        finished = [entry for report in self._report_queue for entry in report.finished]
        rollouts = [*(active.rollout for active in (*unfinished, *waiting)), *(entry.rollout for entry in finished)]
        return {
            "version": self._version,
            "weights": dict(self._weights),
            "under_way": [_state_of_rollout(active) for active in unfinished],
            **({"waiting": [_state_of_rollout(active) for active in waiting]} if waiting else {}),
            "finished": [(entry.key, entry.index) for entry in finished],
            "rollouts": packed(rollouts),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Queue the rollouts of a saved state with their tokens; rollouts that had ended are reported first."""
        rollouts = iter(unpack_rollouts(state["rollouts"]))

        def restored(entries: Iterable[Any]) -> list[ActiveRollout]:
            return [
                ActiveRollout(
                    Insertions.from_state((request, index, *answers), self.sampling), next(rollouts), thinking_checked
                )
                for request, index, thinking_checked, *answers in entries
            ]

        self._waiting += restored(state["under_way"])
        self._between_turns = {active.insertions.rollout_id: active for active in restored(state.get("waiting", ()))}
        ended = [FinishedRollout(key, index, next(rollouts)) for key, index in state["finished"]]
        if ended:
            self._report_queue.append(StepReport(ended))

    @contextmanager
    def _keep_reports(self, aside: AbstractContextManager[None]) -> Iterator[None]:
        """Wrap `aside` so that rollouts that began to wait before it are still reported after it."""
        # A saved state lacks these reports, because a caller of `load_state_dict` reads `waiting` instead. A caller of
        # `aside` does not read it.
        unreported = [active for report in self._report_queue for active in report.waiting]
        with aside:
            yield
        if unreported:
            self._report_queue.append(StepReport((), waiting=unreported))


def _state_of_rollout(active: ActiveRollout) -> tuple[Any, ...]:
    """Return a rollout in progress as plain values for a checkpoint, without its tokens."""
    request, index, *answers = active.insertions.state()
    return (request, index, active.thinking_checked, *answers)
