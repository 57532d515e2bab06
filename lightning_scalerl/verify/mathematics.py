"""Verifier of mathematical answers: math-verify on the last boxed expression, or on the text after `####`.

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
_BASE = re.compile(r"\d_\{?(\d+)\}?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Braces, and escaped characters, so that an escaped brace is skipped.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Arguments without braces: \\frac\pi 2, \\frac12, \\sqrt3.
_FRACTION = re.compile(r"\\[dt]?frac\s*(\\[a-zA-Z]+|\d)\s*(\\[a-zA-Z]+|\d)")
_ROOT = re.compile(r"\\sqrt\s*(\\[a-zA-Z]+|\d)")
# Commands of spacing and style without meaning, as in 29,\\!322.
_SPACING = re.compile(r"\\(?:[!,;:]|displaystyle\b)")
# A percent sign at the end: the answer is the number before it.
_PERCENT = re.compile(r"\s*\\?%$")
# A number with a word behind it, such as 18 dollars; a letter alone is a variable.
_WORDED = re.compile(r"([-+]?\d[\d,.]*)\s+[A-Za-z]{2}[A-Za-z .]*")
_FACTOR = re.compile(r"(?<=\d)\s+(?=[A-Za-z](?![A-Za-z]))")
# GSM8K's mark with a number or an expression behind it; Markdown's headings look the same, with words.
# Both patterns begin at the first # of a run and stop at the next mark, so that no character is looked at from each
# of the marks before it.
_MARKED = re.compile(r"(?<!#)#{4,}+\s*+(?![A-Za-z]{2})(\S[^\n]*)")
# Words behind the mark, and nothing more: an answer that is one.
_MARKED_WORD = re.compile(r"(?<!#)#{4,}+\s*+([A-Za-z](?:[^\n:#]|#(?!###))*+)\Z")
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
        expected, problem = _gold(gold, self.cpu_s)
        if problem:
            raise ValueError(problem)
        try:
            with _limited(self.cpu_s):
                said, marked = stated(sample.answer)
                if not said or len(said) > MAX_CHARACTERS:
                    return Grade(0.0, {"math_unstated": 1.0})
                if _same(said, gold):
                    return Grade(1.0, {"math_unstated": 0.0})
                return Grade(float(_equal(gold, expected, said, marked)), {"math_unstated": 0.0})
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


def stated(text: str) -> tuple[str, bool]:
    """Return the expression that a completion gives as its answer, and whether it is marked as such.

    The last `\\boxed{...}` that is closed, else the number or expression behind the last `####`; else,
    not marked, the end of the text, in which math-verify looks for its last expression.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed, True
    marked = [*_MARKED.finditer(text), *_MARKED_WORD.finditer(text.rstrip())]
    if marked:
        return marked[-1][1].strip(), True
    return text.rstrip("# \n\t").strip()[-MAX_CHARACTERS:], False  # a mark with nothing behind it says nothing


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close, in one pass; else None."""
    firsts = {found.end() - 1 for found in _BOX.finditer(text)}
    if not firsts:
        return None
    begun: list[int] = []
    last: tuple[int, int] | None = None
    for found in _BRACE.finditer(text, min(firsts)):
        if found[0] == "{":
            begun.append(found.start())
        elif found[0] == "}" and begun:
            first = begun.pop()
            if first in firsts and (last is None or first > last[0]):
                last = first, found.start()
    return None if last is None else text[last[0] + 1 : last[1]].strip()


def _same(said: str, gold: str) -> bool:
    """Return whether two texts are equal except for white space, so that no parser is needed."""
    return said.split() == gold.split()


@lru_cache(maxsize=4096)
def _gold(gold: str, cpu_s: float) -> tuple[Any, str]:
    """Return a gold answer as math-verify reads it, cached, and what is wrong with it, if anything.

    None where it is no mathematics as a whole: it is compared as text then.
    """
    if not gold.strip():
        return None, "the gold answer is empty"
    _warm()
    try:
        with _limited(cpu_s):
            return _read(gold) or None, ""
    except TooCostlyError as error:
        return None, f"the gold answer {gold[:80]!r} takes {error}"
    except (MemoryError, RecursionError, OverflowError) as error:
        return None, f"the gold answer {gold[:80]!r} cannot be read ({type(error).__name__})"


@lru_cache(maxsize=1)
def _warm() -> None:
    """Import the parser and build its tables, outside of any time limit."""
    _read("\\frac{1}{2}")
    _found_in("1/2")


def _equal(gold: str, expected: Any, said: str, marked: bool) -> bool:
    """Compare by math-verify, and by our own rules where it is blind: bases, brackets of sets, very small numbers."""
    from math_verify import verify

    if expected is None:
        return _tidy(said) == _tidy(gold)
    found = _read(said) if marked else _found_in(said)
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
    bare = _tidy(text).replace("\\left", "").replace("\\right", "").strip("$ ")
    if "," not in bare:
        return None
    return "set" if bare.startswith("\\{") else "order" if bare.startswith(("(", "[")) else None


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


def _tidy(expression: str) -> str:
    """Normalise common LaTeX: arguments in braces, no full stop, no words or percent sign after a number."""
    bare = _PERCENT.sub("", " ".join(_SPACING.sub("", expression).strip().strip("$").split()).rstrip(".,;"))
    bare = _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(r"\\frac{\1}{\2}", bare))
    worded = _WORDED.fullmatch(bare)
    return worded[1] if worded else _FACTOR.sub("", bare)  # 2 i is read as another thing than 2i


def _read(expression: str) -> Any:
    """Parse all of a marked expression as LaTeX; empty if only part of it can be read."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    ways = (LatexExtractionConfig(),)
    return parse(f"${_tidy(expression)}$", ways, parsing_timeout=None, fallback_mode="no_fallback")


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
