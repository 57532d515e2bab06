"""Choice of the next run by expected value of information, and the split of a budget over recipes.

The choice is by asymptote. Its loss is how far the chosen recipe's A is below the best A, as in
`sweeps.decide.standing`. The smallest expected loss without further runs comes from the fits' joint draws. For each
possible step, outcomes are simulated (a preposterior analysis): a true A and its evaluations are drawn, all draws are
weighted by how well they explain these evaluations, and the recipe is chosen again. The gain of a step is the expected
reduction of the loss (the value of sample information, Raiffa and Schlaifer 1961).

Approximations:
- New evaluations have the spacing of the old ones, and independent noise that leaves their mean as uncertain as the old
  noise does.
- An extension informs on A through the curve alone.
- A new seed is one observation of the recipe's A. Its variance is that between seeds plus that of one run's fit.
- Ties in A are not broken by efficiency.
- Only one step is looked ahead.
- Where few draws explain the new data, the noise is raised until enough do, which understates the gain.
- Where A is not identifiable, its draws are the final rewards under all laws, which are wide.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.reach import check_budget
from sweeps.decide.standing import Standing, find_standing
from sweeps.decide.wording import outcome_sentence
from sweeps.fit.constants import MIN_COMPUTES
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import reward_at, spacing
from sweeps.terminal import counted

# Verdicts of recipes with a curve. If A is not identifiable, its draws are wide. They show whether the recipe may be
# the best and what an extension would reveal, but do not justify choosing it.
_CONTENDS = ("identifiable", "open", "at_bound", "pre_inflection", "misfit")
_FACTORS = (1.5, 2.0, 3.0, 4.0)
_OUTCOMES = 400
_SAMPLES = 256
# Effective number of draws that an outcome must leave, on average.
_ENOUGH = 20.0
# Smallest gain, as a share of the reward's scale, that exceeds the error of the simulation.
_LEAST_GAIN = 0.0005
# An extension with at least this share of the recipe's largest gain is chosen if its gain per compute is higher.
_CHEAPER = 0.5
# An extension's evaluations are thinned to at most this many points.
_MAX_POINTS = 64
# Recipes are simulated if their chance of being best is at least `_COULD`, at most `_AT_MOST` of them. The others keep
# their present draws.
_COULD, _AT_MOST = 0.002, 10
_ENDED = "a run of it ended before its budget and cannot be extended, as where its pool of prompts is exhausted"


@dataclass(frozen=True)
class Step(AsJson):
    """A possible next step.

    Attributes:
        recipe: label of the recipe.
        action: `extend` (each of its runs, to `compute`) or `seed` (one more run, of `compute`).
        compute: total compute of each run after the step, in the curves' unit.
        expected_gain: expected reduction of the loss, in reward; None where it cannot be computed.
        cost: compute that the step adds, over all runs, in the curves' unit.
        reason: explanation in words.
    """

    recipe: str
    action: str
    compute: float
    expected_gain: float | None
    cost: float
    reason: str


@dataclass(frozen=True)
class Settlement:
    """State of the choice between recipes, and the steps that could settle it.

    Attributes:
        leader, p_wrong, margin: see `sweeps.decide.standing.Standing`; the ranking reports the same.
        steps: the best next step of each recipe, by expected gain per cost; steps without an expected gain come last.
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
    """One recipe's share of a budget: compute added, the compute its run then reaches (`to`), and the reward there."""

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
        shares: share of each recipe.
        steps: the steps that may settle the choice; they are paid for first.
        winner: the recipe that gets the remaining budget: the leader of `sweeps.decide.standing.Standing`; None if its
            expected loss exceeds the margin.
        commit: start and end compute of the winner's continued run; None if nothing is committed.
        sentence: the split in words.
    """

    budget: float
    shares: tuple[Share, ...]
    steps: tuple[Step, ...]
    winner: str | None
    commit: tuple[float, float] | None
    sentence: str


class _Future:
    """Draws of A of the recipes that could be best, now and after possible steps, with common random numbers.

    Args:
        fits: fits of every recipe.
        standing: present state of the choice between them.
    """

    def __init__(self, fits: Sequence[Fit], standing: Standing) -> None:
        self.fits = list(fits)
        asymptotes = [one.asymptote(standing.margin) for one in standing.drawn]
        top = np.max(asymptotes, axis=0)
        best = np.array([float((theta == top).mean()) for theta in asymptotes])
        order = [int(i) for i in np.argsort(-best, kind="stable")]
        # Simulate the recipes that could be best, and the one that would be chosen now.
        leader = [i for i, fit in enumerate(fits) if fit.recipe == standing.leader]
        self.near = sorted({*leader, *(i for i in order[:_AT_MOST] if best[i] >= _COULD)})
        self.theta = {i: asymptotes[i] for i in self.near}
        self._rows = {i: standing.drawn[i].rows for i in self.near}
        self._prior = {i: self._sample(fits[i], asymptotes[i]) for i in self.near}
        # Keep only the highest A of the other recipes: the loss depends on nothing else of them.
        self._rest = np.full((_OUTCOMES, _SAMPLES), -np.inf)
        for i in range(len(asymptotes)):
            if i not in self.theta:
                np.maximum(self._rest, self._sample(fits[i], asymptotes[i]), out=self._rest)
        # Store the indices of sampled draws, not their values: the values would take four times the memory, 50
        # megabytes.
        self._after: dict[tuple[int, str, float], NDArray[np.uint16]] = {}
        self.loss = float(self._losses(list(self._prior.values())).mean(axis=(1, 2)).min())
        self.worth = _LEAST_GAIN * max(fit.curve.scale for fit in fits)

    def _losses(self, samples: Sequence[Array]) -> Array:
        """Return the loss of choosing each recipe: the best A minus its own. Shapes: (J, L) each -> (R, J, L)."""
        stacked = np.stack(samples)
        losses: Array = np.maximum(stacked.max(axis=0), self._rest) - stacked
        return losses

    def _sample(self, fit: Fit, theta: Array) -> Array:
        rng = np.random.default_rng(zlib.crc32(fit.recipe.encode()) + 4)
        drawn: Array = theta[rng.integers(len(theta), size=(_OUTCOMES, _SAMPLES))]
        return drawn

    def loss_after(self, steps: Mapping[int, Step]) -> float:
        """Return the expected loss of the choice after these steps. steps: by index of the recipe.

        The choice is made on half of an outcome's draws and judged on the other half, so that it cannot profit from the
        simulation's own noise.
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
            # Take the true values at even quantiles of A, which is less noisy than drawing them.
            order = np.argsort(theta, kind="stable")
            truth = order[((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES * len(theta)).astype(np.intp)]
            if step.action == "seed":
                signal = _seed_signal(fit, theta)
            else:
                signal = _extension_signal(fit, step.compute, self._rows[i])
            weight = _weights(signal, truth, rng)
            cumulative = np.cumsum(weight, axis=1)
            position = rng.random((_OUTCOMES, _SAMPLES)) * cumulative[:, -1:]
            rows = [np.searchsorted(c, p).clip(max=len(theta) - 1) for c, p in zip(cumulative, position, strict=True)]
            self._after[key] = np.stack(rows).astype(np.uint16)
        samples: Array = self.theta[i][self._after[key]]
        return samples


def _seed_signal(fit: Fit, theta: Array) -> Array:
    """Return the signal of one more seed under each draw, in units of its error. Shapes: (K,) -> (K, 1)."""
    # A new run's A differs from the recipe's by the spread between seeds and by the error of one run's fit. Together
    # these are `seeds` times the variance of the mean that `theta` draws.
    signal: Array = (theta / np.sqrt(fit.seeds * max(float(theta.var()), 1e-12)))[:, None]
    return signal


def _extension_signal(fit: Fit, to: float, rows: NDArray[np.intp] | None) -> Array:
    """Return the signal of an extension under each draw: the curve there, in units of the noise; (K, q).

    Only the few directions in which the curves of the draws differ are kept (singular value decomposition).
    """
    assert fit.outlook is not None
    added = _added_compute(fit, to)
    kept = added[np.unique(np.linspace(0, len(added) - 1, min(len(added), _MAX_POINTS)).astype(np.intp))]
    # Noise per kept point, so that the mean of the kept points is as certain as the mean of all.
    variance = float(np.mean(fit.outlook.noise**2)) / len(added) * len(kept) / fit.seeds
    # Use the curves that belong to the asymptotes being compared, draw by draw.
    curves = fit.outlook.at(kept)
    paths = curves if rows is None else curves[rows]
    paths = (paths - paths.mean(0)) / np.sqrt(max(variance, 1e-14))
    u, s, _ = np.linalg.svd(paths, full_matrices=False)
    signal: Array = u[:, :6] * s[:6]
    return signal


def _added_compute(fit: Fit, to: float) -> Array:
    """Return the computes of an extension's evaluations, at the median spacing of the window; (m,)."""
    assert fit.window is not None
    end = fit.window[1]
    count = max(1, round((to - end) / max(spacing(fit), 1e-12 * end)))
    return np.linspace(end, to, min(count, 10_000) + 1)[1:]


def _weights(signal: Array, truth: NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Return each draw's weight by its likelihood of each truth's outcome; (K, q), (J,) -> (J, K), rows sum to 1."""
    noise = rng.standard_normal((len(truth), signal.shape[1]))
    scale = 1.0
    while True:
        observed = signal[truth] / scale + noise
        # Squared distances of outcomes to all draws, |o|^2 - 2 o.s + |s|^2: (J, K) without a (J, K, q) array.
        distance = (observed**2).sum(1)[:, None] - 2 * observed @ signal.T / scale + (signal**2).sum(1) / scale**2
        # Exclude the true draw itself: with few draws left it would make the outcome look too informative.
        distance[np.arange(len(truth)), truth] = np.inf
        weight = np.exp(-0.5 * (distance - distance.min(1, keepdims=True)))
        weight /= weight.sum(1, keepdims=True)
        if float(np.mean(1 / (weight**2).sum(1))) >= _ENOUGH or scale > 1e9:
            return np.asarray(weight)
        # Too few draws explain the outcomes: raise the noise.
        scale *= 1.5


def comparable(fits: Sequence[Fit], apart_from: str | None = None) -> list[list[Fit]]:
    """Group recipes that are alternatives to each other: equal in every factor except `apart_from`."""
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
    """The current state of a choice, and its simulated future, computed at first use."""

    fits: Sequence[Fit]
    standing: Standing

    @cached_property
    def future(self) -> _Future:
        """Simulated outcomes of the possible next steps, computed at first use."""
        return _Future(self.fits, self.standing)


def choice_of(fits: Sequence[Fit], margin: float | None = None) -> Choice:
    """Return the present choice between recipes; its future is simulated at first use.

    Raises:
        UserError: margin is negative or not a number.
    """
    return Choice(fits, find_standing(fits, margin))


def settle(choice: Choice, limit: float | None = None) -> Settlement:
    """Return the best next step of each recipe for deciding which one has the highest asymptote.

    Args:
        choice: the choice between recipes, see `choice_of`.
        limit: largest allowed cost of a step, in the curves' unit; None for no limit.

    A recipe that does not rise, or has no fit, is listed with its remedy and without an expected gain.
    """
    fits, standing = choice.fits, choice.standing
    contenders = _contenders(fits)
    cures = [_cure(fit) for fit in fits if fit not in contenders]
    cures = [step for step in cures if limit is None or step.cost <= limit]
    if len(fits) < 2:
        return _settlement(standing, cures, "nothing to compare: only one recipe", settled=False)
    if standing.decided:
        # The compared recipes need no more runs; only those without a curve could still change the choice. The wording
        # avoids "settled" where the choice is known but its asymptote is not.
        named = standing.leader in standing.ranked
        state = "settled" if named else "no further run is needed to choose"
        return _settlement(standing, cures, f"{state}: {outcome_sentence(standing)}", settled=True)
    sentence = f"not settled: {outcome_sentence(standing).removeprefix('undecided: ')}"
    steps = [_best_step(choice.future, list(fits).index(fit), limit) for fit in contenders]
    chosen = sorted((s for s in steps if s is not None), key=lambda s: (-(s.expected_gain or 0) / s.cost, s.recipe))
    if max((step.expected_gain or 0.0 for step in chosen), default=0.0) < choice.future.worth:
        # Only one step is looked ahead: several together may help where no single one can change the choice.
        sentence += "; no single step is expected to change that, several seeds might"
    return _settlement(standing, [*chosen, *cures], sentence, settled=False)


def _settlement(standing: Standing, steps: Sequence[Step], sentence: str, settled: bool) -> Settlement:
    return Settlement(standing.leader, standing.p_wrong, standing.margin, tuple(steps), sentence, settled)


def _options(fit: Fit, limit: float | None) -> list[Step]:
    """Return the possible steps of a contender within the cost limit; gains are not computed yet."""
    assert fit.window is not None
    end = fit.window[1]
    # 4 x C_mid is where a curve usually bounds its asymptote.
    targets = {factor * end for factor in _FACTORS}
    if fit.C_mid.value is not None and 1.1 * end < 4 * fit.C_mid.value < _FACTORS[-1] * end:
        targets.add(4 * fit.C_mid.value)
    extended = sorted(targets if not fit.curve.ended else ())
    steps = [Step(fit.recipe, "extend", to, None, (to - end) * fit.seeds, "") for to in extended]
    if fit.verdict != "pre_inflection":
        # Another run that also ends before the bend would not show where the curve leads.
        steps.append(Step(fit.recipe, "seed", end, None, end, ""))
    return [step for step in steps if limit is None or step.cost <= limit]


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
    return replace(step, expected_gain=max(gain, 0.0), reason=what + note)


def _best_step(future: _Future, i: int, limit: float | None) -> Step | None:
    """Return the step with the most gain per cost among those with at least `_CHEAPER` of the recipe's largest gain."""
    fit = future.fits[i]
    # A recipe that is practically out of the race cannot change the choice: its gain is 0.
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
    """Return the step that could make a refused recipe's asymptote identifiable; its gain is unknown."""
    end = fit.window[1] if fit.window is not None else float(fit.curve.compute.max())
    if fit.verdict == "decreasing" or fit.curve.ended:
        reason = f"{fit.verdict}: {fit.reason}" + (f"; {_ENDED}" if fit.curve.ended else "")
        return Step(fit.recipe, "seed", end, None, end, reason)
    factor = 2.0
    if fit.verdict == "too_few_points":
        factor = max(factor, _enough_evaluations(fit) / end)
    if fit.verdict == "pre_inflection" and fit.C_mid.value is not None:
        factor = float(np.clip(2 * fit.C_mid.value / end, 1.5, _FACTORS[-1]))
        more = f"at least {factor:g}" if factor == _FACTORS[-1] else f"about {factor:.2g}"
        reason = f"needs {more} x the compute so far: the bend is not in the window"
    else:
        reason = f"{fit.verdict}: {fit.reason}"
    return Step(fit.recipe, "extend", factor * end, None, (factor - 1) * end * fit.seeds, reason)


def _enough_evaluations(fit: Fit) -> float:
    """Return the compute by which a run, evaluated as often as before, has the evaluations that a fit needs.

    One more than `MIN_COMPUTES` is asked for, because a curve without an evaluation at compute 0 also fits R0.
    """
    curve = fit.curve
    above = [len(np.unique(curve.compute[(curve.compute > 0) & (curve.seed == s)])) for s in np.unique(curve.seed)]
    return float(curve.compute.max()) * (MIN_COMPUTES + 1) / max([*above, 1])


def split_budget(choice: Choice, budget: float) -> Split:
    """Split a budget of further compute over recipes: first to settle the choice, then the remainder to the winner.

    Steps are chosen one by one, by expected gain per compute, each judged together with the steps before it, and at
    most one per recipe. This ends when the choice is decided, no step is worth anything, or the budget is spent. The
    remainder continues one run of the recipe with the smallest expected loss, if that loss (before the steps) is within
    the margin; otherwise it is kept. Plan again when results are in.

    Args:
        choice: the choice between recipes, see `choice_of`.
        budget: compute still to spend, over all recipes, in the curves' unit.

    Raises:
        UserError: budget is not positive.
    """
    fits, standing = choice.fits, choice.standing
    check_budget(budget)
    contenders = _contenders(fits)
    if not contenders:
        return _split_cures(fits, budget)
    future = choice.future
    taken: dict[int, Step] = {}
    loss_now, left = future.loss, budget
    while not standing.decided:
        offers = [
            (i, _judged(fits[i], step, loss_now - future.loss_after({**taken, i: step})))
            for i in future.near
            if i not in taken and fits[i] in contenders
            for step in _options(fits[i], left)
        ]
        offers = [(i, step) for i, step in offers if (step.expected_gain or 0.0) >= future.worth]
        if not offers:
            break
        i, step = max(offers, key=lambda offer: (offer[1].expected_gain or 0.0) / offer[1].cost)
        taken[i] = step
        loss_now, left = loss_now - (step.expected_gain or 0.0), left - step.cost
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
    """Split a budget where no recipe has a curve yet: pay for the runs that could show one, cheapest first."""
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
    """Assemble the split; `sentence` is used if the remainder is not committed to a recipe."""
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
        shares.append(Share(fit.recipe, cost, to if cost else None, reward_at(fit, to), reason))
    if winner is not None and left <= 0:
        sentence = f"nothing is left to commit to a winner; as it stands that is {winner.recipe}"
    return Split(
        budget=budget,
        shares=tuple(shares),
        steps=tuple(taken.values()),
        winner=winner.recipe if winner else None,
        commit=commit,
        sentence=sentence,
    )
