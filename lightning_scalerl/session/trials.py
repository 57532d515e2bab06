"""Checks that need a model's weights: that its output head is supported, and whether it can process packed rows."""

from __future__ import annotations

import logging

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.distributed.start import process_rank
from lightning_scalerl.model.head import check_head, computes_in_16_bit_only, text_config
from lightning_scalerl.model.packed import packs_rows
from lightning_scalerl.model.policy import Policy

_log = logging.getLogger(__name__)


def check_model(policy: Policy, packed: bool) -> None:
    """Check a policy's model by small forward passes in FP32, once it has weights and before an adapter is added.

    For a sharded model all ranks call it, within a forward pass. If the model's attention has no FP32 kernel, the model
    is checked in the policy's dtype and on its device, because such kernels need a GPU.

    Args:
        policy: the policy; afterwards `packs` says whether its rows are packed.
        packed: whether the recipe asks for packed rows.

    Raises:
        ConfigurationError: the model transforms its logits in an unknown way, or its attention cannot compute in the
            policy's dtype.
    """
    model, dtype = policy.model, torch.float32
    if computes_in_16_bit_only(model):
        dtype = policy.precision.policy_dtype
        if dtype == torch.float32:
            raise ConfigurationError(
                f"precision: fp32, and {type(model).__name__} has attn_implementation="
                f"{compat.attention_implementation(text_config(model))!r}, which computes in 16 bit only; "
                'give precision=bf16, or load the model with attn_implementation="sdpa"'
            )
    check_head(model, dtype)
    policy.tried = True
    policy.packs = packed and _packs(model, dtype)


def _packs(model: nn.Module, dtype: torch.dtype) -> bool:
    packs = packs_rows(model, dtype)
    if not packs and process_rank() == 0:
        _log.warning(
            "batch.packed: %s computes other values if rows are concatenated; rows are padded instead, and "
            "batch.micro_tokens counts the padding",
            type(model).__name__,
        )
    return packs
