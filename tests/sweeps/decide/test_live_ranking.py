"""The process behind the live screen: it ranks what comes, refits what has changed, and ends with the screen."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.watch import fallen
from sweeps.curve import Curve
from sweeps.decide import live_ranking
from sweeps.decide.live_ranking import Asks, Departed, Ranked, Trouble, _Follower
from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curve, fit_curves
from sweeps.fit.points import FitOptions
from tests.sweeps.fit.simulate import curve

RECIPES = [curve(recipe="scalerl", points=9, seeds=2), curve(recipe="scalerl+loss=dapo", a=0.5, points=9, seeds=2)]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """The screen's end of a pipe, at whose other end a follower runs."""
    monkeypatch.setattr(live_ranking, "LEAST_S", 0.0)
    monkeypatch.setattr(live_ranking, "SHARE", 0.0)
    ours, theirs = Pipe()

    def follow() -> None:
        with pytest.raises((EOFError, OSError)):
            _Follower(theirs, FitOptions(), None, 0.02).run()

    thread = Thread(target=follow)
    thread.start()
    yield ours
    ours.close()
    thread.join(60)
    assert not thread.is_alive(), "it ends with the screen"


def answers(pipe: Connection) -> list[Any]:
    """Take what comes until curves are asked for."""
    found = []
    while pipe.poll(60):
        if (said := pipe.recv()) == Asks():
            return found
        found.append(said)
    raise AssertionError(f"nothing more came after {found}")


def test_it_ranks_as_the_command_does_and_refits_only_what_has_changed(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []

    def spy(data: Curve, options: FitOptions) -> object:
        if options.asymptote is None:  # no refit of what is tied
            fitted.append(data.recipe)
        return fit_curve(data, options)

    assert answers(pipe) == []
    pipe.send(RECIPES)
    (ranked,) = [said for said in answers(pipe) if isinstance(said, Ranked)]
    expected = rank(fit_curves(RECIPES, FitOptions()), margin=0.02, brief=True)
    assert ranked.sentence == expected.sentence and ranked.evaluations == 36
    assert {place.recipe: place.p_best for place in ranked.places} == {
        entry.recipe: entry.p_best for entry in expected.ranking
    }
    monkeypatch.setattr("sweeps.fit.fit.fit_curve", spy)
    more = curve(recipe="scalerl+loss=dapo", a=0.5, points=9, seeds=3)
    pipe.send([RECIPES[0], more])
    (again,) = [said for said in answers(pipe) if isinstance(said, Ranked)]
    assert fitted == [more.recipe] and again.evaluations == 45


def test_what_may_not_be_ranked_stands_by_its_chance() -> None:
    short = [
        curve(recipe=name, a=a, points=4, seeds=1, rng=at) for at, (name, a) in enumerate([("low", 0.4), ("high", 0.9)])
    ]
    ours, theirs = Pipe()
    with ours, theirs:
        places = _Follower(theirs, FitOptions(), None, None)._ranked(short).places
    assert [place.rank for place in places] == [None, None] and places[0].recipe == "high"
    assert (places[0].p_best or 0) > (places[1].p_best or 0)


def test_a_departure_is_told_and_so_is_its_end(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    data = fallen(curve(points=20, seeds=1, white=0.004), 0.0, 0.2)
    with ours, theirs:
        _Follower(theirs, FitOptions(), tmp_path / "fits.jsonl", None)._follow([data], float("inf"))
        said = []
        while ours.poll():
            said.append(ours.recv())
    assert all(isinstance(each, Departed) and each.recipe == "scalerl" for each in said)
    assert said[0].warning is None and any("below its forecast" in (each.warning or "") for each in said)
    assert len((tmp_path / "fits.jsonl").read_text().splitlines()) == len(said)


def test_what_cannot_be_fitted_is_told_and_the_next_is_tried(pipe: Connection) -> None:
    assert answers(pipe) == []
    pipe.send([])
    (trouble,) = answers(pipe)
    assert isinstance(trouble, Trouble) and "nothing to rank" in trouble.text
    pipe.send(RECIPES[:1])
    assert [type(said) for said in answers(pipe)] == [Ranked]
