"""Tests of a search as a command: its last line and its exit code if trials fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.run.spec import RunSpec
from tests import forked, light
from tests.examples import every
from tests.place import PATIENCE_S, Place


def refuses(completion: str, answer: str) -> float:
    """A verifier that raises, so that every run fails."""
    raise ValueError("no good")


GOOD, BAD = "tests.place:odd_digits", f"{__name__}:refuses"


def search(folder: Path, *more: str, planner: str = "tests.light:plan") -> subprocess.CompletedProcess[str]:
    place = Place(folder, light=True)
    sweeper = ("hydra/sweeper=scalerl_optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2")
    command = [sys.executable, *place.study("study", *sweeper, *more), f"hydra.launcher.planner={planner}"]
    environment = place.environment()
    return forked.run(command, cwd=folder, env=environment, timeout=PATIENCE_S)


@pytest.mark.full
def test_a_search_with_a_failed_trial_exits_0(tmp_path: Path) -> None:
    for _ in range(2):  # the second launch has nothing left to do, and ends in the same way
        done = search(tmp_path, f"task.verifier={GOOD},{BAD}")
        assert done.returncode == 0, done.stderr
        last = done.stderr.rstrip().splitlines()[-1]
        assert "of 4 trials finished, " in last and " failed; the best is trial " in last


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_exits_1(tmp_path: Path) -> None:
    done = search(tmp_path, f"task.verifier={BAD}", "loss=dapo,gspo")
    assert done.returncode == 1
    assert "members failed" in done.stderr and "no good" in done.stderr
    assert "a larger hydra.sweeper.n_trials" in done.stderr and "the same command continues" not in done.stderr


def picky(lists: Sequence[Sequence[str]], folders: Sequence[str] = ()) -> list[RunSpec]:
    """A planner that refuses every loss except the default."""
    if any(word.startswith("loss=") for words in lists for word in words):
        raise UserError("loss: none of these")
    return light.plan(lists, folders)


@pytest.mark.slow
def test_a_search_whose_trials_are_all_refused_exits_1(tmp_path: Path) -> None:
    done = search(tmp_path, "loss=dapo,gspo", planner=f"{__name__}:picky")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "0 of 4 trials finished, 4 failed: loss: none of these" in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    every(
        6,
        every(
            2,
            [
                (["+hydra.sweeper.trials=3"], "hydra.sweeper.trials: no such setting; valid: n_trials"),
                (["hydra.sweeper.sampler=null"], "hydra.sweeper.sampler: none; give one of Optuna's"),
                (
                    ["hydra.sweeper.sampler._target_=optuna.samplers.Nope"],
                    "hydra.sweeper.sampler: Error locating target",
                ),
                (
                    ["hydra.sweeper.sampler._target_=optuna.samplers.GPSampler"],
                    "~hydra.sweeper.sampler.ARGUMENT removes an argument of the default sampler",
                ),
                (["hydra.sweeper.n_jobs=0"], "hydra.sweeper.n_jobs: 0 must be a whole number, 1 or more"),
                (["experiment=schedules"], "hydra.sweeper.rows: they list members one by one"),
            ],
            pytest.mark.full,
        ),
    ),
)
def test_wrong_settings_of_a_search_are_refused_by_name(tmp_path: Path, more: list[str], said: str) -> None:
    done = search(tmp_path, "loss=dapo,gspo", *more)
    assert done.returncode == 1 and "Traceback" not in done.stderr and said in done.stderr, done.stderr
    assert not (tmp_path / "study").exists()
