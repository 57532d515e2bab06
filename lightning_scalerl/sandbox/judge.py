"""Judgement of a program by the tests of a data set. The program never sees the tests or their expected values."""

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
from lightning_scalerl.sandbox.launch import Capture, Sandboxed, run_until
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.run import run_program
from lightning_scalerl.sandbox.survey import Sources, UnjudgeableError, survey
from lightning_scalerl.sandbox.walls import Protections

_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*(\(\))?)*")
_TOLERANCE = Decimal("1e-6")
_RELATIVE_TOLERANCE = Decimal("1e-8")
_EXACT = 1 << 53  # floats represent whole numbers below this exactly
_FRACTION = re.compile(r"[.eE]")
# Numbers as in C: Python would also accept underscores and digits of other scripts.
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REPORT_BYTES = 4096
_SPARE_KIB = 64  # allowance beyond the expected output, for other white space


@dataclass(frozen=True)
class JudgeResult:
    """Verdict on a program, with the first failure.

    Args:
        passed: whether all tests passed.
        reason: one line: `passed`, or the first failure.
        seconds: wall-clock seconds, including start and end of the sandboxes.
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

    Program and tests run in separate processes, each in a separate sandbox. Calls and results are exchanged as plain
    data (`plain.py`). Objects of the program's own classes stay in its process: the tests can call but not compare
    them.

    The tests are the main module of their process. Everything in them is run: statements, `check` with the entry point,
    functions `test...` (including coroutines and functions parametrised by pytest), methods of pytest classes and
    unittest cases, and doctests. The program fails if the tests never call it, or if none of their asserts is reached.

    Args:
        program: untrusted source.
        tests: source of the data set's tests.
        entry_point: the function under test, `f` or `Solution.method` (with a new instance for each call); None if it
            is the only name that the tests use without a definition.
        prelude: source from the data set that runs before the tests. If it defines the entry point, the program's
            definition replaces that.
        names: other names that the tests may take from the program, because correct programs define them.
        limits: limits on each of the two processes; `wall_s` is for both together.
        protections: protections around each process (`check_protections`).

    Raises:
        ConfigurationError: the entry point is not a valid name, or the tests cannot be judged (`unjudgeable`).
        SandboxError: the sandbox itself failed, for a reason unrelated to the program.
    """
    sources = _survey_tests(tests, entry_point, prelude, names)
    began = time.monotonic()
    # The nonce is from the system's random source, so that untrusted code cannot guess it.
    nonce = secrets.token_hex(32)
    with contextlib.ExitStack() as closing:
        requests, answers, reports = (os.pipe() for _ in range(3))
        report = Capture(reports[0], _REPORT_BYTES, ends_at_limit=False)
        closing.callback(report.close)
        try:
            program_process = Sandboxed(
                protections.walls, limits, {"role": "program", "source": program}, (requests[0], answers[1])
            )
            closing.enter_context(program_process)
            role: dict[str, Any] = {"role": "judge", "tests": tests, "prelude": prelude}
            role |= {
                "entry_point": entry_point,
                "nonce": nonce,
                "modules": sources.modules,
                "standard_library": sources.standard_library,
                "program_names": list(sources.program),
            }
            judge_process = Sandboxed(protections.walls, limits, role, (requests[1], answers[0], reports[1]))
            closing.enter_context(judge_process)
        finally:
            # The children have copies. If the ends stayed open here, no reader would ever see the end of a pipe.
            for end in (*requests, *answers, reports[1]):
                os.close(end)
        ending, _ = run_until(
            [program_process, judge_process],
            [report],
            limits.wall_s,
            lambda: not report.open or judge_process.returncode is not None,
        )
        report.drain()
        message = report.text
    passed = ending == "done" and secrets.compare_digest(message.encode(), nonce.encode())
    reason = ending if ending != "done" else "passed" if passed else message or "the tests ended without a verdict"
    return JudgeResult(passed, reason, time.monotonic() - began)


def unjudgeable(tests: str, *, entry_point: str | None, prelude: str = "", names: Collection[str] = ()) -> str | None:
    """Return the reason why tests cannot be used to judge programs, or None if they can.

    Such tests would not run, could not fail, or use an unknown name. Nothing is executed, so rows can be refused when
    they are read. The arguments are those of `judge`.
    """
    try:
        _survey_tests(tests, entry_point, prelude, names)
    except ConfigurationError as error:
        return str(error)
    return None


def _survey_tests(tests: str, entry_point: str | None, prelude: str, names: Collection[str]) -> Sources:
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
    """Run a program once per case, until one fails, and compare its outputs.

    Outputs are equal if they have the same tokens (split at white space). Two tokens with different text are equal if
    both are decimal numbers in ASCII, at least one of them has a point or an exponent, and one of these holds:

    - they differ by at most 1e-6;
    - they differ by at most 1e-8 relative to the expected number, both have a point or an exponent, and they are not
      both whole numbers below 2^53.

    Args:
        program: untrusted source.
        cases: pairs of standard input and expected output.
        limits: limits on each run; `output_kib` is raised if the expected output is larger.
        protections: protections around the program (`check_protections`).
        total_s: limit in wall-clock seconds on all runs together, including start and end of the sandboxes; a program
            that exceeds it fails.

    Raises:
        SandboxError: the sandbox itself failed, for a reason unrelated to the program.
    """
    began = time.monotonic()

    def verdict(passed: bool, reason: str) -> JudgeResult:
        return JudgeResult(passed, reason, time.monotonic() - began)

    if not cases:
        return verdict(False, "there are no cases")
    for number, (text, expected) in enumerate(cases, start=1):
        remaining_s = total_s - (time.monotonic() - began)
        if remaining_s <= 0:
            return verdict(False, f"case {number}: timeout (all cases together)")
        output_kib = max(limits.output_kib, len(expected.encode("utf-8", "replace")) // 1024 + _SPARE_KIB)
        result = run_program(
            program, text, replace(limits, wall_s=min(limits.wall_s, remaining_s), output_kib=output_kib), protections
        )
        if result.status != "ok":
            last = result.stderr_tail.strip().rpartition("\n")[2][:200]
            return verdict(False, f"case {number}: {result.status}" + (f": {last}" if last else ""))
        if not same_output(result.stdout, expected):
            return verdict(False, f"case {number}: wrong output")
    return verdict(True, "passed")


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal by the rules of `judge_stdio`."""
    actual, gold = printed.split(), expected.split()
    return len(actual) == len(gold) and all(a == b or _equal_numbers(a, b) for a, b in zip(actual, gold, strict=True))


def _equal_numbers(printed: str, expected: str) -> bool:
    """Return whether two tokens are equal as numbers."""
    # Compare as Decimal, because as floats large whole numbers would equal their neighbours.
    have_fraction = [bool(_FRACTION.search(token)) for token in (printed, expected)]
    if not any(have_fraction) or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    try:
        printed_number, expected_number = Decimal(printed), Decimal(expected)
        difference = abs(printed_number - expected_number)
        if difference <= _TOLERANCE:
            return True
        # Whole numbers that floats represent exactly are treated as counts, which must be exactly right.
        counts = all(abs(number) < _EXACT and number == int(number) for number in (printed_number, expected_number))
        return all(have_fraction) and not counts and difference <= _RELATIVE_TOLERANCE * abs(expected_number)
    except ArithmeticError:
        return False
