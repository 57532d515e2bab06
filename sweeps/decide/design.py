"""Predict from an earlier study which differences a planned study can resolve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.decide.pairwise import POWER, SURE, apart, deviation, pairing_of_two, rewards_near
from sweeps.decide.standing import margin_of
from sweeps.errors import UserError
from sweeps.fit.fit import Fit
from sweeps.fit.predict import readable
from sweeps.fit.seeds import BORROWED_SEED_SD
from sweeps.terminal import counted

_STUDIES = 4000


@dataclass(frozen=True)
class Foresight(AsJson):
    """Prediction of how many comparisons with the best recipe a planned study will leave undecided.

    Attributes:
        comparisons: number of comparisons with the best recipe.
        undecided: expected number of comparisons whose 95% interval contains 0; None where no earlier study shows how
            far apart recipes are.
        smallest: difference in reward that is detected at 5% with 80% power.
        margin: recipes whose rewards differ by less than this count as equal.
        seeds_needed: seeds per recipe to detect the margin; None for a margin of 0.
        spread: standard deviation of the true differences between two recipes, in reward; None where unknown.
        source: origin of spread and noise, in words.
    """

    comparisons: int
    undecided: float | None
    smallest: float
    margin: float
    seeds_needed: int | None
    spread: float | None
    source: str
    sentence: str


def foresee(recipes: int, seeds: int, fits: Sequence[Fit] = (), margin: float | None = None, by: str = "") -> Foresight:
    """Predict the smallest difference that a planned study can resolve, and how many comparisons stay undecided.

    A difference of two means of n seeds has a standard error s / sqrt(n), where s is estimated from all pairs of
    recipes of the earlier study (paired by seed where they share seeds). True rewards of recipes are assumed to be
    normal; their variance is the earlier study's variance of differences minus the errors. Studies are then simulated:
    a comparison with the best observed recipe is undecided if the difference is below 1.96 s / sqrt(n).

    Args:
        recipes: number of recipes of the planned study.
        seeds: number of seeds of each recipe.
        fits: fits of an earlier study; if empty, only the published spread between seeds is used.
        margin: recipes within this of each other count as equal, in reward; None for 0.02 of the reward's scale.
        by: name of the earlier study, for the sentence.

    Raises:
        UserError: fewer than one recipe or seed, or an invalid margin.
    """
    if recipes < 1 or seeds < 1:
        raise UserError(f"design: {recipes} recipes with {seeds} seeds is no study; give one of each at least")
    known = [fit for fit in fits if readable(fit) and fit.window is not None]
    scale = max((fit.curve.scale for fit in known), default=1.0)
    margin = margin_of(known, margin)
    measured = _pairs(known, scale)
    spread: float | None = None
    if measured:
        errors, apart_by, own_seeds = np.array(measured).T
        one_seed = float(np.median(errors * np.sqrt(own_seeds)))
        # Method of moments: E[difference^2] = spread^2 + error^2.
        spread = math.sqrt(max(float(np.mean(apart_by**2 - errors**2)), 0.0))
        source = by
    else:
        # The factor sqrt(2) makes it the error of a difference of two runs, like `errors` above.
        one_seed = BORROWED_SEED_SD * scale * math.sqrt(2)
        source = "the published spread between seeds"
    error = one_seed / math.sqrt(seeds)
    undecided = None if spread is None else _undecided(recipes, spread, error)
    needed = max(math.ceil((POWER * one_seed / margin) ** 2), 2) if margin > 0 else None
    smallest = POWER * error
    text = f"differences of {smallest:.3f} are told (at 5%, with 80% power, by {source})"
    if needed is not None:
        text += f"; {margin:g} takes {needed} seeds"
    if undecided is not None:
        start = f"with {counted(seeds, 'seed')} about {undecided:.0f} of {recipes - 1} comparisons"
        text = f"{start} with the best will stay undecided: {text}"
    return Foresight(
        comparisons=recipes - 1,
        undecided=undecided,
        smallest=smallest,
        margin=margin,
        seeds_needed=needed,
        spread=spread,
        source=source,
        sentence=text,
    )


def _undecided(recipes: int, spread: float, error: float) -> float:
    """Return the expected number of recipes that cannot be separated from the best observed one, by simulation."""
    rng = np.random.default_rng(recipes)
    # spread and error are those of a difference of two recipes, whose variance is twice that of one recipe.
    observed = math.hypot(spread, error) / math.sqrt(2) * rng.standard_normal((_STUDIES, recipes))
    behind = observed.max(1, keepdims=True) - observed
    # Minus 1 for the best recipe itself, whose gap is 0.
    return float((behind < SURE * error).sum(1).mean()) - 1


def _pairs(fits: Sequence[Fit], scale: float) -> list[tuple[float, float, int]]:
    """Return standard error, difference and seeds of each pair of recipes, at the compute that all have spent."""
    if len(fits) < 2:
        return []
    compute = min(fit.window[1] for fit in fits if fit.window is not None)
    near = {fit.recipe: rewards_near(fit.curve, compute) for fit in fits}
    pairs = []
    for i, one in enumerate(fits):
        for two in fits[:i]:
            draws = apart(one, two, compute, pairing_of_two(one.recipe, two.recipe, near, scale))
            pairs.append((deviation(draws), float(np.median(draws)), min(one.informing, two.informing)))
    return pairs
