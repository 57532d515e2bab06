"""Verifier of mathematical answers: math-verify compares normalised answers, and our own rules compare their words.

`answers.py` finds the answer in a completion, `spelling.py` normalises the gold and the stated answer, and `words.py`
compares words and units. This module compares the mathematics that is left.

math-verify parses with sympy, where some expressions take exponential time. So the processor time of each grade is
limited. A limit on wall-clock time would make answers wrong on a busy machine. Memory is limited by the worker. A
completion that exceeds a limit is wrong, while a gold answer that cannot be parsed is an error.
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
from lightning_scalerl.verify.answers import MAX_CHARACTERS, StatedAnswer, extract_answer, last_boxed
from lightning_scalerl.verify.spelling import comma_readings, in_ascii, normalise
from lightning_scalerl.verify.words import AnswerParts, agree, separate_words, words_only

__all__ = ["MAX_CHARACTERS", "Mathematics", "change_first_digit", "extract_answer", "last_boxed"]
_BASE = re.compile(r"\d_\{?(\d+)\}?")
# The space between a factor and a variable. It is removed, because math-verify reads "2 i" differently from "2i".
_SPACE_AFTER_FACTOR = re.compile(r"(?<=\d)\s+(?=[A-Za-z](?![A-Za-z]))")
# Number of characters at the end of a prose text that are searched for words which belong to its last expression.
_LAST_WORDS = 60
# Texts in which an equal sign does not equate two numbers: congruences, and numerals with a base, which sympy reads as
# decimal numbers.
_NO_EQUATION = re.compile(r"\\equiv|\d_\{?\d")


class TooCostlyError(BaseException):
    """Raised when an expression exceeds its time limit. Not an `Exception`, because parsers catch those."""


@dataclass(frozen=True)
class Mathematics:
    """Rewards 1 if the answer is mathematically equal to the gold answer, else 0.

    Args:
        cpu_s: limit in seconds of processor time for one completion. A completion that exceeds it is wrong and sets
            the recorded value `math_too_costly` to 1.
    """

    cpu_s: float = 3.0

    def prepare(self) -> None:
        """Import the parser now, so that the import does not count in the time limit of the first grade."""
        _import_parser()

    def grade(self, sample: Sample) -> Grade:
        """Grade the text after the thinking.

        Raises:
            ValueError: the gold answer cannot be parsed within the time limit.
        """
        gold = str(sample.prompt.answer)
        answer, problem = _parse_gold(gold, self.cpu_s)
        if answer is None:
            raise ValueError(problem)
        try:
            with _time_limit(self.cpu_s):
                statement = extract_answer(sample.answer)
                if not statement.text or len(statement.text) > MAX_CHARACTERS:
                    return Grade(0.0, {"math_unstated": 1.0}, answer="")
                answer_parts = _normalise(statement.text)
                equal = _same_text(statement.text, gold) or _equal(answer, statement, answer_parts)
                return Grade(
                    float(equal),
                    {"math_unstated": 0.0},
                    answer=None if equal else _canonical_form(statement, answer_parts),
                )
        except (TooCostlyError, MemoryError, RecursionError, OverflowError):
            return Grade(0.0, {"math_unstated": 0.0, "math_too_costly": 1.0}, answer="")

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right and a wrong completion."""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{change_first_digit(str(answer))}}}"


def change_first_digit(answer: str) -> str:
    """Make a wrong answer of the same kind by changing the first digit.

    In an equation, the first digit of the right side is changed. An answer without digits is replaced by a number.
    """
    digits = [position for position, character in enumerate(answer) if character.isdecimal() and character.isascii()]
    if not digits:
        return "987654321"
    position = next((position for position in digits if position > answer.rfind("=")), digits[0])
    return answer[:position] + str(int(answer[position]) % 9 + 1) + answer[position + 1 :]


def _same_text(statement: str, gold: str) -> bool:
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
    parts: AnswerParts

    @cached_property
    def readings(self) -> tuple[tuple[str, Any], ...]:
        """Possible readings of the mathematics: pairs of its text and the expression that math-verify parses from it.

        There are several if the text is ambiguous: 100,200 is a number or a list. Readings that cannot be parsed as a
        whole are left out.
        """
        texts = dict.fromkeys(text for reading in self.parts.readings for text in comma_readings(reading) if text)
        return tuple((text, parsed) for text in texts if (parsed := _parse(text)))


def _canonical_form(statement: StatedAnswer, answer: Answer) -> str:
    """Return a text that is the same for equal answers: the value of a number to six digits, else the expression.

    The answer's words are appended. In prose only the last expression is used, as in `_equal`.
    """
    import sympy

    if (word := words_only(answer.text)).isalpha():  # the parser would read a word as a product of letters
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


def _normalise(text: str) -> Answer:
    normalized = normalise(text)
    return Answer(normalized, separate_words(normalized))


@lru_cache(maxsize=4096)
def _parse_gold(gold: str, cpu_s: float) -> tuple[Answer | None, str]:
    """Parse a gold answer; return (answer, "") or (None, reason). Cached, because a prompt's completions share it."""
    if not gold.strip():
        return None, "the gold answer is empty"
    _import_parser()
    try:
        with _time_limit(cpu_s):
            answer = _normalise(gold)
            _ = answer.readings  # parse now, within the time limit; the result is cached
            return answer, ""
    except TooCostlyError as error:
        return None, f"the gold answer {gold[:80]!r} takes {error}"
    except (MemoryError, RecursionError, OverflowError) as error:
        return None, f"the gold answer {gold[:80]!r} cannot be read ({type(error).__name__})"


@lru_cache(maxsize=1)
def _import_parser() -> None:
    """Import the parser and build its tables, outside of any time limit."""
    _parse("\\frac{1}{2}")
    _parse_last("1/2")


def _equal(gold: Answer, statement: StatedAnswer, answer: Answer) -> bool:
    """Return whether two answers agree, either as texts or in both their words and their mathematics.

    An ambiguous text has several readings. The mathematics agrees if it does in any pair of readings.

    Args:
        gold: the gold answer.
        statement: the answer as the completion states it. If it is in prose, its last expression is compared as well.
        answer: the statement in normalised form.
    """
    if gold.text == answer.text or (words_only(gold.text) and words_only(gold.text) == words_only(answer.text)):
        return True
    in_prose = bool(statement.prose) or not statement.marked
    words = answer.parts.words if statement.marked else separate_words(answer.text[-_LAST_WORDS:]).words
    if not agree(gold.parts.words, words, in_prose):
        return False
    if statement.marked and gold.parts.mathematics and gold.parts.mathematics == answer.parts.mathematics:
        return True
    if statement.marked and any(
        _equal_mathematics(expected, parsed, gold_text, text, True)
        for gold_text, expected in gold.readings
        for text, parsed in answer.readings
    ):
        return True
    if not in_prose:
        return False
    prose = in_ascii(statement.prose or statement.text)
    parsed = _parse_last(prose)
    return any(_equal_mathematics(expected, parsed, text, prose, False) for text, expected in gold.readings)


def _equal_mathematics(expected: Any, actual: Any, gold: str, text: str, marked: bool) -> bool:
    """Compare with math-verify, and by our own rules for what it ignores.

    It ignores the base of a numeral, the kind of brackets, and large relative errors of small numbers.

    Args:
        expected, actual: the gold and the stated answer as parsed by math-verify.
        gold, text: the texts that `expected` and `actual` were parsed from.
        marked: whether all of `text` is the answer.
    """
    from math_verify import verify

    if not actual or (_contradicts_itself(text, actual[0]) and not _contradicts_itself(gold, expected[0])):
        return False
    if marked:
        for property_of in (_numeral_base, _bracket_kind):
            both = property_of(gold), property_of(text)
            if None not in both and both[0] != both[1]:
                return False
    if not verify(expected, actual, timeout_seconds=None, raise_on_error=False):
        return False
    return _nearly_equal(expected[0], actual[0])


def _numeral_base(text: str) -> str | None:
    """Return the base of a numeral such as 102_3 or 102_{3}; None without a base."""
    bases = _BASE.findall(text)
    return bases[-1] if bases else None


def _bracket_kind(text: str) -> str | None:
    """Return "set" for a list in set brackets, "order" for one in round or square brackets, else None."""
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
    return any(isinstance(part, sympy.Equality) and not _nearly_equal(part.lhs, part.rhs) for part in parts)


def _nearly_equal(expected: Any, actual: Any) -> bool:
    """Return whether two numbers are equal up to a relative difference of 1e-4; True for anything but numbers."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and side.is_number and side.is_comparable for side in (expected, actual)):
        return True
    difference, size = sympy.N(expected - actual), sympy.N(abs(expected))
    return bool(difference == 0 or abs(difference) <= 1e-4 * size)


def _parse(expression: str) -> Any:
    """Parse a whole text as LaTeX; the result is empty if only a part of it can be parsed."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    formats = (LatexExtractionConfig(),)
    latex = _SPACE_AFTER_FACTOR.sub("", expression)
    return parse(f"${latex}$", formats, parsing_timeout=None, fallback_mode="no_fallback")


@lru_cache(maxsize=1)  # `_canonical_form` parses the text that `_equal` has just parsed
def _parse_last(prose: str) -> Any:
    """Parse the expression that math-verify takes as a text's answer, usually the text's last expression."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    formats = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(prose, formats, parsing_timeout=None, fallback_mode="no_fallback")


@contextmanager
def _time_limit(cpu_s: float) -> Iterator[None]:
    """Limit the `with` block to `cpu_s` seconds of processor time (user and system); then raise `TooCostlyError`.

    Raises:
        RuntimeError: called outside of the main thread, where no signals arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the mathematics verifier needs a process of its own (verify.workers of 1 or more)")

    watching = True

    def raise_too_costly(number: int, frame: Any) -> None:
        if watching:  # otherwise the signal came while the timer was being stopped
            raise TooCostlyError(f"more than {cpu_s:g} s of processor time")

    previous_handler = signal.signal(signal.SIGPROF, raise_too_costly)
    # Repeat the signal every 0.1 s: code that catches everything may swallow the first exception.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.1)
    try:
        yield
    finally:
        watching = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous_handler)
