"""Forward passes without gradient that some design choices need before a batch's first update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.rollouts.rollout import PassSize, TrainBatch


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
    """Return `rows` with `anchor_logprobs`, `reference_logprobs` and `values` filled in if a choice needs them.

    Args:
        rows: this rank's rows of the batch.
        choices: the run's design choices, which decide whether an anchor is needed.
        policy: the policy with its weights before the update.
        reference: the frozen reference policy; None without a KL penalty.
        critic: the value model; None without a critic.
        size: upper limits of one forward pass.
        ranks: the ranks that train together. With a sharded model all ranks must make the same number of passes.
    """
    passes = {
        "anchor_logprobs": (lambda part: policy(part)[0]) if choices.needs_anchor else None,
        "reference_logprobs": (lambda part: reference(part)[0]) if reference is not None else None,
        "values": (lambda part: critic(part)) if critic is not None else None,
    }
    tables: dict[str, Any] = {
        name: torch.zeros_like(rows.generator_logprobs) for name, forward in passes.items() if forward is not None
    }
    for row_numbers, part in ranks.passes(rows, size) if tables else ():
        for name, table in tables.items():
            values = passes[name](part)  # type: ignore[misc]
            # A pass without rows only keeps this rank in step with the others; its output is dropped.
            if row_numbers.numel():
                # A micro-batch is only as wide as its own longest completion (`TrainBatch.select`).
                table[row_numbers, : values.shape[1]] = values
    return replace(rows, **tables)
