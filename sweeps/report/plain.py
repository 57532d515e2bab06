"""Plain lines and tables for a terminal. Light: commands answer a typing error with nothing more than this."""

from __future__ import annotations

from collections.abc import Sequence


def one_line(text: str) -> str:
    """A message on one printable line, whatever a file name or cell in it holds."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, never cut: a pipe has no width, and a terminal wraps the last column only."""
    cells = [[one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)
