"""Partial pooling of the walks of a study's recipes.

One recipe gives little information about tau, the scale of its walk. Recipes of one study have similar scales: log tau
of each follows a Student t distribution about a common centre, whose prior is about that of a single recipe. Each
recipe's draws are weighted by the posterior of the centre given the other recipes, so nothing is fitted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from sweeps.curve import Array
from sweeps.fit.constants import WALK_PRIOR

# Fewer recipes than this are not pooled.
POOLED_FROM = 3
# Scale of log tau between recipes of a study and its degrees of freedom, and the standard deviation of the centre's
# prior. A choice; on real curves 0.25 and 0.6 did about as well.
_BETWEEN, _TAIL, _CENTRE_SD = 0.4, 4.0, 0.9
_CENTRES = np.linspace(WALK_PRIOR[0] - 3.7, WALK_PRIOR[0] + 2.8, 60)


def pooled_weights(log_walks: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Return the weights of each recipe's draws given all others.

    Args:
        log_walks: log tau of each recipe's draws, (K,) each: those of all laws, from which the centre is inferred, and
            those of its family alone.
    """
    # Densities are computed again below: kept, those of a study of 300 recipes would take half a gigabyte.
    own = [logsumexp(_relative(every), axis=0) - np.log(len(every)) for every, _ in log_walks]
    centre = -0.5 * ((_CENTRES - WALK_PRIOR[0]) / _CENTRE_SD) ** 2 + np.sum(own, axis=0)
    found = []
    for pair, mine in zip(log_walks, own, strict=True):
        others = centre - mine
        others = np.exp(others - logsumexp(others))
        every, alone = (np.exp(_relative(log_walk)) @ others for log_walk in pair)
        found.append((every, alone))
    return found


def _relative(log_walk: Array) -> Array:
    """Log density of draws (K,) about each centre, less that of the prior of a recipe alone; (K, centres)."""
    mean, sd = WALK_PRIOR
    about = (log_walk[:, None] - _CENTRES) / _BETWEEN
    shared = -0.5 * (_TAIL + 1) * np.log1p(about**2 / _TAIL)
    return np.asarray(shared + 0.5 * ((log_walk - mean) / sd)[:, None] ** 2)
