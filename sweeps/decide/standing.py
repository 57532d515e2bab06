"""The current choice between recipes: one joint posterior, which ranking, plan and report all read.

Every recipe takes part with posterior draws of its asymptote (`sweeps.fit.forecast`): one that is not identifiable with
the full width of its posterior, one without any forecast with draws from the whole scale. So a choice is sure only
where it is sure against the recipes that could not be ranked, too.
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

# A choice counts as decided from this probability on.
CONFIDENCE = 0.95
_UNSURE = 1 - CONFIDENCE
# A recipe that cannot be ranked is named where it could be best with more than this chance.
COULD_WIN = 0.05
# Recipes from which on their scatter can be told, the least it is taken to be (of the reward's scale), and its tail.
_FEW, _APART, _TAIL = 3, 0.03, 4.0
# Fewer draws of a law than this are not taken to represent it.
_LEAST = 8
# How many windows ahead recipes are compared, where no budget is given.
WINDOWS = 2.0


@dataclass(frozen=True, eq=False)
class Drawn:
    """Posterior draws of one recipe's asymptote.

    Attributes:
        values: A for the mean of the seeds given, in reward, (K,).
        rows: index of the draw in `Fit.outlook` that each value belongs to, (K,); None where nothing could be drawn.
        offsets: how far the mean of the seeds given lies off the recipe's own, in reward, (K,).
        spread: standard deviation of A between seeds, from which `offsets` are drawn.
    """

    values: Array
    rows: NDArray[np.intp] | None
    offsets: Array
    spread: float

    def asymptote(self, margin: float | None = None) -> Array:
        """Over all seeds, (K,); given the margin of a tie, a spread below it is left out: the margin stands for it."""
        return self.values if margin is not None and self.spread <= margin else self.values + self.offsets


class Outcome(Enum):
    """Outcomes that a choice between recipes can have; `sweeps.decide.wording` puts them into words."""

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
        compute: where rewards are compared: a budget, or `WINDOWS` times the most that any recipe has used.
        windows: the same as a multiple of the most that any recipe has used.
        leader: recipe of the least expected loss there; None where nothing is known of any.
        p_best: probability of the highest reward, by recipe.
        p_wrong: probability that another's reward exceeds the leader's by more than the margin; None without another.
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
    """The choice between recipes as the data leave it; mappings are by recipe.

    Attributes:
        margin: recipes whose A lies within this of the best are no wrong choice, in reward.
        leader: recipe to choose: that of the least expected loss, whether or not its A is identifiable, or the first of
            those tied with it; None where nothing is known of any.
        losses: expected excess of the highest asymptote of all over the recipe's own, in reward.
        p_best: probability of the highest asymptote, of ranked and unranked recipes, spread between seeds included.
        p_wrong: probability that another's asymptote exceeds the leader's by more than the margin; None without a
            leader or without another recipe.
        ranked: identifiable recipes, the best first.
        tied: those whose A, and whose expected loss, lie within the margin of the best, the most efficient first.
        shared_a: mean A of the tied recipes; None if no tie.
        efficiencies: compute of each tied recipe towards the shared A, see `sweeps.decide.efficiency`; empty if no tie.
        ratios: compute to 90% of the way there over that of the first tied recipe, of each other one.
        slower: those of them that surely take more.
        choices: tied recipes of which any may be taken, those that are not slower; empty where the leader is not one of
            several tied recipes.
        rivals: unranked recipes that are best with a probability above `COULD_WIN`.
        outcome: how the choice stands.
        p_most_efficient: probability that the leader takes the least compute of the tied ones; None where it is not one
            of several tied recipes.
        verdicts: verdict of every recipe's fit.
        pairing: seeds by which identifiable recipes are paired; None where they do not share them.
        drawn: the draws that all this is computed from, one entry per fit.
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
    p_most_efficient: float | None
    verdicts: dict[str, str]
    pairing: Pairing | None
    drawn: tuple[Drawn, ...]
    horizon: Horizon | None

    @property
    def decided(self) -> bool:
        """Return whether the data decide the choice."""
        return self.outcome.decided

    def ratio(self, recipe: str) -> Interval | None:
        """Return the interval of one of `ratios`, which holds for all pairs of tied recipes together; None without."""
        ratio = self.ratios.get(recipe)
        return None if ratio is None else ratio.interval(tail_of_all_pairs(len(self.tied)))


def margin_of(fits: Sequence[Fit], margin: float | None) -> float:
    """The margin of a tie, in reward units: the paper's 0.02, carried over to the reward's scale, if not given.

    Raises:
        UserError: it is negative or no number.
    """
    if margin is None:
        return MARGIN * max((fit.curve.scale for fit in fits), default=1.0)
    if not (np.isfinite(margin) and margin >= 0):
        raise UserError(f"--margin {margin:g}: must be 0 or more, in reward units")
    return margin


def pairing_of(fits: Sequence[Fit]) -> Pairing | None:
    """The seeds by which identifiable recipes are compared, if they are the same for all."""
    return paired_seed_spread([fit.seed_excess for fit in fits], max((fit.curve.scale for fit in fits), default=1.0))


def joint(fits: Sequence[Fit]) -> list[Drawn]:
    """Joint draws of every recipe's asymptote.

    In each draw all recipes follow the same law, drawn by how well the laws predict the study's curves: that one law
    puts every ceiling higher than another does is no difference between recipes. Identifiable recipes are shrunk
    towards each other, since the highest of many estimates is high by luck, too: their prior is a Student t about the
    others' mean, as wide as the estimates scatter beyond their errors. Other recipes keep the full width of their
    posterior.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
    """
    pairing = pairing_of([fit for fit in fits if fit.identifiable])
    laws = _laws(fits)
    width = _scatter(fits)
    named = {fit.recipe: named_a(fit) for fit in fits if fit.identifiable}
    found = []
    for fit in fits:
        rng = generator(fit.recipe, "asymptote")
        if not readable(fit):
            found.append(Drawn(np.asarray(rng.uniform(*fit.bounds, DRAWS)), None, np.zeros(DRAWS), 0.0))
            continue
        values, weight = asymptote_draws(fit), np.ones(DRAWS)
        if fit.identifiable and width is not None:
            others = float(np.mean([value for recipe, value in named.items() if recipe != fit.recipe]))
            # Weights of a Student t density, whose heavy tails hardly move a recipe that is truly apart.
            weight = (1 + (values - others) ** 2 / (_TAIL * width)) ** (-0.5 * (_TAIL + 1))
        rows = _under_laws(fit, laws, weight, rng)
        spread = pairing.spread if pairing is not None and fit.identifiable else fit.seed_spread
        found.append(Drawn(values[rows], rows, seed_offsets(fit, spread=spread), spread.sd))
    return found


def joint_rewards(fits: Sequence[Fit], compute: float) -> list[Array]:
    """Joint draws of every recipe's reward at a compute, over all seeds; (K,) each.

    As in `joint` all recipes follow the same law in each draw. Forecasts do not depend on the verdict; the reward of a
    recipe that cannot be forecast at this compute is drawn evenly from the whole scale.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        compute: where to forecast, in the curves' unit.
    """
    laws = _laws(fits)
    found = []
    for fit in fits:
        rng = generator(fit.recipe, "reward")
        if not within(fit, compute):
            found.append(np.asarray(rng.uniform(*fit.bounds, DRAWS)))
            continue
        rows = _under_laws(fit, laws, np.ones(DRAWS), rng)
        found.append(paths_over_seeds(fit, [compute])[rows, 0])
    return found


def _laws(fits: Sequence[Fit]) -> list[str]:
    """The law of each of K draws, by its mean weight over the recipes."""
    outlooks = [fit.outlook for fit in fits if fit.outlook is not None]
    names = sorted({name for outlook in outlooks for name in outlook.weights})
    if not names:
        return []
    weights = np.array([[outlook.weights.get(name, 0.0) for name in names] for outlook in outlooks]).mean(0)
    return [names[i] for i in by_weight(weights, DRAWS, np.random.default_rng(0))]


def _scatter(fits: Sequence[Fit]) -> float | None:
    """Return the variance of identifiable asymptotes between recipes, beyond their errors; None with under `_FEW`."""
    named = [fit for fit in fits if fit.identifiable]
    if len(named) < _FEW:
        return None
    error = float(np.mean([asymptote_draws(fit).var() for fit in named]))
    least = (_APART * max(fit.curve.scale for fit in named)) ** 2
    # By method of moments: the variance of estimates is that of the truths plus that of the errors.
    return max(float(np.var([named_a(fit) for fit in named], ddof=1)) - error, least)


def _under_laws(fit: Fit, laws: Sequence[str], weight: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Select indices of a recipe's draws by weight (K,), so that their laws are those given; (K,)."""
    assert fit.outlook is not None
    futures = fit.outlook.futures
    wanted = np.array(laws)
    rows = np.empty(len(wanted), dtype=np.intp)
    numbers = {law.name: i for i, law in enumerate(futures.laws)}
    for name in np.unique(wanted):
        mine = np.flatnonzero(futures.law == numbers.get(name, -1))
        # A law that explains a recipe hardly at all says nothing of it.
        mine = mine if len(mine) >= _LEAST else np.arange(len(futures.law))
        places = np.flatnonzero(wanted == name)
        rows[places] = mine[by_weight(weight[mine], len(places), rng)]
    return rows


def horizon_of(fits: Sequence[Fit], margin: float, compute: float | None = None) -> Horizon | None:
    """Choose a recipe by its reward at a compute; None where no recipe has a window.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: recipes whose reward lies within this of the highest are no wrong choice, in reward.
        compute: where to compare; None for `WINDOWS` times the most that any recipe has used.
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
        p_best=dict(zip(names, best_chances(list(draws)), strict=True)),
        p_wrong=p_wrong,
        decided=p_wrong is not None and p_wrong <= _UNSURE,
    )


def stand(fits: Sequence[Fit], margin: float | None = None, budget: float | None = None) -> Standing:
    """Choose a recipe by least expected loss, and judge whether the data decide the choice.

    Args:
        fits: one fit per recipe, as `fit_curves` returns them.
        margin: recipes whose A lies within this of the best are no wrong choice, in reward; None for the default.
        budget: compute of the horizon; None for `WINDOWS` times the most that any recipe has used.

    Raises:
        UserError: margin is negative or no number.
    """
    margin = margin_of(fits, margin)
    drawn = joint(fits)
    chances = best_chances([one.asymptote() for one in drawn])
    p_best = dict(zip((fit.recipe for fit in fits), chances, strict=True))
    ranked = [fit for fit in fits if fit.identifiable]
    names = {fit.recipe: named_a(fit) for fit in ranked}
    best = max(names.values(), default=0.0)
    losses = dict(zip((fit.recipe for fit in fits), expected_losses(drawn), strict=True))
    least = min((losses[fit.recipe] for fit in ranked), default=0.0)
    # Of estimates within the margin one may still be expected to cost more.
    tied = [
        fit
        for fit in ranked
        if best - names[fit.recipe] <= margin + 1e-12 and losses[fit.recipe] - least <= margin + 1e-12
    ]
    shared_a = shared_asymptote(tied)
    pairing = pairing_of(ranked)
    efficient = {} if shared_a is None else efficiencies(tied, shared_a, spreads_of(tied, pairing))

    def order(fit: Fit) -> tuple[bool, float, str]:
        mine = efficient.get(fit.recipe)
        return fit not in tied, -names[fit.recipe] if mine is None else float(np.median(mine.to_most)), fit.recipe

    ordered = sorted(ranked, key=order)
    rivals = tuple(fit.recipe for fit in fits if not fit.identifiable and p_best[fit.recipe] > COULD_WIN)
    wrong = dict(zip((fit.recipe for fit in fits), wrong_chances(drawn, margin), strict=True))
    # Efficiency decides between those that are surely within the margin, not at the price of being so.
    safe = [fit for fit in ordered if fit in tied and wrong[fit.recipe] <= _UNSURE]
    leader = _leader(fits, safe, losses)
    if leader in tied:
        ordered = [leader, *(fit for fit in ordered if fit is not leader)]
    p_wrong = None if leader is None or len(fits) < 2 else wrong[leader.recipe]
    first = [fit.recipe for fit in ordered if fit.recipe in efficient]
    ratios = {recipe: Ratio.of(efficient[recipe].to_most, efficient[first[0]].to_most) for recipe in first[1:]}
    slower = tuple(r for r, ratio in ratios.items() if ratio.above_one(tail_of_all_pairs(len(first))))
    choices: tuple[str, ...] = ()
    p_most_efficient = None
    if leader is not None and leader.recipe in efficient:
        choices = tuple(recipe for recipe in first if recipe not in slower)
        p_most_efficient = best_chances([-efficient[recipe].to_most for recipe in first])[0]
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
        p_most_efficient=p_most_efficient,
        verdicts={fit.recipe: fit.verdict for fit in fits},
        pairing=pairing,
        drawn=tuple(drawn),
        horizon=horizon_of(fits, margin, budget),
    )


def _outcome(fits: Sequence[Fit], leader: Fit | None, p_wrong: float | None, choices: int) -> Outcome:
    """Return how the choice stands; `choices` is 0 unless the leader is one of several tied recipes."""
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
    # Whichever of the choices is taken, it is no wrong one by the margin that was asked for.
    return Outcome.MOST_EFFICIENT if choices == 1 else Outcome.TIED


def named_a(fit: Fit) -> float:
    """Return the A of an identifiable fit, which is never None."""
    assert fit.A.value is not None
    return fit.A.value


def _leader(fits: Sequence[Fit], safe: Sequence[Fit], losses: Mapping[str, float]) -> Fit | None:
    """The recipe of the least expected loss; where that is surely within the margin, the first of all that are.

    A refusal to name an asymptote is no evidence that it is low. Of what cannot be read nothing is known at all.
    """
    known = [fit for fit in fits if readable(fit)]
    best = min(known, key=lambda fit: (losses[fit.recipe], fit.recipe), default=None)
    return safe[0] if best in safe else best


def expected_losses(drawn: Sequence[Drawn]) -> list[float]:
    """Expected loss of choosing each recipe: mean over joint draws of the highest asymptote less its own."""
    runs = np.stack([one.asymptote() for one in drawn])
    return [float(loss) for loss in (runs.max(axis=0) - runs).mean(axis=1)]


def wrong_chances(drawn: Sequence[Drawn], margin: float) -> list[float]:
    """Share of joint draws, for each recipe, in which another's asymptote is higher by more than the margin."""
    runs = np.stack([one.asymptote(margin) for one in drawn])
    return [float(p) for p in (runs.max(axis=0) - runs > margin).mean(axis=1)]


def best_chances(draws: Sequence[Array]) -> list[float]:
    """Share of joint draws in which each is highest; equal values (a common bound) share the draw."""
    if not draws:
        return []
    stacked = np.stack(draws)
    top = stacked == stacked.max(axis=0)
    return [float(p) for p in (top / top.sum(axis=0)).mean(axis=1)]


def spreads_of(fits: Sequence[Fit], pairing: Pairing | None) -> dict[str, SeedSpread]:
    """Return the spread of A between seeds by recipe: what seeds do to all alike is no error of a comparison."""
    return {fit.recipe: fit.seed_spread if pairing is None else pairing.spread for fit in fits}


def shared_asymptote(tied: Sequence[Fit]) -> float | None:
    """The mean A of tied recipes; None where there is no tie."""
    return None if len(tied) < 2 else float(np.mean([named_a(fit) for fit in tied]))
