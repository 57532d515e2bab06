"""Repeat fits at growing compute, and check every forecast against the evaluations that followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit.constants import MIN_COMPUTES
from sweeps.fit.fit import Fit, FitOptions, Interval, fit_curve
from sweeps.fit.predict import predict, predict_mean, readable

# Factor by which compute grows between snapshots; also the distance between two that must confirm each other.
GROWTH = 1.15
# A check uses the evaluations of the last tenth of compute; a forecast reaches half as far again as its fit.
RECENT = 1.1
REACH = 1.5


@dataclass(frozen=True)
class Check(AsJson):
    """A forecast by the fit up to compute `made_at` (95%), and the actual mean of `evaluations`."""

    made_at: float
    evaluations: int
    actual: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Return whether the actual mean lies within the predicted interval."""
        return self.low <= self.actual <= self.high

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON, including `inside`."""
        return {**super().to_json(), "inside": self.inside}

    @property
    def side(self) -> int:
        """1 if the outcome is above the interval, -1 if below, else 0."""
        return int(self.actual > self.high) - int(self.actual < self.low)


@dataclass(frozen=True)
class Snapshot(AsJson):
    """One recipe's fit up to `compute_end`, with `n` evaluations up to there, over all seeds.

    ahead: a later compute, and the predicted reward of one evaluation there (95%). ahead and check are None where the
    fit cannot be used for forecasts.
    """

    recipe: str
    compute_end: float
    n: int
    verdict: str
    A: Interval
    ahead: tuple[float, Interval] | None = None
    check: Check | None = None

    JSON: ClassVar = {"compute_end": "compute", "ahead": "next"}

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as a line of `fits.jsonl` stores it, with the forecast under `next`."""
        ahead = None if self.ahead is None else {"compute": self.ahead[0], **self.ahead[1].to_json()}
        return {**super().to_json(), "next": ahead}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Snapshot:
        """Read a snapshot from a line of `fits.jsonl`.

        Raises:
            KeyError, TypeError, ValueError: the entry is not a snapshot.
        """
        ahead, check = entry["next"], entry["check"]
        return Snapshot(
            recipe=str(entry["recipe"]),
            compute_end=float(entry["compute"]),
            n=int(entry["n"]),
            verdict=str(entry["verdict"]),
            A=_interval(entry["A"]),
            ahead=None if ahead is None else (float(ahead["compute"]), _interval(ahead)),
            check=None
            if check is None
            else Check(
                float(check["made_at"]),
                int(check["evaluations"]),
                *(float(check[key]) for key in ("actual", "predicted", "low", "high")),
            ),
        )


def _interval(entry: Mapping[str, Any]) -> Interval:
    return Interval(*(None if entry[key] is None else float(entry[key]) for key in ("value", "low", "high")))


def history(
    curve: Curve,
    options: FitOptions | None = None,
    every: float = GROWTH,
    known: Sequence[Snapshot] = (),
) -> list[Snapshot]:
    """Repeat the fit at growing compute up to the curve's end; return only new snapshots.

    Args:
        curve: evaluations of one recipe so far.
        options: options of every fit; `max_compute` ends the history.
        every: smallest factor by which compute grows between snapshots, except for the last (a dozen snapshots for 40
            evenly spaced evaluations, 5 more for each doubling); 1 for a snapshot after every evaluation.
        known: earlier snapshots, the oldest first. The last one's compute is fitted again if all new evaluations are
            below it (a seed that lags behind).

    Raises:
        UserError: `every` is below 1, or as for `fit_curve`.
    """
    return list(_history(curve, options or FitOptions(), every, known))


def _history(curve: Curve, options: FitOptions, every: float, known: Sequence[Snapshot]) -> Iterator[Snapshot]:
    """Yield snapshots one by one, so that a caller can write each before the next is computed."""
    if not every >= 1:
        raise UserError(f"every {every:g}: compute cannot shrink between snapshots; give a factor of 1 or more")
    fits = _Fits(curve, options)
    for end in _ends(fits.computes, curve, every, known):
        yield fits.snapshot(end)


def _ends(computes: list[float], curve: Curve, every: float, known: Sequence[Snapshot]) -> list[float]:
    """Choose the computes of new snapshots from earlier data only, so that more data does not move earlier ones."""
    if not computes:
        return []
    last = known[-1].compute_end if known else 0.0
    ends: list[float] = []
    for at, compute in enumerate(computes):
        # With fewer computes than `MIN_COMPUTES` every fit is refused (`too_few_points`).
        if compute > last and (at + 1 >= MIN_COMPUTES or known) and compute >= every * last:
            ends.append(compute)
            last = compute
    end = computes[-1]
    lagging = not ends and end == last and int((curve.compute <= end).sum()) > known[-1].n
    if end > last or lagging or not (ends or known):
        ends.append(end)
    return ends


class _Fits:
    """Fits of one curve up to any compute; each is computed once."""

    def __init__(self, curve: Curve, options: FitOptions) -> None:
        within = (curve.compute > 0) & options.inside(curve.compute)
        self.computes: list[float] = np.unique(curve.compute[within]).tolist()
        self._curve, self._options = curve, options
        self._fits: dict[float, Fit] = {}

    def up_to(self, end: float) -> Fit:
        if end not in self._fits:
            self._fits[end] = fit_curve(self._curve, replace(self._options, max_compute=end))
        return self._fits[end]

    def snapshot(self, end: float) -> Snapshot:
        fit = self.up_to(end)
        ahead = None
        if _names_a_curve(fit):
            band = predict(fit, [REACH * end], observations=1)
            ahead = REACH * end, band.interval()
        n = int((self._curve.compute <= end).sum())
        return Snapshot(
            recipe=fit.recipe, compute_end=end, n=n, verdict=fit.verdict, A=fit.A, ahead=ahead, check=self._check(end)
        )

    def _check(self, end: float) -> Check | None:
        """Compare the latest evaluations with a forecast from a fit that has not seen them; None without such a fit."""
        earlier = [compute for compute in self.computes if compute <= end / RECENT]
        if not earlier:
            return None
        # If evaluations are sparse, use the latest earlier one, although its forecast has to reach further.
        made_at = next((compute for compute in earlier if compute >= end / REACH), earlier[-1])
        fit = self.up_to(made_at)
        if not _names_a_curve(fit):
            return None
        latest = (self._curve.compute > end / RECENT) & (self._curve.compute <= end)
        value, low, high = predict_mean(fit, self._curve.compute[latest])
        # Where some seeds have ended, the mean of the others differs from the mean of all by the spread between seeds.
        seeds_before = len(np.unique(self._curve.seed[self._curve.compute <= made_at]))
        seeds_now = len(np.unique(self._curve.seed[latest]))
        if seeds_now < seeds_before:
            reach = fit.seed_spread.quantile() * fit.seed_spread.sd * np.sqrt(1 / seeds_now - 1 / seeds_before)
            low, high = value - float(np.hypot(value - low, reach)), value + float(np.hypot(high - value, reach))
        return Check(made_at, int(latest.sum()), float(self._curve.reward[latest].mean()), value, low, high)


def _names_a_curve(fit: Fit) -> bool:
    """Return whether a fit's forecasts can be checked: readable, and not flat, falling or short of points."""
    return readable(fit) and fit.verdict not in ("flat", "decreasing", "too_few_points", "degenerate")


def departure(snapshots: Sequence[Snapshot]) -> str | None:
    """Return a warning if the latest evaluations are outside of the intervals that earlier fits predicted, else None.

    Two snapshots in a row that differ by `GROWTH` in compute must be outside, on the same side;
    docs/measured/watch.md has the rates of false alarms and misses.

    Args:
        snapshots: all snapshots of one recipe, the oldest first.
    """
    if not snapshots or snapshots[-1].check is None:
        return None
    last, check = snapshots[-1], snapshots[-1].check
    since = last
    for snapshot in reversed(snapshots):
        if snapshot.check is None or snapshot.check.side != check.side or not check.side:
            break
        since = snapshot
    if since.compute_end * GROWTH > last.compute_end * (1 + 1e-9):
        return None
    where, remedy = (
        ("above", "the law of its beginning no longer holds; fit the later part with --min-compute")
        if check.side > 0
        else ("below", "look at the run's health (entropy, truncation, KL)")
    )
    return (
        f"reward lies {where} its forecast since compute {since.compute_end:.4g}: {check.actual:.3f} at "
        f"{last.compute_end:.4g}, where the fit up to {check.made_at:.4g} gave {check.predicted:.3f} "
        f"[{check.low:.3f}, {check.high:.3f}]; {remedy}"
    )
