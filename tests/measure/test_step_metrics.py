"""Metrics of a step compared with values by hand, and the alarm for truncated completions."""

from __future__ import annotations

import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.axes.aggregation import PromptAggregation
from lightning_scalerl.axes.filter import ZeroVariance
from lightning_scalerl.axes.loss import CISPO
from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.measure.step_metrics import Pass, staleness, step_metrics
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.rollouts.rollout import Group, PassSize, Rollout, Source
from lightning_scalerl.stream.credit import assemble
from tests.axes.test_contract import CREDIT
from tests.helpers import make_group

CHOICES = CREDIT.replacing(CISPO(max_ratio=1.5)).replacing(PromptAggregation())


# A pass without scored tokens.
NOT_SCORED = [Pass([], {}, {})]


def sampled_by(*versions: int) -> Rollout:
    tokens = len(versions)
    return Rollout([1] * tokens, [0.0] * tokens, list(versions), [False] * tokens, "stop")


def test_staleness_by_hand() -> None:
    metrics = staleness([sampled_by(0, 0, 1, 3), sampled_by(2, 2), sampled_by(5)], completed_steps=5)
    assert metrics == {
        "train/staleness_mean": pytest.approx((5 + 5 + 4 + 2 + 3 + 3 + 0) / 7),
        "train/staleness_p95": 5,
        "train/staleness_max": 5,
        "train/staleness_in_flight_mean": pytest.approx((3 + 3 + 2) / 7),
        "train/staleness_in_flight_p95": 3,
        "train/staleness_in_flight_max": 3,
        "train/staleness_queued_mean": pytest.approx((4 * 2 + 2 * 3) / 7),
        "train/staleness_queued_p95": 3,
        "train/staleness_queued_max": 3,
    }


def test_the_95th_percentile_leaves_out_one_token_in_twenty() -> None:
    """One old token of 20 does not raise it, two do. One of 10 does."""
    fresh = [sampled_by(*[9] * 9)]
    for rollouts, expected in (
        ([*fresh, sampled_by(0, *[9] * 10)], 0),
        ([*fresh, sampled_by(0, 0, *[9] * 9)], 9),
        ([*fresh, sampled_by(0)], 9),
    ):
        assert staleness(rollouts, 9)["train/staleness_p95"] == expected


@given(
    versions=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30).map(sorted), min_size=1, max_size=6),
    since=st.integers(0, 5),
)
def test_staleness_is_time_in_flight_and_time_queued(versions: list[list[int]], since: int) -> None:
    now = 9 + since
    metrics = staleness([sampled_by(*row) for row in versions], now)
    parts = {
        "staleness": [now - version for row in versions for version in row],
        "staleness_in_flight": [row[-1] - version for row in versions for version in row],
        "staleness_queued": [now - row[-1] for row in versions for _ in row],
    }
    for name, steps in parts.items():
        assert metrics[f"train/{name}_mean"] == pytest.approx(np.mean(steps))
        assert metrics[f"train/{name}_p95"] == sorted(steps)[math.ceil(0.95 * len(steps) - 1e-9) - 1]
        assert metrics[f"train/{name}_max"] == max(steps)
    parts_sum = metrics["train/staleness_in_flight_mean"] + metrics["train/staleness_queued_mean"]
    assert metrics["train/staleness_mean"] == pytest.approx(parts_sum)


def some_groups() -> list[Group]:
    """Nine rollouts: three correct, four interrupted, three truncated. Two are both interrupted and truncated."""
    groups = [make_group([1.0, 0.0, 1.0], 0), make_group([0.0, 0.5, 1.0], 1), make_group([0.0, 0.0, 0.0], 2)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for number, rollout in enumerate(rollouts):
        size = 3 + number
        rollout.tokens, rollout.weight_versions = [1] * size, [0] * size
        rollout.generator_logprobs = [-1.0 - 0.1 * place for place in range(size)]
        rollout.sources = [0] * size
        rollout.finish_reason = "length" if number in (3, 4, 8) else "stop"
    for number, forced in ((0, 1), (3, 2), (4, 3), (5, 4)):
        rollouts[number].sources[1 : 1 + forced] = [Source.FORCED] * forced
    return groups


def test_shares_by_hand() -> None:
    batch = assemble(some_groups(), CHOICES, max_new_tokens=20)
    metrics = step_metrics(batch, NOT_SCORED, CHOICES, completed_steps=0)
    tokens = sum(range(3, 12))
    assert metrics["train/pass_rate"] == pytest.approx(3 / 9)
    assert metrics["train/reward"] == pytest.approx(3.5 / 9)
    assert metrics["train/completion_tokens"] == pytest.approx(tokens / 9)
    assert metrics["train/truncated"] == pytest.approx(3 / 9)
    assert metrics["train/interrupted"] == pytest.approx(4 / 9)
    assert metrics["train/forced_tokens"] == pytest.approx(10 / tokens)
    assert metrics["train/groups_kept"] == 1
    assert metrics["train/zero_variance"] == pytest.approx(1 / 3)
    # Two more groups were sampled, and replaced because their rewards were equal.
    with_dropped = step_metrics(batch, NOT_SCORED, CHOICES, completed_steps=0, dropped=2)
    assert with_dropped["train/zero_variance"] == pytest.approx(3 / 5)


def test_shares_count_all_sampled_rollouts_with_or_without_credit() -> None:
    """Filter and mask change which groups and rollouts count as credited, but no other share."""
    groups = some_groups()
    whole = step_metrics(assemble(groups, CHOICES, 20), NOT_SCORED, CHOICES, 2)
    masked = CHOICES.replacing(ZeroVariance()).replacing(MaskTruncated())
    metrics = step_metrics(assemble(groups, masked, 20), NOT_SCORED, masked, 2)
    credit_metrics = {name for name in metrics if name.startswith(("train/groups_kept", "train/credited_"))}
    assert metrics["train/groups_kept"] == pytest.approx(2 / 3)
    assert (metrics["train/credited_prompts"], metrics["train/credited_rollouts"]) == (2, 4)
    assert {name: metrics[name] for name in metrics if name not in credit_metrics} == {
        name: value for name, value in whole.items() if name not in credit_metrics
    }
    assert metrics["train/staleness_mean"] == 2


@pytest.mark.parametrize("junk", [15.0, math.nan])
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_token_metrics_do_not_depend_on_the_micro_batches(size: int, junk: float) -> None:
    """Metrics equal numpy's over all credited tokens at once. Forced and padded positions do not count."""
    choices = CHOICES.replacing(MaskTruncated())
    batch = assemble(some_groups(), choices, max_new_tokens=20)
    width = batch.loss_mask.shape[1]
    generator = torch.Generator().manual_seed(1)
    drift, entropies = torch.randn(2, 9, width, generator=generator)
    parts = []
    for part in batch.micro_batches(PassSize(size)):
        place, columns = part.row, part.loss_mask.shape[1]
        outside = part.loss_mask == 0
        logprobs = part.generator_logprobs + drift[place, :columns].masked_fill(outside, junk)
        parts.append((part, logprobs, entropies[place, :columns].masked_fill(outside, 1e3 * junk)))
    metrics = step_metrics(batch, [Pass(parts, {}, {})], choices, completed_steps=0)

    mask = batch.loss_mask.numpy() > 0
    steps = drift[batch.row].numpy()[mask].astype(np.float64)
    ratios = np.exp(steps)
    assert 0 < (ratios > 1.5).mean() < 1
    for name, expected in (
        ("entropy", entropies[batch.row].numpy()[mask].mean()),
        ("clip_fraction", (ratios > 1.5).mean()),
        ("logprob_gap", np.abs(steps).mean()),
        ("ratio_mean", ratios.mean()),
        ("ratio_max", ratios.max()),
        ("ratio_min", ratios.min()),
        ("mismatch_kl", (ratios - 1 - steps).mean()),
        ("effective_samples", ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
    ):
        assert metrics[f"train/{name}"] == pytest.approx(float(expected), rel=1e-4), name


def test_a_step_without_credit_reports_numbers_and_no_means_over_tokens() -> None:
    groups = some_groups()
    for group in groups:
        for rollout in group.rollouts:
            rollout.finish_reason = "length"
    choices = CHOICES.replacing(MaskTruncated())
    metrics = step_metrics(assemble(groups, choices, 20), NOT_SCORED, choices, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["train/truncated"], metrics["train/groups_kept"], metrics["train/credited_tokens"]) == (1, 0, 0)
    assert not {"train/entropy", "train/mismatch_kl", "train/clip_fraction", "train/ratio_max"} & metrics.keys()


def levels(alarm: TruncationAlarm, shares: list[float], first: int = 1) -> list[float]:
    return [alarm.observe(share, first + place)["alarm/truncated"] for place, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("share", "level"), [(0.0, 0), (0.05, 0), (0.099, 0), (0.1, 1), (0.149, 1), (0.15, 2), (0.16, 2), (1.0, 2)]
)
def test_alarm_levels(share: float, level: int) -> None:
    """Levels refer to the mean over 16 steps. Fewer steps give level 0."""
    assert levels(TruncationAlarm(), [share] * 20) == [0] * 15 + [level] * 5


@pytest.mark.parametrize(("shares", "level"), [((0.2, 0.0), 1), ((0.05, 0.25), 2), ((0.1, 0.2), 2), ((0.19, 0.0), 0)])
def test_an_alarm_exactly_at_a_level_does_not_depend_on_rounding(shares: tuple[float, float], level: int) -> None:
    assert levels(TruncationAlarm(), [*shares] * 8)[-1] == level


def test_the_alarm_covers_the_last_16_steps() -> None:
    alarm = TruncationAlarm()
    # With two steps of 1.0 among 16 the mean is 12.5%, with three 18.75%.
    assert levels(alarm, [0.0] * 15 + [1.0] * 4) == [0] * 16 + [1, 2, 2]
    assert levels(alarm, [0.0] * 17) == [2] * 13 + [1, 0, 0, 0]


RISES = [0.0] * 16 + [1.0] * 3 + [0.0] * 16 + [1.0] * 2 + [0.0] * 3 + [1.0]


def test_each_rise_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        observed = levels(TruncationAlarm(), RISES)
    rises = [place for place, (a, b) in enumerate(zip([0.0, *observed], observed, strict=False)) if b > a]
    assert rises == [17, 18, 36, 40]
    messages = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert [message.split(":")[0] for message in messages] == [f"step {place + 1}" for place in rises]
    assert "12% of the completions of the last 16 steps" in messages[0]
    assert "(alarm at 10%)" in messages[0] and "context.max_new_tokens" in messages[0]
    assert not any("\n" in message for message in messages)


def test_both_levels_at_once_are_one_rise(caplog: pytest.LogCaptureFixture) -> None:
    levels(TruncationAlarm(), [0.5] * 30)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("stop", [0, 9, 16, 17, 18, 25, 40])
def test_the_alarm_continues_after_a_resume(stop: int, caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[Any]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    whole = levels(TruncationAlarm(), RISES)
    expected = logged()
    first, second = TruncationAlarm(), TruncationAlarm()
    observed = levels(first, RISES[:stop])
    state = pickle.dumps(first.state_dict())
    second.load_state_dict(pickle.loads(state))
    assert pickle.dumps(second.state_dict()) == state
    observed += levels(second, RISES[stop:], first=stop + 1)
    assert observed == whole
    assert logged() == expected
