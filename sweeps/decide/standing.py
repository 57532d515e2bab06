"""The current choice between recipes: one joint posterior that ranking, plan and report all use.

Every recipe contributes posterior draws of its asymptote (`sweeps.fit.forecast`). A recipe that is not identifiable
contributes the full width of its posterior; one without any forecast, draws from the whole reward scale. So a choice
is only sure if it is also sure against the recipes that could not be ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.efficiency import Efficiency, Ratio, efficiencies, tail_of_all_pairs
from sweeps.decide.margin import MARGIN
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.posterior import by_weight
from sweeps.fit.predict import asymptote_draws, paths_over_seeds, readable, seed_offsets, within
from sweeps.fit.seeds import Pairing, SeedSpread, paired_seed_spread

# A choice counts as decided from this probability.
CONFIDENCE = 0.95
_UNSURE = 1 - CONFIDENCE
# An unranked recipe is named if its chance of being best is above this.
COULD_WIN = 0.05
# Scatter of asymptotes between recipes: fewest recipes to estimate it from, its lower limit (as a share of the
# reward's scale), and the degrees of freedom of the shrinkage prior.
_FEW, _APART, _TAIL = 3, 0.03, 4.0
# With fewer draws of a law than this, the recipe's draws of all laws are used instead.
_LEAST = 8
# Without a budget, recipes are compared at this many windows.
WINDOWS = 2.0


@dataclass(frozen=True, eq=False)
class Drawn:
    """Posterior draws of one recipe's asymptote.

    Attributes:
        values: A for the mean of the given seeds, in reward, (K,).
        rows: index of each value's draw in `Fit.outlook`, (K,); None for a recipe without a forecast.
        offsets: difference between the recipe's A and that of the given seeds' mean, in reward, (K,).
        spread: standard deviation of A between seeds, from which `offsets` are drawn.
    """

    values: Array
    rows: NDArray[np.intp] | None
    offsets: Array
    spread: float

    def asymptote(self, margin: float | None = None) -> Array:
        """Return A over all seeds, (K,). A spread up to the margin of a tie, if given, is left out: it is covered."""
        return self.values if margin is not None and self.spread <= margin else self.values + self.offsets


class Outcome(Enum):
    """Possible outcomes of a choice between recipes; `sweeps.decide.wording` words them."""

    UNKNOWN = "nothing is known of any recipe, or the only one is not identifiable"
    ALONE = "there is but one recipe, and nothing to compare it with"
    HIGHEST = "the leader's A is surely within the margin of the best"
    BEST_SO_FAR = "the leader's A may fall short of the best by more than the margin"
    FLAT = "no reward rises, and none is surely within the margin of the best"
    MOST_EFFICIENT = "some are tied in A, and of these the leader surely takes the least compute"
    TIED = "some are tied in A, and compute does not single one of them out: none of several is a wrong choice"
    TIED_UNSURE = "some are tied in A, and they may fall short of the best by more than the margin"

    @property
    def decided(self) -> bool:
        """Return whether the data decide the choice."""
        return self in (Outcome.ALONE, Outcome.HIGHEST, Outcome.MOST_EFFICIENT, Outcome.TIED)


@dataclass(frozen=True)
class Horizon(AsJson):
    """The choice by the reward at one compute, which needs no asymptote.

    Attributes:
        compute: where rewards are compared: a budget, or `WINDOWS` times the largest compute of any recipe.
        windows: the same as a multiple of the largest compute of any recipe.
        leader: recipe with the smallest expected loss there; None where nothing is known.
        p_best: probability of the highest reward, by recipe.
        p_wrong: probability that another's reward exceeds the leader's by more than the margin; None with one recipe.
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
    """The state of the choice between recipes; mappings are by recipe.

    Attributes:
        margin: choosing a recipe whose A is within this of the best is not an error, in reward.
        leader: recipe to choose: the one with the smallest expected loss, identifiable or not, or the first of those
            tied with it; None where nothing is known.
        losses: expected difference of the highest asymptote and the recipe's own, in reward.
        p_best: probability of the highest asymptote among ranked and unranked recipes, including the spread between
            seeds.
        p_wrong: probability that another's asymptote exceeds the leader's by more than the margin; None without a
            leader or with one recipe.
        ranked: identifiable recipes, the best first.
        tied: recipes whose A and expected loss are within the margin of the best, the most efficient first.
        shared_a: mean A of the tied recipes; None without a tie.
        efficiencies: compute of each tied recipe towards the shared A, see `sweeps.decide.efficiency`; empty without a
            tie.
        ratios: compute of each tied recipe to 90% of the way there, over that of the first one.
        slower: tied recipes that surely need more compute than the first.
        choices: tied recipes that are not slower, any of which may be chosen; empty if the leader is not tied.
        rivals: unranked recipes that are best with a probability above `COULD_WIN`.
        outcome: state of the choice.
        verdicts: verdict of every recipe's fit.
        pairing: seeds by which identifiable recipes are paired; None if they do not share seeds.
        drawn: the draws behind all of this, one entry per fit.
        horizon: the choice by the reward at a compute; None where no recipe has a window.
    """

    margin: float
    leader: str | None
    losses: dict[str, float]
    p_best: dict[str, float]
    p_wrong: float | None
    ranked: tuple[str, ...]
    tied: tuple[str, ...]
    shared_a: float | None
    efficiencies: dict[str, Efficiency]
    ratios: dict[str, Ratio]
    slower: tuple[str, ...]
    choices: tuple[str, ...]
    rivals: tuple[str, ...]
    outcome: Outcome
    verdicts: dict[str, str]
    pairing: Pairing | None
    drawn: tuple[Drawn, ...]
    horizon: Horizon | None

    @property
    def decided(self) -> bool:
        """Return whether the data decide the choice."""
        return self.outcome.decided

    def ratio(self, recipe: str) -> Interval | None:
        """Return the interval of one of `ratios`, valid for all pairs of tied recipes at once; None if not in it."""
        ratio = self.ratios.get(recipe)
        return None if ratio is None else ratio.interval(tail_of_all_pairs(len(self.tied)))


def margin_of(fits: Sequence[Fit], margin: float | None) -> float:
    """Return the margin of a tie, in reward: the given one, or the paper's 0.02 converted to the reward's scale.

    Raises:
        UserError: it is negative or not a number.
    """
    if margin is None:
        return MARGIN * max((fit.curve.scale for fit in fits), default=1.0)
    if not (np.isfinite(margin) and margin >= 0):
        raise UserError(f"--margin {margin:g}: must be 0 or more, in reward units")
    return margin


def pairing_of(fits: Sequence[Fit]) -> Pairing | None:
    """Return the seeds by which identifiable recipes are compared; None unless all have the same seeds."""
    return paired_seed_spread([fit.seed_excess for fit in fits], max((fit.curve.scale for fit in fits), default=1.0))


def joint(fits: Sequence[Fit]) -> list[Drawn]:
    """Return joint draws of every recipe's asymptote.

    In each draw all recipes follow the same law, chosen by how well the laws predict the study's curves: if one law
    puts every ceiling higher than another law, that is not a difference between recipes. Identifiable recipes are
    shrunk towards each other, because the highest of many estimates is partly high by luck: their prior is a Student t
    about the mean of the others, as wide as the estimates scatter beyond their errors. Other recipes keep the full
    width of their posterior.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
    """
    pairing = pairing_of([fit for fit in fits if fit.identifiable])
    laws = _laws(fits)
    width = _scatter(fits)
    asymptotes = {fit.recipe: asymptote_of(fit) for fit in fits if fit.identifiable}
    result = []
    for fit in fits:
        rng = generator(fit.recipe, "asymptote")
        if not readable(fit):
            result.append(Drawn(np.asarray(rng.uniform(*fit.bounds, DRAWS)), None, np.zeros(DRAWS), 0.0))
            continue
        values, weight = asymptote_draws(fit), np.ones(DRAWS)
        if fit.identifiable and width is not None:
            others = float(np.mean([value for recipe, value in asymptotes.items() if recipe != fit.recipe]))
            # Weights of a Student t density: with its heavy tails, a recipe that is truly different hardly moves.
            weight = (1 + (values - others) ** 2 / (_TAIL * width)) ** (-0.5 * (_TAIL + 1))
        rows = _under_laws(fit, laws, weight, rng)
        spread = pairing.spread if pairing is not None and fit.identifiable else fit.seed_spread
        result.append(Drawn(values[rows], rows, seed_offsets(fit, spread=spread), spread.sd))
    return result


def joint_rewards(fits: Sequence[Fit], compute: float) -> list[Array]:
    """Return joint draws of every recipe's reward at a compute, over all seeds; (K,) each.

    As in `joint`, all recipes follow the same law in each draw. Forecasts do not depend on the verdict. The reward of a
    recipe that cannot be forecast at this compute is drawn uniformly from the whole scale.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        compute: where to forecast, in the curves' unit.
    """
    laws = _laws(fits)
    result = []
    for fit in fits:
        rng = generator(fit.recipe, "reward")
        if not within(fit, compute):
            result.append(np.asarray(rng.uniform(*fit.bounds, DRAWS)))
            continue
        rows = _under_laws(fit, laws, np.ones(DRAWS), rng)
        result.append(paths_over_seeds(fit, [compute])[rows, 0])
    return result


def _laws(fits: Sequence[Fit]) -> list[str]:
    """Return the law of each of K joint draws, sampled by the laws' mean weight over the recipes."""
    outlooks = [fit.outlook for fit in fits if fit.outlook is not None]
    names = sorted({name for outlook in outlooks for name in outlook.weights})
    if not names:
        return []
    weights = np.array([[outlook.weights.get(name, 0.0) for name in names] for outlook in outlooks]).mean(0)
    return [names[i] for i in by_weight(weights, DRAWS, np.random.default_rng(0))]


def _scatter(fits: Sequence[Fit]) -> float | None:
    """Return the variance of identifiable asymptotes between recipes, beyond their errors; None if under `_FEW`."""
    identifiable = [fit for fit in fits if fit.identifiable]
    if len(identifiable) < _FEW:
        return None
    error = float(np.mean([asymptote_draws(fit).var() for fit in identifiable]))
    least = (_APART * max(fit.curve.scale for fit in identifiable)) ** 2
    # Method of moments: the variance of the estimates is the variance of the true values plus that of the errors.
    return max(float(np.var([asymptote_of(fit) for fit in identifiable], ddof=1)) - error, least)


def _under_laws(fit: Fit, laws: Sequence[str], weight: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Select indices of a recipe's draws by weight (K,) so that their laws match the given ones; (K,)."""
    assert fit.outlook is not None
    futures = fit.outlook.futures
    wanted = np.array(laws)
    rows = np.empty(len(wanted), dtype=np.intp)
    numbers = {law.name: i for i, law in enumerate(futures.laws)}
    for name in np.unique(wanted):
        rows_of_law = np.flatnonzero(futures.law == numbers.get(name, -1))
        # Few draws: this law hardly explains the recipe's curve, so use the draws of all laws instead.
        rows_of_law = rows_of_law if len(rows_of_law) >= _LEAST else np.arange(len(futures.law))
        places = np.flatnonzero(wanted == name)
        rows[places] = rows_of_law[by_weight(weight[rows_of_law], len(places), rng)]
    return rows


def horizon_of(fits: Sequence[Fit], margin: float, compute: float | None = None) -> Horizon | None:
    """Choose a recipe by its reward at a compute; None where no recipe has a window.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: choosing a recipe whose reward is within this of the highest is not an error, in reward.
        compute: where to compare; None for `WINDOWS` times the largest compute of any recipe.
    """
    end = max((fit.window[1] for fit in fits if fit.window is not None), default=None)
    if end is None:
        return None
    compute = WINDOWS * end if compute is None else compute
    draws = np.stack(joint_rewards(fits, compute))
    names = [fit.recipe for fit in fits]
    short = draws.max(axis=0) - draws
    known = [i for i, fit in enumerate(fits) if within(fit, compute)]
    first = min(known, key=lambda i: (float(short[i].mean()), names[i]), default=None)
    p_wrong = None if first is None or len(fits) < 2 else float((short[first] > margin).mean())
    return Horizon(
        compute=compute,
        windows=compute / end,
        leader=None if first is None else names[first],
        p_best=dict(zip(names, chances_of_being_best(list(draws)), strict=True)),
        p_wrong=p_wrong,
        decided=p_wrong is not None and p_wrong <= _UNSURE,
    )


def find_standing(fits: Sequence[Fit], margin: float | None = None, budget: float | None = None) -> Standing:
    """Choose the recipe with the smallest expected loss, and judge whether the data decide the choice.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: choosing a recipe whose A is within this of the best is not an error, in reward; None for the default.
        budget: compute of the horizon; None for `WINDOWS` times the largest compute of any recipe.

    Raises:
        UserError: margin is negative or not a number.
    """
    margin = margin_of(fits, margin)
    drawn = joint(fits)
    recipes = [fit.recipe for fit in fits]
    p_best = dict(zip(recipes, chances_of_being_best([one.asymptote() for one in drawn]), strict=True))
    ranked = [fit for fit in fits if fit.identifiable]
    names = {fit.recipe: asymptote_of(fit) for fit in ranked}
    best = max(names.values(), default=0.0)
    losses = dict(zip(recipes, _shortfalls(drawn).mean(axis=1).tolist(), strict=True))
    least = min((losses[fit.recipe] for fit in ranked), default=0.0)
    # An estimate within the margin may still have a larger expected loss.
    tied = [
        fit
        for fit in ranked
        if best - names[fit.recipe] <= margin + 1e-12 and losses[fit.recipe] - least <= margin + 1e-12
    ]
    shared_a = shared_asymptote(tied)
    pairing = pairing_of(ranked)
    efficient = {} if shared_a is None else efficiencies(tied, shared_a, spreads_of(tied, pairing))

    def order(fit: Fit) -> tuple[bool, float, str]:
        efficiency = efficient.get(fit.recipe)
        return (
            fit not in tied,
            -names[fit.recipe] if efficiency is None else float(np.median(efficiency.to_most)),
            fit.recipe,
        )

    ordered = sorted(ranked, key=order)
    rivals = tuple(fit.recipe for fit in fits if not fit.identifiable and p_best[fit.recipe] > COULD_WIN)
    wrong = dict(zip(recipes, (_shortfalls(drawn, margin) > margin).mean(axis=1).tolist(), strict=True))
    # Efficiency decides only between recipes that are surely within the margin.
    safe = [fit for fit in ordered if fit in tied and wrong[fit.recipe] <= _UNSURE]
    leader = _leader(fits, safe, losses)
    if leader in tied:
        ordered = [leader, *(fit for fit in ordered if fit is not leader)]
    p_wrong = None if leader is None or len(fits) < 2 else wrong[leader.recipe]
    first = [fit.recipe for fit in ordered if fit.recipe in efficient]
    ratios = {recipe: Ratio.of(efficient[recipe].to_most, efficient[first[0]].to_most) for recipe in first[1:]}
    slower = tuple(r for r, ratio in ratios.items() if ratio.above_one(tail_of_all_pairs(len(first))))
    choices: tuple[str, ...] = ()
    if leader is not None and leader.recipe in efficient:
        choices = tuple(recipe for recipe in first if recipe not in slower)
    return Standing(
        margin=margin,
        leader=None if leader is None else leader.recipe,
        losses=losses,
        p_best=p_best,
        p_wrong=p_wrong,
        ranked=tuple(fit.recipe for fit in ordered),
        tied=tuple(fit.recipe for fit in ordered if fit in tied),
        shared_a=shared_a,
        efficiencies=efficient,
        ratios=ratios,
        slower=slower,
        choices=choices,
        rivals=rivals,
        outcome=_outcome(fits, leader, p_wrong, len(choices)),
        verdicts={fit.recipe: fit.verdict for fit in fits},
        pairing=pairing,
        drawn=tuple(drawn),
        horizon=horizon_of(fits, margin, budget),
    )


def _outcome(fits: Sequence[Fit], leader: Fit | None, p_wrong: float | None, choices: int) -> Outcome:
    """Return the outcome of the choice; `choices` is 0 unless the leader is one of several tied recipes."""
    if leader is None or (len(fits) == 1 and not leader.identifiable):
        return Outcome.UNKNOWN
    if p_wrong is None:
        return Outcome.ALONE
    sure = p_wrong <= _UNSURE
    if not choices:
        unsure = Outcome.FLAT if all(fit.verdict == "flat" for fit in fits) else Outcome.BEST_SO_FAR
        return Outcome.HIGHEST if sure else unsure
    if not sure:
        return Outcome.TIED_UNSURE
    # All of these choices are within the given margin.
    return Outcome.MOST_EFFICIENT if choices == 1 else Outcome.TIED


def asymptote_of(fit: Fit) -> float:
    """Return the A of an identifiable fit, which is never None."""
    assert fit.A.value is not None
    return fit.A.value


def _leader(fits: Sequence[Fit], safe: Sequence[Fit], losses: Mapping[str, float]) -> Fit | None:
    """Return the recipe with the smallest expected loss; if that is safe, the first of the safe recipes.

    A recipe whose asymptote cannot be named is not assumed to be low. Recipes without a forecast are left out.
    """
    known = [fit for fit in fits if readable(fit)]
    best = min(known, key=lambda fit: (losses[fit.recipe], fit.recipe), default=None)
    return safe[0] if best in safe else best


def _shortfalls(drawn: Sequence[Drawn], margin: float | None = None) -> Array:
    """Return the highest asymptote of each joint draw minus each recipe's own, see `Drawn.asymptote`; (R, K)."""
    runs = np.stack([one.asymptote(margin) for one in drawn])
    return np.asarray(runs.max(axis=0) - runs)


def chances_of_being_best(draws: Sequence[Array]) -> list[float]:
    """Return the share of joint draws in which each is highest; equal values (at a common bound) share the draw."""
    if not draws:
        return []
    stacked = np.stack(draws)
    top = stacked == stacked.max(axis=0)
    return [float(p) for p in (top / top.sum(axis=0)).mean(axis=1)]


def spreads_of(fits: Sequence[Fit], pairing: Pairing | None) -> dict[str, SeedSpread]:
    """Return the spread of A between seeds by recipe; the paired one if given, because common effects cancel."""
    return {fit.recipe: fit.seed_spread if pairing is None else pairing.spread for fit in fits}


def shared_asymptote(tied: Sequence[Fit]) -> float | None:
    """Return the mean A of tied recipes; None without a tie."""
    return None if len(tied) < 2 else float(np.mean([asymptote_of(fit) for fit in tied]))
