"""Racing by the forecast of the reward at the budget, and by the last value instead."""

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
# Looks of a race: every evaluation from a fifth of the budget on.
LOOK_POINTS = [(at, float(COMPUTE[at])) for at in range(EVALUATIONS // 5, EVALUATIONS)]


def last_value(study: Study, rules: Rules) -> Array:
    """Race by the last value instead of the forecast, with all known noise of a value. Returns compute per recipe."""
    remaining, spent = list(range(RECIPES)), np.ones(RECIPES)
    looks_in_a_row = np.zeros(RECIPES, dtype=int)
    for look_index, level in LOOK_POINTS:
        best = max(remaining, key=lambda i: study.rate[i, look_index])
        for i in [each for each in remaining if each != best]:
            error = np.sqrt(
                2 * (SEED_SD**2 + WANDER**2) + study.sd[i, look_index] ** 2 + study.sd[best, look_index] ** 2
            )
            z = (study.rate[best, look_index] - study.rate[i, look_index]) / error
            looks_in_a_row[i] = looks_in_a_row[i] + 1 if expit(-1.702 * z) < rules.p_ahead else 0
            if looks_in_a_row[i] >= rules.looks:
                remaining.remove(i)
                spent[i] = level
    return spent


class Forecasts:
    """A study's fits at every look, with joint draws of the reward at the budget, shared by all rules.

    Stopped recipes are forecast too; `sweeps.decide.race.run_race` leaves them out.
    """

    def __init__(self, study: Study, rules: Rules) -> None:
        self.fits: list[tuple[float, list[Fit], list[Array]]] = []
        for at, level in [*LOOK_POINTS, (EVALUATIONS, 1.0)]:
            seen = np.arange(len(COMPUTE)) <= at
            curves = [
                make_curve(str(i), COMPUTE[seen], study.rate[i, seen], sd=study.sd[i, seen]) for i in range(RECIPES)
            ]
            fits = fit_curves(curves)
            self.fits.append((level, fits, draw_rewards(fits, rules.budget)))

    def race(self, rules: Rules) -> tuple[int, Array]:
        """Return the winner, and the compute spent on each recipe."""
        spent, remaining = np.ones(RECIPES), list(range(RECIPES))
        looks: list[Look] = []
        for level, fits, draws in self.fits[:-1]:
            if len(remaining) < 2:
                break
            looks.append(make_look(level, [fits[i] for i in remaining], [draws[i] for i in remaining], rules, looks))
            for name in looks[-1].stopped:
                remaining.remove(int(name))
                spent[int(name)] = level
        _, fits, _ = self.fits[-1]
        return max(remaining, key=lambda i: float(np.median(paths(fits[i], [rules.budget])))), spent


def _name(rules: Rules) -> str:
    limit = f", loss {rules.loss:g}" if rules.loss < NO_LIMIT else ""
    return f"racing, p {rules.p_ahead:g}, {rules.looks} looks{limit}"


DEFAULT = _name(RACING)


def outcomes(study: Study) -> dict[str, Outcome]:
    """Return the outcomes of racing under every rule, by name."""
    outcomes_by_name: dict[str, Outcome] = {}
    forecasts = Forecasts(study, RACING)
    for p in CHANCES:
        for looks in LOOKS:
            rules = replace(RACING, p_ahead=p, looks=looks, loss=NO_LIMIT)
            spent = last_value(study, rules)
            outcomes_by_name[f"last value, p {p:g}, {looks} looks"] = judge(study, by_last(study, spent), spent)
            outcomes_by_name[_name(rules)] = judge(study, *forecasts.race(rules))
    for rules in [replace(RACING, loss=loss) for loss in LOSSES]:
        outcomes_by_name[_name(rules)] = judge(study, *forecasts.race(rules))
    return outcomes_by_name
