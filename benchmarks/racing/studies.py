"""Simulated studies of which the truth is known: eight recipes, one run each, evaluated on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from benchmarks.forecast_zoo import exponential, frechet, power_law, weibull
from sweeps.curve import Array

RECIPES, EVALUATIONS, PROMPTS, SAMPLES = 8, 20, 128, 8
SEED_SD, WANDER, MEMORY = 0.015, 0.008, 0.1
# A false kill is a stopped recipe that would have been better than all that are left by more than this.
MARGIN = 0.02
COMPUTE: Array = np.concatenate([[0.0], np.arange(1, EVALUATIONS + 1) / EVALUATIONS])
MU: Array = np.linspace(-12, 12, 2401)


@dataclass(frozen=True)
class Setting:
    """A kind of studies.

    spread: sd of the recipes' asymptotes. middle: of C_mid, as a share of the budget. outside: laws that are not the
    fitted one. crossing: the higher the asymptote the later the rise. collapses: share of runs that fall on their way.
    stairs: every curve rises twice: a part of the way early, the rest in a steep step between 0.25 and 0.9.
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
    """truth, early (R,): true mean reward at the budget and at a quarter of it. rate (R, E + 1): evaluations, sd their
    standard errors, passed (R, E + 1, P): the share of samples that passed, by prompt."""

    truth: Array
    early: Array
    rate: Array
    sd: Array
    passed: Array


def make_study(setting: Setting, number: int) -> Study:
    """Drawn by the setting and the number alone."""
    source = np.random.default_rng((sum(map(ord, setting.name)), number))
    standing = source.standard_normal(RECIPES)
    top = np.clip(0.6 + setting.spread * standing, 0.25, 0.95)
    late = source.normal(0, 0.4, RECIPES) + (0.5 * standing if setting.crossing else 0.0)
    middle, steep = setting.middle * np.exp(late), 1.5 * np.exp(source.normal(0, 0.25, RECIPES))
    kind = source.integers(4, size=RECIPES) if setting.outside else np.full(RECIPES, -1)
    falls = np.where(source.random(RECIPES) < setting.collapses, source.uniform(0.2, 1.0, RECIPES), np.inf)
    own = np.clip(top + SEED_SD * source.standard_normal(RECIPES), 0.21, 0.97)
    # Drawn for stairs alone, so that the studies of the other settings stay as they are.
    share, step = source.uniform([0.2, 0.25], [0.8, 0.9], (RECIPES, 2)).T if setting.stairs else (None, None)

    def curves(tops: Array, compute: Array) -> Array:
        rises = np.stack([_law(kind[i], tops[i], middle[i], steep[i])(compute) for i in range(RECIPES)])
        if share is not None and step is not None:
            late = np.stack([_law(-1, tops[i], step[i], 12.0)(compute) for i in range(RECIPES)])
            rises = share[:, None] * rises + (1 - share)[:, None] * late
        return np.asarray(rises - 0.3 * expit((compute[None, :] - falls[:, None]) / 0.01))

    mean = curves(own, COMPUTE)
    early, truth = curves(top, np.array([0.25, 1.0])).T
    kept = np.exp(-1 / EVALUATIONS / MEMORY)
    state = np.zeros((RECIPES, len(COMPUTE)))
    for at in range(1, len(COMPUTE)):
        state[:, at] = kept * state[:, at - 1] + np.sqrt(1 - kept**2) * source.standard_normal(RECIPES)
    policy = np.clip(mean + WANDER * state, 0.01, 0.99)
    # The same prompts for all: each has its own difficulty, and their mean passes as the policy does.
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
    """regret; compute, as a share of all runs to the budget; kills and how many of them were false."""

    regret: float
    compute: float
    kills: int
    false: int


def judge(study: Study, winner: int, spent: Array) -> Outcome:
    """What a method comes to that names a winner and has spent so much on each recipe, (R,), as a share of a run.

    Where no run was taken to the budget, those taken farthest are the ones that are left.
    """
    left = spent >= spent.max() - 1e-9
    false = int((study.truth[~left] > study.truth[left].max() + MARGIN).sum())
    return Outcome(float(study.truth.max() - study.truth[winner]), float(spent.mean()), int((~left).sum()), false)


def by_last(study: Study, spent: Array) -> int:
    """Of the runs taken farthest, the one with the highest mean of its last two evaluations."""
    end = round(float(spent.max()) * EVALUATIONS)
    last = np.where(spent >= spent.max() - 1e-9, study.rate[:, max(end - 1, 0) : end + 1].mean(axis=1), -np.inf)
    return int(np.argmax(last))
