"""Format plain lines and tables for a terminal. Imports nothing slow, so that errors appear at once."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.terminal import one_line as one_line


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format aligned columns. No cell is cut, even if a line becomes wider than the terminal."""
    cells = [[one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def units(compute: str, reward: str = "reward") -> list[str]:
    """Explain two headings: return `compute: NAME` and `reward: NAME`, without those that equal their heading."""
    pairs = (("compute", compute), ("reward", reward))
    return [f"{heading}: {name}" for heading, name in pairs if name != heading]
