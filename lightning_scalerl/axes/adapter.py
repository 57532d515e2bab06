"""Axis `adapter`: which of the policy's weights are trained, all of them or low-rank adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, positive, shown, whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep

# What peft calls every linear layer but the output head.
ALL_LINEAR = "all-linear"


class Adapter(DesignChoice):
    """Weights that are trained in place of the model's own, or none: then all of the model's own are.

    Attributes:
        adapts: whether there are such weights.
    """

    axis: ClassVar[str] = "adapter"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoAdapter"}
    adapts: ClassVar[bool] = False

    def differs(self, theirs: Adapter, step: ObservedStep) -> bool:
        """Return whether the step trains on any token: its update then moves other weights."""
        return step.batch.denominators.tokens > 0


class NoAdapter(Adapter):
    """No adapter: all weights of the model are trained."""


class LoRA(Adapter):
    """Low-rank adapters beside linear layers: y = W x + (alpha / rank) B A x, of which A and B alone are trained.

    A begins with the same random numbers in every run and B at zero, so that training begins with the model itself.

    Args:
        rank: rows of A and columns of B.
        alpha: numerator of the scale of B A x; with a fixed alpha the scale falls as the rank grows.
        targets: "all-linear" for every linear layer but the output head, or names of linear layers as their modules
            end in ("q_proj").
        modules_to_save: names, as they end in, of embeddings, norms or the output head ("lm_head") whose own weights
            are trained beside the adapter, and saved with it.

    Source: arXiv 2106.09685, section 4.1. There only the attention's projections are targets; arXiv 2305.14314,
    section 4, finds that all linear layers are needed to match full fine-tuning. arXiv 2309.12307, section 3.3, trains
    embeddings and norms as well, without which its long contexts are not learned.
    """

    adapts: ClassVar[bool] = True
    added: ClassVar[Mapping[str, Any]] = {"modules_to_save": []}

    def __init__(
        self,
        rank: int = 16,
        alpha: float = 32.0,
        targets: str | Sequence[str] = ALL_LINEAR,
        modules_to_save: Sequence[str] = (),
    ) -> None:
        self.rank = whole_number("adapter.rank", rank)
        self.alpha = float(positive("adapter.alpha", alpha))
        if targets != ALL_LINEAR and not (_names(targets) and targets):
            raise ConfigurationError(
                f"adapter.targets: {shown(targets)} must be {ALL_LINEAR}, or a list of names of linear layers: "
                "adapter.targets=[q_proj,v_proj]"
            )
        self.targets = targets if isinstance(targets, str) else list(targets)
        if not _names(modules_to_save):
            raise ConfigurationError(
                f"adapter.modules_to_save: {shown(modules_to_save)} must be a list of names of embeddings, norms or "
                "the output head: adapter.modules_to_save=[lm_head], or [] for none"
            )
        self.modules_to_save = list(modules_to_save)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters with what is left of the model's own weights."""
        return {**super().semantics(), "weights": "fp32", "dropout": 0.0, "model": "frozen"}


def _names(given: Any) -> bool:
    """Return whether a value is a list of names."""
    return isinstance(given, list | tuple) and all(isinstance(name, str) and name for name in given)
