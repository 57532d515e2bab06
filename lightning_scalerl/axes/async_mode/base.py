"""Axis `async_mode`: how far generation may run ahead of training, and when it sees new weights.

All modes are one scheduler (`rollout_stream`) with different rules. With s completed optimizer steps and P
groups a step, a mode answers two questions: may admission i open now, and are the weights of step s published
to the generator now. DESIGN.md, "Staleness".
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from lightning_scalerl.choice import DesignChoice


class AsyncMode(DesignChoice):
    """Admission and publish rules of the rollout stream."""

    axis: ClassVar[str] = "async_mode"
    # What becomes of the KV cache of rollouts in flight when weights are published.
    recompute_kv: bool = False

    @property
    @abstractmethod
    def max_staleness(self) -> int:
        """The largest staleness, in optimizer steps, that a trained token can have."""

    @property
    @abstractmethod
    def drains(self) -> bool:
        """Whether training waits until nothing is in flight."""

    @abstractmethod
    def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
        """Whether admission number `admission` (from 0) may open after `completed_steps` optimizer steps."""

    @abstractmethod
    def publishes(self, completed_steps: int) -> bool:
        """Whether the weights after `completed_steps` steps go to the generator at once."""

    def semantics(self) -> dict[str, Any]:
        """With the bound on staleness, who waits, and what a swap does to the cache."""
        kv = "not reached: the generator drains before new weights"
        if not self.drains:
            kv = "recomputed with the new weights" if self.recompute_kv else "stale in flight, fresh for new rollouts"
        return {
            **super().semantics(),
            "max_staleness": self.max_staleness,
            "drains": self.drains,
            "kv_cache_on_update": kv,
        }
