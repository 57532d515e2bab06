"""Measure the controller's CPU seconds per phase by the number of members, and the exponent of growth."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks import scale
from benchmarks.speed.pairs import Record

MEMBERS = (10, 100, 1000, 10_000)
# With fewer members, the time of a phase is mostly a constant.
FITTED_FROM = 100


def measure() -> list[Record]:
    """Return one record per phase: its seconds and peak memory at each number of members."""
    options = argparse.Namespace(recipes=9, values=4, ranking=True, workers=2)
    studies = [scale.of_a_study(options, members) for members in MEMBERS]
    return [
        {
            "phase": phase,
            "members": list(MEMBERS),
            "s": [study[phase]["s"] for study in studies],
            "peak_mb": [study[phase]["peak_mb"] for study in studies],
        }
        for phase in studies[0]
    ]


def exponent(members: list[int], seconds: list[float]) -> float:
    """Return the slope of log seconds on log members, from `FITTED_FROM` on."""
    pairs = [(size, elapsed_s) for size, elapsed_s in zip(members, seconds, strict=True) if size >= FITTED_FROM]
    slope, _ = np.polyfit(np.log([size for size, _ in pairs]), np.log([elapsed_s for _, elapsed_s in pairs]), 1)
    return float(slope)


def section(stored: Record) -> list[str]:
    """Return the section of the page."""
    records = stored["records"]
    head = " | ".join(f"{size:,} members" for size in records[0]["members"])
    lines = [
        "## Sweeps\n",
        f"{stored['date']}, {stored['machine']}.\n",
        "The table shows CPU seconds of the controller (the process that launches members) in each phase of a study. "
        "The members' jobs end immediately, so only the controller is measured (`benchmarks/scale.py`). A study has "
        "nine recipes at four learning rates, with as many seeds as needed. *Exponent* is that of the growth with the "
        f"number of members, fitted from {FITTED_FROM} members on; 1 is linear growth.\n",
        f"| phase | {head} | exponent | peak memory |",
        f"|---|{'---|' * len(records[0]['members'])}---|---|",
    ]
    for each in records:
        cells = " | ".join(f"{elapsed_s:.2f} s" for elapsed_s in each["s"])
        growth_exponent = exponent(each["members"], each["s"])
        lines.append(f"| {each['phase']} | {cells} | {growth_exponent:.2f} | {max(each['peak_mb']):.0f} MB |")
    return [*lines, ""]
