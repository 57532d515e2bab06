"""Tests of statistics over several evaluation sets, against rliable's functions on the same scores and resamples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.decide.aggregate import improvement, iqm, profile, take

MAKER = Path(__file__).with_name("make_rliable_scores.py")
STORED = json.loads(Path(__file__).with_name("rliable_scores.json").read_text())
THRESHOLDS, REPS = np.array(STORED["thresholds"]), STORED["reps"]
EXACT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}


def indices(*shapes: tuple[int, ...]) -> list[Any]:
    """Return the runs that rliable draws for each matrix, in the order of numpy's global generator."""
    random = np.random.RandomState(STORED["seed"])
    drawn = [[random.choice(shape[0], shape, replace=True) for shape in shapes] for _ in range(REPS)]
    return [np.array(runs) for runs in zip(*drawn, strict=True)]


@pytest.mark.parametrize("case", STORED["cases"])
def test_statistics_and_intervals_are_those_of_rliable(case: dict[str, Any]) -> None:
    x, y = np.array(case["x"]), np.array(case["y"])
    assert float(iqm(x)) == pytest.approx(case["iqm"], **EXACT)
    assert float(improvement(x, y)) == pytest.approx(case["improvement"], **EXACT)
    assert profile(x, THRESHOLDS) == pytest.approx(case["profile"], **EXACT)
    (runs,) = indices(x.shape)
    drawn = take(x, runs)
    assert np.percentile(iqm(drawn), [2.5, 97.5]) == pytest.approx(case["iqm_interval"], **EXACT)
    ends = np.percentile(profile(drawn, THRESHOLDS), [2.5, 97.5], axis=0)
    assert ends == pytest.approx(np.array(case["profile_interval"]), **EXACT)
    runs_x, runs_y = indices(x.shape, y.shape)
    chances = improvement(take(x, runs_x), take(y, runs_y))
    assert np.percentile(chances, [2.5, 97.5]) == pytest.approx(case["improvement_interval"], **EXACT)


@pytest.mark.full
@pytest.mark.peers
def test_the_stored_scores_can_be_computed_again(tmp_path: Path) -> None:
    """Uses the interpreter named by PEERS_PYTHON if set."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import rliable.library"], capture_output=True, check=False).returncode:
        absent = f"{python} has no rliable; set PEERS_PYTHON to an interpreter made as in make_peer_arrays.py"
        if os.environ.get("CI_ALL") == "1":
            pytest.fail(absent)
        pytest.skip(absent)
    output = tmp_path / "scores.json"
    done = subprocess.run([python, MAKER, "--output", output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fresh = json.loads(output.read_text())
    for new, old in zip(fresh["cases"], STORED["cases"], strict=True):
        assert set(new) == set(old)
        for name in new:
            assert np.array(new[name]) == pytest.approx(np.array(old[name]), **EXACT), (name, fresh["environment"])
