"""The current choice between recipes, from joint posterior draws that ranking, plan and report all use.

Every recipe contributes posterior draws of its asymptote (`sweeps.fit.forecast`). A recipe that is not identifiable
contributes the full width of its posterior; a recipe without a forecast contributes draws from the whole reward scale.
So a choice only counts as sure if it is also sure against the recipes that could not be ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.efficiency import Efficiency, Ratio, bonferroni_tail, efficiencies
from sweeps.decide.margin import MARGIN
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.posterior import draw_by_weight
from sweeps.fit.predict import asymptote_draws, can_forecast, can_forecast_at, reward_draws_over_seeds, seed_offsets
from sweeps.fit.seeds import Pairing, SeedSpread, paired_seed_spread

# A choice counts as decided if its probability of being right is at least this.
CONFIDENCE = 0.95
_UNSURE = 1 - CONFIDENCE
# An unranked recipe counts as a rival of the leader if its probability of being best is above this.
COULD_WIN = 0.05
# The scatter of asymptotes between recipes is estimated from at least _MIN_RECIPES recipes. It is at least _MIN_SCATTER
# of the reward's scale: with 0.03, the interval of a slow recipe ended below its truly higher ceiling.
_MIN_RECIPES, _MIN_SCATTER = 3, 0.12
# Fewest draws of a law (a form of the curve) from which a recipe's draws of that law are sampled. With fewer, its draws
# of all laws are used.
_MIN_DRAWS = 8
# Without a budget, the horizon is at this multiple of the largest compute of any recipe.
WINDOWS = 2.0


@dataclass(frozen=True, eq=False)
class AsymptoteDraws:
    """Posterior draws of one recipe's asymptote.

    Attributes:
        values: A for the mean of the given seeds, in reward, (K,).
        rows: index of each value's draw in `Fit.outlook`, (K,); None for a recipe without a forecast.
        offsets: draws of A over all possible seeds minus A for the mean of the given seeds, in reward, (K,).
        spread: standard deviation of A between seeds, with which `offsets` are drawn.
    """

    values: Array
    rows: NDArray[np.intp] | None
    offsets: Array
    spread: float

    def asymptote(self, margin: float | None = None) -> Array:
        """Return A over all possible seeds, (K,).

        If `spread` is within the margin, the offsets are left out, because the margin already covers them.
        """
        return self.values if margin is not None and self.spread <= margin else self.values + self.offsets


class Outcome(Enum):
    """Outcomes of a choice between recipes; `sweeps.decide.wording` writes a sentence for each."""

    UNKNOWN = "no recipe has a forecast, or the only recipe is not identifiable"
    ALONE = "there is only one recipe"
    HIGHEST = "the leader's A is surely within the margin of the best"
    BEST_SO_FAR = "the leader's A may be below the best by more than the margin"
    FLAT = "no reward rises, and no recipe is surely within the margin of the best"
    MOST_EFFICIENT = "recipes are tied in A, and the leader surely needs the least compute of these"
    TIED = "recipes are tied in A, and compute does not separate them: any of several may be chosen"
    FASTER_UNSURE = "the leader's A is surely within the margin of the best; that of a faster tied recipe is not"
    TIED_UNSURE = "recipes are tied in A, and may be below the best by more than the margin"

    @property
    def decided(self) -> bool:
        """Return whether the data decide the choice."""
        return self in (Outcome.ALONE, Outcome.HIGHEST, Outcome.MOST_EFFICIENT, Outcome.TIED, Outcome.FASTER_UNSURE)


@dataclass(frozen=True)
class Horizon(AsJson):
    """The choice by the reward at one compute, the horizon, which needs no asymptote.

    Attributes:
        compute: the horizon: a budget, or `WINDOWS` times the largest compute of any recipe.
        windows: `compute` as a multiple of the largest compute of any recipe.
        leader: recipe with the smallest expected loss there; None if no recipe can be forecast.
        p_best: probability of the highest reward, by recipe.
        p_wrong: probability that another recipe's reward exceeds the leader's by more than the margin; None with one
            recipe or without a leader.
        decided: whether the leader is surely within the margin of the highest reward.
    """

    compute: float
    windows: float
    leader: str | None
    p_best: dict[str, float]
    p_wrong: float | None
    decided: bool


@dataclass(frozen=True, eq=False)
class Standing:
    """State of the choice between recipes. Mappings are keyed by recipe.

    Attributes:
        margin: largest shortfall from the best A, in reward, at which choosing a recipe is not an error.
        leader: recipe to choose; None if no recipe has a forecast. It has the smallest expected loss, identifiable or
            not. If that recipe is tied and surely within the margin of the best, it is the most efficient of such
            recipes instead.
        losses: highest asymptote minus each recipe's asymptote, averaged over joint draws, in reward.
        p_best: probability of the highest asymptote among ranked and unranked recipes, including the spread between
            seeds.
        p_wrong: probability that another recipe's asymptote exceeds the leader's by more than the margin; None without
            a leader or with one recipe.
        p_wrong_by_recipe: the same probability for the choice of each recipe.
        ranked: identifiable recipes, the best first.
        tied: recipes whose A and expected loss are within the margin of the best, the most efficient first.
        shared_a: mean A of the tied recipes; None without a tie.
        efficiencies: compute of each tied recipe to a fraction of the gain up to the shared A, see
            `sweeps.decide.efficiency`; empty without a tie.
        ratios: compute of each other tied recipe to 90% of the gain up to the shared A, divided by that of the first.
        slower, faster: tied recipes that surely need more, or less, compute than the first tied recipe. A faster recipe
            is not the leader because its A is not surely within the margin of the best.
        choices: tied recipes that are not slower, any of which may be chosen; empty if the leader is not tied.
        rivals: unranked recipes that are best with a probability above `COULD_WIN`.
        outcome: state of the choice.
        verdicts: verdict of every recipe's fit.
        pairing: seeds by which identifiable recipes are paired; None if they do not share seeds.
        drawn: the draws of asymptotes that all of this is computed from, one entry per fit.
        horizon: the choice by the reward at a compute; None if no recipe was evaluated after the start.
    """

    margin: float
    leader: str | None
    losses: dict[str, float]
    p_best: dict[str, float]
    p_wrong: float | None
    p_wrong_by_recipe: dict[str, float]
    ranked: tuple[str, ...]
    tied: tuple[str, ...]
    shared_a: float | None
    efficiencies: dict[str, Efficiency]
    ratios: dict[str, Ratio]
    slower: tuple[str, ...]
    faster: tuple[str, ...]
    choices: tuple[str, ...]
    rivals: tuple[str, ...]
    outcome: Outcome
    verdicts: dict[str, str]
    pairing: Pairing | None
    drawn: tuple[AsymptoteDraws, ...]
    horizon: Horizon | None

    @property
    def decided(self) -> bool:
        """Return whether the data decide the choice."""
        return self.outcome.decided

    def ratio(self, recipe: str) -> Interval | None:
        """Return the interval of a recipe's entry in `ratios`, valid for all pairs at once; None without an entry."""
        ratio = self.ratios.get(recipe)
        return None if ratio is None else ratio.interval(bonferroni_tail(len(self.tied)))


def margin_of(fits: Sequence[Fit], margin: float | None) -> float:
    """Return the margin of a tie, in reward; for None, 0.02 of the reward's scale.

    Raises:
        UserError: the margin is negative or not a number.
    """
    if margin is None:
        return MARGIN * max((fit.curve.scale for fit in fits), default=1.0)
    if not (np.isfinite(margin) and margin >= 0):
        raise UserError(f"--margin {margin:g}: must be 0 or more, in reward units")
    return margin


def pairing_of(fits: Sequence[Fit]) -> Pairing | None:
    """Return the pairing of identifiable recipes by seed; None unless all have the same seeds."""
    return paired_seed_spread([fit.seed_excess for fit in fits], max((fit.curve.scale for fit in fits), default=1.0))


def draw_asymptotes(fits: Sequence[Fit]) -> list[AsymptoteDraws]:
    """Draw every recipe's asymptote jointly.

    In each draw all recipes follow the same law (form of the curve). If one law puts every ceiling higher than another
    law does, that is not a difference between recipes. A law is drawn with its mean posterior weight over the recipes.

    Asymptotes are shrunk towards each other (`_prior_weights`), because the highest of many estimates is partly high by
    luck, and because a recipe with little data has a wide posterior, whose mean is high.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
    """
    pairing = pairing_of([fit for fit in fits if fit.identifiable])
    laws = _sample_laws(fits)
    priors = _prior_weights(fits)
    result = []
    for fit in fits:
        rng = generator(fit.recipe, "asymptote")
        if not can_forecast(fit):
            result.append(AsymptoteDraws(np.asarray(rng.uniform(*fit.bounds, DRAWS)), None, np.zeros(DRAWS), 0.0))
            continue
        values, weight = asymptote_draws(fit), priors.get(fit.recipe, np.ones(DRAWS))
        rows = _sample_by_law(fit, laws, weight, rng)
        spread = pairing.spread if pairing is not None and fit.identifiable else fit.seed_spread
        result.append(AsymptoteDraws(values[rows], rows, seed_offsets(fit, spread=spread), spread.sd))
    return result


def draw_rewards(fits: Sequence[Fit], compute: float) -> list[Array]:
    """Draw every recipe's mean reward over seeds at a compute jointly. Return one array (K,) per fit.

    As in `draw_asymptotes`, all recipes follow the same law in each draw. The verdict has no effect. The reward of a
    recipe that cannot be forecast at this compute is drawn uniformly from the whole scale.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        compute: where to forecast, in the curves' unit.
    """
    laws = _sample_laws(fits)
    result = []
    for fit in fits:
        rng = generator(fit.recipe, "reward")
        if not can_forecast_at(fit, compute):
            result.append(np.asarray(rng.uniform(*fit.bounds, DRAWS)))
            continue
        rows = _sample_by_law(fit, laws, np.ones(DRAWS), rng)
        result.append(reward_draws_over_seeds(fit, [compute])[rows, 0])
    return result


def _sample_laws(fits: Sequence[Fit]) -> list[str]:
    """Sample the name of the law of each of K joint draws. A law's probability is its mean weight over the recipes."""
    outlooks = [fit.outlook for fit in fits if fit.outlook is not None]
    names = sorted({name for outlook in outlooks for name in outlook.weights})
    if not names:
        return []
    weights = np.array([[outlook.weights.get(name, 0.0) for name in names] for outlook in outlooks]).mean(0)
    return [names[i] for i in draw_by_weight(weights, DRAWS, np.random.default_rng(0))]


def _prior_weights(fits: Sequence[Fit]) -> dict[str, Array]:
    """Return, by recipe, weights (K,) for the draws of its asymptote, given the asymptotes of the other recipes.

    The weights are the density of a Student t with 4 degrees of freedom about the weighted mean of the others. Its
    heavy tails leave a recipe that is surely different nearly where it is. Recipes whose reward does not rise neither
    have such weights nor affect those of others.

    Returns:
        An entry per rising recipe; none if there are fewer than `_MIN_RECIPES` of these.
    """
    rising = [fit for fit in fits if can_forecast(fit) and fit.verdict not in ("flat", "decreasing")]
    if len(rising) < _MIN_RECIPES:
        return {}
    scale = max(fit.curve.scale for fit in rising)
    draws = [asymptote_draws(fit) for fit in rising]
    estimates = np.array(
        [asymptote_of(fit) if fit.identifiable else values.mean() for fit, values in zip(rising, draws, strict=True)]
    )
    errors = np.maximum([values.var() for values in draws], (1e-6 * scale) ** 2)
    scatter = max(_between_variance(estimates, errors), (_MIN_SCATTER * scale) ** 2)
    result = {}
    for i, fit in enumerate(rising):
        precisions = 1 / (errors + scatter)
        precisions[i] = 0.0
        centre = precisions @ estimates / precisions.sum()
        variance = scatter + 1 / precisions.sum()
        result[fit.recipe] = (1 + (draws[i] - centre) ** 2 / (4 * variance)) ** -2.5
    return result


def _between_variance(estimates: Array, errors: Array) -> float:
    """Return the variance of true values between N estimates (N,) with error variances (N,); it may be negative.

    The method of moments of DerSimonian and Laird (1986), as in a random-effects meta-analysis.
    """
    weights = 1 / errors
    mean = weights @ estimates / weights.sum()
    excess = weights @ (estimates - mean) ** 2 - (len(estimates) - 1)
    return float(excess / (weights.sum() - weights @ weights / weights.sum()))


def _sample_by_law(fit: Fit, laws: Sequence[str], weight: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Sample K of a recipe's draws by weight, so that draw k follows the k-th of the given laws.

    Return indices (K,).
    """
    assert fit.outlook is not None
    futures = fit.outlook.futures
    wanted_laws = np.array(laws)
    rows = np.empty(len(wanted_laws), dtype=np.intp)
    numbers = {law.name: i for i, law in enumerate(futures.laws)}
    for name in np.unique(wanted_laws):
        rows_of_law = np.flatnonzero(futures.law == numbers.get(name, -1))
        # A law with few draws hardly explains the recipe's curve.
        rows_of_law = rows_of_law if len(rows_of_law) >= _MIN_DRAWS else np.arange(len(futures.law))
        places = np.flatnonzero(wanted_laws == name)
        rows[places] = rows_of_law[draw_by_weight(weight[rows_of_law], len(places), rng)]
    return rows


def choose_at_horizon(fits: Sequence[Fit], margin: float, compute: float | None = None) -> Horizon | None:
    """Choose a recipe by its reward at a compute; None if no recipe was evaluated after the start.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: largest shortfall from the highest reward at which choosing a recipe is not an error.
        compute: where to compare; None for `WINDOWS` times the largest compute of any recipe.
    """
    end = max((fit.window[1] for fit in fits if fit.window is not None), default=None)
    if not end:  # the end is 0 if there is only the evaluation before training
        return None
    compute = WINDOWS * end if compute is None else compute
    draws = np.stack(draw_rewards(fits, compute))
    names = [fit.recipe for fit in fits]
    shortfalls = draws.max(axis=0) - draws
    forecastable = [i for i, fit in enumerate(fits) if can_forecast_at(fit, compute)]
    leader = min(forecastable, key=lambda i: (float(shortfalls[i].mean()), names[i]), default=None)
    p_wrong = None if leader is None or len(fits) < 2 else float((shortfalls[leader] > margin).mean())
    return Horizon(
        compute=compute,
        windows=compute / end,
        leader=None if leader is None else names[leader],
        p_best=dict(zip(names, chances_of_being_best(list(draws)), strict=True)),
        p_wrong=p_wrong,
        decided=p_wrong is not None and p_wrong <= _UNSURE,
    )


def find_standing(fits: Sequence[Fit], margin: float | None = None, budget: float | None = None) -> Standing:
    """Choose the recipe with the smallest expected loss, and judge whether the data decide the choice.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: largest shortfall from the best A, in reward, at which choosing a recipe is not an error; None for 0.02
            of the reward's scale.
        budget: compute of the horizon; None for `WINDOWS` times the largest compute of any recipe.

    Raises:
        UserError: margin is negative or not a number.
    """
    margin = margin_of(fits, margin)
    draws_of_all = draw_asymptotes(fits)
    recipes = [fit.recipe for fit in fits]
    p_best = dict(zip(recipes, chances_of_being_best([draws.asymptote() for draws in draws_of_all]), strict=True))
    ranked = [fit for fit in fits if fit.identifiable]
    asymptotes = {fit.recipe: asymptote_of(fit) for fit in ranked}
    best = max(asymptotes.values(), default=0.0)
    losses = dict(zip(recipes, _shortfalls(draws_of_all).mean(axis=1).tolist(), strict=True))
    smallest_loss = min((losses[fit.recipe] for fit in ranked), default=0.0)
    # Compare losses too: an estimate of A may be within the margin where the expected loss is not.
    tied = [
        fit
        for fit in ranked
        if best - asymptotes[fit.recipe] <= margin + 1e-12 and losses[fit.recipe] - smallest_loss <= margin + 1e-12
    ]
    shared_a = shared_asymptote(tied)
    pairing = pairing_of(ranked)
    efficiency_by_recipe = {} if shared_a is None else efficiencies(tied, shared_a, spreads_of(tied, pairing))

    def order(fit: Fit) -> tuple[bool, float, str]:
        efficiency = efficiency_by_recipe.get(fit.recipe)
        return (
            fit not in tied,
            -asymptotes[fit.recipe] if efficiency is None else float(np.median(efficiency.to_most)),
            fit.recipe,
        )

    ordered = sorted(ranked, key=order)
    rivals = tuple(fit.recipe for fit in fits if not fit.identifiable and p_best[fit.recipe] > COULD_WIN)
    p_wrong_by_recipe = dict(
        zip(recipes, (_shortfalls(draws_of_all, margin) > margin).mean(axis=1).tolist(), strict=True)
    )
    # Efficiency decides only between recipes that are surely within the margin.
    safe = [fit for fit in ordered if fit in tied and p_wrong_by_recipe[fit.recipe] <= _UNSURE]
    leader = _leader(fits, safe, losses)
    if leader in tied:
        ordered = [leader, *(fit for fit in ordered if fit is not leader)]
    p_wrong = None if leader is None or len(fits) < 2 else p_wrong_by_recipe[leader.recipe]
    by_efficiency = [fit.recipe for fit in ordered if fit.recipe in efficiency_by_recipe]
    ratios = {
        recipe: Ratio.of(efficiency_by_recipe[recipe].to_most, efficiency_by_recipe[by_efficiency[0]].to_most)
        for recipe in by_efficiency[1:]
    }
    tail = bonferroni_tail(len(by_efficiency))
    slower = tuple(recipe for recipe, ratio in ratios.items() if ratio.above_one(tail))
    faster = tuple(recipe for recipe, ratio in ratios.items() if ratio.below_one(tail))
    choices: tuple[str, ...] = ()
    if leader is not None and leader.recipe in efficiency_by_recipe:
        choices = tuple(recipe for recipe in by_efficiency if recipe not in slower)
    return Standing(
        margin=margin,
        leader=None if leader is None else leader.recipe,
        losses=losses,
        p_best=p_best,
        p_wrong=p_wrong,
        p_wrong_by_recipe=p_wrong_by_recipe,
        ranked=tuple(fit.recipe for fit in ordered),
        tied=tuple(fit.recipe for fit in ordered if fit in tied),
        shared_a=shared_a,
        efficiencies=efficiency_by_recipe,
        ratios=ratios,
        slower=slower,
        faster=faster,
        choices=choices,
        rivals=rivals,
        outcome=_outcome(fits, leader, p_best, p_wrong, len(choices), bool(faster)),
        verdicts={fit.recipe: fit.verdict for fit in fits},
        pairing=pairing,
        drawn=tuple(draws_of_all),
        horizon=choose_at_horizon(fits, margin, budget),
    )


def _outcome(
    fits: Sequence[Fit],
    leader: Fit | None,
    p_best: Mapping[str, float],
    p_wrong: float | None,
    choices: int,
    has_faster: bool,
) -> Outcome:
    """Classify the choice.

    Args:
        fits: fits of all recipes.
        leader, p_best, p_wrong: as in `Standing`.
        choices: number of tied recipes that may be chosen; 0 if the leader is not tied.
        has_faster: whether a recipe tied with the leader surely needs less compute.
    """
    if leader is None or (len(fits) == 1 and not leader.identifiable):
        return Outcome.UNKNOWN
    if p_wrong is None:
        return Outcome.ALONE
    sure = p_wrong <= _UNSURE
    if not choices:
        # Flat recipes are within the margin of each other, but this makes none of them the winner.
        if all(fit.verdict == "flat" for fit in fits) and not (sure and p_best[leader.recipe] >= 1 - _UNSURE):
            return Outcome.FLAT
        return Outcome.HIGHEST if sure else Outcome.BEST_SO_FAR
    if not sure:
        return Outcome.TIED_UNSURE
    if has_faster:
        return Outcome.FASTER_UNSURE
    return Outcome.MOST_EFFICIENT if choices == 1 else Outcome.TIED


def asymptote_of(fit: Fit) -> float:
    """Return the A of an identifiable fit, which always has one."""
    assert fit.A.value is not None
    return fit.A.value


def _leader(fits: Sequence[Fit], safe: Sequence[Fit], losses: Mapping[str, float]) -> Fit | None:
    """Return the recipe with the smallest expected loss or, if that recipe is in `safe`, the first of `safe`.

    Recipes that are not identifiable take part with all their uncertainty. Recipes without a forecast are left out.

    Args:
        fits: fits of all recipes.
        safe: tied recipes that are surely within the margin of the best, the most efficient first.
        losses: expected loss by recipe.
    """
    readable_fits = [fit for fit in fits if can_forecast(fit)]
    best = min(readable_fits, key=lambda fit: (losses[fit.recipe], fit.recipe), default=None)
    return safe[0] if best in safe else best


def _shortfalls(draws_of_all: Sequence[AsymptoteDraws], margin: float | None = None) -> Array:
    """Return the highest asymptote of each joint draw minus each recipe's asymptote, (R, K), for R recipes."""
    asymptotes = np.stack([draws.asymptote(margin) for draws in draws_of_all])
    return np.asarray(asymptotes.max(axis=0) - asymptotes)


def chances_of_being_best(draws: Sequence[Array]) -> list[float]:
    """Return the fraction of joint draws in which each recipe is highest.

    Recipes that tie in a draw share it equally.
    """
    if not draws:
        return []
    stacked = np.stack(draws)
    top = stacked == stacked.max(axis=0)
    return [float(p) for p in (top / top.sum(axis=0)).mean(axis=1)]


def spreads_of(fits: Sequence[Fit], pairing: Pairing | None) -> dict[str, SeedSpread]:
    """Return the spread of A between seeds, by recipe.

    With a pairing it is the pairing's, in which common effects cancel.
    """
    return {fit.recipe: fit.seed_spread if pairing is None else pairing.spread for fit in fits}


def shared_asymptote(tied: Sequence[Fit]) -> float | None:
    """Return the mean A of tied recipes; None without a tie."""
    return None if len(tied) < 2 else float(np.mean([asymptote_of(fit) for fit in tied]))
