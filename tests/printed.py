"""Printed output compared with a page: the words to the letter, the numbers to the digits that every processor shares."""

from __future__ import annotations

import re

import pytest

# Not part of a word, as the 2 of `pass@2` or `adamw8` would be.
_NUMBER = re.compile(r"(?<![\w@])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")


def check_printed(output: str, page: str) -> None:
    """Draws of a posterior differ in their last digits between kinds of processors, so numbers may differ a little."""
    words = [" ".join(_NUMBER.sub("#", text).split()) for text in (output, page)]
    assert words[0] == words[1]
    ours, theirs = ([float(number.rstrip("%")) for number in _NUMBER.findall(text)] for text in (output, page))
    assert ours == pytest.approx(theirs, rel=0.02, abs=0.011)
