"""Measure what is named, or all of it, and write docs/measured/speed.md from the records in benchmarks/results/.

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
HEAD = """# Speed

Written by `make bench` (`python -m benchmarks.speed`) from the records in
[benchmarks/results](../../benchmarks/results). Everything runs on one thread, and the two sides of a comparison
alternate. "Times ours" is the other side's time divided by this project's time in the same round: the median over
rounds, with the smallest and the largest value. Above 1 this project is faster.

- **Where the time is saved**: a prompt goes through the model once per group, in sampling and in training. With prompts
  of 8 tokens this saves little, and on both sides a batch is limited by products of small matrices.
- **Decoding single rollouts** is limited by reading keys and values, where transformers' own cache is as fast, and by
  products of a few rows with a layer's weights. At 10M parameters vLLM's CPU kernels take two thirds of this project's
  time for these products; `generator=vllm` uses them.
- **Left out**: transformers' `generate_batch`, if the prompts have more than 10,000 tokens in all. It takes minutes for
  them on a CPU.

Packing (`batch.packed`) saves the cost of padding:

- Even without packing, a pass has rows of similar length. So the saving is small for small passes, and grows with them.
  With one or two rows per pass it is nothing; if all rows fit into two passes, padded rows take half as long again as
  packed rows.
- Eager attention, and rows longer than a model's window, need one mask for the whole pass. Attention then costs the
  square of the pass, and packing is slower from two or three rows per pass on.
- Times of packing are CPU seconds of the thread. Times on a GPU are on a [separate page](gpu.md).
"""


def rows(records: list[Record]) -> list[str]:
    """Markdown, one line a comparison."""
    lines = ["| what | ours | beside | its time | times ours |", "|---|---|---|---|---|"]
    for each in records:
        low, high = min(each["ratios"]), max(each["ratios"])
        ratio = f"**{np.median(each['ratios']):.2f}** ({low:.2f} to {high:.2f})"
        cells = [each["setting"], seconds(each["ours_s"]), each["other"], seconds(each["other_s"]), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The page, from all records there are."""
    parts = [HEAD]
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
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Measure, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*COMPARISONS, *APART)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-only", action="store_true", help="write the page from what was measured before")
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
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
