"""Rollouts of three turns, and the trainer's log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import Group, Prompt, Rollout, TrainBatch
from lightning_scalerl.stream.credit import lay_out

# Numbers of tokens of the two answers, by the rollout's index.
ANSWERS = ((1, 5), (4, 2), (0, 6), (3, 3))


def three_turns(
    generator: Any, asked: Sequence[GroupRequest], after_first: Callable[[], None] = lambda: None
) -> list[FinishedRollout]:
    """Sample rollouts of three turns with two answers between them; `after_first` runs while all wait for the first."""
    for request in asked:
        generator.submit(request)
    expected = sum(request.completions for request in asked)
    for turn in range(3):
        while not generator.idle:
            assert not generator.step().finished
        waiting = generator.waiting
        assert len(waiting) == generator.in_flight == expected
        assert {each.answers for each in waiting} == {turn}
        if turn == 0:
            after_first()
        for each in waiting:
            if turn == 2:
                generator.end(each.key, each.index)
            else:
                length = ANSWERS[each.index % len(ANSWERS)][turn]
                generator.insert(each.key, each.index, [2 + (5 * place + each.index) % 13 for place in range(length)])
    found: list[FinishedRollout] = []
    while generator.in_flight:
        found += generator.step().finished
    assert len(found) == expected
    return found


def largest_gap(models: Mapping[int, Any], prompt: Sequence[int], rollout: Rollout) -> float:
    """Return the largest difference of sampled tokens' log-probabilities between the generator and the trainer.

    Args:
        models: the model by version of its weights. The trainer makes one forward pass over the whole sequence with
            the weights that have sampled a token.
        prompt: the rollout's prompt.
        rollout: the rollout.
    """
    sampled = ~torch.tensor(rollout.inserted)
    versions, recorded = torch.tensor(rollout.weight_versions), torch.tensor(rollout.generator_logprobs)
    assert {*versions[sampled].tolist()} <= models.keys()
    gaps = []
    for version, model in models.items():
        own = sampled & (versions == version)
        trained = Policy(model, Precision("fp32"))(one_row(prompt, rollout))[0][0].detach()
        gaps += (trained - recorded).abs()[own].tolist()
    assert len(gaps) == int(sampled.sum())
    return max(gaps)


def one_row(prompt: Sequence[int], rollout: Rollout) -> TrainBatch:
    """Return a batch of one rollout."""
    return lay_out([(Group(0, Prompt("p", "", ""), list(prompt), [rollout]), rollout, [1.0], 1, 0)])
