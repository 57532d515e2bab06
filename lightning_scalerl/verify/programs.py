"""Verifier of programs: run against their data set's tests in a sandbox (`lightning_scalerl.sandbox`).

The answer is {"tests", "entry_point", "prelude", "names"} for tests that call functions (`sandbox.judge`), {"calls",
"entry_point"} for calls with what they return, {"cases"} for programs that read and print.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lightning_scalerl.checks import positive
from lightning_scalerl.sandbox import (
    JudgeResult,
    Limits,
    Mode,
    Protections,
    check_protections,
    judge,
    judge_stdio,
    unjudgeable,
)
from lightning_scalerl.verify.grade import Grade, Sample

_BLOCK = re.compile(r"```(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)|[^\n(]*)\n?", re.MULTILINE)
_STARTS_S = 2.0  # start and end of the sandboxes
# What LiveCodeBench's own harness imports before every solution.
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
# Calls come from JSON, which has no tuples and whose keys are texts. Floats are compared as `judge_stdio` compares
# printed ones. marshal, not JSON: it writes whole numbers of any length.
_CALLS = """
import json, marshal, math

def same(got, expected):
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        mine, theirs = by_text(got), by_text(expected)
        return len(got) == len(mine) and mine.keys() == theirs.keys() and all(same(mine[k], theirs[k]) for k in mine)
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)) and float in (type(got), type(expected)):
        return close(got, expected)
    return got == expected

def by_text(mapping):
    plain = (int, float, type(None))
    return {{json.dumps(key) if isinstance(key, plain) else key: value for key, value in mapping.items()}}

def close(got, expected):
    if got == expected or (got != got and expected != expected):
        return True
    try:
        difference = abs(got - expected)
    except OverflowError:
        return False
    counts = all(abs(number) < 2**53 and number == int(number) for number in (got, expected))
    relative = type(got) is type(expected) and not counts
    return difference <= 1e-6 or relative and abs(expected) < math.inf and difference <= 1e-8 * abs(expected)

def check(candidate):
    for arguments, expected in marshal.loads({calls!r}):
        assert same(candidate(*arguments), expected)
"""


@dataclass(frozen=True)
class Programs:
    """Rewards 1 if the program passes all tests, else 0.

    The program is the last block of code in the completion, or all of it if there is none.

    Args:
        wall_s, cpu_s, memory_mib, output_kib, file_mib, processes: see `Limits`; of a program that reads and prints,
            for each of its cases, as in LiveCodeBench's own harness.
        total_s: wall-clock seconds of all cases of such a program together.
        mode: walls to use: auto, bubblewrap, landlock or none (`check_protections`).
        unprotected: whether programs run even where no walls can isolate them.
    """

    wall_s: float = 6.0
    cpu_s: float = 6.0
    memory_mib: int = 1024
    output_kib: int = 256
    file_mib: int = 16
    processes: int = 32
    mode: Mode = "auto"
    unprotected: bool = False
    total_s: float = 60.0

    def __post_init__(self) -> None:
        _ = self.limits  # refused here, not in a worker
        positive("task.sandbox.total_s", self.total_s)

    @property
    def limits(self) -> Limits:
        """Limits of each run of a program."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def longest_s(self) -> float:
        """Wall-clock seconds that a grade takes at most, start and end of the sandboxes included."""
        return self.wall_s + _STARTS_S

    def needs_s(self, sample: Sample) -> float:
        """Return the seconds that this sample takes at most: more for one with many cases."""
        cases = sample.prompt.answer.get("cases", ())
        return max(self.longest_s, min(self.total_s, len(cases) * self.longest_s) + _STARTS_S if cases else 0.0)

    @cached_property
    def protections(self) -> Protections:
        """Protections of this machine, tried once in each process.

        Raises:
            ConfigurationError: there are not enough.
        """
        return check_protections(self.unprotected, self.mode)

    def notes(self) -> Sequence[str]:
        """Return a line for each protection that programs run behind on this machine.

        Raises:
            ConfigurationError: there are not enough.
        """
        return [f"sandbox: {line}" for line in self.protections.lines()]

    def grade(self, sample: Sample) -> Grade:
        """Grade the program in the text after the thinking.

        Raises:
            SandboxError: the sandbox failed, not the program.
        """
        code = program_of(sample.answer)
        if not code.strip():
            return Grade(0.0, extra={"tests": "no program"})
        result = self._judged(code, sample.prompt.answer)
        return Grade(float(result.passed), extra={"tests": result.reason})

    def _judged(self, code: str, answer: Mapping[str, Any]) -> JudgeResult:
        """Return the verdict on a program by the kind of test that the answer holds."""
        if "cases" in answer:
            cases = [(str(given), str(expected)) for given, expected in answer["cases"]]
            return judge_stdio(code, cases, self.limits, self.protections, self.total_s)
        entry_point = answer.get("entry_point")
        if "calls" in answer:
            tests, prelude, program = _CALLS.format(calls=marshal.dumps(answer["calls"])), "", _behind(_IMPORTS, code)
        else:
            tests, prelude = str(answer["tests"]), str(answer.get("prelude") or "")
            program = _completed(prelude, code, entry_point)
        return judge(
            program,
            tests,
            entry_point=entry_point,
            prelude=prelude,
            names=answer.get("names") or (),
            limits=self.limits,
            protections=self.protections,
        )

    def unjudgeable(self, answer: Any) -> str | None:
        """Return why no program can be judged by this answer; None if one can."""
        if not isinstance(answer, Mapping) or not {"tests", "calls", "cases"} & set(answer):
            return "the answer holds no tests, calls or cases"
        if "cases" in answer:
            return None
        calls = "calls" in answer
        return unjudgeable(
            _CALLS.format(calls=b"") if calls else str(answer["tests"]),
            entry_point=answer.get("entry_point"),
            prelude="" if calls else str(answer.get("prelude") or ""),
            names=answer.get("names") or (),
        )

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return None in place of a right completion, and a wrong one."""
        if "cases" in answer:
            return None, "```python\nprint('no answer')\n```"
        name = str(answer.get("entry_point") or "nothing").rpartition(".")[2]
        return None, f"```python\ndef {name}(*arguments, **more):\n    return 'no answer'\n```"


def program_of(text: str) -> str:
    """Return the last block of Python, or of no language, in a completion; all of it if there is none."""
    text = text.replace("\r\n", "\n")
    blocks = [found for found in _BLOCK.finditer(text) if found["language"].lower() in ("", "python", "python3", "py")]
    if not blocks:
        return text
    # In a list the whole block is indented like its fence; its own indentation stays, a function's body may have one.
    before = text[: blocks[-1].start()].rpartition("\n")[2]
    indent = before if before.isspace() else ""
    return "".join(line.removeprefix(indent) for line in str(blocks[-1]["code"]).splitlines(keepends=True))


def _completed(prelude: str, code: str, entry_point: str | None) -> str:
    """Return the program with what the task gave: a function to complete, or imports.

    A program that defines the function anew stands behind the prompt, which ends in a docstring; a body goes on where
    the prompt ends.
    """
    if not prelude:
        return code
    defined = entry_point is None or re.search(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE)
    is_body = not defined and code.lstrip("\n")[:1].isspace()
    if is_body:
        return prelude + ("" if prelude.endswith("\n") else "\n") + code.lstrip("\n")
    return _behind(prelude, code)


def _behind(before: str, code: str) -> str:
    """Join two sources, with `from __future__` imports moved to the front, where Python needs them."""
    return "".join([*(f"{line.rstrip()}\n" for line in _FUTURE.findall(code)), f"{before}\n\n", _FUTURE.sub("", code)])
