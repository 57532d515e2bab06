"""Memory of a run by its overrides, as `scalerl memory` shows it: no weights are read, nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.distributed.sharded import check_divides
from lightning_scalerl.measure.memory import Memory, fitted, from_config
from lightning_scalerl.member.identify import check_layout
from lightning_scalerl.task.arithmetic_base import new_model
from sweeps.errors import UserError
from sweeps.run.spec import layout_of


def memory_of(
    overrides: Sequence[str], devices: int | None = None, limit: int | None = None
) -> tuple[Memory, int, str, str]:
    """Return the memory of a run, its devices, how they share the model, and a setting that fits where it does not.

    Args:
        overrides: of the run, as on the command line.
        devices: that train it; None for as many as the run's `strategy` asks for, 1 if it leaves that open.
        limit: bytes of a device; None for no limit.

    Raises:
        UserError: overrides that do not compose, or a model whose memory cannot be foretold.
    """
    try:
        return _memory_of(overrides, devices, limit)
    except ConfigurationError as error:
        raise UserError(str(error)) from error


def _memory_of(overrides: Sequence[str], devices: int | None, limit: int | None) -> tuple[Memory, int, str, str]:
    config = compose(overrides)
    if devices is None:
        check_layout(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
        devices = math.prod(layout_of(config) or (1, 1))
    recipe = build_recipe(config, "")
    # A live driver's generators have devices of their own.
    slots = 0 if str(config.driver._target_).endswith("Live") else int(config.generator.get("slots") or 0)
    strategy, skeleton = str(config.strategy.name), _skeleton(config.model)
    most_gib = config.generator.get("cache_gib")
    partners = config.strategy.get("tensor_parallel") or 1
    check_divides(partners, devices)
    found, remedy = fitted(skeleton, recipe, devices, strategy, slots, most_gib, limit, partners)
    return found, devices, strategy, remedy


def _skeleton(model: Any) -> Callable[[], nn.Module]:
    """Return a function that makes the configured model without its weights."""
    if "path" in model:
        return from_config(str(model.path))
    return partial(new_model, int(model.width), int(model.layers), seed=0)
