"""Write the curves of our studies into one published table, docs/measured/curves/curves.csv, with a data card.

Sources are committed: the replication's curves, the journals of the real model's study, and the demo's curves once
benchmarks/readme.py has written them.

    python -m benchmarks.curves
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.marks import between
from benchmarks.real_model import FOLDER as REAL_MODEL
from benchmarks.real_model import finished
from benchmarks.replication import CURVES as REPLICATION
from benchmarks.replication import POINT, points, write_table

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "measured" / "curves" / "curves.csv"
CARD = TABLE.with_name("README.md")
# Written by benchmarks/readme.py from the journals of `make demo`.
DEMO = REPLICATION.parents[1] / "demo" / "curves.csv"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield one row per evaluation: the study's name, then a point."""
    for study, table in (("demo", DEMO), ("replication", REPLICATION)):
        if not table.exists():
            continue
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                yield (study, *(row[name] for name in POINT))
    for member in finished(REAL_MODEL):
        for point in points(member.journal):
            yield ("real_model", *map(str, point))


def counts(all_points: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the card's table of the size of each study."""
    lines = ["| study | recipes | runs | evaluations |", "|---|---|---|---|"]
    for study in sorted({row[0] for row in all_points}):
        study_rows = [row for row in all_points if row[0] == study]
        recipes, runs = {row[1] for row in study_rows}, {row[1:3] for row in study_rows}
        lines.append(f"| `{study}` | {len(recipes)} | {len(runs)} | {len(study_rows)} |")
    return lines


def main() -> None:
    """Write the table, and the number of its rows into the card."""
    table = list(rows())
    write_table(TABLE, ("study", *POINT), table)
    CARD.write_text(between(CARD.read_text(), "counts", counts(table)))


if __name__ == "__main__":
    main()
