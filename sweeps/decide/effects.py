"""Effects of the axes of a grid of recipes: main effects and chosen interactions, partially pooled.

A grid of recipes is a table of cells, each with one level per axis. The estimate of a cell (its asymptote, or the
logarithm of its compute to half of its gain) is modelled as a sum: a mean, an effect of each level, an effect of each
pair of levels in the requested interactions, a residual of the cell, and the estimate's error. The covariance of these
errors comes from the joint draws that `scalerl rank` uses:

    y = mu + Z1 b1 + Z2 b2 + e + v,   b1 ~ N(0, s1^2), b2 ~ N(0, s2^2), e ~ N(0, s0^2), v ~ N(0, V)

Given the standard deviations s0, s1 and s2, everything else is normal. These three are integrated over a grid, under
half-normal priors. So an effect is shrunk towards zero, the more so the smaller the study's other effects are. This is
why sixteen cells suffice for eight effects.

Where every recipe differs from one central recipe in a single axis, each effect is a difference of two recipes, and
nothing can be averaged. Then no effect is reported here, so that this module and `sweeps.decide.pairwise`, which
compares such recipes by seed, cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import ClassVar

import numpy as np
from scipy.special import logsumexp

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.reach import first_compute_above
from sweeps.decide.standing import draw_asymptotes
from sweeps.errors import UserError
from sweeps.fit.constants import FARTHEST
from sweeps.fit.fit import Fit, Interval, interval_of
from sweeps.fit.predict import asymptote_draws, can_forecast, paths

# OWN: level on the axes that a recipe's label does not change. BASE: name of an additional axis, on which the level is
# the part of the recipe's label before the first `+`.
OWN = "(its own)"
BASE = "recipe"
# Grid of standard deviations, as fractions of the reward's scale, or of `_LOG_SCALE` for the logarithm of compute.
_GRID = np.geomspace(1e-3, 0.5, 14)
_PRIOR_SD = 0.1
# Smaller than `_PRIOR_SD`: the cells' residuals are interactions of higher order, rarely as large as main effects.
_RESIDUAL_SD = 0.03
_LOG_SCALE = 10.0
# Prior standard deviation of the mean: practically flat.
_MEAN_SD = 10.0
_DRAWS = 4000
# Largest number of cells that are considered for the next run. From a larger grid they are drawn at random.
_MAX_CELLS = 4096
# Number of grid points at which a curve is evaluated to find where half of its gain is reached.
_GRID_SIZE = 241


@dataclass(frozen=True)
class Effect(AsJson):
    """Effect of a level relative to the first level of its axis, averaged over the recipes of the grid.

    The effect of an interaction is the part that the main effects do not explain.

    Attributes:
        axis, level: names; for an interaction both axes, and both levels, joined by `:`.
        against: reference level.
        A: effect on the asymptote, in reward.
        compute: factor by which the level multiplies the compute to half of the gain; None where this compute is known
            for fewer than three recipes.
        p_positive: posterior probability that the effect on A is above 0.
        cells: number of recipes that have the level.
    """

    axis: str
    level: str
    against: str
    A: Interval
    compute: Interval | None
    p_positive: float
    cells: int


@dataclass(frozen=True)
class Cell(AsJson):
    """A combination of levels, not run yet, that should be run next.

    Attributes:
        levels: level by axis.
        gain: fraction, in [0, 1], of the summed variance of the main effects on A that this run would remove.
    """

    levels: Mapping[str, str]
    gain: float


@dataclass(frozen=True)
class Effects(AsJson):
    """Effects of all axes of a grid, and the combinations of levels to run next.

    Attributes:
        effects: main effects and interactions; empty where the study changes one axis at a time.
        next: combinations of levels to run next, the most informative first.
        residual_sd: standard deviation of the cells' residuals, in reward.
        cells: number of recipes used.
        left_out: recipes without a forecast, which were not used.
        notes: remarks on axes that the grid cannot separate, and on grids that change one axis at a time.
    """

    effects: tuple[Effect, ...]
    next: tuple[Cell, ...]
    residual_sd: float
    cells: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    JSON: ClassVar = {"residual_sd": "own"}


def levels_of_recipes(recipes: Sequence[str], factors: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return each recipe's level on every axis, parsed from its label (`base+axis=choice+...`) and its factors.

    A setting of a choice counts as part of the choice's axis if some recipe changes that axis:
    `kl=fixed+kl.coefficient=0.2` has the level `fixed coefficient=0.2` of `kl`.
    """
    changed_axes = {part.partition("=")[0] for recipe in recipes for part in recipe.split("+")[1:]}
    cells = []
    for recipe, recipe_factors in zip(recipes, factors, strict=True):
        # Remove the factors that were appended to the label before parsing: they may contain spaces and `+`.
        suffix = "".join(f" {name}={value}" for name, value in recipe_factors.items())
        base, *parts = recipe.removesuffix(suffix).split("+")
        cell = {BASE: base, **recipe_factors}
        for part in parts:
            axis, _, level = part.partition("=")
            owner, _, setting = axis.partition(".")
            if setting and owner in changed_axes:
                level = " ".join(text for text in (cell.get(owner, ""), f"{setting}={level}") if text)
                axis = owner
            cell[axis] = level or "yes"
        cells.append(cell)
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell))
    return [{axis: cell.get(axis, OWN) for axis in axes} for cell in cells]


def effects(fits: Sequence[Fit], interactions: Sequence[tuple[str, str]] = ()) -> Effects:
    """Estimate main effects and interactions from a grid.

    Args:
        fits: one fit per cell of the grid, as `fit_curves` returns them.
        interactions: pairs of axes whose interaction to estimate; none by default. A pair that is repeated, in either
            order, counts once.

    Raises:
        UserError: fewer than three recipes have a forecast, no axis varies, or an interaction names an axis that does
            not vary.
    """
    readable_fits = [fit for fit in fits if can_forecast(fit) and fit.window is not None]
    left_out = tuple(fit.recipe for fit in fits if fit not in readable_fits)
    if len(readable_fits) < 3:
        raise UserError(f"effects: {len(readable_fits)} recipes can be read; a grid takes three or more")
    cells = levels_of_recipes([fit.recipe for fit in readable_fits], [fit.curve.factors for fit in readable_fits])
    axes = {axis: list(dict.fromkeys(cell[axis] for cell in cells)) for axis in cells[0]}
    # The level of recipes that keep their base's choice comes first, because it is the reference of the effects.
    axes = {axis: sorted(levels, key=lambda level: level != OWN) for axis, levels in axes.items() if len(levels) > 1}
    if not axes:
        raise UserError("effects: all recipes are alike in every axis; give a grid of labels such as base+loss=dapo")
    for axis in {axis for pair in interactions for axis in pair}:
        if axis not in axes:
            raise UserError(f"--interaction {axis}: no axis that varies here; those are {', '.join(axes)}")
    # A pair given twice would make equal columns in the design matrix, which would split its effect.
    pairs: dict[frozenset[str], tuple[str, str]] = {}
    for pair in interactions:
        pairs.setdefault(frozenset(pair), pair)
    interactions = tuple(pairs.values())
    scale = max(fit.curve.scale for fit in readable_fits)
    design = _Design.of(cells, axes, interactions)
    asymptotes = np.stack([one.asymptote() for one in draw_asymptotes(readable_fits)])
    on_asymptote = _effects_posterior(design, asymptotes.mean(1), np.atleast_2d(np.cov(asymptotes)), scale)
    error_variance = float(np.median(np.diag(np.atleast_2d(np.cov(asymptotes)))))
    next_cells = tuple(_choose_next_cells(cells, axes, interactions, on_asymptote, error_variance))
    centre = _central_cell(cells)
    if centre is not None:
        note = (
            f"one change at a time: each recipe differs from {readable_fits[centre].recipe} in one axis, so no effect "
            "can be averaged over the others; use scalerl compare"
        )
        return Effects(
            effects=(),
            next=next_cells,
            residual_sd=on_asymptote.residual_sd,
            cells=len(readable_fits),
            left_out=left_out,
            notes=(note,),
        )
    half_gain_computes = [_compute_to_half_gain(fit) for fit in readable_fits]
    cells_with_compute = [n for n, draws in enumerate(half_gain_computes) if draws is not None]
    on_compute = None
    if len(cells_with_compute) >= 3:
        logs = np.stack([np.log(draws) for draws in half_gain_computes if draws is not None])
        on_compute = _effects_posterior(
            design.of_cells(cells_with_compute), logs.mean(1), np.diag(logs.var(1)), _LOG_SCALE
        )
    rows = [
        Effect(
            axis=axis,
            level=level,
            against=against,
            A=interval_of(on_asymptote.draws[n]),
            compute=None if on_compute is None else interval_of(np.exp(on_compute.draws[n])),
            p_positive=float((on_asymptote.draws[n] > 0).mean()),
            cells=sum(
                all(cell[a] == b for a, b in zip(axis.split(":"), level.split(":"), strict=True)) for cell in cells
            ),
        )
        for n, (axis, level, against) in enumerate(design.effects)
    ]
    return Effects(
        effects=tuple(rows),
        next=next_cells,
        residual_sd=on_asymptote.residual_sd,
        cells=len(readable_fits),
        left_out=left_out,
        notes=tuple(_notes(cells, axes)),
    )


def _central_cell(cells: Sequence[Mapping[str, str]]) -> int | None:
    """Return the index of the cell from which every other cell differs in one axis only; None if there is no such cell.

    If only one axis varies, every cell qualifies: the one with the fewest changes is returned.
    """
    centres = [
        n
        for n, cell in enumerate(cells)
        if all(sum(cell[axis] != other[axis] for axis in cell) <= 1 for other in cells)
    ]
    return max(centres, key=lambda n: sum(level == OWN for level in cells[n].values()), default=None)


@dataclass(frozen=True, eq=False)
class _Design:
    """Design matrix of a grid of n cells, and the contrasts that define its effects.

    Attributes:
        main: indicators of the levels of all axes, (n, p1).
        pairs: indicators of the pairs of levels of the interactions, (n, p2).
        coefficients: coefficients of each effect, (c, p1 + p2).
        effects: axis, level and reference level of each effect.
    """

    main: Array
    pairs: Array
    coefficients: Array
    effects: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(
        cls,
        cells: Sequence[Mapping[str, str]],
        axes: Mapping[str, Sequence[str]],
        interactions: Sequence[tuple[str, str]],
    ) -> _Design:
        """Return the design of the given cells; axes: the levels of each axis, the reference level first."""
        columns = [(axis, level) for axis, levels in axes.items() for level in levels]
        level_pairs = [((a, x), (b, y)) for a, b in interactions for x, y in product(axes[a], axes[b])]
        main = np.array([[float(cell[axis] == level) for axis, level in columns] for cell in cells])
        pairs = np.array([[float(cell[a] == x and cell[b] == y) for (a, x), (b, y) in level_pairs] for cell in cells])
        column_of, effects, rows = {column: n for n, column in enumerate(columns)}, [], []
        number_of = {pair: n for n, pair in enumerate(level_pairs)}
        width = len(columns) + len(level_pairs)
        for axis, levels in axes.items():
            for level in levels[1:]:
                row = np.zeros(width)
                row[column_of[axis, level]], row[column_of[axis, levels[0]]] = 1.0, -1.0
                # A main effect is the mean over the other axis's levels, so it includes part of the interaction.
                for a, b in interactions:
                    for other in axes[b] if a == axis else axes[a] if b == axis else ():
                        for sign, own_level in ((1.0, level), (-1.0, levels[0])):
                            pair = ((a, own_level), (b, other)) if a == axis else ((a, other), (b, own_level))
                            row[len(columns) + number_of[pair]] += sign / len(axes[b] if a == axis else axes[a])
                effects.append((axis, level, levels[0]))
                rows.append(row)
        for a, b in interactions:
            for x, y in product(axes[a][1:], axes[b][1:]):
                row = np.zeros(width)
                for sign, one, two in (
                    (1, x, y),
                    (-1, axes[a][0], y),
                    (-1, x, axes[b][0]),
                    (1, axes[a][0], axes[b][0]),
                ):
                    row[len(columns) + number_of[(a, one), (b, two)]] += sign
                effects.append((f"{a}:{b}", f"{x}:{y}", f"{axes[a][0]}:{axes[b][0]}"))
                rows.append(row)
        return cls(main, pairs.reshape(len(cells), len(level_pairs)), np.array(rows), tuple(effects))

    def of_cells(self, which: Sequence[int]) -> _Design:
        return _Design(self.main[which], self.pairs[which], self.coefficients, self.effects)


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Posterior of the effects.

    Attributes:
        draws: K joint draws of the effects, (c, K).
        residual_sd: posterior mean of s0, the standard deviation of the cells' residuals.
        effect_sds: posterior means of s1 (main effects) and s2 (interactions).
    """

    draws: Array
    residual_sd: float
    effect_sds: tuple[float, float]


def _effects_posterior(design: _Design, y: Array, error: Array, scale: float) -> _Posterior:
    """Return the posterior of the effects.

    Args:
        design: design matrix of the n cells.
        y: estimate of each cell, (n,).
        error: covariance of the estimates, (n, n).
        scale: width of the scale of y, in whose units the priors are given.
    """
    z = np.concatenate([design.main, design.pairs], axis=1)
    mains, pairs = design.main.shape[1], design.pairs.shape[1]
    values = _GRID * scale
    # Log prior weight of each grid value: the half-normal density times the distance to the next value, which is
    # proportional to the value itself because the grid is evenly spaced in the logarithm.
    prior, residual_prior = (np.log(values) - 0.5 * (values / (sd * scale)) ** 2 for sd in (_PRIOR_SD, _RESIDUAL_SD))
    # The mean mu is integrated out, under a prior that is practically flat.
    mean_variance = np.full((len(y), len(y)), (_MEAN_SD * scale) ** 2)
    centred = y - y.mean()
    components: list[tuple[float, tuple[float, float, float], Array, Array]] = []
    for (residual_sd, p0), (main_sd, p1), (interaction_sd, p2) in product(
        zip(values, residual_prior, strict=True),
        zip(values, prior, strict=True),
        zip(values, prior, strict=True) if pairs else ((0.0, 0.0),),
    ):
        variance = np.concatenate([np.full(mains, main_sd**2), np.full(pairs, interaction_sd**2)])
        total = error + residual_sd**2 * np.eye(len(y)) + (z * variance) @ z.T + mean_variance
        factor = np.linalg.cholesky(total)
        whitened = np.linalg.solve(factor, np.column_stack([centred, z * variance]))
        # Log marginal likelihood, -1/2 log |V| - 1/2 y' V^-1 y. The sum of the factor's log diagonal is 1/2 log |V|.
        weight = p0 + p1 + p2 - np.log(np.diag(factor)).sum() - 0.5 * float(whitened[:, 0] @ whitened[:, 0])
        mean = whitened[:, 1:].T @ whitened[:, 0]
        covariance = np.diag(variance) - whitened[:, 1:].T @ whitened[:, 1:]
        components.append(
            (
                weight,
                (residual_sd, main_sd, interaction_sd),
                design.coefficients @ mean,
                design.coefficients @ covariance @ design.coefficients.T,
            )
        )
    weights = np.array([component[0] for component in components])
    probabilities = np.exp(weights - logsumexp(weights))
    rng = np.random.default_rng(0)
    counts = rng.multinomial(_DRAWS, probabilities)
    draws = np.concatenate(
        [
            rng.multivariate_normal(component[2], component[3], count, method="eigh", check_valid="ignore")
            for component, count in zip(components, counts, strict=True)
            if count
        ]
    ).T
    residual_sd, main_sd, interaction_sd = (
        float(probabilities @ [component[1][n] for component in components]) for n in range(3)
    )
    return _Posterior(draws, residual_sd, (main_sd, interaction_sd))


def _compute_to_half_gain(fit: Fit) -> Array | None:
    """Return draws (K,) of the compute at which half of a curve's gain is reached; None if it does not rise."""
    if fit.verdict in ("flat", "decreasing") or fit.window is None:
        return None
    computes = np.concatenate([[0.0], np.geomspace(fit.window[1] / 1000, FARTHEST * fit.window[1], _GRID_SIZE)])
    rewards = paths(fit, computes)
    top = asymptote_draws(fit)
    half = 0.5 * (rewards[:, 0] + top)
    shifted = rewards - half[:, None]
    return np.clip(first_compute_above(shifted, computes, 0.0), computes[1], computes[-1])


def _choose_next_cells(
    cells: Sequence[Mapping[str, str]],
    axes: Mapping[str, Sequence[str]],
    interactions: Sequence[tuple[str, str]],
    posterior: _Posterior,
    error_variance: float,
    limit: int = 3,
) -> list[Cell]:
    """Choose up to `limit` new cells one by one: each time the one that most reduces the main effects' total variance.

    `error_variance` is the variance of one cell's estimate.
    """
    known_levels = {tuple(cell[axis] for axis in axes) for cell in cells}
    size = int(np.prod([len(levels) for levels in axes.values()], dtype=float))
    if size <= _MAX_CELLS:
        candidates = [levels for levels in product(*axes.values()) if levels not in known_levels]
    else:
        rng = np.random.default_rng(0)
        sample = [tuple(levels[int(rng.integers(len(levels)))] for levels in axes.values()) for _ in range(_MAX_CELLS)]
        candidates = [levels for levels in dict.fromkeys(sample) if levels not in known_levels]
    run_cells = [{axis: cell[axis] for axis in axes} for cell in cells]
    chosen: list[Cell] = []
    while candidates and len(chosen) < limit:
        design = _Design.of(
            [*run_cells, *(dict(zip(axes, levels, strict=True)) for levels in candidates)], axes, interactions
        )
        z = np.concatenate([design.main, design.pairs], axis=1)
        first, second = posterior.effect_sds
        prior = np.concatenate([np.full(design.main.shape[1], first**2), np.full(design.pairs.shape[1], second**2)])
        noise = error_variance + posterior.residual_sd**2
        observed = z[: len(run_cells)]
        # Adding 100 x the largest variance everywhere makes the prior of the common mean practically flat.
        total = (observed * prior) @ observed.T + noise * np.eye(len(run_cells)) + 100.0 * max(prior.max(), noise)
        covariance = np.diag(prior) - (prior[:, None] * observed.T) @ np.linalg.solve(total, observed * prior)
        mains = design.coefficients[[":" not in axis for axis, _, _ in design.effects]]
        # Summed variance of the main effects without the candidate.
        variance_now = float(np.trace(mains @ covariance @ mains.T))
        cross = mains @ covariance @ z[len(run_cells) :].T  # (effects, candidates)
        predictive = np.einsum("np,pq,nq->n", z[len(run_cells) :], covariance, z[len(run_cells) :]) + noise
        # By a rank-one update, one more observation z reduces the covariance by (covariance z)(covariance z)' / (z'
        # covariance z + noise).
        gains = (cross**2).sum(0) / predictive / variance_now
        # Take the first candidate among those equal up to rounding, so that the choice is the same on every machine.
        best = int(np.argmax(gains > gains.max() * (1 - 1e-6)))
        if gains[best] < 1e-3:
            break
        chosen.append(Cell(dict(zip(axes, candidates[best], strict=True)), float(gains[best])))
        run_cells.append(dict(zip(axes, candidates.pop(best), strict=True)))
    return chosen


def _notes(cells: Sequence[Mapping[str, str]], axes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a note on each pair of axes whose levels always change together.

    The grid cannot separate their effects.
    """
    return [
        f"{a} and {b} vary together, so the grid cannot separate their effects"
        for a, b in combinations(axes, 2)
        if len({(cell[a], cell[b]) for cell in cells}) == len(axes[a]) == len(axes[b])
    ]
