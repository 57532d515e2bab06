"""Results per held-out prompt of a study's runs: pass@k at any k, and comparisons paired by prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sweeps.as_json import AsJson
from sweeps.run.journal import PASS_RATE, JournalView
from sweeps.run.pass_at_k import STATISTICS, mean_at_k, sizes
from sweeps.run.passes import Passes, read_passes

_AT_K = re.compile(r"eval/(.+)/(pass|maj)@([1-9]\d*)")


def with_at_k(view: JournalView, metric: str) -> JournalView:
    """Return a run's journal with pass@k or maj@k in its evaluations, computed from `passes.jsonl` where it lacks it.

    So journals of earlier versions have pass@k too, and k need not be a power of two. The pass rate is pass@1.

    Args:
        view: the run's journal.
        metric: name of the metric, such as `eval/heldout/pass@8`; for other metrics the journal is returned unchanged.
    """
    match = _AT_K.fullmatch(metric)
    missing = [record for record in view.of_kind("eval") if metric not in record.metrics]
    if match is None or not missing:
        return view
    set_name, statistic, k = match[1], STATISTICS[match[2]], int(match[3])
    passes = read_passes(view.path.parent, set_name, [record.step for record in missing])
    records = []
    for record in view.records:
        found = passes.get(record.step) if record.kind == "eval" and metric not in record.metrics else None
        if found is not None and (match[2] == "pass" or found.wrong is not None):
            result = mean_at_k(statistic, found.votes, k)
            if result is not None:
                record = replace(record, metrics={**record.metrics, metric: result[0], f"{metric}_se": result[1]})
        records.append(record)
    return replace(view, records=records)


def metric_at_k(runs: Sequence[JournalView], metric: str) -> str | None:
    """Return the name of pass@k for the largest k that all runs of a study have; None if there is none.

    Args:
        runs: runs of the study.
        metric: the reward of the study; only a pass rate has pass@k.
    """
    match = PASS_RATE.fullmatch(metric)
    if match is None or not runs:
        return None
    most = []
    for view in runs:
        evaluations = view.of_kind("eval")
        records = [record for record in evaluations if metric in record.metrics]
        if evaluations and not records:
            return None
        if not records:
            continue  # a run without an evaluation so far
        recorded = [_AT_K.fullmatch(name) for name in records[-1].metrics]
        known = [int(each[3]) for each in recorded if each and each[2] == "pass" and each[1] == match[1]]
        if not known:  # a journal of an earlier version
            passes = read_passes(view.path.parent, match[1], [records[-1].step])
            known = [k for each in passes.values() for k in sizes(max(each.scored, default=0))]
        most.append(max(known, default=1))
    return f"eval/{match[1]}/pass@{min(most)}" if min(most, default=1) > 1 else None


@dataclass(frozen=True)
class PromptShares(AsJson):
    """Shares of a set's prompts that no completion, some, or every completion passed, of one recipe.

    All are means over the recipe's runs, by evaluation, (n,).

    Attributes:
        compute: compute at the evaluations.
        never, always: shares of prompts with no pass, and with nothing but passes; the rest is in between.
        gained: share of prompts with no pass in the first evaluation that have one in the last.
        lost: share of prompts with a pass in the first evaluation that have none in the last.
    """

    recipe: str
    compute: tuple[float, ...]
    never: tuple[float, ...]
    always: tuple[float, ...]
    gained: float
    lost: float


def prompt_shares(runs: Sequence[JournalView], axis: str, metric: str) -> list[PromptShares]:
    """Return the shares of held-out prompts that pass never or always, by recipe; recipes without passes are left out.

    Args:
        runs: runs of the study.
        axis: axis of compute, as in the curves.
        metric: the reward of the study; only a pass rate has prompts.
    """
    match = PASS_RATE.fullmatch(metric)
    by_recipe: dict[str, list[dict[int, tuple[float, Passes]]]] = {}
    for view in runs if match is not None else ():
        compute = {record.step: record.metrics.get(axis) for record in view.of_kind("eval")}
        kept = read_passes(view.path.parent, match[1] if match else "", list(compute))
        # Prompts can be compared only between evaluations of the same prompts.
        prompts = kept[max(kept)].prompts if kept else ""
        known = {
            step: (at, kept[step])
            for step, at in compute.items()
            if at is not None and step in kept and kept[step].prompts == prompts
        }
        if known:
            by_recipe.setdefault(str(view.header.get("recipe", "")), []).append(known)
    return [shares for recipe, known in by_recipe.items() if (shares := _shares(recipe, known)) is not None]


def _shares(recipe: str, runs: Sequence[Mapping[int, tuple[float, Passes]]]) -> PromptShares | None:
    """Average the runs of a recipe at the steps that all have; None if they share none or no prompt was graded."""
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    if not steps:
        return None
    rows, moved = [], []
    for run in runs:
        passed = np.array([run[step][1].passed for step in steps], dtype=float)
        scored = np.array([run[step][1].scored for step in steps], dtype=float)
        graded = (scored > 0).all(axis=0)
        if not graded.any():
            return None
        passed, scored = passed[:, graded], scored[:, graded]
        rows.append([[run[step][0] for step in steps], (passed == 0).mean(axis=1), (passed == scored).mean(axis=1)])
        moved.append([((passed[0] == 0) & (passed[-1] > 0)).mean(), ((passed[0] > 0) & (passed[-1] == 0)).mean()])
    compute, never, always = np.mean(np.array(rows, dtype=float), axis=0).tolist()
    gained, lost = np.mean(moved, axis=0).tolist()
    return PromptShares(recipe, tuple(compute), tuple(never), tuple(always), gained, lost)


def passes_by(runs: Sequence[JournalView], axis: str, metric: str) -> Callable[[str, float], Mapping[str, Passes]]:
    """Return a function of (recipe, compute) that returns the newest passes at or before that compute, by seed.

    Args:
        runs: runs of the study.
        axis: axis of compute, as in the curves.
        metric: reward whose prompts are compared; if it is not a pass rate, the function returns an empty mapping.
    """
    name = PASS_RATE.fullmatch(metric)
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
