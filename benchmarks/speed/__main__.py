"""Measure what is named, or all of it, and write the tables of docs/measured/speed.md from benchmarks/results/.

    make bench                                          all of it, about twenty minutes on two idle cores
    python -m benchmarks.speed generation --rounds 3    one comparison

TRL takes part where PEERS_PYTHON names an interpreter with the packages of tests/parity/peers.txt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marks import rewrite
from benchmarks.speed import breakdown, fits, generation, head, packing, sweeps, training
from benchmarks.speed.pairs import Record, machine, seconds

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured" / "speed.md"
COMPARISONS: dict[str, Callable[[int], list[Record]]] = {
    "training": training.measure,
    "generation": generation.measure,
    "packing": packing.measure,
    "fits": fits.measure,
}
# What has a table of its own.
APART: dict[str, tuple[Callable[[int], Any], Callable[[Any], list[str]]]] = {
    "head": (head.measure, head.section),
    "sweeps": (lambda rounds: sweeps.measure(), sweeps.section),
    "profile": (lambda rounds: breakdown.measure(), breakdown.section),
}


def rows(records: list[Record]) -> list[str]:
    """Markdown, one line a comparison."""
    lines = ["| what | ours | compared with | its time | times ours |", "|---|---|---|---|---|"]
    for each in records:
        low, high = min(each["ratios"]), max(each["ratios"])
        ratio = f"**{np.median(each['ratios']):.2f}** ({low:.2f} to {high:.2f})"
        cells = [each["setting"], seconds(each["ours_s"]), each["other"], seconds(each["other_s"]), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page() -> list[str]:
    """The sections of the page, from all records there are."""
    parts: list[str] = []
    for name in COMPARISONS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            parts += [
                f"## {name.capitalize()}\n",
                f"{found['date']}, {found['machine']}; {found['rounds']} rounds.\n",
                *rows(found["records"]),
                "",
            ]
    for name, (_, section) in APART.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts += section(json.loads(path.read_text()))
    return "\n".join(parts).rstrip().split("\n")


def main() -> int:
    """Measure, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*COMPARISONS, *APART)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-only", action="store_true", help="write the tables from what was measured before")
    given = parser.parse_args()
    unknown = set(given.what) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in [] if given.page_only else given.what or names:
        print(f"{name} ...", flush=True)
        records = COMPARISONS[name](given.rounds) if name in COMPARISONS else APART[name][0](given.rounds)
        kept = {"date": str(date.today()), "machine": machine(), "rounds": given.rounds, "records": records}
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        if name in COMPARISONS:
            print("\n".join(rows(records)), flush=True)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    rewrite(PAGE, "measured", page())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
