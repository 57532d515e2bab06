"""Axis `length_control`: means to keep completions within their token budget.

`interruption` acts while a rollout is generated: if its thinking has not ended by a point drawn at random, a
phrase that ends it is forced into the completion, token by token. Forced tokens were not sampled: they are in
neither loss nor ratio. `penalty` acts on the reward of a rollout that comes close to the limit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep
from lightning_scalerl.rollout import Rollout


def interruption_points(low: int, high: int, completions: int, random_key: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the token of thinking at which each rollout of a group is interrupted, uniform in [low, high]."""
    # Its own stream by the group's key: neither other groups in flight nor a resume change the points.
    source = np.random.Generator(np.random.Philox(np.random.SeedSequence(random_key)))
    return tuple(int(point) for point in source.integers(low, high, size=completions, endpoint=True))


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Return clip((limit - tokens) / buffer - 1, -1, 0): 0 up to limit - buffer tokens, -1 at the limit.

    Source: arXiv 2510.13786, appendix (length penalty), after DAPO, arXiv 2503.14476, eq. 13.
    """
    return min(0.0, max(-1.0, (limit - tokens) / buffer - 1.0))


class LengthControl(DesignChoice):
    """Acts on rollouts as they are generated, or on their rewards."""

    axis: ClassVar[str] = "length_control"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoLengthControl"}
    # The text that marks the end of thinking, and the one forced in; empty if nothing is forced.
    end_of_thinking: str = ""
    phrase: str = ""

    def interrupt_at(self, completions: int, random_key: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of thinking tokens after which each rollout is interrupted; empty for never."""
        return ()

    def reward(self, reward: float, correct: bool, tokens: int) -> float:
        """Return the reward that is trained on, from the verifier's."""
        return reward

    def check_limit(self, max_new_tokens: int, phrase_tokens: int = 1) -> str | None:
        """Return one line if this control cannot act within the completion limit, else None.

        `phrase_tokens` is the length of its phrase, where a tokenizer is at hand.
        """
        return None

    def differs(self, theirs: LengthControl, step: ObservedStep) -> bool:
        """Return whether one of the two acted on a rollout of the batch, or surely would have."""
        rollouts = [rollout for group in step.batch.groups for rollout in group.sampled]
        return any(control.acts_on(rollout, step.decode) for control in (self, theirs) for rollout in rollouts)

    @abstractmethod
    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether this control changed such a rollout, or surely would have: for the mechanism counter."""


# arXiv 2510.13786, appendix.
PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


class Interruption(LengthControl):
    """Force the end of thinking into a rollout, at a random point.

    Args:
        low, high: the point is uniform in [low, high] tokens of thinking.
        end_of_thinking: text that ends the thinking; a rollout whose text holds it by then is left alone.
        phrase: text that is forced in; it ends with `end_of_thinking`.

    Source: arXiv 2510.13786, section 3 (10,000 to 12,000 tokens) and its appendix (wording).
    """

    def __init__(
        self, low: int = 10_000, high: int = 12_000, end_of_thinking: str = "</think>", phrase: str = PHRASE
    ) -> None:
        self.low = whole_number("length_control.low", low)
        self.high = whole_number("length_control.high", high)
        if high < low:
            raise ConfigurationError(f"length_control.high: {high!r} is below length_control.low, {low!r}")
        texts = isinstance(phrase, str) and isinstance(end_of_thinking, str)
        if not texts or not end_of_thinking or not phrase.endswith(end_of_thinking):
            raise ConfigurationError(
                f"length_control.phrase: {phrase!r} must end with length_control.end_of_thinking, {end_of_thinking!r}"
            )
        self.end_of_thinking = end_of_thinking
        self.phrase = phrase

    def interrupt_at(self, completions: int, random_key: tuple[int, ...]) -> tuple[int, ...]:
        """Return the points drawn by `interruption_points`, one for each rollout."""
        return interruption_points(self.low, self.high, completions, random_key)

    def check_limit(self, max_new_tokens: int, phrase_tokens: int = 1) -> str | None:
        """Return one line if the phrase, forced in at the latest point, would leave no room for an answer."""
        if self.high + phrase_tokens < max_new_tokens:
            return None
        return (
            f"length_control.high: {self.high} and a phrase of {phrase_tokens} tokens must leave room for an answer in "
            f"context.max_new_tokens, {max_new_tokens}"
        )

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether tokens were forced, or it went on past the last point without having ended its thinking."""
        if len(rollout.tokens) <= self.high:
            return any(rollout.forced)
        return any(rollout.forced) or self.end_of_thinking not in decode(rollout.tokens[: self.high])

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and that forced tokens are not trained on and evaluation is not interrupted."""
        return {**super().semantics(), "forced_tokens": "in neither loss nor ratio", "evaluation": "not interrupted"}


class Penalty(LengthControl):
    """Soft length penalty, on correct rollouts or on all of them.

    Args:
        limit: the completion limit, in tokens (14,336 in the paper).
        buffer: tokens before the limit over which the penalty grows to -1 (2,048 in the paper).
        only_correct: spare incorrect rollouts, as ScaleRL does; DAPO (arXiv 2503.14476, section 3.4) penalises all.
    """

    added: ClassVar[Mapping[str, Any]] = {"only_correct": True}

    def __init__(self, limit: int = 14_336, buffer: int = 2_048, only_correct: bool = True) -> None:
        self.limit = whole_number("length_control.limit", limit)
        self.buffer = whole_number("length_control.buffer", buffer)
        if buffer > limit:
            raise ConfigurationError(f"length_control.buffer: {buffer!r} exceeds length_control.limit, {limit!r}")
        if not isinstance(only_correct, bool):
            raise ConfigurationError(f"length_control.only_correct: {only_correct!r} must be true or false")
        self.only_correct = only_correct

    def reward(self, reward: float, correct: bool, tokens: int) -> float:
        """Add `overlong_penalty` to the reward of a rollout that the penalty applies to."""
        applies = correct or not self.only_correct
        return reward + overlong_penalty(tokens, self.limit, self.buffer) if applies else reward

    def differs(self, theirs: LengthControl, step: ObservedStep) -> bool:
        """Return whether a rollout's reward would be another; for other kinds of control, whether one acted."""
        if not isinstance(theirs, Penalty):
            return super().differs(theirs, step)
        rollouts = [rollout for group in step.batch.groups for rollout in group.sampled]
        lengths = {(rollout.correct, len(rollout.tokens)) for rollout in rollouts}
        # The penalty is added to the reward, so one base shows it for all.
        return any(self.reward(0.0, *each) != theirs.reward(0.0, *each) for each in lengths)

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether the penalty applies to the rollout and its length is a penalised one."""
        applies = rollout.correct or not self.only_correct
        return applies and overlong_penalty(len(rollout.tokens), self.limit, self.buffer) < 0


class NoLengthControl(LengthControl):
    """Completions run to their end or to the token limit."""

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return False: nothing is interrupted or penalised."""
        return False
