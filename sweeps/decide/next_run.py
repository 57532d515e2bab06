"""Choice of the next run by expected value of information, and the split of a budget over recipes.

Recipes are chosen by asymptote. The loss of a choice is the best A minus the A of the chosen recipe. The expected loss
of choosing now comes from the fits' joint draws (`sweeps.decide.standing`). A step extends the runs of one recipe or
adds a seed to it. For each possible step, outcomes are simulated (a preposterior analysis): a true A and new
evaluations are drawn, all draws are weighted by how well they explain these evaluations, and a recipe is chosen again.
The gain of a step is the expected reduction of the loss (the value of sample information, Raiffa and Schlaifer 1961).

Approximations:
- New evaluations are spaced like the existing ones. Their noise is independent, with a variance that makes their mean
  as uncertain as under the correlated noise of the existing ones.
- An extension gives information on A only through the recipe's curve.
- A new seed is one observation of the recipe's A. Its variance is the variance between seeds plus that of the fit of
  one run.
- Ties in A are not broken by efficiency.
- Only the next step is simulated, not sequences of steps.
- Where few draws explain the new data, the noise is raised until enough do, which understates the gain.
- Where A is not identifiable, its draws are the final rewards under all laws (forms of the curve), which differ widely.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.decide.reach import check_budget
from sweeps.decide.standing import Standing, find_standing
from sweeps.decide.wording import outcome_sentence
from sweeps.fit.constants import MIN_COMPUTES
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import reward_at, spacing

# Verdicts of recipes whose steps are simulated. Where A is not identifiable its draws are wide: they show whether the
# recipe may be the best and what an extension would reveal, but they do not justify choosing it.
_CONTENDER_VERDICTS = ("identifiable", "open", "at_bound", "pre_inflection", "misfit")
_EXTENSION_FACTORS = (1.5, 2.0, 3.0, 4.0)
_OUTCOMES = 400
_SAMPLES = 256
# Smallest allowed effective number of draws that explain an outcome, averaged over outcomes.
_MIN_EFFECTIVE_DRAWS = 20.0
# Smallest gain, as a fraction of the reward's scale, that exceeds the error of the simulation.
_MIN_GAIN = 0.0005
# Only steps with at least this fraction of the recipe's largest gain are considered. Of these, the one with the most
# gain per cost is chosen.
_CHEAP_SHARE = 0.5
# An extension's evaluations are thinned to at most this many points.
_MAX_POINTS = 64
# Besides the leader, at most `_MAX_SIMULATED` recipes are simulated, each with a probability of being best of at least
# `_MIN_P_BEST`. The draws of the other recipes are not updated.
_MIN_P_BEST, _MAX_SIMULATED = 0.002, 10
_ENDED_REASON = "one of its runs ended before its budget (for example, prompts were exhausted) and cannot be extended"


@dataclass(frozen=True)
class Step(AsJson):
    """A possible next step.

    Attributes:
        recipe: label of the recipe.
        action: `extend` (continue each of its runs to `compute`) or `seed` (start one more run, up to `compute`).
        compute: total compute of each run after the step, in the curves' unit.
        expected_gain: expected reduction of the loss, in reward; None where it cannot be computed.
        cost: compute that the step adds, over all runs, in the curves' unit.
        reason: explanation of the step in words.
    """

    recipe: str
    action: str
    compute: float
    expected_gain: float | None
    cost: float
    reason: str


@dataclass(frozen=True)
class NextSteps:
    """State of the choice between recipes, and the steps that could decide it.

    Attributes:
        leader, p_wrong, margin: see `sweeps.decide.standing.Standing`; the ranking reports the same.
        steps: the best next step of each recipe, the highest expected gain per cost first; steps without an expected
            gain come last.
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
class BudgetShare:
    """The compute that one recipe gets of a budget.

    Attributes:
        compute: compute added, over all its runs, in the curves' unit.
        to: compute that a run of the recipe then reaches; None if nothing is added.
        R: reward at `to` or, if nothing is added, at the largest compute of its runs; None where the fit may not be
            used.
    """

    recipe: str
    compute: float
    to: float | None
    R: Interval | None
    reason: str


@dataclass(frozen=True)
class BudgetSplit:
    """Split of a budget over recipes, with the steps that it pays for.

    Attributes:
        budget: compute to be split, in the curves' unit.
        shares: what each recipe gets.
        steps: steps that may decide the choice, which are paid for first.
        winner: recipe that gets the remaining budget: the leader of `sweeps.decide.standing.Standing`. None if no
            leader has a rising curve, the leader's expected loss exceeds the margin, or its runs cannot be extended.
        commit: start and end compute of the winner's continued run; None if there is no winner or nothing remains.
        sentence: the split in words.
    """

    budget: float
    shares: tuple[BudgetShare, ...]
    steps: tuple[Step, ...]
    winner: str | None
    commit: tuple[float, float] | None
    sentence: str


class _Simulation:
    """Draws of A of the recipes that could be best, now and after possible steps, with common random numbers.

    Shapes: K joint draws of the fits, J simulated outcomes (`_OUTCOMES`), L draws sampled per outcome (`_SAMPLES`).

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
        # Simulate the recipes that could be best, and the leader, which would be chosen now.
        leader = [i for i, fit in enumerate(fits) if fit.recipe == standing.leader]
        self.simulated = sorted({*leader, *(i for i in order[:_MAX_SIMULATED] if best[i] >= _MIN_P_BEST)})
        self.theta = {i: asymptotes[i] for i in self.simulated}
        self._rows = {i: standing.drawn[i].rows for i in self.simulated}
        self._prior = {i: self._sample(fits[i], asymptotes[i]) for i in self.simulated}
        # The loss depends on the other recipes only through their highest A: keep that.
        self._best_unsimulated = np.full((_OUTCOMES, _SAMPLES), -np.inf)
        for i in range(len(asymptotes)):
            if i not in self.theta:
                np.maximum(self._best_unsimulated, self._sample(fits[i], asymptotes[i]), out=self._best_unsimulated)
        # Posterior samples are stored as indices of draws: as values they would take four times the memory, 50 MB.
        self._posterior_indices: dict[tuple[int, str, float], NDArray[np.uint16]] = {}
        self.loss = float(self._losses(list(self._prior.values())).mean(axis=(1, 2)).min())
        self.min_gain = _MIN_GAIN * max(fit.curve.scale for fit in fits)

    def _losses(self, samples: Sequence[Array]) -> Array:
        """Return the loss of choosing each of R recipes: the best A minus its own; (J, L) per recipe -> (R, J, L)."""
        stacked = np.stack(samples)
        losses: Array = np.maximum(stacked.max(axis=0), self._best_unsimulated) - stacked
        return losses

    def _sample(self, fit: Fit, theta: Array) -> Array:
        """Sample from draws of a recipe's A, (K,) -> (J, L). Every call for one recipe uses the same indices."""
        rng = np.random.default_rng(zlib.crc32(fit.recipe.encode()) + 4)
        samples: Array = theta[rng.integers(len(theta), size=(_OUTCOMES, _SAMPLES))]
        return samples

    def loss_after(self, steps: Mapping[int, Step]) -> float:
        """Return the expected loss of the choice after the given steps. The keys of `steps` are indices into `fits`.

        The recipe is chosen on half of an outcome's samples and its loss is computed on the other half, so that the
        noise of the simulation does not make the choice look better.
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
        if key not in self._posterior_indices:
            fit, theta = self.fits[i], self.theta[i]
            rng = np.random.default_rng(zlib.crc32(repr((fit.recipe, *key[1:])).encode()))
            # Evenly spaced quantiles of A are less noisy than random draws as true values.
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
            self._posterior_indices[key] = np.stack(rows).astype(np.uint16)
        samples: Array = self.theta[i][self._posterior_indices[key]]
        return samples


def _seed_signal(fit: Fit, theta: Array) -> Array:
    """Return A in units of the standard error of a new seed's A: what a new seed measures under each draw, (K, 1)."""
    # A new run's A differs from the recipe's by the spread between seeds and by the error of one run's fit. This
    # difference has `fit.seeds` times the variance of `theta`, because `theta` is drawn for the mean over that many
    # seeds.
    signal: Array = (theta / np.sqrt(fit.seeds * max(float(theta.var()), 1e-12)))[:, None]
    return signal


def _extension_signal(fit: Fit, to: float, rows: NDArray[np.intp] | None) -> Array:
    """Return what an extension measures under each draw: the curve, in units of the noise; (K, q).

    The curves are reduced to the q <= 6 directions in which they differ most (singular value decomposition).
    """
    assert fit.outlook is not None
    computes = _extension_computes(fit, to)
    thinned = computes[np.unique(np.linspace(0, len(computes) - 1, min(len(computes), _MAX_POINTS)).astype(np.intp))]
    # Variance of one thinned point, such that the mean of the thinned points is as certain as the mean of all points.
    variance = float(np.mean(fit.outlook.noise**2)) / len(computes) * len(thinned) / fit.seeds
    # Row k of the curves must belong to draw k of the asymptotes.
    curves = fit.outlook.at(thinned)
    paths = curves if rows is None else curves[rows]
    paths = (paths - paths.mean(0)) / np.sqrt(max(variance, 1e-14))
    u, s, _ = np.linalg.svd(paths, full_matrices=False)
    signal: Array = u[:, :6] * s[:6]
    return signal


def _extension_computes(fit: Fit, to: float) -> Array:
    """Return the computes (m,) of an extension's evaluations, spaced as the existing ones are in the median."""
    assert fit.window is not None
    end = fit.window[1]
    count = max(1, round((to - end) / max(spacing(fit), 1e-12 * end)))
    return np.linspace(end, to, min(count, 10_000) + 1)[1:]


def _weights(signal: Array, true_indices: NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Weight all draws by how well they explain the simulated outcome of each true draw.

    Args:
        signal: what a step measures under each draw, in units of the noise, (K, q).
        truth: index of the true draw of each outcome, (J,).
        rng: source of the outcomes' noise.

    Returns:
        Weights (J, K), which sum to 1 over the draws.
    """
    noise = rng.standard_normal((len(true_indices), signal.shape[1]))
    scale = 1.0
    while True:
        observed = signal[true_indices] / scale + noise
        # Squared distances of outcomes o to all draws s, |o|^2 - 2 o.s + |s|^2: (J, K) without a (J, K, q) array.
        distance = (observed**2).sum(1)[:, None] - 2 * observed @ signal.T / scale + (signal**2).sum(1) / scale**2
        # Exclude the true draw: where few draws explain an outcome, it would make the outcome look too informative.
        distance[np.arange(len(true_indices)), true_indices] = np.inf
        weight = np.exp(-0.5 * (distance - distance.min(1, keepdims=True)))
        weight /= weight.sum(1, keepdims=True)
        if float(np.mean(1 / (weight**2).sum(1))) >= _MIN_EFFECTIVE_DRAWS or scale > 1e9:
            return np.asarray(weight)
        scale *= 1.5


def group_alternatives(fits: Sequence[Fit], ignored_factor: str | None = None) -> list[list[Fit]]:
    """Group fits of recipes that are alternatives to each other: all their factors but `ignored_factor` are equal."""
    groups: dict[tuple[str, ...], list[Fit]] = {}
    for fit in fits:
        levels = tuple(value for name, value in fit.curve.factors.items() if name != ignored_factor)
        groups.setdefault(levels, []).append(fit)
    return list(groups.values())


def _contenders(fits: Sequence[Fit]) -> list[Fit]:
    """Return the fits whose curve informs on the asymptote. Only for these recipes are steps simulated."""
    return [
        fit
        for fit in fits
        if fit.verdict in _CONTENDER_VERDICTS and fit.draws is not None and fit.outlook_inputs is not None
    ]


@dataclass(frozen=True, eq=False)
class Choice:
    """The current state of the choice between recipes, and simulated outcomes of its next steps."""

    fits: Sequence[Fit]
    standing: Standing

    @cached_property
    def future(self) -> _Simulation:
        """Simulated outcomes of the possible next steps, computed when first read."""
        return _Simulation(self.fits, self.standing)


def make_choice(fits: Sequence[Fit], margin: float | None = None) -> Choice:
    """Return the `Choice` between these recipes.

    Raises:
        UserError: margin is negative or not a number.
    """
    return Choice(fits, find_standing(fits, margin))


def find_next_steps(choice: Choice, limit: float | None = None) -> NextSteps:
    """Find the best next step of each recipe for deciding which recipe has the highest asymptote.

    A recipe without a fit, or whose reward does not rise, gets a step that might remedy this, without an expected gain.

    Args:
        choice: the choice between recipes, see `make_choice`.
        limit: largest allowed cost of a step, in the curves' unit; None for no limit.
    """
    fits, standing = choice.fits, choice.standing
    contenders = _contenders(fits)
    remedies = [_remedy_step(fit) for fit in fits if fit not in contenders]
    remedies = [step for step in remedies if limit is None or step.cost <= limit]
    if len(fits) < 2:
        return _settlement(standing, remedies, "nothing to compare: only one recipe", settled=False)
    if standing.decided:
        # Recipes without a curve could still change the choice, so their steps are listed too. The sentence does not
        # say "settled" if the leader's asymptote is not identifiable.
        identifiable = standing.leader in standing.ranked
        state = "settled" if identifiable else "no further run is needed to choose"
        return _settlement(standing, remedies, f"{state}: {outcome_sentence(standing)}", settled=True)
    sentence = f"not settled: {outcome_sentence(standing).removeprefix('undecided: ')}"
    steps = [_best_step(choice.future, list(fits).index(fit), limit) for fit in contenders]
    ordered = sorted((s for s in steps if s is not None), key=lambda s: (-(s.expected_gain or 0) / s.cost, s.recipe))
    if max((step.expected_gain or 0.0 for step in ordered), default=0.0) < choice.future.min_gain:
        # Several steps together may help where no single step can change the choice, but only single steps are
        # simulated.
        sentence += ". No single step is expected to change this, but several seeds might"
    return _settlement(standing, [*ordered, *remedies], sentence, settled=False)


def _settlement(standing: Standing, steps: Sequence[Step], sentence: str, settled: bool) -> NextSteps:
    return NextSteps(standing.leader, standing.p_wrong, standing.margin, tuple(steps), sentence, settled)


def _possible_steps(fit: Fit, limit: float | None) -> list[Step]:
    """Return the possible steps of a recipe within the cost limit, without their gains and reasons."""
    assert fit.window is not None
    end = fit.window[1]
    # A curve that is observed up to 4 x C_mid usually bounds its asymptote.
    targets = {factor * end for factor in _EXTENSION_FACTORS}
    if fit.C_mid.value is not None and 1.1 * end < 4 * fit.C_mid.value < _EXTENSION_FACTORS[-1] * end:
        targets.add(4 * fit.C_mid.value)
    extensions = sorted(targets if not fit.curve.ended else ())
    steps = [Step(fit.recipe, "extend", to, None, (to - end) * fit.seeds, "") for to in extensions]
    if fit.verdict != "pre_inflection":
        # Another run that also ends before C_mid would not show where the curve leads.
        steps.append(Step(fit.recipe, "seed", end, None, end, ""))
    return [step for step in steps if limit is None or step.cost <= limit]


def _describe_step(fit: Fit, step: Step, gain: float) -> Step:
    assert fit.window is not None
    description = (
        f"{'its run' if fit.seeds == 1 else f'each of its {fit.seeds} runs'} to {step.compute / fit.window[1]:.2g} x "
        "the window"
        if step.action == "extend"
        else f"one more run, as long as {'the existing one' if fit.seeds == 1 else f'the {fit.seeds} existing ones'}"
    )
    note = "" if fit.identifiable else f"; A is not identifiable yet ({fit.verdict})"
    if fit.verdict == "pre_inflection" and step.action == "extend":
        description = _remedy_step(fit).reason
        note = f"; first extend to {step.compute / fit.window[1]:.2g} x"
    return replace(step, expected_gain=max(gain, 0.0), reason=description + note)


def _best_step(future: _Simulation, i: int, limit: float | None) -> Step | None:
    """Return the step with the most gain per cost among those with at least `_CHEAP_SHARE` of the largest gain."""
    fit = future.fits[i]
    # A recipe that is almost surely not the best is not simulated. Its steps cannot change the choice: their gain is 0.
    candidates = [
        _describe_step(fit, step, future.loss - future.loss_after({i: step}) if i in future.simulated else 0.0)
        for step in _possible_steps(fit, limit)
    ]
    if not candidates:
        return None
    largest = max(step.expected_gain or 0.0 for step in candidates)
    gainful = [step for step in candidates if (step.expected_gain or 0.0) >= _CHEAP_SHARE * largest]
    return max(gainful, key=lambda step: ((step.expected_gain or 0.0) / step.cost, -step.cost))


def _remedy_step(fit: Fit) -> Step:
    """Return the step that could show a curve, or an identifiable asymptote, for this recipe. Its gain is unknown."""
    end = fit.window[1] if fit.window is not None else float(fit.curve.compute.max())
    if fit.verdict == "decreasing" or fit.curve.ended:
        reason = f"{fit.verdict}: {fit.reason}" + (f"; {_ENDED_REASON}" if fit.curve.ended else "")
        return Step(fit.recipe, "seed", end, None, end, reason)
    factor = 2.0
    if fit.verdict == "too_few_points":
        factor = max(factor, _factor_to_enough_evaluations(fit.curve))
    if fit.verdict == "pre_inflection" and fit.C_mid.value is not None:
        factor = float(np.clip(2 * fit.C_mid.value / end, 1.5, _EXTENSION_FACTORS[-1]))
        more = f"at least {factor:g}" if factor == _EXTENSION_FACTORS[-1] else f"about {factor:.2g}"
        reason = f"needs {more} x the compute so far, because the bend is not in the window"
    else:
        reason = f"{fit.verdict}: {fit.reason}"
    return Step(fit.recipe, "extend", factor * end, None, (factor - 1) * end * fit.seeds, reason)


def _factor_to_enough_evaluations(curve: Curve) -> float:
    """Return the factor by which the longest run must grow to have enough points for a fit, at the present spacing.

    Without an evaluation at compute 0, one point more than `MIN_COMPUTES` is needed, because the fit then estimates R0.
    """
    above = [len(np.unique(curve.compute[(curve.compute > 0) & (curve.seed == s)])) for s in np.unique(curve.seed)]
    return (MIN_COMPUTES + 1) / max([*above, 1])


def split_budget(choice: Choice, budget: float) -> BudgetSplit:
    """Split a budget of further compute over recipes: first for steps that decide the choice, then for the winner.

    If the choice is not decided yet, steps are chosen one by one, at most one per recipe. Each time the step with the
    most expected gain per compute is taken, given the steps already chosen. This ends when no step has a gain or the
    budget is spent. What is left continues one run of the leader if the leader's expected loss (before the steps) is
    within the margin; otherwise it is kept. Plan again when the results are known.

    Args:
        choice: the choice between recipes, see `make_choice`.
        budget: compute still to spend, over all recipes, in the curves' unit.

    Raises:
        UserError: budget is not positive.
    """
    fits, standing = choice.fits, choice.standing
    check_budget(budget)
    contenders = _contenders(fits)
    if not contenders:
        return _split_over_remedies(fits, budget)
    future = choice.future
    paid_steps: dict[int, Step] = {}
    loss_now, remaining = future.loss, budget
    while not standing.decided:
        candidates = [
            (i, _describe_step(fits[i], step, loss_now - future.loss_after({**paid_steps, i: step})))
            for i in future.simulated
            if i not in paid_steps and fits[i] in contenders
            for step in _possible_steps(fits[i], remaining)
        ]
        candidates = [(i, step) for i, step in candidates if (step.expected_gain or 0.0) >= future.min_gain]
        if not candidates:
            break
        i, step = max(candidates, key=lambda candidate: (candidate[1].expected_gain or 0.0) / candidate[1].cost)
        paid_steps[i] = step
        loss_now, remaining = loss_now - (step.expected_gain or 0.0), remaining - step.cost
    leader = next((fit for fit in contenders if fit.recipe == standing.leader), None)
    loss = standing.losses[leader.recipe] if leader is not None else np.inf
    steps = {fits[i].recipe: step for i, step in paid_steps.items()}
    if leader is not None and loss <= standing.margin and not leader.curve.ended:
        return _make_split(fits=fits, winner=leader, paid_steps=steps, budget=budget, remaining=remaining, sentence="")
    outlook = (
        f"Keep the rest ({remaining:.4g}) until the results are in, then plan again"
        if remaining > 0
        else "Nothing is left"
    )
    if leader is None:
        why = "there is no leader with a rising curve"
    elif loss <= standing.margin:
        why = f"the winner so far is {leader.recipe}, but {_ENDED_REASON}"
    else:
        why = (
            f"the best choice so far, {leader.recipe}, is expected to be {loss:.3f} below the highest asymptote, more "
            f"than the margin {standing.margin:g}"
        )
        if not steps and remaining > 0:
            outlook = "No step within the budget is expected to change this. "
            outlook += f"Keep it ({remaining:.4g}) for more seeds, or until it is larger"
    return _make_split(
        fits=fits,
        winner=None,
        paid_steps=steps,
        budget=budget,
        remaining=remaining,
        sentence=f"the budget is not committed to a winner: {why}. {outlook}",
    )


def _split_over_remedies(fits: Sequence[Fit], budget: float) -> BudgetSplit:
    """Split a budget where no recipe has a curve yet: pay for steps that could show a curve, the cheapest first."""
    remaining, paid_steps = budget, {}
    for step in sorted(map(_remedy_step, fits), key=lambda s: (s.cost, s.recipe)):
        if step.cost <= remaining:
            paid_steps[step.recipe] = step
            remaining -= step.cost
    sentence = "the budget is not committed to a winner: no recipe has a curve yet"
    sentence += f". Keep the rest ({remaining:.4g}) until the results are in" if remaining > 0 else ""
    return _make_split(
        fits=fits, winner=None, paid_steps=paid_steps, budget=budget, remaining=remaining, sentence=sentence
    )


def _make_split(
    fits: Sequence[Fit],
    winner: Fit | None,
    paid_steps: Mapping[str, Step],
    budget: float,
    remaining: float,
    sentence: str,
) -> BudgetSplit:
    shares, commit = [], None
    for fit in fits:
        step = paid_steps.get(fit.recipe)
        end = fit.window[1] if fit.window is not None else float(fit.curve.compute.max())
        to, cost, reason = end, 0.0, "nothing: it would not change the choice"
        if fit.verdict not in _CONTENDER_VERDICTS:
            reason = f"nothing: its gain cannot be computed; {_remedy_step(fit).reason}"
        if step is not None:
            to, cost, reason = step.compute, step.cost, f"{step.action}: {step.reason}"
        if winner is fit and remaining > 0:
            start = to if step is not None and step.action == "extend" else end
            to, cost = start + remaining, cost + remaining
            commit = (start, to)
            sentence = (
                f"commit the rest to the winner so far, {fit.recipe}: continue one of its runs from compute "
                f"{start:.4g} to {to:.4g} (the same run with a larger budget)"
            )
            reason = "the rest" if step is None else f"{reason}; then the rest"
        shares.append(BudgetShare(fit.recipe, cost, to if cost else None, reward_at(fit, to), reason))
    if winner is not None and remaining <= 0:
        sentence = f"nothing is left to commit to the winner so far, {winner.recipe}"
    return BudgetSplit(
        budget=budget,
        shares=tuple(shares),
        steps=tuple(paid_steps.values()),
        winner=winner.recipe if winner else None,
        commit=commit,
        sentence=sentence,
    )
