"""Checks of the values that a choice's methods return: a missing `return` or a wrong shape is an error.

Without these checks, such a result would be broadcast, or count as false, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.checks import CannotGoOnError


def check_shape(
    choice: DesignChoice, method: str, result: Any, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the result of `choice.method` if it is a tensor of this shape, and of this type if one is given.

    Raises:
        CannotGoOnError: otherwise.
    """
    if not hasattr(result, "shape") or tuple(result.shape) != tuple(shape):
        raise _error(choice, method, _described(result), f"shape {tuple(shape)}")
    if dtype is not None and result.dtype != dtype:
        raise _error(choice, method, str(result.dtype), str(dtype))
    tensor: Tensor = result
    return tensor


def check_loss(choice: DesignChoice, method: str, result: Any, logprobs: Tensor) -> Tensor:
    """Return the result of `choice.method` if it has the shape (R, T) of `logprobs`, and a gradient if they have one.

    Raises:
        CannotGoOnError: the shape is wrong, or the loss is detached. A detached loss trains nothing. If another term
            of the loss has a gradient, torch does not report it.
    """
    loss = check_shape(choice, method, result, logprobs.shape)
    if logprobs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise _error(
            choice, method, "a tensor without a gradient", "one that depends on the trainer's log-probabilities"
        )
    return loss


def check_shapes(choice: DesignChoice, method: str, results: Any, examples: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of `choice.method` as a list if they are tensors with the shapes of `examples`, in order.

    Raises:
        CannotGoOnError: otherwise.
    """
    try:
        tensors = list(results)
    except TypeError:
        tensors = []
    if results is None or len(tensors) != len(examples):
        got = f"a list of {len(tensors)}" if isinstance(results, list | tuple) else _described(results)
        raise _error(choice, method, got, f"a list of {len(examples)} tensors")
    return [
        check_shape(choice, method, tensor, example.shape) for tensor, example in zip(tensors, examples, strict=True)
    ]


def check_bool(choice: DesignChoice, method: str, result: Any) -> bool:
    """Return the result of `choice.method` if it is a boolean, or a tensor or array with one boolean.

    Raises:
        CannotGoOnError: otherwise.
    """
    value = result.item() if getattr(result, "shape", None) == () else result
    if not isinstance(value, bool):
        raise _error(choice, method, _described(result), "True or False")
    return value


def number(choice: DesignChoice, method: str, result: Any) -> float:
    """Return the result of `choice.method` if it is a finite number, or a tensor or array with one.

    Raises:
        CannotGoOnError: otherwise.
    """
    value = result.item() if getattr(result, "shape", None) == () else result
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _error(choice, method, _described(result), "a finite number")
    return value


def positive_count(choice: DesignChoice, method: str, result: Any) -> int:
    """Return the result of `choice.method` if it is a whole number of 1 or more.

    Raises:
        CannotGoOnError: otherwise.
    """
    if isinstance(result, bool) or not hasattr(result, "__index__") or index(result) < 1:
        raise _error(choice, method, _described(result), "a whole number, 1 or more")
    return index(result)


def _error(choice: DesignChoice, method: str, got: str, expected: str) -> CannotGoOnError:
    return CannotGoOnError(
        f"{choice.axis}: {type(choice).__name__}.{method} returned {got}, and must return {expected}"
    )


def _described(result: Any) -> str:
    if result is None:
        return "None (is a `return` missing?)"
    if hasattr(result, "shape"):
        return f"shape {tuple(result.shape)}" + (f" ({result.item()!r})" if result.shape == () else "")
    return " ".join(repr(result).split())[:80]
