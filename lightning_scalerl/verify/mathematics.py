"""Verifier of mathematical answers: math-verify on one spelling of both answers, and our own comparison of their words.

`answers.py` says which part of a completion is its answer, `spelling.py` brings gold and stated answer into one
spelling, `words.py` compares words and units. Here the mathematics that is left is compared.

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
from functools import cached_property, lru_cache
from typing import Any

from lightning_scalerl.verify.answers import MAX_CHARACTERS, Stated, last_boxed, stated
from lightning_scalerl.verify.grade import Grade, Sample
from lightning_scalerl.verify.spelling import comma_readings, in_ascii, normal
from lightning_scalerl.verify.words import Parted, agree, part, plain

__all__ = ["MAX_CHARACTERS", "Mathematics", "changed", "last_boxed", "stated"]
_BASE = re.compile(r"\d_\{?(\d+)\}?")
# The space between a factor and a variable: 2 i is read as another thing than 2i.
_FACTOR = re.compile(r"(?<=\d)\s+(?=[A-Za-z](?![A-Za-z]))")
# Of prose, where the words of its last expression are.
_LAST_WORDS = 60
# Equal signs with another meaning: a congruence, and numerals of two bases, which sympy reads as decimal.
_NO_EQUATION = re.compile(r"\\equiv|\d_\{?\d")


class TooCostlyError(BaseException):
    """Raised when an expression takes more than its time. No `Exception`, because parsers catch those."""


@dataclass(frozen=True)
class Mathematics:
    """Rewards 1 if the answer is mathematically equal to the gold one, else 0.

    Args:
        cpu_s: seconds of processor time for one completion, beyond which it is wrong and counts in `math_too_costly`.
    """

    cpu_s: float = 3.0

    def prepare(self) -> None:
        """Import the parser before the first grade, which has a time limit."""
        _warm()

    def grade(self, sample: Sample) -> Grade:
        """Grade the text after the thinking.

        Raises:
            ValueError: the gold answer cannot be read in that time.
        """
        gold = str(sample.prompt.answer)
        answer, problem = _gold(gold, self.cpu_s)
        if answer is None:
            raise ValueError(problem)
        try:
            with _limited(self.cpu_s):
                said = stated(sample.answer)
                if not said.text or len(said.text) > MAX_CHARACTERS:
                    return Grade(0.0, {"math_unstated": 1.0})
                return Grade(float(_same(said.text, gold) or _equal(answer, said)), {"math_unstated": 0.0})
        except (TooCostlyError, MemoryError, RecursionError, OverflowError):
            return Grade(0.0, {"math_unstated": 0.0, "math_too_costly": 1.0})

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{changed(str(answer))}}}"


def changed(answer: str) -> str:
    """Return another answer of the same kind, by changing its first digit.

    Of an equation, the first digit on its right; without a digit, a number that is not the answer.
    """
    digits = [place for place, character in enumerate(answer) if character.isdecimal() and character.isascii()]
    if not digits:
        return "987654321"
    place = next((place for place in digits if place > answer.rfind("=")), digits[0])
    return answer[:place] + str(int(answer[place]) % 9 + 1) + answer[place + 1 :]


def _same(said: str, gold: str) -> bool:
    """Return whether two texts are equal except for white space, so that no parser is needed."""
    return said.split() == gold.split()


@dataclass(frozen=True)
class Answer:
    """An answer in the one spelling.

    Args:
        text: the whole answer, words included.
        parts: its mathematics and its words apart.
    """

    text: str
    parts: Parted

    @cached_property
    def readings(self) -> tuple[tuple[str, Any], ...]:
        """Its mathematics, with what math-verify makes of it.

        More than one where a spelling has two meanings: 100,200 is a number or a list. Empty where not all of it is
        mathematics.
        """
        texts = dict.fromkeys(other for each in self.parts.readings for other in comma_readings(each) if other)
        return tuple((each, found) for each in texts if (found := _read(each)))


def _answer(text: str) -> Answer:
    spelled = normal(text)
    return Answer(spelled, part(spelled))


@lru_cache(maxsize=4096)
def _gold(gold: str, cpu_s: float) -> tuple[Answer | None, str]:
    """Return a gold answer, cached, or what is wrong with it."""
    if not gold.strip():
        return None, "the gold answer is empty"
    _warm()
    try:
        with _limited(cpu_s):
            answer = _answer(gold)
            _ = answer.readings  # within the time limit, and once
            return answer, ""
    except TooCostlyError as error:
        return None, f"the gold answer {gold[:80]!r} takes {error}"
    except (MemoryError, RecursionError, OverflowError) as error:
        return None, f"the gold answer {gold[:80]!r} cannot be read ({type(error).__name__})"


@lru_cache(maxsize=1)
def _warm() -> None:
    """Import the parser and build its tables, outside of any time limit."""
    _read("\\frac{1}{2}")
    _found_in("1/2")


def _equal(gold: Answer, said: Stated) -> bool:
    """Compare words first, then mathematics in every reading of both, then plain text where one has no mathematics."""
    answer = _answer(said.text)
    if gold.text == answer.text or (plain(gold.text) and plain(gold.text) == plain(answer.text)):
        return True
    in_prose = bool(said.prose) or not said.marked
    words = answer.parts.words if said.marked else part(answer.text[-_LAST_WORDS:]).words
    if not agree(gold.parts.words, words, in_prose):
        return False
    if said.marked and gold.parts.mathematics and gold.parts.mathematics == answer.parts.mathematics:
        return True
    if said.marked and any(
        _equal_mathematics(expected, found, text, other, True)
        for text, expected in gold.readings
        for other, found in answer.readings
    ):
        return True
    if not in_prose:
        return False
    prose = in_ascii(said.prose or said.text)
    found = _found_in(prose)
    return any(_equal_mathematics(expected, found, text, prose, False) for text, expected in gold.readings)


def _equal_mathematics(expected: Any, found: Any, gold: str, said: str, marked: bool) -> bool:
    """Compare by math-verify, and by our own rules where it is blind: bases, brackets of sets, very small numbers."""
    from math_verify import verify

    if not found or (_contradicts_itself(said, found[0]) and not _contradicts_itself(gold, expected[0])):
        return False
    if marked:
        for telling in (_base, _brackets):
            both = telling(gold), telling(said)
            if None not in both and both[0] != both[1]:
                return False
    if not verify(expected, found, timeout_seconds=None, raise_on_error=False):
        return False
    return _near(expected[0], found[0])


def _base(text: str) -> str | None:
    """Return the base of a numeral, such as 102_3 or 102_{3}; None if none is given."""
    found = _BASE.findall(text)
    return found[-1] if found else None


def _brackets(text: str) -> str | None:
    """Return "set" or "order" for a list, by its brackets; None without commas or brackets."""
    if "," not in text:
        return None
    return "set" if text.startswith("\\{") else "order" if text.startswith(("(", "[")) else None


def _contradicts_itself(text: str, expression: Any) -> bool:
    """Return whether an equation in it has two numbers for its sides that differ, such as 41=42.

    math-verify takes the right side of an equation for the answer, whatever the left one is.
    """
    import sympy

    if not isinstance(expression, sympy.Basic) or _NO_EQUATION.search(text):
        return False
    parts = sympy.preorder_traversal(expression)
    return any(isinstance(part, sympy.Equality) and not _near(part.lhs, part.rhs) for part in parts)


def _near(expected: Any, found: Any) -> bool:
    """Return whether two numbers differ by less than a ten thousandth; True for anything else."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and each.is_number and each.is_comparable for each in (expected, found)):
        return True
    difference, size = sympy.N(expected - found), sympy.N(abs(expected))
    return bool(difference == 0 or abs(difference) <= 1e-4 * size)


def _read(expression: str) -> Any:
    """Parse all of an expression as LaTeX; empty if only part of it can be read."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    ways = (LatexExtractionConfig(),)
    spelled = _FACTOR.sub("", expression)
    return parse(f"${spelled}$", ways, parsing_timeout=None, fallback_mode="no_fallback")


def _found_in(prose: str) -> Any:
    """Return the expression in a text that math-verify takes for its answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    ways = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(prose, ways, parsing_timeout=None, fallback_mode="no_fallback")


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Raise `TooCostlyError` in the `with` block after so much processor time of this process, kernel time included.

    Raises:
        RuntimeError: not in a main thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the mathematics verifier needs a process of its own (verify.workers of 1 or more)")

    watching = True

    def over(number: int, frame: Any) -> None:
        if watching:  # else it came while the clock was being stopped
            raise TooCostlyError(f"more than {cpu_s:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    # Again and again: one may come where it is swallowed.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.1)
    try:
        yield
    finally:
        watching = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
