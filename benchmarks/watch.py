"""How often does the watch warn about a run that follows the law, and how often about one whose reward falls?

Runs are simulated with sampling error and AR(1) noise of correlation 0.6, and checked after every evaluation. In runs
that fall, the reward drops by 0.1 after half of the compute, at once or over a seventh of it.

    python -m benchmarks.watch [--good 150] [--falls 50] [--out docs/measured/watch.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Curve, make_curve
from sweeps.fit.history import departure, history
from sweeps.parallel import cores, parallel_map

FALL, RAMP, RHO = 0.1, 0.15, 0.6
SET_UP = wrapped(
    "The table has the share of simulated runs for which `scalerl watch` reports, at any evaluation, that the run has "
    "departed from its curve (the *law*). The number of runs is in brackets.",
    "",
    "- **follow the law**: sigmoids with noise.",
    f"- **fall at once**, **fall slowly**: the same runs, but they lose {FALL:g} of reward after half of their "
    f"compute, at once or over {RAMP:.0%} of their compute.",
    "- **small sets**: these runs have another sigmoid, and small held-out sets, so the noise of an evaluation is "
    "0.015 instead of 0.006.",
    "- **window of 4 C_mid**: these runs end at 4 times C_mid.",
    "",
)


@dataclass(frozen=True)
class Run:
    """Parameters of simulated runs: the law, number and spread of seeds, and noise (standard deviations of reward)."""

    name: str
    a: float = 0.61
    b: float = 1.9
    c_mid: float = 2500.0
    r0: float = 0.3
    end: float = 16000.0
    points: int = 33
    seeds: int = 2
    white: float = 0.006
    wander: float = 0.006
    seed_sd: float = 0.0


RUNS = (
    Run("two seeds", seed_sd=0.004),
    Run("one seed", seeds=1),
    Run("one seed, 75 evaluations, window of 4 C_mid", seeds=1, points=75, end=10000.0, wander=0.01),
    Run("two seeds, small sets", 0.75, 2.0, 1.0, 0.12, 5.0, 31, 2, 0.015, 0.015, 0.01),
)


def evaluated(run: Run, number: int) -> Curve:
    """Simulate the evaluations of one recipe."""
    random = np.random.default_rng((3, RUNS.index(run), number))
    compute = np.linspace(0.0, run.end, run.points)
    rewards = []
    for _ in range(run.seeds):
        with np.errstate(divide="ignore"):
            seed_asymptote = run.a + run.seed_sd * random.standard_normal()
            mean = run.r0 + (seed_asymptote - run.r0) / (1 + (run.c_mid / compute) ** run.b)
        wander = [0.0]
        for _ in compute[1:]:
            wander.append(RHO * wander[-1] + np.sqrt(1 - RHO**2) * run.wander * random.standard_normal())
        rewards.append(mean + np.array(wander) + run.white * random.standard_normal(run.points))
    labels = np.repeat([str(seed) for seed in range(run.seeds)], run.points)
    return make_curve("run", np.tile(compute, run.seeds), np.clip(np.concatenate(rewards), 0, 1), labels)


def fallen(curve: Curve, ramp: float, by: float = FALL) -> Curve:
    """Make the runs of a curve fall after half of their compute, at once or over a share `ramp` of it."""
    share = np.clip((curve.compute / curve.compute.max() - 0.5) / max(ramp, 1e-9), 0, 1)
    return make_curve(curve.recipe, curve.compute, np.clip(curve.reward - by * share, 0, 1), curve.seed)


def rings(curve: Curve, every: float = 1.0) -> bool:
    """Whether there is a warning at any check, with a check whenever compute has grown by a factor `every`."""
    snapshots = history(curve, every=every)
    return any(departure(snapshots[:k]) is not None for k in range(1, len(snapshots) + 1))


def good(which: tuple[int, int]) -> bool:
    """Whether a run that follows the law gets a warning; `which` is (index in RUNS, number)."""
    return rings(evaluated(RUNS[which[0]], which[1]))


def falls(which: tuple[int, int], ramp: float) -> bool:
    """Whether a run that falls gets a warning."""
    return rings(fallen(evaluated(RUNS[which[0]], which[1]), ramp))


def main() -> None:
    """Print the table, and write it with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--good", type=int, default=150)
    parser.add_argument("--falls", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def share(ring: Callable[[tuple[int, int]], bool], place: int, count: int) -> str:
        return f"{np.mean(parallel_map(ring, [(place, number) for number in range(count)], cores())):.2f}"

    lines = [
        *SET_UP,
        f"| runs | follow the law ({options.good}) | fall at once ({options.falls}) | fall slowly ({options.falls}) |",
        "|---|---|---|---|",
    ]
    for place, run in enumerate(RUNS):
        at_once, slowly = (share(partial(falls, ramp=ramp), place, options.falls) for ramp in (0.0, RAMP))
        lines.append(f"| {run.name} | {share(good, place, options.good)} | {at_once} | {slowly} |")
    print("\n".join(lines))
    if options.out:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
