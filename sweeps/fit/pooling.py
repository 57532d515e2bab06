"""Partial pooling of the walk scales of a study's recipes.

One recipe gives little information about tau, the scale of its random walk. Recipes of one study have similar scales:
log tau of each follows a Student t distribution about a common centre, whose prior resembles that of a single recipe.
Each recipe's draws are reweighted by the posterior of the centre given the other recipes, so nothing is refitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from sweeps.curve import Array
from sweeps.fit.constants import WALK_PRIOR

# With fewer recipes, nothing is pooled.
POOLED_FROM = 3
# Scale of log tau between recipes of a study, its degrees of freedom, and the prior standard deviation of the centre.
# A choice; on real curves 0.25 and 0.6 in place of 0.4 did about as well.
_BETWEEN, _TAIL, _CENTRE_SD = 0.4, 4.0, 0.9
_CENTRES = np.linspace(WALK_PRIOR[0] - 3.7, WALK_PRIOR[0] + 2.8, 60)


def pooled_weights(log_walks: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Return the weights of each recipe's draws given all other recipes.

    Args:
        log_walks: log tau of each recipe's draws, (K,) each: the draws of all laws, from which the centre is inferred,
            and the draws of the fitted family alone.
    """
    # Densities are computed again below instead of kept: for 300 recipes they would take half a gigabyte.
    likelihoods = [logsumexp(_relative(every), axis=0) - np.log(len(every)) for every, _ in log_walks]
    centre = -0.5 * ((_CENTRES - WALK_PRIOR[0]) / _CENTRE_SD) ** 2 + np.sum(likelihoods, axis=0)
    result = []
    for pair, likelihood in zip(log_walks, likelihoods, strict=True):
        others = centre - likelihood
        others = np.exp(others - logsumexp(others))
        every, alone = (np.exp(_relative(log_walk)) @ others for log_walk in pair)
        result.append((every, alone))
    return result


def _relative(log_walk: Array) -> Array:
    """Return the log density of draws (K,) about each centre minus that of the single-recipe prior; (K, centres)."""
    mean, sd = WALK_PRIOR
    about = (log_walk[:, None] - _CENTRES) / _BETWEEN
    shared = -0.5 * (_TAIL + 1) * np.log1p(about**2 / _TAIL)
    return np.asarray(shared + 0.5 * ((log_walk - mean) / sd)[:, None] ** 2)
