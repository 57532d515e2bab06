"""Resolution of a study: the smallest difference it can detect, and the seeds needed to detect the margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.decide.pairwise import (
    MOST_SEEDS,
    POWER,
    deviation,
    pair_by_seed,
    reward_difference,
    seed_scatter_near,
    seeds_needed,
)
from sweeps.fit.fit import Fit
from sweeps.fit.predict import can_forecast
from sweeps.terminal import counted

# End of the label of the null recipe, which has learning rate 0 (conf/variant/lr_0.yaml). Its curve shows noise alone.
NULL_RECIPE = "optimizer=null"

# Words for each source of the spread between seeds, see `SeedSpread.source`.
_SPREADS = {
    "paired": "seeds paired",
    "measured": "spread between seeds measured",
    "pooled": "spread between seeds pooled over recipes",
    "borrowed": "spread between seeds taken from the paper",
}


@dataclass(frozen=True)
class Resolution(AsJson):
    """Difference in reward that a study can detect when it compares each recipe with the leader at common compute.

    Attributes:
        compute: largest compute that all recipes have spent, in the curves' unit.
        smallest: difference in reward that half of the comparisons detect at 5% with 80% power.
        seeds: smallest number, over recipes, of seeds that ran far enough to inform on the asymptote.
        seeds_needed: seeds per recipe to detect the margin in half of the comparisons; None above `MOST_SEEDS`.
        detections: number of comparisons with the leader whose 95% interval excludes 0.
        comparisons: number of all comparisons.
        source: where the spread between seeds comes from; "paired" where the recipes have the same seeds.
        noise: standard deviation of one evaluation of the null recipe about its seed's mean; None without such a
            recipe.
    """

    compute: float
    smallest: float
    seeds: int
    seeds_needed: int | None
    detections: int
    comparisons: int
    source: str
    noise: float | None
    sentence: str

    JSON: ClassVar = {"detections": "told", "comparisons": "of"}


def resolve(fits: Sequence[Fit], leader: str | None, margin: float) -> Resolution | None:
    """Return the resolution of a study; None without a leader, or without another recipe that has a forecast.

    Args:
        fits: fits of the whole study.
        leader: recipe to choose so far, with which the others are compared; None if there is none.
        margin: difference to detect, in reward.
    """
    readable_fits = [fit for fit in fits if can_forecast(fit) and fit.window is not None]
    leading_fit = next((fit for fit in readable_fits if fit.recipe == leader), None)
    others = [fit for fit in readable_fits if fit is not leading_fit]
    if leading_fit is None or not others:
        return None
    compute = min(fit.window[1] for fit in readable_fits if fit.window is not None)
    offsets_by_recipe = {fit.recipe: seed_scatter_near(fit.curve, compute) for fit in readable_fits}
    scale = max(fit.curve.scale for fit in readable_fits)
    errors, detections, per_pair, sources = [], 0, [], set()
    seeds = min(fit.informative_seeds for fit in readable_fits)
    for fit in others:
        pairing = pair_by_seed(fit.recipe, leading_fit.recipe, offsets_by_recipe, scale)
        draws = reward_difference(fit, leading_fit, compute, pairing)
        low, high = np.quantile(draws, [0.025, 0.975])
        detections += bool(low > 0 or high < 0)
        errors.append(deviation(draws))
        per_pair.append(
            seeds_needed(draws, min(fit.informative_seeds, leading_fit.informative_seeds), margin) or np.inf
        )
        sources.add("paired" if pairing is not None else fit.seed_spread.source)
    smallest, enough = POWER * float(np.median(errors)), float(np.median(per_pair))
    needed_seeds = int(np.ceil(enough)) if np.isfinite(enough) else None
    noise = _noise(readable_fits)
    source = ", ".join(sorted(sources))
    seeds_run = min(fit.seeds for fit in readable_fits)
    text = f"with {counted(seeds_run, 'seed')} per recipe"
    if seeds_run > seeds:
        text += f" (in one recipe, only {seeds} ran far enough to inform the asymptote)"
    text += f", this study can detect a difference of {smallest:.3f} in reward at compute {compute:.4g}"
    text += f" (5% level, 80% power, {' or '.join(_SPREADS[name] for name in sorted(sources))})"
    if needed_seeds is None or needed_seeds > seeds:
        more = f"more than {MOST_SEEDS:,}" if needed_seeds is None else f"{needed_seeds}"
        text += f"; a difference of {margin:g} needs {more} seeds per recipe, run to that compute"
    if noise is not None:
        text += f"; evaluations of the null recipe scatter by {noise:.3f}"
    return Resolution(
        compute=compute,
        smallest=smallest,
        seeds=seeds,
        seeds_needed=needed_seeds,
        detections=detections,
        comparisons=len(others),
        source=source,
        noise=noise,
        sentence=text,
    )


def _noise(fits: Sequence[Fit]) -> float | None:
    """Return the standard deviation of evaluations of the null recipe about their seed's mean; None without it."""
    null = next((fit.curve for fit in fits if fit.recipe.split("+")[-1] == NULL_RECIPE), None)
    if null is None:
        return None
    seeds = sorted(set(null.seed))
    residual = np.concatenate([null.reward[null.seed == s] - null.reward[null.seed == s].mean() for s in seeds])
    dof = len(residual) - len(seeds)
    return float(np.sqrt((residual**2).sum() / dof)) if dof > 0 else None
