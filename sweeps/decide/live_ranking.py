"""Ranking of a running study in a background thread, so that the screen of `scalerl watch` does not wait for fits."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from sweeps.errors import UserError

if TYPE_CHECKING:
    from sweeps.curve import Curve
    from sweeps.decide.rank import Ranking
    from sweeps.fit.fit import Fit
    from sweeps.fit.points import FitOptions

# Limits on the CPU time of rankings. MIN_PAUSE_S: fewest seconds from the start of one ranking to the next.
# PAUSE_FACTOR: the pause after a ranking as a multiple of its duration.
MIN_PAUSE_S, PAUSE_FACTOR = 5.0, 2.0
_NICE = 10  # a low priority, because members of the study may be training on this machine


class LiveRanking(Thread):
    """Thread that refits and ranks a study's recipes, and checks earlier forecasts (`sweeps.decide.watch`).

    Args:
        options: options of every fit.
        path: file for snapshots, see `sweeps.decide.watch`; None for no file.
        margin: recipes whose A differ by less are tied; None for 0.02 of the reward's scale.

    Attributes:
        ranking: the newest ranking; None before the first.
        ranked_s: time of that ranking, by `time.monotonic`.
        evaluations: number of evaluations that the ranking is based on.
        departures: warnings, by recipe, that new rewards contradict the recipe's earlier forecast.
        trouble: error of the last attempt to rank; "" if it succeeded.
    """

    def __init__(self, options: FitOptions, path: Path | None, margin: float | None) -> None:
        super().__init__(name="live ranking", daemon=True)
        self._options, self._path, self._margin = options, path, margin
        self._fits: dict[str, tuple[object, Fit]] = {}
        self._curves: Sequence[Curve] = ()
        self._new = Event()
        self.ranking: Ranking | None = None
        self.ranked_s = 0.0
        self.evaluations = 0
        self.departures: dict[str, str] = {}
        self.last_error = ""

    def set_curves(self, curves: Sequence[Curve]) -> None:
        """Set the curves to rank next. Setting the same list again has no effect."""
        if curves and curves is not self._curves:
            self._curves = curves
            self._new.set()

    def run(self) -> None:
        """Rank the newest curves, then check their forecasts until newer curves are set. Never returns."""
        # Imported here, so that the screen appears before the slow imports.
        from sweeps.decide.watch import Watch
        from sweeps.source import LoadedStudy

        os.nice(_NICE)  # on Linux this affects only this thread
        watch = Watch(LoadedStudy, (), self._options, self._path)
        while self._new.wait():
            self._new.clear()
            curves, start_s = self._curves, time.monotonic()
            next_s = start_s + MIN_PAUSE_S
            try:
                self.rank(curves)
                next_s = max(next_s, time.monotonic() + PAUSE_FACTOR * (time.monotonic() - start_s))
                for curve in curves:
                    if self._new.is_set() and time.monotonic() > next_s:
                        break
                    for news in watch.follow(curve):
                        self.departures = {**self.departures, curve.recipe: news.warning or ""}
            except UserError as error:
                self.last_error = str(error)
            except Exception as error:  # the screen keeps running and shows the error
                self.last_error = f"the curves cannot be ranked: {type(error).__name__}: {error}"
            time.sleep(max(0.0, next_s - time.monotonic()))

    def rank(self, curves: Sequence[Curve]) -> None:
        """Refit the recipes that have new evaluations, and rank all recipes."""
        from sweeps.decide.rank import rank
        from sweeps.fit.fit import fit_curve, pool_over_recipes

        for curve in curves:
            arrays = (curve.compute, curve.reward, curve.seed, curve.sd, curve.at_peak)
            content = [curve.range, *(None if array is None else array.tobytes() for array in arrays)]
            if curve.recipe not in self._fits or self._fits[curve.recipe][0] != content:
                self._fits[curve.recipe] = content, fit_curve(curve, self._options)
        fits = pool_over_recipes([self._fits[curve.recipe][1] for curve in curves], curves)
        self.ranking = rank(fits, margin=self._margin, brief=True)
        self.ranked_s, self.last_error = time.monotonic(), ""
        self.evaluations = sum(len(curve.compute) for curve in curves)
