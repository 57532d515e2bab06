"""Sandbox that runs untrusted programs and judges them.

There are three entry points. `judge` runs a program against tests that it never sees, `judge_stdio` compares its
outputs for given inputs, and `run_program` runs it once. Each takes `Limits` on resources and the `Protections` that
`check_protections` has tested on this machine. If the sandbox itself fails, `SandboxError` is raised: that is never a
verdict on the program.

    judge.py   run.py            entry points; protections.py tests this machine, survey.py analyses tests
        launch.py                starts and ends processes, isolated by walls.py, within the limits of limits.py
    ---- a separate process, which applies the last protections to itself ----------------------------------------
        inside.py -> jail.py     limits, user, Landlock, seccomp
            serve.py             next to the program: answers calls    <- pipes: plain data (frames.py, plain.py)
            examine.py           with the tests, in another sandbox: calls, compares, and sends the nonce on success
                conduct.py       runs the tests

Modules below the line are sent to the process as compiled code and import only the standard library. The others also
import `lightning_scalerl.checks` for its errors. They import nothing else of this project, and no torch.
"""

from __future__ import annotations

from lightning_scalerl.sandbox.judge import JudgeResult, judge, judge_stdio, unjudgeable
from lightning_scalerl.sandbox.launch import SandboxError
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.protections import Mode, check_protections
from lightning_scalerl.sandbox.run import ProgramResult, Status, run_program
from lightning_scalerl.sandbox.walls import Protections

__all__ = [
    "JudgeResult",
    "Limits",
    "Mode",
    "ProgramResult",
    "Protections",
    "SandboxError",
    "Status",
    "check_protections",
    "judge",
    "judge_stdio",
    "run_program",
    "unjudgeable",
]
