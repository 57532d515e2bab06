"""Tests of the stream in real time: generators in processes of their own, with delays on both sides.

The rules are the same as in virtual time.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_scalerl import Evaluate
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.measure.compute_meter import PHASES
from lightning_scalerl.measure.probe import P99
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.drivers import Live
from lightning_scalerl.stream.live_driver import LiveDriver
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import VirtualDriver
from lightning_scalerl.verify.verification import RewardError
from tests.examples import every
from tests.generator.slow import Size, SlowGenerator, Weights, script, weights_of
from tests.generator.threads import Threads
from tests.helpers import CountingTask, fit, inline
from tests.measure.test_compute_meter import check_hours
from tests.scripted import ScriptedGenerator
from tests.stream.test_rollout_stream import rates, stream_of
from tests.test_module import Keep

GROUPS, SIZE = 2, 3
MODES = [OnPolicy(), PPOOffPolicy(4), Pipeline(2), Pipeline(8)]


def fleet(generators: int = 2, slots: int = 4, most_s: float = 0.01, silence_s: float = 200.0) -> Fleet:
    arguments = {"slots": slots, "most_s": most_s}
    return Fleet(SlowGenerator, Weights(Size()), arguments, generators=generators, silence_s=silence_s, start_s=120)


def live(mode: AsyncMode, task: CountingTask | None = None, **size: Any) -> LiveDriver:
    stream, generators = stream_of(mode, task), fleet(**size)
    return LiveDriver(stream, generators, lambda: weights_of(stream.completed_steps), inline(stream))


def train(driver: LiveDriver | VirtualDriver, steps: int, most_s: float = 0.0, seed: int = 0) -> list[TrainBatch]:
    """Train with random delays of up to `most_s` per step; check each batch when it is returned."""
    delays, batches = random.Random(seed), []
    for _ in range(steps):
        batch = driver.next_batch()
        assert batch is not None
        check_batch(driver.stream, batch)
        batches.append(batch)
        time.sleep(delays.uniform(0, most_s))
        driver.stream.step_completed()
    return batches


def check_batch(stream: RolloutStream, batch: TrainBatch) -> None:
    """Check the rule of both clocks: no group is staler than the mode allows, and the oldest train first."""
    mode, step = stream.choices.async_mode, stream.completed_steps
    versions = [v for group in batch.groups for rollout in group.rollouts for v in rollout.weight_versions]
    assert len(batch.groups) == GROUPS and all(len(group.rollouts) == SIZE for group in batch.groups)
    assert step - max(versions) >= 0 and step - min(versions) <= mode.max_staleness
    newest = max(group.oldest_version for group in batch.groups)
    assert all(left.oldest_version >= newest for left in stream._ready)


def check_trained_once(batches: Sequence[TrainBatch], stream: RolloutStream) -> None:
    """Check that every admitted group is exactly one of trained, ready or open, and that its rollouts are its own."""
    trained = [group.admission for batch in batches for group in batch.groups]
    everywhere = [*trained, *(group.admission for group in stream._ready), *stream._open]
    assert sorted(everywhere) == list(range(stream.admitted))
    rollouts = [rollout for batch in batches for group in batch.groups for rollout in group.rollouts]
    keys = [(group.admission, index) for batch in batches for group in batch.groups for index in range(SIZE)]
    for (key, index), rollout in zip(keys, rollouts, strict=True):
        assert len(rollout.tokens) == 1 + (key * 5 + index * 3) % 7, "each rollout is complete and belongs to its group"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", every(100, MODES, pytest.mark.full), ids=lambda mode: type(mode).__name__ + str(mode.max_staleness)
)
def test_both_clocks_obey_one_rule(mode: AsyncMode) -> None:
    with closing(live(mode)) as driver:
        check_trained_once(train(driver, 9, 0.02), driver.stream)
    stream, generator = stream_of(mode), ScriptedGenerator(script, 4)
    virtual = VirtualDriver(stream, generator, dict, rates(), inline(stream))
    check_trained_once(train(virtual, 9), stream)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_delays_on_both_sides(seed: int) -> None:
    delays = random.Random(seed)
    mode = delays.choice([OnPolicy(), PPOOffPolicy(3), Pipeline(1), Pipeline(2), Pipeline(5)])
    sizes = {"generators": delays.randint(1, 3), "slots": delays.randint(1, 6)}
    with closing(live(mode, most_s=delays.choice([0.0, 0.005, 0.02]), **sizes)) as driver:
        check_trained_once(train(driver, 15, delays.choice([0.0, 0.02, 0.1]), seed), driver.stream)


class HeldVerifiers:
    """Verifiers that return no grades until `open` is set, and then all of them, newest first."""

    def __init__(self) -> None:
        self.open = False
        self.submitted: list[int] = []

    def submit(self, sample: Sample) -> int:
        self.submitted.append(len(self.submitted))
        return self.submitted[-1]

    def wait(self, ticket: int) -> Outcome:
        raise AssertionError("the live driver must not wait for a grade")

    def done(self) -> list[tuple[int, Outcome]]:
        if not self.open:
            return []
        fresh, self.submitted = [ticket for ticket in self.submitted if ticket >= 0], [-1] * len(self.submitted)
        return [(ticket, Outcome("score", float(ticket % 2))) for ticket in reversed(fresh)]

    def forget(self, tickets: Any) -> None:
        raise AssertionError

    def close(self) -> None:
        self.open = False


@pytest.mark.full
def test_grading_neither_blocks_nor_orders_generation() -> None:
    """With all grades held back, generation continues as far as the mode allows; later each group is trained once."""
    mode = Pipeline(8)
    with closing(live(mode)) as driver:
        held = HeldVerifiers()
        driver.verifiers = held
        most = GROUPS * (mode.max_staleness + 1) * SIZE

        def stop() -> bool:
            return len(held.submitted) == most

        assert driver.next_batch(stop) is None, "without any grade, all groups that the mode allows are sampled"
        held.open = True
        check_trained_once(train(driver, 12), driver.stream)


@pytest.mark.slow
@pytest.mark.parametrize("how", every(2, [signal.SIGKILL, signal.SIGSTOP], pytest.mark.full))
@pytest.mark.parametrize("generators", every(2, [2, 1], pytest.mark.full))
def test_a_lost_generator_is_replaced_and_no_group_is_lost(how: signal.Signals, generators: int) -> None:
    with closing(live(Pipeline(2), generators=generators, silence_s=5.0)) as driver:
        batches = train(driver, 3)
        before = driver.generator.pids
        os.kill(before[0], how)
        batches += train(driver, 30)
        check_trained_once(batches, driver.stream)
        while driver.generator.lost == 0 or len(set(driver.generator.pids) & set(before)) >= generators:
            batches += train(driver, 1, 0.01)  # the other generator may have sampled all of these steps
        batches += train(driver, 5)
        check_trained_once(batches, driver.stream)
        assert before[0] not in driver.generator.pids
        assert driver.metrics()["live/generators_lost"] == driver.generator.lost >= 1
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
def test_a_generator_that_cannot_be_restarted_ends_the_run_with_its_error() -> None:
    # The weights -1 do not match version 1, so every restarted generator raises an error as well.
    stream, generators = stream_of(Pipeline(2)), fleet(generators=1)
    driver = LiveDriver(stream, generators, lambda: weights_of(-1), inline(stream))
    with closing(driver), pytest.raises(Exception, match="published as version 1"):
        train(driver, 9)


@pytest.mark.slow
def test_a_verifiers_failure_reaches_the_trainer() -> None:
    class Failing(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            raise KeyError("no such answer")

    with closing(live(Pipeline(2), Failing(prompts=9))) as driver, pytest.raises(RewardError, match="no such answer"):
        train(driver, 1)


@pytest.mark.full
def test_two_threads_may_use_the_fleet() -> None:
    """The training thread asks for log-probabilities while the driver's thread collects finished rollouts."""
    with closing(live(Pipeline(8), most_s=0.002, slots=8)) as driver:
        batches = []
        for _ in range(20):
            batches += train(driver, 1)
            for number in range(20):
                assert driver.generator.score((1, 2), (number, 7)).tolist() == [number, 7]
        check_trained_once(batches, driver.stream)
        assert driver.generator.lost == 0


@pytest.mark.full
def test_next_batch_can_be_stopped_and_called_again() -> None:
    with closing(live(OnPolicy(), most_s=0.05)) as driver:
        assert driver.next_batch(lambda: True) is None
        check_trained_once(train(driver, 2), driver.stream)


@pytest.mark.slow
@pytest.mark.parametrize("generators", every(2, [2, 1], pytest.mark.full))
def test_rollouts_in_flight_survive_a_checkpoint(generators: int) -> None:
    """Save during generation and restore into new processes: over both, every group is trained once."""
    mode = Pipeline(4)
    with closing(live(mode, generators=generators, most_s=0.05)) as driver:
        batches = train(driver, 3)
        with driver.quiet():
            parts = [driver.stream.prompts, driver.stream, driver, driver.generator]
            saved = [part.state_dict() for part in parts]
        assert saved[3]["open"], "rollouts must be in flight when the state is saved"
    with closing(live(mode, generators=2)) as driver:
        for part, state in zip([driver.stream.prompts, driver.stream, driver, driver.generator], saved, strict=True):
            part.load_state_dict(state)
        assert driver.generator.version == 2
        batches += train(driver, 6)
        check_trained_once(batches, driver.stream)


@pytest.mark.full
def test_a_closed_fleet_keeps_its_rollouts_in_flight() -> None:
    with closing(live(Pipeline(4), most_s=0.05)) as driver:
        train(driver, 2)
    saved = driver.generator.state_dict()
    assert saved["open"] and saved["version"] == 1 and driver.generator.pids == []


@pytest.mark.slow
def test_a_probe_without_a_generator_does_not_delay_the_step(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is repeated at the next step. Waiting for its answer counts as idle time, not as training."""
    threads, score, slow_s = Threads(monkeypatch), Fleet.score, 0.3
    keep, asked = Keep(), []

    class Loses(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if pl_module.completed_steps == 2:
                threads.may_start.clear()
                threads.started[0].die()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            threads.may_start.set()

    def slowly(self: Fleet, *args: Any) -> Any:
        time.sleep(slow_s)
        asked.append(score(self, *args))
        return asked[-1]

    monkeypatch.setattr(Fleet, "score", slowly)
    live = ["driver=live", "driver.probe_every=1"]
    fit(tiny_model_path, steps=4, callbacks=[Pipeline(3), Precision("fp32"), Loses(), keep], overrides=live)
    seconds = {part: [3600 / 2 * value for value in keep.of(f"compute/device_hours_{part}")] for part in PHASES}
    assert any(probed is None for probed in asked) and any(probed is not None for probed in asked)
    assert seconds["idle"][-1] >= slow_s * len(asked)
    assert seconds["train"][2] - seconds["train"][1] < threads.most_s / 2
    assert keep.of("live/generators_lost")[-1] == 1 and P99 in keep.records[-1][2]
    assert all(0 <= idle <= 1 for idle in keep.of("live/trainer_idle"))
    for _, _, metrics in keep.records:
        check_hours(metrics)


@pytest.mark.full
def test_idle_shares_with_a_slow_trainer_and_with_slow_generators() -> None:
    """A slow trainer is hardly idle while its generators wait, and with slow generators it is the other way round."""
    with closing(live(Pipeline(8), generators=1, most_s=0.0)) as driver:
        driver.next_batch()
        time.sleep(3.0)
        busy = driver.metrics()
    with closing(live(OnPolicy(), generators=1, most_s=0.2)) as driver:
        train(driver, 3)
        waits = driver.metrics()
    assert busy["live/trainer_idle"] < 0.5 < busy["live/generator_idle"]
    assert waits["live/trainer_idle"] > 0.5 and 0 <= waits["live/generator_idle"] <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generators": 0}, "driver.generators"),
        ({"silence_s": -1.0}, "driver.silence_s: -1.0"),
        ({"start_s": 0}, "start_s"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Live(**settings)


def test_a_model_that_cannot_be_sent_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be sent to another process .* use driver=virtual"):
        Fleet(lambda **arguments: None, Weights(Size()), {}, generators=1, silence_s=60, start_s=60)


@pytest.mark.slow
def test_hours_of_a_live_run_are_the_sum_of_its_parts(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation at step 0 happens before the clock of the compute axis starts."""
    Threads(monkeypatch)
    keep = Keep()
    fit(tiny_model_path, steps=3, callbacks=[Pipeline(3), Evaluate(2, 4), keep], overrides=["driver=live"])
    evaluated = [metrics for kind, _, metrics in keep.records if kind == "eval"]
    assert len(evaluated) == 3 and evaluated[0]["time/evaluate_s"] > 0
    for _, _, metrics in keep.records:
        check_hours(metrics)
    assert all(hours > 0 for hours in keep.of("compute/device_hours"))
