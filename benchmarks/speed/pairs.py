"""Measure several sides in turns, and their ratios."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every side in each round. Sides alternate, and every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(sides[name]())
    return seconds


def compared(seconds: Mapping[str, list[float]], ours: str, setting: str) -> list[Record]:
    """Return one record per other side, with its seconds as multiples of ours in each round."""
    return [
        {
            "setting": setting,
            "other": name,
            "ours_s": float(np.median(seconds[ours])),
            "other_s": float(np.median(values)),
            "ratios": [
                round(other_seconds / our_s, 3) for our_s, other_seconds in zip(seconds[ours], values, strict=True)
            ],
        }
        for name, values in seconds.items()
        if name != ours
    ]


def seconds(value: float) -> str:
    """Format seconds with three significant digits, in milliseconds below 0.1 s."""
    return f"{1000 * value:.3g} ms" if value < 0.1 else f"{value:.3g} s"


def machine() -> str:
    """Return the processor's name, its number of cores, and the versions of Python, torch and transformers."""
    import torch
    import transformers

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
