"""Verifier of mathematical answers: math-verify on the last boxed expression, or on what follows `####`.

math-verify parses with sympy, and some expressions explode there. Time is limited by the processor time that is used,
so that a busy machine makes nobody wrong, and memory by the worker's limit. A completion that asks for more is wrong; a
gold answer that cannot be read is an error.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_scalerl.verify.grade import Grade, Sample

# A longer answer is no answer: parsing takes time with its length.
MAX_CHARACTERS = 1000
MARK = "####"
# The base of a numeral, such as 102_3 or 102_{3}.
_BASE = re.compile(r"\d_\{?(\d+)\}?")


class TooCostlyError(BaseException):
    """An expression that takes more than its time. No `Exception`, for parsers catch those."""


@dataclass(frozen=True)
class Mathematics:
    """1 if the answer is mathematically equal to the gold one.

    Args:
        cpu_s: processor time for one completion, beyond which it is wrong; recorded as `math_too_costly`.
    """

    cpu_s: float = 3.0

    def grade(self, sample: Sample) -> Grade:
        """Of what follows the thinking.

        Raises:
            ValueError: the gold answer cannot be read.
        """
        gold = str(sample.prompt.answer)
        _gold(gold)
        said = stated(sample.answer)
        if said is None or len(said) > MAX_CHARACTERS:
            return Grade(0.0, {"math_unstated": 1.0})
        if _same(said, gold):
            return Grade(1.0, {"math_unstated": 0.0})
        try:
            with _limited(self.cpu_s):
                return Grade(float(_equal(gold, said)), {"math_unstated": 0.0})
        except (TooCostlyError, MemoryError, RecursionError, OverflowError):
            return Grade(0.0, {"math_unstated": 0.0, "math_too_costly": 1.0})

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """A right completion and a wrong one."""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{changed(str(answer))}}}"


def changed(answer: str) -> str:
    """Another answer of the same kind: its first digit changed, else something that is not it."""
    for place, character in enumerate(answer):
        if character.isdecimal() and character.isascii():
            return answer[:place] + str(int(character) % 9 + 1) + answer[place + 1 :]
    return "987654321"


def stated(text: str) -> str | None:
    """The expression that a completion gives as its answer.

    The last `\\boxed{...}` that is closed, else what follows the last `####` on its line, else all of the text, in
    which math-verify looks for its last expression; None where none of it can be an answer.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if MARK in text:
        after = text.rpartition(MARK)[2].strip().splitlines()
        return after[0].strip() if after else None
    tail = text.strip()[-MAX_CHARACTERS:]
    return tail or None


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `\\fbox{...}` whose braces close."""
    end = len(text)
    while True:
        start = max(text.rfind(f"\\{name}{{", 0, end) for name in ("boxed", "fbox"))
        if start < 0:
            return None
        first = text.index("{", start)
        depth = 0
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if depth == 0:
                return text[first + 1 : place].strip()
        end = start


def _same(said: str, gold: str) -> bool:
    """To the letter, but for space: not worth a parser."""
    return "".join(said.split()) == "".join(gold.split())


@lru_cache(maxsize=4096)
def _gold(gold: str) -> Any:
    try:
        with _limited(10.0):
            found = _parsed(gold)
    except TooCostlyError as error:
        raise ValueError(f"the gold answer {gold[:80]!r} takes {error}") from error
    if not found:
        raise ValueError(f"the gold answer {gold[:80]!r} cannot be read as mathematics")
    return found


def _equal(gold: str, said: str) -> bool:
    """By math-verify, and where that is blind (bases of numerals, numbers too small for its six decimals) by us."""
    from math_verify import verify

    bases = [_BASE.findall(text) for text in (gold, said)]
    if all(bases) and bases[0][-1] != bases[1][-1]:
        return False
    expected, found = _gold(gold), _parsed(said)
    if not verify(expected, found, timeout_seconds=None, raise_on_error=False):
        return False
    return _near(expected[0], found[0])


def _near(expected: Any, found: Any) -> bool:
    """Of two numbers, whether they differ by less than a ten thousandth; of all else, yes."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and each.is_number and each.is_comparable for each in (expected, found)):
        return True
    difference, size = sympy.N(expected - found), sympy.N(abs(expected))
    return bool(difference == 0 or abs(difference) <= 1e-4 * size)


def _parsed(expression: str) -> Any:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    bare = expression.strip().strip("$")
    ways = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(f"${bare}$", extraction_config=ways, parsing_timeout=None, fallback_mode="first_match")


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """`TooCostlyError` after so much processor time.

    Raises:
        RuntimeError: not in a main thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the mathematics verifier needs a process of its own (verify.workers of 1 or more)")

    def over(number: int, frame: Any) -> None:
        raise TooCostlyError(f"more than {cpu_s:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, over)
    # Again and again: one may come where it is swallowed.
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
