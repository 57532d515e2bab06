"""Runs and judges foreign code behind walls: what it may take, what shields this machine from it, and its verdict.

In come a program's source with tests that it never sees (`judge`), with inputs and expected outputs (`judge_stdio`) or
with one input (`run_program`), its `Limits`, and the `Protections` that `check_protections` has tried on this machine.
Out goes a verdict or what was printed. Where the sandbox itself failed, `SandboxError` is raised, never a verdict.

    judge.py   run.py            the questions; protections.py finds out what works here, survey.py reads tests
        launch.py                starts processes behind walls.py, keeps limits.py, ends them, removes their folders
    ---- a process of its own, which takes the last steps into the jail itself -----------------------------------
        inside.py -> jail.py     limits, user, Landlock, seccomp
            serve.py             with the program: answers calls       <- pipes: plain data (frames.py, plain.py)
            examine.py           with the tests, in another sandbox: calls, compares, and knows the nonce

Modules below the line are sent there as compiled code and import only the standard library. The others also import
`lightning_scalerl.checks`, for its errors, and nothing else: no torch, no run, no task.
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
