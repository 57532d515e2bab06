"""Passes by held-out prompt of a study's runs at a compute, for comparisons paired by prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from sweeps.run.journal import JournalView
from sweeps.run.passes import Passes, read_passes

_PASS_RATE = re.compile(r"eval/(.+)/pass_rate")


def passes_by(runs: Sequence[JournalView], axis: str, metric: str) -> Callable[[str, float], Mapping[str, Passes]]:
    """Return a function that gives, by seed, the newest passes of a recipe's runs at or before a compute.

    Args:
        runs: of the study.
        axis: of compute, as the curves have it.
        metric: whose prompts; of another than a pass rate nothing is known.
    """
    name = _PASS_RATE.fullmatch(metric)
    if name is None:
        return lambda recipe, compute: {}
    known: dict[tuple[str, str], list[tuple[float, Passes]]] = {}
    for view in runs:
        compute = {record.step: record.metrics.get(axis) for record in view.of_kind("eval")}
        at = {step: value for step, value in compute.items() if value is not None}
        kept = read_passes(view.path.parent, name[1], list(at))
        key = str(view.header.get("recipe", "")), str(view.header.get("seed", ""))
        known.setdefault(key, []).extend((at[step], passes) for step, passes in sorted(kept.items()))

    def at_compute(recipe: str, compute: float) -> dict[str, Passes]:
        found = {}
        for (of, seed), entries in known.items():
            before = [passes for spent, passes in entries if spent <= compute * (1 + 1e-9)]
            if of == recipe and before:
                found[seed] = before[-1]
        return found

    return at_compute
