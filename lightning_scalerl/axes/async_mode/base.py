"""Axis `async_mode`: how far generation may run ahead of training, and when the generator gets new weights.

All modes use the same record of groups (`rollout_stream`) and differ in two rules. Given s completed optimizer steps
and P groups per step, a mode decides whether group number i may be sent to the generator ("admitted") now, and whether
the weights of step s are published to the generator now. docs/reference/async_modes.md has the table of rules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep


class AsyncMode(DesignChoice):
    """Rules that decide when groups are sent to the generator ("admitted") and when weights are published to it."""

    axis: ClassVar[str] = "async_mode"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "OnPolicy"}
    # Whether the KV cache of rollouts in flight is recomputed when weights are published; otherwise it is kept.
    recompute_kv: bool = False

    @property
    @abstractmethod
    def max_staleness(self) -> int:
        """Largest staleness, in optimizer steps, that a trained token can have."""

    @property
    @abstractmethod
    def drains(self) -> bool:
        """True if training waits until no rollout is in flight."""

    @abstractmethod
    def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
        """Return whether group number `admission` (from 0) may be admitted after `completed_steps` optimizer steps."""

    @abstractmethod
    def publishes(self, completed_steps: int) -> bool:
        """Return whether the weights after `completed_steps` steps are published to the generator at once."""

    def differs(self, other: AsyncMode, step: ObservedStep) -> bool:
        """Return whether only one of the two modes admits the next group, or only one publishes this step's weights.

        If the modes differ only in `recompute_kv`, return whether weights changed within a rollout of the batch.
        """
        admission = (step.admitted, step.completed_steps, step.groups_per_step)
        if self.may_admit(*admission) != other.may_admit(*admission):
            return True
        # The step is observed before its update, so the update will produce the next version.
        version = step.completed_steps + 1
        if self.publishes(version) != other.publishes(version):
            return True
        rollouts = [rollout for group in step.batch.groups for rollout in group.sampled]
        changed_within = any(len(set(rollout.weight_versions)) > 1 for rollout in rollouts)
        return changed_within and self.recompute_kv != other.recompute_kv

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries for the bound on staleness, `drains` and the KV cache."""
        # If training waits for the rollouts in flight, none is in flight when weights change, and the cache policy has
        # no effect.
        kv = "not reached: the generator drains before new weights"
        if not self.drains:
            kv = "recomputed with the new weights" if self.recompute_kv else "stale in flight, fresh for new rollouts"
        return {
            **super().semantics(),
            "max_staleness": self.max_staleness,
            "drains": self.drains,
            "kv_cache_on_update": kv,
        }
