"""Axis `adapter`: which weights are trained, all of the policy's or only low-rank adapters added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError, positive, shown, whole_number

# peft's keyword for all linear layers except the output head.
ALL_LINEAR = "all-linear"


class Adapter(DesignChoice):
    """Choice of the weights that are trained: those of an adapter or, without one, all of the model's weights.

    Attributes:
        adapts: whether the choice adds such weights.
    """

    axis: ClassVar[str] = "adapter"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoAdapter"}
    adapts: ClassVar[bool] = False

    def differs(self, other: Adapter, step: ObservedStep) -> bool:
        """Return whether the step trains on any token. If so, the two choices update different weights."""
        return step.batch.denominators.tokens > 0


class NoAdapter(Adapter):
    """No adapter: all weights of the model are trained."""


class LoRA(Adapter):
    """Low-rank adapters on linear layers: y = W x + (alpha / rank) B A x. Only A and B are trained.

    A starts from the same random numbers in every run and B from zero, so the adapted model starts equal to the base
    model.

    Args:
        rank: rows of A and columns of B.
        alpha: numerator of the scale of B A x; with a fixed alpha the scale falls as the rank grows.
        targets: "all-linear" for every linear layer except the output head, or the last parts of module names
            ("q_proj").
        modules_to_save: embeddings, norms or the output head whose own weights are trained as well and saved with the
            adapter, by the last parts of their names ("lm_head").

    Source: arXiv 2106.09685, section 4.1, which adapts the attention projections only. arXiv 2305.14314, section 4,
    finds that all linear layers are needed to match full fine-tuning. arXiv 2309.12307, section 3.3, also trains
    embeddings and norms, and finds that long contexts are not learned otherwise.
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
        if targets != ALL_LINEAR and not (_is_list_of_names(targets) and targets):
            raise ConfigurationError(
                f"adapter.targets: {shown(targets)} must be {ALL_LINEAR}, or a list of names of linear layers: "
                "adapter.targets=[q_proj,v_proj]"
            )
        self.targets = targets if isinstance(targets, str) else list(targets)
        if not _is_list_of_names(modules_to_save):
            raise ConfigurationError(
                f"adapter.modules_to_save: {shown(modules_to_save)} must be a list of names of embeddings, norms or "
                "the output head: adapter.modules_to_save=[lm_head], or [] for none"
            )
        self.modules_to_save = list(modules_to_save)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries for the adapter's type and dropout and for the frozen base model."""
        return {**super().semantics(), "weights": "fp32", "dropout": 0.0, "model": "frozen"}


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
