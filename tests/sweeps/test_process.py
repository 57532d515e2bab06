"""Tests of a command's process tree: it is ended when the command ends, times out on stopping, or we are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.process import Ended, Tree
from tests.paths import ROOT
from tests.sweeps.command.toy import wait_until

PYTHON = [sys.executable, "-S", "-c"]
# Starts a grandchild in its own session, as Ray does. It writes its pid and ignores SIGTERM.
STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("number.new", "w") as handle:
            handle.write(str(os.getpid()))
        os.rename("number.new", "number")
        time.sleep(600)
    os._exit(0)
"""
WAIT = "signal.signal(signal.SIGTERM, {}); open('ready', 'w').close(); time.sleep(600)"


def number(folder: Path) -> int:
    wait_until(lambda: (folder / "number").exists())
    return int((folder / "number").read_text())


def gone(process: int) -> bool:
    """Whether a process has ended. A zombie, which its parent has not waited for, counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_command_gets_environment_and_folder_and_returns_its_exit_code(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['LOSS']); os._exit(3) if False else exit(3)"
    with Tree([sys.executable, "-c", code], {"LOSS": "dapo"}, tmp_path, tmp_path / "out.txt") as tree:
        assert tree.wait(60) == Ended(3, 0, False)
    assert (tmp_path / "out.txt").read_text() == f"{tmp_path} dapo\n"


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"^'no-such-program' cannot be started in .*No such file"):
        Tree(["no-such-program"], {}, tmp_path)


def test_remaining_processes_end_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tree([*PYTHON, f"{STUBBORN}\nwhile not os.path.exists('number'): time.sleep(0.01)"], {}, tmp_path) as tree:
        remaining_pid = number(tmp_path)
        ended = tree.wait(60)
    assert ended == Ended(0, 1, False) and gone(remaining_pid)


def test_remaining_processes_get_one_sigterm(tmp_path: Path) -> None:
    """A remaining process may need a moment to save its data; a second SIGTERM would interrupt that."""
    program_start = """
import os, signal, time
if os.fork() == 0:
    def ask(*_):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        open("asked", "w").close()
        time.sleep(0.5)
        os.rename("asked", "saved")
        os._exit(0)
    signal.signal(signal.SIGTERM, ask)
    open("number", "w").close()
    time.sleep(600)
"""
    code = f"{program_start}\nwhile not os.path.exists('number'): time.sleep(0.01)"
    with Tree([*PYTHON, code], {}, tmp_path) as tree:
        assert tree.wait(60) == Ended(0, 0, False)
    assert (tmp_path / "saved").exists()


def test_a_command_that_handles_sigterm_has_time_to_stop(tmp_path: Path) -> None:
    code = "import signal, time, sys; " + WAIT.format("lambda *_: sys.exit(5)")
    with Tree([*PYTHON, code], {}, tmp_path) as tree:
        wait_until(lambda: (tmp_path / "ready").exists())
        assert tree.wait(0.0) is None
        tree.stop(signal.SIGTERM, 60)
        assert tree.wait(60) == Ended(5, 0, False)


def test_a_tree_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Tree([*PYTHON, f"{STUBBORN}\n{WAIT.format('signal.SIG_IGN')}"], {}, tmp_path) as tree:
        ignoring_pid = number(tmp_path)
        wait_until(lambda: (tmp_path / "ready").exists())
        tree.stop(signal.SIGTERM, 0.05)
        ended = tree.wait(60)
    assert (
        ended is not None
        and (ended.code, ended.killed, ended.how) == (-9, True, "killed by SIGKILL")
        and gone(ignoring_pid)
    )


def test_the_tree_is_killed_with_the_member(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom sweeps.process import Tree\n"
        f"Tree({[*PYTHON, STUBBORN + 'time.sleep(600)']!r}, {{}}, Path({str(tmp_path)!r})).wait(600)"
    )
    member = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    grandchild_pid = number(tmp_path)
    member.kill()
    member.wait()
    wait_until(lambda: gone(grandchild_pid))


def test_the_tree_is_killed_with_its_guard(tmp_path: Path) -> None:
    with Tree([*PYTHON, "import time; time.sleep(600)"], {}, tmp_path) as tree:
        os.kill(tree._guard.pid, signal.SIGKILL)
        ended = tree.wait(60)
    assert ended is not None and ended.code == -signal.SIGKILL
    wait_until(lambda: gone(tree.pid))
