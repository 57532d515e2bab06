"""Comparison of two recipes under any verdict: at equal compute, in compute to a common reward, and in asymptote.

Ranking and planning use the same draws. Where recipes were run with the same seeds, the common effect of a seed cancels
in the difference. Where they were evaluated on the same prompts, the difficulty of a prompt cancels too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
from scipy.special import chdtri

from sweeps.as_json import AsJson
from sweeps.curve import UNNAMED, Array, Curve
from sweeps.decide.efficiency import TAIL, Ratio
from sweeps.decide.reach import common_reward, first_compute_above
from sweeps.decide.standing import CONFIDENCE, draw_asymptotes, margin_of
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval, format_interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.predict import can_forecast, can_forecast_at, paths, quantiles, reward_draws_over_seeds
from sweeps.fit.seeds import BORROWED_SEED_SD, Pairing, SeedScatter, SeedSpread
from sweeps.run.passes import Passes
from sweeps.terminal import counted

# With paired seeds, the reward of a run is the mean of its last evaluations up to the common compute, this many.
_LAST_EVALUATIONS = 3
_GRID_SIZE = 201
# Degrees of freedom of the prior in `pair_by_seed`: as many as a study of three recipes with three seeds has. They
# are few enough for the data of an unusual pair to outweigh the prior.
_PRIOR_DOF = 4
# The 97.5% quantile of the normal distribution, for a two-sided test at 5%.
Z_975 = 1.959964
# Sum of the normal distribution's quantiles for a two-sided test at 5% and for 80% power.
POWER = Z_975 + 0.841621
MOST_SEEDS = 10_000

# Function of a recipe and a compute. It returns, by seed, the results per prompt of the newest evaluation up to that
# compute.
PromptPasses = Callable[[str, float], Mapping[str, Passes]]


@dataclass(frozen=True)
class Difference(AsJson):
    """Comparison of two recipes. Differences are `recipe` minus `other`, in reward, with 95% bounds.

    Attributes:
        recipe, other: labels.
        compute: largest compute that both have spent, in the curves' unit.
        R: difference of rewards at `compute`.
        R_on_prompts: R with the sampling error of the prompts added, as if the held-out prompts were drawn from all
            prompts; None where results by prompt are unknown for a recipe, or the prompts differ.
        R_at_budget: forecast difference at the budget; None without a budget, or if it is too far beyond the data.
        A: difference of the asymptotes; None where one of the curves does not rise.
        ratio: compute that `recipe` needs for a reward that both reach, divided by the compute that `other` needs; None
            where unknown.
        p_neither: fraction of the draws in which neither reaches that reward, left out of `ratio`; None without a
            ratio.
        p_higher: probability that `recipe` has the higher reward at `compute`.
        seeds: number of seeds of the recipe that has fewer.
        paired: what the recipes are paired by: "seed", "prompt", both or neither.
        seeds_needed: seeds per recipe to detect the margin at `compute` with 80% power; None above `MOST_SEEDS`.
        verdict: `higher`, `lower`, `same` (within the margin) or `not told apart`.
    """

    recipe: str
    other: str
    compute: float
    R: Interval
    R_on_prompts: Interval | None
    R_at_budget: Interval | None
    A: Interval | None
    ratio: Interval | None
    p_higher: float
    seeds: int
    paired: tuple[str, ...]
    seeds_needed: int | None
    verdict: str
    sentence: str
    p_neither: float | None = None

    JSON: ClassVar = {"verdict": "told"}


@dataclass(frozen=True)
class Comparisons(AsJson):
    """Results of pairwise comparisons. simultaneous: whether bounds are widened to hold for several at once."""

    margin: float
    budget: float | None
    simultaneous: bool
    rows: tuple[Difference, ...]
    notes: tuple[str, ...]

    JSON: ClassVar = {"rows": "comparisons"}


@dataclass(frozen=True, eq=False)
class _PairDraws:
    """Draws of the fields of one `Difference`, (K,) each; None where unknown."""

    compute: float
    reward: Array
    on_prompts: Array | None
    at_budget: Array | None
    asymptote: Array | None
    ratio: Ratio | None
    paired: tuple[str, ...]


def compare(
    fits: Sequence[Fit],
    pairs: Sequence[tuple[str, str]],
    budget: float | None = None,
    margin: float | None = None,
    passes: PromptPasses | None = None,
) -> Comparisons:
    """Compare recipes two by two.

    Args:
        fits: fits of the whole study; the common effect of a seed is estimated from all of them.
        pairs: labels of the two recipes of each comparison; the bounds hold for all pairs at once.
        budget: compute at which to forecast as well, in the curves' unit; None for no forecast.
        margin: difference in reward below which two recipes count as equal; None for 0.02 of the reward's scale.
        passes: function that returns the results per prompt, see `PromptPasses`; None where they were not recorded.

    Raises:
        UserError: a recipe is unknown, compared with itself or without a forecast, or the margin is invalid.
    """
    margin = margin_of(fits, margin)
    by_name = {fit.recipe: fit for fit in fits}
    for pair in pairs:
        _check_pair(pair, by_name)
    asymptotes = {fit.recipe: one.asymptote() for fit, one in zip(fits, draw_asymptotes(fits), strict=True)}

    scale = max(fit.curve.scale for fit in fits)

    @cache  # cached because pairs have few distinct computes, and each call reads the points of all recipes
    def near(compute: float) -> Mapping[str, SeedScatter]:
        return {fit.recipe: seed_scatter_near(fit.curve, compute) for fit in fits}

    def pairing(one: str, two: str, compute: float) -> Pairing | None:
        return pair_by_seed(one, two, near(compute), scale)

    draws_by_pair = [_draw_pair(by_name[one], by_name[two], pairing, asymptotes, budget, passes) for one, two in pairs]
    rewards = _bounds([draws.reward for draws in draws_by_pair])
    on_prompts = _bounds_where([draws.on_prompts for draws in draws_by_pair])
    at_budget = _bounds_where([draws.at_budget for draws in draws_by_pair])
    asymptote = _bounds_where([draws.asymptote for draws in draws_by_pair])
    tail = _simultaneous_tail([draws.ratio.draws for draws in draws_by_pair if draws.ratio is not None])
    ratio = [None if draws.ratio is None else draws.ratio.interval(tail) for draws in draws_by_pair]
    rows = []
    for n, ((one, two), draws) in enumerate(zip(pairs, draws_by_pair, strict=True)):
        seeds = min(by_name[one].informative_seeds, by_name[two].informative_seeds)
        row = Difference(
            recipe=one,
            other=two,
            compute=draws.compute,
            R=rewards[n],
            R_on_prompts=on_prompts[n],
            R_at_budget=at_budget[n],
            A=asymptote[n],
            ratio=ratio[n],
            p_higher=float((draws.reward > 0).mean() + 0.5 * (draws.reward == 0).mean()),
            seeds=seeds,
            paired=draws.paired,
            seeds_needed=seeds_needed(draws.reward, seeds, margin),
            verdict=_verdict(rewards[n], margin),
            sentence="",
            p_neither=None if draws.ratio is None else draws.ratio.p_neither,
        )
        rows.append(replace(row, sentence=_sentence(row, margin)))
    return Comparisons(
        margin=margin, budget=budget, simultaneous=len(pairs) > 1, rows=tuple(rows), notes=tuple(_notes(rows))
    )


def why_incomparable(fit: Fit) -> str | None:
    """Return why a recipe cannot be compared; None if it can, because it has a forecast."""
    if can_forecast(fit) and fit.window is not None:
        return None
    return f"{fit.recipe}: nothing can be read off it ({fit.reason}); give it more evaluations"


def _check_pair(pair: tuple[str, str], by_name: Mapping[str, Fit]) -> None:
    for name in pair:
        if name not in by_name:
            raise UserError(f"{name}: no such recipe; the sources have {', '.join(by_name)}")
        if (reason := why_incomparable(by_name[name])) is not None:
            raise UserError(reason)
    if pair[0] == pair[1]:
        raise UserError(f"{pair[0]}: is compared with itself; name two recipes")


def _draw_pair(
    one: Fit,
    two: Fit,
    pairing_at: Callable[[str, str, float], Pairing | None],
    asymptotes: Mapping[str, Array],
    budget: float | None,
    passes: PromptPasses | None,
) -> _PairDraws:
    """Draw the quantities of one comparison.

    `pairing_at(one, two, compute)` returns the pairing of two recipes by seed.
    """
    assert one.window is not None and two.window is not None
    compute = min(one.window[1], two.window[1])
    pairing = pairing_at(one.recipe, two.recipe, compute)
    reward = reward_difference(one, two, compute, pairing)
    prompt_sd = None if passes is None else prompt_error(*(passes(fit.recipe, compute) for fit in (one, two)))
    rng = generator(f"{one.recipe} {two.recipe}", "pair")
    on_prompts = None if prompt_sd is None else reward + prompt_sd * rng.standard_normal(DRAWS)
    can_forecast = budget is not None and can_forecast_at(one, budget) and can_forecast_at(two, budget)
    both_rise = not {one.verdict, two.verdict} & {"flat", "decreasing"}
    return _PairDraws(
        compute=compute,
        reward=reward,
        on_prompts=on_prompts,
        at_budget=reward_difference(one, two, budget, pairing) if can_forecast and budget is not None else None,
        asymptote=asymptotes[one.recipe] - asymptotes[two.recipe] if both_rise else None,
        ratio=compute_ratio(one, two, compute),
        paired=tuple(
            name for name, is_paired in (("seed", pairing is not None), ("prompt", prompt_sd is not None)) if is_paired
        ),
    )


def reward_difference(one: Fit, two: Fit, compute: float, pairing: Pairing | None) -> Array:
    """Return draws of the difference of rewards `one` - `two` at a compute, over all seeds; (K,).

    Args:
        one, two: fits with forecasts, see `sweeps.fit.predict.can_forecast`.
        compute: where to compare, in the curves' unit.
        pairing: the recipes' shared seeds, and the spread between seeds without their common effects; None where the
            recipes are not paired.
    """
    if pairing is None:
        return np.asarray(np.subtract(*(reward_draws_over_seeds(fit, [compute])[:, 0] for fit in (one, two))))
    rng = generator(f"{one.recipe}\n{two.recipe}", "paired")
    # Spread remaining between seeds of one recipe; a difference of two recipes has twice that variance.
    sd = pairing.spread.sd * math.sqrt(2 / len(pairing.seeds))
    return np.asarray(
        np.subtract(*(paths(fit, [compute])[:, 0] for fit in (one, two)))
        + sd * rng.standard_t(pairing.spread.dof, DRAWS)
    )


def pair_by_seed(one: str, two: str, offsets: Mapping[str, SeedScatter], scale: float) -> Pairing | None:
    """Return the pairing of two recipes by seed; None unless both have the same seeds, two or more.

    The spread between seeds comes from the variance of the two recipes' differences by seed, shrunk towards a prior
    variance: a moderated t statistic (Smyth 2004), whose prior counts as `_PRIOR_DOF` degrees of freedom. The prior
    variance is the median residual variance of all recipes with these seeds that reached this compute. It is the median
    because some recipes are far noisier. With only these two recipes, the prior variance comes from the published
    spread.

    Args:
        one, two: labels of the recipes.
        offsets: `seed_scatter_near` of all recipes of the study at the compute to compare, by label.
        scale: width of the reward's scale.
    """
    seeds = sorted(offsets[one].offset)
    if len(seeds) < 2 or sorted(offsets[two].offset) != seeds:
        return None
    excesses = [excess for excess in offsets.values() if sorted(excess.offset) == seeds]
    sampling = (offsets[one].sampling + offsets[two].sampling) / 2
    differences = np.array([offsets[one].offset[seed] - offsets[two].offset[seed] for seed in seeds])
    own_variance = float(differences.var(ddof=1)) / 2
    prior_variance = (BORROWED_SEED_SD * scale) ** 2 + sampling
    if len(excesses) > 2:
        table = np.array([[excess.offset[seed] for seed in seeds] for excess in excesses])
        residual = table - table.mean(0)  # offsets are already relative to each recipe's mean
        degrees = (len(seeds) - 1) * (1 - 1 / len(excesses))
        # The median of a sum of squares is the variance times the median of chi squared, not times its degrees of
        # freedom.
        prior_variance = float(np.median((residual**2).sum(1)) / chdtri(degrees, 0.5))
    dof = len(seeds) - 1
    variance = (_PRIOR_DOF * prior_variance + dof * own_variance) / (_PRIOR_DOF + dof) - sampling
    # Assume at least the part of the published spread that sampling noise could hide.
    variance = max(variance, min(sampling, (BORROWED_SEED_SD * scale) ** 2))
    return Pairing(tuple(seeds), SeedSpread(math.sqrt(variance), "paired", float(_PRIOR_DOF + dof)))


def seed_scatter_near(curve: Curve, compute: float) -> SeedScatter:
    """Return each seed's reward near a compute minus the mean over seeds; empty if a seed lacks evaluations there."""
    means, errors = {}, []
    for seed in sorted(set(curve.seed)):
        rows = (curve.seed == seed) & (curve.compute <= compute * (1 + 1e-9))
        last_rows = np.flatnonzero(rows)[-_LAST_EVALUATIONS:]
        if (
            len(last_rows) < _LAST_EVALUATIONS
            or seed.startswith(UNNAMED)
            or curve.compute[last_rows[-1]] < 0.5 * compute
        ):
            return SeedScatter()
        means[seed] = float(curve.reward[last_rows].mean())
        noise = curve.reward[last_rows].var(ddof=1) if curve.sd is None else np.mean(curve.sd[last_rows] ** 2)
        errors.append(float(noise) / len(last_rows))
    middle = float(np.mean(list(means.values())))
    offset = {seed: mean - middle for seed, mean in means.items()}
    return SeedScatter(sum(value**2 for value in offset.values()), float(np.mean(errors)), len(means) - 1, offset)


def prompt_error(one: Mapping[str, Passes], two: Mapping[str, Passes]) -> float | None:
    """Return the standard error of a difference of pass rates on the same prompts that is due to the choice of prompts.

    Its square is the variance over prompts of the recipes' difference, without the part due to sampling of completions,
    divided by the number of prompts. Where the data set names families of prompts, prompts of one family are not
    independent, so the variance is computed from sums over families (Miller 2024, arXiv 2411.00640, clustered standard
    errors).

    Args:
        one: passes of one recipe's runs, by seed.
        two: passes of the other recipe's runs, by seed.

    Returns:
        None if the recipes share no seed that was evaluated on the same prompts, or if all these prompts are of one
        family.
    """
    seeds = [s for s in one if s in two and one[s].prompts == two[s].prompts]
    if not seeds:
        return None
    # Keep the seeds with the same prompts as the first seed. Normally all seeds of a study have the same prompts.
    seeds = [s for s in seeds if one[s].prompts == one[seeds[0]].prompts]
    rates = []
    sampling = []
    for passes in (one, two):
        passed = np.array([passes[s].passed for s in seeds], dtype=float)
        scored = np.array([passes[s].scored for s in seeds], dtype=float)
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = np.where(scored > 0, passed / scored, np.nan)
            # Unbiased estimate of p (1 - p) / n from the n completions of a prompt.
            sampling.append(np.where(scored > 1, rate * (1 - rate) / (scored - 1), np.nan))
        rates.append(rate)
    difference = rates[0] - rates[1]
    is_graded = np.isfinite(difference).all(0)
    if is_graded.sum() < 2:
        return None
    noise = (sampling[0] + sampling[1])[:, is_graded] / len(seeds) ** 2
    # With one sample per prompt the sampling variance is unknown, so nothing is subtracted.
    within_prompts = float(noise.sum(0).mean()) if np.isfinite(noise).all() else 0.0
    mean = difference[:, is_graded].mean(0)
    families = one[seeds[0]].families or ("",) * len(is_graded)
    family_names = np.array([name or f"{number} of its own" for number, name in enumerate(families)])[is_graded]
    _, number = np.unique(family_names, return_inverse=True)
    sums = np.bincount(number, weights=mean - mean.mean())
    if len(sums) < 2:
        return None
    clustered = len(sums) / (len(sums) - 1) * float(np.square(sums).sum()) / len(mean) ** 2
    return math.sqrt(max(clustered - within_prompts / len(mean), 0.0))


def compute_ratio(one: Fit, two: Fit, compute: float) -> Ratio | None:
    """Draw the ratio of the computes that two recipes need for a reward that both reach by `compute`.

    Returns:
        None where one recipe gains nothing, or no draw of either reaches that reward.
    """
    computes = np.linspace(0, compute, _GRID_SIZE)
    draws = [reward_draws_over_seeds(fit, computes) for fit in (one, two)]
    reward = common_reward([rewards[:, 0] for rewards in draws], [rewards[:, -1] for rewards in draws])
    if reward is None:
        return None
    times_one, times_two = (first_compute_above(rewards, computes, reward) for rewards in draws)
    ratio = Ratio.of(times_one, times_two)
    return ratio if len(ratio.draws) else None


def seeds_needed(difference: Array, seeds: int, margin: float) -> int | None:
    """Return the seeds per recipe to detect the margin at 5% with 80% power; None if over `MOST_SEEDS`.

    The uncertainty at a compute already spent (seeds, sampling, noise) is proportional to 1 / sqrt(number of seeds).

    Args:
        difference: posterior draws of the difference at the present number of seeds, (K,).
        seeds: present number of seeds per recipe.
        margin: difference to detect, in reward.
    """
    if margin <= 0:
        return None
    needed = max(math.ceil(max(seeds, 1) * (POWER * deviation(difference) / margin) ** 2), 2)
    return needed if needed <= MOST_SEEDS else None


def deviation(draws: Array) -> float:
    """Return a robust standard deviation: the width of the central 95% of the draws, divided by 2 x 1.96."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(high - low) / (2 * Z_975)


def _bounds_where(draws: Sequence[Array | None]) -> list[Interval | None]:
    bounds = iter(_bounds([values for values in draws if values is not None]))
    return [None if values is None else next(bounds) for values in draws]


def _bounds(draws: Sequence[Array]) -> list[Interval]:
    """Return medians and 95% bounds of several arrays of joint draws, which may be infinite.

    The bounds hold simultaneously.
    """
    tail = _simultaneous_tail(draws)
    return [quantiles(values, tail) for values in draws]


def _simultaneous_tail(draws: Sequence[Array]) -> float:
    """Return the tail probability at which the 95% bounds of several arrays of draws hold simultaneously.

    The bounds are quantiles of each array at one common level, chosen so that all hold at once (Besag et al. 1995,
    section 6.3). Where an array has fewer draws than the others, as a `Ratio` may, Bonferroni's level is used instead.
    """
    if len(draws) < 2:
        return TAIL
    count = max((len(values) for values in draws), default=0)
    if any(len(values) < count for values in draws):
        return TAIL / len(draws)
    ranks = np.stack([np.argsort(np.argsort(values, kind="stable"), kind="stable") + 1 for values in draws])
    extreme = np.sort(np.maximum(ranks, count + 1 - ranks).max(axis=0))
    return float((count + 1 - extreme[math.ceil(CONFIDENCE * count) - 1]) / count)


HIGHER, LOWER, SAME, UNDECIDED = "higher", "lower", "same", "not told apart"


def _verdict(difference: Interval, margin: float) -> str:
    low = -math.inf if difference.low is None else difference.low
    high = math.inf if difference.high is None else difference.high
    if low > 0:
        return HIGHER
    if high < 0:
        return LOWER
    return SAME if low > -margin and high < margin else UNDECIDED


def _sentence(row: Difference, margin: float) -> str:
    one, two, ratio = row.recipe, row.other, row.ratio
    at, by = f"at compute {row.compute:.4g}", format_interval(row.R, "+.3f")
    if row.verdict in (HIGHER, LOWER):
        text = f"{one} has the {row.verdict} reward {at}, by {by}"
    elif row.verdict == SAME:
        text = f"{one} and {two} are the same within {margin:g} {at}: {by}"
    else:
        count = f"more than {MOST_SEEDS:,}" if row.seeds_needed is None else str(row.seeds_needed)
        text = f"{one} and {two} cannot be told apart {at}: {by} with {counted(row.seeds, 'seed')} per recipe"
        text += f"; a difference of {margin:g} needs {count} seeds per recipe at 80% power"
    if ratio is not None and ratio.low is not None and ratio.low > 1:
        times = f"at least {ratio.low:.2f}" if ratio.value is None else format_interval(ratio, ".2f")
        text += f"; {one} takes {times} times the compute of {two}"
    elif ratio is not None and ratio.high is not None and ratio.high < 1:
        text += f"; {one} takes {format_interval(ratio, '.2f')} times the compute of {two}"
    if row.p_neither is not None and row.p_neither >= 0.01:
        text += f" (leaving out the {row.p_neither:.0%} of the draws in which neither reaches the common reward)"
    return text


def _notes(rows: Sequence[Difference]) -> list[str]:
    notes = []
    unpaired = [row for row in rows if "seed" not in row.paired]
    if unpaired:
        paired = len(rows) - len(unpaired)
        which = f"only {paired} of {len(rows)} comparisons {'is' if paired == 1 else 'are'}" if paired else "not"
        notes.append(f"{which} paired by seed, which needs the same seeds of both recipes, at least two")
    if any("prompt" not in row.paired for row in rows):
        notes.append(
            "not paired by prompt where a run has no passes per prompt (passes.jsonl), such as runs of earlier "
            "versions and of other trainers; those differences hold for the evaluated prompts only"
        )
    return notes
