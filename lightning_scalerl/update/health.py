"""Settings group `health`: rules that end a collapsed run early and record the reason in the run's status.

arXiv 2510.13786, A.15: runs in which 10 to 15% of completions are truncated stay unstable, so their later rewards do
not characterize the recipe. The rules are off by default, because a collapse is a result too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError, not_negative, whole_number


def truncated_at_context_limit(metrics: Mapping[str, float]) -> float:
    """Return the share of completions truncated at the context limit, not at a curriculum's lower limit."""
    return metrics["train/truncated"] - metrics.get("train/cut_by_stage", 0.0)


class UnhealthyError(CannotGoOnError):
    """Raised to end a run whose reward, entropy or share of truncated completions is out of bounds."""


@dataclass(frozen=True)
class Health:
    """Bounds at which a run ends early. They are not part of a run's identity, because they do not change learning.

    Args:
        stop: whether the bounds are enforced at all.
        window_steps: optimizer steps over which each mean is taken.
        reward_share: lower bound of the mean reward minus `reward.incorrect`, as a share of the best such mean so far.
        entropy: lower bound of the mean entropy, in nats per token.
        truncated: upper bound of the mean share of completions that are truncated at the context limit.
    """

    operational_parameters: ClassVar[tuple[str, ...]] = ("stop", "window_steps", "reward_share", "entropy", "truncated")
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Health"}

    stop: bool = False
    window_steps: int = 16
    reward_share: float = 0.5
    entropy: float = 0.01
    truncated: float = 0.15

    def __post_init__(self) -> None:
        if not isinstance(self.stop, bool):
            raise ConfigurationError(f"health.stop: {self.stop!r} must be true or false")
        whole_number("health.window_steps", self.window_steps)
        not_negative("health.entropy", self.entropy)
        for field in ("reward_share", "truncated"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigurationError(f"health.{field}: {getattr(self, field)!r} must be in [0, 1]")


class HealthWatch:
    """Checks every step's record against the bounds of `health` and ends the run on all ranks if one is violated.

    Args:
        health: the bounds.
        floor: reward of an incorrect completion, which is subtracted from mean rewards.
    """

    def __init__(self, health: Health, incorrect_reward: float = 0.0) -> None:
        self._health = health
        self._floor = incorrect_reward
        self._best = 0.0
        names = ("train/reward", "train/entropy", "train/truncated")
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=health.window_steps) for name in names}

    def check(self, record: Mapping[str, float], step: int) -> None:
        """Add one step's record to the running means and compare them with the bounds.

        Raises:
            UnhealthyError: a mean is out of bounds; the message has its value and the bound.
        """
        if not self._health.stop:
            return
        for name, recent in self._recent.items():
            if name in record:
                recent.append(truncated_at_context_limit(record) if name == "train/truncated" else record[name])
        # Means are taken over full windows of `window_steps` steps, so the first steps decide nothing.
        means = {n: fmean(r) for n, r in self._recent.items() if len(r) == self._health.window_steps}
        period = f"on average over {self._health.window_steps} steps"
        if "train/reward" in means:
            # Measure from the lowest possible reward: with rewards of -1 and 1 the best mean may be 0, and a share of 0
            # is no threshold.
            reward_above_floor = means["train/reward"] - self._floor
            # A reward that has never risen above the floor cannot collapse.
            if self._best > 0 and reward_above_floor < self._health.reward_share * self._best:
                raise UnhealthyError(
                    f"health: reward collapsed at step {step}: {reward_above_floor:.3g} {period}, below "
                    f"{self._health.reward_share:g} of its best, {self._best:.3g} (health.reward_share)"
                )
            self._best = max(self._best, reward_above_floor)
        # A metric without a full window passes, because the defaults of `get` are within the bounds.
        if means.get("train/entropy", self._health.entropy) < self._health.entropy:
            raise UnhealthyError(
                f"health: entropy died at step {step}: {means['train/entropy']:.3g} nats per token {period}, below "
                f"{self._health.entropy:g} (health.entropy)"
            )
        if self._health.truncated <= means.get("train/truncated", -1.0):
            raise UnhealthyError(
                f"health: completions are cut off at step {step}: {means['train/truncated']:.3g} of them {period}, the "
                f"bound is {self._health.truncated:g} (health.truncated)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best mean reward and the recent values of each metric."""
        return {"best": self._best, "recent": {name: list(values) for name, values in self._recent.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. If `window_steps` has changed, keep the newest values."""
        self._best = state["best"]
        for name, values in state["recent"].items():
            self._recent[name].clear()
            self._recent[name].extend(values)
