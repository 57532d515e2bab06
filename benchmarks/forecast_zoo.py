"""Test forecasts on many kinds of curves, inside and outside of the fitted family.

Each true curve is a mean reward over compute, with the window [0, 1]. The observed evaluations have binomial noise from
a given number of prompts, and the policy wanders about the mean (an Ornstein-Uhlenbeck process in compute). There are
one or more seeds. Forecasts at 1.25 and 2 times the window are compared with the truth and with a baseline without a
model: the last observed value.

    python -m benchmarks.forecast_zoo [--repeats 200] [--out docs/measured/forecast_zoo.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Array, Curve, make_curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.predict import can_forecast, predict
from sweeps.parallel import cores, parallel_map

AHEAD = (1.25, 2.0)
Mean = Callable[[Array], Array]


def sigmoid(r0: float, a: float, c_mid: float, b: float) -> Mean:
    """Return a curve of the fitted family (arXiv 2510.13786, eq. 1)."""

    def at(compute: Array) -> Array:
        with np.errstate(divide="ignore"):
            value: Array = r0 + (a - r0) / (1 + (c_mid / compute) ** b)
        return value

    return at


def exponential(r0: float, a: float, scale: float) -> Mean:
    """Return a curve that approaches its ceiling at a constant rate."""
    return lambda c: a - (a - r0) * np.exp(-c / scale)


def weibull(r0: float, a: float, scale: float, shape: float) -> Mean:
    """Return a curve that approaches its ceiling at an increasing or decreasing rate."""
    return lambda c: a - (a - r0) * np.exp(-((c / scale) ** shape))


def frechet(r0: float, a: float, scale: float, shape: float) -> Mean:
    """Return a curve with a slow start and a power-law tail."""

    def at(compute: Array) -> Array:
        with np.errstate(divide="ignore"):
            value: Array = r0 + (a - r0) * np.exp(-((scale / compute) ** shape))
        return value

    return at


def power_law(r0: float, a: float, scale: float, shape: float) -> Mean:
    """Return a curve that does not bend on a logarithmic axis until the very end."""
    return lambda c: a - (a - r0) * (1 + c / scale) ** -shape


def plus(*parts: Mean) -> Mean:
    """Return the sum of curves."""
    return lambda c: np.sum([part(c) for part in parts], axis=0)


def line(slope: float, start: float = 0.0) -> Mean:
    """Return a straight rise that begins at `start`."""
    return lambda c: slope * np.maximum(c - start, 0.0)


def step(height: float, at: float, width: float = 0.03) -> Mean:
    """Return a rise or fall by `height` around one compute."""
    return lambda c: height / (1 + np.exp(-(c - at) / width))


def dip(depth: float, at: float, width: float) -> Mean:
    """Return a fall and its recovery."""
    return lambda c: -depth * np.exp(-0.5 * ((c - at) / width) ** 2)


@dataclass(frozen=True)
class Truth:
    """A kind of true curve, and how it is observed.

    Attributes:
        name: label in the table.
        mean: mean reward as a function of compute.
        asymptote: ceiling; None if there is none.
        inside: whether the curve belongs to the fitted family.
        foretold: whether the window shows the later curve. It does not show a break after the window.
        points, seeds, prompts: evaluations per seed, number of seeds, prompts per evaluation.
        wander: standard deviation of the policy about the mean.
        memory: correlation length of that process, in compute.
        bad_seed: one seed falls back to the initial reward in the middle of the window.
    """

    name: str
    mean: Mean
    asymptote: float | None = None
    inside: bool = False
    foretold: bool = True
    points: int = 30
    seeds: int = 1
    prompts: int = 250
    wander: float = 0.01
    memory: float = 0.05
    bad_seed: bool = False


_BASE = sigmoid(0.2, 0.7, 0.2, 1.5)
_inside = partial(Truth, inside=True)
ZOO: tuple[Truth, ...] = (
    _inside("plateau seen", sigmoid(0.2, 0.7, 0.1, 2.0), 0.7),
    _inside("window at 5 C_mid", _BASE, 0.7),
    _inside("window at 2 C_mid", sigmoid(0.2, 0.7, 0.5, 1.5), 0.7),
    _inside("window at 1 C_mid", sigmoid(0.2, 0.7, 1.0, 1.5), 0.7),
    _inside("steep, B = 4", sigmoid(0.2, 0.7, 0.3, 4.0), 0.7),
    _inside("shallow, B = 0.8", sigmoid(0.2, 0.7, 0.2, 0.8), 0.7),
    _inside("ceiling at 1", sigmoid(0.3, 1.0, 0.15, 2.0), 1.0),
    _inside("8 points", _BASE, 0.7, points=8),
    _inside("80 points", _BASE, 0.7, points=80),
    _inside("64 prompts", _BASE, 0.7, prompts=64),
    _inside("500 prompts, quiet", _BASE, 0.7, prompts=500, wander=0.0),
    _inside("wanders for long", _BASE, 0.7, wander=0.03, memory=0.65),
    _inside("wanders for long, half as far", _BASE, 0.7, wander=0.015, memory=0.65),
    _inside("5 seeds", _BASE, 0.7, seeds=5),
    _inside("3 seeds, one bad", _BASE, 0.7, seeds=3, bad_seed=True),
    Truth("exponential", exponential(0.2, 0.7, 0.3), 0.7),
    Truth("Weibull, slowing", weibull(0.2, 0.7, 0.3, 0.6), 0.7),
    Truth("Frechet", frechet(0.2, 0.7, 0.15, 1.0), 0.7),
    Truth("power law", power_law(0.2, 0.8, 0.1, 0.5), 0.8),
    Truth("delayed start", lambda c: exponential(0.2, 0.7, 0.2)(np.maximum(c - 0.25, 0.0)), 0.7),
    Truth("sigmoid and a slow drift", plus(_BASE, line(0.06))),
    Truth("straight, no ceiling", plus(lambda c: 0.2 + 0 * c, line(0.2))),
    Truth("logarithmic, no ceiling", lambda c: 0.2 + 0.1 * np.log1p(c / 0.02)),
    Truth("late rise", plus(sigmoid(0.2, 0.4, 0.1, 2.0), step(0.4, 1.0, 0.05)), foretold=False),
    Truth("two steps", plus(lambda c: 0.2 + 0 * c, step(0.2, 0.2), step(0.2, 0.6)), 0.6),
    Truth("dip and recovery", plus(_BASE, dip(0.15, 0.55, 0.06)), 0.7),
    Truth("collapse at 92% of the window", plus(_BASE, step(-0.35, 0.92, 0.01))),
    Truth("collapse after the window", plus(_BASE, step(-0.35, 1.1, 0.01)), foretold=False),
    Truth("flat", lambda c: 0.4 + 0 * c),
    Truth("falling", plus(lambda c: 0.6 + 0 * c, line(-0.15))),
)


def seen(truth: Truth, source: np.random.Generator) -> Curve:
    """Simulate the evaluations of one study."""
    compute = np.linspace(0.0, 1.0, truth.points)
    rates, labels = [], []
    for seed in range(truth.seeds):
        gaps = np.diff(compute, prepend=compute[0])
        state, path = 0.0, []
        for gap in gaps:
            decay = np.exp(-gap / truth.memory)
            state = decay * state + np.sqrt(1 - decay**2 if gap else 1.0) * source.standard_normal()
            path.append(state)
        mean = truth.mean(compute)
        if truth.bad_seed and seed == 0:
            mean = np.where(compute > 0.5, truth.mean(np.zeros(1))[0], mean)
        policy = np.clip(mean + truth.wander * np.array(path), 0.001, 0.999)
        rates.append(source.binomial(truth.prompts, policy) / truth.prompts)
        labels += [str(seed)] * truth.points
    reward = np.concatenate(rates)
    smoothed = (reward * truth.prompts + 1) / (truth.prompts + 2)
    error = np.sqrt(smoothed * (1 - smoothed) / truth.prompts)
    return make_curve("run", np.tile(compute, truth.seeds), reward, labels, error)


@dataclass(frozen=True)
class Outcome:
    """Result of one study.

    held, error and error_of_last have shape (2,), for 1.25 and 2 windows. They are NaN where there is no forecast.
    """

    verdict: str
    held: Array
    error: Array
    error_of_last: Array
    named: bool
    A_held: bool
    flat_on_a_trend: bool


def study(which: tuple[int, int]) -> Outcome:
    """Simulate, fit and forecast one study; `which` is (index of the true curve in ZOO, number of the study)."""
    truth = ZOO[which[0]]
    curve = seen(truth, np.random.default_rng(which))
    fit = fit_curve(curve)
    future = truth.mean(np.array(AHEAD))
    last = float(np.mean([curve.reward[curve.seed == seed][-1] for seed in np.unique(curve.seed)]))
    if not can_forecast(fit):
        held, error = np.full(2, np.nan), np.full(2, np.nan)
    else:
        band = predict(fit, np.array(AHEAD))
        held = ((band.low <= future) & (future <= band.high)).astype(float)
        error = np.abs(band.value - future)
    named = fit.verdict == "identifiable"
    low, high = fit.A.low, fit.A.high
    covered = truth.asymptote is not None and (low is None or low <= truth.asymptote)
    covered = covered and (high is None or (truth.asymptote or 0.0) <= high)
    return Outcome(
        fit.verdict, held, error, np.abs(last - future), named, covered, fit.verdict == "flat" and _z(curve) > 5
    )


def _z(curve: Curve) -> float:
    """Return |z| of a linear trend over the window, from sampling errors only."""
    x = curve.compute - curve.compute.mean()
    error = np.ones(len(x)) if curve.sd is None else curve.sd
    return float(abs(x @ curve.reward) / np.sqrt((x**2) @ error**2))


def row(truth: Truth, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    held = np.nanmean([outcome.held for outcome in outcomes], axis=0)
    error = np.nanmean([outcome.error for outcome in outcomes], axis=0)
    last = np.nanmean([outcome.error_of_last for outcome in outcomes], axis=0)
    verdicts = [outcome.verdict for outcome in outcomes]
    commonest = max(set(verdicts), key=verdicts.count)
    named = [outcome for outcome in outcomes if outcome.named]
    asymptote_coverage = (
        f"{np.mean([outcome.A_held for outcome in named]):.2f}" if named and truth.asymptote is not None else "-"
    )
    if named and truth.asymptote is None:
        asymptote_coverage = "there is none"
    cells = [
        truth.name + ("" if truth.foretold else " *"),
        f"{held[0]:.2f}, {held[1]:.2f}",
        f"{error[0]:.3f}, {error[1]:.3f}",
        f"{last[0]:.3f}, {last[1]:.3f}",
        f"{commonest} ({verdicts.count(commonest) / len(verdicts):.0%})",
        f"{len(named) / len(outcomes):.0%}",
        asymptote_coverage,
        f"{sum(outcome.flat_on_a_trend for outcome in outcomes)}",
    ]
    return f"| {' | '.join(cells)} |"


def set_up(repeats: int) -> list[str]:
    """Return the text that explains the table."""
    inside = sum(truth.inside for truth in ZOO)
    return wrapped(
        f"There are {repeats} studies per row. A study has one seed with 30 evaluations of 250 prompts, unless the "
        "row's name says otherwise. The *window* is the compute from 0 to the last of these evaluations. Each cell "
        "with two numbers has the result at 1.25 times the window, then the result at 2 times the window.",
        "",
        f"- The first {inside} rows are sigmoids, the others are not.",
        "- A star (*) marks changes that begin after the window.",
        "- *Wanders for long*: the policy drifts slowly around its mean curve. *Quiet*: it does not drift.",
        "- **intervals contain the truth**: share of the forecasts' 95% intervals that contain the true reward. With "
        f"{repeats} studies a true share of 0.95 is measured with a standard error of "
        f"{np.sqrt(0.95 * 0.05 / repeats):.2f}.",
        "- **error**, **last value's error**: mean absolute error of the forecast, and of the last evaluation in the "
        "window used as a forecast.",
        "- **verdict**: the most common verdict, with its share of the studies.",
        "- **A named**: share of the studies with the verdict `identifiable`, so that A is reported as the ceiling.",
        "- **A in its interval**: of the studies with a named A, the share whose interval contains the asymptote.",
        "- **`flat` on a trend**: number of studies that are called `flat` although they clearly rise or fall.",
        "",
    )


def main() -> None:
    """Print the table, and write it with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        *set_up(options.repeats),
        "| true curve | intervals contain the truth | error | last value's error | verdict | A named | A in its "
        "interval | `flat` on a trend |",
        "|---|---|---|---|---|---|---|---|",
    ]
    studies = [(place, number) for place in range(len(ZOO)) for number in range(options.repeats)]
    outcomes = parallel_map(study, studies, cores())
    for place, truth in enumerate(ZOO):
        lines.append(row(truth, outcomes[place * options.repeats : (place + 1) * options.repeats]))
    print("\n".join(lines))
    if options.out:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
