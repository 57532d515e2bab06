"""Tests of work in several processes: the number of workers does not change results."""

from __future__ import annotations

import os
import signal

import pytest

from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curves
from sweeps.parallel import cores, exit_on_sigterm, parallel_map
from tests.sweeps.fit.simulate import curve


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_order_is_kept(workers: int) -> None:
    assert parallel_map(abs, range(-30, 30), workers) == [abs(number) for number in range(-30, 30)]
    assert parallel_map(abs, [], workers) == []
    assert cores() >= 1


def test_errors_of_workers_keep_their_type() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parallel_map(int, ["1"] * 30 + ["x"], 2)


def test_sigterm_raises_systemexit_unless_it_is_handled() -> None:
    """tests/sweeps/launch/test_planning.py tests it with a real pool of processes."""
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match="143"), exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@pytest.mark.full
def test_fits_and_ranking_do_not_depend_on_workers() -> None:
    curves = [curve(f"recipe{n}", a=0.5 + 0.01 * n, points=17, rng=n) for n in range(16)]
    alone, shared = fit_curves(curves), fit_curves(curves, workers=2)
    assert [fit.to_json() for fit in shared] == [fit.to_json() for fit in alone]
    assert [fit.curve for fit in shared] == curves  # the same objects: curves compare by identity
    assert rank(shared, workers=2).to_json() == rank(alone).to_json()
