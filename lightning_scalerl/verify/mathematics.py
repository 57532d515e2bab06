"""Verifier of mathematical answers: math-verify compares normalised answers, and our own rules compare their words.

`answers.py` finds the answer in a completion, `spelling.py` normalises the gold and the stated answer, and `words.py`
compares words and units. This module compares the mathematics that is left.

math-verify parses with sympy, where some expressions take exponential time. The limit is on processor time, so that a
busy machine does not make an answer wrong; memory is limited by the worker. A completion that exceeds a limit is wrong,
while a gold answer that cannot be parsed is an error.
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

from lightning_scalerl.rollouts.grade import Grade, Sample
from lightning_scalerl.verify.answers import MAX_CHARACTERS, Stated, last_boxed, stated
from lightning_scalerl.verify.spelling import comma_readings, in_ascii, normal
from lightning_scalerl.verify.words import Parted, agree, part, plain

__all__ = ["MAX_CHARACTERS", "Mathematics", "changed", "last_boxed", "stated"]
_BASE = re.compile(r"\d_\{?(\d+)\}?")
# The space between a factor and a variable: math-verify reads 2 i differently from 2i.
_FACTOR = re.compile(r"(?<=\d)\s+(?=[A-Za-z](?![A-Za-z]))")
# The words that belong to the last expression of a prose text are searched in this many characters at its end.
_LAST_WORDS = 60
# Texts in which an equal sign is not an equation of numbers: congruences, and numerals with a base, which sympy takes
# for decimal ones.
_NO_EQUATION = re.compile(r"\\equiv|\d_\{?\d")


class TooCostlyError(BaseException):
    """Raised when an expression exceeds its time limit. Not an `Exception`, because parsers catch those."""


@dataclass(frozen=True)
class Mathematics:
    """Rewards 1 if the answer is mathematically equal to the gold answer, else 0.

    Args:
        cpu_s: limit in seconds of processor time for one completion. A completion that exceeds it is wrong, and counts
            in `math_too_costly`.
    """

    cpu_s: float = 3.0

    def prepare(self) -> None:
        """Import the parser now, because the first grade has a time limit."""
        _warm()

    def grade(self, sample: Sample) -> Grade:
        """Grade the text after the thinking.

        Raises:
            ValueError: the gold answer cannot be parsed within the time limit.
        """
        gold = str(sample.prompt.answer)
        answer, problem = _gold(gold, self.cpu_s)
        if answer is None:
            raise ValueError(problem)
        try:
            with _limited(self.cpu_s):
                statement = stated(sample.answer)
                if not statement.text or len(statement.text) > MAX_CHARACTERS:
                    return Grade(0.0, {"math_unstated": 1.0}, answer="")
                given = _answer(statement.text)
                equal = _same(statement.text, gold) or _equal(answer, statement, given)
                return Grade(float(equal), {"math_unstated": 0.0}, answer=None if equal else _form(statement, given))
        except (TooCostlyError, MemoryError, RecursionError, OverflowError):
            return Grade(0.0, {"math_unstated": 0.0, "math_too_costly": 1.0}, answer="")

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right and a wrong completion."""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{changed(str(answer))}}}"


def changed(answer: str) -> str:
    """Return a wrong answer of the same kind, by changing the first digit.

    In an equation, the first digit of the right side is changed. For an answer without digits, returns a number.
    """
    digits = [place for place, character in enumerate(answer) if character.isdecimal() and character.isascii()]
    if not digits:
        return "987654321"
    place = next((place for place in digits if place > answer.rfind("=")), digits[0])
    return answer[:place] + str(int(answer[place]) % 9 + 1) + answer[place + 1 :]


def _same(statement: str, gold: str) -> bool:
    """Return whether two texts are equal except for white space, so that no parser is needed."""
    return statement.split() == gold.split()


@dataclass(frozen=True)
class Answer:
    """Normalised answer.

    Args:
        text: the whole answer, words included.
        parts: its mathematics and its words, separated.
    """

    text: str
    parts: Parted

    @cached_property
    def readings(self) -> tuple[tuple[str, Any], ...]:
        """Possible readings of the mathematics: pairs of its text and the expression that math-verify parses from it.

        There are several if the text is ambiguous: 100,200 is a number or a list. Readings that cannot be parsed as a
        whole are left out.
        """
        texts = dict.fromkeys(text for reading in self.parts.readings for text in comma_readings(reading) if text)
        return tuple((text, parsed) for text in texts if (parsed := _parse(text)))


def _form(statement: Stated, answer: Answer) -> str:
    """Return a text that is the same for equal answers: the value of a number to six digits, else the expression.

    It has the answer's words as well. In prose it is the last expression, as in `_equal`.
    """
    import sympy

    if (word := plain(answer.text)).isalpha():  # the parser would read a word as a product of letters
        return word
    if statement.marked:
        parsed, words = [reading for _, reading in answer.readings], answer.parts.words
    else:
        parsed, words = [_parse_last(in_ascii(statement.prose or statement.text))], ()
    for value in (reading[0] for reading in parsed if reading):
        if isinstance(value, sympy.Expr) and value.is_number and value.is_comparable:
            return f"{float(sympy.N(value)):.6g} {' '.join(words)}".strip()
        return f"{value} {' '.join(words)}".strip()
    return answer.text


def _answer(text: str) -> Answer:
    normalized = normal(text)
    return Answer(normalized, part(normalized))


@lru_cache(maxsize=4096)
def _gold(gold: str, cpu_s: float) -> tuple[Answer | None, str]:
    """Return a gold answer, or None and the problem with it. Cached, because all completions of a prompt share it."""
    if not gold.strip():
        return None, "the gold answer is empty"
    _warm()
    try:
        with _limited(cpu_s):
            answer = _answer(gold)
            _ = answer.readings  # parse now, within the time limit; the result is cached
            return answer, ""
    except TooCostlyError as error:
        return None, f"the gold answer {gold[:80]!r} takes {error}"
    except (MemoryError, RecursionError, OverflowError) as error:
        return None, f"the gold answer {gold[:80]!r} cannot be read ({type(error).__name__})"


@lru_cache(maxsize=1)
def _warm() -> None:
    """Import the parser and build its tables, outside of any time limit."""
    _parse("\\frac{1}{2}")
    _parse_last("1/2")


def _equal(gold: Answer, statement: Stated, answer: Answer) -> bool:
    """Compare two answers: as text, then their words, then their mathematics in every pair of readings.

    If the answer is in prose, the last expression in it is compared as well. `answer` is the normalised statement.
    """
    if gold.text == answer.text or (plain(gold.text) and plain(gold.text) == plain(answer.text)):
        return True
    in_prose = bool(statement.prose) or not statement.marked
    words = answer.parts.words if statement.marked else part(answer.text[-_LAST_WORDS:]).words
    if not agree(gold.parts.words, words, in_prose):
        return False
    if statement.marked and gold.parts.mathematics and gold.parts.mathematics == answer.parts.mathematics:
        return True
    if statement.marked and any(
        _equal_mathematics(expected, found, gold_text, text, True)
        for gold_text, expected in gold.readings
        for text, found in answer.readings
    ):
        return True
    if not in_prose:
        return False
    prose = in_ascii(statement.prose or statement.text)
    found = _parse_last(prose)
    return any(_equal_mathematics(expected, found, text, prose, False) for text, expected in gold.readings)


def _equal_mathematics(expected: Any, found: Any, gold: str, text: str, marked: bool) -> bool:
    """Compare with math-verify, and by our own rules where it is blind: bases, kinds of brackets, small numbers.

    Args:
        expected, found: the gold and the stated answer as parsed by math-verify.
        gold, text: the texts that they were parsed from.
        marked: whether all of `text` is the answer.
    """
    from math_verify import verify

    if not found or (_contradicts_itself(text, found[0]) and not _contradicts_itself(gold, expected[0])):
        return False
    if marked:
        for property_of in (_base, _brackets):
            both = property_of(gold), property_of(text)
            if None not in both and both[0] != both[1]:
                return False
    if not verify(expected, found, timeout_seconds=None, raise_on_error=False):
        return False
    return _near(expected[0], found[0])


def _base(text: str) -> str | None:
    """Return the base of a numeral such as 102_3 or 102_{3}; None without a base."""
    found = _BASE.findall(text)
    return found[-1] if found else None


def _brackets(text: str) -> str | None:
    """Return "set" or "order" for a list, depending on its brackets; None without commas or brackets."""
    if "," not in text:
        return None
    return "set" if text.startswith("\\{") else "order" if text.startswith(("(", "[")) else None


def _contradicts_itself(text: str, expression: Any) -> bool:
    """Return whether the expression has an equation of two different numbers, such as 41=42.

    math-verify takes the right side of an equation as the answer and ignores the left side.
    """
    import sympy

    if not isinstance(expression, sympy.Basic) or _NO_EQUATION.search(text):
        return False
    parts = sympy.preorder_traversal(expression)
    return any(isinstance(part, sympy.Equality) and not _near(part.lhs, part.rhs) for part in parts)


def _near(expected: Any, found: Any) -> bool:
    """Return whether two numbers are equal up to a relative difference of 1e-4; True for anything but numbers."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and side.is_number and side.is_comparable for side in (expected, found)):
        return True
    difference, size = sympy.N(expected - found), sympy.N(abs(expected))
    return bool(difference == 0 or abs(difference) <= 1e-4 * size)


def _parse(expression: str) -> Any:
    """Parse a whole text as LaTeX; the result is empty if only a part of it can be parsed."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    formats = (LatexExtractionConfig(),)
    latex = _FACTOR.sub("", expression)
    return parse(f"${latex}$", formats, parsing_timeout=None, fallback_mode="no_fallback")


@lru_cache(maxsize=1)  # `_form` parses the text that `_equal` has just parsed
def _parse_last(prose: str) -> Any:
    """Parse the expression that math-verify takes as the answer of a text, usually the last one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    formats = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(prose, formats, parsing_timeout=None, fallback_mode="no_fallback")


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Raise `TooCostlyError` in the `with` block after `cpu_s` seconds of processor time, user and system together.

    Raises:
        RuntimeError: called outside of the main thread, where no signals arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the mathematics verifier needs a process of its own (verify.workers of 1 or more)")

    watching = True

    def over(number: int, frame: Any) -> None:
        if watching:  # otherwise the signal came while the timer was being stopped
            raise TooCostlyError(f"more than {cpu_s:g} s of processor time")

    previous_handler = signal.signal(signal.SIGPROF, over)
    # Repeat the signal every 0.1 s: code that catches everything may swallow the first exception.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.1)
    try:
        yield
    finally:
        watching = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous_handler)
