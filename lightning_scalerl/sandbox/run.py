"""Runs of a program of standard input and output in the sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Literal

from lightning_scalerl.sandbox.launch import Capture, Sandboxed, anonymous, attend
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.walls import Protections, Walls

# ok: exit code 0. nonzero: another one. killed: a signal ended it (memory, stack). The rest are limits of the sandbox.
Status = Literal["ok", "nonzero", "killed", "timeout", "output_limit", "disk_limit"]

_STDERR_TAIL = 4096


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program's run: how it ended and what it wrote.

    Args:
        status: how it ended, see `Status`.
        stdout: standard output up to the limit; invalid UTF-8 is replaced.
        stderr_tail: last 4096 characters of standard error.
        seconds: wall-clock seconds since its sandbox was ready.
    """

    status: Status
    stdout: str
    stderr_tail: str
    seconds: float


def run_program(source: str, stdin: str, limits: Limits, protections: Protections) -> ProgramResult:
    """Run Python source as a program of its own; nothing of it is left when this returns.

    Args:
        source: untrusted source.
        stdin: content of its standard input.
        limits: limits on what it takes of this machine.
        protections: protections around it (`check_protections`).

    Raises:
        SandboxError: the sandbox itself failed; says nothing of the program.
    """
    return run_in(protections.walls, source, stdin, limits)


def run_in(walls: Walls, source: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run the program behind walls that were not checked; `protections.py` tries them out with it.

    Raises:
        SandboxError: the sandbox itself failed; says nothing of the program.
    """
    with contextlib.ExitStack() as closing:
        given = anonymous(stdin.encode("utf-8", "surrogatepass"))
        closing.callback(os.close, given)
        captures, ends = [], []
        for _ in range(2):
            pipe, end = os.pipe()
            ends.append(end)
            captures.append(Capture(pipe, limits.output_kib << 10))
            closing.callback(captures[-1].close)
        out, err = captures
        try:
            role = {"role": "script", "source": source}
            child = closing.enter_context(Sandboxed(walls, limits, role, stdin=given, stdout=ends[0], stderr=ends[1]))
        finally:
            # The child has its own: open here as well, the pipes would never come to their end.
            for end in ends:
                os.close(end)
        why, seconds = attend([child], captures, limits.wall_s, lambda: child.returncode is not None)
        code = child.returncode
        child.end()
        for capture in captures:
            capture.drain()
        if why == "done" and any(capture.full for capture in captures):
            why = "output_limit"
        status = _status(why, code, seconds, limits)
        return ProgramResult(status, out.text, err.text[-_STDERR_TAIL:], seconds)


def _status(why: str, code: int | None, seconds: float, limits: Limits) -> Status:
    """Return how a program ended, from the reason that `attend` gave and the exit code."""
    if why == "timeout":
        return "timeout"
    if why == "output_limit":
        return "output_limit"
    if why == "disk_limit":
        return "disk_limit"
    # The kernel's answer to too much processor time: a signal, and if that is ignored, the one that cannot be.
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and seconds >= limits.cpu_s):
        return "timeout"
    if code == 0:
        return "ok"
    return "killed" if code is not None and code < 0 else "nonzero"
