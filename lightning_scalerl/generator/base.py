"""Protocol of a generator: it takes rollout requests and weights, and returns finished rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Rollout


@dataclass(frozen=True)
class GroupRequest:
    """Request for `completions` rollouts of one prompt.

    `key` identifies the group among all in flight (its admission number). `random_key` seeds its sampling: the
    same key gives the same uniform numbers whatever else is in flight, so nothing about scheduling, batching
    or resuming changes what is sampled except through the weights. `interrupt_at` gives for each rollout the
    tokens of thinking after which its end is forced; empty for never. `max_new_tokens` is a limit of the request's
    own; 0 for the generator's.
    """

    key: int
    prompt_tokens: tuple[int, ...]
    completions: int
    random_key: tuple[int, ...]
    interrupt_at: tuple[int, ...] = ()
    max_new_tokens: int = 0

    def limit(self, most: int) -> int:
        """Return the request's token limit, given the generator's."""
        return min(self.max_new_tokens or most, most)


@dataclass(frozen=True)
class FinishedRollout:
    """Rollout that ended in this step: number `index` of the group `key`."""

    key: int
    index: int
    rollout: Rollout


@dataclass(frozen=True)
class StepReport:
    """Report of one generator step: the rollouts that ended, and counts of the work done, for the compute meter.

    `prefill_tokens` are prompt tokens and, after a publish, those whose keys and values were recomputed. `prefilled`
    counts the prompts that went through the head for the first token behind them: once each, however many rollouts
    share it. Context counts what goes before a token, whatever windows the model has; `outside` is the part of it that
    lay outside of them, in prefill and decoding together and summed over layers (`model.windows.outside`).
    `lost_tokens` had been sampled by a process that is gone, for rollouts that it had not finished: they are sampled
    again.
    """

    finished: Sequence[FinishedRollout]
    prefill_tokens: int
    prefill_context: int
    decoded_tokens: int
    decoded_context: int
    prefilled: int = 0
    outside: int = 0
    lost_tokens: int = 0

    @property
    def computed(self) -> tuple[int, ...]:
        """All counts of work done, in the order of their fields; those of several reports add up."""
        return tuple(getattr(self, name) for name in COUNTS)


# The counts of what a report's sender computed, in order.
COUNTS = tuple(entry.name for entry in fields(StepReport) if entry.name not in ("finished", "lost_tokens"))


def nothing_computed() -> list[int]:
    """Return a zero for each count of `StepReport.computed`, to add to."""
    return [0] * len(COUNTS)


class Generator(Protocol):
    """Generator that advances every rollout in flight by one token with each `step`."""

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not finished."""
        ...

    @property
    def free_slots(self) -> int:
        """Number of rollouts that would start in the next step if they were submitted now."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights in use: the optimizer steps behind them."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a group for sampling; it starts as slots become free."""
        ...

    def step(self) -> StepReport:
        """Sample one token of every rollout that has a slot; freed slots are refilled at once."""
        ...

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight go on with the keys and values they have, or with recomputed ones. Rollouts that have
        no token yet start afresh in either case.
        """
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Lend the generator for other work: rollouts in flight wait, and resume under the weights of before."""
        ...

    def close(self) -> None:
        """Release resources beyond this process's memory, such as child processes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in flight from a checkpoint."""
        ...


@contextmanager
def set_aside(generator: Generator, clear: Callable[[], None]) -> Iterator[None]:
    """Implement `Generator.aside` where the state holds all that is in flight; `clear` empties the generator."""
    state = generator.state_dict()
    clear()
    try:
        yield
    finally:
        generator.load_state_dict(state)


@dataclass(frozen=True)
class EndOfThinking:
    """Test for the marker that ends the thinking in a completion's text."""

    tokenizer: Any
    marker: str

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of these completion tokens holds the marker."""
        return self.marker in self.tokenizer.decode(list(tokens))


class StopText(Protocol):
    """Test for a text that ends a completion, in its last `window` tokens."""

    @property
    def window(self) -> int:
        """Number of last tokens that the test needs."""
        ...

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether a completion's tokens so far, or its last ones, hold such a text."""
        ...


def thinks_on(tokens: list[int]) -> bool:
    """Return False: without an end marker a completion never ends its thinking by itself."""
    return False


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of sampling; every generator takes the same record.

    Attributes:
        max_prompt_tokens, max_new_tokens: longest prompt and completion, in tokens.
        stop_tokens: ids that end a completion (kept as its last token).
        temperature: sampling temperature.
        phrase: token ids that are forced where a request asks for an interruption.
        thinking_ended: tests whether a completion so far has ended its thinking; it is then not interrupted.
        stop_text: tests a completion's last tokens for a text that ends it; None without such texts.
    """

    max_prompt_tokens: int
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()
    temperature: float = 1.0
    phrase: Sequence[int] = ()
    thinking_ended: Callable[[list[int]], bool] = thinks_on
    stop_text: StopText | None = None

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence, prompt and completion."""
        return self.max_prompt_tokens + self.max_new_tokens

    def check(self, request: GroupRequest) -> None:
        """Check that a generator with these settings can serve a request.

        Raises:
            ConfigurationError: the prompt is empty or too long, or an interruption is asked for and there is no phrase.
        """
        length = len(request.prompt_tokens)
        if not 0 < length <= self.max_prompt_tokens:
            raise ConfigurationError(
                f"context.max_prompt_tokens: a prompt has {length} tokens, allowed are 1 to {self.max_prompt_tokens}"
            )
        if request.interrupt_at and not self.phrase:
            raise ConfigurationError("length_control.phrase: it has no tokens, an interruption would do nothing")


def request_state(request: GroupRequest) -> dict[str, Any]:
    """Return a request as plain values, for a checkpoint."""
    return {field: list(value) if isinstance(value, tuple) else value for field, value in vars(request).items()}


def request_from(state: dict[str, Any]) -> GroupRequest:
    """Rebuild a request from the values of `request_state`."""
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in state.items()}
    return GroupRequest(**values)
