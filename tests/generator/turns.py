"""Helpers to sample rollouts of three turns, and to compare their log-probabilities with the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import Group, Prompt, Rollout, TrainBatch
from lightning_scalerl.stream.credit import to_tensors

# Lengths of the two answers of a rollout, by the rollout's index.
ANSWERS = ((1, 5), (4, 2), (0, 6), (3, 3))


def three_turns(
    generator: Any, submitted: Sequence[GroupRequest], after_first: Callable[[], None] = lambda: None
) -> list[FinishedRollout]:
    """Sample rollouts of three turns with two answers between them; call `after_first` while all wait for the first."""
    for request in submitted:
        generator.submit(request)
    expected = sum(request.completions for request in submitted)
    for turn in range(3):
        while not generator.idle:
            assert not generator.step().finished
        waiting = generator.waiting
        assert len(waiting) == generator.in_flight == expected
        assert {entry.answers for entry in waiting} == {turn}
        if turn == 0:
            after_first()
        for entry in waiting:
            if turn == 2:
                generator.end(entry.key, entry.index)
            else:
                length = ANSWERS[entry.index % len(ANSWERS)][turn]
                generator.insert(
                    entry.key, entry.index, [2 + (5 * place + entry.index) % 13 for place in range(length)]
                )
    ended: list[FinishedRollout] = []
    while generator.in_flight:
        ended += generator.step().finished
    assert len(ended) == expected
    return ended


def largest_gap(models: Mapping[int, Any], prompt: Sequence[int], rollout: Rollout) -> float:
    """Return the largest difference of sampled tokens' log-probabilities between the generator and the trainer.

    models: the model by version of its weights. The trainer computes each token in one forward pass over the
        whole sequence, with the weights that sampled the token.
    prompt: the rollout's prompt tokens.
        prompt: the rollout's prompt.
        rollout: the rollout.
    """
    sampled = ~torch.tensor(rollout.inserted)
    versions, recorded = torch.tensor(rollout.weight_versions), torch.tensor(rollout.generator_logprobs)
    assert {*versions[sampled].tolist()} <= models.keys()
    gaps = []
    for version, model in models.items():
        of_version = sampled & (versions == version)
        trained = Policy(model, Precision("fp32"))(one_row(prompt, rollout))[0][0].detach()
        gaps += (trained - recorded).abs()[of_version].tolist()
    assert len(gaps) == int(sampled.sum())
    return max(gaps)


def one_row(prompt: Sequence[int], rollout: Rollout) -> TrainBatch:
    """Return a batch of one rollout."""
    return to_tensors([(Group(0, Prompt("p", "", ""), list(prompt), [rollout]), rollout, [1.0], 1, 0)])
