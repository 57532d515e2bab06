"""Channels that carry weights to a generator under a version, and track which version has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lightning_scalerl.generator.base import Generator


class WeightChannel(Protocol):
    """Path of weights from the trainer to one generator."""

    @property
    def version(self) -> int:
        """Last version that the generator has acknowledged: the one it samples with."""
        ...

    def publish(self, version: int, recompute_kv: bool = False) -> None:
        """Send the trainer's weights as they are now; returns once the generator has them.

        Args:
            version: number of optimizer steps that made these weights.
            recompute_kv: whether the KV cache of rollouts in flight is recomputed with the new weights.
        """
        ...


class DirectChannel:
    """Channel to a generator in this process: it is handed the trainer's tensors and copies them.

    Args:
        weights: returns the trainer's state dict as it is now.
        generator: the generator that gets the weights.
    """

    def __init__(self, weights: Callable[[], dict[str, Tensor]], generator: Generator) -> None:
        self._weights, self._generator = weights, generator

    @property
    def version(self) -> int:
        """Version of the weights that the generator samples with."""
        return self._generator.version

    def publish(self, version: int, recompute_kv: bool = False) -> None:
        """Publish the trainer's weights at once; the generator uses them from its next token on."""
        self._generator.publish(self._weights(), version, recompute_kv)
