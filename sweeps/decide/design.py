"""Predict from an earlier study which differences a planned study can resolve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.decide.pairwise import POWER, Z_975, deviation, pair_by_seed, reward_difference, seed_scatter_near
from sweeps.decide.standing import margin_of
from sweeps.errors import UserError
from sweeps.fit.fit import Fit
from sweeps.fit.predict import can_forecast
from sweeps.fit.seeds import BORROWED_SEED_SD
from sweeps.terminal import counted

_SIMULATED_STUDIES = 4000


@dataclass(frozen=True)
class StudyPrediction(AsJson):
    """Prediction of how many comparisons with the best recipe a planned study will leave undecided.

    Attributes:
        comparisons: number of comparisons with the best recipe.
        undecided: expected number of comparisons whose 95% interval contains 0; None without an earlier study that
            shows how much recipes differ.
        smallest: smallest difference in reward that a test at 5% detects with 80% power.
        margin: difference in reward below which recipes count as equal.
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


def predict_resolution(
    recipes: int, seeds: int, fits: Sequence[Fit] = (), margin: float | None = None, by: str = ""
) -> StudyPrediction:
    """Predict the smallest difference that a planned study can resolve, and how many comparisons stay undecided.

    A difference of two means of n seeds has a standard error s / sqrt(n). All pairs of recipes of the earlier study
    give an estimate of s, paired by seed where two recipes share seeds. True differences between recipes are assumed to
    be normal. Their variance is the earlier study's mean squared difference minus its mean squared standard error.
    Studies are then simulated: a comparison with the best observed recipe is undecided if the difference is below
    1.96 s / sqrt(n).

    Args:
        recipes: number of recipes of the planned study.
        seeds: number of seeds of each recipe.
        fits: fits of an earlier study; if empty, only the published spread between seeds is used.
        margin: difference in reward below which two recipes count as equal; None for 0.02 of the reward's scale.
        by: name of the earlier study, for `Foresight.sentence`.

    Raises:
        UserError: fewer than one recipe or seed, or an invalid margin.
    """
    if recipes < 1 or seeds < 1:
        raise UserError(f"design: {recipes} recipes with {seeds} seeds is no study; give one of each at least")
    readable_fits = [fit for fit in fits if can_forecast(fit) and fit.window is not None]
    scale = max((fit.curve.scale for fit in readable_fits), default=1.0)
    margin = margin_of(readable_fits, margin)
    pairs = _compare_pairs(readable_fits, scale)
    spread: float | None = None
    if pairs:
        errors, differences, seed_counts = np.array(pairs).T
        one_seed_error = float(np.median(errors * np.sqrt(seed_counts)))
        # Method of moments: E[difference^2] = spread^2 + error^2.
        spread = math.sqrt(max(float(np.mean(differences**2 - errors**2)), 0.0))
        source = by
    else:
        # The published spread is that of one run. sqrt(2) converts it to a difference of two runs, as in `errors`.
        one_seed_error = BORROWED_SEED_SD * scale * math.sqrt(2)
        source = "the published spread between seeds"
    error = one_seed_error / math.sqrt(seeds)
    undecided = None if spread is None else _undecided(recipes, spread, error)
    seeds_needed = max(math.ceil((POWER * one_seed_error / margin) ** 2), 2) if margin > 0 else None
    smallest = POWER * error
    sentence = f"a difference of {smallest:.3f} can be detected (5% level, 80% power, estimated from {source})"
    if seeds_needed is not None:
        sentence += f"; a difference of {margin:g} needs {seeds_needed} seeds per recipe"
    if recipes == 1:
        sentence = f"a single recipe has nothing to be compared with; between two, {sentence}"
    elif undecided is not None:
        opening = f"with {counted(seeds, 'seed')} per recipe, about {undecided:.0f} of {recipes - 1} comparisons"
        sentence = f"{opening} with the best will stay undecided: {sentence}"
    return StudyPrediction(
        comparisons=recipes - 1,
        undecided=undecided,
        smallest=smallest,
        margin=margin,
        seeds_needed=seeds_needed,
        spread=spread,
        source=source,
        sentence=sentence,
    )


def _undecided(recipes: int, spread: float, error: float) -> float:
    """Simulate studies; return the expected number of recipes that cannot be separated from the best observed one."""
    rng = np.random.default_rng(recipes)
    # spread and error are those of a difference of two recipes, whose variance is twice that of one recipe.
    observed = math.hypot(spread, error) / math.sqrt(2) * rng.standard_normal((_SIMULATED_STUDIES, recipes))
    gaps = observed.max(1, keepdims=True) - observed
    # Minus 1 for the best recipe itself, whose gap is 0.
    return float((gaps < Z_975 * error).sum(1).mean()) - 1


def _compare_pairs(fits: Sequence[Fit], scale: float) -> list[tuple[float, float, int]]:
    """Return standard error, difference and number of seeds of each pair, at the compute that all recipes reached."""
    if len(fits) < 2:
        return []
    compute = min(fit.window[1] for fit in fits if fit.window is not None)
    offsets_by_recipe = {fit.recipe: seed_scatter_near(fit.curve, compute) for fit in fits}
    pairs = []
    for i, first in enumerate(fits):
        for second in fits[:i]:
            draws = reward_difference(
                first, second, compute, pair_by_seed(first.recipe, second.recipe, offsets_by_recipe, scale)
            )
            pairs.append(
                (deviation(draws), float(np.median(draws)), min(first.informative_seeds, second.informative_seeds))
            )
    return pairs
