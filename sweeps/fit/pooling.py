"""Partial pooling of the size of random walks over a study's recipes.

The model of a curve (`sweeps.fit.posterior`) includes a random walk with a standard deviation tau. One recipe gives
little information about tau, but recipes of one study have similar values. So log tau of each recipe is assumed to
follow a Student t distribution about a common centre. The prior of the centre is such that a single recipe's log tau is
distributed about as without pooling. Each recipe's draws are reweighted by the posterior of the centre given the other
recipes, so nothing is refitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from sweeps.curve import Array
from sweeps.fit.constants import WALK_PRIOR

# With fewer recipes than this, nothing is pooled.
POOLED_FROM = 3
# Student t distribution of log tau over a study's recipes: its scale and degrees of freedom, and the prior standard
# deviation of its centre. The scale is a choice: on real curves 0.25 and 0.6 in place of 0.4 did about as well.
_SPREAD, _DOF, _CENTRE_SD = 0.4, 4.0, 0.9
_CENTRES = np.linspace(WALK_PRIOR[0] - 3.7, WALK_PRIOR[0] + 2.8, 60)


@dataclass(frozen=True, eq=False)
class Pool:
    """Information from a study's other recipes on the size of one recipe's random walk.

    Attributes:
        size: number of pooled recipes, including this one.
        centres: probability of each of `_CENTRES` given the other recipes, (60,).
    """

    size: int
    centres: Array

    def weights(self, log_walk: Array) -> Array:
        """Return the weights (K,) of a recipe's draws, given their log tau (K,)."""
        return np.asarray(np.exp(_log_density_ratio(log_walk)) @ self.centres)


def make_pools(log_walks: Sequence[Array]) -> list[Pool]:
    """Return the pool of each recipe.

    Args:
        log_walks: log tau of each recipe's draws, (K,) each.
    """
    likelihoods = [logsumexp(_log_density_ratio(log_walk), axis=0) - np.log(len(log_walk)) for log_walk in log_walks]
    centre = -0.5 * ((_CENTRES - WALK_PRIOR[0]) / _CENTRE_SD) ** 2 + np.sum(likelihoods, axis=0)
    others = [centre - likelihood for likelihood in likelihoods]
    return [Pool(len(log_walks), np.exp(log_others - logsumexp(log_others))) for log_others in others]


def _log_density_ratio(log_walk: Array) -> Array:
    """Return the log density (K, centres) of log tau (K,) given each centre, minus that of its prior."""
    mean, sd = WALK_PRIOR
    distance = (log_walk[:, None] - _CENTRES) / _SPREAD
    log_density = -0.5 * (_DOF + 1) * np.log1p(distance**2 / _DOF)
    return np.asarray(log_density + 0.5 * ((log_walk - mean) / sd)[:, None] ** 2)
