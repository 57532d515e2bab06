"""Mixture over kinds of curves (`sweeps.fit.kinds`), weighted by how well each predicts the next evaluations.

Each cell of a grid over kind, shape and noise has its marginal likelihood in closed form (`sweeps.fit.grid`), a slow
drift or a jump on top included. Its logarithm is the sum of the log predictive densities of every point given those
before: each kind is weighed by its forecasts from all origins. The last value is among the kinds, as a random walk.

Sources: prequential weights, Dawid 1984; rolling origins, Tashman 2000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import expit, ndtr

from sweeps.fit.constants import (
    DRIFT_SD,
    JUMP_SD,
    JUMP_WIDTHS,
    KINDS_WORTH,
    P_DRIFT,
    P_JUMP,
    R0_PRIOR,
    RARE,
    STRENGTHS,
    WALK_STEPS,
)
from sweeps.fit.family import Box
from sweeps.fit.grid import DROPPED, Cells, Rewards, cells_of, explore, grid_of, joined, log_sum, zoomed
from sweeps.fit.kinds import KINDS, WALK, drifting
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Noises, Seen, noises, whitening

# Kinds that may have jumped: a jump on top of a delayed start looks like one on top of these.
_JUMPING = ("sigmoid", "weibull", "line", "constant")
_MOST_JUMPS = 24
# Log weight behind the best place at which a jump of one width lies so far off that none of another width is there.
_ELSEWHERE = 25.0
# Kinds of noise, the likeliest, under which places of a jump are looked for.
_SEARCHED = 7
# A grid is zoomed so often, less one, where there may be a jump: what jumped twice is a steep rise and a jump.
_JUMP_ROUNDS = 3
# A kind's grid is zoomed, at most so often, until this many cells share its weight; fewer where it is to be brief.
_ROUNDS, _FINE, _ROUGH = 6, 10, 4
# It is left where its kind has been left behind by this much log weight.
_BEHIND = 25.0
NONE, DRIFT, JUMP = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Walk:
    """Random-walk model of the reward under J pairs of step size and sampling noise.

    Attributes:
        log_weight: log posterior weight of each pair, (J,).
        x: distinct computes in windows, and 1, the window's end, (m,); empty if brief.
        level, root: posterior mean of the level there, (J, m), and Cholesky factor of its covariance, (J, m, m).
        step: standard deviation of the walk over one window, (J,).
    """

    log_weight: Array
    x: Array
    level: Array
    root: Array
    step: Array


@dataclass(frozen=True, eq=False)
class Mixture:
    """Posterior mixture over kinds of curves; the weights of cells and walk sum to 1 together.

    Attributes:
        seen: the evaluations, without units.
        cells, walk: the posterior, of all kinds of curves but the walk and of the walk.
        noise: kinds of noise that `Cells.noise` indexes.
        skill: log predictive density of each kind, by name, before the kinds' prior.
        rise: log evidence of the best kind (the walk aside) over the constant: that the curve has not stayed level.
        restless: see `_restless`.
    """

    seen: Seen
    cells: Cells
    walk: Walk
    noise: Noises
    skill: Mapping[str, float]
    rise: float
    restless: bool

    @cached_property
    def weights(self) -> dict[str, float]:
        """Posterior weight of each kind of curve, by name; they sum to 1."""
        by_kind = np.bincount(self.cells.kind, np.exp(self.cells.log_weight), len(KINDS))
        found = {kind.name: float(weight) for kind, weight in zip(KINDS, by_kind, strict=True)}
        found[WALK.name] = float(np.exp(self.walk.log_weight).sum())
        # Cells without weight were dropped.
        return {name: weight / sum(found.values()) for name, weight in found.items()}

    def p_ceiling(self, low: float, high: float) -> float:
        """Probability that the curve has a ceiling, and that it lies between two rewards."""
        cells = self.cells
        spread = np.sqrt(cells.variance + (cells.cross[1] * cells.extra_sd) ** 2)
        mean = cells.mean[1] - cells.cross[1] * cells.extra_mean + np.where(cells.extra == JUMP, cells.extra_mean, 0.0)
        inside = ndtr((high - mean) / spread) - ndtr((low - mean) / spread)
        if self.seen.bounded:
            # A normal cut off at the ends of the reward's scale; far outside both are nearly 0.
            inside = inside / np.maximum(ndtr((1 - mean) / spread) - ndtr(-mean / spread), 1e-9)
        has = _CEILING[cells.kind] & (cells.extra != DRIFT)
        return float(np.exp(cells.log_weight) @ np.where(has, np.clip(inside, 0.0, 1.0), 0.0))

    @cached_property
    def noise_share(self) -> Array:
        """Weight of each kind of noise, (J,)."""
        return self.cells.noise_share(len(self.noise.log_prior))


PRIOR = {kind.name: kind.prior for kind in (*KINDS, WALK)}


def shared_prior(skills: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Estimate the kinds' prior weights from a study's recipes: a kind that predicts the others well counts more.

    Stacking by expectation and maximization, drawn to the kinds' own prior as if by `KINDS_WORTH` more recipes.

    Args:
        skills: log predictive density of each kind by name, one mapping per recipe.
    """
    names, start = list(PRIOR), np.array(list(PRIOR.values()))
    start = start / start.sum()
    if not skills:
        return dict(zip(names, start.tolist(), strict=True))
    table = np.array([[skill[name] for name in names] for skill in skills])
    likely = np.exp(table - table.max(1, keepdims=True))
    weight = start
    for _ in range(50):
        share = likely * weight
        weight = (KINDS_WORTH * start + (share / share.sum(1, keepdims=True)).sum(0)) / (KINDS_WORTH + len(table))
    return dict(zip(names, weight.tolist(), strict=True))


def mixture(seen: Seen, brief: bool = False, prior: Mapping[str, float] | None = None) -> Mixture:
    """Compute the posterior mixture over kinds of curves for one recipe.

    Args:
        seen: evaluations of one recipe, without units.
        brief: use few kinds of noise and no drifts or jumps, which is enough to see whether anything is amiss.
            Otherwise a jump is looked for where the points wander more than is usual.
        prior: prior weight of each kind, by name; None for `PRIOR`. See `shared_prior`.
    """
    noise = noises(seen, brief)
    cells, boxes = _explored(seen, noise, brief)
    walk = _walked(seen, brief)
    restless = _restless(cells, walk, noise, seen)
    every = joined([cells, *_jumped(seen, noise, boxes)]) if restless and not brief else cells
    skill = {kind.name: log_sum(every.log_weight[every.kind == i]) for i, kind in enumerate(KINDS)}
    skill[WALK.name] = log_sum(walk.log_weight)
    weights = prior or PRIOR
    log_prior = np.log([weights[kind.name] for kind in KINDS])
    log_cell = every.log_weight + log_prior[every.kind]
    log_walk = walk.log_weight + np.log(weights[WALK.name])
    whole = log_sum(np.concatenate([log_cell, log_walk]))
    log_cell, log_walk = log_cell - whole, log_walk - whole
    kept = log_cell > -DROPPED
    cells = replace(every, log_weight=log_cell).take(kept)
    rise = max(value for name, value in skill.items() if name != WALK.name) - skill["constant"]
    return Mixture(seen, cells, replace(walk, log_weight=log_walk), noise, skill, rise, restless)


_CEILING = np.array([kind.ceiling for kind in KINDS])


def _explored(seen: Seen, noise: Noises, brief: bool) -> tuple[Cells, dict[int, Box]]:
    """Explore the grids of all kinds: return the cells, and the zoomed box of each kind under calm noise.

    Noise without wander and noise with some of it are explored on separate grids: a grid that is fine enough where
    points wander is too coarse to tell whether a curve explains them without any wander.
    """
    calm = noise.strength == 0
    parts: list[Cells] = []
    boxes: dict[int, Box] | None = None
    for rows in (np.flatnonzero(~calm), np.flatnonzero(calm)):
        # Where points wander a coarser grid tells enough to see whether anything is amiss.
        rounds = 3 if brief and noise.strength[rows].min() > 0 else _ROUNDS
        # The weakest wander is hardly any: where it leaves no weight, noise without it has none that counts.
        cells, boxes = _explored_under(seen, noise.take(rows), brief, rounds, boxes)
        parts.append(replace(cells, noise=rows[cells.noise]))
    assert boxes is not None
    return joined(parts), boxes


def _explored_under(
    seen: Seen, noise: Noises, brief: bool, rounds: int, boxes: dict[int, Box] | None
) -> tuple[Cells, dict[int, Box]]:
    """Explore the grids of all kinds under some kinds of noise from these boxes, with drifts unless brief."""
    found = explore(seen, noise, KINDS, rounds, _ROUGH if brief else _FINE, _BEHIND, boxes=boxes)
    if brief:
        return found.cells(), found.boxes
    grid, likely = found.grid, found.likely
    some = noise.take(likely)
    extras = drifting(seen.x)[:, None], DRIFT_SD * seen.roughness
    solved = Rewards.of(seen, some).on(grid.basis(seen.x), grid.ceiling, extras)
    drifts = np.where(grid.ceiling, P_DRIFT, 0.0)
    with np.errstate(divide="ignore"):
        without, adrift = np.log(1 - drifts), np.log(drifts)
    cells = cells_of(solved, adrift, grid, some, np.array([DRIFT]))
    return joined([found.cells(without), replace(cells, noise=likely[cells.noise])]), found.boxes


def _restless(cells: Cells, walk: Walk, noise: Noises, seen: Seen) -> bool:
    """Return whether smooth curves need more wander than is usual to explain the points, or a walk is better."""
    weight = np.exp(cells.log_weight - cells.log_weight.max())
    strong = noise.strength[cells.noise] > seen.roughness
    return float(weight[strong].sum()) > 0.5 * float(weight.sum()) or log_sum(walk.log_weight) > log_sum(
        cells.log_weight
    )


def _jumped(seen: Seen, noise: Noises, boxes: Mapping[int, Box]) -> list[Cells]:
    """Return cells of curves with a jump between two evaluations, sudden or spread over one or two of them."""
    computes = np.unique(seen.x)
    at = 0.5 * (computes[1:] + computes[:-1])
    # Every seed must have seen it, and a start: one evaluation of one of them that lies off is no jump of the curve.
    before = np.searchsorted(seen.x, at)
    at = at[(before >= 2 * seen.seeds) & (len(seen.x) - before >= seen.seeds)]
    if not len(at):
        return []
    if len(at) > _MOST_JUMPS:
        # A late jump decides what comes next: there every gap is tried.
        late = _MOST_JUMPS // 3
        at = np.concatenate(
            [at[:-late][np.linspace(0, len(at) - late - 1, _MOST_JUMPS - late).astype(int)], at[-late:]]
        )
    # Wander and a jump explain the same thing: beside a jump there is the least that is tried, and no unlikely kind.
    calm = np.flatnonzero((noise.strength <= STRENGTHS[0] * seen.roughness) & (noise.log_prior > RARE))
    some = noise.take(calm)
    spacing = float(np.median(np.diff(computes)))
    log_prior = float(np.log(P_JUMP / (len(at) * len(JUMP_WIDTHS))))

    def extras(places: Array, width: Array) -> tuple[Array, float]:
        return expit((seen.x[:, None] - places) / width), JUMP_SD

    # The search, for places and shapes, makes do with the likeliest kinds of noise and one width.
    few = some.take(np.argsort(-some.log_prior, kind="stable")[:_SEARCHED])
    under_some, under_few = Rewards.of(seen, some), Rewards.of(seen, few)
    anywhere = extras(at, np.full(len(at), JUMP_WIDTHS[1] * spacing))
    found = []
    for i, kind in enumerate(KINDS):
        if kind.name not in _JUMPING:
            continue
        # What explains a curve best without a jump need not do so with one: both are tried.
        for box in dict.fromkeys((kind.box, boxes[i])):
            for round_ in range(_JUMP_ROUNDS):
                grid = grid_of(KINDS, {i: box})
                basis = grid.basis(seen.x)
                solved = under_few.on(basis, grid.ceiling, anywhere)
                weight = solved.log_evidence + grid.log_cell + few.log_prior[:, None]
                closer = zoomed(grid, weight.max(0), {i: box}, _FINE, np.inf)[i]
                if closer == box or round_ == _JUMP_ROUNDS - 1:
                    break
                box = closer
            by_place = weight.max((1, 2))
            likely = at[by_place > by_place.max() - _ELSEWHERE]
            places = np.tile(likely, len(JUMP_WIDTHS))
            width = np.repeat(np.array(JUMP_WIDTHS) * spacing, len(likely))
            solved = under_some.on(basis, grid.ceiling, extras(places, width))
            cells = cells_of(solved, log_prior, grid, some, np.full(len(places), JUMP), places, width)
            found.append(replace(cells, noise=calm[cells.noise]))
    return found


def _walked(seen: Seen, brief: bool) -> Walk:
    """Fit the random walk under each strength and sampling variance; without its levels if brief."""
    x, z, n = seen.x, seen.z, len(seen.x)
    # Covariance of a random walk (Brownian motion) in compute: step^2 min(x, x').
    common = np.minimum(x[:, None], x[None, :])
    tried = [(step, variance) for variance in seen.white for step in WALK_STEPS]
    covariance = np.stack([seen.between + np.diag(variance) + step**2 * common for step, variance in tried])
    steps, log_prior = np.array([step for step, _ in tried]), -np.log(len(tried))
    whiten = whitening(covariance)
    m0, s0 = R0_PRIOR if seen.bounded else (R0_PRIOR[0], 2 * R0_PRIOR[1])
    tilde = whiten @ np.stack([np.ones(n), z - m0], axis=1)
    one, y = tilde[..., 0], tilde[..., 1]
    p, b = (one * one).sum(1) + s0**-2, (one * y).sum(1)
    # The level at the start is integrated out, under its prior N(m0, s0^2).
    fitted = (y * y).sum(1) - b * b / p + np.log(p * s0**2)
    weight = -0.5 * (n * np.log(2 * np.pi) + fitted) + np.log(np.einsum("jnn->jn", whiten)).sum(1) + log_prior
    kept = np.flatnonzero(weight > weight.max() - 8)
    if brief:
        return Walk(weight[kept], np.zeros(0), np.zeros((len(kept), 0)), np.zeros((len(kept), 0, 0)), steps[kept])
    nodes = np.union1d(x, [1.0])
    levels, roots = [], []
    for j in kept:
        # Kriging, with the level's start as uncertain as its prior says.
        across = steps[j] ** 2 * np.minimum(nodes[:, None], x[None, :]) + s0**2
        gain = np.linalg.solve(covariance[j] + s0**2, across.T).T
        left = steps[j] ** 2 * np.minimum(nodes[:, None], nodes[None, :]) + s0**2 - gain @ across.T
        levels.append(m0 + gain @ (z - m0))
        roots.append(np.linalg.cholesky(left + (1e-9 + 1e-9 * s0**2) * np.eye(len(nodes))))
    return Walk(weight[kept], nodes, np.stack(levels), np.stack(roots), steps[kept])
