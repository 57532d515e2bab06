"""Run Syne Tune's DyHPO and MOBSTER on a study's curves, with the Python of an environment that has Syne Tune.

Reads studies' evaluations from standard input, one JSON list (R, E) per line. For each line, writes how far each recipe
was taken, by method and total compute. As in Syne Tune's tuner, a scheduler suggests what to run next and receives
each evaluation; there is one worker, and a paused trial keeps its progress.
"""

import json
import logging
import sys

from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import choice
from syne_tune.optimizer.baselines import MOBSTER, DyHPO
from syne_tune.optimizer.scheduler import SchedulerDecision

# Total compute at which results are recorded, as a share of running all recipes to the budget.
TOTALS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def run(make, rates: list[list[float]]) -> list[list[int]]:
    """Return the number of evaluations of each recipe when each total was reached, (T, R)."""
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
    evaluations_at_totals: list[list[int]] = []
    next_trial_id = 0
    while len(evaluations_at_totals) < len(TOTALS):
        suggested = scheduler.suggest(next_trial_id)
        if suggested is None:
            break
        if suggested.spawn_new_trial_id:
            from datetime import datetime

            trial = Trial(next_trial_id, suggested.config, datetime.now())
            trials[next_trial_id] = trial
            scheduler.on_trial_add(trial)
            next_trial_id += 1
        else:
            trial = trials[suggested.checkpoint_trial_id]
            if suggested.config is not None:
                trial.config = suggested.config
        recipe = int(trial.config["recipe"])
        while done[recipe] < steps and len(evaluations_at_totals) < len(TOTALS):
            done[recipe] += 1
            result = {"rate": rates[recipe][done[recipe] - 1], "step": done[recipe]}
            while (
                len(evaluations_at_totals) < len(TOTALS)
                and sum(done) >= TOTALS[len(evaluations_at_totals)] * recipes * steps - 1e-9
            ):
                evaluations_at_totals.append(list(done))
            if done[recipe] == steps:
                scheduler.on_trial_complete(trial, result)
                break
            if scheduler.on_trial_result(trial, result) != SchedulerDecision.CONTINUE:
                break
    return evaluations_at_totals + [list(done)] * (len(TOTALS) - len(evaluations_at_totals))


def main() -> None:
    """Process standard input line by line."""
    logging.disable(logging.WARNING)
    schedulers = {
        "DyHPO": lambda space, **options: DyHPO(space, grace_period=1, rung_increment=1, **options),
        "MOBSTER": lambda space, **options: MOBSTER(
            space, type="promotion", grace_period=1, reduction_factor=3, **options
        ),
    }
    for line in sys.stdin:
        rates = json.loads(line)
        results = {
            f"Syne Tune's {name}, {total:g} of the compute": done
            for name, make in schedulers.items()
            for total, done in zip(TOTALS, run(make, rates), strict=True)
        }
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
