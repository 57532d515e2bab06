"""Truths about a law's posterior: a sampler that knows no grid finds the same, and what is fixed stays fixed."""

from __future__ import annotations

from collections.abc import Callable

import emcee
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, logsumexp

from sweeps.curve import Curve, make_curve
from sweeps.fit.constants import A_PRIOR, MEMORIES, P_STILL, R0_PRIOR, STRENGTHS, WANDER_SD
from sweeps.fit.fit import Fit, fit_curve
from sweeps.fit.law import _SIGMOID as SIGMOID
from sweeps.fit.points import FitOptions
from sweeps.fit.wander import Seen, noises
from tests.examples import every
from tests.sweeps.fit.simulate import curve

Array = NDArray[np.float64]

CURVES = {
    "plateau": curve(seeds=1),
    "two seeds": curve(),
    "a policy that wanders": curve(seeds=1, wander=0.015, rng=3),
    "at 2 C_mid": curve(seeds=1, end=5000, rng=4),
    "at 1 C_mid": curve(seeds=1, end=2500, points=41, white=0.003, rng=5),
    "many points": curve(seeds=1, points=80, white=0.02, rng=7),
    "few points": curve(seeds=1, points=12, white=0.004, rng=6),
    "steep": curve(seeds=1, b=4.0, rng=8),
    "shallow": curve(seeds=1, b=1.0, end=25000, rng=9),
    "low": curve(seeds=1, a=0.35, r0=0.12, rng=10),
    "three seeds that wander": curve(seeds=3, points=20, wander=0.01, rng=11),
    "known errors": make_curve(
        "known", curve(seeds=1, rng=12).compute, curve(seeds=1, white=0.01, rng=12).reward, sd=np.full(33, 0.01)
    ),
}


def covariances(seen: Seen) -> tuple[Array, Array]:
    """Every kind of noise that docs/reference/methods.md lists: (J, n, n), and their log weights (J,)."""
    apart = np.abs(seen.x[:, None] - seen.x[None, :])
    found, weights = [], []
    for variance in seen.white:
        still = np.diag(variance) + seen.between
        found.append(still)
        weights.append(P_STILL)
        for memory in MEMORIES:
            for times in STRENGTHS:
                tau = times * seen.roughness
                rate = tau / (WANDER_SD * np.sqrt(memory))
                found.append(still + tau**2 * np.exp(-apart / memory) * seen.same)
                weights.append((1 - P_STILL) / (len(MEMORIES) * len(STRENGTHS)) / (1 + rate**2) ** 2)
    return np.stack(found), np.log(weights)


@pytest.mark.parametrize("name", ["few points", "three seeds that wander", "known errors", "floored"])
def test_noise_has_the_covariances_that_the_methods_list(name: str) -> None:
    sd = np.where(np.arange(12) % 3, 0.0011, 0.0009)
    floored = make_curve("floored", np.arange(12.0), np.linspace(0.1, 0.6, 12) + 0.03 * np.cos(np.arange(12.0)), sd=sd)
    ahead = fit_curve(floored if name == "floored" else CURVES[name]).lookout
    assert ahead is not None
    seen, rng = ahead.seen, np.random.default_rng(1)
    left, right = rng.standard_normal((2, len(seen.x), 3))
    covariance, log_weight = covariances(seen)
    inverse = np.linalg.inv(covariance)
    whole = noises(seen)
    some = np.array([3, 8, 10])
    for noise, keep in ((whole, slice(None)), (whole.take(some), some)):
        weighed, turned = noise.weighed(noise.turn @ left), noise.turn @ right
        assert noise.products(weighed, turned) == pytest.approx(left.T @ inverse[keep] @ right, rel=1e-6, abs=1e-6)
        squares = np.einsum("ak,jab,bk->jk", right, inverse[keep], right)
        assert noise.squares(turned) == pytest.approx(squares, rel=1e-6)
        assert noise.log_det == pytest.approx(np.linalg.slogdet(covariance[keep])[1], rel=1e-9)
    assert whole.log_prior == pytest.approx(log_weight - logsumexp(log_weight))


def log_posterior(seen: Seen) -> Callable[[Array], Array]:
    """Of R0, A, log B and log C_mid in windows, up to a constant; (W, 4) -> (W,)."""
    covariance, log_weight = covariances(seen)
    inverse, log_det = np.linalg.inv(covariance), np.linalg.slogdet(covariance)[1]
    centre = np.array([R0_PRIOR[0], A_PRIOR[0], SIGMOID.likely[0], SIGMOID.likely[2]])
    spread = np.array([R0_PRIOR[1], A_PRIOR[1], SIGMOID.likely[1], SIGMOID.likely[3]])
    low, high = np.array([0, 0, *SIGMOID.box[0::2]]), np.array([1, 1, *SIGMOID.box[1::2]])

    def value(theta: Array) -> Array:
        r0, a, u, v = theta.T[:, :, None]
        with np.errstate(divide="ignore"):
            g = expit(np.exp(u) * (np.log(seen.x) - v))
        left = seen.z - r0 * (1 - g) - a * g
        likely = -0.5 * (np.einsum("wa,jab,wb->wj", left, inverse, left, optimize=True) + log_det)
        inside = ((theta >= low) & (theta <= high)).all(1)
        prior = -0.5 * (((theta - centre) / spread) ** 2).sum(1)
        return np.where(inside, logsumexp(likely + log_weight, axis=1) + prior, -np.inf)

    return value


def sampled(fit: Fit) -> Array:
    """Draws of R0, A, log B and log C_mid in windows by an ensemble sampler; (K, 4)."""
    assert fit.lookout is not None and fit.law is not None and fit.R0 is not None
    best = fit.law.best
    start = np.array([best.r0, best.a, best.u, best.v - np.log(fit.lookout.end)])
    rng = np.random.default_rng(1)
    sampler = emcee.EnsembleSampler(40, 4, log_posterior(fit.lookout.seen), vectorize=True)
    sampler.random_state = np.random.RandomState(2).get_state()
    # A hundred times the longest autocorrelation time seen, 124 steps: at a fifth of it the chain's own tail quantiles
    # are off by 0.4 standard deviations.
    sampler.run_mcmc(start + 0.003 * rng.standard_normal((40, 4)), 12_000)
    return np.asarray(sampler.get_chain(discard=2000, flat=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", every(12, CURVES, pytest.mark.full))
def test_a_sampler_finds_the_same(name: str) -> None:
    fit = fit_curve(CURVES[name])
    assert fit.law is not None and fit.lookout is not None
    chain = sampled(fit)
    drawn = fit.law.draw(20_000, np.random.default_rng(3))
    ours = np.stack([drawn.R0, drawn.A, np.log(drawn.B), np.log(drawn.C_mid / fit.lookout.end)], axis=1)
    for at in (0.025, 0.5, 0.975):
        off = (np.quantile(ours, at, axis=0) - np.quantile(chain, at, axis=0)) / chain.std(0)
        assert (np.abs(off) < 0.25).all(), (at, off)
    # And so do the intervals, which are read off the cells and not off draws.
    low, high = fit.law.asymptote_interval()
    if high < 1:
        assert np.abs(np.quantile(chain[:, 1], [0.025, 0.975]) - [low, high]).max() < 0.25 * chain[:, 1].std()


def test_what_is_fixed_stays_fixed() -> None:
    data = curve(seeds=1, rng=1)
    fixed = fit_curve(data, FitOptions(r0=0.3, asymptote=0.61))
    assert fixed.draws is not None and fixed.law is not None
    assert np.abs(fixed.draws.R0 - 0.3).max() < 1e-3 and np.abs(fixed.draws.A - 0.61).max() < 1e-3
    assert (fixed.A.low, fixed.A.high) == (0.61, 0.61)
    loose = fit_curve(data)
    assert fixed.B.low is not None and loose.B.low is not None and fixed.B.high and loose.B.high
    assert fixed.B.high - fixed.B.low < loose.B.high - loose.B.low, "less is unknown"


@pytest.mark.parametrize("family", ["logistic", "exponential", "power_law", "sigmoid_zero"])
def test_another_familys_interval_holds_its_estimate(family: str) -> None:
    data: Curve = curve(seeds=2, rng=2)
    fit = fit_curve(data, FitOptions(family=family))
    assert fit.law is not None and fit.A.value is not None
    low, high = fit.law.asymptote_interval()
    assert low <= fit.law.best.a <= high and high - low < 1
    for name, interval in fit.shape.items():
        assert interval.value is not None, name
        assert interval.low is None or interval.low <= interval.value
        assert interval.high is None or interval.high >= interval.value
