"""Verifier of programs: runs them against the tests of their data set in a sandbox (`lightning_scalerl.sandbox`).

The prompt's answer has one of three forms:

- {"tests", "entry_point", "prelude", "names"}: source text of tests that call the program's functions
  (`sandbox.judge`);
- {"calls", "entry_point"}: arguments of calls and their expected results;
- {"cases"}: inputs and expected outputs of a program that reads and prints.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lightning_scalerl.checks import positive
from lightning_scalerl.rollouts.grade import Grade, Sample
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

_BLOCK = re.compile(r"```(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)|[^\n(]*)\n?", re.MULTILINE)
_OVERHEAD_S = 2.0  # time to start and end a sandbox
# Imports that LiveCodeBench's own harness puts before every solution.
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
# Tests for "calls". The expected values come from JSON, where tuples are lists and all keys are strings. Floats are
# compared as in `judge_stdio`. The calls are stored with marshal, because it can write integers of any length.
_CALLS_TEST_SOURCE = """
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

    The program is the last block of code in the completion, or the whole completion if it has no block.

    Args:
        wall_s, cpu_s, memory_mib, output_kib, file_mib, processes: see `Limits`. For a program that reads and prints
            they apply to each case, as in LiveCodeBench's own harness.
        total_s: limit in wall-clock seconds on all cases together of a program that reads and prints.
        mode: isolation to use: auto, bubblewrap, landlock or none (`check_protections`).
        unprotected: whether to run programs even if this machine cannot isolate them.
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
        _ = self.limits  # raises here for bad limits, not later in a worker
        positive("task.sandbox.total_s", self.total_s)

    @property
    def limits(self) -> Limits:
        """Limits on each run of a program."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def longest_s(self) -> float:
        """Maximum wall-clock seconds of a grade, start and end of the sandbox included."""
        return self.wall_s + _OVERHEAD_S

    def needs_s(self, sample: Sample) -> float:
        """Return the maximum seconds for this sample, which grow with the number of its cases."""
        cases = sample.prompt.answer.get("cases", ())
        return max(self.longest_s, min(self.total_s, len(cases) * self.longest_s) + _OVERHEAD_S if cases else 0.0)

    @cached_property
    def protections(self) -> Protections:
        """Protections on this machine, tested once per process.

        Raises:
            ConfigurationError: they are not sufficient.
        """
        return check_protections(self.unprotected, self.mode)

    def notes(self) -> Sequence[str]:
        """Return one line per protection that isolates programs on this machine.

        Raises:
            ConfigurationError: they are not sufficient.
        """
        return [f"sandbox: {line}" for line in self.protections.lines()]

    def grade(self, sample: Sample) -> Grade:
        """Grade the program in the text after the thinking.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        code = program_of(sample.answer)
        if not code.strip():
            return Grade(0.0, extra={"tests": "no program"})
        result = self._judge_program(code, sample.prompt.answer)
        return Grade(float(result.passed), extra={"tests": result.reason})

    def _judge_program(self, code: str, answer: Mapping[str, Any]) -> JudgeResult:
        if "cases" in answer:
            cases = [(str(text), str(expected)) for text, expected in answer["cases"]]
            return judge_stdio(code, cases, self.limits, self.protections, self.total_s)
        entry_point = answer.get("entry_point")
        if "calls" in answer:
            tests, prelude = _CALLS_TEST_SOURCE.format(calls=marshal.dumps(answer["calls"])), ""
            program = _join_sources(_IMPORTS, code)
        else:
            tests, prelude = str(answer["tests"]), str(answer.get("prelude") or "")
            program = _with_prelude(prelude, code, entry_point)
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
        """Return the reason why this answer cannot be used to judge programs, or None if it can."""
        if not isinstance(answer, Mapping) or not {"tests", "calls", "cases"} & set(answer):
            return "the answer holds no tests, calls or cases"
        if "cases" in answer:
            return None
        calls = "calls" in answer
        return unjudgeable(
            _CALLS_TEST_SOURCE.format(calls=b"") if calls else str(answer["tests"]),
            entry_point=answer.get("entry_point"),
            prelude="" if calls else str(answer.get("prelude") or ""),
            names=answer.get("names") or (),
        )

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a pair: None, because no right completion is known, and a wrong completion."""
        if "cases" in answer:
            return None, "```python\nprint('no answer')\n```"
        name = str(answer.get("entry_point") or "nothing").rpartition(".")[2]
        return None, f"```python\ndef {name}(*arguments, **more):\n    return 'no answer'\n```"


def program_of(text: str) -> str:
    """Return the last code block that is marked as Python or has no language; without one, the whole completion."""
    text = text.replace("\r\n", "\n")
    blocks = [match for match in _BLOCK.finditer(text) if match["language"].lower() in ("", "python", "python3", "py")]
    if not blocks:
        return text
    # A block in a Markdown list is indented like its fence. Remove only that much: the code has its own indentation.
    prefix = text[: blocks[-1].start()].rpartition("\n")[2]
    indent = prefix if prefix.isspace() else ""
    return "".join(line.removeprefix(indent) for line in str(blocks[-1]["code"]).splitlines(keepends=True))


def _with_prelude(prelude: str, code: str, entry_point: str | None) -> str:
    """Join a program with the task's prelude: the beginning of a function to complete, or imports.

    An indented body continues where the prelude ends. Other code, such as a complete new definition of the function, is
    placed after the prelude, which is valid by itself because it ends in a docstring.
    """
    if not prelude:
        return code
    defined = entry_point is None or re.search(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE)
    is_body = not defined and code.lstrip("\n")[:1].isspace()
    if is_body:
        return prelude + ("" if prelude.endswith("\n") else "\n") + code.lstrip("\n")
    return _join_sources(prelude, code)


def _join_sources(first: str, code: str) -> str:
    """Join two sources, and move `from __future__` imports to the front, where Python requires them."""
    return "".join([*(f"{line.rstrip()}\n" for line in _FUTURE.findall(code)), f"{first}\n\n", _FUTURE.sub("", code)])
