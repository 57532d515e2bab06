"""Tests of the local executor with real processes: their number, their outcomes, and their logs."""

from __future__ import annotations

import errno
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

from sweeps.command.runner import run_member
from sweeps.errors import UserError
from sweeps.executor.base import Launch, Outcome, load_entry
from sweeps.executor.local import LocalExecutor
from sweeps.run.activity import HUNG_CODE, HangTimeout, activity
from sweeps.run.journal import LOG_FILE
from tests.paths import ROOT
from tests.sweeps.command.toy import write_study, written

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Return whether the condition became true within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- entries, which the member's process calls by name -------------------------------------------------------


def succeed(run_dir: Path) -> None:
    """Do nothing."""


def write_everywhere(run_dir: Path) -> None:
    """Write to stdout and stderr in every way, also from a child process."""
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"written\n")
    subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)


def print_and_raise(run_dir: Path) -> None:
    """Print, then raise."""
    print("last words")
    raise ValueError(f"no good: {run_dir.name}")


def fill_the_disk(run_dir: Path) -> None:
    """Raise the error of a full disk, which takes no log either."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    raise OSError(errno.ENOSPC, "No space left on device", "/data/mine")


def run_out_of_memory(run_dir: Path) -> None:
    """Run out of memory."""
    raise MemoryError("no more")


def print_and_be_killed(run_dir: Path) -> None:
    """Print, then be killed, as the kernel does when memory runs out."""
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_with_code(run_dir: Path) -> None:
    """Exit at once, with the exit code or signal in the directory's name."""
    code = int(run_dir.name)
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(PATIENCE_S)
    os._exit(code)


def exit_politely(run_dir: Path) -> None:
    """Exit by SystemExit with code 0, which does not count as success."""
    sys.exit(0)


def meet(run_dir: Path) -> None:
    """Wait until two members have begun, and record begin and end.

    The wait makes sure that two members overlap, even on a busy machine.
    """
    begin = time.monotonic()
    (run_dir / "begun").touch()
    wait_until(lambda: len(list(run_dir.parent.glob("*/begun"))) >= 2)
    time.sleep(0.05)
    (run_dir / "times").write_text(json.dumps([begin, time.monotonic()]))


def sleep(run_dir: Path) -> None:
    """Write a file with the process id, then sleep."""
    _write_pid_file(run_dir)
    time.sleep(10 * PATIENCE_S)


def spin(run_dir: Path) -> None:
    """Write a file with the process id, then keep a core busy."""
    _write_pid_file(run_dir)
    while True:
        pass


def hang(run_dir: Path) -> None:
    """Hang like a member that waits for a dead peer."""
    # If the watching thread gets no CPU time for twice as long, Python's watchdog ends the process with another code.
    with activity.watched(HangTimeout(2.0, 2.0)):
        activity.note("decode")
        threading.Event().wait(PATIENCE_S)


def _write_pid_file(run_dir: Path) -> None:
    unfinished = run_dir / ".member"
    unfinished.write_text(json.dumps({"pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}))
    unfinished.rename(run_dir / "member")


# --- helpers -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The executor sets these for its members; monkeypatch restores them.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    # With unbuffered output no test could detect output that is lost in a buffer.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def local(entry: Callable[[Path], None], max_parallel: int = 2) -> LocalExecutor:
    return LocalExecutor(f"{entry.__module__}:{entry.__name__}", max_parallel, threads=1, preload=["pytest"])


def directories(root: Path, names: Sequence[str]) -> dict[str, Path]:
    run_dirs = {name: root / name for name in names}
    for run_dir in run_dirs.values():
        run_dir.mkdir()
    return run_dirs


def drive(executor: LocalExecutor, run_dirs: dict[str, Path]) -> dict[str, Outcome]:
    """Submit all members and wait for their outcomes, as a study does."""
    waiting = list(run_dirs.items())
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + 2 * PATIENCE_S
    while waiting or executor.running():
        assert time.monotonic() < deadline
        while waiting and executor.next_batch([Launch(*member) for member in waiting]):
            executor.submit("x", [Launch(*waiting.pop(0))])
        for outcome in executor.poll(timeout_s=1.0):
            assert outcome.run not in outcomes
            outcomes[outcome.run] = outcome
    return outcomes


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- number of members at a time -----------------------------------------------------------------------------


def test_max_parallel_members_run_at_a_time(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, "abcde")
    outcomes = drive(local(meet, max_parallel=2), run_dirs)
    assert {name: outcome.exit_code for name, outcome in outcomes.items()} == dict.fromkeys("abcde", 0)
    spans = [json.loads((run_dir / "times").read_text()) for run_dir in run_dirs.values()]
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None])
@pytest.mark.parametrize("field", ["max_parallel", "threads"])
def test_invalid_numbers_are_refused(field: str, value: object) -> None:
    arguments = {"max_parallel": 1, "threads": 1, field: value}
    with pytest.raises(UserError, match=f"launch.{field}"):
        LocalExecutor(f"{__name__}:succeed", **arguments)  # type: ignore[arg-type]


# --- outcomes ------------------------------------------------------------------------------------------------


def test_exit_codes_and_signals_are_reported(tmp_path: Path) -> None:
    codes = [0, 1, 7, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV]
    outcomes = drive(local(leave_with_code, max_parallel=3), directories(tmp_path, [str(int(c)) for c in codes]))
    assert {name: outcome.exit_code for name, outcome in outcomes.items()} == {str(int(c)): c for c in codes}
    assert outcomes["-9"].how == "killed by SIGKILL"
    assert outcomes["-15"].how == "killed by SIGTERM"
    assert outcomes["7"].how == "exit code 7"


def test_a_signal_without_a_name_has_a_number() -> None:
    assert Outcome("a", -(signal.SIGRTMIN + 3)).how == f"killed by signal {signal.SIGRTMIN + 3}"


def test_a_failed_member_does_not_affect_the_others(tmp_path: Path) -> None:
    executor = local(leave_with_code, max_parallel=1)
    outcomes = drive(executor, directories(tmp_path, ["-9", "0", "1"]))
    assert [outcome.exit_code for outcome in outcomes.values()] == [-9, 0, 1]


def test_exiting_early_is_a_failure_even_with_code_zero(tmp_path: Path) -> None:
    assert drive(local(exit_politely), directories(tmp_path, "a"))["a"].exit_code == 1


def test_a_hanging_member_ends_itself_and_logs_why(tmp_path: Path) -> None:
    outcome = drive(local(hang), directories(tmp_path, "a"))["a"]
    assert (outcome.kind, outcome.exit_code) == ("hang", HUNG_CODE)
    log = (tmp_path / "a" / LOG_FILE).read_text()
    assert "in hang" in log, "the log has the stack"
    assert "no sign of life for" in log.splitlines()[-1], "the reason is taken from this line"


FULL = "OSError: [Errno 28] No space left on device: '/data/mine'"


@pytest.mark.parametrize(
    ("entry", "kind", "reason"),
    [
        (fill_the_disk, "disk_full", f"no space left on the disk: {FULL}"),
        (run_out_of_memory, "out_of_memory", None),
        (print_and_raise, "error", None),
        (print_and_be_killed, None, None),
    ],
)
def test_the_kind_of_an_error_is_reported(
    entry: Callable[[Path], None], kind: str | None, reason: str | None, tmp_path: Path
) -> None:
    outcome = drive(local(entry), directories(tmp_path, "a"))["a"]
    assert (outcome.kind, outcome.reason) == (kind, reason)


def test_the_kind_of_an_error_is_reported_without_a_log(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, "a")
    (run_dirs["a"] / LOG_FILE).mkdir()
    outcome = drive(local(succeed), run_dirs)["a"]
    assert (outcome.exit_code, outcome.kind) == (1, "error")


def test_an_entry_that_cannot_be_imported_is_a_logged_failure(tmp_path: Path) -> None:
    executor = LocalExecutor("no_such_module:function", 1, threads=1)
    assert drive(executor, directories(tmp_path, "a"))["a"].exit_code == 1
    assert (tmp_path / "a" / LOG_FILE).read_text().splitlines()[-1].endswith("No module named 'no_such_module'")


def test_a_poll_without_outcomes_waits_for_its_timeout(tmp_path: Path) -> None:
    executor = local(sleep)
    executor.submit("x", [Launch("a", directories(tmp_path, "a")["a"])])
    begin = time.monotonic()
    assert executor.poll(timeout_s=0.2) == []
    assert time.monotonic() - begin >= 0.2
    assert executor.running() == ["a"]
    executor.close()


def test_closing_ends_running_members(tmp_path: Path) -> None:
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


# --- logs ----------------------------------------------------------------------------------------------------


def test_all_output_of_a_member_is_in_its_own_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dirs = directories(tmp_path, "ab")
    drive(local(write_everywhere), run_dirs)
    for run_dir in run_dirs.values():
        log = (run_dir / LOG_FILE).read_text().splitlines()
        assert log == ["printed", "complained", "written", "by a child"]
    assert capfd.readouterr() == ("", "")


def test_the_log_of_a_failure_has_all_output_and_ends_with_the_reason(tmp_path: Path) -> None:
    drive(local(print_and_raise), directories(tmp_path, "a"))
    log = (tmp_path / "a" / LOG_FILE).read_text().splitlines()
    assert log[0] == "last words"
    assert log[1].startswith("Traceback")
    assert log[-1] == "ValueError: no good: a"


def test_the_log_of_a_failed_command_ends_with_its_own_output(tmp_path: Path) -> None:
    """`scalerl status` shows the last lines of the log, which were the frames of this project."""
    script = (
        'import sys\nprint(\'{"step": 1, "tokens": 1, "eval_reward": 0}\', flush=True)\nsys.exit(\'no such loss\')\n'
    )
    _, run_dir = written(write_study(tmp_path, script))
    drive(local(run_member), {"a": run_dir})
    *_, own_line, reason = (run_dir / LOG_FILE).read_text().splitlines()
    assert own_line == "no such loss"
    assert reason.startswith("command.line: python ended with exit code 1 at step 1 of 30: no such loss;")


def test_output_before_a_kill_is_in_the_log(tmp_path: Path) -> None:
    drive(local(print_and_be_killed), directories(tmp_path, "a"))
    assert (tmp_path / "a" / LOG_FILE).read_text() == "last words\n"


def test_a_second_attempt_appends_to_the_log(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, "a")
    drive(local(print_and_be_killed), run_dirs)
    drive(local(print_and_raise), run_dirs)
    log = (tmp_path / "a" / LOG_FILE).read_text().splitlines()
    assert log[:2] == ["last words", "last words"]
    assert log[-1] == "ValueError: no good: a"


# --- members die with the controller -------------------------------------------------------------------------

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


def test_members_die_when_their_controller_is_killed(tmp_path: Path) -> None:
    run_dirs = directories(tmp_path, ["a", "b"])
    entries = {"a": sleep, "b": spin}
    # The entry is in its own module, because the controller must not import the tests.
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
