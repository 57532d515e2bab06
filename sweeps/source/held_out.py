"""Results per held-out prompt of a study's runs, for pass@k at any k and for comparisons paired by prompt."""

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
    """Return the run's journal, with pass@k or maj@k added to evaluations that lack it, computed from `passes.jsonl`.

    So pass@k is also available for journals of earlier versions, and for any k. pass@1 is the pass rate.

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
        prompt_passes = passes.get(record.step) if record.kind == "eval" and metric not in record.metrics else None
        if prompt_passes is not None and (match[2] == "pass" or prompt_passes.wrong is not None):
            result = mean_at_k(statistic, prompt_passes.votes, k)
            if result is not None:
                record = replace(record, metrics={**record.metrics, metric: result[0], f"{metric}_se": result[1]})
        records.append(record)
    return replace(view, records=records)


def metric_at_k(runs: Sequence[JournalView], metric: str) -> str | None:
    """Return the metric pass@k with the largest k that all runs of a study have; None if this k is 1.

    Args:
        runs: runs of the study.
        metric: reward of the study; only a pass rate has a pass@k.
    """
    match = PASS_RATE.fullmatch(metric)
    if match is None or not runs:
        return None
    largest_k = []
    for view in runs:
        evaluations = view.of_kind("eval")
        records = [record for record in evaluations if metric in record.metrics]
        if evaluations and not records:
            return None
        if not records:
            continue  # a run without an evaluation so far
        matches = [_AT_K.fullmatch(name) for name in records[-1].metrics]
        k_values = [int(item[3]) for item in matches if item and item[2] == "pass" and item[1] == match[1]]
        if not k_values:  # the journal was written by an earlier version
            passes = read_passes(view.path.parent, match[1], [records[-1].step])
            k_values = [k for item in passes.values() for k in sizes(max(item.scored, default=0))]
        largest_k.append(max(k_values, default=1))
    return f"eval/{match[1]}/pass@{min(largest_k)}" if min(largest_k, default=1) > 1 else None


@dataclass(frozen=True)
class PromptShares(AsJson):
    """Fractions of an evaluation set's prompts that were never, or always, passed, for one recipe.

    All values are means over the recipe's runs.

    Attributes:
        compute: compute of each evaluation, (n,).
        never, always: at each evaluation, fraction of prompts that no completion passed, and that every completion
            passed, (n,).
        gained: fraction of prompts without a pass in the first evaluation and with a pass in the last.
        lost: fraction of prompts with a pass in the first evaluation and without a pass in the last.
    """

    recipe: str
    compute: tuple[float, ...]
    never: tuple[float, ...]
    always: tuple[float, ...]
    gained: float
    lost: float


def prompt_shares(runs: Sequence[JournalView], axis: str, metric: str) -> list[PromptShares]:
    """Return for each recipe the fractions of held-out prompts that are never or always passed.

    Recipes without results per prompt are left out.

    Args:
        runs: runs of the study.
        axis: axis of compute, as in the curves.
        metric: reward of the study; only a pass rate has prompts.
    """
    match = PASS_RATE.fullmatch(metric)
    by_recipe: dict[str, list[dict[int, tuple[float, Passes]]]] = {}
    for view in runs if match is not None else ():
        compute = {record.step: record.metrics.get(axis) for record in view.of_kind("eval")}
        passes_by_step = read_passes(view.path.parent, match[1] if match else "", list(compute))
        # Keep only evaluations on the same prompts as the newest one: other prompts cannot be compared one by one.
        prompts = passes_by_step[max(passes_by_step)].prompts if passes_by_step else ""
        run = {
            step: (spent, passes_by_step[step])
            for step, spent in compute.items()
            if spent is not None and step in passes_by_step and passes_by_step[step].prompts == prompts
        }
        if run:
            by_recipe.setdefault(str(view.header.get("recipe", "")), []).append(run)
    return [shares for recipe, run in by_recipe.items() if (shares := _average_shares(recipe, run)) is not None]


def _average_shares(recipe: str, runs: Sequence[Mapping[int, tuple[float, Passes]]]) -> PromptShares | None:
    """Average the runs of a recipe at their common steps; None if there are none, or no prompt was graded."""
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    if not steps:
        return None
    rows, changes = [], []
    for run in runs:
        passed = np.array([run[step][1].passed for step in steps], dtype=float)
        scored = np.array([run[step][1].scored for step in steps], dtype=float)
        is_graded = (scored > 0).all(axis=0)
        if not is_graded.any():
            return None
        passed, scored = passed[:, is_graded], scored[:, is_graded]
        rows.append([[run[step][0] for step in steps], (passed == 0).mean(axis=1), (passed == scored).mean(axis=1)])
        changes.append([((passed[0] == 0) & (passed[-1] > 0)).mean(), ((passed[0] > 0) & (passed[-1] == 0)).mean()])
    compute, never, always = np.mean(np.array(rows, dtype=float), axis=0).tolist()
    gained, lost = np.mean(changes, axis=0).tolist()
    return PromptShares(recipe, tuple(compute), tuple(never), tuple(always), gained, lost)


def passes_by(runs: Sequence[JournalView], axis: str, metric: str) -> Callable[[str, float], Mapping[str, Passes]]:
    """Return a function of recipe and compute. It returns each seed's newest results per prompt up to that compute.

    Args:
        runs: runs of the study.
        axis: axis of compute, as in the curves.
        metric: reward whose prompts are compared; if it is not a pass rate, the function returns an empty mapping.
    """
    name = PASS_RATE.fullmatch(metric)
    if name is None:
        return lambda recipe, compute: {}
    by_run: dict[tuple[str, str], list[tuple[float, Passes]]] = {}
    for view in runs:
        compute = {record.step: record.metrics.get(axis) for record in view.of_kind("eval")}
        compute_by_step = {step: value for step, value in compute.items() if value is not None}
        passes_by_step = read_passes(view.path.parent, name[1], list(compute_by_step))
        key = str(view.header.get("recipe", "")), str(view.header.get("seed", ""))
        by_run.setdefault(key, []).extend(
            (compute_by_step[step], passes) for step, passes in sorted(passes_by_step.items())
        )

    def at_compute(recipe: str, compute: float) -> dict[str, Passes]:
        newest = {}
        for (label, seed), entries in by_run.items():
            earlier = [passes for spent, passes in entries if spent <= compute * (1 + 1e-9)]
            if label == recipe and earlier:
                newest[seed] = earlier[-1]
        return newest

    return at_compute
