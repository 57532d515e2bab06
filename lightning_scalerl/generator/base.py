"""Protocol of a generator: it takes rollout requests and weights, and returns finished rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Rollout

# A function that returns the trainer's current state dict.
Weights = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class GroupRequest:
    """Request for `completions` rollouts of one prompt.

    Attributes:
        key: identifies the group among all in flight (`Group.admission`).
        prompt_tokens: token ids of the prompt.
        completions: number of rollouts to sample.
        random_key: seeds the sampling. The same key gives the same random numbers regardless of the other rollouts in
            flight, so scheduling, batching and resuming affect the samples only through the weights.
        interrupt_at: for each rollout, the number of thinking tokens after which the end of thinking is forced;
            empty for never.
        max_new_tokens: token limit of this request; 0 for the generator's limit.
        temperature: sampling temperature of this request, 0 for the most likely token; None for the generator's.
        waits: for conversations: whether each rollout waits for `insert` or `end` after every turn, and also at its
            token limit. Such a rollout never ends by itself.
        turn_tokens: token limit of each turn; 0 for none.
    """

    key: int
    prompt_tokens: tuple[int, ...]
    completions: int
    random_key: tuple[int, ...]
    interrupt_at: tuple[int, ...] = ()
    max_new_tokens: int = 0
    temperature: float | None = None
    waits: bool = False
    turn_tokens: int = 0

    def limit(self, generator_limit: int) -> int:
        """Return the token limit of the request's completions; never more than the generator's limit."""
        return min(self.max_new_tokens or generator_limit, generator_limit)


@dataclass(frozen=True)
class FinishedRollout:
    """Rollout that ended in this step: rollout `index` of group `key`."""

    key: int
    index: int
    rollout: Rollout


@dataclass(frozen=True)
class WaitingRollout:
    """Rollout `index` of group `key` that has ended a turn and waits for `insert` (an environment's answer) or `end`.

    Attributes:
        key, index: the group's key and the rollout's index in the group.
        rollout: copy of the rollout so far. Its finish_reason is that of the turn: "stop", or "length" at the token
            limit of the turn or of the completion.
        room: number of tokens that the completion may still get. An answer must have fewer tokens than this, so that at
            least one token is sampled after it. At 0 only `end` and `restart` are possible.
        answers: number of answers inserted so far. It returns to 0 if the rollout is restarted or its engine is lost.
    """

    key: int
    index: int
    rollout: Rollout
    room: int
    answers: int = 0


@dataclass(frozen=True)
class StepReport:
    """Report of one generator step: the rollouts that ended, and counts of the work done, for the compute meter.

    Attributes:
        finished: rollouts that ended in this step.
        prefill_tokens: prompt tokens, inserted tokens of environments, and tokens whose keys and values were
            recomputed.
        prefill_context: number of attended tokens, summed over the tokens of the prefill, ignoring attention windows.
        decoded_tokens: tokens computed in decoding passes; a rollout's first token comes from its prefill instead.
        decoded_context: number of attended tokens, summed over the decoded tokens, ignoring attention windows.
        prefilled: number of prompts and insertions whose last position went through the output head. A prompt that
            rollouts share counts once.
        outside: number of attended tokens in both contexts that attention windows exclude, summed over layers
            (`model.windows.outside`).
        lost_tokens: tokens of unfinished rollouts whose process died. They are sampled again.
        waiting: rollouts that ended a turn in this step and wait for `insert` or `end`.
    """

    finished: Sequence[FinishedRollout]
    prefill_tokens: int = 0
    prefill_context: int = 0
    decoded_tokens: int = 0
    decoded_context: int = 0
    prefilled: int = 0
    outside: int = 0
    lost_tokens: int = 0
    waiting: Sequence[WaitingRollout] = field(default=(), kw_only=True)

    @property
    def computed(self) -> tuple[int, ...]:
        """All counts of work done, in field order. Counts of several reports can be added."""
        return tuple(getattr(self, name) for name in COUNTS)


# Fields of `StepReport` that count computed work, in order.
COUNTS = tuple(entry.name for entry in fields(StepReport) if entry.name not in ("finished", "lost_tokens", "waiting"))


def zero_counts() -> list[int]:
    """Return one zero per count of `StepReport.computed`: the start of a running sum."""
    return [0] * len(COUNTS)


class Generator(Protocol):
    """Generator that advances every rollout in flight by one token with each `step`."""

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not finished."""

    @property
    def free_slots(self) -> int:
        """Number of further rollouts that would start in the next step if submitted now."""

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of optimizer steps that produced them."""

    def submit(self, request: GroupRequest) -> None:
        """Queue a group for sampling; it starts as slots become free."""

    def step(self) -> StepReport:
        """Sample one token for every rollout that has a slot; freed slots are refilled at once."""

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight continue with their existing keys and values, or with recomputed ones if `recompute_kv`.
        Rollouts without a token yet are prefilled again in either case.
        """

    def aside(self) -> AbstractContextManager[None]:
        """Pause the rollouts in flight while the context is open, for other work such as an evaluation.

        At the end of the context they resume with the weights they had before.
        """

    def close(self) -> None:
        """Release resources outside this process's memory, such as child processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in flight from a checkpoint."""


class TurnGenerator(Generator, Protocol):
    """Generator whose rollouts may wait between turns (`GroupRequest.waits`). Waiting rollouts are in flight.

    `step` reports each wait once. It does not report waits that `load_state_dict` has restored: read these from
    `waiting`.
    """

    @property
    def idle(self) -> bool:
        """True if `step` has nothing to do or report until a waiting rollout is continued or ended.

        This can hold while other rollouts are queued, because waiting rollouts may keep all slots.
        """

    @property
    def waiting(self) -> list[WaitingRollout]:
        """All rollouts that wait for `insert` or `end`, in the order in which they began to wait."""

    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Insert the tokens of an environment's answer into a waiting rollout and continue it.

        Raises:
            KeyError: the rollout does not wait.
            ValueError: a token is not in the vocabulary, or the answer has `WaitingRollout.room` tokens or more. The
                rollout then still waits.
        """

    def end(self, key: int, index: int, truncated: bool = False) -> None:
        """End a waiting rollout; the next step reports it as finished.

        Its finish_reason is that of its last turn, or "length" if it is truncated.

        Raises:
            KeyError: the rollout does not wait.
        """

    def restart(self, key: int, index: int) -> None:
        """Forget the tokens of a waiting rollout and sample it again from its prompt.

        Raises:
            KeyError: the rollout does not wait.
        """


@contextmanager
def set_aside(generator: Generator, clear: Callable[[], None]) -> Iterator[None]:
    """Implement `Generator.aside`: save everything in flight, call `clear`, and restore at the end."""
    state = generator.state_dict()
    clear()
    try:
        yield
    finally:
        generator.load_state_dict(state)


@dataclass(frozen=True)
class EndOfThinking:
    """Test whether a completion's text contains the marker that ends its thinking."""

    tokenizer: Any
    marker: str

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of these completion tokens contains the marker."""
        return self.marker in self.tokenizer.decode(list(tokens))


class StopText(Protocol):
    """Test for stop texts in the last sampled tokens of a completion (at most `window` tokens)."""

    @property
    def window(self) -> int:
        """Number of trailing tokens that the test needs."""

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens contain a stop text."""


def never_ends_thinking(tokens: list[int]) -> bool:
    """Return False: the default of `SamplingSettings.thinking_ended`, for models without an end-of-thinking marker."""
    return False


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings, the same class for every generator.

    Attributes:
        max_prompt_tokens, max_new_tokens: longest prompt and completion, in tokens.
        stop_tokens: token ids that end a completion; the sampled stop token stays in the completion as its last token.
        temperature: sampling temperature.
        phrase: token ids that end the thinking; they are forced into a rollout whose thinking is interrupted.
        thinking_ended: tests whether a completion has already ended its thinking; if so it is not interrupted.
        stop_text: tests a completion's last tokens for a stop text; None if there are no stop texts.
    """

    max_prompt_tokens: int
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()
    temperature: float = 1.0
    phrase: Sequence[int] = ()
    thinking_ended: Callable[[list[int]], bool] = never_ends_thinking
    stop_text: StopText | None = None

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest sequence: prompt plus completion."""
        return self.max_prompt_tokens + self.max_new_tokens

    def check(self, request: GroupRequest) -> None:
        """Check that a generator with these settings can serve a request.

        Raises:
            ConfigurationError: the prompt is empty or too long, the request has interruptions but no phrase is set, or
                its `turn_tokens` are negative.
        """
        length = len(request.prompt_tokens)
        if not 0 < length <= self.max_prompt_tokens:
            raise ConfigurationError(
                f"context.max_prompt_tokens: a prompt has {length} tokens, allowed are 1 to {self.max_prompt_tokens}"
            )
        if request.interrupt_at and not self.phrase:
            raise ConfigurationError("length_control.phrase: it has no tokens, an interruption would do nothing")
        if request.turn_tokens < 0:
            raise ConfigurationError(f"turn_tokens: {request.turn_tokens} must be at least 0")


def request_state(request: GroupRequest) -> dict[str, Any]:
    """Return a request as plain values, for a checkpoint. Fields about turns are left out at their defaults."""
    neutral = {"waits": False, "turn_tokens": 0}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(request).items()
        if name not in neutral or value != neutral[name]
    }


def request_from(state: dict[str, Any]) -> GroupRequest:
    """Rebuild a request from the values of `request_state`."""
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in state.items()}
    return GroupRequest(**values)
