"""PipelineRL-k: generation never stops; weights change between two tokens of a rollout."""

from __future__ import annotations

from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.checks import ConfigurationError, whole_number

KV_POLICIES = ("stale", "recompute")


class Pipeline(AsyncMode):
    """Generator and trainer run concurrently; every update is published to the rollouts in flight.

    Groups for the current step and for the k steps after it may be sent to the generator (P groups per step). The
    trainer waits for a group whose oldest token would otherwise become more than k steps old.

    Args:
        k: the bound on staleness, in optimizer steps.
        kv_on_update: "stale" lets rollouts in flight continue with keys and values of earlier weights, as in the paper;
            "recompute" prefills them again with the new weights.

    Source: PipelineRL, arXiv 2509.19128; arXiv 2510.13786, section 2 (PipelineRL-8 in ScaleRL).
    """

    def __init__(self, k: int = 8, kv_on_update: str = "stale") -> None:
        self.k = whole_number("async_mode.k", k)
        if kv_on_update not in KV_POLICIES:
            raise ConfigurationError(f"async_mode.kv_on_update: {kv_on_update!r}; valid: {', '.join(KV_POLICIES)}")
        self.kv_on_update = kv_on_update
        self.recompute_kv = kv_on_update == "recompute"

    @property
    def max_staleness(self) -> int:
        """The bound k on a trained token's staleness, in optimizer steps."""
        return self.k

    @property
    def drains(self) -> bool:
        """False: generation never waits for training."""
        return False

    def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
        """Return whether the group belongs to the current step or one of the k after it."""
        # Batches fill in the order in which groups are sent to the generator, so group i is trained in step floor(i /
        # groups_per_step).
        return admission // groups_per_step <= completed_steps + self.k

    def publishes(self, completed_steps: int) -> bool:
        """Return True: the weights are published after every step."""
        return True
