"""Simulated studies with known truth: eight recipes, one run each, evaluated on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from benchmarks.forecast_zoo import exponential, frechet, power_law, weibull
from sweeps.curve import Array

RECIPES, EVALUATIONS, PROMPTS, SAMPLES = 8, 20, 128, 8
SEED_SD, WANDER, MEMORY = 0.015, 0.008, 0.1
# A false kill is a stopped recipe that would have been better than all remaining ones by more than this margin.
MARGIN = 0.02
COMPUTE: Array = np.concatenate([[0.0], np.arange(1, EVALUATIONS + 1) / EVALUATIONS])
MU: Array = np.linspace(-12, 12, 2401)


@dataclass(frozen=True)
class Setting:
    """A kind of studies.

    Attributes:
        spread: standard deviation of the recipes' asymptotes.
        middle: typical C_mid, as a share of the budget.
        outside: curves follow other laws than the fitted one.
        crossing: recipes with a higher asymptote rise later.
        collapses: share of runs that collapse before the budget.
        stairs: every curve rises twice: part of the way early, the rest in a steep step between 0.25 and 0.9.
    """

    name: str
    spread: float
    middle: float = 0.25
    outside: bool = False
    crossing: bool = False
    collapses: float = 0.0
    stairs: bool = False


SETTINGS = (
    Setting("spread 0.06", 0.06),
    Setting("spread 0.03", 0.03),
    Setting("spread 0.01", 0.01),
    Setting("curves that cross", 0.06, crossing=True),
    Setting("bend at the budget", 0.06, middle=0.9),
    Setting("other laws", 0.06, outside=True),
    Setting("collapses", 0.06, collapses=0.2),
)


@dataclass(frozen=True, eq=False)
class Study:
    """A simulated study of R recipes, E evaluations after the initial one, and P prompts.

    Attributes:
        truth, early: true mean reward at the budget and at a quarter of it, (R,).
        rate, sd: evaluated pass rates and their standard errors, (R, E + 1).
        passed: share of samples that passed, by prompt, (R, E + 1, P).
    """

    truth: Array
    early: Array
    rate: Array
    sd: Array
    passed: Array


def make_study(setting: Setting, number: int) -> Study:
    """Draw a study, which depends only on the setting and the number."""
    source = np.random.default_rng((sum(map(ord, setting.name)), number))
    ability = source.standard_normal(RECIPES)
    top = np.clip(0.6 + setting.spread * ability, 0.25, 0.95)
    late = source.normal(0, 0.4, RECIPES) + (0.5 * ability if setting.crossing else 0.0)
    middle, steep = setting.middle * np.exp(late), 1.5 * np.exp(source.normal(0, 0.25, RECIPES))
    kind = source.integers(4, size=RECIPES) if setting.outside else np.full(RECIPES, -1)
    collapse_at = np.where(source.random(RECIPES) < setting.collapses, source.uniform(0.2, 1.0, RECIPES), np.inf)
    seed_tops = np.clip(top + SEED_SD * source.standard_normal(RECIPES), 0.21, 0.97)
    # Drawn only for stairs, so that studies of other settings do not change.
    share, step = source.uniform([0.2, 0.25], [0.8, 0.9], (RECIPES, 2)).T if setting.stairs else (None, None)

    def curves(tops: Array, compute: Array) -> Array:
        rises = np.stack([_law(kind[i], tops[i], middle[i], steep[i])(compute) for i in range(RECIPES)])
        if share is not None and step is not None:
            late = np.stack([_law(-1, tops[i], step[i], 12.0)(compute) for i in range(RECIPES)])
            rises = share[:, None] * rises + (1 - share)[:, None] * late
        return np.asarray(rises - 0.3 * expit((compute[None, :] - collapse_at[:, None]) / 0.01))

    mean = curves(seed_tops, COMPUTE)
    early, truth = curves(top, np.array([0.25, 1.0])).T
    decay = np.exp(-1 / EVALUATIONS / MEMORY)
    state = np.zeros((RECIPES, len(COMPUTE)))
    for at in range(1, len(COMPUTE)):
        state[:, at] = decay * state[:, at - 1] + np.sqrt(1 - decay**2) * source.standard_normal(RECIPES)
    policy = np.clip(mean + WANDER * state, 0.01, 0.99)
    # All recipes have the same prompts. Each prompt has its own difficulty; on average they pass at the policy's rate.
    hard = source.normal(0, 1.5, PROMPTS)
    mu = np.interp(policy, expit(MU[:, None] + hard).mean(axis=1), MU)
    p = expit(mu[..., None] + hard)
    passed = source.binomial(SAMPLES, p) / SAMPLES
    smoothed = (passed * SAMPLES + 0.5) / (SAMPLES + 1)
    sd = np.sqrt((smoothed * (1 - smoothed)).mean(axis=-1) / (PROMPTS * SAMPLES))
    return Study(truth, early, passed.mean(axis=-1), sd, passed)


def _law(kind: int, top: float, middle: float, steep: float) -> Callable[[Array], Array]:
    start = 0.2
    if kind < 0:

        def sigmoid(compute: Array) -> Array:
            with np.errstate(divide="ignore"):
                value: Array = start + (top - start) / (1 + (middle / compute) ** steep)
            return value

        return sigmoid
    return (
        exponential(start, top, 1.4 * middle),
        weibull(start, top, 1.4 * middle, 0.6),
        frechet(start, top, 0.7 * middle, 1.0),
        power_law(start, top, 0.5 * middle, 0.8),
    )[kind]


@dataclass(frozen=True)
class Outcome:
    """Result of a method: regret, compute (share of running all to the budget), kills, and false kills."""

    regret: float
    compute: float
    kills: int
    false: int


def judge(study: Study, winner: int, spent: Array) -> Outcome:
    """Return the outcome of a method that names a winner and has spent `spent` (R,) on the recipes, as shares of a run.

    The remaining recipes are the ones that ran to the budget, or farthest if none did.
    """
    remaining = spent >= spent.max() - 1e-9
    false = int((study.truth[~remaining] > study.truth[remaining].max() + MARGIN).sum())
    return Outcome(float(study.truth.max() - study.truth[winner]), float(spent.mean()), int((~remaining).sum()), false)


def by_last(study: Study, spent: Array) -> int:
    """Return the recipe with the highest mean of its last two evaluations, among the runs that went farthest."""
    end = round(float(spent.max()) * EVALUATIONS)
    last = np.where(spent >= spent.max() - 1e-9, study.rate[:, max(end - 1, 0) : end + 1].mean(axis=1), -np.inf)
    return int(np.argmax(last))
