"""Does following the advice of `scalerl plan` lead to better choices than spending the same compute elsewhere?

The studies are simulated: four recipes with A 0.60, 0.565, 0.50 and 0.46, windows of 1.3 to 4 C_mid, and one seed each
(A differs between seeds by 0.015). The loss of a choice is how far its true A is below the best one. In each study the
advised step is taken. It is compared with the same step, at the same cost, on each recipe in turn, averaged.

    python benchmarks/advice.py --studies 250
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Curve, make_curve
from sweeps.decide.next_run import Step, find_next_steps, make_choice
from sweeps.decide.standing import find_standing
from sweeps.fit.fit import Fit, fit_curve

Array = NDArray[np.float64]
R0, WHITE, WANDER, RHO, SEED_SD, STEP = 0.3, 0.006, 0.004, 0.6, 0.015, 250.0
ASYMPTOTES = np.array([0.60, 0.565, 0.50, 0.46])
MARGIN = 0.02


def complete_run(a: float, b: float, c_mid: float, points: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Simulate one seed, evaluated every `STEP`: a random A, AR(1) noise of the policy, and sampling error."""
    compute = np.asarray(STEP * np.arange(points), dtype=np.float64)
    seed_asymptote = a + SEED_SD * rng.standard_normal()
    wander = np.zeros(points)
    for i in range(1, points):
        wander[i] = RHO * wander[i - 1] + np.sqrt(1 - RHO**2) * WANDER * rng.standard_normal()
    with np.errstate(divide="ignore"):
        reward = R0 + (seed_asymptote - R0) / (1 + (c_mid / compute) ** b)
    return compute, np.clip(reward + wander + WHITE * rng.standard_normal(points), 0, 1)


def revealed(full: Curve, ends: dict[str, float]) -> Curve:
    """Return the part of a recipe's runs that has been paid for: each seed up to its end."""
    keep = np.zeros(len(full.compute), dtype=bool)
    for seed, end in ends.items():
        keep |= (full.seed == seed) & (full.compute <= end * (1 + 1e-9))
    return Curve(full.recipe, full.compute[keep], full.reward[keep], full.seed[keep])


def one_study(study: int) -> tuple[float, float, float, float]:
    """Return the loss before, after the advised step and after a random step, and the gain that was promised."""
    rng = np.random.default_rng(study)
    truth = ASYMPTOTES[rng.permutation(4)]
    full, ends = [], []
    for r, a in enumerate(truth):
        ends.append({"0": float(rng.uniform(4000, 8000))})
        points = int(5 * ends[r]["0"] // STEP) + 1
        b, c_mid = float(rng.uniform(1.6, 2.2)), float(rng.uniform(2000, 3000))
        runs = [complete_run(float(a), b, c_mid, points, rng) for _ in range(2)]
        compute, reward = (np.concatenate([run[i] for run in runs]) for i in range(2))
        full.append(make_curve(f"r{r}", compute, reward, np.repeat(["0", "1"], points)))
    fits = [fit_curve(revealed(c, e)) for c, e in zip(full, ends, strict=True)]

    def loss(known: list[Fit]) -> float:
        chosen = find_standing(known, MARGIN).leader
        return float(truth.max() - (truth.mean() if chosen is None else truth[int(chosen[1:])]))

    steps = [step for step in find_next_steps(make_choice(fits)).steps if step.expected_gain is not None]
    if not steps:
        return (loss(fits),) * 3 + (0.0,)
    step = steps[0]
    losses_by_recipe = [
        loss([*fits[:r], fit_curve(revealed(full[r], _more(ends[r], step))), *fits[r + 1 :]]) for r in range(4)
    ]
    return (
        loss(fits),
        losses_by_recipe[int(step.recipe[1:])],
        float(np.mean(losses_by_recipe)),
        step.expected_gain or 0.0,
    )


def _more(ends: dict[str, float], step: Step) -> dict[str, float]:
    return {**ends, "1": step.cost} if step.action == "seed" else {**ends, "0": ends["0"] + step.cost}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=250)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = np.array(list(pool.map(one_study, range(options.studies), chunksize=5)))
    before, advised, random, promised = rows.mean(0)
    difference = rows[:, 2] - rows[:, 1]
    print("| | loss |\n|---|---|")
    print(f"| before | {before:.4f} |")
    print(f"| after the step advised | {advised:.4f} |")
    print(f"| after the same step on a recipe drawn at random | {random:.4f} |")
    error = difference.std(ddof=1) / np.sqrt(len(rows))
    print(f"\nThe fall promised was {promised:.4f}, {before - advised:.4f} came; random less advised ", end="")
    print(f"{difference.mean():.4f} (standard error {error:.4f}); {len(rows)} studies.")


if __name__ == "__main__":
    main()
