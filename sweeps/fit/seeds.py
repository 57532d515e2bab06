"""Spread of A between seeds of one recipe: measured where there are enough seeds, else taken from the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from sweeps.as_json import AsJson
from sweeps.curve import UNNAMED, Array
from sweeps.fit.constants import INFORMING, SEED_SD
from sweeps.fit.forecast import Outlook
from sweeps.fit.points import Points

BORROWED_SEED_SD = SEED_SD
# Fewest degrees of freedom (seeds minus one, summed over recipes) from which the spread is measured.
SPREAD_DOF = 2
# Value of `SeedSpread.source` for the paper's spread.
_BORROWED = "borrowed"


@dataclass(frozen=True)
class SeedSpread:
    """Spread of A between seeds.

    Attributes:
        sd: standard deviation, in reward.
        source: `borrowed` (published), `measured`, `pooled` (over recipes) or `paired` (see `Pairing`).
        dof: degrees of freedom of sd; infinite if sd is taken as known.
    """

    sd: float = BORROWED_SEED_SD
    source: str = _BORROWED
    dof: float = float("inf")

    @property
    def assumed(self) -> bool:
        """True if the spread is the published value, because there were too few seeds to measure it."""
        return self.source == _BORROWED

    def quantile(self) -> float:
        """Return the 97.5% quantile of Student's t with `dof` degrees of freedom (a normal's if infinite)."""
        return 1.959964 if np.isinf(self.dof) else float(stdtrit(self.dof, 0.975))


@dataclass(frozen=True)
class SeedScatter:
    """Scatter of the asymptotes (or rewards) of one recipe's seeds.

    Attributes:
        squares: sum of squared deviations from the seeds' mean, in reward squared.
        sampling: mean sampling variance of one seed's value, in reward squared.
        dof: degrees of freedom, number of seeds minus one.
        offset: each seed's value minus the mean, by label; empty where seeds have no labels.
    """

    squares: float = 0.0
    sampling: float = 0.0
    dof: int = 0
    offset: Mapping[str, float] = field(default_factory=dict)


def seed_scatter(
    points: Points, line: Array, outlook: Outlook, labels: Sequence[str]
) -> tuple[SeedScatter, NDArray[np.bool_]]:
    """Estimate how far each seed's asymptote is from the common one. Return also a mask (S,) of informative seeds.

    Args:
        points: the fitted points.
        line: the fitted line at the points, (n,).
        outlook: the posterior.
        labels: labels of the seeds, indexed as in `points.seed`.
    """
    # A seed's residuals are r = offset x g, so the least-squares estimate of its offset is sum g r / sum g^2.
    draws = outlook.draws
    u, v = draws.family.coordinates(np.median(draws.B, keepdims=True), np.median(draws.C_mid, keepdims=True))
    with np.errstate(divide="ignore"):
        g = draws.family.basis(np.log(points.compute), u, v)
    information = np.bincount(points.seed, g * g, points.seeds)
    informing = information >= INFORMING * max(float(information.max()), 1e-12)
    count = int(informing.sum())
    if count < 2 or (information[informing] <= 0).any():
        return SeedScatter(), informing
    offset = (np.bincount(points.seed, g * (points.reward - line), points.seeds) / np.maximum(information, 1e-300))[
        informing
    ]
    offset = offset - offset.mean()
    sampling = float(np.mean(outlook.noise**2) * np.mean(1 / information[informing]))
    used_labels = [labels[int(i)] for i in np.flatnonzero(informing)] if len(labels) == points.seeds else []
    # A reader of sources has numbered runs without seeds: equal numbers in two recipes do not mean a common seed.
    are_seeds = bool(used_labels) and not any(label.startswith(UNNAMED) for label in used_labels)
    by_label = dict(zip(used_labels, offset.tolist(), strict=True)) if are_seeds else {}
    return SeedScatter(float((offset**2).sum()), sampling, count - 1, by_label), informing


@dataclass(frozen=True)
class Pairing(AsJson):
    """Seeds shared by recipes that are compared seed by seed, so that the seeds' common effect cancels.

    Attributes:
        seeds: labels of the shared seeds.
        spread: spread between seeds that remains after removing their common effect.
    """

    seeds: tuple[str, ...]
    spread: SeedSpread

    def to_json(self) -> dict[str, Any]:
        """Return the object that `scalerl rank --json` stores in the field `paired`."""
        return {"seeds": list(self.seeds), "seed_sd": self.spread.sd}


def paired_seed_spread(excesses: Sequence[SeedScatter], scale: float = 1.0) -> Pairing | None:
    """Estimate the spread between seeds that remains in comparisons of recipes that share their seeds.

    The estimate is the residual variance of an analysis of variance with the factors recipe and seed. It is None unless
    all recipes have exactly the same seeds, two or more, because the effect of a seed that one recipe lacks would not
    cancel. Two degrees of freedom must remain.
    """
    shared = sorted(excesses[0].offset) if excesses else []
    if any(sorted(excess.offset) != shared for excess in excesses):
        return None
    dof = (len(excesses) - 1) * (len(shared) - 1)
    if len(shared) < 2 or dof < 2:
        return None
    table = np.array([[excess.offset[label] for label in shared] for excess in excesses])
    # Residuals after removing the effects of recipe and of seed: their interaction and the noise.
    residual = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    sampling = float(np.mean([excess.sampling for excess in excesses]))
    variance = max(float((residual**2).sum()) / dof - sampling, min(sampling, (BORROWED_SEED_SD * scale) ** 2))
    return Pairing(tuple(shared), SeedSpread(float(np.sqrt(variance)), "paired", float(dof)))


def pooled_seed_spread(excesses: Sequence[SeedScatter], scale: float = 1.0) -> SeedSpread | None:
    """Estimate the spread between seeds from the given recipes; None with fewer than `SPREAD_DOF` degrees of freedom.

    The variance due to the points' noise is subtracted. The result is at least the part of the published spread that
    this noise could hide.
    """
    squares = sum(excess.squares for excess in excesses)
    dof = sum(excess.dof for excess in excesses)
    if dof < SPREAD_DOF:
        return None
    sampling = sum(excess.sampling * excess.dof for excess in excesses) / dof
    variance = max(squares / dof - sampling, min(sampling, (BORROWED_SEED_SD * scale) ** 2))
    return SeedSpread(float(np.sqrt(variance)), "pooled" if len(excesses) > 1 else "measured", float(dof))
