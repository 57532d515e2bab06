"""The ranking of a study that is watched, made in a process of its own, so that a screen waits for no fit.

The screen's process reads the sources and sends curves; `serve` refits those recipes that have new evaluations, ranks
all of them, and then follows each curve as `sweeps.decide.watch` does. What comes back are plain records: whoever shows
them need not import what fits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.errors import UserError

if TYPE_CHECKING:
    from sweeps.curve import Curve
    from sweeps.decide.rank import Ranking
    from sweeps.decide.watch import Watch
    from sweeps.fit.fit import Fit
    from sweeps.fit.points import FitOptions

# Seconds between two rankings, and how many times as long as one took: the fits take a share of one core.
LEAST_S, SHARE = 5.0, 2.0
_NICE = 10  # members may train on this machine


@dataclass(frozen=True)
class Place:
    """One recipe's place in a live ranking.

    Attributes:
        rank: its place, from 1; None where its A may not be named.
        p_best: probability that its asymptote is the highest of all; None if none was compared.
        A: asymptote with the bounds of its 95% interval; None each where not known.
        reward: reward at the compute that all recipes have spent; None where it cannot be read off.
    """

    recipe: str
    rank: int | None
    p_best: float | None
    A: tuple[float | None, float | None, float | None]
    reward: float | None
    verdict: str


@dataclass(frozen=True)
class Ranked:
    """Ranking of all recipes with an evaluation, the best first.

    Attributes:
        sentence: the outcome in words.
        compute: where the places' rewards are compared; None if nowhere.
        evaluations: number of evaluations that it rests on.
    """

    places: tuple[Place, ...]
    sentence: str
    compute: float | None
    evaluations: int


@dataclass(frozen=True)
class Departed:
    """A recipe's latest warning on departure from what was foretold; None where it is as foretold again."""

    recipe: str
    warning: str | None


@dataclass(frozen=True)
class Asks:
    """The request for curves that have not been sent: unasked for they would fill the pipe, and block the screen."""


@dataclass(frozen=True)
class Trouble:
    """A reason for which there is no ranking yet, or no further one."""

    text: str


def serve(connection: Connection, options: FitOptions, path: Path | None, margin: float | None) -> None:
    """Rank and follow the curves that come, until the other end of the connection is closed.

    Args:
        connection: takes lists of curves, each after an `Asks`; gives `Ranked`, `Departed`, `Trouble`.
        options: options of every fit.
        path: file for snapshots, see `sweeps.decide.watch`; None for none.
        margin: recipes whose A lies within this are tied; None for the default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the screen, which then closes the connection
    os.nice(_NICE)
    try:
        _Follower(connection, options, path, margin).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        connection.send(Trouble(f"the fits have ended: {type(error).__name__}: {error}"))


class _Follower:
    """State of `serve`: fits by recipe, with what they were made of."""

    def __init__(self, connection: Connection, options: FitOptions, path: Path | None, margin: float | None) -> None:
        # Imported in the process that fits alone.
        from sweeps.decide.watch import Watch
        from sweeps.source import LoadedStudy

        self._connection, self._options, self._margin = connection, options, margin
        self._watch: Watch = Watch(LoadedStudy, (), options, path)
        self._fits: dict[str, tuple[bytes, Fit]] = {}
        self._asked = False

    def run(self) -> None:
        """Answer each list of curves with a ranking, then follow the curves until there are others."""
        while True:
            self._ask()
            curves: list[Curve] = self._connection.recv()
            self._asked = False
            begin = time.monotonic()
            try:
                self._connection.send(self._ranked(curves))
                again = max(begin + LEAST_S, time.monotonic() + SHARE * (time.monotonic() - begin))
                self._follow(curves, again)
            except UserError as error:
                again = begin + LEAST_S
                self._connection.send(Trouble(str(error)))
            time.sleep(max(0.0, again - time.monotonic()))

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._connection.send(Asks())

    def _ranked(self, curves: Sequence[Curve]) -> Ranked:
        """Fit the recipes that have new evaluations, and rank all."""
        from sweeps.decide.rank import rank
        from sweeps.fit.fit import fit_curve, with_shared

        for curve in curves:
            content = _digest(curve)
            if curve.recipe not in self._fits or self._fits[curve.recipe][0] != content:
                self._fits[curve.recipe] = content, fit_curve(curve, self._options)
        fits = with_shared([self._fits[curve.recipe][1] for curve in curves], curves)
        ranking = rank(fits, margin=self._margin, brief=True)
        return as_places(ranking, sum(len(curve.compute) for curve in curves))

    def _follow(self, curves: Sequence[Curve], again: float) -> None:
        """Take snapshots of curve after curve; leave the rest for later where others have come, and it is time."""
        for curve in curves:
            if time.monotonic() > again:
                self._ask()
                if self._connection.poll():
                    return
            for news in self._watch.follow(curve):
                self._connection.send(Departed(curve.recipe, news.warning))


def as_places(ranking: Ranking, evaluations: int) -> Ranked:
    """Return what a screen shows of a ranking that rests on so many evaluations."""
    rewards = {} if ranking.rewards is None else {row.recipe: row.R.value for row in ranking.rewards.rows}
    # Of those that may not be ranked, first the one that is best most probably.
    last = len(ranking.ranking) + 1
    entries = sorted(ranking.ranking, key=lambda entry: (entry.rank or last, -(entry.p_best or 0.0)))
    places = [
        Place(
            recipe=entry.recipe,
            rank=entry.rank,
            p_best=entry.p_best,
            A=(entry.A.value, entry.A.low, entry.A.high),
            reward=rewards.get(entry.recipe),
            verdict=entry.verdict,
        )
        for entry in entries
    ]
    compute = None if ranking.rewards is None else ranking.rewards.compute
    return Ranked(tuple(places), ranking.sentence, compute, evaluations)


def _digest(curve: Curve) -> bytes:
    """Return what two curves share only if they have the same points and the same scale of the reward."""
    parts = [curve.compute, curve.reward, curve.seed, curve.sd, curve.at_peak]
    arrays = [b"" if part is None else part.tobytes() for part in parts]
    return blake2b(b"|".join([*arrays, repr(curve.range).encode()]), digest_size=16).digest()
