"""Compute rliable's statistics of a few scores; write rliable_scores.json for test_rliable.py.

Runs in the environment of make_peer_arrays.py, which tests/parity/peers.txt describes:

    /tmp/peers/bin/python tests/parity/make_rliable_scores.py

pandas is pinned because arch 7.2, which draws rliable's resamples, cannot be imported with pandas 3. rliable 1.2.0
ignores `random_state` and draws from numpy's global generator, so the global generator is seeded here.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rliable import library, metrics

SEED, REPS = 7, 100
# Numbers of runs of x, runs of y, and evaluation sets.
SHAPES = ((5, 3, 4), (2, 2, 3), (4, 4, 1), (3, 5, 7), (1, 2, 2))
THRESHOLDS = [0.0, 0.2, 0.25, 0.5, 0.7, 1.0]


def case(runs_x: int, runs_y: int, sets: int) -> dict[str, Any]:
    """Return scores of two recipes with every statistic and its interval; scores are multiples of 1/8, so some tie."""
    random = np.random.RandomState(100 * runs_x + 10 * runs_y + sets)
    x, y = (random.randint(0, 9, (runs, sets)) / 8 for runs in (runs_x, runs_y))
    np.random.seed(SEED)
    iqm, iqm_ends = library.get_interval_estimates(
        {"x": x}, lambda scores: np.array([metrics.aggregate_iqm(scores)]), reps=REPS
    )
    np.random.seed(SEED)
    better, better_ends = library.get_interval_estimates(
        {"pair": [x, y]}, lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), reps=REPS
    )
    np.random.seed(SEED)
    profile, profile_ends = library.create_performance_profile({"x": x}, np.array(THRESHOLDS), reps=REPS)
    return {
        "x": x.tolist(),
        "y": y.tolist(),
        "iqm": float(iqm["x"][0]),
        "iqm_interval": iqm_ends["x"].ravel().tolist(),
        "improvement": float(better["pair"][0]),
        "improvement_interval": better_ends["pair"].ravel().tolist(),
        "profile": profile["x"].tolist(),
        "profile_interval": profile_ends["x"].tolist(),
    }


def main() -> None:
    """Write the scores to the file given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("rliable_scores.json"))
    content = {
        "made_by": "tests/parity/make_rliable_scores.py",
        "environment": {package: version(package) for package in ("rliable", "arch", "numpy", "scipy")},
        "seed": SEED,
        "reps": REPS,
        "thresholds": THRESHOLDS,
        "cases": [case(*shape) for shape in SHAPES],
    }
    # One case per line.
    parser.parse_args().output.write_text(json.dumps(content).replace('{"x"', '\n{"x"') + "\n")


if __name__ == "__main__":
    main()
