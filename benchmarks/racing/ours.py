"""Racing, by the forecast of the reward at the budget and by the last value in its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.special import expit

from benchmarks.racing.studies import (
    COMPUTE,
    EVALUATIONS,
    RECIPES,
    SEED_SD,
    WANDER,
    Outcome,
    Study,
    by_last,
    judge,
)
from sweeps.curve import Array, make_curve
from sweeps.decide.race import Look, make_look
from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.decide.standing import draw_rewards
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import paths

RACING = Rules(1.0)
CHANCES, LOOKS, LOSSES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3), (1, 2, 3), (0.003, 0.01, 0.02)
# Looks of racing: at every evaluation from a fifth of the budget on.
LOOKED = [(at, float(COMPUTE[at])) for at in range(EVALUATIONS // 5, EVALUATIONS)]


def last_value(study: Study, rules: Rules) -> Array:
    """Racing with the last value in place of the forecast, and all the noise that is known of one."""
    left, spent = list(range(RECIPES)), np.ones(RECIPES)
    row = np.zeros(RECIPES, dtype=int)
    for at, level in LOOKED:
        best = max(left, key=lambda i: study.rate[i, at])
        for i in [each for each in left if each != best]:
            error = np.sqrt(2 * (SEED_SD**2 + WANDER**2) + study.sd[i, at] ** 2 + study.sd[best, at] ** 2)
            z = (study.rate[best, at] - study.rate[i, at]) / error
            row[i] = row[i] + 1 if expit(-1.702 * z) < rules.p_ahead else 0
            if row[i] >= rules.looks:
                left.remove(i)
                spent[i] = level
    return spent


class Forecasts:
    """A study's forecasts at every look, and joint draws of the reward at the budget; shared by all rules.

    All recipes are foretold at every look, the stopped ones too; `sweeps.decide.race.run_race` leaves these out.
    """

    def __init__(self, study: Study, rules: Rules) -> None:
        self.fits: list[tuple[float, list[Fit], list[Array]]] = []
        for at, level in [*LOOKED, (EVALUATIONS, 1.0)]:
            seen = np.arange(len(COMPUTE)) <= at
            curves = [
                make_curve(str(i), COMPUTE[seen], study.rate[i, seen], sd=study.sd[i, seen]) for i in range(RECIPES)
            ]
            fits = fit_curves(curves)
            self.fits.append((level, fits, draw_rewards(fits, rules.budget)))

    def race(self, rules: Rules) -> tuple[int, Array]:
        """The winner, and compute spent on each."""
        spent, left = np.ones(RECIPES), list(range(RECIPES))
        looks: list[Look] = []
        for level, fits, draws in self.fits[:-1]:
            if len(left) < 2:
                break
            looks.append(make_look(level, [fits[i] for i in left], [draws[i] for i in left], rules, looks))
            for name in looks[-1].stopped:
                left.remove(int(name))
                spent[int(name)] = level
        _, fits, _ = self.fits[-1]
        return max(left, key=lambda i: float(np.median(paths(fits[i], [rules.budget])))), spent


def _name(rules: Rules) -> str:
    limit = f", loss {rules.loss:g}" if rules.loss < NO_LIMIT else ""
    return f"racing, p {rules.p_ahead:g}, {rules.looks} looks{limit}"


DEFAULT = _name(RACING)


def outcomes(study: Study) -> dict[str, Outcome]:
    """Of racing under every rule, by name."""
    found: dict[str, Outcome] = {}
    forecasts = Forecasts(study, RACING)
    for p in CHANCES:
        for looks in LOOKS:
            rules = replace(RACING, p_ahead=p, looks=looks, loss=NO_LIMIT)
            spent = last_value(study, rules)
            found[f"last value, p {p:g}, {looks} looks"] = judge(study, by_last(study, spent), spent)
            found[_name(rules)] = judge(study, *forecasts.race(rules))
    for rules in [replace(RACING, loss=loss) for loss in LOSSES]:
        found[_name(rules)] = judge(study, *forecasts.race(rules))
    return found
