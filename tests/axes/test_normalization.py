"""Normalizations of advantages if all values are equal, so that only rounding errors differ from zero."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_scalerl.axes.advantage import group_advantages
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    BatchRewardNormalization,
    Normalization,
    PromptNormalization,
    RunningNormalization,
)

CHOICES = [BatchNormalization, BatchRewardNormalization, PromptNormalization, RunningNormalization]


@pytest.mark.parametrize("choice", CHOICES)
def test_equal_rewards_give_no_advantage_whatever_eps_is(choice: type[Normalization]) -> None:
    """0 / 0 is NaN. The mean of three 0.1 is not exactly 0.1; dividing that rounding error by itself would give 1."""
    for eps, value, size in itertools.product((0.0, 1e-6), (0.0, 1.0, 0.1, -0.7), (2, 3, 7)):
        rewards = [torch.full((size,), value)] * 2
        advantages = [group_advantages(reward) for reward in rewards]
        scaled = torch.cat(choice(eps=eps).scale(advantages, rewards))  # type: ignore[call-arg]
        assert torch.equal(scaled, torch.zeros(2 * size)), (eps, value, size)


def test_one_group_of_equal_rewards_does_not_spoil_the_others() -> None:
    rewards = [torch.full((3,), 0.1), torch.tensor([0.0, 1.0, 1.0])]
    for choice in CHOICES:
        first, second = choice(eps=0.0).scale([group_advantages(reward) for reward in rewards], rewards)  # type: ignore[call-arg]
        assert torch.equal(first, torch.zeros(3)) and second.isfinite().all() and second.abs().min() > 0


@pytest.mark.parametrize("choice", [BatchNormalization, RunningNormalization])
@pytest.mark.parametrize("centre", [False, True])
def test_equal_token_advantages_become_zero_without_eps(
    choice: type[BatchNormalization | RunningNormalization], centre: bool
) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    scaled = choice(eps=0.0, centre=centre).scale_tokens(torch.full((2, 3), 0.1), mask, lambda numbers: numbers)
    assert torch.equal(scaled, torch.zeros(2, 3))
    broken = choice(eps=0.0, centre=centre).scale_tokens(
        torch.full((2, 3), float("nan")), mask, lambda numbers: numbers
    )
    assert broken[mask > 0].isnan().all()  # a NaN must stay visible
