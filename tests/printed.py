"""Compare printed output with a page: words exactly, numbers up to the digits on which all processors agree."""

from __future__ import annotations

import re

# A number on its own. The 2 of `pass@2` is part of a word.
_NUMBER = re.compile(r"(?<![\w@])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")


def check_printed(output: str, page: str) -> None:
    """Assert that output and page agree. Posterior draws differ in the last digits between kinds of processors."""
    words = [" ".join(_NUMBER.sub("#", text).split()) for text in (output, page)]
    assert words[0] == words[1], output
    ours, theirs = (_NUMBER.findall(text) for text in (output, page))
    differing = [pair for pair in zip(ours, theirs, strict=True) if not _alike(*pair)]
    assert not differing, f"{differing} in:\n{output}"


def _alike(one: str, two: str) -> bool:
    """Whether numbers agree within 3% or 0.011. Whole numbers from 10 on (counts of seeds) may also differ by 1."""
    first, second = (float(number.rstrip("%")) for number in (one, two))
    difference = abs(first - second)
    counts = one.isdecimal() and two.isdecimal() and second >= 10
    return difference <= max(0.011, 0.03 * abs(second)) or (counts and difference <= 1)
