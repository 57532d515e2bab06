"""The process between a member and its command: it ends all that the command has started, whatever becomes of us.

Run as a script, by its path and without site packages: it starts in some 20 ms and imports nothing of ours. Standard
input has a JSON object a line: first what to start, then what to do; its end means that the member is gone, and then
everything is killed at once, before another process takes the member over. Standard output says what happened.

    in   {"words": [...], "env": {...}, "folder": "...", "out": "path or null"}     started; null: on our standard error
    in   {"stop": 15, "within_s": 60}          the signal (null: none) is sent, and after so long everything is killed
    out  {"started": 4711} or {"failed": "..."}
    out  {"ended": 0, "behind": 3, "left": 2, "killed": false}     exit code, or minus the signal's number; processes
                                            that it left behind, and those of them that did not end when they were asked
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_PROC = Path("/proc")
_LEFT_S = 2.0  # what the command leaves behind may end itself for so long


def main() -> None:
    """Start the command that standard input names, and follow it to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    _prctl(_SUBREAPER, 1)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as orders:
        asked = json.loads(orders.readline())
    try:
        out = os.open(asked["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if asked["out"] else 2
        child = subprocess.Popen(
            asked["words"],
            cwd=asked["folder"],
            env={**os.environ, **asked["env"]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=2,
            preexec_fn=_in_the_child,
        )
    except (OSError, ValueError) as error:
        _say({"failed": str(error)})
        return
    _say({"started": child.pid})
    deadline = None
    killed = False
    rest = b""
    while child.poll() is None:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([0, wake], [], [], wait_s)
        if wake in ready:
            os.read(wake, 4096)
            _reap(0, child.pid)
        if 0 in ready:
            block = os.read(0, 65536)
            if not block:
                _kill_all()
                if not _PROC.is_dir():  # descendants are not known here; this process is among the session's
                    os.killpg(0, signal.SIGKILL)
                return
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                order = json.loads(line)
                deadline = time.monotonic() + order["within_s"]
                if order["stop"] is not None:
                    child.send_signal(order["stop"])
        if deadline is not None and time.monotonic() >= deadline and child.poll() is None:
            killed = True
            _kill_all(but=child.pid)
            child.kill()
    behind = len(_descendants())
    left = _end_rest()
    _say({"ended": child.returncode, "behind": behind, "left": left, "killed": killed})


def _in_the_child() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere what a command leaves behind is known by its process group alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(what: dict[str, object]) -> None:
    with suppress(OSError):  # nobody may be left to hear it
        os.write(1, json.dumps(what).encode() + b"\n")


def _descendants() -> list[int]:
    """Return the processes below this one; those whose parents have ended are its children."""
    parents: dict[int, list[int]] = {}
    for process in _PROC.iterdir() if _PROC.is_dir() else ():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                parents.setdefault(int(fields[1]), []).append(int(process.name))
    found: list[int] = []
    open_ones = [os.getpid()]
    while open_ones:
        mine = parents.get(open_ones.pop(), [])
        found += mine
        open_ones += mine
    return found


def _end_rest() -> int:
    """Let what the command has left behind end for a moment, kill what does not, and return how many were killed."""
    deadline = time.monotonic() + _LEFT_S
    asked: set[int] = set()  # once each: to many programs a second request means at once
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in set(left) - asked:
            _send(process, signal.SIGTERM)
        asked.update(left)
        _reap(0.05)
    _kill_all()
    return len(left)


def _kill_all(but: int | None = None) -> None:
    """Kill every process below this one, again until there is none: they may start others meanwhile."""
    while left := [process for process in _descendants() if process != but]:
        for process in left:
            _send(process, signal.SIGKILL)
        _reap(0.02, but)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _reap(wait_s: float, but: int | None = None) -> None:
    """Take the ended children off the list, `but` one whose end another call is to see."""
    time.sleep(wait_s)
    for process in _children():
        if process != but:
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _children() -> list[int]:
    try:
        return [int(word) for word in (_PROC / f"self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    main()
