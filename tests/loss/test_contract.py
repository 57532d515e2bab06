"""What every loss and aggregation promises. A new one adds a line to LOSSES or AGGREGATIONS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_scalerl.advantage import GroupAdvantage
from lightning_scalerl.aggregation import PromptAggregation, SampleAggregation, TokenAggregation
from lightning_scalerl.correction import Behaviour
from lightning_scalerl.credit import assemble
from lightning_scalerl.filter import NoFilter
from lightning_scalerl.loss import CISPO, DAPO
from lightning_scalerl.normalization import BatchNormalization
from lightning_scalerl.rollout import TrainBatch
from tests.helpers import make_group

LOSSES = [CISPO(max_ratio=5.0), DAPO(clip_low=0.2, clip_high=0.26)]
AGGREGATIONS = [PromptAggregation(), SampleAggregation(), TokenAggregation()]

each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
each_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)

CREDIT = {
    "filter": NoFilter(),
    "advantage": GroupAdvantage(),
    "normalization": BatchNormalization(ddof=1, eps=1e-6),
    "correction": Behaviour(),
}


def batch_of(seed: int = 0) -> TrainBatch:
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    groups = [make_group(row, admission=i, seed=seed, prompt_length=3 + i) for i, row in enumerate(rewards)]
    return assemble(groups, CREDIT, max_new_tokens=8)


def total_loss(batch: TrainBatch, logprobs: Tensor, loss: Any, aggregation: Any, denominators: Any) -> Tensor:
    per_token = loss.per_token(logprobs, batch.generator_logprobs, batch.advantages, batch.loss_mask)
    return aggregation.reduce(per_token, batch, denominators)


@each_loss
def test_at_ratio_one_the_gradient_is_reinforce(loss: Any) -> None:
    batch = batch_of()
    logprobs = batch.generator_logprobs.clone().requires_grad_(True)
    per_token = loss.per_token(logprobs, batch.generator_logprobs, batch.advantages, batch.loss_mask)
    (gradient,) = torch.autograd.grad((per_token * batch.loss_mask).sum(), logprobs)
    assert torch.allclose(gradient, -batch.advantages * batch.loss_mask, atol=1e-6)
    assert gradient.abs().max() > 0.1


@each_loss
@each_aggregation
def test_masked_and_forced_tokens_change_nothing(loss: Any, aggregation: Any) -> None:
    batch = batch_of()
    # Some tokens were forced: they leave the loss mask, and the counts are those without them.
    forced = torch.zeros_like(batch.forced_mask)
    forced[:, 1] = batch.loss_mask[:, 1] > 0
    forced[batch.sample_tokens < 3] = False
    batch.forced_mask, batch.loss_mask = forced, batch.loss_mask * ~forced
    logprobs = (batch.generator_logprobs + 0.1).requires_grad_(True)
    value = total_loss(batch, logprobs, loss, aggregation, batch.denominators)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert forced.any()
    assert gradient[batch.loss_mask == 0].abs().max() == 0
    disturbed = torch.where(batch.loss_mask > 0, logprobs.detach(), logprobs.detach() - 7.0)
    assert torch.equal(total_loss(batch, disturbed, loss, aggregation, batch.denominators), value.detach())


@each_loss
@each_aggregation
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_loss_and_gradient(loss: Any, aggregation: Any, data: st.DataObject) -> None:
    """Invariant 1: ranks, accumulation steps, micro-batches and padding are all splits of one batch."""
    batch = batch_of(seed=data.draw(st.integers(0, 5)))
    order = torch.tensor(data.draw(st.permutations(range(batch.rollouts))))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch.rollouts - 1), max_size=6)))
    whole = (
        batch.generator_logprobs
        + 0.3 * torch.sin(torch.arange(batch.generator_logprobs.numel())).reshape(batch.generator_logprobs.shape)
    ).requires_grad_(True)
    expected = total_loss(batch, whole, loss, aggregation, batch.denominators)
    (expected_gradient,) = torch.autograd.grad(expected, whole)
    value = torch.zeros(())
    gradient = torch.zeros_like(whole)
    for rows in torch.tensor_split(order, cuts):
        part = batch.select(rows)
        width = part.generator_logprobs.shape[1]
        logprobs = whole.detach()[rows, :width].clone().requires_grad_(True)
        share = total_loss(part, logprobs, loss, aggregation, batch.denominators)
        (part_gradient,) = torch.autograd.grad(share, logprobs)
        value = value + share.detach()
        gradient[rows, :width] += part_gradient
    assert torch.allclose(value, expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_aggregations_weigh_as_they_say() -> None:
    batch = batch_of()
    counts = batch.denominators
    assert (counts.prompts, counts.samples, counts.tokens) == (4, 16, float(batch.loss_mask.sum()))
    prompt = PromptAggregation().weights(batch, counts)
    sample = SampleAggregation().weights(batch, counts)
    token = TokenAggregation().weights(batch, counts)
    for group in range(4):
        rows = slice(4 * group, 4 * group + 4)
        assert prompt[rows].sum() == pytest.approx(1 / 4)
        inside = prompt[rows][batch.loss_mask[rows] > 0]
        assert torch.allclose(inside, inside[0])
    assert torch.allclose(sample.sum(1), torch.full((16,), 1 / 16))
    assert torch.allclose(token[batch.loss_mask > 0], torch.tensor(1 / counts.tokens))


def test_cispo_caps_weight_and_keeps_gradient() -> None:
    anchor = torch.zeros(1, 3)
    logprobs = torch.tensor([[2.5, 0.0, -2.0]], requires_grad=True)
    loss = CISPO(max_ratio=5.0).per_token(logprobs, anchor, torch.ones(1, 3), torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.allclose(gradient, -torch.tensor([[5.0, 1.0, torch.e**-2]]))


def test_dapo_clips_on_the_pessimistic_side_only() -> None:
    anchor = torch.zeros(1, 4)
    logprobs = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5]])).requires_grad_(True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss = DAPO(clip_low=0.2, clip_high=0.26).per_token(logprobs, anchor, advantages, torch.ones(1, 4))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.allclose(loss, -torch.tensor([[1.26, -1.5, 0.5, -0.8]]))
    assert torch.allclose(gradient, torch.tensor([[0.0, 1.5, -0.5, 0.0]]))
