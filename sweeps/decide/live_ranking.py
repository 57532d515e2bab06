"""The ranking of a study that is watched, made in a thread of its own, so that a screen waits for no fit."""

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

# Seconds between two rankings, and how many times as long as one took: the fits take a share of one core.
LEAST_S, SHARE = 5.0, 2.0
_NICE = 10  # members may train on this machine


class LiveRanking(Thread):
    """Thread that refits the recipes with new evaluations, ranks all, and follows each curve as `decide.watch` does.

    Args:
        options: options of every fit.
        path: file for snapshots, see `sweeps.decide.watch`; None for none.
        margin: recipes whose A lies within this are tied; None for the default.

    Attributes:
        ranking: the newest ranking; None before the first.
        ranked_s: when it was made, by `time.monotonic`.
        evaluations: number of evaluations that it rests on.
        departed: warnings of the recipes that have departed from their forecasts.
        trouble: why there is no ranking yet, or no further one; "" if there is none.
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
        self.departed: dict[str, str] = {}
        self.trouble = ""

    def give(self, curves: Sequence[Curve]) -> None:
        """Give the newest curves, to be ranked next; the same list again changes nothing."""
        if curves and curves is not self._curves:
            self._curves = curves
            self._new.set()

    def run(self) -> None:
        """Rank the newest curves, then follow them until there are others, for ever."""
        # Imported here: the screen appears before what fits has been imported.
        from sweeps.decide.watch import Watch
        from sweeps.source import LoadedStudy

        os.nice(_NICE)  # on Linux of this thread alone
        watch = Watch(LoadedStudy, (), self._options, self._path)
        while self._new.wait():
            self._new.clear()
            curves, begin = self._curves, time.monotonic()
            again = begin + LEAST_S
            try:
                self.rank(curves)
                again = max(again, time.monotonic() + SHARE * (time.monotonic() - begin))
                for curve in curves:
                    if self._new.is_set() and time.monotonic() > again:
                        break
                    for news in watch.follow(curve):
                        self.departed = {**self.departed, curve.recipe: news.warning or ""}
            except UserError as error:
                self.trouble = str(error)
            except Exception as error:  # the screen goes on, and says so
                self.trouble = f"the curves cannot be ranked: {type(error).__name__}: {error}"
            time.sleep(max(0.0, again - time.monotonic()))

    def rank(self, curves: Sequence[Curve]) -> None:
        """Fit the recipes that have new evaluations, and rank all."""
        from sweeps.decide.rank import rank
        from sweeps.fit.fit import fit_curve, with_shared

        for curve in curves:
            arrays = (curve.compute, curve.reward, curve.seed, curve.sd, curve.at_peak)
            content = [curve.range, *(None if array is None else array.tobytes() for array in arrays)]
            if curve.recipe not in self._fits or self._fits[curve.recipe][0] != content:
                self._fits[curve.recipe] = content, fit_curve(curve, self._options)
        fits = with_shared([self._fits[curve.recipe][1] for curve in curves], curves)
        self.ranking = rank(fits, margin=self._margin, brief=True)
        self.ranked_s, self.trouble = time.monotonic(), ""
        self.evaluations = sum(len(curve.compute) for curve in curves)
