"""Repeat fits at growing compute, and check every forecast against the evaluations that followed it."""

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
from sweeps.fit.pooling import Pool
from sweeps.fit.predict import can_forecast, predict, predict_mean

# Factor by which compute grows between snapshots; also the factor between two snapshots that confirm a departure from
# the forecast.
GROWTH = 1.15
# A check uses evaluations above compute / RECENT, the last tenth. A fit is used to forecast up to REACH times its
# compute.
RECENT = 1.1
REACH = 1.5


@dataclass(frozen=True)
class Check(AsJson):
    """Comparison of a forecast with the mean of later evaluations.

    Attributes:
        made_at: compute up to which the forecasting fit used evaluations.
        evaluations: number of evaluations in the mean.
        actual: mean of these evaluations.
        predicted, low, high: forecast of the mean, with its 95% interval.
    """

    made_at: float
    evaluations: int
    actual: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """True if the actual mean is within the predicted interval."""
        return self.low <= self.actual <= self.high

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON, including `inside`."""
        return {**super().to_json(), "inside": self.inside}

    @property
    def side(self) -> int:
        """1 if the actual mean is above the interval, -1 if it is below, else 0."""
        return int(self.actual > self.high) - int(self.actual < self.low)


@dataclass(frozen=True)
class Snapshot(AsJson):
    """Results of one recipe's fit to its evaluations up to a compute.

    Attributes:
        compute_end, n: compute up to which evaluations were fitted, and their number over all seeds.
        verdict, A: results of the fit.
        forecast: a later compute, and the predicted reward of one evaluation there, with a 95% interval; None where the
            fit cannot be used for forecasts.
        check: comparison of an earlier forecast with the latest evaluations; None without such a forecast.
    """

    recipe: str
    compute_end: float
    n: int
    verdict: str
    A: Interval
    forecast: tuple[float, Interval] | None = None
    check: Check | None = None

    JSON: ClassVar = {"compute_end": "compute", "forecast": "next"}

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as it is stored in a line of `fits.jsonl`, with the forecast under `next`."""
        forecast = None if self.forecast is None else {"compute": self.forecast[0], **self.forecast[1].to_json()}
        return {**super().to_json(), "next": forecast}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Snapshot:
        """Create a snapshot from a parsed line of `fits.jsonl`.

        Raises:
            KeyError, TypeError, ValueError: the entry is not a snapshot.
        """
        forecast, check = entry["next"], entry["check"]
        return Snapshot(
            recipe=str(entry["recipe"]),
            compute_end=float(entry["compute"]),
            n=int(entry["n"]),
            verdict=str(entry["verdict"]),
            A=_interval(entry["A"]),
            forecast=None if forecast is None else (float(forecast["compute"]), _interval(forecast)),
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
    earlier: Sequence[Snapshot] = (),
    pool: Pool | None = None,
) -> list[Snapshot]:
    """Repeat the fit at growing compute, up to the end of the curve. Return only the new snapshots.

    Args:
        curve: evaluations of one recipe so far.
        options: options of every fit; no snapshot is taken beyond `max_compute`.
        every: smallest factor by which compute grows between snapshots, except for the last; 1 for a snapshot after
            every evaluation. With the default, 40 evenly spaced evaluations give a dozen snapshots, and 80 give 5 more.
        earlier: earlier snapshots, the oldest first. If all new evaluations are at a lower compute than the last
            snapshot, because their seed lags behind, a snapshot at the last compute is taken again.
        pool: `Fit.pool` of the recipe's fit, so that the last snapshot equals this fit; None for no pooling.

    Raises:
        UserError: `every` is below 1; also as for `fit_curve`.
    """
    return list(iter_snapshots(curve, options or FitOptions(), every, earlier, pool))


def iter_snapshots(
    curve: Curve, options: FitOptions, every: float, earlier: Sequence[Snapshot], pool: Pool | None = None
) -> Iterator[Snapshot]:
    """Yield the snapshots of `history` one by one, so that a caller can write each before the next is computed."""
    if not every >= 1:
        raise UserError(f"every {every:g}: compute cannot shrink between snapshots; give a factor of 1 or more")
    fits = _FitCache(curve, options, pool)
    for end in _snapshot_computes(fits.computes, curve, every, earlier):
        yield fits.snapshot(end)


def _snapshot_computes(computes: list[float], curve: Curve, every: float, earlier: Sequence[Snapshot]) -> list[float]:
    """Choose the computes of new snapshots. Later evaluations do not change which computes were chosen earlier."""
    if not computes:
        return []
    last = earlier[-1].compute_end if earlier else 0.0
    ends: list[float] = []
    for number, compute in enumerate(computes):
        # A fit needs points at `MIN_COMPUTES` different computes; with fewer it is refused (`too_few_points`).
        if compute > last and (number + 1 >= MIN_COMPUTES or earlier) and compute >= every * last:
            ends.append(compute)
            last = compute
    end = computes[-1]
    lagging = not ends and end == last and int((curve.compute <= end).sum()) > earlier[-1].n
    if end > last or lagging or not (ends or earlier):
        ends.append(end)
    return ends


class _FitCache:
    """Fits of one curve's evaluations up to any compute, each computed once.

    Attributes:
        computes: distinct computes of the curve's evaluations within the options' limits, ascending.
    """

    def __init__(self, curve: Curve, options: FitOptions, pool: Pool | None) -> None:
        in_window = (curve.compute > 0) & options.inside(curve.compute)
        self.computes: list[float] = np.unique(curve.compute[in_window]).tolist()
        self._curve, self._options, self._pool = curve, options, pool
        self._fits: dict[float, Fit] = {}

    def fit_up_to(self, end: float) -> Fit:
        if end not in self._fits:
            self._fits[end] = fit_curve(self._curve, replace(self._options, max_compute=end), pool=self._pool)
        return self._fits[end]

    def snapshot(self, end: float) -> Snapshot:
        fit = self.fit_up_to(end)
        forecast = None
        if _can_forecast(fit):
            band = predict(fit, [REACH * end], observations=1)
            forecast = REACH * end, band.interval()
        n = int((self._curve.compute <= end).sum())
        return Snapshot(
            recipe=fit.recipe,
            compute_end=end,
            n=n,
            verdict=fit.verdict,
            A=fit.A,
            forecast=forecast,
            check=self._check(end),
        )

    def _check(self, end: float) -> Check | None:
        """Compare the latest evaluations with a forecast from a fit without them; None if no fit can forecast."""
        earlier = [compute for compute in self.computes if compute <= end / RECENT]
        if not earlier:
            return None
        # Sparse evaluations: forecast from the latest earlier compute, although it is further away.
        made_at = next((compute for compute in earlier if compute >= end / REACH), earlier[-1])
        fit = self.fit_up_to(made_at)
        if not _can_forecast(fit):
            return None
        latest = (self._curve.compute > end / RECENT) & (self._curve.compute <= end)
        value, low, high = predict_mean(fit, self._curve.compute[latest])
        # Seeds that have ended shift the mean of the remaining seeds by the spread between seeds: widen the interval.
        seeds_before = len(np.unique(self._curve.seed[self._curve.compute <= made_at]))
        seeds_now = len(np.unique(self._curve.seed[latest]))
        if seeds_now < seeds_before:
            reach = fit.seed_spread.quantile() * fit.seed_spread.sd * np.sqrt(1 / seeds_now - 1 / seeds_before)
            low, high = value - float(np.hypot(value - low, reach)), value + float(np.hypot(high - value, reach))
        return Check(made_at, int(latest.sum()), float(self._curve.reward[latest].mean()), value, low, high)


def _can_forecast(fit: Fit) -> bool:
    """Return whether a fit can forecast and the reward rises, so that its forecasts can be checked."""
    return can_forecast(fit) and fit.verdict not in ("flat", "decreasing", "too_few_points", "degenerate")


def departure(snapshots: Sequence[Snapshot]) -> str | None:
    """Return a warning if the latest evaluations are outside the intervals that earlier fits predicted, else None.

    The checks of all snapshots over the last factor `GROWTH` of compute must be outside their intervals, all on the
    same side. docs/measured/watch.md has the rates of false alarms and misses.

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
        ("above", "the law of its early part no longer holds; fit the later part with --min-compute")
        if check.side > 0
        else ("below", "look at the run's health (entropy, truncation, KL)")
    )
    return (
        f"reward has been {where} its forecast since compute {since.compute_end:.4g}: {check.actual:.3f} at "
        f"{last.compute_end:.4g}, where the fit up to {check.made_at:.4g} predicted {check.predicted:.3f} "
        f"[{check.low:.3f}, {check.high:.3f}]; {remedy}"
    )
