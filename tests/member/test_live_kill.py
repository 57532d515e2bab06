"""Tests of live runs (`driver=live`) whose generator or trainer process is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sweeps.run.journal import read_journal
from sweeps.run.progress import is_done
from tests.place import PATIENCE_S, STEPS, Place, kill_group, kinds, lines, wait_until

pytestmark = pytest.mark.slow

LIVE = ("driver=live", "driver.generators=2", "driver.silence_s=10", "seed=3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def generators_of(parent: int) -> list[int]:
    """Return the generator processes that a trainer has started."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent_pid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if b"lightning_scalerl.generator.fleet" in command and parent_pid == parent:
            pids.append(int(folder.name))
    return sorted(pids)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_of(place: Place) -> Path:
    (run_dir,) = (place.root / "live" / "runs").iterdir()
    return run_dir


def assert_complete(run_dir: Path) -> None:
    """Assert that a run is done, with every step once, bounded staleness and valid idle shares."""
    assert is_done(run_dir, STEPS, run_dir.name)
    steps = [record.step for record in read_journal(run_dir).of_kind("train")]
    assert steps == list(range(1, STEPS + 1))
    trained = [record.metrics for record in read_journal(run_dir).of_kind("train")]
    assert max(metrics["train/staleness_max"] for metrics in trained) <= 2
    assert all(0 <= metrics["live/trainer_idle"] <= 1 for metrics in trained)


@pytest.mark.full
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_generator_is_restarted(place: Place, signal_number: signal.Signals) -> None:
    with place.command(["-m", "lightning_scalerl.train", *place.overrides("live", *LIVE)], 0.02) as process:
        assert wait_until(lambda: (place.root / "live/runs").exists() and lines(run_of(place)) >= 6, process)
        first, _ = generators_of(process.pid)
        os.kill(first, signal_number)
        assert process.wait(timeout=PATIENCE_S) == 0, place.said()
    assert_complete(run_of(place))
    assert not alive(first)
    assert "it is restarted" in place.said()


def test_generators_end_with_a_killed_trainer_and_the_same_command_continues(place: Place) -> None:
    command = ["-m", "lightning_scalerl.train", *place.overrides("live", *LIVE)]
    with place.command(command, 0.02) as process:
        assert wait_until(lambda: (place.root / "live/runs").exists() and lines(run_of(place)) >= 12, process)
        assert kinds(run_of(place))["checkpoint"] >= 1
        generators = generators_of(process.pid)
        assert len(generators) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in generators):
            assert time.monotonic() < deadline, "generators outlive their trainer"
            time.sleep(0.1)
        kill_group(process)
    with place.command(command) as process:
        assert process.wait(timeout=PATIENCE_S) == 0, place.said()
    assert_complete(run_of(place))
