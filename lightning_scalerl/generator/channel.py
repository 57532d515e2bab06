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
        """Last version that the generator has acknowledged, which it samples with."""

    def publish(self, version: int, recompute_kv: bool = False) -> None:
        """Send the trainer's current weights and return once the generator has them.

        Args:
            version: number of optimizer steps that produced these weights.
            recompute_kv: whether the KV cache of rollouts in flight is recomputed with the new weights.
        """


class DirectChannel:
    """Channel to a generator in this process, which copies the trainer's tensors.

    Args:
        weights: returns the trainer's current state dict.
        generator: the generator that receives the weights.
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
