"""Generators in processes of their own, behind one protocol: whatever becomes of them, every rollout comes once."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.generator.fleet import transport, weights
from lightning_scalerl.generator.fleet.engines import GeneratorLostError
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.torch.generator import TorchGenerator
from tests.generator.sampling import with_sampling
from tests.generator.slow import Size, SlowGenerator, Weights, weights_of
from tests.generator.test_torch_generator import STOP, drain, requests
from tests.generator.threads import Threads

GROUPS, SIZE = 6, 3


def fleet_of(generators: int = 2, slots: int = 4, most_s: float = 0.05, silence_s: float = 5.0) -> Fleet:
    given = {"slots": slots, "most_s": most_s}
    return Fleet(SlowGenerator, Weights(Size()), given, generators=generators, silence_s=silence_s, start_s=200)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with closing(fleet_of()) as found:
        yield found


def submit(fleet: Fleet, groups: int = GROUPS) -> None:
    for key in range(groups):
        fleet.submit(GroupRequest(key, (1, 2), SIZE, (0, key)))


def drained(fleet: Fleet) -> list[FinishedRollout]:
    found: list[FinishedRollout] = []
    deadline = time.monotonic() + 240
    while fleet.in_flight:
        assert time.monotonic() < deadline, f"{fleet.in_flight} rollouts never came"
        found += fleet.step().finished
    return found


def check(found: list[FinishedRollout], version: int, groups: int = GROUPS) -> None:
    """All of them, once, and of these weights alone."""
    assert sorted((each.key, each.index) for each in found) == [(k, i) for k in range(groups) for i in range(SIZE)]
    assert {v for each in found for v in each.rollout.weight_versions} == {version}


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "when"),
    [(how, when) for how in (signal.SIGKILL, signal.SIGSTOP) for when in ("before", "during", "both")],
)
def test_one_is_lost_while_something_else_is_done(fleet: Fleet, how: signal.Signals, when: str) -> None:
    submit(fleet)
    found = list(fleet.step().finished)
    if when != "during":
        os.kill(fleet.pids[1], how)
    with fleet.aside():
        fleet.publish(weights_of(9), 9)
        submit(fleet, 4)
        other = list(fleet.step().finished)
        if when != "before":
            os.kill(fleet.pids[0], how)
        check(other + drained(fleet), 9, 4)
    check(found + drained(fleet), 0)
    assert fleet.version == 0 and fleet.lost >= 1


@pytest.mark.full
def test_all_are_lost_at_once(fleet: Fleet) -> None:
    submit(fleet)
    fleet.publish(weights_of(1), 1)
    found = list(fleet.step().finished)
    for pid in fleet.pids:
        os.kill(pid, signal.SIGKILL)
    found += drained(fleet)
    assert sorted((each.key, each.index) for each in found) == [(k, i) for k in range(GROUPS) for i in range(SIZE)]
    assert fleet.lost >= 2


def test_nobody_waits_for_a_lost_one_to_start_again_to_be_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is told how the lost one ended, though its connection was gone before its status was there."""
    threads = Threads(monkeypatch)
    with closing(fleet_of(generators=1)) as fleet:
        assert fleet.score((1, 2), (3, 7)).tolist() == [3, 7]
        submit(fleet)
        found: list[FinishedRollout] = []
        while not next(iter(fleet._engines)).sampled:
            report = fleet.step()
            found += report.finished
            assert report.lost_tokens == 0
        threads.may_start.clear()
        threads.started[0].die()
        began = time.monotonic()
        assert fleet.score((1, 2), (3, 7)) is None
        assert fleet.score((1, 2), (3, 7)) is None, "it is being started"
        assert time.monotonic() - began < threads.most_s
        lost = 0
        while not lost:
            assert time.monotonic() - began < 60, "it had sampled for rollouts that it had not finished"
            report = fleet.step()
            found, lost = [*found, *report.finished], report.lost_tokens
        assert "generator 0 ended with status -9" in caplog.text
        threads.may_start.set()
        check(found + drained(fleet), 0)
        assert fleet.score((1, 2), (3, 7)).tolist() == [3, 7]
        assert fleet.lost == 1


def test_one_that_cannot_be_heard_and_does_not_end_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads(monkeypatch)
    monkeypatch.setattr(transport, "EXIT_S", 0.2)
    with closing(fleet_of(generators=1)) as fleet:
        threads.started[0].die(status=None)
        submit(fleet)
        check(drained(fleet), 0)
        assert "generator 0 closed its connection but did not end" in caplog.text


@pytest.mark.full
def test_a_schedulers_signal_is_the_trainers() -> None:
    with closing(fleet_of(silence_s=200)) as fleet:
        submit(fleet)
        for how in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for pid in fleet.pids:
                os.kill(pid, how)
        check(drained(fleet), 0)
        assert fleet.lost == 0


@pytest.mark.full
def test_a_checkpoint_taken_while_one_is_lost(fleet: Fleet) -> None:
    submit(fleet)
    os.kill(fleet.pids[1], signal.SIGKILL)
    saved = fleet.state_dict()
    with closing(fleet_of()) as other:
        other.load_state_dict(saved)
        submit(other, 0)
        other.submit(GroupRequest(GROUPS, (1, 2), SIZE, (0, GROUPS)))
        check(drained(other), 0, GROUPS + 1)


@pytest.mark.full
def test_names_are_never_given_twice(fleet: Fleet) -> None:
    """What a restored process still has of a group that is done must not be taken for another's."""
    submit(fleet)
    saved = fleet.state_dict()
    names = {name for name, *_ in saved["open"]}
    with closing(fleet_of()) as other:
        other.load_state_dict({**saved, "open": saved["open"][:1]})
        other.submit(GroupRequest(77, (1, 2), SIZE, (0, 77)))
        assert not names & (set(other._ledger._open) - {saved["open"][0][0]})
        assert len(drained(other)) == len(saved["finished"]) + len(saved["open"][0][2]) + SIZE


@pytest.mark.slow
def test_one_that_cannot_start_says_why_at_once() -> None:
    def broken(**arguments: Any) -> None:
        raise AssertionError("never called here")

    with pytest.raises(ConfigurationError, match=r"TypeError: .* missing 1 required keyword-only argument: 'most_s'"):
        Fleet(SlowGenerator, Weights(Size()), {"slots": 1}, generators=1, silence_s=9, start_s=60)
    broken.__module__ = "__main__"
    with pytest.raises(ConfigurationError, match=r"broken is known to this script alone; .* use driver=virtual"):
        Fleet(broken, Weights(Size()), {}, generators=1, silence_s=9, start_s=60)


@pytest.mark.slow
def test_one_that_takes_too_long_to_start_is_given_up() -> None:
    with pytest.raises(GeneratorLostError, match="was silent for"):
        Fleet(SlowGenerator, Weights(Size()), {"slots": 1, "most_s": 0.1}, generators=1, silence_s=9, start_s=0.05)


@pytest.mark.slow
def test_weights_go_through_files_where_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=8))
    with closing(fleet_of(generators=1)) as fleet:
        assert not fleet._store.folder.is_relative_to("/dev/shm")
        submit(fleet)
        check(drained(fleet), 0)
        folder = fleet._store.folder
    assert not folder.exists()


@pytest.mark.full
def test_only_the_weights_in_use_are_kept(fleet: Fleet) -> None:
    for version in range(1, 6):
        fleet.publish(weights_of(version), version)
    assert len(list(fleet._store.folder.glob("*.safetensors"))) == 1
    with fleet.aside():
        fleet.publish(weights_of(9), 9)
        fleet.publish(weights_of(10), 10)
    fleet.publish(weights_of(6), 6)
    assert len(list(fleet._store.folder.glob("*.safetensors"))) == 1


@pytest.mark.full
def test_the_torch_generator_samples_the_same_there_and_here(tiny_model: Any) -> None:
    given = with_sampling(precision=Precision("fp32"), max_prompt_tokens=8, max_new_tokens=10, stop_tokens=[STOP])
    here = TorchGenerator(tiny_model, slots=4, **given)
    for request in requests():
        here.submit(request)
    expected = {place: each.rollout.tokens for place, each in drain(here).items()}
    there = Fleet(partial(TorchGenerator, slots=4), tiny_model, given, generators=2, silence_s=60, start_s=200)
    with closing(there):
        for request in requests():
            there.submit(request)
        assert {(each.key, each.index): each.rollout.tokens for each in drained(there)} == expected


@pytest.mark.slow
def test_rollouts_wait_in_their_engines(tiny_model: Any) -> None:
    """Answers reach the engine that has the rollout, also after a checkpoint; a lost engine's rollouts start again."""
    given = with_sampling(precision=Precision("fp32"), max_prompt_tokens=8, max_new_tokens=20, stop_tokens=[])
    asked = [dataclasses.replace(each, waits=True, turn_tokens=3) for each in requests(3)]

    def answered(generator: Any, found: dict[Any, Any]) -> dict[Any, Any]:
        deadline = time.monotonic() + 240
        while generator.in_flight:
            assert time.monotonic() < deadline, f"{generator.in_flight} rollouts never came"
            for each in generator.waiting:
                if len(each.rollout.tokens) < 13:
                    generator.insert(each.key, each.index, [2 + each.index] * 2)
                else:
                    generator.end(each.key, each.index)
            found |= {(each.key, each.index): each.rollout for each in generator.step().finished}
        return {place: (rollout.tokens, rollout.sources) for place, rollout in found.items()}

    here = TorchGenerator(tiny_model, slots=4, **given)
    there = Fleet(partial(TorchGenerator, slots=4), tiny_model, given, generators=2, silence_s=60, start_s=200)
    with closing(there):
        for request in asked:
            here.submit(request)
            there.submit(request)
        expected = answered(here, {})
        assert len(expected) == 9 and {len(tokens) for tokens, _ in expected.values()} == {13}
        reported = 0
        while not there.idle:
            reported += len(there.step().waiting)
        waiting = there.waiting
        assert reported == len(waiting) == there.in_flight == 9 and there.free_slots == 8
        state = there.state_dict()
        assert answered(there, {}) == expected
        there.load_state_dict(state)
        assert sorted((each.key, each.index) for each in there.waiting) == sorted(expected)
        with pytest.raises(ValueError, match="17 tokens do not fit into rollout 1 of group 2, which has room for 17"):
            there.insert(2, 1, [1] * 17)
        with pytest.raises(ValueError, match="token 99 is not in the vocabulary"):
            there.insert(2, 1, [99])
        there.restart(2, 1)
        assert (2, 1) not in {(each.key, each.index) for each in there.waiting}
        first = {(key, 0) for key in range(3)}
        for place in first:
            there.end(*place)
        while there.in_flight > 6:
            there.step()
        os.kill(there.pids[0], signal.SIGKILL)
        rest = {place: each for place, each in expected.items() if place not in first}
        assert answered(there, {}) == rest and there.lost == 1
        # Nothing waits for ever in an engine that has sampled a whole group again.
        while any("waiting" in (own or {}) for own in there.state_dict()["generators"]):
            there.step()
        with pytest.raises(KeyError, match="rollout 0 of group 0 does not wait"):
            there.end(0, 0)
