"""Scores of each run on each evaluation set, up to a compute that all runs have spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array, Curve

# Name of the factor by which curves of several evaluation sets differ (`--metric all`).
SET = "set"
# If a run ended early, so that the common compute is below this fraction of the median run's compute, a note says so.
_EARLY = 0.5


@dataclass(frozen=True, eq=False)
class SetScores:
    """Scores of a study on several evaluation sets.

    Attributes:
        axis: compute axis.
        compute: largest compute that all runs have spent; evaluations beyond it are left out.
        metrics: name of each set's metric, by set.
        scores: by set, recipe and seed, the scores in the order of compute, without the one before training, (n,), n >=
            1.
        notes: remarks on runs that were left out, or that end early.
    """

    axis: str
    compute: float
    metrics: Mapping[str, str]
    scores: Mapping[str, Mapping[str, Mapping[str, Array]]]
    notes: tuple[str, ...] = ()


def set_scores(curves: Sequence[Curve], together: bool = False) -> SetScores | None:
    """Collect the scores of curves that differ in the factor `set`; None if no run was evaluated after the start.

    The first evaluation of a run, at compute 0, is of the model before training and is left out. Sets may be evaluated
    at different steps, so a run counts as having spent the compute of its last evaluation on any set.

    Args:
        curves: one per recipe and evaluation set.
        together: whether to keep only the computes at which a run was evaluated on all of its sets, so that sets are
            compared over the same compute.
    """
    spent: dict[tuple[str, str], float] = {}
    for curve in curves:
        for seed in dict.fromkeys(curve.seed.tolist()):
            run = _label_without_set(curve), str(seed)
            spent[run] = max(spent.get(run, 0.0), float(curve.compute[curve.seed == seed].max()))
    empty = [f"{recipe}, seed {seed}" for (recipe, seed), compute in spent.items() if compute <= 0]
    notes = [f"{run}: no evaluation after the start; left out" for run in empty]
    spent = {run: compute for run, compute in spent.items() if compute > 0}
    if not spent:
        return None
    compute = min(spent.values())
    if compute < _EARLY * float(np.median(list(spent.values()))):
        recipe, seed = min(spent, key=lambda run: spent[run])
        notes.append(f"{recipe}, seed {seed}, ends at compute {compute:.4g}: all runs are compared there")
    shared = _common_computes(curves)
    scores: dict[str, dict[str, dict[str, Array]]] = {}
    for curve in curves:
        by_recipe = scores.setdefault(curve.factors[SET], {})
        # The tolerance allows for rounding in sums of compute.
        in_range = (curve.compute > 0) & (curve.compute <= compute * (1 + 1e-9))
        for seed in dict.fromkeys(curve.seed[in_range].tolist()):
            rows = in_range & (curve.seed == seed)
            if together:
                rows &= np.isin(curve.compute, shared[_label_without_set(curve), str(seed)])
            if rows.any():
                by_recipe.setdefault(_label_without_set(curve), {})[str(seed)] = curve.reward[rows]
    metrics = {curve.factors[SET]: curve.metric for curve in curves}
    return SetScores(axis=curves[0].axis, compute=compute, metrics=metrics, scores=scores, notes=tuple(notes))


def _common_computes(curves: Sequence[Curve]) -> dict[tuple[str, str], list[float]]:
    shared: dict[tuple[str, str], set[float]] = {}
    for curve in curves:
        for seed in dict.fromkeys(curve.seed.tolist()):
            run, at = (_label_without_set(curve), str(seed)), set(curve.compute[curve.seed == seed].tolist())
            shared[run] = shared.get(run, at) & at
    return {run: sorted(at) for run, at in shared.items()}


def _label_without_set(curve: Curve) -> str:
    """Return the recipe's label without the suffix for the set, which `sweeps.source` appends."""
    return curve.recipe.replace(f" {SET}={curve.factors[SET]}", "")
