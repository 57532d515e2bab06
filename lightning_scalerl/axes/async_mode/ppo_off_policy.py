"""PPO-off-policy-k and its special case, on-policy: generate the data of k steps, then take the k steps."""

from __future__ import annotations

from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.checks import whole_number


class PPOOffPolicy(AsyncMode):
    """Generate k * P groups with one version of the weights, then take k optimizer steps of P groups each.

    Before each such phase all rollouts in flight are finished, so a batch is 0 to k - 1 steps stale.
    Source: arXiv 2510.13786, section 2 (PPO-off-policy-k, k = B / B_hat).
    """

    def __init__(self, k: int = 8) -> None:
        self.k = whole_number("async_mode.k", k)

    @property
    def max_staleness(self) -> int:
        """The staleness k - 1 of the tokens in the last of a phase's k steps."""
        return self.k - 1

    @property
    def drains(self) -> bool:
        """True: a phase generates all its groups before it trains on them."""
        return True

    def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
        """Return whether the group belongs to the current phase or an earlier one."""
        # A phase is k steps of groups_per_step groups each. Compare the group's phase with the trainer's.
        return admission // (groups_per_step * self.k) <= completed_steps // self.k

    def publishes(self, completed_steps: int) -> bool:
        """Return whether the step is the last of the k steps of its phase."""
        return completed_steps % self.k == 0


class OnPolicy(PPOOffPolicy):
    """Each batch is sampled by the weights that it trains."""

    def __init__(self) -> None:
        super().__init__(k=1)
