"""Truths about a lease, with real processes: of those who want to write, one does, and the next follows at once.

A holder on another machine is imitated by its file: this machine's lock does not know of it, and a thread (or nobody)
beats for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import UserError
from sweeps.run.lease import Lease, LeaseHeldError, LeaseLostError, alive, held_leases, is_held
from sweeps.run.slurm_job import node_name
from tests.paths import ROOT

BEAT_S = 0.05
EXPIRY_S = 0.6
PATIENCE_S = 30.0


def lease(directory: Path, **owner: str) -> Lease:
    return Lease(directory, owner=dict(owner), beat_s=BEAT_S, expiry_s=EXPIRY_S)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def process(work: Callable[[], None]) -> Iterator[int]:
    """Another process on this machine, killed at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def holds(directory: Path) -> Callable[[], None]:
    """Holds the lease until it is killed."""

    def work() -> None:
        lease(directory, job="41").acquire()
        (directory / "held").touch()
        time.sleep(PATIENCE_S)

    return work


def file_of(directory: Path) -> Path:
    return directory / ".writer.json"


def write(directory: Path, text: str) -> None:
    """As the file server shows it, never half."""
    directory.mkdir(exist_ok=True)
    unfinished = directory / ".unfinished"
    unfinished.write_text(text)
    unfinished.replace(file_of(directory))


def elsewhere(beat: int = 0, token: str = "theirs") -> str:
    return json.dumps({"host": "another-machine", "pid": 7, "token": token, "beat": beat})


class Elsewhere:
    """A holder on another machine: beats until told to stop, by a file server's clock that may differ from ours."""

    def __init__(self, directory: Path, ahead_s: float = 0.0) -> None:
        self._directory = directory
        self._ahead_s = ahead_s
        self._stop = threading.Event()
        self._write(0)

    def _write(self, beat: int) -> None:
        write(self._directory, elsewhere(beat))
        os.utime(file_of(self._directory), (time.time() + self._ahead_s,) * 2)

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(BEAT_S):
            beat += 1
            self._write(beat)

    def __enter__(self) -> Elsewhere:
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def __exit__(self, *nothing: object) -> None:
        self._stop.set()
        self._thread.join()


def is_beating(directory: Path) -> bool:
    return bool(held_leases([directory], "writer", EXPIRY_S))


def refused(directory: Path, by: str) -> None:
    """One that comes for the lease is told who has it: it saw a heartbeat, however late a busy machine let it come."""
    with pytest.raises(LeaseHeldError, match=by):
        Lease(directory, beat_s=BEAT_S, expiry_s=PATIENCE_S).acquire(wait_s=2 * EXPIRY_S)


# --- on one machine ------------------------------------------------------------------------------------------


def test_of_two_processes_one_wins_and_the_other_is_told_who(tmp_path: Path) -> None:
    with process(holds(tmp_path)) as pid:
        until((tmp_path / "held").exists)
        begin = time.monotonic()
        with pytest.raises(LeaseHeldError, match=rf"job 41, process {pid} on .* is at work here"):
            lease(tmp_path).acquire()
        assert time.monotonic() - begin < EXPIRY_S, "nobody waits for a process on the same machine"
        assert is_held(tmp_path, "writer")


def test_a_holder_that_is_killed_hands_over_at_once(tmp_path: Path) -> None:
    with process(holds(tmp_path)) as pid:
        until((tmp_path / "held").exists)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_held(tmp_path, "writer"))
        begin = time.monotonic()
        mine = lease(tmp_path)
        mine.acquire()
        assert time.monotonic() - begin < EXPIRY_S
        mine.check()
        mine.release()


def test_a_lease_that_was_released_is_free_at_once(tmp_path: Path) -> None:
    for _ in range(3):
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            mine.check()
            assert is_held(tmp_path, "writer")
            assert alive(tmp_path)
        assert time.monotonic() - begin < EXPIRY_S
        assert not is_held(tmp_path, "writer")
        assert alive(tmp_path) is None


def test_one_that_waits_gets_its_turn(tmp_path: Path) -> None:
    def work() -> None:
        with lease(tmp_path) as theirs:
            theirs.acquire()
            (tmp_path / "held").touch()
            until((tmp_path / "go").exists)
        time.sleep(PATIENCE_S)

    with process(work):
        until((tmp_path / "held").exists)
        threading.Timer(0.3, (tmp_path / "go").touch).start()
        mine = lease(tmp_path)
        mine.acquire(wait_s=PATIENCE_S)
        mine.check()
        mine.release()


def test_a_lease_is_released_by_whichever_thread_does_it(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path)
    first.acquire()
    releaser = threading.Thread(target=first.release)
    releaser.start()
    releaser.join()
    try:
        second.acquire()
        second.release()
    finally:
        first.release()


def test_waiting_ends_when_it_is_over_or_given_up(tmp_path: Path) -> None:
    first = lease(tmp_path)
    first.acquire()
    begin = time.monotonic()
    with pytest.raises(LeaseHeldError):
        lease(tmp_path).acquire(wait_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 5
    asked = iter([False, True, True])
    with pytest.raises(LeaseHeldError):
        lease(tmp_path).acquire(wait_s=None, give_up=lambda: next(asked))
    first.check()
    first.release()


def test_two_names_in_one_directory_are_two_leases(tmp_path: Path) -> None:
    one, two = Lease(tmp_path, "one"), Lease(tmp_path, "two")
    one.acquire()
    two.acquire()
    one.check()
    two.check()
    one.release()
    two.release()


def test_a_lease_needs_no_directory_beforehand(tmp_path: Path) -> None:
    with lease(tmp_path / "a" / "b") as mine:
        mine.acquire()
        mine.check()


def test_what_was_never_held_is_free(tmp_path: Path) -> None:
    assert not is_held(tmp_path, "writer")
    assert alive(tmp_path) is None
    assert lease(tmp_path).holder() == "another process"


def test_many_contenders_never_hold_it_together(tmp_path: Path) -> None:
    rounds, contenders = 3, 5
    journal = tmp_path / "journal"

    def say(text: str) -> None:
        descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{text} {os.getpid()}\n".encode())
        os.close(descriptor)

    def work() -> None:
        for _ in range(rounds):
            with lease(tmp_path / "place") as mine:
                mine.acquire(wait_s=PATIENCE_S)
                mine.check()
                say("begin")
                time.sleep(0.01)
                mine.check()
                say("end")
        say("done")
        time.sleep(PATIENCE_S)

    with process(work), process(work), process(work), process(work), process(work):
        until(lambda: journal.exists() and journal.read_text().count("done") == contenders)
    lines = [line.split() for line in journal.read_text().splitlines() if not line.startswith("done")]
    assert len(lines) == 2 * rounds * contenders
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin[0], end[0]) == ("begin", "end") and begin[1] == end[1], lines


# --- from machine to machine ---------------------------------------------------------------------------------


def test_a_holder_elsewhere_that_beats_keeps_it(tmp_path: Path) -> None:
    with Elsewhere(tmp_path):
        begin = time.monotonic()
        refused(tmp_path, "process 7 on another-machine")
        assert time.monotonic() - begin >= 2 * EXPIRY_S
        until(lambda: is_beating(tmp_path))
        assert is_held(tmp_path, "writer") is None


def test_a_holder_elsewhere_that_fell_silent_is_followed_after_its_time_and_not_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Elsewhere(tmp_path):
        time.sleep(3 * BEAT_S)
    begin = time.monotonic()
    mine = lease(tmp_path)
    mine.acquire()
    assert EXPIRY_S <= time.monotonic() - begin < EXPIRY_S + 5
    assert re.fullmatch(r"waiting until \d\d:\d\d:\d\d: .* was not released by process .*\n", capsys.readouterr().out)
    mine.check()
    mine.release()


def test_how_old_a_holders_file_is_does_not_matter(tmp_path: Path) -> None:
    """Clocks of two machines are never compared: an hour-old file may be a holder's whose clock is an hour behind."""
    write(tmp_path, elsewhere())
    for hours in (-1, 1):
        os.utime(file_of(tmp_path), (time.time() + 3600 * hours,) * 2)
        begin = time.monotonic()
        mine = lease(tmp_path)
        mine.acquire()
        assert time.monotonic() - begin >= EXPIRY_S
        mine.release()
        write(tmp_path, elsewhere())


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0], ids=["behind", "ahead"])
def test_whether_a_holder_elsewhere_is_alive_is_told_by_its_beat_and_by_no_clock(
    tmp_path: Path, ahead_s: float
) -> None:
    with Elsewhere(tmp_path, ahead_s):
        until(lambda: is_beating(tmp_path))
        refused(tmp_path, "process 7 on another-machine")
    assert not is_beating(tmp_path)
    assert is_held(tmp_path, "writer") is None, "without watching nobody knows"


def test_all_are_watched_at_once_and_no_longer_than_needed(tmp_path: Path) -> None:
    one, other, gone, own = (tmp_path / name for name in ("one", "other", "gone", "own"))
    write(gone, elsewhere())
    slept: list[float] = []

    def sleep(length_s: float) -> None:
        slept.append(length_s)
        time.sleep(4 * BEAT_S)

    with Elsewhere(one), Elsewhere(other), lease(own) as mine:
        mine.acquire()
        assert held_leases([own, tmp_path / "nowhere"], "writer", 10.0, sleep) == {own} and not slept
        assert held_leases([one, other, own], "writer", 10.0, sleep) == {one, other, own}
        assert 0 < sum(slept) < 10
        slept.clear()
        assert held_leases([one, gone], "writer", 10.0, sleep) == {one}
        assert sum(slept) == pytest.approx(10.0)


def test_a_holder_elsewhere_that_releases_is_followed_at_once(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({**json.loads(elsewhere()), "released": True}))
    begin = time.monotonic()
    with lease(tmp_path) as mine:
        mine.acquire()
        assert time.monotonic() - begin < EXPIRY_S
    slow = Lease(tmp_path, beat_s=BEAT_S, expiry_s=PATIENCE_S)
    write(tmp_path, elsewhere())
    released = threading.Timer(0.3, write, (tmp_path, json.dumps({**json.loads(elsewhere()), "released": True})))
    released.start()
    begin = time.monotonic()
    slow.acquire()
    assert time.monotonic() - begin < PATIENCE_S / 2
    slow.release()


def test_giving_up_ends_the_watch_over_a_holder_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, elsewhere())
    slow = Lease(tmp_path, beat_s=BEAT_S, expiry_s=PATIENCE_S)
    begin = time.monotonic()
    with pytest.raises(LeaseHeldError):
        slow.acquire(wait_s=None, give_up=lambda: True)
    assert time.monotonic() - begin < 5
    mine = lease(tmp_path)
    mine.acquire()  # the lock of this machine was let go
    mine.release()


def test_after_a_takeover_the_old_holder_may_write_nothing_more(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    mine.acquire()
    mine.check()
    write(tmp_path, elsewhere())
    with pytest.raises(LeaseLostError, match="taken over by process 7 on another-machine"):
        mine.check()
    time.sleep(3 * BEAT_S)
    assert json.loads(file_of(tmp_path).read_text())["token"] == "theirs", "it beat over the new holder's file"
    with pytest.raises(LeaseLostError):
        mine.check()
    mine.release()
    assert "released" not in file_of(tmp_path).read_text(), "it released what is another's"


def test_once_lost_it_stays_lost(tmp_path: Path) -> None:
    """Also when the other is gone again: it may have written in between."""
    mine = lease(tmp_path)
    mine.acquire()
    own = file_of(tmp_path).read_text()
    write(tmp_path, elsewhere())
    with pytest.raises(LeaseLostError):
        mine.check()
    write(tmp_path, own)
    with pytest.raises(LeaseLostError):
        mine.check()
    mine.release()


def test_once_lost_it_stays_lost_also_when_the_file_server_was_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.run.lease._READ_PAUSE_S", 0.001)
    mine = lease(tmp_path)
    mine.acquire()
    own = file_of(tmp_path).read_text()
    write(tmp_path, elsewhere())
    for text in (None, "{", own):
        if text is not None:
            write(tmp_path, text)
        with pytest.raises(LeaseLostError):
            mine.check()
    mine.release()


@contextmanager
def held_by_one_that_stands_still(directory: Path) -> Iterator[tuple[int, Path]]:
    """Its process, and a file that it makes when it has found out that the lease is another's.

    It looks once it goes on and there is a file called `go`.
    """
    told = directory / "told"

    def work() -> None:
        mine = lease(directory)
        mine.acquire()
        (directory / "held").touch()
        until((directory / "go").exists)
        try:
            mine.check()
        except LeaseLostError:
            told.touch()

    with process(work) as pid:
        until((directory / "held").exists)
        os.kill(pid, signal.SIGSTOP)
        yield pid, told


def test_a_holder_that_slept_finds_out_when_it_wakes(tmp_path: Path) -> None:
    """A machine that was suspended: nobody checked and nobody beat while another took over."""
    with held_by_one_that_stands_still(tmp_path) as (pid, told):
        write(tmp_path, elsewhere())
        (tmp_path / "go").touch()
        os.kill(pid, signal.SIGCONT)
        until(told.exists)
    assert json.loads(file_of(tmp_path).read_text())["token"] == "theirs"


@pytest.mark.parametrize("text", ["", "[]", "\x00" * 40, '{"host": 3}'])
def test_a_file_of_garbage_keeps_nobody_out_for_ever(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert isinstance(lease(tmp_path).holder(), str)
    is_held(tmp_path, "writer")
    mine = lease(tmp_path)
    mine.acquire(wait_s=PATIENCE_S)
    mine.check()
    mine.release()


def test_a_beat_that_shows_somebody_is_never_older_than_a_few_beats(tmp_path: Path) -> None:
    with lease(tmp_path) as mine:
        mine.acquire()
        seen = set()
        until(lambda: len(seen.add(file_of(tmp_path).read_text()) or seen) >= 4)  # type: ignore[func-returns-value]


def test_no_file_is_left_half_written(tmp_path: Path) -> None:
    with lease(tmp_path) as mine:
        mine.acquire()
        begin = time.monotonic()
        while time.monotonic() - begin < 5 * BEAT_S:
            assert json.loads(file_of(tmp_path).read_text())["token"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".writer.json",
            ".writer.json.term1",
            ".writer.lock",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer.json", ".writer.lock"]


def test_a_file_server_that_is_away_for_a_moment_costs_nobody_the_lease(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    mine.acquire()
    # In one step each: at no moment is there no file, which would mean that the lease is gone.
    away, nowhere = tmp_path / "away", tmp_path / "nowhere"
    away.hardlink_to(file_of(tmp_path))
    nowhere.symlink_to(file_of(tmp_path))
    nowhere.replace(file_of(tmp_path))  # a link to itself: reading it is an error now, as on a stale handle
    time.sleep(4 * BEAT_S)
    away.replace(file_of(tmp_path))
    before = file_of(tmp_path).read_text()
    try:
        mine.check()
        until(lambda: file_of(tmp_path).read_text() != before)
    finally:
        mine.release()


def test_a_lease_that_could_not_be_written_down_is_not_held(tmp_path: Path) -> None:
    broken = lease(tmp_path)
    file_of(tmp_path).mkdir(parents=True)
    with pytest.raises(OSError):
        broken.acquire(wait_s=PATIENCE_S)
    file_of(tmp_path).rmdir()
    mine = lease(tmp_path)
    mine.acquire()
    mine.release()


# --- how it is kept ------------------------------------------------------------------------------------------


def test_a_check_of_every_step_reads_the_file_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    real = Lease._read

    def read(self: Lease) -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return real(self)

    with Lease(tmp_path, beat_s=15.0, expiry_s=90.0, trusted_s=1.0) as mine:
        mine.acquire()
        monkeypatch.setattr(Lease, "_read", read)
        for _ in range(1000):
            mine.check()
        assert reads == 1
        mine._last_check -= 1.5  # as if that had been a second and a half ago
        mine.check()
        assert reads == 2
        mine._last_check, mine._last_beat = mine._last_check, mine._last_beat - 60  # its beats do not come through
        mine.check()
        assert reads == 3
        monkeypatch.undo()


def test_a_beat_replaces_no_file(tmp_path: Path) -> None:
    """Hundreds of holders: each beat is one write, no new name in a directory."""
    with lease(tmp_path) as mine:
        mine.acquire()
        number, text = file_of(tmp_path).stat().st_ino, file_of(tmp_path).read_text()
        until(lambda: file_of(tmp_path).read_text() != text)
        assert file_of(tmp_path).stat().st_ino == number


def test_facts_come_with_each_beat_and_never_stop_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = [{"doing": "x" * 2000, "pid": "not to be lied about"}, {"doing": {1, 2}}, OSError("no"), {}]

    def facts() -> dict[str, Any]:
        said = told.pop(0) if told else {"doing": "last"}
        if isinstance(said, Exception):
            raise said
        assert isinstance(said, dict)
        return said

    seen: list[dict[str, Any]] = []

    def look() -> bool:
        found = alive(tmp_path)
        assert found is not None
        seen.append(found)
        return found.get("doing") == "last" and found["beat"] > 6

    with Lease(tmp_path, beat_s=BEAT_S, expiry_s=EXPIRY_S, facts=facts) as mine:
        mine.acquire()
        until(look)
    assert {len(found.get("doing", "")) for found in seen} >= {0, 4}
    assert {found["pid"] for found in seen} == {os.getpid()}
    beats = [found["beat"] for found in seen]
    assert beats == sorted(beats) and len(set(beats)) >= 4, "a beat was left out"
    assert caplog.text.count("was written without the run's facts") == 1


def test_a_file_of_the_version_before_is_understood(tmp_path: Path) -> None:
    """It locked with `filelock`, which is flock as well, and had neither terms nor more than a host's name."""
    old = json.dumps({"host": node_name(), "pid": 1, "token": "old", "beat": 3})
    write(tmp_path, old)
    lock = os.open(tmp_path / ".writer.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert is_held(tmp_path, "writer")
    with pytest.raises(LeaseHeldError, match="process 1 on"):
        lease(tmp_path).acquire()
    os.close(lock)
    assert not is_held(tmp_path, "writer")
    begin = time.monotonic()
    with lease(tmp_path) as mine:
        mine.acquire()
        mine.check()
    assert time.monotonic() - begin < EXPIRY_S, "on one machine its lock was proof"


def test_a_child_that_outlives_its_parent_holds_nothing(tmp_path: Path) -> None:
    def work() -> None:
        lease(tmp_path).acquire()
        if os.fork() == 0:
            (tmp_path / "child").write_text(str(os.getpid()))
            time.sleep(10 * PATIENCE_S)
            os._exit(0)
        time.sleep(PATIENCE_S)

    child = tmp_path / "child"
    with process(work) as pid:
        until(lambda: child.exists() and bool(child.read_text()))
        os.kill(pid, signal.SIGKILL)
        try:
            until(lambda: not is_held(tmp_path, "writer"))
            begin = time.monotonic()
            with lease(tmp_path) as mine:
                mine.acquire()
            assert time.monotonic() - begin < EXPIRY_S
        finally:
            os.kill(int(child.read_text()), signal.SIGKILL)


# --- where the file system has no locks ----------------------------------------------------------------------


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK", "EINVAL"])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(errno, request.param)

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("sweeps.run.lease.fcntl.flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_holder_keeps_it_and_who_is_killed_is_followed_at_once(tmp_path: Path) -> None:
    with process(holds(tmp_path)) as pid:
        until((tmp_path / "held").exists)
        until(lambda: is_beating(tmp_path))
        refused(tmp_path, rf"job 41, process {pid} on .* is at work here")
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_held(tmp_path, "writer") is False)
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            mine.check()
        assert time.monotonic() - begin < EXPIRY_S, "its process is gone: nothing to wait for"


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    "other",
    [{"pids": "pid:[7]"}, {"boot": "another"}, {"host": "another-machine"}],
    ids=["in a container", "before a restart", "another machine"],
)
def test_without_locks_the_number_of_a_process_elsewhere_proves_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    with lease(tmp_path) as gone:
        gone.acquire()
        facts = json.loads(file_of(tmp_path).read_text())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    write(tmp_path, json.dumps({**facts, **other, "pid": pid}))
    begin = time.monotonic()
    with lease(tmp_path) as mine:
        mine.acquire()
        assert time.monotonic() - begin >= EXPIRY_S


_IN_A_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(
    subprocess.run([*_IN_A_CONTAINER, "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_holder_in_a_container_of_the_same_hostname_is_no_process_of_ours(tmp_path: Path, locks: bool) -> None:
    """Its process 1 is not ours, and is alive; where the file system has locks they reach into it."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    code = [
        "import errno, pathlib, sys, time",
        "from sweeps.run import lease",
        "" if locks else "lease.fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, 'no locks'))",
        f"mine = lease.Lease(pathlib.Path(sys.argv[1]), beat_s={BEAT_S}, expiry_s={EXPIRY_S})",
        "mine.acquire()",
        f"time.sleep({PATIENCE_S})",
    ]
    with pytest.MonkeyPatch.context() as patch:
        if not locks:
            patch.setattr("sweeps.run.lease.fcntl.flock", flock)
        container = subprocess.Popen([*_IN_A_CONTAINER, sys.executable, "-c", "\n".join(code), str(tmp_path)], cwd=ROOT)
        try:
            until(lambda: alive(tmp_path) is not None)
            facts = alive(tmp_path)
            assert facts is not None and (facts["host"], facts["pid"]) == (node_name(), 1)
            until(lambda: is_beating(tmp_path))
            refused(tmp_path, rf"process 1 on {re.escape(node_name())} is at work here")
        finally:
            container.kill()
            container.wait()
        until(lambda: not is_beating(tmp_path))
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            assert (time.monotonic() - begin < EXPIRY_S) == locks, "the end of a process there is not seen from here"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_one_that_stands_still_is_followed_after_its_time_and_is_told(tmp_path: Path) -> None:
    with held_by_one_that_stands_still(tmp_path) as (pid, told), lease(tmp_path) as mine:
        mine.acquire(wait_s=PATIENCE_S)
        (tmp_path / "go").touch()
        os.kill(pid, signal.SIGCONT)
        until(told.exists)
        mine.check()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_many_contenders_never_hold_it_together(tmp_path: Path) -> None:
    test_many_contenders_never_hold_it_together(tmp_path)


def test_a_folder_in_the_place_of_the_lock_is_said(tmp_path: Path) -> None:
    (tmp_path / ".writer.lock").mkdir()
    with pytest.raises(UserError) as error:
        Lease(tmp_path).acquire(0)
    told = f"{tmp_path}/.writer.lock: Is a directory; a folder is in the way of a file; move it, or give another place"
    assert str(error.value) == told
