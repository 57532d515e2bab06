"""Tests of a fleet's engines: invalid addresses, reports that arrive twice, random delays, damaged weights."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest

from lightning_scalerl.axes.async_mode import Pipeline
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.generator.fleet.addresses import check_engines
from lightning_scalerl.generator.fleet.engines import GeneratorLostError
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.fleet.weights import WeightStore
from lightning_scalerl.stream.live_driver import LiveDriver
from sweeps.run.activity import activity
from tests.examples import every
from tests.generator.slow import Size, SlowGenerator, Weights, weights_of
from tests.generator.test_fleet import check, drained, submit
from tests.generator.threads import Threads
from tests.helpers import inline
from tests.stream.test_live_driver import check_trained_once, train
from tests.stream.test_rollout_stream import stream_of


class ReportsTwice(SlowGenerator):
    """Generator that reports every finished rollout twice."""

    def step(self) -> StepReport:
        report = super().step()
        return StepReport([*report.finished, *report.finished], *report.computed)


def fleet_at(*engines: str, factory: Any = SlowGenerator, most_s: float = 0.01, **limits: float) -> Fleet:
    limits = {"silence_s": 60.0, "start_s": 60.0, **limits}
    arguments = {"slots": 4, "most_s": most_s}
    return Fleet(factory, Weights(Size()), arguments, generators=1, engines=engines, **limits)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rollouts_reported_twice_are_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Threads(monkeypatch)
    with closing(fleet_at("local", "local", factory=ReportsTwice)) as fleet:
        submit(fleet)
        check(drained(fleet), 0)
        with fleet.aside():
            fleet.publish(weights_of(3), 3)
            submit(fleet, 3)
            check(drained(fleet), 3, 3)


@pytest.mark.parametrize("seed", every(20, range(20), pytest.mark.full))
@pytest.mark.slow
def test_random_delays_on_both_sides(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is older than the mode allows (`train` checks each batch), whichever engine sampled it."""
    Threads(monkeypatch)
    delays = random.Random(1000 + seed)
    mode = Pipeline(delays.choice([1, 2, 3, 5]))
    stream = stream_of(mode)
    fleet = fleet_at(*["local"] * (1 + (seed % 4 == 3)), most_s=delays.choice([0.0, 0.005, 0.03]))
    driver = LiveDriver(stream, fleet, lambda: weights_of(stream.completed_steps), inline(stream))
    with closing(driver):
        check_trained_once(train(driver, 15, delays.choice([0.0, 0.02, 0.1]), seed), stream)
        metrics = driver.metrics()
        assert activity.facts()["engines"][0] == {"where": "local", "state": "up"}
    assert "engines" not in activity.facts(), "closing the driver removes the report of its engines"
    assert metrics["live/trainer_tokens_s"] > 0
    assert metrics["live/engine0_tokens_s"] > 0 and 0 <= metrics["live/engine0_idle"] <= 1


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (["http://here"], "'http://here' cannot be read; valid: local, http://HOST:PORT, file:/PATH, srun"),
        (["here:123"], "cannot be read"),
        (["http://here:99999"], "cannot be read"),
        (["udp://here:123"], "cannot be read"),
        (["http://here:123/path"], "cannot be read"),
        (["http://here:123", "local", "http://here:123"], "http://here:123 is there twice"),
        (["srun", "srun"], "srun is there twice"),
        (["tcp://here:123"], "tcp://here:123 is not supported any more; .*vllm.serve.* http://HOST:PORT"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(engines: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^driver.engines: .*{message}"):
        check_engines(engines)


def test_servers_of_vllm_need_its_generator_and_srun_needs_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigurationError, match="srun is for a job of SLURM"):
        fleet_at("srun")
    for engine in ("http://127.0.0.1:8000", "file:/shared/engines/0"):
        with pytest.raises(ConfigurationError, match=f"{engine} is a server of vLLM; use it with generator=vllm"):
            fleet_at(engine)


@pytest.mark.slow
def test_damaged_weights_are_an_error_with_the_engines_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Threads(monkeypatch)
    write = WeightStore._write

    def damaged(self: WeightStore, *args: Any) -> Any:
        published = write(self, *args)
        if published.version == 2:
            data = bytearray(published.path.read_bytes())
            data[-1] ^= 1
            published.path.write_bytes(data)
        return published

    monkeypatch.setattr(WeightStore, "_write", damaged)
    with closing(fleet_at("local")) as fleet:
        fleet.publish(weights_of(1), 1)
        with pytest.raises(GeneratorLostError, match=r"^generator: process 0 holds weights with the digest \w+, and"):
            fleet.publish(weights_of(2), 2)
