"""Axis `normalization`: the scale of the advantages.

Libraries use one name for different formulas, so each choice states its `ddof` and `eps`. ScaleRL's `batch` divides by
the standard deviation of the *advantages*, TRL's "batch" by that of the raw rewards; here these are two choices.
Statistics are taken over the groups that the filter keeps; the ScaleRL paper does not say whether its statistics
precede or follow the filter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.checks import ConfigurationError, not_negative

# A function that sums a tensor over all ranks.
Sums = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers, in float64; `+` merges two sets."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, sum_over_ranks: Sums = lambda numbers: numbers) -> Moments:
        """Return the moments of all ranks' values; `values` (n,) are this rank's, `sum_over_ranks` sums a tensor."""
        values = values.double()
        count, total = sum_over_ranks(torch.stack([values.new_tensor(values.numel()), values.sum()])).tolist()
        # `count` is the same on every rank, so either all ranks skip the second collective or none does: no deadlock.
        if not count:
            return cls()
        mean = total / count
        # Sum the deviations in a second pass: sum(x^2) - n mean^2 would lose digits to cancellation where the mean is
        # large.
        (squares,) = sum_over_ranks((values - mean).square().sum().reshape(1)).tolist()
        return cls(count, mean, squares)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the union of both sets. Source: Chan, Golub and LeVeque 1979."""
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Moments(count, mean, self.squares + other.squares + gap * gap * self.count * other.count / count)

    def deviation(self, ddof: int) -> float | None:
        """Return the standard deviation, or None if there are too few numbers."""
        return (self.squares / (self.count - ddof)) ** 0.5 if self.count > ddof else None


def _divide_by_deviation(advantages: list[Tensor], values: list[Tensor], ddof: int, eps: float) -> list[Tensor]:
    """Divide advantages by the standard deviation of all `values`, if there are more than `ddof` values."""
    if not values or (all_values := torch.cat(values)).numel() <= ddof:
        return advantages
    scale = _deviation(all_values, ddof) + eps
    return [_divide(group, scale) for group in advantages]


def _deviation(values: Tensor, ddof: int) -> Tensor:
    """Return the standard deviation; exactly 0 for equal values, for which rounding could give a positive number."""
    deviation = values.std(correction=ddof)
    return torch.zeros_like(deviation) if bool((values == values[0]).all()) else deviation


def _divide(advantages: Tensor, scale: Tensor | float) -> Tensor:
    """Divide advantages by their scale. A scale of 0 (equal values with eps 0) gives advantages of 0, not NaN."""
    return torch.zeros_like(advantages) if scale == 0 else advantages / scale


def scale_by_batch(advantages: list[Tensor], ddof: int, eps: float, centre: bool = False) -> list[Tensor]:
    """Divide by the standard deviation of all advantages of the batch; with `centre`, subtract their mean first.

    Shapes: a list of (G,), one per group. Source: arXiv 2510.13786, section 5.1.
    """
    shifted = advantages
    if centre and advantages and (all_values := torch.cat(advantages)).numel() > ddof:
        # As in `_divide_by_deviation`, do nothing if there are too few numbers.
        shifted = [group - all_values.mean() for group in advantages]
    return _divide_by_deviation(shifted, advantages, ddof, eps)


def scale_by_batch_reward(advantages: list[Tensor], rewards: list[Tensor], ddof: int, eps: float) -> list[Tensor]:
    """Divide by the standard deviation of all raw rewards of the batch. Shapes: lists of (G,), one per group."""
    return _divide_by_deviation(advantages, rewards, ddof, eps)


def scale_by_prompt(advantages: list[Tensor], rewards: list[Tensor], ddof: int, eps: float) -> list[Tensor]:
    """Divide each group by the standard deviation of its own rewards, as GRPO does. Shapes: lists of (G,)."""
    return [
        group if group.numel() <= ddof else _divide(group, _deviation(reward, ddof) + eps)
        for group, reward in zip(advantages, rewards, strict=True)
    ]


def scale_by_pass_rate(advantages: list[Tensor], rewards: list[Tensor], incorrect: float, eps: float) -> list[Tensor]:
    """Divide each group by (mean reward - `incorrect` + eps). Shapes: lists of (G,).

    With two rewards, one for correct and one for incorrect completions, the result is (x - p) / p, where p is the
    group's pass rate and x is 1 for a correct completion, else 0. Its expected gradient is the gradient of log p,
    truncated at the order of the group size. A group whose mean reward is not above `incorrect` gets advantages of 0:
    it has no success to reinforce, and a negative divisor (possible if rewards include penalties) would reverse its
    gradient.
    Source: MaxRL, arXiv 2602.02710; the authors' code adds an eps of 1e-6.
    """
    heights = [reward.mean() - incorrect for reward in rewards]
    return [
        group / (height + eps) if height > 0 else torch.zeros_like(group)
        for group, height in zip(advantages, heights, strict=True)
    ]


def scaled_tokens(advantages: Tensor, mask: Tensor, moments: Moments, ddof: int, eps: float, centre: bool) -> Tensor:
    """Return advantages (R, T) divided by the standard deviation of `moments`; 0 outside the mask.

    With `centre` the mean of `moments` is subtracted first. Advantages are unchanged if there are too few numbers.
    """
    deviation = moments.deviation(ddof)
    if deviation is None:
        return advantages
    shifted = advantages - moments.mean if centre else advantages
    return torch.where(mask > 0, _divide(shifted, deviation + eps), 0.0)


class Normalization(DesignChoice):
    """Rescales the advantages of one optimizer step's batch.

    Attributes:
        scales_tokens: whether `scale_tokens` is defined, for advantages per token.
    """

    axis: ClassVar[str] = "normalization"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoNormalization"}
    scales_tokens: ClassVar[bool] = False

    @abstractmethod
    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Return scaled advantages; both lists hold one (G,) tensor per group that passed the filter.

        Must be a pure function: mechanism counters call it again.
        """

    def scale_tokens(self, advantages: Tensor, mask: Tensor, sum_over_ranks: Sums) -> Tensor:
        """Return scaled advantages (R, T) of this rank's tokens. Must be a pure function."""
        raise NotImplementedError

    def check_rewards(self, incorrect: float) -> str | None:
        """Return a one-line error if this choice is not defined for this reward of an incorrect completion."""
        return None

    def remember(self, moments: Callable[[], Moments]) -> None:
        """Record the moments of the batch that will be scaled next. Called once per step; does nothing by default."""

    def forget(self) -> None:
        """Clear the memory of earlier batches. Called at the start of a run; does nothing by default."""


class _DeviationNormalization(Normalization):
    def __init__(self, ddof: int = 1, eps: float = 1e-6) -> None:
        if ddof not in (0, 1):
            raise ConfigurationError(f"normalization.ddof: {ddof!r} is not valid; 0 (population) or 1 (unbiased)")
        self.ddof = ddof
        self.eps = not_negative("normalization.eps", eps)


class BatchNormalization(_DeviationNormalization):
    """Divide by the standard deviation of all advantages in the batch (ScaleRL).

    Args:
        ddof: 0 for the population's standard deviation, 1 for the unbiased one.
        eps: added to the standard deviation; with 0, equal advantages become 0.
        centre: subtract the batch's mean first, as PPO does with per-token advantages. Group advantages already have
            a mean of 0.
    """

    added: ClassVar[Mapping[str, Any]] = {"centre": False}
    scales_tokens: ClassVar[bool] = True

    def __init__(self, ddof: int = 1, eps: float = 1e-6, centre: bool = False) -> None:
        super().__init__(ddof, eps)
        self.centre = centre

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Divide by one standard deviation for the whole batch."""
        return scale_by_batch(advantages, self.ddof, self.eps, self.centre)

    def scale_tokens(self, advantages: Tensor, mask: Tensor, sum_over_ranks: Sums) -> Tensor:
        """Divide by one standard deviation of the advantages of all tokens in the loss."""
        moments = Moments.of(advantages[mask > 0], sum_over_ranks)
        return scaled_tokens(advantages, mask, moments, self.ddof, self.eps, self.centre)


class BatchRewardNormalization(_DeviationNormalization):
    """Divide by the standard deviation of all raw rewards in the batch: TRL's "batch".

    Unlike the deviation of advantages, this one also grows with differences in difficulty between prompts.
    """

    # The defaults are TRL's (GRPOTrainer, scale_rewards="batch"): unbiased, eps 1e-4.
    def __init__(self, ddof: int = 1, eps: float = 1e-4) -> None:
        super().__init__(ddof, eps)

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Divide by the standard deviation of the raw rewards of the whole batch."""
        return scale_by_batch_reward(advantages, rewards, self.ddof, self.eps)


class PromptNormalization(_DeviationNormalization):
    """Divide by the standard deviation of the group's rewards (GRPO)."""

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Divide each group by the standard deviation of its own rewards."""
        return scale_by_prompt(advantages, rewards, self.ddof, self.eps)


class MaxRLNormalization(Normalization):
    """Divide by the group's pass rate, on the scale of its rewards (MaxRL): hard prompts count more than under GRPO.

    Args:
        eps: added to the divisor.
        incorrect: reward of an incorrect completion, which is subtracted from the mean reward. It must equal the run's
            `reward.incorrect`, which is -1 in ScaleRL.
    """

    def __init__(self, eps: float = 1e-6, incorrect: float = -1.0) -> None:
        self.eps = not_negative("normalization.eps", eps)
        if not math.isfinite(incorrect):
            raise ConfigurationError(f"normalization.incorrect: {incorrect!r} must be a finite number")
        self.incorrect = incorrect

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Divide each group by its mean reward minus `incorrect`; 0 for a group without success."""
        return scale_by_pass_rate(advantages, rewards, self.incorrect, self.eps)

    def check_rewards(self, incorrect: float) -> str | None:
        """Return a one-line error if the run's reward of an incorrect completion differs from this choice's."""
        if incorrect == self.incorrect:
            return None
        return (
            f"normalization.incorrect: {self.incorrect!r} must be reward.incorrect, {incorrect!r}: maxrl measures the "
            "mean reward from there"
        )

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, the divisor, and the advantages of groups without success."""
        return {
            **super().semantics(),
            "divisor": "mean reward of the group, above that of an incorrect completion",
            "divisor_not_positive": "advantages of 0",
        }


class RunningNormalization(_DeviationNormalization):
    """Divide by the standard deviation of all advantages of the run so far, including this batch.

    Args:
        ddof: 0 for the population's standard deviation, 1 for the unbiased one.
        eps: added to the standard deviation.
        centre: first subtract the mean of all advantages so far.
    """

    scales_tokens: ClassVar[bool] = True

    def __init__(self, ddof: int = 1, eps: float = 1e-6, centre: bool = False) -> None:
        super().__init__(ddof, eps)
        self.centre = centre
        self.forget()

    def forget(self) -> None:
        """Clear the history and the last batch."""
        # Scaling must be pure, so the current batch is added to the history only in the next step.
        self._history = Moments()
        self._last = Moments()

    def remember(self, moments: Callable[[], Moments]) -> None:
        """Add the last batch to the history, and store this batch's moments as the new last batch."""
        self._history, self._last = self._history + self._last, moments()

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Divide by the standard deviation of the whole run so far, this batch included."""
        moments = self._history + Moments.of(torch.cat(advantages) if advantages else torch.zeros(0))
        deviation = moments.deviation(self.ddof)
        if deviation is None:
            return advantages
        # `centre` is a bool, so mean * centre is the mean or 0.
        return [_divide(group - moments.mean * self.centre, deviation + self.eps) for group in advantages]

    def scale_tokens(self, advantages: Tensor, mask: Tensor, sum_over_ranks: Sums) -> Tensor:
        """Divide by the standard deviation of the run's advantages so far, this batch included."""
        moments = self._history + Moments.of(advantages[mask > 0], sum_over_ranks)
        return scaled_tokens(advantages, mask, moments, self.ddof, self.eps, self.centre)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the history and of the last batch, as plain numbers."""
        return {name: vars(moments) for name, moments in (("before", self._history), ("last", self._last))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the moments of the history and of the last batch."""
        self._history, self._last = Moments(**state_dict["before"]), Moments(**state_dict["last"])

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus an entry for the statistics, which cover all advantages of the run so far."""
        return {**super().semantics(), "statistics": "all advantages of the run so far, each once"}


class NoNormalization(Normalization):
    """Advantages without normalization (Dr.GRPO)."""

    scales_tokens: ClassVar[bool] = True

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Return the advantages unchanged, one (G,) per group."""
        return advantages

    def scale_tokens(self, advantages: Tensor, mask: Tensor, sum_over_ranks: Sums) -> Tensor:
        """Return the advantages (R, T) unchanged."""
        return advantages
