"""Prediction of a run's memory from its overrides, for `scalerl memory`; no weights are read and nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_scalerl.checks import ConfigurationError, check_layout
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.distributed.sharded import check_divides
from lightning_scalerl.measure.memory import Memory, memory_and_advice, model_builder
from lightning_scalerl.task.arithmetic_base import new_model
from sweeps.errors import UserError
from sweeps.run.spec import layout_of


def memory_of(
    overrides: Sequence[str], devices: int | None = None, limit: int | None = None
) -> tuple[Memory, int, str, str]:
    """Predict the memory of a run.

    Args:
        overrides: overrides of the run, as on the command line.
        devices: number of training devices; None for the number in the run's `strategy`, or 1 if it has none.
        limit: bytes of one device; None for no limit.

    Returns:
        The memory, the number of devices, the strategy, and advice on a setting that fits into `limit` ("" if the run
        fits or there is no limit).

    Raises:
        UserError: the overrides are invalid, or the model's memory cannot be predicted.
    """
    try:
        return _memory_of(overrides, devices, limit)
    except ConfigurationError as error:
        raise UserError(str(error)) from error


def _memory_of(overrides: Sequence[str], devices: int | None, limit: int | None) -> tuple[Memory, int, str, str]:
    if devices is not None and devices < 1:
        raise ConfigurationError(f"--devices {devices}: give 1 or more")
    config = compose(overrides)
    if devices is None:
        check_layout(config.strategy)
        devices = math.prod(layout_of(config) or (1, 1))
    recipe = build_recipe(config, "")
    # A live driver's generators use other devices, so they need no memory on the trainer's.
    slots = 0 if str(config.driver._target_).endswith("Live") else int(config.generator.get("slots") or 0)
    strategy, skeleton = str(config.strategy.name), _skeleton(config.model)
    cache_gib = config.generator.get("cache_gib")
    tensor_parallel = config.strategy.get("tensor_parallel") or 1
    check_divides(tensor_parallel, devices)
    memory, remedy = memory_and_advice(skeleton, recipe, devices, strategy, slots, cache_gib, limit, tensor_parallel)
    return memory, devices, strategy, remedy


def _skeleton(model: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the configured model without loading its weights."""
    if "path" in model:
        return model_builder(str(model.path))
    return partial(new_model, int(model.width), int(model.layers), seed=0)
