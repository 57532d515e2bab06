"""Tests of the stream and its virtual driver with scripted generators: staleness, order, and no group lost."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.axes.resampling import NoPositiveResampling, Resampling, UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import SchedulerStuckError, VirtualDriver
from lightning_scalerl.verify.verification import RewardError
from tests.examples import examples
from tests.helpers import CountingTask, inline, row, sampler
from tests.scripted import Script, ScriptedGenerator


def script_of(lengths: Mapping[tuple[int, int], int] | None) -> Script:
    def script(request: GroupRequest, index: int) -> list[int]:
        default = 1 + (request.key * 5 + index * 3) % 7
        return [2] * (lengths.get((request.key, index), default) if lengths else default)

    return script


def rates(**options: Any) -> CostModel:
    """Cost model with 1 s per token step and 5 s per training step, unless `options` change it."""
    free = dict.fromkeys(("decode_rollout_s", "decode_context_s", "prefill_token_s", "train_token_s", "publish_s"), 0.0)
    values = {**free, "decode_s": 1.0, "train_s": 5.0, "generator_devices": 1, "trainer_devices": 1, **options}
    return CostModel(**{"colocated": False, "source": "test", **values})


def stream_of(
    mode: AsyncMode,
    task: CountingTask | None = None,
    groups: int = 2,
    size: int = 3,
    resampling: Resampling | None = None,
) -> RolloutStream:
    task, resampling = task or CountingTask(prompts=99), resampling or UniformResampling()
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), (0,), resampling),
        task=task,
        encode=lambda text: [1, 2],
        sample=sampler(lambda tokens: "1" * (len(tokens) % 2) + "0" * 3),
        choices=row(resampling, mode),
        groups_per_step=groups,
        completions=size,
        max_new_tokens=1000,
        seed=0,
    )


def driver_of(
    mode: AsyncMode,
    lengths: Mapping[tuple[int, int], int] | None = None,
    slots: int = 5,
    groups: int = 2,
    size: int = 3,
    cost_model: CostModel | None = None,
    resampling: Resampling | None = None,
) -> tuple[VirtualDriver, list[Event]]:
    events: list[Event] = []
    stream = stream_of(mode, groups=groups, size=size, resampling=resampling)
    generator = ScriptedGenerator(script_of(lengths), slots)
    return VirtualDriver(stream, generator, dict, cost_model or rates(), inline(stream), [events.append]), events


def train(driver: VirtualDriver, steps: int) -> list[Any]:
    batches = []
    for _ in range(steps):
        batches.append(driver.next_batch())
        driver.stream.step_completed()
    return batches


def random_lengths(seed: int, giant: bool) -> dict[tuple[int, int], int]:
    source = random.Random(seed)
    lengths = {(group, index): source.randint(1, 8) for group in range(120) for index in range(2)}
    if giant:
        lengths[3, 1] = 800
    return lengths


MODES = st.one_of(
    st.builds(PPOOffPolicy, st.integers(1, 5)),
    st.builds(Pipeline, st.integers(1, 5), st.sampled_from(["stale", "recompute"])),
)
RATES = st.builds(
    rates,
    decode_s=st.sampled_from([0.01, 1.0, 7.0]),
    decode_rollout_s=st.sampled_from([0.0, 0.3]),
    train_s=st.sampled_from([0.01, 1.0, 30.0, 1000.0]),
    publish_s=st.sampled_from([0.0, 2.0, 50.0]),
)


@settings(max_examples=examples(150))
# Two late groups of the same version while the batch has one place left.
@example(mode=Pipeline(4, "stale"), cost_model=rates(), slots=5, groups=1, seed=2, giant=True)
@given(
    mode=MODES,
    cost_model=RATES,
    slots=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    giant=st.booleans(),
)
def test_staleness_is_bounded_and_no_group_is_lost_or_stuck(
    mode: AsyncMode, cost_model: CostModel, slots: int, groups: int, seed: int, giant: bool
) -> None:
    """Invariant 4: for random lengths, rates and k, also with one rollout a hundred times longer than the others."""
    driver, events = driver_of(mode, random_lengths(seed, giant), slots, groups, size=2, cost_model=cost_model)
    resolved: list[str] = []
    stream = driver.stream
    stream.prompts.resolved = lambda prompt_id, rate: resolved.append(prompt_id)  # type: ignore[method-assign]
    steps = 12
    seen: list[int] = []
    batches = train(driver, steps)
    for step, batch in enumerate(batches):
        for group in batch.groups:
            assert step - group.oldest_version <= mode.max_staleness
            assert all(versions == sorted(versions) for versions in (r.weight_versions for r in group.rollouts))
            seen.append(group.admission)
        assert len(batch.groups) == groups
    # Every admitted group is trained, ready or open, exactly once.
    waiting = [group.admission for group in stream._ready]
    assert sorted([*seen, *waiting, *stream._open]) == list(range(stream.admitted))
    complete = [group.prompt.prompt_id for batch in batches for group in batch.groups]
    assert sorted(resolved) == sorted(complete + [group.prompt.prompt_id for group in stream._ready])
    # No group waits for ever: those admitted early enough have been trained.
    overdue = max(0, steps - 1 - mode.max_staleness) * groups
    assert set(range(overdue if not mode.drains else (steps - steps % mode.k) * groups)) <= set(seen)  # type: ignore[attr-defined]
    times = [event.time_s for event in events]
    assert times == sorted(times)


def parts(driver: VirtualDriver) -> list[Any]:
    """All objects with state, in the order in which a run restores them."""
    return [driver.stream.prompts, driver.stream, driver, driver.generator]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(mode=MODES, cost_model=RATES, seed=st.integers(0, 10**6), stop=st.integers(0, 8))
def test_a_stream_resumes_with_everything_in_flight(
    mode: AsyncMode, cost_model: CostModel, seed: int, stop: int
) -> None:
    """Queued and half-generated rollouts, the clock and the pass-rate history continue as without a stop."""
    lengths = random_lengths(seed, giant=True)

    def fresh() -> tuple[VirtualDriver, list[Event]]:
        return driver_of(mode, lengths, slots=4, size=2, cost_model=cost_model, resampling=NoPositiveResampling(1.0))

    def outcome(batches: list[Any], driver: VirtualDriver) -> list[Any]:
        return [[vars(g) for g in batch.groups] for batch in batches] + [driver.metrics(), driver.stream.admitted]

    whole, _ = fresh()
    expected = outcome(train(whole, 9)[stop:], whole)
    first, _ = fresh()
    train(first, stop)
    state = pickle.dumps([part.state_dict() for part in parts(first)])
    second, _ = fresh()
    for part, values in zip(parts(second), pickle.loads(state), strict=True):
        part.load_state_dict(values)
    assert outcome(train(second, 9 - stop), second) == expected


def test_a_pipeline_against_times_computed_by_hand() -> None:
    """One group of one rollout per step, three tokens each, two slots; 1 s per token, 2 s per training step.

    Groups 0 and 1 run from 0 to 3 s. Step 1 trains on group 0 from 3 to 5 s, step 2 on group 1 from 5 to 7 s. Groups 2
    and 3 start at 3 s, get the first update at 5 s (before their third token) and end at 6 s. The trainer is busy until
    7 s, then takes group 2.
    """
    mode = Pipeline(3, "stale")
    lengths = {(group, 0): 3 for group in range(20)}
    driver, events = driver_of(mode, lengths, slots=2, groups=1, size=1, cost_model=rates(train_s=2.0))
    batches = train(driver, 4)
    assert [batch.groups[0].admission for batch in batches] == [0, 1, 2, 3]
    assert [event.time_s for event in events if event.kind == "batch"] == [3, 5, 7, 9]
    assert [event.time_s for event in events if event.kind == "publish"] == [5, 7, 9]
    versions = [batch.groups[0].rollouts[0].weight_versions for batch in batches]
    assert versions == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]]
    metrics = driver.metrics()
    assert metrics["compute/virtual_device_hours"] == pytest.approx(2 * 11 / 3600)
    assert metrics["virtual/trainer_idle"] == pytest.approx(3 / 11)
    assert metrics["virtual/generator_idle"] == 0


def test_draining_against_times_computed_by_hand() -> None:
    """The same work on-policy, in turns: 3 s of generation, 2 s of training, 1 s to publish the weights."""
    lengths = {(group, 0): 3 for group in range(20)}
    cost_model = rates(train_s=2.0, publish_s=1.0)
    driver, events = driver_of(OnPolicy(), lengths, slots=2, groups=1, size=1, cost_model=cost_model)
    train(driver, 3)
    assert [event.time_s for event in events if event.kind == "batch"] == [3, 9, 15]
    metrics = driver.metrics()
    assert metrics["compute/virtual_device_hours"] == pytest.approx(2 * 17 / 3600)
    assert metrics["virtual/trainer_idle"] == pytest.approx(11 / 17)
    assert metrics["virtual/generator_idle"] == pytest.approx(6 / 15)


def test_one_straggler_holds_up_a_drain_but_not_a_pipeline() -> None:
    lengths = {(group, index): 100 if (group, index) == (1, 0) else 4 for group in range(99) for index in range(3)}
    hours = []
    for mode in (PPOOffPolicy(8), Pipeline(8, "stale")):
        driver, _ = driver_of(mode, lengths, slots=8)
        train(driver, 8)
        hours.append(driver.metrics()["compute/virtual_device_hours"])
    assert hours[1] < 0.7 * hours[0]


@pytest.mark.parametrize("mode", [OnPolicy(), PPOOffPolicy(3), Pipeline(3, "stale")], ids=lambda m: type(m).__name__)
def test_an_exhausted_pool_trains_on_all_its_groups_before_the_error(mode: AsyncMode) -> None:
    """Every prompt is solved at its first group, so 96 prompts at two per step last for 48 steps."""
    lengths = {(group, index): 3 for group in range(200) for index in range(3)}
    driver, _ = driver_of(mode, lengths, slots=8, resampling=NoPositiveResampling(0.5))
    batches = train(driver, 48)
    assert len({group.prompt.prompt_id for batch in batches for group in batch.groups}) == 96
    with pytest.raises(PoolExhaustedError, match="all 96 prompts of the pool are retired"):
        train(driver, 1)


def test_contradictory_rules_of_a_mode_are_an_error() -> None:
    class Never(Pipeline):
        def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
            return admission < 3

    driver, _ = driver_of(Never(3, "stale"))
    with pytest.raises(SchedulerStuckError, match="Never neither trains nor generates after 1 steps and 3 admissions"):
        train(driver, 9)


def test_colocated_devices_are_idle_only_while_weights_are_published() -> None:
    lengths = {(group, 0): 3 for group in range(20)}
    cost_model = rates(train_s=2.0, publish_s=1.0, colocated=True)
    driver, _ = driver_of(OnPolicy(), lengths, slots=2, groups=1, size=1, cost_model=cost_model)
    train(driver, 3)
    metrics = driver.metrics()
    assert metrics["compute/virtual_device_hours"] == pytest.approx(17 / 3600)
    assert metrics["virtual/trainer_idle"] == metrics["virtual/generator_idle"] == pytest.approx(2 / 17)


@pytest.mark.parametrize("bad", ["fresh", "Stale", None])
def test_kv_policy_is_checked(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"async_mode\.kv_on_update: .*valid: stale, recompute"):
        Pipeline(8, bad)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_ppo_off_policy_generates_for_k_steps_then_trains_k_steps(k: int) -> None:
    driver, events = driver_of(PPOOffPolicy(k), slots=99)
    batches = train(driver, 2 * k)
    staleness = [[step - g.oldest_version for g in batch.groups] for step, batch in enumerate(batches)]
    assert staleness == [[step % k] * 2 for step in range(2 * k)]
    order = [event.kind for event in events if event.kind in ("admit", "batch", "publish")]
    # The last publish happens when the next batch is requested: until then the step has not ended.
    phase = ["admit"] * (2 * k) + ["batch"] * k + ["publish"]
    assert order == (phase * 2)[:-1]
    # Batches are taken in order of admission, so long completions do not end up in later batches.
    assert [g.admission for batch in batches for g in batch.groups] == list(range(4 * k))


def test_on_policy_is_off_policy_with_k_one() -> None:
    assert OnPolicy().max_staleness == 0
    assert OnPolicy().parameters() == {}
    assert OnPolicy().state_key == "async_mode:OnPolicy"


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "8"])
def test_k_must_be_a_whole_number_above_zero(k: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"async_mode\.k"):
        PPOOffPolicy(k)


def test_every_epoch_has_every_prompt_once() -> None:
    task = CountingTask()
    source = PromptSource(task.train_prompts(), (3, 1), UniformResampling())
    epochs = [[source.next().prompt_id for _ in range(8)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(p.prompt_id for p in task.train_prompts()) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert source.epoch == 3


@pytest.mark.parametrize("taken", [0, 3, 8, 13])
def test_prompt_order_resumes(taken: int) -> None:
    pool = CountingTask().train_prompts()
    one, two = (PromptSource(pool, (5,), UniformResampling()) for _ in range(2))
    for _ in range(taken):
        one.next()
    two.load_state_dict(one.state_dict())
    assert [one.next() for _ in range(20)] == [two.next() for _ in range(20)]


@pytest.mark.parametrize("bad", ["raises", "nan", "text"])
def test_a_broken_verifier_names_its_prompt(bad: str) -> None:
    driver, _ = driver_of(OnPolicy())

    def reward(prompt: Any, completion: str) -> Any:
        if bad == "raises":
            raise KeyError("gone")
        return float("nan") if bad == "nan" else "good"

    driver.stream.task.reward = reward  # type: ignore[method-assign]
    with pytest.raises(RewardError, match=r"reward: of the batch of step 0 no completion was graded \(prompt 'p\d+'"):
        driver.next_batch()
