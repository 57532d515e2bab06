"""Forward passes without gradient that a batch needs before its first update, as the choices ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.rollout import PassSize, TrainBatch


@torch.no_grad()
def scored_before(
    rows: TrainBatch,
    choices: Choices,
    policy: Policy,
    reference: Policy | None,
    critic: ValueModel | None,
    size: PassSize,
    ranks: Ranks,
) -> TrainBatch:
    """Return `rows` with `anchor_logprobs`, `reference_logprobs` and `values`, each where a choice needs it.

    Args:
        rows: this rank's rows of the batch.
        choices: the run's design choices; they say whether an anchor is needed.
        policy: the policy with its weights before the update.
        reference: the frozen reference policy; None without a KL penalty.
        critic: the value model; None without a critic.
        size: upper limits of one forward pass.
        ranks: those that train together; with a sharded model all make as many passes.
    """
    passes = {
        "anchor_logprobs": (lambda part: policy(part)[0]) if choices.needs_anchor else None,
        "reference_logprobs": (lambda part: reference(part)[0]) if reference is not None else None,
        "values": (lambda part: critic(part)) if critic is not None else None,
    }
    found: dict[str, Any] = {
        name: torch.zeros_like(rows.generator_logprobs) for name, ask in passes.items() if ask is not None
    }
    for cut, part in ranks.passes(rows, size) if found else ():
        for name, into in found.items():
            values = passes[name](part)  # type: ignore[misc]
            if cut.numel():
                # A micro-batch is cut to its own longest completion (`TrainBatch.select`).
                into[cut, : values.shape[1]] = values
    return replace(rows, **found)
