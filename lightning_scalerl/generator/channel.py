"""How weights reach a generator: a channel publishes the trainer's under a version, and says which has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lightning_scalerl.generator.base import Generator


class WeightChannel(Protocol):
    """From the trainer to one generator."""

    @property
    def version(self) -> int:
        """The last that the generator has acknowledged: what it samples with is this old."""
        ...

    def publish(self, version: int, recompute_kv: bool = False) -> None:
        """Send the trainer's weights as they are now; returns once the generator has them.

        Args:
            version: optimizer steps behind them.
            recompute_kv: whether rollouts in flight get their keys and values anew.
        """
        ...


class DirectChannel:
    """To a generator in this process: the tensors themselves are handed over, and copied there.

    Args:
        weights: the trainer's, as they are now.
        generator: takes them.
    """

    def __init__(self, weights: Callable[[], dict[str, Tensor]], generator: Generator) -> None:
        self._weights, self._generator = weights, generator

    @property
    def version(self) -> int:
        """What the generator samples with."""
        return self._generator.version

    def publish(self, version: int, recompute_kv: bool = False) -> None:
        """Between two tokens."""
        self._generator.publish(self._weights(), version, recompute_kv)
