"""Tests of a lease with real processes: one process writes at a time, and the next one follows at once.

A holder on another machine is imitated by its file. This machine's lock does not know of it. A thread may write its
heartbeats.
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
from sweeps.run.lease import Lease, LeaseHeldError, LeaseLostError, held_leases, holder_facts, is_held
from sweeps.run.slurm_job import node_name
from tests.paths import ROOT

BEAT_S = 0.05
EXPIRY_S = 0.6
PATIENCE_S = 30.0


def lease(directory: Path, **owner: str) -> Lease:
    return Lease(directory, owner=dict(owner), beat_s=BEAT_S, expiry_s=EXPIRY_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def process(work: Callable[[], None]) -> Iterator[int]:
    """Run `work` in another process of this machine, which is killed at the end."""
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


def hold_lease(directory: Path) -> Callable[[], None]:
    """Return a function that holds the lease until its process is killed."""

    def work() -> None:
        lease(directory, job="41").acquire()
        (directory / "held").touch()
        time.sleep(PATIENCE_S)

    return work


def file_of(directory: Path) -> Path:
    return directory / ".writer.json"


def write(directory: Path, text: str) -> None:
    """Replace the lease's file atomically, as a file server shows it."""
    directory.mkdir(exist_ok=True)
    unfinished = directory / ".unfinished"
    unfinished.write_text(text)
    unfinished.replace(file_of(directory))


def lease_text(beat: int = 0, token: str = "theirs") -> str:
    return json.dumps({"host": "another-machine", "pid": 7, "token": token, "beat": beat})


class HolderElsewhere:
    """A holder on another machine; its heartbeats have the times of a file server whose clock may differ from ours."""

    def __init__(self, directory: Path, ahead_s: float = 0.0) -> None:
        self._directory = directory
        self._ahead_s = ahead_s
        self._stop = threading.Event()
        self._write(0)

    def _write(self, beat: int) -> None:
        write(self._directory, lease_text(beat))
        os.utime(file_of(self._directory), (time.time() + self._ahead_s,) * 2)

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(BEAT_S):
            beat += 1
            self._write(beat)

    def __enter__(self) -> HolderElsewhere:
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def __exit__(self, *nothing: object) -> None:
        self._stop.set()
        self._thread.join()


def is_beating(directory: Path) -> bool:
    return bool(held_leases([directory], "writer", EXPIRY_S))


def assert_refused(directory: Path, by: str) -> None:
    """Assert that a contender is refused with the holder's name.

    Its long expiry tolerates heartbeats that are late on a busy machine.
    """
    with pytest.raises(LeaseHeldError, match=by):
        Lease(directory, beat_s=BEAT_S, expiry_s=PATIENCE_S).acquire(wait_s=2 * EXPIRY_S)


# --- on one machine ------------------------------------------------------------------------------------------


def test_the_second_of_two_processes_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with process(hold_lease(tmp_path)) as pid:
        wait_until((tmp_path / "held").exists)
        begin = time.monotonic()
        with pytest.raises(LeaseHeldError, match=rf"job 41, process {pid} on .* is at work here"):
            lease(tmp_path).acquire()
        assert time.monotonic() - begin < EXPIRY_S, "a contender does not wait for a process on the same machine"
        assert is_held(tmp_path, "writer")


def test_the_lease_of_a_killed_holder_is_free_at_once(tmp_path: Path) -> None:
    with process(hold_lease(tmp_path)) as pid:
        wait_until((tmp_path / "held").exists)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_held(tmp_path, "writer"))
        begin = time.monotonic()
        mine = lease(tmp_path)
        mine.acquire()
        assert time.monotonic() - begin < EXPIRY_S
        mine.check()
        mine.release()


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    for _ in range(3):
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            mine.check()
            assert is_held(tmp_path, "writer")
            assert holder_facts(tmp_path)
        assert time.monotonic() - begin < EXPIRY_S
        assert not is_held(tmp_path, "writer")
        assert holder_facts(tmp_path) is None


def test_a_waiting_contender_gets_the_lease(tmp_path: Path) -> None:
    def work() -> None:
        with lease(tmp_path) as theirs:
            theirs.acquire()
            (tmp_path / "held").touch()
            wait_until((tmp_path / "go").exists)
        time.sleep(PATIENCE_S)

    with process(work):
        wait_until((tmp_path / "held").exists)
        threading.Timer(0.3, (tmp_path / "go").touch).start()
        mine = lease(tmp_path)
        mine.acquire(wait_s=PATIENCE_S)
        mine.check()
        mine.release()


def test_any_thread_can_release_a_lease(tmp_path: Path) -> None:
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


def test_waiting_ends_by_timeout_or_by_giving_up(tmp_path: Path) -> None:
    first = lease(tmp_path)
    first.acquire()
    begin = time.monotonic()
    with pytest.raises(LeaseHeldError):
        lease(tmp_path).acquire(wait_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 5
    answers = iter([False, True, True])
    with pytest.raises(LeaseHeldError):
        lease(tmp_path).acquire(wait_s=None, give_up=lambda: next(answers))
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


def test_a_lease_creates_its_directory(tmp_path: Path) -> None:
    with lease(tmp_path / "a" / "b") as mine:
        mine.acquire()
        mine.check()


def test_a_lease_that_was_never_held_is_free(tmp_path: Path) -> None:
    assert not is_held(tmp_path, "writer")
    assert holder_facts(tmp_path) is None
    assert lease(tmp_path).holder() == "another process"


def test_many_contenders_never_hold_the_lease_together(tmp_path: Path) -> None:
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
        wait_until(lambda: journal.exists() and journal.read_text().count("done") == contenders)
    lines = [line.split() for line in journal.read_text().splitlines() if not line.startswith("done")]
    assert len(lines) == 2 * rounds * contenders
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin[0], end[0]) == ("begin", "end") and begin[1] == end[1], lines


# --- holders on another machine ------------------------------------------------------------------------------


def test_a_holder_elsewhere_with_heartbeats_keeps_the_lease(tmp_path: Path) -> None:
    with HolderElsewhere(tmp_path):
        begin = time.monotonic()
        assert_refused(tmp_path, "process 7 on another-machine")
        assert time.monotonic() - begin >= 2 * EXPIRY_S
        wait_until(lambda: is_beating(tmp_path))
        assert is_held(tmp_path, "writer") is None


def test_the_lease_of_a_silent_holder_elsewhere_expires_after_expiry_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HolderElsewhere(tmp_path):
        time.sleep(3 * BEAT_S)
    begin = time.monotonic()
    mine = lease(tmp_path)
    mine.acquire()
    assert EXPIRY_S <= time.monotonic() - begin < EXPIRY_S + 5
    assert re.fullmatch(r"waiting until \d\d:\d\d:\d\d: .* was not released by process .*\n", capsys.readouterr().out)
    mine.check()
    mine.release()


def test_the_age_of_a_holders_file_does_not_matter(tmp_path: Path) -> None:
    """Clocks of two machines are never compared: the writer's clock may be one hour behind, so its file looks old."""
    write(tmp_path, lease_text())
    for hours in (-1, 1):
        os.utime(file_of(tmp_path), (time.time() + 3600 * hours,) * 2)
        begin = time.monotonic()
        mine = lease(tmp_path)
        mine.acquire()
        assert time.monotonic() - begin >= EXPIRY_S
        mine.release()
        write(tmp_path, lease_text())


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0], ids=["behind", "ahead"])
def test_a_holder_elsewhere_is_judged_by_its_heartbeat_and_not_by_times(tmp_path: Path, ahead_s: float) -> None:
    with HolderElsewhere(tmp_path, ahead_s):
        wait_until(lambda: is_beating(tmp_path))
        assert_refused(tmp_path, "process 7 on another-machine")
    assert not is_beating(tmp_path)
    assert is_held(tmp_path, "writer") is None, "unknown without watching the heartbeat"


def test_several_leases_are_watched_together_and_only_as_long_as_needed(tmp_path: Path) -> None:
    one, other, gone, own = (tmp_path / name for name in ("one", "other", "gone", "own"))
    write(gone, lease_text())
    slept: list[float] = []

    def sleep(length_s: float) -> None:
        slept.append(length_s)
        time.sleep(4 * BEAT_S)

    with HolderElsewhere(one), HolderElsewhere(other), lease(own) as mine:
        mine.acquire()
        assert held_leases([own, tmp_path / "nowhere"], "writer", 10.0, sleep) == {own} and not slept
        assert held_leases([one, other, own], "writer", 10.0, sleep) == {one, other, own}
        assert 0 < sum(slept) < 10
        slept.clear()
        assert held_leases([one, gone], "writer", 10.0, sleep) == {one}
        assert sum(slept) == pytest.approx(10.0)


def test_a_lease_released_elsewhere_is_free_at_once(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({**json.loads(lease_text()), "released": True}))
    begin = time.monotonic()
    with lease(tmp_path) as mine:
        mine.acquire()
        assert time.monotonic() - begin < EXPIRY_S
    slow = Lease(tmp_path, beat_s=BEAT_S, expiry_s=PATIENCE_S)
    write(tmp_path, lease_text())
    released = threading.Timer(0.3, write, (tmp_path, json.dumps({**json.loads(lease_text()), "released": True})))
    released.start()
    begin = time.monotonic()
    slow.acquire()
    assert time.monotonic() - begin < PATIENCE_S / 2
    slow.release()


def test_giving_up_ends_the_wait_for_a_holder_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, lease_text())
    slow = Lease(tmp_path, beat_s=BEAT_S, expiry_s=PATIENCE_S)
    begin = time.monotonic()
    with pytest.raises(LeaseHeldError):
        slow.acquire(wait_s=None, give_up=lambda: True)
    assert time.monotonic() - begin < 5
    mine = lease(tmp_path)
    mine.acquire()  # the contender that gave up has released this machine's lock
    mine.release()


def test_after_a_takeover_the_old_holder_may_write_nothing_more(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    mine.acquire()
    mine.check()
    write(tmp_path, lease_text())
    with pytest.raises(LeaseLostError, match="taken over by process 7 on another-machine"):
        mine.check()
    time.sleep(3 * BEAT_S)
    assert json.loads(file_of(tmp_path).read_text())["token"] == "theirs", (
        "the old holder wrote a heartbeat over the new holder's file"
    )
    with pytest.raises(LeaseLostError):
        mine.check()
    mine.release()
    assert "released" not in file_of(tmp_path).read_text(), "the old holder released the new holder's lease"


def test_a_lost_lease_stays_lost(tmp_path: Path) -> None:
    """This holds even if the other holder is gone again, because it may have written in between."""
    mine = lease(tmp_path)
    mine.acquire()
    old_text = file_of(tmp_path).read_text()
    write(tmp_path, lease_text())
    with pytest.raises(LeaseLostError):
        mine.check()
    write(tmp_path, old_text)
    with pytest.raises(LeaseLostError):
        mine.check()
    mine.release()


def test_a_lost_lease_stays_lost_after_an_outage_of_the_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.run.lease._READ_PAUSE_S", 0.001)
    mine = lease(tmp_path)
    mine.acquire()
    old_text = file_of(tmp_path).read_text()
    write(tmp_path, lease_text())
    for text in (None, "{", old_text):
        if text is not None:
            write(tmp_path, text)
        with pytest.raises(LeaseLostError):
            mine.check()
    mine.release()


@contextmanager
def suspended_holder(directory: Path) -> Iterator[tuple[int, Path]]:
    """Suspend a process that holds the lease; yield its id, and a file that it creates when it finds the lease lost.

    It checks the lease once it continues and the file `go` exists.
    """
    lost_file = directory / "told"

    def work() -> None:
        mine = lease(directory)
        mine.acquire()
        (directory / "held").touch()
        wait_until((directory / "go").exists)
        try:
            mine.check()
        except LeaseLostError:
            lost_file.touch()

    with process(work) as pid:
        wait_until((directory / "held").exists)
        os.kill(pid, signal.SIGSTOP)
        yield pid, lost_file


def test_a_suspended_holder_notices_the_takeover_when_it_continues(tmp_path: Path) -> None:
    """The holder's machine is suspended, so it neither checks nor writes heartbeats while another one takes over."""
    with suspended_holder(tmp_path) as (pid, lost_file):
        write(tmp_path, lease_text())
        (tmp_path / "go").touch()
        os.kill(pid, signal.SIGCONT)
        wait_until(lost_file.exists)
    assert json.loads(file_of(tmp_path).read_text())["token"] == "theirs"


@pytest.mark.parametrize("text", ["", "[]", "\x00" * 40, '{"host": 3}'])
def test_a_damaged_lease_file_expires(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert isinstance(lease(tmp_path).holder(), str)
    is_held(tmp_path, "writer")
    mine = lease(tmp_path)
    mine.acquire(wait_s=PATIENCE_S)
    mine.check()
    mine.release()


def test_heartbeats_change_the_file_repeatedly(tmp_path: Path) -> None:
    with lease(tmp_path) as mine:
        mine.acquire()
        texts = set()
        wait_until(lambda: len(texts.add(file_of(tmp_path).read_text()) or texts) >= 4)  # type: ignore[func-returns-value]


def test_the_lease_file_is_never_partial(tmp_path: Path) -> None:
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


def test_a_short_outage_of_the_file_server_does_not_lose_the_lease(tmp_path: Path) -> None:
    mine = lease(tmp_path)
    mine.acquire()
    # Each replacement is atomic, because a missing file would mean that the lease is gone.
    away, nowhere = tmp_path / "away", tmp_path / "nowhere"
    away.hardlink_to(file_of(tmp_path))
    nowhere.symlink_to(file_of(tmp_path))
    nowhere.replace(file_of(tmp_path))  # a link to itself: reading it fails, as with a stale handle
    time.sleep(4 * BEAT_S)
    away.replace(file_of(tmp_path))
    before = file_of(tmp_path).read_text()
    try:
        mine.check()
        wait_until(lambda: file_of(tmp_path).read_text() != before)
    finally:
        mine.release()


def test_a_lease_whose_file_cannot_be_written_is_not_held(tmp_path: Path) -> None:
    broken = lease(tmp_path)
    file_of(tmp_path).mkdir(parents=True)
    with pytest.raises(OSError):
        broken.acquire(wait_s=PATIENCE_S)
    file_of(tmp_path).rmdir()
    mine = lease(tmp_path)
    mine.acquire()
    mine.release()


# --- checks, heartbeats and facts ----------------------------------------------------------------------------


def test_most_checks_do_not_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        mine._last_check -= 1.5  # as if the last check had been 1.5 s ago
        mine.check()
        assert reads == 2
        mine._last_check, mine._last_beat = mine._last_check, mine._last_beat - 60  # heartbeats fail
        mine.check()
        assert reads == 3
        monkeypatch.undo()


def test_a_heartbeat_does_not_replace_the_file(tmp_path: Path) -> None:
    """With hundreds of holders, a heartbeat must be a single write, without a new directory entry."""
    with lease(tmp_path) as mine:
        mine.acquire()
        number, text = file_of(tmp_path).stat().st_ino, file_of(tmp_path).read_text()
        wait_until(lambda: file_of(tmp_path).read_text() != text)
        assert file_of(tmp_path).stat().st_ino == number


def test_bad_facts_do_not_stop_the_heartbeat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replies: list[Any] = [{"doing": "x" * 2000, "pid": "not to be lied about"}, {"doing": {1, 2}}, OSError("no"), {}]

    def facts() -> dict[str, Any]:
        reply = replies.pop(0) if replies else {"doing": "last"}
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, dict)
        return reply

    observed: list[dict[str, Any]] = []

    def read_facts() -> bool:
        facts_read = holder_facts(tmp_path)
        assert facts_read is not None
        observed.append(facts_read)
        return facts_read.get("doing") == "last" and facts_read["beat"] > 6

    with Lease(tmp_path, beat_s=BEAT_S, expiry_s=EXPIRY_S, facts=facts) as mine:
        mine.acquire()
        wait_until(read_facts)
    assert {len(facts_read.get("doing", "")) for facts_read in observed} >= {0, 4}
    assert {facts_read["pid"] for facts_read in observed} == {os.getpid()}
    beats = [facts_read["beat"] for facts_read in observed]
    assert beats == sorted(beats) and len(set(beats)) >= 4, "a heartbeat is missing"
    assert caplog.text.count("was written without the run's facts") == 1


def test_a_lease_file_of_the_previous_version_is_understood(tmp_path: Path) -> None:
    """It locked with `filelock`, which also uses flock. Its file had no terms, and only a host name."""
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
    assert time.monotonic() - begin < EXPIRY_S, "on one machine the released lock is proof enough"


def test_a_child_that_outlives_its_parent_does_not_hold_the_lease(tmp_path: Path) -> None:
    def work() -> None:
        lease(tmp_path).acquire()
        if os.fork() == 0:
            (tmp_path / "child").write_text(str(os.getpid()))
            time.sleep(10 * PATIENCE_S)
            os._exit(0)
        time.sleep(PATIENCE_S)

    child = tmp_path / "child"
    with process(work) as pid:
        wait_until(lambda: child.exists() and bool(child.read_text()))
        os.kill(pid, signal.SIGKILL)
        try:
            wait_until(lambda: not is_held(tmp_path, "writer"))
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
def test_without_locks_a_live_holder_keeps_the_lease_and_a_killed_one_loses_it_at_once(tmp_path: Path) -> None:
    with process(hold_lease(tmp_path)) as pid:
        wait_until((tmp_path / "held").exists)
        wait_until(lambda: is_beating(tmp_path))
        assert_refused(tmp_path, rf"job 41, process {pid} on .* is at work here")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_held(tmp_path, "writer") is False)
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            mine.check()
        assert time.monotonic() - begin < EXPIRY_S, "the holder's process is gone, so there is no wait"


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    "other",
    [{"pids": "pid:[7]"}, {"boot": "another"}, {"host": "another-machine"}],
    ids=["in a container", "before a restart", "another machine"],
)
def test_without_locks_a_process_id_from_elsewhere_is_not_checked_here(tmp_path: Path, other: dict[str, str]) -> None:
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
def test_a_holder_in_a_container_with_our_hostname_is_not_our_process(tmp_path: Path, locks: bool) -> None:
    """The holder's process 1 is alive, but it is not our process 1. File locks also work across containers."""

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
            wait_until(lambda: holder_facts(tmp_path) is not None)
            facts = holder_facts(tmp_path)
            assert facts is not None and (facts["host"], facts["pid"]) == (node_name(), 1)
            wait_until(lambda: is_beating(tmp_path))
            assert_refused(tmp_path, rf"process 1 on {re.escape(node_name())} is at work here")
        finally:
            container.kill()
            container.wait()
        wait_until(lambda: not is_beating(tmp_path))
        begin = time.monotonic()
        with lease(tmp_path) as mine:
            mine.acquire()
            assert (time.monotonic() - begin < EXPIRY_S) == locks, (
                "without locks, the end of a process in a container cannot be seen from outside"
            )


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_suspended_holder_loses_the_lease_and_notices(tmp_path: Path) -> None:
    with suspended_holder(tmp_path) as (pid, lost_file), lease(tmp_path) as mine:
        mine.acquire(wait_s=PATIENCE_S)
        (tmp_path / "go").touch()
        os.kill(pid, signal.SIGCONT)
        wait_until(lost_file.exists)
        mine.check()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_many_contenders_never_hold_the_lease_together(tmp_path: Path) -> None:
    test_many_contenders_never_hold_the_lease_together(tmp_path)


def test_a_folder_in_place_of_the_lock_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / ".writer.lock").mkdir()
    with pytest.raises(UserError) as error:
        Lease(tmp_path).acquire(0)
    message = (
        f"{tmp_path}/.writer.lock: Is a directory; a folder is in the way of a file; move it, or give another place"
    )
    assert str(error.value) == message
