"""The contract of every loss and every aggregation. To test a new one, add a line to LOSSES or AGGREGATIONS."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_scalerl.axes.aggregation import (
    ConstantAggregation,
    PromptAggregation,
    SampleAggregation,
    SumAggregation,
    TokenAggregation,
)
from lightning_scalerl.axes.loss import CISPO, DAPO, DPPO, GMPO, GSPO, PPO, SAPO, ClipCov, KLCov, Reinforce
from lightning_scalerl.axes.normalization import BatchNormalization
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Denominators, TrainBatch
from lightning_scalerl.stream.credit import assemble
from tests.examples import examples
from tests.helpers import make_group, row

LOSSES = [
    CISPO(max_ratio=5.0),
    DAPO(clip_low=0.2, clip_high=0.26),
    GSPO(clip_low=3e-3, clip_high=5e-3),
    PPO(clip=0.2),
    Reinforce(),
    SAPO(tau_pos=1.0, tau_neg=1.05),
    GMPO(clip_low=0.4, clip_high=0.4),
    DPPO(divergence="tv", max_divergence_low=0.2, max_divergence_high=0.2, max_ratio=20.0),
    DPPO(divergence="kl", max_divergence_low=0.05, max_divergence_high=0.05, max_ratio=20.0),
    ClipCov(share=0.1, low=0.2, high=1.0, clip_low=0.2, clip_high=0.2),
    KLCov(share=0.1, coefficient=1.0),
]
AGGREGATIONS = [
    PromptAggregation(),
    SampleAggregation(),
    TokenAggregation(),
    SumAggregation(),
    ConstantAggregation(),
]

# Values that a model or an engine may return for a masked token. 0 times infinity or NaN is not 0.
JUNK = (-7.0, 1e3, math.inf, -math.inf, math.nan)

each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
each_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)

CREDIT = row(BatchNormalization(ddof=1, eps=1e-6))


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
    # Forced tokens leave the loss mask. The denominators stay: all losses below use the same ones.
    forced = torch.zeros_like(batch.forced_mask)
    forced[:, 1] = batch.loss_mask[:, 1] > 0
    forced[batch.sample_tokens < 3] = False
    batch.forced_mask, batch.loss_mask = forced, batch.loss_mask * ~forced
    logprobs = (batch.generator_logprobs + 0.1).requires_grad_(True)
    value = total_loss(batch, logprobs, loss, aggregation, batch.denominators)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert forced.any()
    assert gradient[batch.loss_mask == 0].abs().max() == 0
    inside = batch.loss_mask > 0
    for junk in JUNK:
        junk_logprobs = torch.where(inside, logprobs.detach(), junk).requires_grad_(True)
        tables = {
            name: torch.where(inside, getattr(batch, name), junk) for name in ("generator_logprobs", "advantages")
        }
        disturbed = total_loss(replace(batch, **tables), junk_logprobs, loss, aggregation, batch.denominators)
        assert torch.equal(disturbed.detach(), value.detach())
        assert torch.equal(torch.autograd.grad(disturbed, junk_logprobs)[0], gradient)


@each_loss
@each_aggregation
@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_split_gives_the_same_loss_and_gradient(loss: Any, aggregation: Any, data: st.DataObject) -> None:
    """Invariant 1: ranks, accumulation steps, micro-batches and padding are all ways to split one batch."""
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


def test_weights_of_each_aggregation() -> None:
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
    assert torch.equal(SumAggregation().weights(batch, counts), batch.loss_mask)
    constant = ConstantAggregation().weights(batch, counts)
    assert torch.allclose(constant, batch.loss_mask / (16 * 8))


@pytest.mark.parametrize(
    "loss",
    [
        *(DAPO(0.2, 0.4), GSPO(0.05, 0.1), PPO(0.3), GMPO(0.2, 0.3), ClipCov(clip_low=0.2, clip_high=0.3)),
        *(DPPO("tv", 0.02, 0.03), DPPO("kl", 0.002, 0.003)),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_clipped_is_where_the_gradient_is_gone(loss: Any) -> None:
    batch = batch_of()
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(5))
    logprobs = (batch.generator_logprobs + 0.3 * noise).requires_grad_(True)
    arguments = (batch.generator_logprobs, batch.advantages, batch.loss_mask)
    (gradient,) = torch.autograd.grad((loss.per_token(logprobs, *arguments) * batch.loss_mask).sum(), logprobs)
    clipped = loss.clipped(logprobs.detach(), *arguments)
    credited = (batch.loss_mask > 0) & (batch.advantages != 0)
    assert clipped.shape == batch.loss_mask.shape
    assert torch.equal(clipped[credited], gradient[credited] == 0)
    for sign in (1, -1):
        of_sign = clipped[credited & (batch.advantages.sign() == sign)]
        assert of_sign.any()
        assert not of_sign.all()


@pytest.mark.parametrize("kind", [DAPO, GSPO])
@pytest.mark.parametrize(
    ("field", "low", "high"), [("clip_low", 1.1, 0.2), ("clip_low", 0, 0.2), ("clip_high", 0.2, 0)]
)
def test_bounds_that_cannot_clip_are_refused(kind: Any, field: str, low: float, high: float) -> None:
    with pytest.raises(ConfigurationError, match=f"loss.{field}"):
        kind(clip_low=low, clip_high=high)


def test_cispo_caps_weight_and_keeps_gradient() -> None:
    anchor = torch.zeros(1, 3)
    logprobs = torch.tensor([[2.5, 0.0, -2.0]], requires_grad=True)
    loss = CISPO(max_ratio=5.0).per_token(logprobs, anchor, torch.ones(1, 3), torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    clipped = CISPO(max_ratio=5.0).clipped(logprobs.detach(), anchor, torch.ones(1, 3), torch.ones(1, 3))
    assert clipped.tolist() == [[True, False, False]]
    assert torch.allclose(gradient, -torch.tensor([[5.0, 1.0, torch.e**-2]]))


def test_dapo_clips_on_the_pessimistic_side_only() -> None:
    anchor = torch.zeros(1, 4)
    logprobs = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5]])).requires_grad_(True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss = DAPO(clip_low=0.2, clip_high=0.26).per_token(logprobs, anchor, advantages, torch.ones(1, 4))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.allclose(loss, -torch.tensor([[1.26, -1.5, 0.5, -0.8]]))
    assert torch.allclose(gradient, torch.tensor([[0.0, 1.5, -0.5, 0.0]]))


@pytest.mark.parametrize("clip", [(3e-3, 5e-3), (0.05, 0.1)], ids=str)
@each_aggregation
def test_gspo_is_the_papers_formula_under_sample_and_length_weighted_otherwise(
    aggregation: Any, clip: tuple[float, float]
) -> None:
    """Loss and gradient equal a loop over sequences with a gradient derived by hand. Some tokens are forced."""
    low, high = clip
    batch = batch_of()
    batch.loss_mask[batch.sample_tokens > 2, 1] = 0.0
    batch.sample_tokens = batch.loss_mask.sum(1)
    batch.group_tokens = batch.sample_tokens.reshape(4, 4).sum(1).repeat_interleave(4)
    counts = Denominators(
        prompts=4.0, samples=16.0, tokens=float(batch.loss_mask.sum()), max_tokens=8.0, scored_samples=16.0
    )
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(5))
    logprobs = (batch.generator_logprobs + 0.2 * noise).requires_grad_(True)
    value = total_loss(batch, logprobs, GSPO(low, high), aggregation, counts)
    (gradient,) = torch.autograd.grad(value, logprobs)

    expected, expected_gradient, cases = 0.0, torch.zeros_like(gradient), set()
    for at in range(batch.rollouts):
        tokens = [t for t in range(batch.loss_mask.shape[1]) if batch.loss_mask[at, t]]
        advantage = float(batch.advantages[at, 0])
        log_ratios = (logprobs.detach() - batch.generator_logprobs)[at, tokens].double().tolist()
        ratio = math.prod(map(math.exp, log_ratios)) ** (1 / len(tokens))
        weight = {
            "SampleAggregation": 1 / 16,
            "TokenAggregation": len(tokens) / counts.tokens,
            "PromptAggregation": len(tokens) / (4 * float(batch.group_tokens[at])),
            "SumAggregation": len(tokens),
            "ConstantAggregation": len(tokens) / (16 * 8),
        }[type(aggregation).__name__]
        clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
        bounded = (1 + high if advantage > 0 else 1 - low) if clipped else ratio
        expected -= weight * bounded * advantage
        if not clipped:
            expected_gradient[at, tokens] = -weight * ratio * advantage / len(tokens)
        if advantage:
            cases.add((advantage > 0, ratio > 1, clipped))
    assert cases >= {(True, True, True), (True, False, False), (False, False, True), (False, True, False)}
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-8)


def test_gspo_clips_whole_sequences_on_the_pessimistic_side_only() -> None:
    """Single tokens are far outside the clip range in every row, but only their geometric mean counts."""
    ratios = torch.tensor([1.1, 1.1, 0.9, 0.9, 1.02, 0.98])  # per sequence
    spread = torch.tensor([[2.0, 0.5, 1.0]])
    logprobs = torch.log(ratios.unsqueeze(1) * spread).requires_grad_(True)
    anchor, ones = torch.zeros(6, 3), torch.ones(6, 3)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).unsqueeze(1).expand(6, 3)
    choice = GSPO(clip_low=0.04, clip_high=0.05)
    loss = choice.per_token(logprobs, anchor, advantages, ones)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.shape == (6, 3)
    assert torch.allclose(loss, torch.tensor([-1.05, 1.1, -0.9, 0.96, -1.02, 0.98]).unsqueeze(1))
    # All tokens of a sequence share one gradient, which is zero where the sequence is clipped.
    assert torch.allclose(gradient, torch.tensor([0.0, 1.1, -0.9, 0.0, -1.02, 0.98]).unsqueeze(1), atol=1e-6)
    clipped = choice.clipped(logprobs.detach(), anchor, advantages, ones)
    assert torch.equal(clipped, torch.tensor([True, False, False, True, False, False]).unsqueeze(1).expand(6, 3))


def test_gspo_reads_nothing_outside_the_mask() -> None:
    """A forced token counts as absent, whatever its log-probability. A row without tokens has no loss."""
    choice = GSPO(clip_low=0.2, clip_high=0.3)
    short = torch.tensor([[0.1, -0.05], [0.4, 0.3]])
    advantages = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    absent = choice.per_token(short, torch.zeros(2, 2), advantages, torch.ones(2, 2))
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for junk in (-7.0, -300.0, -math.inf):
        logprobs = torch.full((3, 4), junk)
        logprobs[:2, [0, 2]] = short
        logprobs.requires_grad_(True)
        arguments = (torch.zeros(3, 4), torch.ones(3, 4), mask)
        loss = choice.per_token(logprobs, *arguments)
        (gradient,) = torch.autograd.grad((loss * mask).sum(), logprobs)
        assert torch.equal(loss[:2, [0, 2]], absent)
        assert torch.equal(loss * (1 - mask), torch.zeros(3, 4))
        assert torch.equal(gradient != 0, (mask > 0) & torch.tensor([[True], [False], [False]]))
        assert choice.clipped(logprobs.detach(), *arguments)[:, 0].tolist() == [False, True, False]


def test_gspo_stays_finite() -> None:
    logprobs = torch.tensor([[-400.0, -400.0], [0.0, 0.0]], requires_grad=True)
    anchor = torch.tensor([[0.0, 0.0], [-400.0, -400.0]])
    loss = GSPO(3e-3, 5e-3).per_token(logprobs, anchor, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.ones(2, 2))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_gspo_says_what_its_ratio_is_and_which_aggregation_it_is_defined_with() -> None:
    semantics = GSPO(clip_low=0.25, clip_high=0.5).semantics()
    assert semantics["ratio"] == "sequence, length-normalised"
    assert semantics["ratio_interval"] == [0.75, 1.5]
    assert semantics["defined_with"] == "sample"
    assert "length-weighted" in semantics["under_other_aggregations"]
