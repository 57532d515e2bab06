"""Runs and judges foreign code behind walls: what it may take, what shields this machine from it, and its verdict."""

from __future__ import annotations

from lightning_scalerl.verify.sandbox.judge import JudgeResult, judge, judge_stdio
from lightning_scalerl.verify.sandbox.launch import SandboxError
from lightning_scalerl.verify.sandbox.limits import Limits
from lightning_scalerl.verify.sandbox.protections import Mode, check_protections
from lightning_scalerl.verify.sandbox.run import ProgramResult, Status, run_program
from lightning_scalerl.verify.sandbox.walls import Protections

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
]
