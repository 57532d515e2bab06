"""Run the named comparisons, or all, and write the tables of docs/measured/speed.md from benchmarks/results/.

    make bench                                          all comparisons, about twenty minutes on two idle cores
    python -m benchmarks.speed generation --rounds 3    one comparison

TRL is included if PEERS_PYTHON names an interpreter with the packages of tests/parity/peers.txt.
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
# Comparisons with a different kind of table.
SEPARATE: dict[str, tuple[Callable[[int], Any], Callable[[Any], list[str]]]] = {
    "head": (head.measure, head.section),
    "sweeps": (lambda rounds: sweeps.measure(), sweeps.section),
    "profile": (lambda rounds: breakdown.measure(), breakdown.section),
}


def rows(records: list[Record]) -> list[str]:
    """Return a Markdown table with one line per comparison."""
    lines = ["| task | our time | other program | its time | times ours |", "|---|---|---|---|---|"]
    for each in records:
        low, high = min(each["ratios"]), max(each["ratios"])
        ratio = f"**{np.median(each['ratios']):.2f}** ({low:.2f} to {high:.2f})"
        cells = [each["setting"], seconds(each["ours_s"]), each["other"], seconds(each["other_s"]), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page() -> list[str]:
    """Return the sections of the page from all recorded results."""
    parts: list[str] = []
    for name in COMPARISONS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            stored = json.loads(path.read_text())
            parts += [
                f"## {name.capitalize()}\n",
                f"{stored['date']}, {stored['machine']}; {stored['rounds']} rounds.\n",
                *rows(stored["records"]),
                "",
            ]
    for name, (_, section) in SEPARATE.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts += section(json.loads(path.read_text()))
    return "\n".join(parts).rstrip().split("\n")


def main() -> int:
    """Run the comparisons, store their records, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*COMPARISONS, *SEPARATE)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-only", action="store_true", help="write the tables from what was measured before")
    options = parser.parse_args()
    unknown = set(options.what) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in [] if options.page_only else options.what or names:
        print(f"{name} ...", flush=True)
        records = COMPARISONS[name](options.rounds) if name in COMPARISONS else SEPARATE[name][0](options.rounds)
        results = {"date": str(date.today()), "machine": machine(), "rounds": options.rounds, "records": records}
        (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        if name in COMPARISONS:
            print("\n".join(rows(records)), flush=True)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    rewrite(PAGE, "measured", page())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
