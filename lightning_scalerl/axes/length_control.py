"""Axis `length_control`: ways to keep completions within their token budget.

`interruption` is applied during generation: if the thinking has not ended at a randomly drawn token, a phrase that ends
it is forced into the completion. Forced tokens were not sampled, so they enter neither the loss nor the importance
ratio. `penalty` lowers the reward of a rollout that comes close to the limit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.rollouts.rollout import Rollout


def interruption_points(low: int, high: int, completions: int, random_key: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the thinking token at which each rollout of a group is interrupted, uniformly from [low, high]."""
    # Each group has its own random stream, so neither other groups in flight nor a resume change the points.
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(random_key)))
    return tuple(int(point) for point in generator.integers(low, high, size=completions, endpoint=True))


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Return clip((limit - tokens) / buffer - 1, -1, 0): 0 up to limit - buffer tokens, -1 at the limit.

    Source: arXiv 2510.13786, appendix (length penalty), after DAPO, arXiv 2503.14476, eq. 13.
    """
    return min(0.0, max(-1.0, (limit - tokens) / buffer - 1.0))


class LengthControl(DesignChoice):
    """Limits the length of completions, during generation or through the reward."""

    axis: ClassVar[str] = "length_control"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoLengthControl"}
    # The text that marks the end of thinking, and the phrase that is forced in. Both are empty if nothing is forced.
    end_of_thinking: str = ""
    phrase: str = ""

    def interrupt_at(self, completions: int, random_key: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of thinking tokens after which each rollout is interrupted; empty for never."""
        return ()

    def reward(self, reward: float, correct: bool, tokens: int) -> float:
        """Return the training reward of a rollout, given the verifier's reward."""
        return reward

    def check_limit(self, max_new_tokens: int, phrase_tokens: int = 1) -> str | None:
        """Return a one-line error if this choice could have no effect within the completion limit, else None.

        `phrase_tokens` is the length of the forced phrase, if a tokenizer is available to count it.
        """
        return None

    def differs(self, other: LengthControl, step: ObservedStep) -> bool:
        """Return whether this choice changed a rollout of the batch, or `other` could have."""
        rollouts = [rollout for group in step.batch.groups for rollout in group.sampled]
        acted = any(self.acts_on(rollout, step.decode) for rollout in rollouts)
        return acted or any(other.could_act_on(rollout, step.decode) for rollout in rollouts)

    @abstractmethod
    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether this choice changed the rollout, or would certainly have changed it if it had been in use."""

    def could_act_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether this choice could have changed a rollout that was sampled without it."""
        return self.acts_on(rollout, decode)


# arXiv 2510.13786, appendix.
PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


class Interruption(LengthControl):
    """Force the end of thinking into a rollout, at a random point.

    Args:
        low, high: bounds of the uniformly drawn point, in tokens of thinking; both included.
        end_of_thinking: text that ends the thinking. A rollout that contains it before the point is not interrupted.
        phrase: text that is forced in; it must end with `end_of_thinking`.

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
        """Return a one-line error if the phrase, forced in at the latest point, leaves no room for an answer."""
        if self.high + phrase_tokens < max_new_tokens:
            return None
        return (
            f"length_control.high: {self.high} and a phrase of {phrase_tokens} tokens must leave room for an answer in "
            f"context.max_new_tokens, {max_new_tokens}"
        )

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether tokens were forced, or the rollout passed the latest point without ending its thinking."""
        # A rollout of at most `high` tokens may not have reached the drawn point, so only forced tokens prove an
        # interruption.
        if rollout.length <= self.high:
            return any(rollout.forced)
        return any(rollout.forced) or self.end_of_thinking not in decode(rollout.tokens[: self.high])

    def could_act_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether the rollout passed the earliest point without ending its thinking."""
        return rollout.length > self.low and self.end_of_thinking not in decode(rollout.tokens[: self.low])

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries for the treatment of forced tokens and of evaluation."""
        return {**super().semantics(), "forced_tokens": "in neither loss nor ratio", "evaluation": "not interrupted"}


class Penalty(LengthControl):
    """Soft length penalty on correct rollouts or on all rollouts.

    Args:
        limit: the completion limit, in tokens (14,336 in the paper).
        buffer: tokens before the limit over which the penalty grows to -1 (2,048 in the paper).
        only_correct: penalise only correct rollouts, as ScaleRL does; DAPO (arXiv 2503.14476, section 3.4) penalises
            all.
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
        """Return the reward plus `overlong_penalty`, if the penalty applies to the rollout."""
        applies = correct or not self.only_correct
        return reward + overlong_penalty(tokens, self.limit, self.buffer) if applies else reward

    def differs(self, other: LengthControl, step: ObservedStep) -> bool:
        """Return whether a rollout's reward would change under `other`.

        If `other` is not a penalty, `LengthControl.differs` decides.
        """
        if not isinstance(other, Penalty):
            return super().differs(other, step)
        rollouts = [rollout for group in step.batch.groups for rollout in group.sampled]
        # The penalty depends on correctness and length alone, so each pair of these is compared once.
        cases = {(rollout.correct, rollout.length) for rollout in rollouts}
        # The penalty is added to the reward, so a base reward of 0 shows every difference.
        return any(self.reward(0.0, *case) != other.reward(0.0, *case) for case in cases)

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return whether the penalty applies to the rollout and is not 0 at its length."""
        applies = rollout.correct or not self.only_correct
        return applies and overlong_penalty(rollout.length, self.limit, self.buffer) < 0


class NoLengthControl(LengthControl):
    """Completions run to their end or to the token limit."""

    def acts_on(self, rollout: Rollout, decode: Callable[[list[int]], str]) -> bool:
        """Return False: nothing is interrupted or penalised."""
        return False
