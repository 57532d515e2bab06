"""Results per held-out prompt of a study's runs at a given compute, for comparisons paired by prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from sweeps.run.journal import JournalView
from sweeps.run.passes import Passes, read_passes

_PASS_RATE = re.compile(r"eval/(.+)/pass_rate")


def passes_by(runs: Sequence[JournalView], axis: str, metric: str) -> Callable[[str, float], Mapping[str, Passes]]:
    """Return a function of (recipe, compute) that returns the newest passes at or before that compute, by seed.

    Args:
        runs: runs of the study.
        axis: axis of compute, as in the curves.
        metric: reward whose prompts are compared; without a pass rate the function returns nothing.
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
        newest = {}
        for (label, seed), entries in known.items():
            earlier = [passes for spent, passes in entries if spent <= compute * (1 + 1e-9)]
            if label == recipe and earlier:
                newest[seed] = earlier[-1]
        return newest

    return at_compute
