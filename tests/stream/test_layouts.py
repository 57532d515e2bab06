"""Forecasts of layouts: they are what the virtual clock does, and turn where work and devices turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.stream.layouts import Measured, Workload, calibrated, foretell, splits
from tests.helpers import row
from tests.stream.test_rollout_stream import rates


def work(mode: AsyncMode, **changed: Any) -> Workload:
    values = {"groups": 4, "completions": 4, "slots": 64, "prompt_tokens": 8.0, "completion_tokens": 12.0}
    return Workload(choices=row(mode), max_new_tokens=24, **{**values, **changed})  # type: ignore[arg-type]


def test_whoever_is_slower_is_never_idle() -> None:
    """A training step of 100 s, and one of 1 s, beside rollouts of some ten tokens of a second each."""
    trainer, generator = (foretell(work(Pipeline(8)), rates(train_s=seconds)) for seconds in (100.0, 1.0))
    assert trainer.trainer_idle == 0 and trainer.step_s == pytest.approx(100) and trainer.generator_idle > 0.5
    assert generator.generator_idle < 0.05 and generator.trainer_idle > 0.4
    assert generator.trainer_s == pytest.approx(1)


def test_taking_turns_is_as_slow_as_both_together() -> None:
    found = foretell(work(OnPolicy()), rates(train_s=30.0))
    assert found.step_s == pytest.approx(found.trainer_s + found.generator_s)
    assert found.trainer_idle + found.generator_idle == pytest.approx(1)
    beside = foretell(work(Pipeline(8)), rates(train_s=30.0))
    assert beside.step_s < 0.9 * found.step_s and foretell(work(PPOOffPolicy(4)), rates(train_s=30.0)).step_s > 0


def test_twice_the_trainer_takes_half_the_time() -> None:
    one, two = (
        foretell(work(Pipeline(8)), rates(train_s=0.0, train_token_s=1.0, trainer_devices=number)) for number in (1, 2)
    )
    assert one.trainer_idle == two.trainer_idle == 0
    assert one.step_s / two.step_s == pytest.approx(2, rel=0.05)
    assert one.device_hours == pytest.approx(one.step_s * 2 * 1000 / 3600)


def test_long_completions_are_stepped_many_tokens_at_a_time() -> None:
    """The same work a hundred times as long costs the clock no more steps, and comes to a hundred times the time."""
    few = foretell(work(Pipeline(8)), rates(train_s=0.0, train_token_s=0.01))
    long = work(Pipeline(8), prompt_tokens=800.0, completion_tokens=1200.0)
    many = foretell(replace(long, max_new_tokens=2400), rates(train_s=0.0, train_token_s=0.01))
    assert many.step_s / few.step_s == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("train_s", [2.0, 40.0])
def test_calibrated_rates_give_back_what_was_measured_and_foretell_the_truth_elsewhere(train_s: float) -> None:
    truth = rates(decode_s=0.7, decode_rollout_s=0.07, train_s=train_s, publish_s=0.2)
    there = foretell(work(Pipeline(8)), truth)
    known = Measured(there.step_s, there.trainer_idle, there.generator_idle, 0.2)
    found = calibrated(work(Pipeline(8)), rates(decode_s=1.0, decode_rollout_s=0.1, train_s=1.0), known)
    assert found.train_s == pytest.approx(train_s, rel=0.02) and found.decode_s == pytest.approx(0.7, rel=0.02)
    for split in ({"generator_devices": 3}, {"trainer_devices": 2}):
        one, other = (foretell(work(Pipeline(8)), replace(model, **split)) for model in (truth, found))
        assert other.step_s == pytest.approx(one.step_s, rel=0.02)
        assert other.trainer_idle == pytest.approx(one.trainer_idle, abs=0.02)


@pytest.mark.slow
def test_the_best_split_is_found_among_all_and_first() -> None:
    cluster = rates(decode_s=1.0, decode_rollout_s=0.3, train_s=0.0, train_token_s=0.2)
    load = work(Pipeline(8), slots=8)
    found = splits(load, cluster, 12)
    every = [
        foretell(load, replace(cluster, generator_devices=number, trainer_devices=12 - number))
        for number in range(1, 12)
    ]
    assert found[0].step_s == min(layout.step_s for layout in every)
    assert [layout.step_s for layout in found] == sorted(layout.step_s for layout in found)
    assert 1 < found[0].generator_devices < 11
    both = splits(load, replace(cluster, tensor_parallel_s=0.1), 12, (1, 4, 16))
    assert {layout.tensor_parallel for layout in both} == {1, 4}, "engines of 16 there are none"
    assert all(layout.generator_devices % layout.tensor_parallel == 0 and layout.devices == 12 for layout in both)
    assert splits(load, cluster, 1) == []
