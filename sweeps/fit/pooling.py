"""Partial pooling of the scales of random walks over a study's recipes.

One recipe gives little information about tau, the scale of its random walk about the law. Recipes of one study have
similar scales: log tau of each follows a Student t distribution about a common centre, whose prior resembles that of a
single recipe. Each recipe's draws are reweighted by the posterior of the centre given the other recipes, so nothing is
refitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from sweeps.curve import Array
from sweeps.fit.constants import WALK_PRIOR

# With fewer recipes, nothing is pooled.
POOLED_FROM = 3
# Student t distribution of log tau over a study's recipes: its scale and degrees of freedom, and the prior standard
# deviation of its centre. The scale is a choice: on real curves 0.25 and 0.6 in place of 0.4 did about as well.
_SPREAD, _DOF, _CENTRE_SD = 0.4, 4.0, 0.9
_CENTRES = np.linspace(WALK_PRIOR[0] - 3.7, WALK_PRIOR[0] + 2.8, 60)


def pooled_weights(log_walks: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Return the weights of each recipe's draws given all other recipes, in the same form as `log_walks`.

    Args:
        log_walks: log tau of each recipe's draws, (K,) each: the draws of all laws, from which the centre is inferred,
            and the draws of the fitted family alone.
    """
    # Densities are computed again below instead of stored: for 300 recipes they would take half a gigabyte.
    likelihoods = [logsumexp(_log_density_ratio(all_laws), axis=0) - np.log(len(all_laws)) for all_laws, _ in log_walks]
    centre = -0.5 * ((_CENTRES - WALK_PRIOR[0]) / _CENTRE_SD) ** 2 + np.sum(likelihoods, axis=0)
    result = []
    for pair, likelihood in zip(log_walks, likelihoods, strict=True):
        others = centre - likelihood
        others = np.exp(others - logsumexp(others))
        all_laws, family_only = (np.exp(_log_density_ratio(log_walk)) @ others for log_walk in pair)
        result.append((all_laws, family_only))
    return result


def _log_density_ratio(log_walk: Array) -> Array:
    """Return the log density of log tau (K,) given each centre, minus that of the single-recipe prior; (K, centres)."""
    mean, sd = WALK_PRIOR
    distance = (log_walk[:, None] - _CENTRES) / _SPREAD
    log_density = -0.5 * (_DOF + 1) * np.log1p(distance**2 / _DOF)
    return np.asarray(log_density + 0.5 * ((log_walk - mean) / sd)[:, None] ** 2)
