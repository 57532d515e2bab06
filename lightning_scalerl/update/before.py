"""Forward passes without gradient that some design choices need before a batch's first update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.rollouts.rollout import PassSize, TrainBatch


class ServedTeacher(Protocol):
    """Reference model of axis `kl` that a server runs. It returns only the log-probabilities of given tokens."""

    def score(self, rows: TrainBatch) -> Tensor:
        """Return the log-probabilities of the completion tokens, (R, T), zero after a completion's end."""


@torch.no_grad()
def run_forward_passes(
    rows: TrainBatch,
    choices: Choices,
    policy: Policy,
    reference: Policy | ServedTeacher | None,
    critic: ValueModel | None,
    size: PassSize,
    ranks: Ranks,
) -> TrainBatch:
    """Return `rows` with the outputs of models that the choices need before the update (tables of `BEFORE_UPDATE`).

    Args:
        rows: this rank's rows of the batch.
        choices: the run's design choices, which decide what is needed.
        policy: the policy with its weights before the update.
        reference: the reference policy, or a teacher that a server runs; None without KL.
        critic: the value model; None without a critic.
        size: upper limits of one forward pass.
        ranks: the ranks that train together. With a sharded model all ranks must make the same number of passes.
    """
    kl = choices.kl
    passes: list[tuple[tuple[str, ...], Callable[[TrainBatch], Sequence[Tensor]]]] = []
    if choices.needs_logprobs_before_update and kl.reads_vocabulary and not choices.kl_in_update:
        # The policy returns log-probabilities, entropies and divergences; leave out the entropies.
        passes.append((("anchor_logprobs", "divergences"), lambda part: policy(part, teacher=reference)[::2]))
    elif choices.needs_logprobs_before_update:
        passes.append((("anchor_logprobs",), lambda part: policy(part)[:1]))
    if isinstance(reference, Policy) and not kl.reads_vocabulary:
        packs = kl.reference is None or reference.packs
        passes.append(
            (("reference_logprobs",), lambda part: reference(replace(part, packed=part.packed and packs))[:1])
        )
    if critic is not None:
        passes.append((("values",), lambda part: (critic(part),)))
    tables = {name: torch.zeros_like(rows.generator_logprobs) for names, _ in passes for name in names}
    for row_numbers, part in ranks.passes(rows, size) if tables else ():
        for names, forward in passes:
            for name, values in zip(names, forward(part), strict=True):
                # A pass without rows only keeps this rank in step with the others; its output is dropped.
                if row_numbers.numel():
                    # A micro-batch is only as wide as its own longest completion (`TrainBatch.select`).
                    tables[name][row_numbers, : values.shape[1]] = values
    if reference is not None and not isinstance(reference, Policy):
        tables["reference_logprobs"] = reference.score(rows)
    results: dict[str, Any] = dict(tables)
    return replace(rows, **results)
