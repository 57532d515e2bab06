"""Tests of the ranking thread of the live screen: it refits only curves that changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.watch import fallen
from sweeps.curve import Curve, make_curve
from sweeps.decide import live_ranking
from sweeps.decide.live_ranking import LiveRanking
from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curve, fit_curves
from sweeps.fit.points import FitOptions
from tests.place import PATIENCE_S
from tests.sweeps.fit.simulate import curve

RECIPES = [curve(recipe="scalerl", points=9, seeds=2), curve(recipe="scalerl+loss=dapo", a=0.5, points=9, seeds=2)]


def test_it_ranks_like_the_command_and_refits_only_changed_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[str] = []

    def spy(data: Curve, options: FitOptions) -> object:
        if options.asymptote is None:  # refits of tied recipes at a shared asymptote are not counted
            fitted.append(data.recipe)
        return fit_curve(data, options)

    live = LiveRanking(FitOptions(), None, 0.02)
    live.rank(RECIPES)
    expected = rank(fit_curves(RECIPES, FitOptions()), margin=0.02, brief=True)
    assert live.ranking == expected and live.evaluations == 36
    monkeypatch.setattr("sweeps.fit.fit.fit_curve", spy)
    more = curve(recipe="scalerl+loss=dapo", a=0.5, points=9, seeds=3)
    live.rank([RECIPES[0], more])
    assert fitted == [more.recipe] and live.evaluations == 45


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LiveRanking:
    """A running thread without pauses between rankings."""
    monkeypatch.setattr(live_ranking, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(live_ranking, "PAUSE_FACTOR", 0.0)
    monkeypatch.setattr(live_ranking, "_NICE", 0)
    thread = LiveRanking(FitOptions(), tmp_path / "fits.jsonl", None)
    thread.start()
    return thread


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.live
def test_a_departure_is_reported_and_recorded(live: LiveRanking, tmp_path: Path) -> None:
    whole = fallen(curve(points=20, seeds=1, white=0.004), 0.0, 0.2)
    so_far = whole.compute < 11_500
    live.set_curves([make_curve(whole.recipe, whole.compute[so_far], whole.reward[so_far], whole.seed[so_far])])
    wait_for(lambda: "below its forecast" in live.departures.get("scalerl", ""))
    assert live.ranking is not None and (tmp_path / "fits.jsonl").read_text().count("below its forecast")


@pytest.mark.live
def test_a_failed_ranking_is_reported_and_the_next_is_tried(live: LiveRanking, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenError(Exception):
        pass

    def broken(*arguments: object, **options: object) -> None:
        raise BrokenError("as a test has it")

    monkeypatch.setattr("sweeps.decide.rank.rank", broken)
    live.set_curves(RECIPES[:1])
    wait_for(lambda: live.last_error)
    assert live.last_error == "the curves cannot be ranked: BrokenError: as a test has it" and live.ranking is None
    monkeypatch.undo()
    live.set_curves(RECIPES[1:])
    wait_for(lambda: live.ranking)
    assert live.last_error == ""
