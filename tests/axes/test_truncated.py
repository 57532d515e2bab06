"""Axis `truncated`: masked completions leave the loss and its denominators but stay in the baseline."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.filter import ZeroVariance
from lightning_scalerl.axes.loss import CISPO
from lightning_scalerl.axes.normalization import NoNormalization, PromptNormalization
from lightning_scalerl.axes.truncated import KeepTruncated, MaskTruncated
from lightning_scalerl.rollouts.rollout import Denominators, Group, PassSize, Source, TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import loss_weights
from tests.axes.test_contract import CREDIT, each_aggregation, each_loss, total_loss
from tests.helpers import make_group

MASK = CREDIT.replacing(MaskTruncated())
REWARDS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]
# Per group: the rollouts that hit the limit. None in the second group, all in the third.
TRUNCATED = [{1, 2}, set(), {0, 1, 2, 3}, {3}]


def groups_of(truncated: list[set[int]], rewards: list[list[float]] = REWARDS) -> list[Group]:
    """Groups of random lengths. In some rollouts, truncated or not, the second token was forced."""
    groups = [make_group(row, admission=number, prompt_length=3 + number) for number, row in enumerate(rewards)]
    for group, cut in zip(groups, truncated, strict=True):
        for index, rollout in enumerate(group.rollouts):
            rollout.finish_reason = "length" if index in cut else "stop"
            if index % 2 and len(rollout.tokens) > 2:
                rollout.sources[1] = Source.FORCED
    return groups


def credited(groups: list[Group]) -> list[tuple[int, int]]:
    return [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.rollouts) if r.finish_reason == "stop"]


def sampled(groups: list[Group], g: int, i: int) -> int:
    return sum(not forced for forced in groups[g].rollouts[i].forced)


def test_masked_rollouts_leave_the_loss_and_everything_it_is_divided_by() -> None:
    groups = groups_of(TRUNCATED)
    batch = assemble(groups, MASK, max_new_tokens=8)
    rows = credited(groups)
    assert len(rows) == 9
    assert batch.row.tolist() == [4 * g + i for g, i in rows]
    assert batch.groups is groups and sum(len(group.rollouts) for group in batch.groups) == 16
    counts = [sampled(groups, g, i) for g, i in rows]
    assert batch.forced_mask.any()
    assert batch.loss_mask.sum(1).tolist() == batch.sample_tokens.tolist() == counts
    group_counts = [
        sum(count for (g, _), count in zip(rows, counts, strict=True) if g == number) for number in range(4)
    ]
    assert group_counts[2] == 0
    assert batch.group_tokens.tolist() == [group_counts[g] for g, _ in rows]
    assert batch.denominators == Denominators(prompts=3, samples=9, tokens=sum(counts), max_tokens=8, scored_samples=16)
    for place, (g, i) in enumerate(rows):
        tokens = groups[g].prompt_tokens + groups[g].rollouts[i].tokens
        assert batch.tokens[place, : batch.lengths[place]].tolist() == tokens


def test_masked_rewards_stay_in_baseline_and_scale() -> None:
    """Values by hand. One group has two masked failures and two successes, the other has no truncation."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    groups = groups_of([{1, 2}, set()], rewards)

    def advantages(normalization: Any) -> list[float]:
        batch = assemble(groups, MASK.replacing(normalization), max_new_tokens=8)
        return [round(value, 5) for value in batch.advantages[:, 0].tolist()]

    assert advantages(NoNormalization()) == [0.5, 0.5, 0.25, 0.25, 0.25, -0.75]
    # Variance: the squares (four of 1/4, two of them masked; three of 1/16; one of 9/16) sum to 7/4, over 8 - 1.
    assert advantages(CREDIT.normalization) == [1.0, 1.0, 0.5, 0.5, 0.5, -1.5]
    one, two = math.sqrt(1 / 3), 0.5
    expected = [0.5 / one, 0.5 / one, 0.25 / two, 0.25 / two, 0.25 / two, -0.75 / two]
    assert advantages(PromptNormalization(ddof=1, eps=0.0)) == pytest.approx(expected, abs=1e-5)


def test_masked_rewards_count_for_the_filter() -> None:
    """Only the truncated rollout differs, and the filter keeps the group. A dropped group counts nowhere."""
    groups = groups_of([{3}, {0}], [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    batch = assemble(groups, MASK.replacing(ZeroVariance()).replacing(NoNormalization()), max_new_tokens=8)
    assert (batch.denominators.prompts, batch.denominators.samples) == (1, 3)
    assert batch.advantages[:, 0].tolist() == [0.25, 0.25, 0.25]


def loss_by_hand(
    groups: list[Group], logprobs: dict[tuple[int, int], list[float]], aggregation: str
) -> tuple[float, Any]:
    """Loss and gradient of CISPO with a cap of 5, computed from the groups in plain Python numbers."""
    centred = [[r.reward - sum(x.reward for x in g.rollouts) / len(g.rollouts) for r in g.rollouts] for g in groups]
    everything = [value for row in centred for value in row]
    mean = sum(everything) / len(everything)
    std = math.sqrt(sum((value - mean) ** 2 for value in everything) / (len(everything) - 1))
    rows = credited(groups)
    prompts = {g for g, _ in rows}
    loss, gradient = 0.0, {}
    for g, i in rows:
        rollout = groups[g].rollouts[i]
        divisor = {
            "PromptAggregation": len(prompts) * sum(sampled(groups, *other) for other in rows if other[0] == g),
            "SampleAggregation": len(rows) * sampled(groups, g, i),
            "TokenAggregation": sum(sampled(groups, *other) for other in rows),
            "SumAggregation": 1,
            "ConstantAggregation": 8 * sum(len(group.rollouts) for group in groups),
        }[aggregation]
        for t, logprob in enumerate(logprobs[g, i]):
            if not rollout.forced[t]:
                ratio = min(5.0, math.exp(logprob - rollout.generator_logprobs[t]))
                gradient[4 * g + i, t] = -ratio * centred[g][i] / (std + 1e-6) / divisor
                loss += gradient[4 * g + i, t] * logprob
    return loss, gradient


def logprob_table(batch: TrainBatch, logprobs: dict[tuple[int, int], list[float]]) -> Tensor:
    table = torch.zeros_like(batch.generator_logprobs)
    for place, row in enumerate(batch.row.tolist()):
        values = logprobs[divmod(row, 4)]
        table[place, : len(values)] = torch.tensor(values)
    return table


@each_aggregation
@pytest.mark.parametrize("truncated", [TRUNCATED, [set()] * 4, [{0}, {1}, {2}, {3}]], ids=["some", "none", "each"])
def test_loss_and_gradient_are_those_of_a_plain_computation(aggregation: Any, truncated: list[set[int]]) -> None:
    groups = groups_of(truncated)
    source = torch.Generator().manual_seed(3)
    logprobs = {
        (g, i): [value + float(torch.randn((), generator=source)) for value in rollout.generator_logprobs]
        for g, group in enumerate(groups)
        for i, rollout in enumerate(group.rollouts)
    }
    expected, expected_gradient = loss_by_hand(groups, logprobs, type(aggregation).__name__)
    choices = MASK.replacing(CISPO(max_ratio=5.0)).replacing(aggregation)
    batch = assemble(groups, choices, max_new_tokens=8)
    trainer_logprobs = logprob_table(batch, logprobs)
    loss = total_loss(batch, trainer_logprobs, choices.loss, aggregation, batch.denominators)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    # The result has one row per rollout. Rows without credit are zero.
    weights, entropy_weights, _ = loss_weights(batch, trainer_logprobs, choices)
    assert not entropy_weights.any()
    assert weights.shape == (16, max(len(r.tokens) for group in groups for r in group.rollouts))
    table = torch.zeros_like(weights)
    for place, value in expected_gradient.items():
        table[place] = value
    assert torch.allclose(weights, table, rtol=1e-4, atol=1e-7)


@each_loss
@each_aggregation
def test_a_batch_of_only_truncated_rollouts_is_a_step_without_loss(loss: Any, aggregation: Any) -> None:
    choices = MASK.replacing(loss).replacing(aggregation)
    batch = assemble(groups_of([{0, 1, 2, 3}] * 4), choices, max_new_tokens=8)
    assert (batch.rollouts, len(batch.groups)) == (0, 4)
    assert batch.denominators == Denominators(prompts=0, samples=0, tokens=0, max_tokens=8, scored_samples=16)
    logprobs = batch.generator_logprobs.clone().requires_grad_(True)
    value = total_loss(batch, logprobs, loss, aggregation, batch.denominators)
    assert value.item() == 0
    assert torch.equal(loss_weights(batch, logprobs, choices), torch.zeros(3, 16, 7))
    assert list(batch.micro_batches(PassSize(4))) == []


def assert_same(one: TrainBatch, two: TrainBatch) -> None:
    for entry in fields(TrainBatch):
        a, b = getattr(one, entry.name), getattr(two, entry.name)
        if isinstance(a, Tensor):
            assert torch.equal(a, b), entry.name
        elif entry.name != "groups":
            assert a == b, entry.name


def test_keep_ignores_truncation() -> None:
    """The batch equals one without truncation, for which `mask` changes nothing either. Sums by hand."""
    groups = groups_of(TRUNCATED)
    kept = assemble(groups, CREDIT, max_new_tokens=8)
    assert_same(kept, assemble(groups_of([set()] * 4), CREDIT, max_new_tokens=8))
    assert_same(kept, assemble(groups_of([set()] * 4), MASK, max_new_tokens=8))
    assert kept.row.tolist() == list(range(16))
    tokens = [sampled(groups, g, i) for g in range(4) for i in range(4)]
    assert kept.denominators == Denominators(prompts=4, samples=16, tokens=sum(tokens), max_tokens=8, scored_samples=16)
    assert kept.group_tokens.tolist() == [sum(tokens[4 * g : 4 * g + 4]) for g in range(4) for _ in range(4)]


def test_semantics_record_that_truncated_rewards_stay_in_the_baseline() -> None:
    assert MaskTruncated().semantics() == {"choice": "MaskTruncated", "truncated_reward_in_baseline": True}
    assert KeepTruncated().semantics()["truncated_reward_in_baseline"] is True
    assert not MaskTruncated().same_as(KeepTruncated())
