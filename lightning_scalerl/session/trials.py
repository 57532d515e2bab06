"""Trials of a model that need its weights: whether its head is known, and whether it can be given packed rows."""

from __future__ import annotations

import logging

from torch import nn

from lightning_scalerl.distributed.start import process_rank
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.packed import packs_rows
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.recipe import Recipe

_log = logging.getLogger(__name__)


def try_out(policy: Policy, recipe: Recipe) -> None:
    """Try a policy's model in FP32, before it has an adapter: once it is made, or has been given its weights.

    Of a sharded one all ranks call it, within a forward pass.

    Raises:
        ConfigurationError: its logits are treated in a way we do not know.
    """
    check_head(policy.model)
    policy.packs = recipe.batch.packed and _packs(policy.model)


def _packs(model: nn.Module) -> bool:
    packs = packs_rows(model)
    if not packs and process_rank() == 0:
        _log.warning(
            "batch.packed: %s computes something else where rows stand one behind the other; they are padded, and "
            "batch.micro_tokens counts the padding",
            type(model).__name__,
        )
    return packs
