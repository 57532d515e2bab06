"""Families of compute curves, all of the form R(C) = R0 (1 - g(C)) + A g(C).

R0 and A enter linearly; g has no, one or two shape parameters.

    sigmoid        g = 1 / (1 + (C_mid / C)^B)                       arXiv 2510.13786, eq. 1
    sigmoid_zero   the sigmoid with R0 = 0
    logistic       g = 1 / (1 + exp(-k (C - c))): R0 is the lower asymptote, not the reward at compute 0
    exponential    g = 1 - exp(-C / tau)                             (arXiv 2507.18014, revised)
    power_law      g = 1 - (C / C_first)^-B, that is A - D C^-B      (arXiv 2510.13786, A.4); R0 is the reward at
                   the first positive compute C_first, and evaluations at compute 0 are left out
    constant       g = 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sweeps.curve import Array
from sweeps.fit.constants import MIDPOINT_PRIOR, POWER_PRIOR, RATE_PRIOR, SCALE_PRIOR, SIGMOID_PRIOR

Prior = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Family:
    """A family of curves: its basis function g and the prior of its shape parameters.

    Attributes:
        name, formula: name and equation of the family, as printed.
        names: names of its shape parameters, none to two.
        basis: g as a function (log_compute, u, v) of the points' log compute (-inf at compute 0) and of the coordinates
            u and v, which broadcast against it. u and v are logarithms of the shape parameters, except the logistic's
            v, which is c itself.
        inverse: function (fraction, u, v) that returns the compute at which g has this value below 1, for arrays u and
            v of the same shape.
        prior: prior mean and standard deviation of u, and of v, with compute in units of the largest evaluated compute.
        powers: exponents with which the two shape parameters scale with the unit of compute.
        from_zero: whether the curve is defined at compute 0; if not, evaluations at compute 0 are left out.
    """

    name: str
    formula: str
    names: tuple[str, ...]
    basis: Callable[[Array, Array, Array], Array]
    inverse: Callable[[float, Array, Array], Array]
    prior: Prior
    powers: tuple[int, int]
    from_zero: bool = True

    @property
    def shape(self) -> int:
        """Number of shape parameters: 0, 1 or 2."""
        return len(self.names)

    def to_shape(self, u: Array, v: Array) -> tuple[Array, Array]:
        """Convert coordinates u and v to the shape parameters, such as B and C_mid."""
        with np.errstate(over="ignore"):
            return np.exp(u), v if self.name == "logistic" else np.exp(v)

    def compute_at(self, fraction: float, first: Array, second: Array) -> Array:
        """Return the compute (K,) at which a fraction of A - R0 is gained, infinite on overflow.

        `first`, `second`: shapes (K,).
        """
        with np.errstate(over="ignore", divide="ignore"):
            return np.maximum(self.inverse(fraction, *self.coordinates(first, second)), 0.0)

    def coordinates(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Convert the shape parameters to coordinates u and v: the inverse of `to_shape`."""
        return np.log(first), second if self.name == "logistic" else np.log(second)


def logistic_of(t: Array) -> Array:
    """Compute the logistic function 1 / (1 + exp(-t)).

    SciPy's `expit` is more exact for tiny values but half as fast.
    """
    # In place, because allocating temporaries costs as much as the function itself for large arrays.
    result = np.asarray(0.5 * t)
    np.tanh(result, out=result)
    result *= 0.5
    result += 0.5
    return result


def _sigmoid(x: Array, u: Array, v: Array) -> Array:
    return logistic_of(np.exp(u) * (x - v))


def _logistic(x: Array, u: Array, v: Array) -> Array:
    return logistic_of(np.exp(u) * (np.exp(x) - v))


def _exponential(x: Array, u: Array, v: Array) -> Array:
    # expm1 keeps a small g exact. Adding 0 v broadcasts the result to the shape of v.
    result: Array = -np.expm1(-np.exp(x - u)) + 0.0 * v
    return result


def _power(x: Array, u: Array, v: Array) -> Array:
    # v is the logarithm of the first positive compute: it sets the unit and is not a fitted parameter.
    result: Array = -np.expm1(-np.exp(u) * np.maximum(x - v, 0.0))
    return result


def _constant(x: Array, u: Array, v: Array) -> Array:
    result: Array = np.ones(np.broadcast_shapes(np.shape(x), np.shape(u), np.shape(v)))
    return result


def _log_odds(fraction: float) -> float:
    return float(np.log(fraction / (1 - fraction)))


def _sigmoid_inverse(fraction: float, u: Array, v: Array) -> Array:
    return np.asarray(np.exp(v + _log_odds(fraction) * np.exp(-u)))


def _logistic_inverse(fraction: float, u: Array, v: Array) -> Array:
    return v + _log_odds(fraction) * np.exp(-u)


def _exponential_inverse(fraction: float, u: Array, v: Array) -> Array:
    return np.asarray(-np.log1p(-fraction) * np.exp(u))


def _power_inverse(fraction: float, u: Array, v: Array) -> Array:
    return np.asarray(np.exp(v - np.log1p(-fraction) * np.exp(-u)))


def _constant_inverse(fraction: float, u: Array, v: Array) -> Array:
    return np.zeros_like(u)


# Prior of a coordinate that a family with fewer shape parameters lacks.
_UNUSED = (0.0, 1.0)
_OF_SIGMOID = (SIGMOID_PRIOR, SCALE_PRIOR)
SIGMOID = Family(
    name="sigmoid",
    formula="R0 + (A - R0) / (1 + (C_mid / C)^B)",
    names=("B", "C_mid"),
    basis=_sigmoid,
    inverse=_sigmoid_inverse,
    prior=_OF_SIGMOID,
    powers=(0, 1),
)
FAMILIES = {
    family.name: family
    for family in (
        SIGMOID,
        replace(SIGMOID, name="sigmoid_zero", formula="A / (1 + (C_mid / C)^B)"),
        Family(
            name="logistic",
            formula="R0 + (A - R0) / (1 + exp(-k (C - c)))",
            names=("k", "c"),
            basis=_logistic,
            inverse=_logistic_inverse,
            prior=(RATE_PRIOR, MIDPOINT_PRIOR),
            powers=(-1, 1),
        ),
        Family(
            name="exponential",
            formula="R0 + (A - R0) (1 - exp(-C / tau))",
            names=("tau",),
            basis=_exponential,
            inverse=_exponential_inverse,
            prior=(SCALE_PRIOR, _UNUSED),
            powers=(1, 0),
        ),
        Family(
            name="power_law",
            formula="A - D C^-B",
            names=("B",),
            basis=_power,
            inverse=_power_inverse,
            prior=(POWER_PRIOR, _UNUSED),
            powers=(0, 1),
            from_zero=False,
        ),
        Family(
            name="constant",
            formula="A",
            names=(),
            basis=_constant,
            inverse=_constant_inverse,
            prior=(_UNUSED, _UNUSED),
            powers=(0, 0),
        ),
    )
}
