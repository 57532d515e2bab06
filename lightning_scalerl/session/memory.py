"""Check that a run fits into its device's memory, before anything is allocated; the error suggests a remedy."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.generator.memory import GIB
from lightning_scalerl.measure.memory import Memory, memory_and_advice
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.models import Models

_log = logging.getLogger(__name__)


def check_memory(models: Models, recipe: Recipe, choices: Choices) -> str:
    """Predict the device memory of a fit, and return a line about it; "" if it cannot be predicted.

    A run on the CPU is never refused: host memory is shared, and may be larger than it seems.

    Raises:
        ConfigurationError: the fullest device has too little memory; the message names the nearest setting that fits.
    """
    limit = device_bytes(models.device)
    if limit is None:
        return ""
    model: Any = models.policy.model
    recipe, ranks = replace(recipe, choices=choices), models.ranks
    strategy = "fsdp2" if ranks.sharded else "ddp"
    skeleton = partial(model.__class__, model.config)
    generator_arguments = getattr(recipe.generator, "keywords", {})
    separate_engines = recipe.driver.engine_devices > 0  # engines on separate devices take no memory here
    slots, cache_gib = (
        0 if separate_engines else int(generator_arguments.get("slots") or 0),
        generator_arguments.get("cache_gib"),
    )
    try:
        with torch.random.fork_rng(devices=[]):  # making a model draws random numbers
            memory, remedy = memory_and_advice(
                skeleton, recipe, ranks.count, strategy, slots, cache_gib, limit, ranks.tensor_parallel_size
            )
    except Exception as error:  # a model that cannot be analysed without data may still train
        _log.warning("memory: cannot be predicted for this model (%r); the run starts without the check", error)
        return ""
    if remedy:
        raise ConfigurationError(
            f"memory: this run takes about {memory.peak / GIB:.1f} GiB on its fullest device, which has "
            f"{limit / GIB:.1f} ({listed(memory)}); {remedy}"
        )
    return f"memory: about {memory.peak / GIB:.1f} of {limit / GIB:.1f} GiB on the fullest device ({listed(memory)})"


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for the CPU and devices that do not report it."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def listed(memory: Memory) -> str:
    """Return what takes the fullest device's memory, in GiB, the largest item first."""
    sizes = sorted({**memory.device, **memory.leader}.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if size)
