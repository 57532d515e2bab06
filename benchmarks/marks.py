"""Replace the sections of a page that a benchmark writes. They are between two marks; the rest is written by hand.

A page begins with its question, its command and its answers. A later run replaces only the tables, so check the answers
after it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

WIDTH = 150


def wrapped(*texts: str) -> list[str]:
    """Wrap paragraphs and list items (which begin with "- ") into lines; an empty text gives an empty line."""
    lines: list[str] = []
    for text in texts:
        indent = "  " if text.startswith("- ") else ""
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += [] if text else [""]
    return lines


def between(page: str, mark: str, lines: Iterable[str]) -> str:
    """Return the page with these lines between a section's marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"the page lacks the marks of {mark}")
    return pattern.sub(lambda _: "\n".join([begin, *lines, end]), page)


def rewrite(file: Path, mark: str, lines: Iterable[str]) -> None:
    """Replace a section of a page, with a blank line at both ends. A new file contains only the section."""
    page = file.read_text(encoding="utf-8") if file.exists() else f"<!-- {mark} -->\n<!-- /{mark} -->\n"
    file.write_text(between(page, mark, ["", *lines, ""]), encoding="utf-8")
