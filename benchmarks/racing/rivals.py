"""Stopping rules in common use, which stop by the last value. Optuna's pruners are used where they exist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner
from scipy.stats import wilcoxon

from benchmarks.racing.studies import COMPUTE, EVALUATIONS, RECIPES, Outcome, Study, by_last, judge
from sweeps.curve import Array

GRACE = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)


def halving(study: Study, eta: int, grace: float, among: Sequence[int] = tuple(range(RECIPES))) -> Array:
    """Apply successive halving by the last value; return the compute spent on each recipe, (R,)."""
    remaining, spent, level = list(among), np.zeros(RECIPES), grace
    while True:
        at = min(round(level * EVALUATIONS), EVALUATIONS)
        spent[remaining] = COMPUTE[at]
        if at == EVALUATIONS:
            return spent
        remaining = sorted(remaining, key=lambda i: -study.rate[i, at])[: max(1, len(remaining) // eta)]
        level *= eta


def median_rule(study: Study, grace: float) -> Array:
    """Stop a recipe whose best value so far is below the median of the other recipes' running means."""
    remaining, spent = list(range(RECIPES)), np.ones(RECIPES)
    running = np.cumsum(study.rate[:, 1:], axis=1) / np.arange(1, EVALUATIONS + 1)
    for at in range(round(grace * EVALUATIONS), EVALUATIONS):
        for i in list(remaining):
            others = [running[j, at - 1] for j in range(RECIPES) if j != i and spent[j] >= COMPUTE[at]]
            if len(remaining) > 1 and others and study.rate[i, 1 : at + 1].max() < np.median(others) - 1e-9:
                remaining.remove(i)
                spent[i] = COMPUTE[at]
    return spent


def signed_rank(study: Study, p: float, grace: float) -> Array:
    """Stop a recipe if the favourite passes more of the same prompts, by Wilcoxon's test (one-sided, ties split)."""
    remaining, spent = list(range(RECIPES)), np.ones(RECIPES)
    for at in range(round(grace * EVALUATIONS), EVALUATIONS):
        best = max(remaining, key=lambda i: study.rate[i, at])
        for i in [each for each in remaining if each != best]:
            differences = study.passed[i, at] - study.passed[best, at]
            if differences.any() and wilcoxon(differences, alternative="less", zero_method="zsplit").pvalue < p:
                remaining.remove(i)
                spent[i] = COMPUTE[at]
    return spent


def pruned(study: Study, pruner: BasePruner) -> Array:
    """Apply one of Optuna's pruners, with recipes reporting in turn; return the compute spent on each, (R,)."""
    optuna_study = optuna.create_study(
        direction="maximize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0)
    )
    trials = {recipe: optuna_study.ask() for recipe in range(RECIPES)}
    spent = np.ones(RECIPES)
    for at in range(1, EVALUATIONS):
        for recipe, trial in list(trials.items()):
            trial.report(float(study.rate[recipe, at]), at)
            if len(trials) > 1 and trial.should_prune():
                del trials[recipe]
                spent[recipe] = COMPUTE[at]
                optuna_study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return spent


def outcomes(study: Study) -> dict[str, Outcome]:
    """Return the outcomes of every rival, by name."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    full_compute = np.ones(RECIPES)
    outcomes_by_name = {"all runs to the budget": judge(study, by_last(study, full_compute), full_compute)}

    def add(name: str, spent: Array) -> None:
        outcomes_by_name[name] = judge(study, by_last(study, spent), spent)

    for eta in (2, 3, 4):
        for grace in GRACE:
            add(f"halving, eta {eta}, grace {grace:g}", halving(study, eta, grace))
            first = round(grace * EVALUATIONS)
            asha = SuccessiveHalvingPruner(min_resource=first, reduction_factor=eta)
            add(f"Optuna's ASHA, eta {eta}, grace {grace:g}", pruned(study, asha))
        hyperband = HyperbandPruner(min_resource=1, max_resource=EVALUATIONS, reduction_factor=eta)
        add(f"Optuna's Hyperband, eta {eta}", pruned(study, hyperband))
    for grace in GRACE:
        add(f"median, grace {grace:g}", median_rule(study, grace))
        median = MedianPruner(n_startup_trials=0, n_warmup_steps=round(grace * EVALUATIONS) - 1)
        add(f"Optuna's median, grace {grace:g}", pruned(study, median))
    for p in (0.001, 0.01, 0.05, 0.1):
        for grace in (0.1, 0.2, 0.3, 0.5):
            add(f"signed rank, p {p:g}, grace {grace:g}", signed_rank(study, p, grace))
    return outcomes_by_name
