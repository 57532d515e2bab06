"""Runs of a program in the sandbox, with standard input and output."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Literal

from lightning_scalerl.sandbox.launch import Capture, Ending, Sandboxed, anonymous_file, run_until
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.walls import Protections, Walls

# ok: exit code 0. nonzero: another exit code. killed: ended by a signal, for example after a stack overflow. The other
# values name the limit of the sandbox that was exceeded.
Status = Literal["ok", "nonzero", "killed", "timeout", "output_limit", "disk_limit"]

_STDERR_TAIL = 4096


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program's run.

    Args:
        status: how it ended, see `Status`.
        stdout: standard output up to the limit, with invalid UTF-8 replaced.
        stderr_tail: last 4096 characters of standard error.
        seconds: wall-clock seconds from the moment when its sandbox was ready.
    """

    status: Status
    stdout: str
    stderr_tail: str
    seconds: float


def run_program(source: str, stdin: str, limits: Limits, protections: Protections) -> ProgramResult:
    """Run Python source as a program. Its processes and files are removed before this returns.

    Args:
        source: untrusted source.
        stdin: content of its standard input.
        limits: limits on its resources.
        protections: protections around the program (`check_protections`).

    Raises:
        SandboxError: the sandbox itself failed, for a reason unrelated to the program.
    """
    return run_in(protections.walls, source, stdin, limits)


def run_in(walls: Walls, source: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run a program with isolation mechanisms that have not been tested; `protections.py` tests them by this.

    Raises:
        SandboxError: the sandbox itself failed, for a reason unrelated to the program.
    """
    with contextlib.ExitStack() as closing:
        input_file = anonymous_file(stdin.encode("utf-8", "surrogatepass"))
        closing.callback(os.close, input_file)
        captures, ends = [], []
        for _ in range(2):
            pipe, end = os.pipe()
            ends.append(end)
            captures.append(Capture(pipe, limits.output_kib << 10))
            closing.callback(captures[-1].close)
        out, err = captures
        try:
            role = {"role": "script", "source": source}
            child = closing.enter_context(
                Sandboxed(walls, limits, role, stdin=input_file, stdout=ends[0], stderr=ends[1])
            )
        finally:
            # The child has its own copies. Copies that stay open here would keep the pipes from reaching their end.
            for end in ends:
                os.close(end)
        ending, seconds = run_until([child], captures, limits.wall_s, lambda: child.returncode is not None)
        code = child.returncode
        child.end()
        for capture in captures:
            capture.drain()
        if ending == "done" and any(capture.overflowed for capture in captures):
            ending = "output_limit"
        status = _status(ending, code, seconds, limits)
        return ProgramResult(status, out.text, err.text[-_STDERR_TAIL:], seconds)


def _status(ending: Ending, code: int | None, seconds: float, limits: Limits) -> Status:
    """Return how a program ended, from the reason that `run_until` returned and the exit code."""
    if ending != "done":
        return ending
    # The kernel ends a process over its CPU limit with SIGXCPU, and with SIGKILL if that is ignored.
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and seconds >= limits.cpu_s):
        return "timeout"
    if code == 0:
        return "ok"
    return "killed" if code is not None and code < 0 else "nonzero"
