"""Printed output compared with a page: words to the letter, numbers to the digits that all processors share."""

from __future__ import annotations

import re

# Not part of a word, as the 2 of `pass@2` would be.
_NUMBER = re.compile(r"(?<![\w@])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")


def check_printed(output: str, page: str) -> None:
    """Draws of a posterior differ in their last digits between kinds of processors, so numbers may differ a little."""
    words = [" ".join(_NUMBER.sub("#", text).split()) for text in (output, page)]
    assert words[0] == words[1], output
    ours, theirs = (_NUMBER.findall(text) for text in (output, page))
    other = [pair for pair in zip(ours, theirs, strict=True) if not _alike(*pair)]
    assert not other, f"{other} in:\n{output}"


def _alike(one: str, two: str) -> bool:
    """Numbers within 3%, or one in the second digit after the point; numbers of seeds, from 10 on, within one."""
    first, second = (float(number.rstrip("%")) for number in (one, two))
    apart = abs(first - second)
    counts = one.isdecimal() and two.isdecimal() and second >= 10
    return apart <= max(0.011, 0.03 * abs(second)) or (counts and apart <= 1)
