"""The compute meter under a clock set by hand: every second on one axis, whoever's hook comes first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from lightning_scalerl.measure.compute_meter import ComputeMeter

HOUR = 3600.0


class TokenCost:
    """A token costs one FLOP."""

    def prefill(self, tokens: int, *context: int) -> float:
        return float(tokens)

    decode = prefill


def check_hours(metrics: Mapping[str, float]) -> None:
    """A record's device hours are all of its parts, none of them made up."""
    hours = {name.removeprefix("compute/device_hours"): value for name, value in metrics.items()}
    parts = [hours[f"_{part}"] for part in ("train", "generate", "checkpoint")]
    assert min(parts) >= 0 and hours["_idle"] >= 0
    assert hours[""] >= sum(parts), (hours[""], parts)
    assert hours[""] == pytest.approx(sum(parts) + hours["_idle"], rel=1e-12)


class HandClock:
    """Time as the test says."""

    def __init__(self, start: float = 1e6) -> None:
        self.time = start

    def now(self) -> float:
        return self.time


class Bench:
    """A meter on a clock of its own; `spend` lets hours pass within phases, the last the innermost."""

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

    def check(self) -> Mapping[str, float]:
        metrics = self.meter.metrics()
        check_hours(metrics)
        return metrics

    def hours(self, part: str = "") -> float:
        return self.meter.metrics()[f"compute/device_hours{part and f'_{part}'}"]


def test_an_evaluation_before_the_clock_starts_is_not_taken_from_the_axis() -> None:
    bench = Bench(devices=2)
    bench.spend(0.5)  # set-up
    bench.spend(10, "evaluate")
    bench.meter.start()
    assert bench.hours() == 0
    seen = [bench.spend(hours, *phases) for hours, *phases in ((1, "generate"), (2, "train"), (0.25,), (3, "evaluate"))]
    seen.append(bench.spend(0.5, "checkpoint"))
    assert bench.hours() == pytest.approx(2 * 3.75) and bench.hours("idle") == pytest.approx(2 * 0.25)
    assert all(a["compute/device_hours"] <= b["compute/device_hours"] for a, b in pairwise(seen))
    assert bench.meter.evaluation_metrics()["time/evaluate_s"] == pytest.approx(13 * HOUR)
    bench.meter.stop()
    bench.spend(7)
    bench.spend(7, "generate")
    assert bench.hours() == pytest.approx(2 * 3.75), "nobody's compute"


def test_time_belongs_to_the_innermost_phase() -> None:
    bench = Bench()
    bench.meter.start()
    with bench.meter.phase("train"):
        bench.spend(1)
        bench.spend(4, "evaluate")
        bench.spend(2, "idle")
    assert (bench.hours(), bench.hours("train"), bench.hours("idle")) == pytest.approx((3, 1, 2))


@pytest.mark.parametrize("within", [(), ("checkpoint",)], ids=["between", "in a save"])
def test_a_run_goes_on_with_all_its_hours(within: tuple[str, ...]) -> None:
    bench = Bench(devices=2)
    bench.spend(10, "evaluate")
    bench.meter.start()
    bench.spend(1, "generate")
    bench.spend(0.5)
    state: dict[str, Any] = {}
    with bench.meter.phase(within[0] if within else "idle"):
        bench.clock.time += HOUR
        state |= bench.meter.state_dict()
    before = bench.check()
    after = Bench(4, state)
    after.clock.time += 99 * HOUR
    after.meter.start()
    assert after.check() == pytest.approx(before)
    after.spend(1, "train")
    assert after.hours() == pytest.approx(before["compute/device_hours"] + 4)


def test_a_checkpoint_of_before_goes_on_from_at_least_its_parts() -> None:
    """It had taken the starting evaluation from the clock."""
    seconds = {"train": 2 * HOUR, "generate": HOUR, "checkpoint": 0.0, "evaluate": 10 * HOUR}
    flops = {"train": 1.0, "generate": 2.0, "evaluate": 3.0}
    old = {"flops": flops, "seconds": seconds, "wasted": {"flops": 0.0, "device_hours": 0.0}, "devices": 1}
    for elapsed, hours in ((5 * HOUR, 3), (20 * HOUR, 10)):
        assert Bench(state={**old, "elapsed": elapsed}).hours() == pytest.approx(hours)
        assert Bench(state={**old, "elapsed": elapsed}).check()
