"""Signal to noise of each evaluation set, which shows on which set recipes are separated best.

The definitions follow "Signal and Noise" (Heineman et al. 2025, arXiv 2508.13144), for one set:

    signal = max over recipes j, k of |m_j - m_k| / m        relative dispersion
    noise  = sqrt(mean over runs of s_r^2) / m               relative standard deviation
    ratio  = signal / noise

m_j is the mean score of recipe j over the last n evaluations of its runs. m is the mean of all m_j. s_r is the standard
deviation of run r over its last n evaluations (divisor n - 1). n is 5, as in the authors' comparison of small models.
The authors take the noise of one model, or of all models' scores together. Here the noise is pooled within runs, so
that differences between recipes do not count as noise.

By this definition, a reward that still rises over the last n evaluations adds noise. So the ratio is also computed with
s_r about a straight line through these n evaluations (divisor n - 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.decide.set_scores import set_scores

# The n of the definitions above: how many of a run's last evaluations count.
LAST = 5
# Runs with fewer evaluations do not count towards the noise.
_MIN_EVALUATIONS = 3


@dataclass(frozen=True)
class SetSignal(AsJson):
    """Signal and noise of one evaluation set.

    Attributes:
        set, metric: name of the set, and of its metric.
        mean: mean score over recipes.
        signal: relative dispersion between recipes; None where the mean is 0.
        noise: relative standard deviation within runs; None where the mean is 0 or no run has three evaluations.
        ratio: signal to noise; None where either is unknown or the noise is 0.
        ratio_without_rise: signal to noise, with noise measured about a straight line through a run's last scores; None
            where unknown.
    """

    set: str
    metric: str
    mean: float
    signal: float | None
    noise: float | None
    ratio: float | None
    ratio_without_rise: float | None


@dataclass(frozen=True)
class Signal(AsJson):
    """Signal to noise of all evaluation sets, the set with the highest ratio first.

    Attributes:
        axis, compute: compute axis, and the largest compute that all runs have spent; later evaluations do not count.
        last: how many of a run's last evaluations count.
        best: the set to use; None if no ratio is known or none reaches 1.
        rows: one per set.
        notes: remarks on runs that were left out, or that end early.
        sentence: the outcome in words.
    """

    axis: str
    compute: float
    last: int
    best: str | None
    rows: tuple[SetSignal, ...]
    notes: tuple[str, ...]
    sentence: str


def signal_to_noise(curves: Sequence[Curve]) -> Signal | None:
    """Compute signal and noise of every evaluation set; None with fewer than two sets or two recipes.

    Args:
        curves: one per recipe and evaluation set, which is the factor `set`.
    """
    evaluations = set_scores(curves, together=True)
    if evaluations is None:
        return None
    compared = {name: recipes for name, recipes in evaluations.scores.items() if len(recipes) > 1}
    if len(compared) < 2:
        return None
    rows = [_row(name, evaluations.metrics[name], recipes) for name, recipes in compared.items()]
    rows.sort(key=lambda row: (-1.0 if row.ratio is None else row.ratio, row.set), reverse=True)
    first = rows[0]
    best = first.set if first.ratio is not None and first.ratio >= 1 else None
    return Signal(
        axis=evaluations.axis,
        compute=evaluations.compute,
        last=LAST,
        best=best,
        rows=tuple(rows),
        notes=evaluations.notes,
        sentence=_sentence(rows, best),
    )


def _row(name: str, metric: str, recipes: Mapping[str, Mapping[str, Array]]) -> SetSignal:
    last_scores = {recipe: [run[-LAST:] for run in runs.values()] for recipe, runs in recipes.items()}
    recipe_means = [float(np.mean([run.mean() for run in runs])) for runs in last_scores.values()]
    mean = float(np.mean(recipe_means))
    runs = [run for runs in last_scores.values() for run in runs if len(run) >= _MIN_EVALUATIONS]
    variances = [run.var(ddof=1) for run in runs]
    signal = (max(recipe_means) - min(recipe_means)) / abs(mean) if mean else None
    noise = float(np.sqrt(np.mean(variances))) / abs(mean) if mean and runs else None
    residual = (
        float(np.sqrt(np.mean([_variance_about_line(run) for run in runs]))) / abs(mean) if mean and runs else None
    )
    return SetSignal(
        set=name,
        metric=metric,
        mean=mean,
        signal=signal,
        noise=noise,
        ratio=_ratio(signal, noise),
        ratio_without_rise=_ratio(signal, residual),
    )


def _ratio(signal: float | None, noise: float | None) -> float | None:
    # The noise is about 1e-17, by rounding, where scores are equal or on a straight line.
    return signal / noise if signal is not None and noise is not None and noise > 1e-12 else None


def _variance_about_line(scores: Array) -> float:
    """Return the variance of evenly spaced scores (n,) about their least-squares line, with divisor n - 2."""
    position = np.arange(len(scores)) - (len(scores) - 1) / 2
    slope = float(position @ scores / (position @ position))
    return float(((scores - scores.mean() - slope * position) ** 2).sum() / (len(scores) - 2))


def _sentence(rows: Sequence[SetSignal], best: str | None) -> str:
    rows_with_ratio = [row for row in rows if row.ratio is not None]
    if not rows_with_ratio:
        return f"the sets' signal to noise is unknown: it needs runs with {_MIN_EVALUATIONS} evaluations that differ"
    ratios = ", ".join(f"{row.set} {row.ratio:.3g}" for row in rows_with_ratio)
    if best is None:
        text = f"no set separates the recipes: signal to noise is below 1 on each ({ratios})"
    else:
        text = f"use set {best} (--metric {rows_with_ratio[0].metric}): it separates the recipes best; "
        text += f"signal to noise: {ratios}"
    best_without_rise = max(rows, key=lambda row: row.ratio_without_rise or 0.0)
    if (
        best_without_rise.ratio_without_rise is not None
        and best_without_rise.ratio_without_rise >= 1
        and best_without_rise.set != best
    ):
        text += "; the rise of the curves counts as noise here; without it, "
        text += f"set {best_without_rise.set} leads with {best_without_rise.ratio_without_rise:.3g}"
    return text
