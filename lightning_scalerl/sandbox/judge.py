"""Judgement of a program by a data set's tests. The program never sees them, nor what they expect."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox.launch import Capture, Sandboxed, attend
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.run import run_program
from lightning_scalerl.sandbox.survey import Sources, UnjudgeableError, survey
from lightning_scalerl.sandbox.walls import Protections

_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*(\(\))?)*")
_TOLERANCE = Decimal("1e-6")
_RELATIVE_TOLERANCE = Decimal("1e-8")
_EXACT = 1 << 53  # whole numbers below it are exact as floats
_FRACTION = re.compile(r"[.eE]")
# Numbers as a C program reads them: Python also accepts underscores and digits of other scripts.
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REPORT_BYTES = 4096
_SPARE_KIB = 64  # beyond what is expected: other white space


@dataclass(frozen=True)
class JudgeResult:
    """Verdict on a program, with the first failure.

    Args:
        passed: whether all tests ran to their end.
        reason: one line: `passed`, or the first failure.
        seconds: wall-clock seconds, start and end of the sandboxes included.
    """

    passed: bool
    reason: str
    seconds: float


def judge(
    program: str,
    tests: str,
    *,
    entry_point: str | None,
    prelude: str = "",
    names: Collection[str] = (),
    limits: Limits,
    protections: Protections,
) -> JudgeResult:
    """Run tests that call functions of a program.

    Program and tests have a process and a sandbox each; calls and results cross as plain data (`plain.py`). Objects of
    the program's own classes stay there: the tests can call them, not compare them.

    The tests are the main module. Run are its statements, `check` with the entry point, functions `test...` (coroutines
    and pytest's parametrised ones, too), methods of pytest's classes and of unittest cases, and doctests. Tests that
    never call the program fail it, as do those of whose asserts none is reached.

    Args:
        program: untrusted source.
        tests: source of the data set's tests.
        entry_point: the function under test, `f` or `Solution.method` (a new instance for every call); None for the one
            name that the tests use and nobody else defines.
        prelude: source of the data set that the tests need, run before them; the entry point in it is replaced.
        names: further names that the tests may take from the program: those that a right program is known to define.
        limits: limits of each of the two processes; `wall_s` is for both together.
        protections: protections around each of them (`check_protections`).

    Raises:
        ConfigurationError: the entry point is no such name, or the tests cannot be judged (`unjudgeable`).
        SandboxError: the sandbox itself failed; says nothing of the program.
    """
    sources = _surveyed(tests, entry_point, prelude, names)
    began = time.monotonic()
    # Of the system's randomness, so that nothing foreign code sees helps it to guess.
    nonce = secrets.token_hex(32)
    with contextlib.ExitStack() as closing:
        requests, answers, reports = (os.pipe() for _ in range(3))
        report = Capture(reports[0], _REPORT_BYTES, ends_at_limit=False)
        closing.callback(report.close)
        try:
            served = Sandboxed(
                protections.walls, limits, {"role": "program", "source": program}, (requests[0], answers[1])
            )
            closing.enter_context(served)
            role: dict[str, Any] = {"role": "judge", "tests": tests, "prelude": prelude}
            role |= {
                "entry_point": entry_point,
                "nonce": nonce,
                "modules": sources.modules,
                "lent": sources.lent,
                "asked": list(sources.asked),
            }
            judging = Sandboxed(protections.walls, limits, role, (requests[1], answers[0], reports[1]))
            closing.enter_context(judging)
        finally:
            # Both children have theirs: open here as well, no reader would ever see an end.
            for end in (*requests, *answers, reports[1]):
                os.close(end)
        why, _ = attend(
            [served, judging], [report], limits.wall_s, lambda: not report.open or judging.returncode is not None
        )
        report.drain()
        said = report.text
    passed = why == "done" and secrets.compare_digest(said.encode(), nonce.encode())
    if why == "done":
        why = "passed" if passed else said or "the tests ended without a verdict"
    return JudgeResult(passed, why, time.monotonic() - began)


def unjudgeable(tests: str, *, entry_point: str | None, prelude: str = "", names: Collection[str] = ()) -> str | None:
    """Return why tests cannot be judged: one would not run or could not fail, or lacks a name; None if they can.

    Nothing is run, so a row can be refused when it is read. Arguments are those of `judge`.
    """
    try:
        _surveyed(tests, entry_point, prelude, names)
    except ConfigurationError as error:
        return str(error)
    return None


def _surveyed(tests: str, entry_point: str | None, prelude: str, names: Collection[str]) -> Sources:
    if entry_point is not None and not _ENTRY_POINT.fullmatch(entry_point):
        raise ConfigurationError(f"entry_point: {entry_point!r} must name a function, such as f or Solution.method")
    try:
        return survey(tests, prelude, entry_point, tuple(sorted(names)))
    except UnjudgeableError as error:
        raise ConfigurationError(f"tests: {error}") from None


def judge_stdio(
    program: str,
    cases: Sequence[tuple[str, str]],
    limits: Limits,
    protections: Protections,
    total_s: float = float("inf"),
) -> JudgeResult:
    """Run a program once for each case, until one fails, and compare what it prints.

    Outputs are equal if they have the same tokens (split at white space). Two tokens that differ as text are equal if
    both are decimal numbers in ASCII, one of them at least with a point or an exponent, that differ by 1e-6 at most, or
    by 1e-8 of their size where both have a point or an exponent and are not both whole numbers below 2^53.

    Args:
        program: untrusted source.
        cases: pairs of standard input and expected output.
        limits: limits of each run; a program that is expected to print more than `output_kib` may.
        protections: protections around it (`check_protections`).
        total_s: wall-clock seconds of all runs together, starts and ends of the sandboxes included; beyond it the
            program fails.

    Raises:
        SandboxError: the sandbox itself failed; says nothing of the program.
    """
    began = time.monotonic()

    def verdict(passed: bool, reason: str) -> JudgeResult:
        return JudgeResult(passed, reason, time.monotonic() - began)

    if not cases:
        return verdict(False, "there are no cases")
    for number, (given, expected) in enumerate(cases, start=1):
        left = total_s - (time.monotonic() - began)
        if left <= 0:
            return verdict(False, f"case {number}: timeout (all cases together)")
        output_kib = max(limits.output_kib, len(expected.encode("utf-8", "replace")) // 1024 + _SPARE_KIB)
        result = run_program(
            program, given, replace(limits, wall_s=min(limits.wall_s, left), output_kib=output_kib), protections
        )
        if result.status != "ok":
            last = result.stderr_tail.strip().rpartition("\n")[2][:200]
            return verdict(False, f"case {number}: {result.status}" + (f": {last}" if last else ""))
        if not same_output(result.stdout, expected):
            return verdict(False, f"case {number}: wrong output")
    return verdict(True, "passed")


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal by the rules of `judge_stdio`."""
    mine, theirs = printed.split(), expected.split()
    return len(mine) == len(theirs) and all(a == b or _close(a, b) for a, b in zip(mine, theirs, strict=True))


def _close(one: str, other: str) -> bool:
    # Decimal, not float: floats would make large whole numbers equal to their neighbours.
    written = [bool(_FRACTION.search(token)) for token in (one, other)]
    if not any(written) or not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)):
        return False
    try:
        mine, theirs = Decimal(one), Decimal(other)
        difference = abs(mine - theirs)
        if difference <= _TOLERANCE:
            return True
        # Whole numbers that a float holds exactly are counts, and no count is nearly right.
        counts = all(abs(number) < _EXACT and number == int(number) for number in (mine, theirs))
        return all(written) and not counts and difference <= _RELATIVE_TOLERANCE * abs(theirs)
    except ArithmeticError:
        return False
