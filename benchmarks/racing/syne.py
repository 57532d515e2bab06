"""Syne Tune's DyHPO and MOBSTER on a study's curves, in an environment of its own: run by its Python, not by ours.

Reads studies' evaluations from stdin, a JSON list (R, E) a line, and writes for each line what became of it: by
method, at each total compute, how far each recipe was taken. Its schedulers are asked what to run next and told each
evaluation, one worker after the other, as in its own tuner; a pause keeps what was done.
"""

import json
import logging
import sys

from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import choice
from syne_tune.optimizer.baselines import MOBSTER, DyHPO
from syne_tune.optimizer.scheduler import SchedulerDecision

# Total compute at which each is asked who leads, as a share of all runs to the budget.
TOTALS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def run(make, rates: list[list[float]]) -> list[list[int]]:
    """Evaluations done of each recipe when each of the totals was reached, (T, R)."""
    recipes, steps = len(rates), len(rates[0])
    space = {"recipe": choice([str(i) for i in range(recipes)]), "steps": steps}
    scheduler = make(
        space,
        metric="rate",
        mode="max",
        resource_attr="step",
        max_resource_attr="steps",
        search_options={"debug_log": False},
        random_seed=0,
    )
    trials: dict[int, Trial] = {}
    done = [0] * recipes
    found: list[list[int]] = []
    new = 0
    while len(found) < len(TOTALS):
        suggested = scheduler.suggest(new)
        if suggested is None:
            break
        if suggested.spawn_new_trial_id:
            from datetime import datetime

            trial = Trial(new, suggested.config, datetime.now())
            trials[new] = trial
            scheduler.on_trial_add(trial)
            new += 1
        else:
            trial = trials[suggested.checkpoint_trial_id]
            if suggested.config is not None:
                trial.config = suggested.config
        recipe = int(trial.config["recipe"])
        while done[recipe] < steps and len(found) < len(TOTALS):
            done[recipe] += 1
            result = {"rate": rates[recipe][done[recipe] - 1], "step": done[recipe]}
            while len(found) < len(TOTALS) and sum(done) >= TOTALS[len(found)] * recipes * steps - 1e-9:
                found.append(list(done))
            if done[recipe] == steps:
                scheduler.on_trial_complete(trial, result)
                break
            if scheduler.on_trial_result(trial, result) != SchedulerDecision.CONTINUE:
                break
    return found + [list(done)] * (len(TOTALS) - len(found))


def main() -> None:
    """Line by line."""
    logging.disable(logging.WARNING)
    made = {
        "DyHPO": lambda space, **given: DyHPO(space, grace_period=1, rung_increment=1, **given),
        "MOBSTER": lambda space, **given: MOBSTER(space, type="promotion", grace_period=1, reduction_factor=3, **given),
    }
    for line in sys.stdin:
        rates = json.loads(line)
        told = {
            f"Syne Tune's {name}, {total:g} of the compute": done
            for name, make in made.items()
            for total, done in zip(TOTALS, run(make, rates), strict=True)
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
