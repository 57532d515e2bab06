"""Private members of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def attention_implementation(config: Any) -> str | None:
    """Return the attention kernel that a model uses, such as sdpa. transformers has only a public setter."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def is_stateful(model: Any) -> bool:
    """Return whether a model's class keeps a recurrent state. The class states it in a private attribute only."""
    return bool(getattr(model, "_is_stateful", False))


def converts_weights(model: Any) -> bool:
    """Return whether weights were converted when a model was loaded. The list of conversions has no public name."""
    return bool(getattr(model, "_weight_conversions", None))


def copy_weight_conversions(source: Any, target: Any) -> None:
    """Copy a model's weight conversions to a model without weights; only `from_pretrained` sets them publicly."""
    if hasattr(source, "_weight_conversions"):
        target._weight_conversions = source._weight_conversions


def tied_weights(model: Any) -> set[str]:
    """Return the names of weights that a model's class can tie; the public list depends on the instance."""
    return set(getattr(model, "_tied_weights_keys", None) or ())


def ignored_on_save(model: Any) -> Iterable[str]:
    """Return the weights that `save_pretrained` leaves out. Only `save_pretrained` itself applies the list."""
    return model._keys_to_ignore_on_save or ()


def initializes(module: Any) -> bool:
    """Return whether a module has the method that `initialize` calls."""
    return hasattr(module, "_init_weights")


def initialize(owner: Any, module: Any) -> None:
    """Initialize one module as its model does. The public `init_weights` initializes the whole model."""
    owner._init_weights(module)


def checkpoint_function(part: Any) -> Any:
    """Return the function with which a layer is recomputed, if it has one; it can be set but not read publicly."""
    return getattr(part, "_gradient_checkpointing_func", None)


def set_checkpoint_function(part: Any, function: Callable[..., Any]) -> None:
    """Set the function with which a layer is recomputed. Publicly, only the function's arguments can be set."""
    if hasattr(part, "_gradient_checkpointing_func"):
        part._gradient_checkpointing_func = function
