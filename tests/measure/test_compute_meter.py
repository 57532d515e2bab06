"""The compute meter under a clock set by hand: every second counts once, and lost work counts as wasted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.measure import heartbeat
from lightning_scalerl.measure.compute_meter import ComputeMeter, total_cost
from lightning_scalerl.measure.heartbeat import HEARTBEAT_FILE, MeterHeartbeat, heartbeat_cost
from lightning_scalerl.rollouts.grade import Charge
from lightning_scalerl.stream.events import Event
from lightning_scalerl.verify.charges import ComputeAxes

HOUR = 3600.0


class TokenCost:
    """A token costs one FLOP."""

    def prefill(self, tokens: int, *context: int) -> float:
        return float(tokens)

    decode = prefill


def check_hours(metrics: Mapping[str, float]) -> None:
    """Check that a record's device hours are the sum of its parts, none of which is negative."""
    hours = {name.removeprefix("compute/device_hours"): value for name, value in metrics.items()}
    parts = [hours[f"_{part}"] for part in ("train", "generate", "checkpoint")]
    assert min(parts) >= 0 and hours["_idle"] >= 0
    assert hours[""] >= sum(parts), (hours[""], parts)
    assert hours[""] == pytest.approx(sum(parts) + hours["_idle"], rel=1e-12)


class HandClock:
    """A clock that the test sets."""

    def __init__(self, start: float = 1e6) -> None:
        self.time = start

    def now(self) -> float:
        return self.time


class Bench:
    """A meter with its own clock. `spend` lets hours pass within nested phases, the last the innermost."""

    def __init__(self, devices: int = 1, state: dict[str, Any] | None = None) -> None:
        self.clock = HandClock()
        self.meter = ComputeMeter(TokenCost(), devices, self.clock)
        if state is not None:
            self.meter.load_state_dict(state)

    def spend(self, hours: float, *phases: str) -> Mapping[str, float]:
        if phases:
            with self.meter.phase(phases[0]):
                self.spend(hours, *phases[1:])
        else:
            self.clock.time += hours * HOUR
        return self.check()

    def sample(self, tokens: int, lost: int = 0) -> tuple[float, float]:
        """Decode tokens after `lost` others were lost. Returns FLOPs on the axis and wasted FLOPs."""
        self.meter.on_event(Event("decode", 0.0, StepReport((), 0, 0, tokens, 0, lost_tokens=lost)))
        metrics = self.meter.metrics()
        return metrics["compute/flops"], metrics["compute/wasted_flops"]

    def check(self) -> Mapping[str, float]:
        metrics = self.meter.metrics()
        check_hours(metrics)
        return metrics

    def hours(self, part: str = "") -> float:
        return self.meter.metrics()[f"compute/device_hours{part and f'_{part}'}"]


def test_an_evaluation_before_the_clock_starts_is_not_subtracted_from_the_axis() -> None:
    bench = Bench(devices=2)
    bench.spend(0.5)  # setup
    bench.spend(10, "evaluate")
    bench.meter.start()
    assert bench.hours() == 0
    records = [
        bench.spend(hours, *phases) for hours, *phases in ((1, "generate"), (2, "train"), (0.25,), (3, "evaluate"))
    ]
    records.append(bench.spend(0.5, "checkpoint"))
    assert bench.hours() == pytest.approx(2 * 3.75) and bench.hours("idle") == pytest.approx(2 * 0.25)
    assert all(a["compute/device_hours"] <= b["compute/device_hours"] for a, b in pairwise(records))
    assert bench.meter.evaluation_metrics()["time/evaluate_s"] == pytest.approx(13 * HOUR)
    bench.meter.stop()
    bench.spend(7)
    bench.spend(7, "generate")
    assert bench.hours() == pytest.approx(2 * 3.75), "time after the stop does not count"


def test_time_belongs_to_the_innermost_phase() -> None:
    bench = Bench()
    bench.meter.start()
    with bench.meter.phase("train"):
        bench.spend(1)
        bench.spend(4, "evaluate")
        bench.spend(2, "idle")
    assert (bench.hours(), bench.hours("train"), bench.hours("idle")) == pytest.approx((3, 1, 2))


@pytest.mark.parametrize("within", [(), ("checkpoint",)], ids=["between", "in a save"])
def test_a_run_resumes_with_all_its_hours(within: tuple[str, ...]) -> None:
    bench = Bench(devices=2)
    bench.spend(10, "evaluate")
    bench.meter.start()
    bench.spend(1, "generate")
    bench.spend(0.5)
    state: dict[str, Any] = {}
    with bench.meter.phase(within[0] if within else "idle"):
        bench.clock.time += HOUR
        state |= bench.meter.state_dict()
    saved = bench.check()
    resumed = Bench(4, state)
    resumed.clock.time += 99 * HOUR
    resumed.meter.start()
    assert resumed.check() == pytest.approx(saved)
    resumed.spend(1, "train")
    assert resumed.hours() == pytest.approx(saved["compute/device_hours"] + 4)


def test_a_checkpoint_of_an_earlier_version_resumes_from_at_least_the_sum_of_its_parts() -> None:
    """Such a checkpoint had subtracted the initial evaluation from its elapsed time."""
    seconds = {"train": 2 * HOUR, "generate": HOUR, "checkpoint": 0.0, "evaluate": 10 * HOUR}
    flops = {"train": 1.0, "generate": 2.0, "evaluate": 3.0}
    old = {"flops": flops, "seconds": seconds, "wasted": {"flops": 0.0, "device_hours": 0.0}, "devices": 1}
    for elapsed, hours in ((5 * HOUR, 3), (20 * HOUR, 10)):
        assert Bench(state={**old, "elapsed": elapsed}).hours() == pytest.approx(hours)
        assert Bench(state={**old, "elapsed": elapsed}).check()


def test_lost_samples_are_wasted_once_they_are_sampled_again() -> None:
    bench = Bench()
    assert bench.sample(100) == (100, 0)
    assert bench.sample(0, lost=40) == (100, 0)
    with bench.meter.phase("evaluate"):
        assert bench.sample(50) == (100, 0)
    assert bench.sample(30) == (100, 30)
    resumed = Bench(state=bench.meter.state_dict())
    assert resumed.sample(30) == (120, 40), "the axis continues where an undisturbed run would be"
    assert resumed.sample(5) == (125, 40)


def test_lost_work_adds_up_over_kills(tmp_path: Path) -> None:
    """Each process resumes from the same checkpoint and is killed before it records anything."""
    state = Bench(devices=2).meter.state_dict()
    for kill in range(1, 4):
        bench = Bench(devices=2, state=state)
        bench.meter.count_lost_work(heartbeat_cost(tmp_path))
        bench.meter.start()
        bench.sample(1000)
        bench.spend(0.5, "generate")
        bench.spend(9, "evaluate")
        beats = MeterHeartbeat(tmp_path, bench.meter, lambda: None)
        assert heartbeat_cost(tmp_path) == pytest.approx({"flops": 1000 * kill, "device_hours": kill})
        beats.stop(finished=False)
    bench = Bench(devices=2, state=state)
    bench.meter.count_lost_work(heartbeat_cost(tmp_path))
    metrics = bench.check()
    assert metrics["compute/wasted_flops"] == 3000 and metrics["compute/wasted_device_hours"] == pytest.approx(3)
    assert metrics["compute/flops"] == metrics["compute/device_hours"] == 0


def test_a_heartbeat_is_rare_tolerates_errors_and_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    class CountedEvent:
        """Wait without letting time pass, and end after eight waits."""

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 8

        def set(self) -> None: ...

    monkeypatch.setattr(heartbeat, "threading", SimpleNamespace(Event=CountedEvent, Thread=threading.Thread))
    path, bench = tmp_path / HEARTBEAT_FILE, Bench()
    beats = MeterHeartbeat(tmp_path, bench.meter, lambda: None)
    beats.stop(finished=False)
    assert waits == [1, 2, 4, 8, 15, 15, 15, 15, 15] and path.exists()
    path.write_text("{")
    assert heartbeat_cost(tmp_path) == {}
    path.write_text('{"flops": "1", "device_hours": NaN}')
    assert heartbeat_cost(tmp_path) == {}
    MeterHeartbeat(tmp_path, bench.meter, lambda: None).stop(finished=True)
    assert not path.exists()

    def taken_over() -> None:
        raise ValueError("another process writes this run")

    with pytest.raises(ValueError, match="another process"):
        MeterHeartbeat(tmp_path, bench.meter, taken_over)
    assert not path.exists()
    nowhere = MeterHeartbeat(tmp_path / "gone", bench.meter, lambda: None)
    nowhere.stop(finished=True)
    assert caplog.text.count("not written") == 1
    assert total_cost({}) == {"flops": 0, "device_hours": 0}


@pytest.mark.parametrize(("judge", "added"), [(None, 0.0), ("device_hours", 2.0), (0.5, 6.0)])
def test_judge_costs_have_their_own_axes_and_count_as_device_hours_on_request(
    judge: str | float | None, added: float
) -> None:
    bench = Bench()
    assert not [name for name in bench.meter.metrics() if "judge" in name], "a run without a judge has no such axis"
    assert not [name for name in bench.meter.evaluation_metrics() if "judge" in name]
    assert "charges" not in bench.meter.state_dict()
    meter = ComputeMeter(TokenCost(), 4, bench.clock, ComputeAxes(judge))  # type: ignore[arg-type]
    meter.judged([Charge("a" * 64, HOUR, 20, 10, 9.0)], evaluation=True)
    assert meter.metrics()["compute/judge_hours"] == 0.0, "the axis starts at 0 with the first evaluation"
    meter.judged([Charge("a" * 64, 2 * HOUR, 20, 10, 3.0)])
    resumed = ComputeMeter(TokenCost(), 2, bench.clock, ComputeAxes(judge))  # type: ignore[arg-type]
    resumed.load_state_dict(meter.state_dict())
    for either in (meter, resumed):
        metrics = either.metrics()
        assert metrics["compute/judge_hours"] == 2.0 and metrics["compute/judge_cost"] == 3.0
        assert metrics["compute/device_hours"] == metrics.get("compute/device_hours_judge", 0.0) == added
        assert either.judge_device_hours == added
        assert either.evaluation_metrics()["eval_cost/judge_cost"] == 9.0
