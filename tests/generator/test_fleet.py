"""Tests of a fleet of generator processes: every rollout is returned exactly once, even if processes are lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
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
from lightning_scalerl.generator.vllm import serve
from tests.generator.sampling import with_sampling
from tests.generator.slow import Size, SlowGenerator, Weights, weights_of
from tests.generator.test_torch_generator import STOP, drain, requests
from tests.generator.threads import Threads

GROUPS, SIZE = 6, 3


def fleet_of(generators: int = 2, slots: int = 4, most_s: float = 0.05, silence_s: float = 5.0) -> Fleet:
    settings = {"slots": slots, "most_s": most_s}
    return Fleet(SlowGenerator, Weights(Size()), settings, generators=generators, silence_s=silence_s, start_s=200)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with closing(fleet_of()) as opened:
        yield opened


def submit(fleet: Fleet, groups: int = GROUPS) -> None:
    for key in range(groups):
        fleet.submit(GroupRequest(key, (1, 2), SIZE, (0, key)))


def drained(fleet: Fleet) -> list[FinishedRollout]:
    finished_rollouts: list[FinishedRollout] = []
    deadline = time.monotonic() + 240
    while fleet.in_flight:
        assert time.monotonic() < deadline, f"{fleet.in_flight} rollouts never came"
        finished_rollouts += fleet.step().finished
    return finished_rollouts


def check(finished_rollouts: list[FinishedRollout], version: int, groups: int = GROUPS) -> None:
    """Check that every rollout was returned exactly once, sampled with weights of `version` only."""
    assert sorted((entry.key, entry.index) for entry in finished_rollouts) == [
        (k, i) for k in range(groups) for i in range(SIZE)
    ]
    assert {v for entry in finished_rollouts for v in entry.rollout.weight_versions} == {version}


@pytest.mark.full
@pytest.mark.parametrize(
    ("signal_number", "when"),
    [
        (signal_number, when)
        for signal_number in (signal.SIGKILL, signal.SIGSTOP)
        for when in ("before", "during", "both")
    ],
)
def test_engines_lost_during_aside_cost_no_rollout(fleet: Fleet, signal_number: signal.Signals, when: str) -> None:
    submit(fleet)
    finished_rollouts = list(fleet.step().finished)
    if when != "during":
        os.kill(fleet.pids[1], signal_number)
    with fleet.aside():
        fleet.publish(weights_of(9), 9)
        submit(fleet, 4)
        other = list(fleet.step().finished)
        if when != "before":
            os.kill(fleet.pids[0], signal_number)
        check(other + drained(fleet), 9, 4)
    check(finished_rollouts + drained(fleet), 0)
    assert fleet.version == 0 and fleet.lost >= 1


@pytest.mark.full
def test_a_fleet_survives_the_loss_of_all_engines(fleet: Fleet) -> None:
    submit(fleet)
    fleet.publish(weights_of(1), 1)
    finished_rollouts = list(fleet.step().finished)
    for pid in fleet.pids:
        os.kill(pid, signal.SIGKILL)
    finished_rollouts += drained(fleet)
    assert sorted((entry.key, entry.index) for entry in finished_rollouts) == [
        (k, i) for k in range(GROUPS) for i in range(SIZE)
    ]
    assert fleet.lost >= 2


def test_score_does_not_wait_for_a_lost_engine_to_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log states how the engine ended, although its connection closed before its exit status was known."""
    threads = Threads(monkeypatch)
    with closing(fleet_of(generators=1)) as fleet:
        assert fleet.score((1, 2), (3, 7)).tolist() == [3, 7]
        submit(fleet)
        finished_rollouts: list[FinishedRollout] = []
        while not next(iter(fleet._engines)).sampled:
            report = fleet.step()
            finished_rollouts += report.finished
            assert report.lost_tokens == 0
        threads.may_start.clear()
        threads.started[0].die()
        began = time.monotonic()
        assert fleet.score((1, 2), (3, 7)) is None
        assert fleet.score((1, 2), (3, 7)) is None, "the engine is being restarted"
        assert time.monotonic() - began < threads.most_s
        lost = 0
        while not lost:
            assert time.monotonic() - began < 60, "the lost engine had sampled tokens of unfinished rollouts"
            report = fleet.step()
            finished_rollouts, lost = [*finished_rollouts, *report.finished], report.lost_tokens
        assert "generator 0 ended with status -9" in caplog.text
        threads.may_start.set()
        check(finished_rollouts + drained(fleet), 0)
        assert fleet.score((1, 2), (3, 7)).tolist() == [3, 7]
        assert fleet.lost == 1


def test_an_engine_that_closed_its_connection_but_runs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads(monkeypatch)
    monkeypatch.setattr(transport, "EXIT_S", 0.2)
    with closing(fleet_of(generators=1)) as fleet:
        threads.started[0].die(status=None)
        submit(fleet)
        check(drained(fleet), 0)
        assert "generator 0 closed its connection but did not end" in caplog.text


def test_a_clusters_warning_does_not_end_engines_that_start(tmp_path: Path) -> None:
    """SLURM sends it to every process of a step, also to one that has not run its first line yet."""
    child = transport.Child(0, transport.ChildSettings(tmp_path, 5.0, 5.0, threading.Event()), "")
    server = serve.Server([sys.executable, "-c", "import time; time.sleep(600)"], {}, "", tmp_path / "server")
    server.folder.mkdir()
    server.start()
    assert server.process is not None
    try:
        for process in (child._process, server.process):
            os.kill(process.pid, signal.SIGUSR2)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
    finally:
        child.stop()
        server.close()


@pytest.mark.full
def test_signals_of_a_scheduler_do_not_end_engines() -> None:
    with closing(fleet_of(silence_s=200)) as fleet:
        submit(fleet)
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for pid in fleet.pids:
                os.kill(pid, signal_number)
        check(drained(fleet), 0)
        assert fleet.lost == 0


@pytest.mark.full
def test_a_checkpoint_while_an_engine_is_lost(fleet: Fleet) -> None:
    submit(fleet)
    os.kill(fleet.pids[1], signal.SIGKILL)
    saved = fleet.state_dict()
    with closing(fleet_of()) as other:
        other.load_state_dict(saved)
        submit(other, 0)
        other.submit(GroupRequest(GROUPS, (1, 2), SIZE, (0, GROUPS)))
        check(drained(other), 0, GROUPS + 1)


@pytest.mark.full
def test_names_of_groups_are_never_reused(fleet: Fleet) -> None:
    """A restored process may still report a finished group; that must not be taken for another group."""
    submit(fleet)
    saved = fleet.state_dict()
    names = {name for name, *_ in saved["open"]}
    with closing(fleet_of()) as other:
        other.load_state_dict({**saved, "open": saved["open"][:1]})
        other.submit(GroupRequest(77, (1, 2), SIZE, (0, 77)))
        assert not names & (set(other._ledger._open) - {saved["open"][0][0]})
        assert len(drained(other)) == len(saved["finished"]) + len(saved["open"][0][2]) + SIZE


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_an_error_with_the_reason() -> None:
    def broken(**arguments: Any) -> None:
        raise AssertionError("never called here")

    with pytest.raises(ConfigurationError, match=r"TypeError: .* missing 1 required keyword-only argument: 'most_s'"):
        Fleet(SlowGenerator, Weights(Size()), {"slots": 1}, generators=1, silence_s=9, start_s=60)
    broken.__module__ = "__main__"
    with pytest.raises(ConfigurationError, match=r"broken is known to this script alone; .* use driver=virtual"):
        Fleet(broken, Weights(Size()), {}, generators=1, silence_s=9, start_s=60)


@pytest.mark.slow
def test_an_engine_that_starts_too_slowly_is_an_error() -> None:
    with pytest.raises(GeneratorLostError, match="was silent for"):
        Fleet(SlowGenerator, Weights(Size()), {"slots": 1, "most_s": 0.1}, generators=1, silence_s=9, start_s=0.05)


@pytest.mark.full
def test_weights_are_passed_in_files_if_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=8))
    with closing(fleet_of(generators=1)) as fleet:
        assert not fleet._store.folder.is_relative_to("/dev/shm")
        submit(fleet)
        check(drained(fleet), 0)
        folder = fleet._store.folder
    assert not folder.exists()


@pytest.mark.full
def test_old_weights_are_deleted(fleet: Fleet) -> None:
    for version in range(1, 6):
        fleet.publish(weights_of(version), version)
    assert len(list(fleet._store.folder.glob("*.safetensors"))) == 1
    with fleet.aside():
        fleet.publish(weights_of(9), 9)
        fleet.publish(weights_of(10), 10)
    fleet.publish(weights_of(6), 6)
    assert len(list(fleet._store.folder.glob("*.safetensors"))) == 1


@pytest.mark.full
def test_the_torch_generator_samples_the_same_in_a_fleet(tiny_model: Any) -> None:
    settings = with_sampling(precision=Precision("fp32"), max_prompt_tokens=8, max_new_tokens=10, stop_tokens=[STOP])
    local = TorchGenerator(tiny_model, slots=4, **settings)
    for request in requests():
        local.submit(request)
    expected = {place: entry.rollout.tokens for place, entry in drain(local).items()}
    remote = Fleet(partial(TorchGenerator, slots=4), tiny_model, settings, generators=2, silence_s=60, start_s=200)
    with closing(remote):
        for request in requests():
            remote.submit(request)
        assert {(entry.key, entry.index): entry.rollout.tokens for entry in drained(remote)} == expected


@pytest.mark.slow
def test_rollouts_wait_in_their_engines(tiny_model: Any) -> None:
    """An answer reaches the engine of its rollout, also after a checkpoint. A lost engine's rollouts start again."""
    settings = with_sampling(precision=Precision("fp32"), max_prompt_tokens=8, max_new_tokens=20, stop_tokens=[])
    submitted = [dataclasses.replace(entry, waits=True, turn_tokens=3) for entry in requests(3)]

    def answer_all(generator: Any, finished_rollouts: dict[Any, Any]) -> dict[Any, Any]:
        deadline = time.monotonic() + 240
        while generator.in_flight:
            assert time.monotonic() < deadline, f"{generator.in_flight} rollouts never came"
            for entry in generator.waiting:
                if len(entry.rollout.tokens) < 13:
                    generator.insert(entry.key, entry.index, [2 + entry.index] * 2)
                else:
                    generator.end(entry.key, entry.index)
            finished_rollouts |= {(entry.key, entry.index): entry.rollout for entry in generator.step().finished}
        return {place: (rollout.tokens, rollout.sources) for place, rollout in finished_rollouts.items()}

    local = TorchGenerator(tiny_model, slots=4, **settings)
    remote = Fleet(partial(TorchGenerator, slots=4), tiny_model, settings, generators=2, silence_s=60, start_s=200)
    with closing(remote):
        for request in submitted:
            local.submit(request)
            remote.submit(request)
        expected = answer_all(local, {})
        assert len(expected) == 9 and {len(tokens) for tokens, _ in expected.values()} == {13}
        reported = 0
        while not remote.idle:
            reported += len(remote.step().waiting)
        waiting = remote.waiting
        assert reported == len(waiting) == remote.in_flight == 9 and remote.free_slots == 8
        state = remote.state_dict()
        assert answer_all(remote, {}) == expected
        remote.load_state_dict(state)
        assert sorted((entry.key, entry.index) for entry in remote.waiting) == sorted(expected)
        with pytest.raises(ValueError, match="17 tokens do not fit into rollout 1 of group 2, which has room for 17"):
            remote.insert(2, 1, [1] * 17)
        with pytest.raises(ValueError, match="token 99 is not in the vocabulary"):
            remote.insert(2, 1, [99])
        remote.restart(2, 1)
        assert (2, 1) not in {(entry.key, entry.index) for entry in remote.waiting}
        first = {(key, 0) for key in range(3)}
        for place in first:
            remote.end(*place)
        while remote.in_flight > 6:
            remote.step()
        os.kill(remote.pids[0], signal.SIGKILL)
        remaining = {place: entry for place, entry in expected.items() if place not in first}
        assert answer_all(remote, {}) == remaining and remote.lost == 1
        # An engine that has sampled a whole group again must not keep its other rollouts waiting for ever.
        while any("waiting" in (engine or {}) for engine in remote.state_dict()["generators"]):
            remote.step()
        with pytest.raises(KeyError, match="rollout 0 of group 0 does not wait"):
            remote.end(0, 0)
