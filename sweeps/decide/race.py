"""Racing: early stopping of recipes that will probably not be best at the budget.

Recipes are judged at growing levels of compute, the same for all recipes. At each of these *looks*, every recipe that
is still in the race is fitted to its evaluations up to that level only. So a decision depends on the evaluations alone,
not on the time of the look: a race that is repeated, or continued by another process, decides the same.

A recipe is stopped if two conditions hold (`Rules`). First, its probability of ending ahead of the favourite was small
at a number of looks in a row. Second, the expected cost of all stops together is within a limit, because many small
probabilities add up, and the forecasts of several recipes may err in the same way. Both numbers come from joint draws
of the reward at the budget (`sweeps.decide.standing.draw_rewards`). A recipe whose asymptote is not identifiable keeps
its full uncertainty in these draws, so that no recipe is stopped because of a forecast that the data do not support.
`benchmarks/racing` compares these rules with successive halving and others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve, with_shared_scale
from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.decide.standing import chances_of_being_best, draw_rewards
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, FitOptions, Interval, fit_curves
from sweeps.fit.predict import can_forecast_at, quantiles
from sweeps.fit.verdict import chance
from sweeps.run import fields
from sweeps.run.journal import JournalView
from sweeps.terminal import counted

# A level of compute is multiplied by this before a run's compute is compared with it: the run's compute is a sum over
# steps, which may fall short of the level by rounding.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class Chance(AsJson):
    """A recipe's probabilities of winning, as computed at one look.

    Attributes:
        recipe, verdict: label of the recipe, and the verdict of its fit at this look.
        p_best: probability of having the highest reward at the budget.
        p_ahead: probability of ending ahead of the favourite; None for the favourite.
        R: reward at the budget, median with 95% interval.
        below: number of consecutive looks up to this one at which p_ahead was below `Rules.p_ahead`.
    """

    recipe: str
    p_best: float
    p_ahead: float | None
    R: Interval
    verdict: str
    below: int

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Chance:
        """Create chances from the JSON that `to_json` wrote; raise ValueError if a field is invalid."""
        bounds = fields.group(entry, "R")
        return cls(
            recipe=fields.text(entry, "recipe"),
            p_best=fields.number(entry, "p_best"),
            p_ahead=fields.number_or_none(entry, "p_ahead"),
            R=Interval(*(fields.number_or_none(bounds, name) for name in ("value", "low", "high"))),
            verdict=fields.text(entry, "verdict"),
            below=fields.whole(entry, "below", least=0),
        )


@dataclass(frozen=True)
class Look(AsJson):
    """One look of a race: each recipe's chances, from its evaluations up to a compute, and the recipes stopped.

    Attributes:
        compute: compute up to which evaluations count, in the curves' unit.
        favourite: recipe with the highest expected reward at the budget.
        chances: chances of every recipe still in the race.
        stopped: recipes that this look stops.
        loss: reward at the budget of the best recipe stopped here minus that of the best remaining one, at least 0,
            averaged over draws, as a fraction of the reward's scale.
    """

    compute: float
    favourite: str
    chances: tuple[Chance, ...]
    stopped: tuple[str, ...]
    loss: float = 0.0

    def of(self, recipe: str) -> Chance:
        """Return the chances of one recipe; raise StopIteration if the look does not judge it."""
        return next(entry for entry in self.chances if entry.recipe == recipe)

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Look:
        """Create a look from the JSON that `to_json` wrote.

        Raises:
            ValueError: a field has the wrong type, or `favourite` or `stopped` names a recipe that `chances` lacks.
        """
        chances = tuple(Chance.of_json(item) for item in fields.groups(entry, "chances"))
        favourite, stopped = fields.text(entry, "favourite"), fields.texts(entry, "stopped")
        if unknown := {favourite, *stopped} - {chance.recipe for chance in chances}:
            raise ValueError(f"chances: none of {sorted(unknown)[0]!r}")
        loss = fields.number(entry, "loss") if "loss" in entry else 0.0
        return cls(fields.number(entry, "compute"), favourite, chances, stopped, loss)

    def why(self, recipe: str, rules: Rules) -> str:
        """Return in words why this look stops a recipe."""
        chances, rival = self.of(recipe), self.of(self.favourite)
        ours, theirs = _format(chances.R), _format(rival.R)
        again = f"; the same at {chances.below} looks in a row" if chances.below > 1 else ""
        return (
            f"stopped at compute {self.compute:.4g}: {chance(chances.p_ahead or 0.0)} of ending ahead of "
            f"{rival.recipe} at {rules.budget:.4g}, where its forecast is {ours} and that of {rival.recipe} is "
            f"{theirs}{again}"
        )


@dataclass(frozen=True)
class RecipeState(AsJson):
    """A recipe's state in a race.

    Attributes:
        stopped_at: compute at which its runs are stopped; None while it is in the race.
        p_best, p_ahead, R: see `Chance`, from the last look that judged the recipe; None before the first.
        spent: compute of all its runs together, counted up to where the race stops them.
        reason: the state in words.
    """

    recipe: str
    stopped_at: float | None
    p_best: float | None
    p_ahead: float | None
    R: Interval | None
    spent: float
    reason: str


@dataclass(frozen=True)
class Race(AsJson):
    """State of a race after all evaluations so far.

    Attributes:
        rules, unit: rules of the race, and the unit of compute.
        looks, runners: the looks taken, and every recipe's state.
        leader: favourite of the last look; None before the first.
        full: compute of all runs if each reached the budget. saved: how much of it stopped runs do not spend.
        waits_for: recipes whose evaluations the next look waits for.
    """

    rules: Rules
    unit: str
    looks: tuple[Look, ...]
    runners: tuple[RecipeState, ...]
    leader: str | None
    full: float
    saved: float
    waits_for: tuple[str, ...]
    sentence: str

    JSON: ClassVar[Mapping[str, str | None]] = {"runners": "recipes"}

    @property
    def stopped(self) -> dict[str, float]:
        """Compute at which each stopped recipe was stopped, by recipe."""
        return {runner.recipe: runner.stopped_at for runner in self.runners if runner.stopped_at is not None}


def run_race(
    curves: Sequence[Curve],
    rules: Rules,
    options: FitOptions | None = None,
    ended: Collection[str] = (),
    workers: int = 1,
    failed: Collection[str] = (),
    lost: Mapping[str, Collection[str]] | None = None,
) -> Race:
    """Take all looks of a race that the evaluations so far allow, from the first.

    A look is taken as soon as every recipe in the race has been evaluated up to the look's compute, has ended or has
    failed.

    Args:
        curves: one curve per recipe.
        rules: determine when looks are taken and recipes stopped.
        options: options of every fit; `max_compute` also ends the race there.
        ended: recipes whose runs will not continue, so that no look waits for them.
        workers: number of processes that share the fits of a look.
        failed: recipes whose runs have all failed; looks beyond their last evaluation neither wait for them nor judge
            them.
        lost: failed seeds by recipe; no look waits for them while other seeds of the recipe continue.

    Raises:
        UserError: fewer than two recipes.
    """
    if len(curves) < 2:
        raise UserError(f"a race takes two recipes or more, and here is {len(curves)}")
    lost = lost or {}
    reached = {
        curve.recipe: math.inf if curve.recipe in ended else _compute_reached(curve, lost.get(curve.recipe, ()))
        for curve in curves
    }
    # Recipes whose runs have all failed are judged up to their largest compute. Later looks do not wait for them.
    reached |= {curve.recipe: float(curve.compute.max()) for curve in curves if curve.recipe in failed}
    looks: list[Look] = []
    while isinstance(pending := next_look(curves, rules, reached, looks, options, workers, failed), Look):
        looks.append(pending)
    return _assemble_race(curves, rules, looks, pending)


@dataclass(frozen=True)
class RunStates:
    """States of the runs behind the curves, for a race.

    Attributes:
        ended: recipes none of whose runs is still running.
        failed: recipes whose runs have all failed.
        lost: seeds whose runs have failed, by recipe.
    """

    ended: tuple[str, ...]
    failed: tuple[str, ...]
    lost: Mapping[str, Sequence[str]]


def run_states(curves: Sequence[Curve], runs: Sequence[JournalView]) -> RunStates:
    """Return the states of the runs behind the curves. Curves of sources without journals count as ended."""
    status_by_recipe: dict[str, dict[str, str]] = {}  # status of each run, by recipe and seed
    for view in runs:
        status_by_recipe.setdefault(str(view.header.get("recipe")), {})[str(view.header.get("seed"))] = view.status
    labels = [curve.recipe for curve in curves]
    # With --size and --group a curve's label has more text after the recipe's label.
    states = {label: status_by_recipe.get(label, status_by_recipe.get(label.split(" ")[0], {})) for label in labels}
    return RunStates(
        ended=tuple(recipe for recipe, by_seed in states.items() if "running" not in by_seed.values()),
        failed=tuple(recipe for recipe, by_seed in states.items() if set(by_seed.values()) == {"failed"}),
        lost={
            recipe: [seed for seed, status in by_seed.items() if status == "failed"]
            for recipe, by_seed in states.items()
        },
    )


def next_look(
    curves: Sequence[Curve],
    rules: Rules,
    reached: Mapping[str, float],
    looks: Sequence[Look],
    options: FitOptions | None = None,
    workers: int = 1,
    failed: Collection[str] = (),
) -> Look | tuple[str, ...]:
    """Return the next look, or the recipes that it waits for; an empty tuple if the race is over.

    Args:
        curves: curves of the recipes that have evaluations; stopped recipes are ignored.
        rules: determine when looks are taken and recipes stopped.
        reached: for every recipe of the race, the compute up to which all its runs have been evaluated; infinite if
            none of its runs will continue.
        looks: the looks taken so far.
        options: options of every fit; `max_compute` also ends the race there.
        workers: number of processes that share the fits.
        failed: recipes whose runs have all failed. Beyond the compute that they reached they are neither waited for
            nor judged, because they may be launched again.
    """
    options = options or FitOptions()
    stopped = {name for look in looks for name in look.stopped}
    last_level = looks[-1].compute if looks else 0.0
    for level in rules.levels():
        unreached = {name for name in failed if reached.get(name, 0.0) < level * _ROUNDING}
        racing = [name for name in reached if name not in stopped and name not in unreached]
        racing_curves = [curve for curve in curves if curve.recipe in racing]
        if len(racing) < 2 or (options.max_compute is not None and level > options.max_compute):
            return ()
        if level <= last_level:
            continue
        if waits_for := tuple(name for name in racing if reached[name] < level * _ROUNDING):
            return waits_for
        first = options.min_compute or 0.0
        if sum(_has_evaluation(curve, first, level) for curve in racing_curves) < 2:
            continue  # nothing to compare yet
        if looks and not any(_has_evaluation(curve, last_level, level) for curve in racing_curves):
            continue  # nothing new: the look would count the same evidence twice
        return look_at(curves=racing_curves, level=level, rules=rules, options=options, taken=looks, workers=workers)
    return ()


def describe_result(curves: Sequence[Curve], rules: Rules, stopped: Mapping[str, Look]) -> list[str]:
    """Describe the result of a finished race, in lines: the ranking at its budget, and the winner if there is one.

    Args:
        curves: curves of the recipes that were not stopped, with all their evaluations.
        rules: rules of the race. A recipe whose probability of ending ahead is at least `rules.p_ahead` may still be
            the best.
        stopped: for each stopped recipe, the look that stopped it.
    """
    lines = [f"over; ranking by the reward at {rules.budget:.4g}:"]
    names: list[str] = []
    if curves:
        fits = fit_curves(curves)
        look = make_look(level=rules.budget, fits=fits, draws=draw_rewards(fits, rules.budget), rules=rules)
        order = sorted(look.chances, key=lambda entry: -entry.p_best)
        names = [entry.recipe for entry in order if entry.p_ahead is None or entry.p_ahead >= rules.p_ahead]
        lines += [
            f"{place}. {entry.recipe}: {_format(entry.R)}, {chance(entry.p_best)} of being best"
            for place, entry in enumerate(order, start=1)
        ]
    for name, stop in sorted(stopped.items(), key=lambda item: -item[1].compute):
        lines.append(f"-  {name}: stopped at compute {stop.compute:.4g}, forecast at {_format(stop.of(name).R)}")
    if len(names) == 1:
        lines.append(f"winner: {names[0]}")
    elif names:
        lines.append(f"undecided between {', '.join(names)}: none is surely ahead of the others")
    else:
        lines.append("undecided: no recipe that was not stopped has been evaluated")
    return lines


def _has_evaluation(curve: Curve, last: float, level: float) -> bool:
    return bool(((curve.compute > last) & (curve.compute <= level)).any())


def _compute_reached(curve: Curve, lost: Collection[str]) -> float:
    """Return the compute that all seeds of a recipe have reached. Failed seeds (`lost`) count only if all failed."""
    ends = {str(label): float(curve.compute[curve.seed == label].max()) for label in np.unique(curve.seed)}
    return min([end for label, end in ends.items() if label not in lost] or ends.values())


def look_at(
    curves: Sequence[Curve],
    level: float,
    rules: Rules,
    options: FitOptions | None = None,
    taken: Sequence[Look] = (),
    workers: int = 1,
) -> Look:
    """Take a look: fit each recipe to its evaluations up to a compute and decide which to stop.

    Args:
        curves: curves of the recipes in the race.
        level: compute up to which evaluations count, in the curves' unit.
        rules: determine when a recipe is stopped.
        options: options of every fit; its `max_compute` is replaced by `level`.
        taken: looks taken before this one.
        workers: number of processes that share the fits.
    """
    options = replace(options or FitOptions(), max_compute=level)
    # Remove later evaluations instead of only limiting the fit to a range: a fit takes the reward's scale and the
    # spread between seeds from all points of a curve.
    curves_with_data = [curve for curve in curves if _has_evaluation(curve, options.min_compute or 0.0, level)]
    cut_curves = with_shared_scale([curve.take(curve.compute <= level) for curve in curves_with_data])
    fits = fit_curves(cut_curves, options, workers)
    draws = draw_rewards(fits, rules.budget)
    return make_look(level=level, fits=fits, draws=draws, rules=rules, taken=taken)


def make_look(
    level: float, fits: Sequence[Fit], draws: Sequence[Array], rules: Rules, taken: Sequence[Look] = ()
) -> Look:
    """Decide which recipes to stop, from joint draws of the reward at the budget.

    Args:
        level: compute of the look.
        fits: fits of the recipes in the race.
        draws: draws of the reward at the budget, one array (K,) per fit.
        rules: determine when a recipe is stopped.
        taken: looks taken before this one.
    """
    below = {entry.recipe: entry.below for entry in taken[-1].chances} if taken else {}
    past_loss = sum(look.loss for look in taken)
    p_best = chances_of_being_best(draws)
    # The favourite has the highest expected reward. Recipes that cannot be forecast are not considered if others can.
    can_forecast = [can_forecast_at(fit, rules.budget) for fit in fits]
    expected = [
        values.mean() if forecastable or not any(can_forecast) else -np.inf
        for forecastable, values in zip(can_forecast, draws, strict=True)
    ]
    favourite = int(np.argmax(expected))
    chances = []
    for number, (fit, values) in enumerate(zip(fits, draws, strict=True)):
        p_ahead = None if number == favourite else float((values > draws[favourite]).mean())
        small = p_ahead is not None and p_ahead < rules.p_ahead
        consecutive = below.get(fit.recipe, 0) + 1 if small else 0
        chances.append(Chance(fit.recipe, p_best[number], p_ahead, quantiles(values), fit.verdict, consecutive))
    # Sort by the probability of ending ahead, the smallest first: if the limit does not allow all stops, the recipes
    # with the best chances stay.
    due = sorted(
        (number for number, entry in enumerate(chances) if entry.below >= rules.looks),
        key=lambda number: chances[number].p_ahead or 0.0,
    )
    scale = max((fit.curve.scale for fit in fits), default=1.0)
    limit = max(rules.loss - past_loss, 0.0) if rules.loss < NO_LIMIT else math.inf
    stop_count, loss = _count_stops(draws, due, scale, limit)
    stopped = tuple(chances[number].recipe for number in sorted(due[:stop_count]))
    return Look(level, fits[favourite].recipe, tuple(chances), stopped, loss)


def _count_stops(draws: Sequence[Array], due: Sequence[int], scale: float, limit: float) -> tuple[int, float]:
    """Return how many recipes from the front of `due` may be stopped together, and the expected loss of these stops.

    The loss is the reward of the best stopped recipe minus that of the best remaining recipe, as a fraction of the
    scale.

    Args:
        draws: joint draws of the reward at the budget, one array (K,) per recipe; at least one recipe is not due.
        due: indices of the recipes that might be stopped, ordered by their probability of ending ahead, the smallest
            first.
        scale: width of the reward's scale.
        limit: upper limit of the loss.
    """
    if not due:
        return 0, 0.0
    due_draws = np.stack([draws[at] for at in due])
    staying_best = np.stack([values for at, values in enumerate(draws) if at not in due]).max(axis=0)
    # Row n: the best of the first n + 1 recipes due, and the best of all other recipes.
    stopped_best = np.maximum.accumulate(due_draws)
    remaining_best = np.maximum.accumulate(np.vstack([staying_best, due_draws[:0:-1]]))[::-1]
    losses = np.maximum(stopped_best - remaining_best, 0.0).mean(axis=1) / scale
    number = max((n for n, loss in enumerate(losses, start=1) if loss <= limit), default=0)
    return number, float(losses[number - 1]) if number else 0.0


def _assemble_race(curves: Sequence[Curve], rules: Rules, looks: Sequence[Look], waits_for: tuple[str, ...]) -> Race:
    stopped = {name: look for look in looks for name in look.stopped}
    runners = [_recipe_state(curve, rules, looks, stopped.get(curve.recipe)) for curve in curves]
    leader = looks[-1].favourite if looks else None
    seeds = {curve.recipe: len(np.unique(curve.seed)) for curve in curves}
    full = rules.budget * sum(seeds.values())
    saved = sum(seeds[name] * (rules.budget - look.compute) for name, look in stopped.items())
    if not looks:
        sentence = f"no look yet: the first is at compute {rules.first * rules.budget:.4g}"
    else:
        sentence = f"{len(stopped)} of {len(curves)} recipes stopped after {counted(len(looks), 'look')}; "
        sentence += f"{leader} leads; this saves {saved:.4g} of the {full:.4g} compute of running all recipes to the "
        sentence += f"budget ({saved / full:.0%})"
    if waits_for:
        sentence += f"; the next look waits for {', '.join(waits_for[:4])}{', ...' if len(waits_for) > 4 else ''}"
    return Race(
        rules=rules,
        unit=curves[0].unit,
        looks=tuple(looks),
        runners=tuple(runners),
        leader=leader,
        full=full,
        saved=saved,
        waits_for=waits_for,
        sentence=sentence,
    )


def _recipe_state(curve: Curve, rules: Rules, looks: Sequence[Look], stopping_look: Look | None) -> RecipeState:
    """Return a recipe's state in the race.

    `stopping_look` is the look that stopped it, None if it is still in the race.
    """
    own_looks = [look for look in looks if any(entry.recipe == curve.recipe for entry in look.chances)]
    limit = rules.budget if stopping_look is None else stopping_look.compute
    ends = [float(curve.compute[curve.seed == label].max()) for label in np.unique(curve.seed)]
    spent = sum(min(end, limit) for end in ends)
    chances = own_looks[-1].of(curve.recipe) if own_looks else None
    if chances is None:
        reason = "no look yet"
    elif stopping_look is not None:
        reason = stopping_look.why(curve.recipe, rules)
    else:
        reason = f"in the race: {chance(chances.p_best)} of being best at {rules.budget:.4g}"
        if chances.below >= rules.looks:
            reason += f"; not stopped, because the expected cost of all stops together would exceed {rules.loss:g}"
    return RecipeState(
        recipe=curve.recipe,
        stopped_at=None if stopping_look is None else stopping_look.compute,
        p_best=None if chances is None else chances.p_best,
        p_ahead=None if chances is None else chances.p_ahead,
        R=None if chances is None else chances.R,
        spent=spent,
        reason=reason,
    )


def _format(reward: Interval) -> str:
    low, value, high = (
        "open" if bound is None else f"{bound:.3f}" for bound in (reward.low, reward.value, reward.high)
    )
    return f"{value} [{low}, {high}]"
