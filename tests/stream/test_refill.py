"""Tests of filter=dynamic_sampling in the stream: full batches with variance, bounded staleness, and an end."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.allocation import AllocationByDifficulty
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.filter import DynamicSampling, Filter, ZeroVariance
from lightning_scalerl.axes.resampling import NoPositiveResampling, UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout
from lightning_scalerl.measure.step_metrics import Pass, step_metrics
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import VirtualDriver
from tests.examples import examples
from tests.helpers import CountingTask, grade, inline, row, sampler
from tests.scripted import ScriptedGenerator
from tests.stream.test_rollout_stream import MODES, RATES, parts, rates, script_of, train

Lengths = dict[tuple[int, int], int]


class ByLength(CountingTask):
    """Task in which a completion's text is its number of tokens; an odd number passes."""

    def reward(self, prompt: Any, completion: str) -> float:
        return float(int(completion) % 2)

    def is_correct(self, reward: float) -> bool:
        return reward > 0


def driver_of(
    mode: AsyncMode,
    lengths: Lengths | None = None,
    *more: DesignChoice,
    groups: int = 2,
    slots: int = 5,
    cost_model: CostModel | None = None,
    chosen: Filter | None = None,
    pool: int = 99,
) -> tuple[VirtualDriver, list[Event]]:
    """Two rollouts per group: a group has variance if one length is odd and the other even."""
    events: list[Event] = []
    task = ByLength(prompts=pool)
    choices = row(mode, chosen or DynamicSampling(most_dropped=1000), *more)
    stream = RolloutStream(
        prompts=PromptSource(task.train_prompts(), (0,), choices.resampling),
        task=task,
        encode=lambda text: [1, 2],
        sample=sampler(lambda tokens: str(len(tokens))),
        choices=choices,
        groups_per_step=groups,
        completions=2,
        max_new_tokens=1000,
        seed=0,
    )
    generator = ScriptedGenerator(script_of(lengths), slots)
    return VirtualDriver(stream, generator, dict, cost_model or rates(), inline(stream), [events.append]), events


def some_lengths(seed: int, giant: bool = False, share: float = 0.5) -> Lengths:
    """Random lengths for more groups than will be sampled; about `share` of the groups have no variance."""
    source = random.Random(seed)
    lengths: Lengths = {}
    for group in range(900):
        first = source.randint(1, 7)
        alike = source.random() < share
        lengths[group, 0] = first
        lengths[group, 1] = source.choice([n for n in range(1, 8) if (n % 2 == first % 2) == alike])
    if giant:
        lengths[3, 1] += 800
    return lengths


def varies(lengths: Lengths, group: int) -> bool:
    return lengths[group, 0] % 2 != lengths[group, 1] % 2


@settings(max_examples=examples(100))
@given(
    mode=MODES,
    cost_model=RATES,
    slots=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    giant=st.booleans(),
    share=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_batches_are_full_and_no_staler_than_the_mode_says(
    mode: AsyncMode, cost_model: CostModel, slots: int, groups: int, seed: int, giant: bool, share: float
) -> None:
    """Invariant 4 with dropped groups: for random lengths, rates and k, no group is lost or trained twice."""
    lengths = some_lengths(seed, giant, share)
    driver, events = driver_of(mode, lengths, groups=groups, slots=slots, cost_model=cost_model)
    stream = driver.stream
    resolved: list[str] = []
    stream.prompts.resolved = lambda prompt_id, pass_rate: resolved.append(prompt_id)  # type: ignore[method-assign]
    seen: list[int] = []
    dropped = 0
    for step in range(8):
        batch = driver.next_batch()
        assert batch is not None and len(batch.groups) == groups
        assert batch.denominators.prompts == groups and batch.rollouts == 2 * groups
        for group in batch.groups:
            assert varies(lengths, group.admission)
            assert step - group.oldest_version <= mode.max_staleness
            seen.append(group.admission)
        dropped += stream.dropped_for_batch
        stream.step_completed()
    waiting = [group.admission for group in stream._ready]
    gone = set(range(stream.admitted)) - {*seen, *waiting, *stream._open}
    assert len(seen) + len(waiting) + len(stream._open) + len(gone) == stream.admitted, "none twice"
    assert not any(varies(lengths, group) for group in gone)
    assert len(gone) == stream.dropped == dropped + stream._dropped_unattributed
    assert len(resolved) == stream.admitted - len(stream._open), "the pass rate of a dropped group is recorded too"
    assert (len(gone) == 0) if share == 0 else stream.dropped > 0 or stream.admitted < 20
    times = [event.time_s for event in events]
    assert times == sorted(times)


def test_each_dropped_group_allows_one_more_admission() -> None:
    """On-policy, two groups per step: of groups 0 to 4 only 1 and 4 vary, so five are admitted before the first step.

    With two slots and 1 s per token, group 0 ends at 3 s and is dropped, so group 2 starts. Group 2 ends at 5 s and
    group 3 starts. Group 3 ends at 8 s and group 4 starts.
    """
    lengths = {(0, 0): 1, (0, 1): 3, (1, 0): 1, (1, 1): 2, (2, 0): 1, (2, 1): 1, (3, 0): 3, (3, 1): 3}
    lengths |= {(group, index): 1 + index for group in range(4, 20) for index in range(2)}
    driver, events = driver_of(OnPolicy(), lengths, slots=2)
    stream = driver.stream
    (batch,) = train(driver, 1)
    assert [group.admission for group in batch.groups] == [1, 4]
    assert (stream.admitted, stream.dropped, stream.dropped_for_batch) == (5, 3, 3)
    assert [event.time_s for event in events if event.kind == "admit"] == [0, 1, 3, 5, 8]
    assert [event.time_s for event in events if event.kind == "batch"] == [10]
    (second,) = train(driver, 1)
    assert [group.admission for group in second.groups] == [5, 6]
    assert (stream.admitted, stream.dropped, stream.dropped_for_batch) == (7, 3, 0)
    # The step reports that three of the five groups sampled for the first batch were dropped.
    metrics = step_metrics(batch, [Pass([], {}, {})], stream.choices, 0, dropped=3)
    assert metrics["train/groups_dropped"] == metrics["train/zero_variance"] == pytest.approx(3 / 5)
    assert metrics["train/groups_kept"] == 1


def test_a_filter_that_does_not_refill_drops_no_group() -> None:
    lengths = some_lengths(0)
    driver, _ = driver_of(OnPolicy(), lengths, chosen=ZeroVariance())
    batches = train(driver, 9)
    assert driver.stream.dropped == 0 and driver.stream.admitted == 18
    assert sum(batch.denominators.prompts < 2 for batch in batches) > 2
    metrics = step_metrics(batches[0], [Pass([], {}, {})], driver.stream.choices, 0)
    assert "train/groups_dropped" not in metrics


MODE_OF: dict[str, Callable[[], AsyncMode]] = {
    "on_policy": OnPolicy,
    "ppo_off_policy": lambda: PPOOffPolicy(3),
    "pipeline": lambda: Pipeline(3),
}
each_mode = pytest.mark.parametrize("mode", MODE_OF.values(), ids=MODE_OF)


@each_mode
@pytest.mark.parametrize(("most", "groups"), [(1, 2), (3, 2), (2, 3)])
def test_a_pool_that_teaches_nothing_ends_the_run(mode: Callable[[], AsyncMode], most: int, groups: int) -> None:
    """One dropped group more than the limit of the batches sampled together raises an error with field and remedy."""
    lengths = {(group, index): 3 for group in range(99) for index in range(2)}
    driver, _ = driver_of(mode(), lengths, groups=groups, slots=2, chosen=DynamicSampling(most))
    with pytest.raises(PoolExhaustedError, match=r"^filter\.most_dropped: .* filter=zero_variance$") as caught:
        driver.next_batch()
    batches = 3 if type(driver.stream.choices.async_mode) is PPOOffPolicy else 1
    dropped, purpose = most * groups * batches + 1, f"{batches} batches" if batches > 1 else "one batch"
    assert f"{dropped} groups were dropped for {purpose} of {groups}, more than {most} for each" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert driver.stream.dropped == dropped


@each_mode
def test_the_limit_holds_per_batch_and_not_per_run(mode: Callable[[], AsyncMode]) -> None:
    """With one group in two dropped for the whole run, a limit of three per trained group is never exceeded."""
    lengths = {(group, index): 1 + index * (group % 2) for group in range(900) for index in range(2)}
    driver, _ = driver_of(mode(), lengths, chosen=DynamicSampling(3))
    train(driver, 20)
    assert driver.stream.dropped > 30


@pytest.mark.parametrize("k", [4, 8])
def test_a_phase_of_several_batches_may_drop_the_limit_for_each_batch(k: int) -> None:
    """With one group in two dropped, a limit that suffices on-policy must suffice for every k."""
    lengths = {(group, index): 1 + index * (group % 2) for group in range(900) for index in range(2)}
    driver, _ = driver_of(OnPolicy(), lengths, chosen=DynamicSampling(2))
    train(driver, 2 * k)
    driver, _ = driver_of(PPOOffPolicy(k), lengths, chosen=DynamicSampling(2))
    train(driver, 2 * k)


@pytest.mark.parametrize("mode", [OnPolicy, lambda: PPOOffPolicy(4), lambda: Pipeline(3)])
def test_each_batch_counts_its_own_dropped_groups(mode: Callable[[], AsyncMode]) -> None:
    """A phase of four batches is sampled before its first batch is taken: each batch gets a quarter of its drops."""
    lengths = {(group, index): 1 + index * (group % 2) for group in range(900) for index in range(2)}
    driver, _ = driver_of(mode(), lengths, chosen=DynamicSampling(30))
    counts = []
    for _ in range(8):
        driver.next_batch()
        counts.append(driver.stream.dropped_for_batch)
        driver.stream.step_completed()
    assert sum(counts) + driver.stream._dropped_unattributed == driver.stream.dropped > 8
    if isinstance(driver.stream.choices.async_mode, PPOOffPolicy):
        assert all(max(phase) - min(phase) <= 1 and min(phase) > 0 for phase in (counts[:4], counts[4:]))


def test_a_phase_continues_until_dropped_groups_are_replaced() -> None:
    """Two steps of two groups: four are admitted and one is dropped. Three are ready, so a fifth may start."""
    driver, _ = driver_of(PPOOffPolicy(2))
    stream = driver.stream
    for key in range(4):
        request = stream.admit(0)
        for index in range(2):
            length = 1 + index * (key != 1)
            rollout = Rollout([2] * length, [-1.0] * length, [0] * length, [False] * length, "stop")
            grade(stream, FinishedRollout(request.key, index, rollout))
    assert (len(stream._ready), len(stream._open), stream.dropped) == (3, 0, 1)
    assert stream.may_admit() and not stream.batch_due()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_the_limit_is_a_whole_number(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"filter\.most_dropped: .* whole number"):
        DynamicSampling(bad)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(mode=MODES, cost_model=RATES, seed=st.integers(0, 10**6), stop=st.integers(0, 8), events=st.integers(0, 40))
def test_a_stream_with_dropped_groups_resumes(
    mode: AsyncMode, cost_model: CostModel, seed: int, stop: int, events: int
) -> None:
    """Resume after any step, or after any event during generation: batches, counts and clock are the same."""
    lengths = some_lengths(seed, giant=True)

    def fresh() -> VirtualDriver:
        more = (NoPositiveResampling(1.0), AllocationByDifficulty())
        return driver_of(mode, lengths, *more, slots=4, cost_model=cost_model, pool=900)[0]

    def outcome(driver: VirtualDriver, steps: int) -> list[Any]:
        seen: list[Any] = []
        for _ in range(steps):
            batch = driver.next_batch()
            assert batch is not None
            seen.append(([vars(group) for group in batch.groups], driver.stream.dropped_for_batch))
            driver.stream.step_completed()
        stream = driver.stream
        return [seen, driver.metrics(), stream.admitted, stream.dropped, stream.surplus, stream.prompts.state_dict()]

    whole = fresh()
    expected_after = outcome(whole, stop), outcome(whole, 8 - stop)
    first = fresh()
    assert outcome(first, stop) == expected_after[0]
    asked = iter([False] * events)
    reached = first.next_batch(lambda: next(asked, True)) if stop < 8 else None
    if reached is not None:  # the batch was due before `events` events
        return
    state = pickle.dumps([part.state_dict() for part in parts(first)])
    second = fresh()
    for part, values in zip(parts(second), pickle.loads(state), strict=True):
        part.load_state_dict(values)
    assert outcome(second, 8 - stop) == expected_after[1]


def test_a_checkpoint_without_the_counts_of_refilling_is_read() -> None:
    """Checkpoints written before filters could refill have no `dropped` and no `surplus`."""
    driver, _ = driver_of(OnPolicy(), some_lengths(1), chosen=ZeroVariance())
    train(driver, 2)
    state = {key: value for key, value in driver.stream.state_dict().items() if key not in ("dropped", "surplus")}
    resumed, _ = driver_of(OnPolicy(), some_lengths(1), chosen=ZeroVariance())
    resumed.stream.load_state_dict(state)
    assert (resumed.stream.dropped, resumed.stream.surplus, resumed.stream.completed_steps) == (0, 0, 2)


def test_dropped_groups_count_in_their_prompts_history() -> None:
    """Every group passes, so every prompt retires, and the pool is exhausted before the limit is reached."""
    lengths = {(group, index): 3 for group in range(99) for index in range(2)}
    driver, _ = driver_of(OnPolicy(), lengths, NoPositiveResampling(1.0), pool=9)
    with pytest.raises(PoolExhaustedError, match="all 6 prompts of the pool are retired"):
        driver.next_batch()
    assert driver.stream.prompts.retired == 6 == driver.stream.dropped
    assert UniformResampling().same_as(driver_of(OnPolicy())[0].stream.choices.resampling)
    lengths[5, 1] = 2  # one group varies: too few to fill a batch
    driver, _ = driver_of(OnPolicy(), lengths, NoPositiveResampling(1.0), pool=9)
    with pytest.raises(PoolExhaustedError):
        for _ in range(9):
            driver.next_batch()
