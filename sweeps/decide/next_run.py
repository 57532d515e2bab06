"""Choice of the next run by expected value of information, and the split of a budget over recipes.

The choice is by asymptote, and what it costs is how far the chosen recipe's A lies below the best one's: its loss, as
of `sweeps.decide.standing`. The least expected loss before anything is run comes from the fits' joint draws. For each
possible step its outcomes are simulated (a preposterior analysis): a truth is drawn, the evaluations it would yield are
drawn, every draw is weighted by how well it explains them, and the recipe is chosen anew. The gain of a step is the
expected reduction of the loss (the value of sample information, Raiffa and Schlaifer 1961).

What this approximates: new evaluations come at the spacing of the old ones and with independent noise that leaves
their mean as uncertain as the old noise does; an extension informs on A through the curve alone; a seed is one
observation of the recipe's A with the variance between seeds plus that of one run's fit; ties in A are not broken by
efficiency; only one step is looked ahead. Where few draws explain new data, the noise is raised until enough do, which
understates the gain. Where A is not identifiable its draws are the final rewards of all laws, which are
wide.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.standing import Standing, stand
from sweeps.decide.wording import outcome_sentence
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import reward_at, spacing
from sweeps.terminal import counted

# Recipes with a curve. Where A is not identifiable its draws are wide: enough to say that the recipe may still be
# best and what an extension would tell, not to choose it.
_CONTENDS = ("identifiable", "open", "at_bound", "pre_inflection", "misfit")
_FACTORS = (1.5, 2.0, 3.0, 4.0)
_OUTCOMES = 400
_SAMPLES = 256
# Effective number of draws an outcome must leave, on average.
_ENOUGH = 20.0
# What is less than this, of the reward's scale, does not exceed the error of the simulation.
_WORTH = 0.0005
# An extension may fall short of the recipe's best by this much of the gain if it is cheaper a point of gain.
_CHEAPER = 0.5
# An extension's evaluations are thinned to at most this many points.
_MAX_POINTS = 64
# Simulated are recipes with at least this chance of being best, at most so many. The others stay as they are.
_COULD, _AT_MOST = 0.002, 10
_ENDED = "a run of it ended before its budget and cannot be extended, as where its pool of prompts is exhausted"


@dataclass(frozen=True)
class Step(AsJson):
    """Something that could be run next.

    Attributes:
        recipe: label of the recipe.
        action: `extend` (each of its runs, to `compute`) or `seed` (one more run, of `compute`).
        compute: total compute of each run after the step, in the curves' unit.
        expected_gain: expected reduction, in reward, of how far the chosen recipe's A lies below the best one's; None
            where that cannot be computed.
        cost: compute that the step adds, over all runs, in the curves' unit.
        reason: in words.
    """

    recipe: str
    action: str
    compute: float
    expected_gain: float | None
    cost: float
    reason: str


@dataclass(frozen=True)
class Settlement:
    """State of the choice between recipes, and the steps that would settle it.

    Attributes:
        leader, p_wrong, margin: see `sweeps.decide.standing.Standing`; the ranking reports the same.
        steps: the best next step of each recipe, by expected gain per cost; those without an expected gain last.
        sentence: the state in words.
        settled: whether the data decide the choice.
    """

    leader: str | None
    p_wrong: float | None
    margin: float
    steps: tuple[Step, ...]
    sentence: str
    settled: bool = False


@dataclass(frozen=True)
class Share:
    """Share of a budget that one recipe gets: compute added, the compute its run then reaches, the reward there."""

    recipe: str
    compute: float
    to: float | None
    R: Interval | None
    reason: str


@dataclass(frozen=True)
class Split:
    """Split of a budget over recipes, with the steps that it pays for.

    Attributes:
        budget: compute to be split, in the curves' unit.
        shares: what each recipe gets.
        steps: the steps that settle the choice, paid for first.
        winner: the recipe that gets the rest, the leader of `sweeps.decide.standing.Standing`; None where its expected
            loss exceeds the margin.
        commit: compute from which, and to which, one run of the winner continues; None if nothing is committed.
        sentence: the split in words.
    """

    budget: float
    shares: tuple[Share, ...]
    steps: tuple[Step, ...]
    winner: str | None
    commit: tuple[float, float] | None
    sentence: str


class _Future:
    """Draws of A of the recipes that could be best, now and after possible steps, with shared random numbers.

    Args:
        fits: fits of every recipe.
        standing: present state of the choice between them.
    """

    def __init__(self, fits: Sequence[Fit], standing: Standing) -> None:
        self.fits = list(fits)
        every = [one.asymptote(standing.margin) for one in standing.drawn]
        top = np.max(every, axis=0)
        best = np.array([float((theta == top).mean()) for theta in every])
        order = [int(i) for i in np.argsort(-best, kind="stable")]
        # What could be best, and what would be chosen now.
        leader = [i for i, fit in enumerate(fits) if fit.recipe == standing.leader]
        self.near = sorted({*leader, *(i for i in order[:_AT_MOST] if best[i] >= _COULD)})
        self.theta = {i: every[i] for i in self.near}
        self._rows = {i: standing.drawn[i].rows for i in self.near}
        self._prior = {i: self._sample(fits[i], every[i]) for i in self.near}
        # Of all the others only the highest matters.
        self._rest = np.full((_OUTCOMES, _SAMPLES), -np.inf)
        for i in range(len(every)):
            if i not in self.theta:
                np.maximum(self._rest, self._sample(fits[i], every[i]), out=self._rest)
        # Which draws the samples are, not their values: four times as large, these would be 50 megabytes.
        self._after: dict[tuple[int, str, float], NDArray[np.uint16]] = {}
        self.loss = float(self._losses(list(self._prior.values())).mean(axis=(1, 2)).min())
        self.worth = _WORTH * max(fit.curve.scale for fit in fits)

    def _losses(self, samples: Sequence[Array]) -> Array:
        """Loss of choosing each recipe: the best A less its own. Shapes: (J, L) each -> (R, J, L)."""
        stacked = np.stack(samples)
        losses: Array = np.maximum(stacked.max(axis=0), self._rest) - stacked
        return losses

    def _sample(self, fit: Fit, theta: Array) -> Array:
        rng = np.random.default_rng(zlib.crc32(fit.recipe.encode()) + 4)
        drawn: Array = theta[rng.integers(len(theta), size=(_OUTCOMES, _SAMPLES))]
        return drawn

    def loss_after(self, steps: Mapping[int, Step]) -> float:
        """Expected loss of the choice once these were run, by index of the recipe.

        The choice is made on half of an outcome's draws and judged on the other, so that it cannot profit from
        the simulation's own noise.
        """
        samples = [self._posterior(i, steps[i]) if i in steps else prior for i, prior in self._prior.items()]
        losses = self._losses(samples)
        half = _SAMPLES // 2
        first, second = losses[:, :, :half].mean(2), losses[:, :, half:].mean(2)
        j = np.arange(_OUTCOMES)
        return float((second[first.argmin(0), j].mean() + first[second.argmin(0), j].mean()) / 2)

    def _posterior(self, i: int, step: Step) -> Array:
        """Return samples of a recipe's A after each of J simulated outcomes of a step, (J, L)."""
        key = (i, step.action, step.compute)
        if key not in self._after:
            fit, theta = self.fits[i], self.theta[i]
            rng = np.random.default_rng(zlib.crc32(repr((fit.recipe, *key[1:])).encode()))
            # Truths at even quantiles of A: less noise than drawing them.
            order = np.argsort(theta, kind="stable")
            truth = order[((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES * len(theta)).astype(np.intp)]
            if step.action == "seed":
                seen = _seed_signal(fit, theta)
            else:
                seen = _extension_signal(fit, step.compute, self._rows[i])
            weight = _weights(seen, truth, rng)
            cumulative = np.cumsum(weight, axis=1)
            position = rng.random((_OUTCOMES, _SAMPLES)) * cumulative[:, -1:]
            rows = [np.searchsorted(c, p).clip(max=len(theta) - 1) for c, p in zip(cumulative, position, strict=True)]
            self._after[key] = np.stack(rows).astype(np.uint16)
        samples: Array = self.theta[i][self._after[key]]
        return samples


def _seed_signal(fit: Fit, theta: Array) -> Array:
    """Signal of one more seed under each draw, in units of its error. Shapes: (K,) -> (K, 1)."""
    # A new run's A scatters about the recipe's by the spread between seeds and by the error of a single run's
    # fit; both are `seeds` times the variance of the mean that `theta` draws.
    signal: Array = (theta / np.sqrt(fit.seeds * max(float(theta.var()), 1e-12)))[:, None]
    return signal


def _extension_signal(fit: Fit, to: float, rows: NDArray[np.intp] | None) -> Array:
    """Signal of an extension under each draw: the draw's curve there, in units of the noise. (K, q).

    Reduced to the few directions in which the curves of the draws differ.
    """
    assert fit.outlook is not None
    added = _added_compute(fit, to)
    kept = added[np.unique(np.linspace(0, len(added) - 1, min(len(added), _MAX_POINTS)).astype(np.intp))]
    # Of each, so that the mean of those kept is known as well as that of all.
    variance = float(np.mean(fit.outlook.noise**2)) / len(added) * len(kept) / fit.seeds
    # The curves whose asymptotes are compared: draw by draw the same.
    own = fit.outlook.at(kept)
    paths = own if rows is None else own[rows]
    paths = (paths - paths.mean(0)) / np.sqrt(max(variance, 1e-14))
    u, s, _ = np.linalg.svd(paths, full_matrices=False)
    signal: Array = u[:, :6] * s[:6]
    return signal


def _added_compute(fit: Fit, to: float) -> Array:
    """Computes of an extension's evaluations, at the median spacing of the window. (m,)."""
    assert fit.window is not None
    end = fit.window[1]
    count = max(1, round((to - end) / max(spacing(fit), 1e-12 * end)))
    return np.linspace(end, to, min(count, 10_000) + 1)[1:]


def _weights(signal: Array, truth: NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Return each draw's likelihood weight given each truth's outcome; (K, q), (J,) -> (J, K), rows sum to 1."""
    noise = rng.standard_normal((len(truth), signal.shape[1]))
    scale = 1.0
    while True:
        observed = signal[truth] / scale + noise
        # Squared distances of outcomes to all draws, |o|^2 - 2 o.s + |s|^2: (J, K) at once, without a (J, K, q) array.
        distance = (observed**2).sum(1)[:, None] - 2 * observed @ signal.T / scale + (signal**2).sum(1) / scale**2
        # A truth must not vouch for itself: with few draws left it would make the outcome look too telling.
        distance[np.arange(len(truth)), truth] = np.inf
        weight = np.exp(-0.5 * (distance - distance.min(1, keepdims=True)))
        weight /= weight.sum(1, keepdims=True)
        if float(np.mean(1 / (weight**2).sum(1))) >= _ENOUGH or scale > 1e9:
            return np.asarray(weight)
        scale *= 1.5


def comparable(fits: Sequence[Fit], apart_from: str | None = None) -> list[list[Fit]]:
    """Recipes that one choice is about: those alike in every factor, but for the one named."""
    groups: dict[tuple[str, ...], list[Fit]] = {}
    for fit in fits:
        alike = tuple(value for name, value in fit.curve.factors.items() if name != apart_from)
        groups.setdefault(alike, []).append(fit)
    return list(groups.values())


def _contenders(fits: Sequence[Fit]) -> list[Fit]:
    """Return the fits whose curve informs on the asymptote; only these are simulated."""
    return [fit for fit in fits if fit.verdict in _CONTENDS and fit.draws is not None and fit.lookout is not None]


@dataclass(frozen=True, eq=False)
class Choice:
    """Current state of a choice, and its simulated future, computed once at first use."""

    fits: Sequence[Fit]
    standing: Standing

    @cached_property
    def future(self) -> _Future:
        """Simulated outcomes of the possible next steps, computed at first use."""
        return _Future(self.fits, self.standing)


def choice_of(fits: Sequence[Fit], margin: float | None = None) -> Choice:
    """Return the choice between recipes as it stands, with its future still to be simulated.

    Raises:
        UserError: margin is negative or no number.
    """
    return Choice(fits, stand(fits, margin))


def settle(choice: Choice, limit: float | None = None) -> Settlement:
    """Return the best next step of each recipe, to settle which one has the highest asymptote.

    Args:
        choice: the choice between recipes, see `choice_of`.
        limit: steps that cost more than this are left out, in the curves' unit; None for no limit.

    A recipe that does not rise, or has no fit, is listed with its cure and no expected gain.
    """
    fits, standing = choice.fits, choice.standing
    contenders = _contenders(fits)
    cures = [_cure(fit) for fit in fits if fit not in contenders]
    cures = [step for step in cures if limit is None or step.cost <= limit]
    if len(fits) < 2:
        return _settlement(standing, cures, "nothing to compare: only one recipe", settled=False)
    if standing.decided:
        # What is settled needs no more of the recipes compared; those without a curve may still change it.
        # Which to choose is known though its asymptote is not: "settled" would say both.
        named = standing.leader in standing.ranked
        state = "settled" if named else "no further run is needed to choose"
        return _settlement(standing, cures, f"{state}: {outcome_sentence(standing)}", settled=True)
    sentence = f"not settled: {outcome_sentence(standing).removeprefix('undecided: ')}"
    steps = [_best_step(choice.future, list(fits).index(fit), limit) for fit in contenders]
    chosen = sorted((s for s in steps if s is not None), key=lambda s: (-(s.expected_gain or 0) / s.cost, s.recipe))
    if max((step.expected_gain or 0.0 for step in chosen), default=0.0) < choice.future.worth:
        # One step is looked ahead; several together may pay where none alone can turn the choice.
        sentence += "; no single step is expected to change that, several seeds might"
    return _settlement(standing, [*chosen, *cures], sentence, settled=False)


def _settlement(standing: Standing, steps: Sequence[Step], sentence: str, settled: bool) -> Settlement:
    return Settlement(
        leader=standing.leader,
        p_wrong=standing.p_wrong,
        margin=standing.margin,
        steps=tuple(steps),
        sentence=sentence,
        settled=settled,
    )


def _options(fit: Fit, limit: float | None) -> list[Step]:
    """Return the steps possible for a contender within the cost limit, their gains not yet computed."""
    assert fit.window is not None
    end = fit.window[1]
    targets = {factor * end for factor in _FACTORS}
    if fit.C_mid.value is not None and 1.1 * end < 4 * fit.C_mid.value < _FACTORS[-1] * end:
        targets.add(4 * fit.C_mid.value)
    found = [
        Step(recipe=fit.recipe, action="extend", compute=to, expected_gain=None, cost=(to - end) * fit.seeds, reason="")
        for to in sorted(targets if not fit.curve.ended else ())
    ]
    if fit.verdict != "pre_inflection":
        # Another run that ends before the bend, too, would say nothing of where the curve goes.
        found.append(Step(recipe=fit.recipe, action="seed", compute=end, expected_gain=None, cost=end, reason=""))
    return [step for step in found if limit is None or step.cost <= limit]


def _judged(fit: Fit, step: Step, gain: float) -> Step:
    """Return the step with its expected gain and its reason in words."""
    assert fit.window is not None
    what = (
        f"{step.compute / fit.window[1]:.2g} x its window, each of {counted(fit.seeds, 'run')}"
        if step.action == "extend"
        else f"a run like the {fit.seeds} it has"
    )
    note = "" if fit.identifiable else f"; A is not identifiable yet ({fit.verdict})"
    if fit.verdict == "pre_inflection" and step.action == "extend":
        what = _cure(fit).reason
        note = f"; to {step.compute / fit.window[1]:.2g} x at first"
    return Step(
        recipe=step.recipe,
        action=step.action,
        compute=step.compute,
        expected_gain=max(gain, 0.0),
        cost=step.cost,
        reason=what + note,
    )


def _best_step(future: _Future, i: int, limit: float | None) -> Step | None:
    """Return the step with the most gain per cost among those with at least `_CHEAPER` of the recipe's largest gain."""
    fit = future.fits[i]
    # What is as good as out of the race cannot turn the choice.
    judged = [
        _judged(fit, step, future.loss - future.loss_after({i: step}) if i in future.near else 0.0)
        for step in _options(fit, limit)
    ]
    if not judged:
        return None
    most = max(step.expected_gain or 0.0 for step in judged)
    enough = [step for step in judged if (step.expected_gain or 0.0) >= _CHEAPER * most]
    return max(enough, key=lambda step: ((step.expected_gain or 0.0) / step.cost, -step.cost))


def _cure(fit: Fit) -> Step:
    """Return the step that would make a refused recipe's asymptote identifiable; its gain is not known."""
    end = fit.window[1] if fit.window is not None else float(fit.curve.compute.max())
    if fit.verdict == "decreasing" or fit.curve.ended:
        return Step(
            recipe=fit.recipe,
            action="seed",
            compute=end,
            expected_gain=None,
            cost=end,
            reason=f"{fit.verdict}: {fit.reason}" + (f"; {_ENDED}" if fit.curve.ended else ""),
        )
    factor = 2.0
    if fit.verdict == "pre_inflection" and fit.C_mid.value is not None:
        factor = float(np.clip(2 * fit.C_mid.value / end, 1.5, _FACTORS[-1]))
        more = f"at least {factor:g}" if factor == _FACTORS[-1] else f"about {factor:.2g}"
        reason = f"needs {more} x the compute so far: the bend is not in the window"
    else:
        reason = f"{fit.verdict}: {fit.reason}"
    return Step(
        recipe=fit.recipe,
        action="extend",
        compute=factor * end,
        expected_gain=None,
        cost=(factor - 1) * end * fit.seeds,
        reason=reason,
    )


def split_budget(choice: Choice, budget: float) -> Split:
    """Split a budget of further compute over recipes: what settles the choice first, then the rest for the winner.

    Steps are taken one after the other by expected gain per compute, each judged together with those before
    it and at most one a recipe, until the choice is decided, no step is worth anything, or the budget is spent.
    The rest continues one run of the recipe of least expected loss if that loss, before the steps, is within the
    margin; else it is kept. It is a plan before the results: plan again with them.

    Args:
        choice: the choice between recipes, see `choice_of`.
        budget: compute still to spend, over all recipes together, in the curves' unit.

    Raises:
        UserError: budget is not positive.
    """
    fits, standing = choice.fits, choice.standing
    if not (np.isfinite(budget) and budget > 0):
        raise UserError(f"--budget {budget:g}: must be positive, in the unit of the compute axis")
    contenders = _contenders(fits)
    if not contenders:
        return _split_cures(fits, budget)
    future = choice.future
    taken: dict[int, Step] = {}
    now, left = future.loss, budget
    while not standing.decided:
        offers = [
            (i, _judged(fits[i], step, now - future.loss_after({**taken, i: step})))
            for i in future.near
            if i not in taken and fits[i] in contenders
            for step in _options(fits[i], left)
        ]
        offers = [(i, step) for i, step in offers if (step.expected_gain or 0.0) >= future.worth]
        if not offers:
            break
        i, step = max(offers, key=lambda offer: (offer[1].expected_gain or 0.0) / offer[1].cost)
        taken[i] = step
        now, left = now - (step.expected_gain or 0.0), left - step.cost
    leader = next((fit for fit in contenders if fit.recipe == standing.leader), None)
    loss = standing.losses[leader.recipe] if leader is not None else np.inf
    steps = {fits[i].recipe: step for i, step in taken.items()}
    if leader is not None and loss <= standing.margin and not leader.curve.ended:
        return _split(fits=fits, winner=leader, taken=steps, budget=budget, left=left, sentence="")
    kept = f"keep the rest ({left:.4g}) until the results are in, then plan again" if left > 0 else "nothing is left"
    if leader is None:
        why = "no recipe has a curve that rises to what it comes to"
    elif loss <= standing.margin:
        why = f"as it stands the winner is {leader.recipe}, and {_ENDED}"
    else:
        why = (
            f"the best choice so far, {leader.recipe}, is expected to lie {loss:.3f} below the highest asymptote, more "
            f"than the margin {standing.margin:g}"
        )
        if not steps and left > 0:
            kept = (
                f"nothing that this pays for is expected to change that: keep it ({left:.4g}) for seeds or more of it"
            )
    return _split(
        fits=fits,
        winner=None,
        taken=steps,
        budget=budget,
        left=left,
        sentence=f"no recipe is committed to: {why}; {kept}",
    )


def _split_cures(fits: Sequence[Fit], budget: float) -> Split:
    """Split a budget where no recipe has a curve yet: pay for the runs that would show one, the cheapest first."""
    left, taken = budget, {}
    for step in sorted(map(_cure, fits), key=lambda s: (s.cost, s.recipe)):
        if step.cost <= left:
            taken[step.recipe] = step
            left -= step.cost
    sentence = "no recipe has a curve yet, so there is none to commit to"
    sentence += f": keep the rest ({left:.4g}) until the results are in" if left > 0 else ""
    return _split(fits=fits, winner=None, taken=taken, budget=budget, left=left, sentence=sentence)


def _split(
    fits: Sequence[Fit], winner: Fit | None, taken: Mapping[str, Step], budget: float, left: float, sentence: str
) -> Split:
    """Assemble the split; `sentence` is used where the rest of the budget is committed to no recipe."""
    shares, commit = [], None
    for fit in fits:
        step = taken.get(fit.recipe)
        end = fit.window[1] if fit.window is not None else float(fit.curve.compute.max())
        to, cost, reason = end, 0.0, "nothing: it would not change the choice"
        if fit.verdict not in _CONTENDS:
            reason = f"nothing: what it would bring cannot be computed; {_cure(fit).reason}"
        if step is not None:
            to, cost, reason = step.compute, step.cost, f"{step.action}: {step.reason}"
        if winner is fit and left > 0:
            start = to if step is not None and step.action == "extend" else end
            to, cost = start + left, cost + left
            commit = (start, to)
            sentence = (
                f"commit the rest to the winner: as it stands {fit.recipe}; continue a run of it from compute "
                f"{start:.4g} to {to:.4g} (the same run with a larger budget)"
            )
            reason = "the rest" if step is None else f"{reason}; then the rest"
        shares.append(
            Share(recipe=fit.recipe, compute=cost, to=to if cost else None, R=reward_at(fit, to), reason=reason)
        )
    if winner is not None and left <= 0:
        sentence = f"nothing is left to commit to a winner; as it stands that is {winner.recipe}"
    steps = tuple(taken.values())
    return Split(
        budget=budget,
        shares=tuple(shares),
        steps=steps,
        winner=winner.recipe if winner else None,
        commit=commit,
        sentence=sentence,
    )
