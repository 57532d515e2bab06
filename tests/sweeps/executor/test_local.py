"""Truths about the local executor, with real processes: how many at once, how they end, what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.executor.base import Launch, Outcome, load_entry
from sweeps.executor.local import LocalExecutor
from sweeps.run.activity import HUNG_CODE, Patience, activity
from sweeps.run.journal import LOG_FILE
from tests.paths import ROOT

PATIENCE_S = 60.0


def wait_until(true: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- entries: called in the member, by name ------------------------------------------------------------------


def succeed(run_dir: Path) -> None:
    """Nothing to do."""


def speak(run_dir: Path) -> None:
    """On every way that leads to the terminal."""
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"written\n")
    subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)


def speak_and_raise(run_dir: Path) -> None:
    """A failure with something said before it."""
    print("last words")
    raise ValueError(f"no good: {run_dir.name}")


def speak_and_be_killed(run_dir: Path) -> None:
    """As the kernel kills when memory runs out."""
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_with_code(run_dir: Path) -> None:
    """At once, with the exit code or signal that the directory's name says."""
    code = int(run_dir.name)
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(PATIENCE_S)
    os._exit(code)


def ask_to_leave(run_dir: Path) -> None:
    """The polite way, which is still no success."""
    sys.exit(0)


def meet(run_dir: Path) -> None:
    """Wait until two have begun, so that a cap of two is reached whatever the machine's load; note begin and end."""
    begin = time.monotonic()
    (run_dir / "begun").touch()
    wait_until(lambda: len(list(run_dir.parent.glob("*/begun"))) >= 2)
    time.sleep(0.05)
    (run_dir / "times").write_text(json.dumps([begin, time.monotonic()]))


def sleep(run_dir: Path) -> None:
    """Say who it is, then wait for the end."""
    _introduce(run_dir)
    time.sleep(10 * PATIENCE_S)


def spin(run_dir: Path) -> None:
    """Say who it is, then be busy."""
    _introduce(run_dir)
    while True:
        pass


def hang(run_dir: Path) -> None:
    """As one that waits for a peer that is gone."""
    # Python's own watchdog ends it with another code, if the thread that watches gets no turn for twice as long.
    with activity.watched(Patience(2.0, 2.0)):
        activity.note("decode")
        threading.Event().wait(PATIENCE_S)


def _introduce(run_dir: Path) -> None:
    unfinished = run_dir / ".member"
    unfinished.write_text(json.dumps({"pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}))
    unfinished.rename(run_dir / "member")


# --- the tests' side -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The executor sets these for its members; they are put back afterwards.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    # With it, nothing a member says could be lost in a buffer.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def local(entry: Callable[[Path], None], max_parallel: int = 2) -> LocalExecutor:
    return LocalExecutor(f"{__name__}:{entry.__name__}", max_parallel, threads=1, preload=["pytest"])


def directories(root: Path, names: Sequence[str]) -> dict[str, Path]:
    found = {name: root / name for name in names}
    for run_dir in found.values():
        run_dir.mkdir()
    return found


def drive(executor: LocalExecutor, run_dirs: dict[str, Path]) -> dict[str, Outcome]:
    """As a study does."""
    waiting = list(run_dirs.items())
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + 2 * PATIENCE_S
    while waiting or executor.running():
        assert time.monotonic() < deadline
        while waiting and executor.next_batch([Launch(*each) for each in waiting]):
            executor.submit("x", [Launch(*waiting.pop(0))])
        for outcome in executor.poll(timeout_s=1.0):
            assert outcome.run not in outcomes
            outcomes[outcome.run] = outcome
    return outcomes


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- how many at once ----------------------------------------------------------------------------------------


def test_as_many_members_at_once_as_allowed_and_no_more(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, "abcde")
    outcomes = drive(local(meet, max_parallel=2), run_dirs)
    assert {name: outcome.exit_code for name, outcome in outcomes.items()} == dict.fromkeys("abcde", 0)
    spans = [json.loads((run_dir / "times").read_text()) for run_dir in run_dirs.values()]
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None])
@pytest.mark.parametrize("field", ["max_parallel", "threads"])
def test_a_number_that_could_start_nothing_is_refused(field: str, value: object) -> None:
    arguments = {"max_parallel": 1, "threads": 1, field: value}
    with pytest.raises(UserError, match=f"launch.{field}"):
        LocalExecutor(f"{__name__}:succeed", **arguments)  # type: ignore[arg-type]


# --- how they end --------------------------------------------------------------------------------------------


def test_a_members_end_is_told_as_it_was(tmp_path: Path) -> None:
    codes = [0, 1, 7, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV]
    outcomes = drive(local(leave_with_code, max_parallel=3), directories(tmp_path, [str(int(c)) for c in codes]))
    assert {name: outcome.exit_code for name, outcome in outcomes.items()} == {str(int(c)): c for c in codes}
    assert outcomes["-9"].how == "killed by SIGKILL"
    assert outcomes["-15"].how == "killed by SIGTERM"
    assert outcomes["7"].how == "exit code 7"


def test_a_signal_without_a_name_has_a_number() -> None:
    assert Outcome("a", -(signal.SIGRTMIN + 3)).how == f"killed by signal {signal.SIGRTMIN + 3}"


def test_one_that_fails_touches_no_other(tmp_path: Path) -> None:
    executor = local(leave_with_code, max_parallel=1)
    outcomes = drive(executor, directories(tmp_path, ["-9", "0", "1"]))
    assert [outcome.exit_code for outcome in outcomes.values()] == [-9, 0, 1]


def test_leaving_early_is_a_failure_even_with_code_zero(tmp_path: Path) -> None:
    assert drive(local(ask_to_leave), directories(tmp_path, "a"))["a"].exit_code == 1


def test_one_that_hangs_ends_itself_and_says_so(tmp_path: Path) -> None:
    outcome = drive(local(hang), directories(tmp_path, "a"))["a"]
    assert (outcome.kind, outcome.exit_code) == ("hang", HUNG_CODE)
    said = (tmp_path / "a" / LOG_FILE).read_text()
    assert "in hang" in said, "the stack"
    assert "no sign of life for" in said.splitlines()[-1], "from which the reason is taken"


def test_an_entry_that_cannot_be_imported_is_a_failure_that_says_so(tmp_path: Path) -> None:
    executor = LocalExecutor("no_such_module:function", 1, threads=1)
    assert drive(executor, directories(tmp_path, "a"))["a"].exit_code == 1
    assert (tmp_path / "a" / LOG_FILE).read_text().splitlines()[-1].endswith("No module named 'no_such_module'")


def test_polling_with_nobody_ended_waits_and_says_nothing(tmp_path: Path) -> None:
    executor = local(sleep)
    executor.submit("x", [Launch("a", directories(tmp_path, "a")["a"])])
    begin = time.monotonic()
    assert executor.poll(timeout_s=0.2) == []
    assert time.monotonic() - begin >= 0.2
    assert executor.running() == ["a"]
    executor.close()


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    executor = local(sleep)
    run_dirs = directories(tmp_path, "ab")
    for name, run_dir in run_dirs.items():
        executor.submit("x", [Launch(name, run_dir)])
    assert wait_until(lambda: all((run_dir / "member").exists() for run_dir in run_dirs.values()))
    pids = [json.loads((run_dir / "member").read_text())["pid"] for run_dir in run_dirs.values()]
    assert all(map(alive, pids))
    executor.close()
    assert executor.running() == []
    assert wait_until(lambda: not any(map(alive, pids)), patience_s=5)


# --- what they leave behind ----------------------------------------------------------------------------------


def test_whatever_a_member_says_is_in_its_own_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dirs = directories(tmp_path, "ab")
    drive(local(speak), run_dirs)
    for run_dir in run_dirs.values():
        said = (run_dir / LOG_FILE).read_text().splitlines()
        assert said == ["printed", "complained", "written", "by a child"]
    assert capfd.readouterr() == ("", "")


def test_the_log_of_a_failure_ends_with_its_reason_and_lacks_no_last_words(tmp_path: Path) -> None:
    drive(local(speak_and_raise), directories(tmp_path, "a"))
    said = (tmp_path / "a" / LOG_FILE).read_text().splitlines()
    assert said[0] == "last words"
    assert said[1].startswith("Traceback")
    assert said[-1] == "ValueError: no good: a"


def test_the_last_words_of_a_member_that_was_killed_are_in_its_log(tmp_path: Path) -> None:
    drive(local(speak_and_be_killed), directories(tmp_path, "a"))
    assert (tmp_path / "a" / LOG_FILE).read_text() == "last words\n"


def test_a_second_attempt_writes_behind_the_first(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, "a")
    drive(local(speak_and_be_killed), run_dirs)
    drive(local(speak_and_raise), run_dirs)
    said = (tmp_path / "a" / LOG_FILE).read_text().splitlines()
    assert said[:2] == ["last words", "last words"]
    assert said[-1] == "ValueError: no good: a"


# --- nobody outlives the controller --------------------------------------------------------------------------

CONTROLLER = """
import sys, time
from pathlib import Path
from sweeps.executor.base import Launch
from sweeps.executor.local import LocalExecutor
entry, *run_dirs = sys.argv[1:]
executor = LocalExecutor(entry, max_parallel=9, threads=3)
for run_dir in run_dirs:
    executor.submit("x", [Launch(run_dir, Path(run_dir))])
while True:
    executor.poll(1.0)
"""


def test_members_die_with_the_controller_that_is_killed(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, ["a", "b"])
    entries = {"a": sleep, "b": spin}
    # In a module of its own: the controller has no other thing to do with tests.
    (tmp_path / "both.py").write_text(
        f"import {__name__} as entries\n"
        "def start(run_dir):\n"
        f"    getattr(entries, { {name: entry.__name__ for name, entry in entries.items()} }[run_dir.name])(run_dir)\n"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, "both:start", *map(str, run_dirs.values())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    members: list[int] = []
    try:
        assert wait_until(lambda: all((run_dir / "member").exists() for run_dir in run_dirs.values()))
        introductions = [json.loads((run_dir / "member").read_text()) for run_dir in run_dirs.values()]
        members = [introduction["pid"] for introduction in introductions]
        assert all(map(alive, members))
        assert [introduction["threads"] for introduction in introductions] == ["3", "3"]
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        gone = wait_until(lambda: not any(map(alive, members)), patience_s=5)
        for pid in filter(alive, members):
            os.kill(pid, signal.SIGKILL)
    assert gone


# --- entries -------------------------------------------------------------------------------------------------


def test_an_entry_is_found_by_its_name() -> None:
    assert load_entry("os.path:basename") is os.path.basename
    with pytest.raises(AttributeError):
        load_entry("os.path:no_such_function")
