"""Does racing beat what people do now, at the same compute? Simulated studies of which the truth is known.

A study has eight recipes, one run each, evaluated twenty times up to the budget on the same held-out prompts. Methods
stop runs on their way; each is charged for all that it has seen. What counts is how far the recipe that a method names
lies below the best at the budget (regret, of the recipes' true means), the compute spent, and false kills: stopped
recipes whose true reward at the budget exceeds that of every recipe left by more than 0.02.

Against racing stand: no stopping; successive halving (eta 2, 3, 4, from many grace periods; the later ones are halving
with more money, arXiv 2508.14818); Hyperband; the median rule; a signed-rank test over prompts, as in Optuna's
WilcoxonPruner; and racing on the last value seen in place of the forecast.

Studies are kept as they are done, in `--work`, and a run goes on where another left off.

    python -m benchmarks.racing [--studies 2000] [--settings NAME ...] [--out racing.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import expit
from scipy.stats import wilcoxon

from benchmarks.forecast_zoo import exponential, frechet, power_law, weibull
from sweeps.curve import Array, make_curve
from sweeps.decide.race import Look, judged
from sweeps.decide.rules import Rules
from sweeps.decide.standing import joint_rewards
from sweeps.fit.fit import Fit, FitOptions, fit_curves
from sweeps.fit.predict import paths
from sweeps.parallel import cores, mapped
from sweeps.run.files import append_lines, parse_lines

RECIPES, EVALUATIONS, PROMPTS, SAMPLES = 8, 20, 128, 8
SEED_SD, WANDER, MEMORY = 0.015, 0.008, 0.1
# A false kill is a stopped recipe that would have been better than all that are left by more than this.
MARGIN = 0.02
COMPUTE: Array = np.concatenate([[0.0], np.arange(1, EVALUATIONS + 1) / EVALUATIONS])
MU: Array = np.linspace(-12, 12, 2401)
# Looks of racing: at every evaluation from a fifth of the budget on.
LOOKED = [(at, float(COMPUTE[at])) for at in range(EVALUATIONS // 5, EVALUATIONS)]


# --- studies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A kind of studies.

    spread: sd of the recipes' asymptotes. middle: of C_mid, as a share of the budget. outside: laws that are not the
    fitted one. crossing: the higher the asymptote the later the rise. collapses: share of runs that fall on their way.
    """

    name: str
    spread: float
    middle: float = 0.25
    outside: bool = False
    crossing: bool = False
    collapses: float = 0.0


SETTINGS = (
    Setting("spread 0.06", 0.06),
    Setting("spread 0.03", 0.03),
    Setting("spread 0.01", 0.01),
    Setting("curves that cross", 0.06, crossing=True),
    Setting("bend at the budget", 0.06, middle=0.9),
    Setting("other laws", 0.06, outside=True),
    Setting("collapses", 0.06, collapses=0.2),
)


@dataclass(frozen=True, eq=False)
class Study:
    """truth (R,): true mean reward at the budget. rate (R, E + 1): evaluations, sd their standard errors, passed
    (R, E + 1, P): the share of samples that passed, by prompt."""

    truth: Array
    rate: Array
    sd: Array
    passed: Array


def make_study(setting: Setting, number: int) -> Study:
    """Drawn by the setting and the number alone."""
    source = np.random.default_rng((sum(map(ord, setting.name)), number))
    standing = source.standard_normal(RECIPES)
    top = np.clip(0.6 + setting.spread * standing, 0.25, 0.95)
    late = source.normal(0, 0.4, RECIPES) + (0.5 * standing if setting.crossing else 0.0)
    middle, steep = setting.middle * np.exp(late), 1.5 * np.exp(source.normal(0, 0.25, RECIPES))
    kind = source.integers(4, size=RECIPES) if setting.outside else np.full(RECIPES, -1)
    falls = np.where(source.random(RECIPES) < setting.collapses, source.uniform(0.2, 1.0, RECIPES), np.inf)
    own = np.clip(top + SEED_SD * source.standard_normal(RECIPES), 0.21, 0.97)
    mean = np.stack([_law(kind[i], own[i], middle[i], steep[i])(COMPUTE) for i in range(RECIPES)])
    truth = np.array([_law(kind[i], top[i], middle[i], steep[i])(np.ones(1))[0] for i in range(RECIPES)])
    fallen = expit((COMPUTE[None, :] - falls[:, None]) / 0.01)
    mean, truth = mean - 0.3 * fallen, truth - 0.3 * fallen[:, -1]
    kept = np.exp(-1 / EVALUATIONS / MEMORY)
    state = np.zeros((RECIPES, len(COMPUTE)))
    for at in range(1, len(COMPUTE)):
        state[:, at] = kept * state[:, at - 1] + np.sqrt(1 - kept**2) * source.standard_normal(RECIPES)
    policy = np.clip(mean + WANDER * state, 0.01, 0.99)
    # The same prompts for all: each has its own difficulty, and their mean passes as the policy does.
    hard = source.normal(0, 1.5, PROMPTS)
    mu = np.interp(policy, expit(MU[:, None] + hard).mean(axis=1), MU)
    p = expit(mu[..., None] + hard)
    passed = source.binomial(SAMPLES, p) / SAMPLES
    smoothed = (passed * SAMPLES + 0.5) / (SAMPLES + 1)
    sd = np.sqrt((smoothed * (1 - smoothed)).mean(axis=-1) / (PROMPTS * SAMPLES))
    return Study(truth, passed.mean(axis=-1), sd, passed)


def _law(kind: int, top: float, middle: float, steep: float) -> Callable[[Array], Array]:
    start = 0.2
    if kind < 0:

        def sigmoid(compute: Array) -> Array:
            with np.errstate(divide="ignore"):
                value: Array = start + (top - start) / (1 + (middle / compute) ** steep)
            return value

        return sigmoid
    return (
        exponential(start, top, 1.4 * middle),
        weibull(start, top, 1.4 * middle, 0.6),
        frechet(start, top, 0.7 * middle, 1.0),
        power_law(start, top, 0.5 * middle, 0.8),
    )[kind]


# --- methods: each stops runs and names a winner -------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """regret; compute, as a share of all runs to the budget; kills and how many of them were false."""

    regret: float
    compute: float
    kills: int
    false: int


def _judge(study: Study, winner: int, spent: Array) -> Outcome:
    stopped = np.flatnonzero(spent < 1)
    left = study.truth[spent >= 1].max()
    false = int((study.truth[stopped] > left + MARGIN).sum())
    return Outcome(float(study.truth.max() - study.truth[winner]), float(spent.mean()), len(stopped), false)


def _by_last(study: Study, spent: Array) -> int:
    """Of the runs at the budget, the one with the highest mean of its last two evaluations."""
    last = np.where(spent >= 1, study.rate[:, -2:].mean(axis=1), -np.inf)
    return int(np.argmax(last))


def halving(study: Study, eta: int, grace: float, among: Sequence[int] = tuple(range(RECIPES))) -> Array:
    """Successive halving by the last value: compute spent on each, (R,)."""
    left, spent, level = list(among), np.zeros(RECIPES), grace
    while True:
        at = min(round(level * EVALUATIONS), EVALUATIONS)
        spent[left] = COMPUTE[at]
        if at == EVALUATIONS:
            return spent
        left = sorted(left, key=lambda i: -study.rate[i, at])[: max(1, len(left) // eta)]
        level *= eta


def hyperband(study: Study, eta: int) -> Array:
    """Its brackets on a third of the recipes each, from the shortest grace to none at all."""
    spent = np.zeros(RECIPES)
    brackets = (1 / eta**2, 1 / eta, 1.0)
    for bracket, grace in enumerate(brackets):
        spent += halving(study, eta, max(grace, COMPUTE[1]), range(bracket, RECIPES, len(brackets)))
    return spent


def median_rule(study: Study, grace: float) -> Array:
    """Stopped where the best so far lies below the median of the running means of the others still running."""
    left, spent = list(range(RECIPES)), np.ones(RECIPES)
    running = np.cumsum(study.rate[:, 1:], axis=1) / np.arange(1, EVALUATIONS + 1)
    for at in range(round(grace * EVALUATIONS), EVALUATIONS):
        for i in list(left):
            others = [running[j, at - 1] for j in range(RECIPES) if j != i and spent[j] >= COMPUTE[at]]
            if len(left) > 1 and others and study.rate[i, 1 : at + 1].max() < np.median(others) - 1e-9:
                left.remove(i)
                spent[i] = COMPUTE[at]
    return spent


def signed_rank(study: Study, p: float, grace: float) -> Array:
    """Stopped where the favourite passes more of the same prompts, by Wilcoxon's test (one-sided, ties split)."""
    left, spent = list(range(RECIPES)), np.ones(RECIPES)
    for at in range(round(grace * EVALUATIONS), EVALUATIONS):
        best = max(left, key=lambda i: study.rate[i, at])
        for i in [each for each in left if each != best]:
            apart = study.passed[i, at] - study.passed[best, at]
            if apart.any() and wilcoxon(apart, alternative="less", zero_method="zsplit").pvalue < p:
                left.remove(i)
                spent[i] = COMPUTE[at]
    return spent


def last_value(study: Study, rules: Rules) -> Array:
    """Racing with the last value in place of the forecast, and all the noise that is known of one."""
    left, spent = list(range(RECIPES)), np.ones(RECIPES)
    row = np.zeros(RECIPES, dtype=int)
    for at, level in LOOKED:
        best = max(left, key=lambda i: study.rate[i, at])
        for i in [each for each in left if each != best]:
            error = np.sqrt(2 * (SEED_SD**2 + WANDER**2) + study.sd[i, at] ** 2 + study.sd[best, at] ** 2)
            z = (study.rate[best, at] - study.rate[i, at]) / error
            row[i] = row[i] + 1 if expit(-1.702 * z) < rules.p_ahead else 0
            if row[i] >= rules.looks:
                left.remove(i)
                spent[i] = level
    return spent


class Forecasts:
    """A study's fits at every look, and joint draws of the reward at the budget; shared by all rules.

    All recipes are fitted at every look, the stopped ones too; `sweeps.decide.race.run_race` leaves these out.
    """

    def __init__(self, study: Study, rules: Rules) -> None:
        self.fits: list[tuple[float, list[Fit], list[Array]]] = []
        for at, level in [*LOOKED, (EVALUATIONS, 1.0)]:
            seen = np.arange(len(COMPUTE)) <= at
            curves = [
                make_curve(str(i), COMPUTE[seen], study.rate[i, seen], sd=study.sd[i, seen]) for i in range(RECIPES)
            ]
            fits = fit_curves(curves, FitOptions(), regions=False)
            self.fits.append((level, fits, joint_rewards(fits, rules.budget)))

    def race(self, rules: Rules) -> tuple[int, Array]:
        """The winner, and compute spent on each."""
        spent, left, look = np.ones(RECIPES), list(range(RECIPES)), None
        for level, fits, draws in self.fits[:-1]:
            if len(left) < 2:
                break
            look = self._look(level, fits, draws, left, rules, look)
            for name in look.stopped:
                left.remove(int(name))
                spent[int(name)] = level
        _, fits, _ = self.fits[-1]
        return max(left, key=lambda i: float(np.median(paths(fits[i], [rules.budget])))), spent

    @staticmethod
    def _look(
        level: float, fits: Sequence[Fit], draws: Sequence[Array], left: Sequence[int], rules: Rules, last: Look | None
    ) -> Look:
        below = {each.recipe: each.below for each in last.chances} if last is not None else {}
        return judged(level, [fits[i] for i in left], [draws[i] for i in left], rules, below)


RACING = Rules(1.0)
GRACE = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
CHANCES, LOOKS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3), (1, 2, 3)


def outcomes(study: Study) -> dict[str, Outcome]:
    """Of every method, by name."""
    found = {"all runs to the budget": _judge(study, _by_last(study, np.ones(RECIPES)), np.ones(RECIPES))}

    def add(name: str, spent: Array) -> None:
        found[name] = _judge(study, _by_last(study, spent), spent)

    for eta in (2, 3, 4):
        for grace in GRACE:
            add(f"halving, eta {eta}, grace {grace:g}", halving(study, eta, grace))
        add(f"Hyperband, eta {eta}", hyperband(study, eta))
    for grace in GRACE:
        add(f"median, grace {grace:g}", median_rule(study, grace))
    for p in (0.001, 0.01, 0.05, 0.1):
        for grace in (0.1, 0.2, 0.3, 0.5):
            add(f"signed rank, p {p:g}, grace {grace:g}", signed_rank(study, p, grace))
    forecasts = Forecasts(study, RACING)
    for p in CHANCES:
        for looks in LOOKS:
            rules = replace(RACING, p_ahead=p, looks=looks)
            add(f"last value, p {p:g}, {looks} looks", last_value(study, rules))
            winner, spent = forecasts.race(rules)
            found[f"racing, p {p:g}, {looks} looks"] = _judge(study, winner, spent)
    return found


# --- many of them -------------------------------------------------------------------------------------------


def _one(setting: Setting, number: int) -> dict[str, list[float]]:
    found = outcomes(make_study(setting, number))
    return {name: [each.regret, each.compute, each.kills, each.false] for name, each in found.items()}


def simulate(setting: Setting, studies: int, work: Path, at_once: int = 40) -> dict[str, Array]:
    """Outcomes of so many studies, (n, 4) a method: regret, compute, kills, false kills. What `work` holds is taken."""
    path = work / f"{setting.name.replace(' ', '-')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {line["number"]: line for line in parse_lines(path.read_bytes())} if path.exists() else {}
    todo = [number for number in range(studies) if number not in done]
    for first in range(0, len(todo), at_once):
        numbers = todo[first : first + at_once]
        lines = [
            {"number": number, "outcomes": found}
            for number, found in zip(numbers, mapped(partial(_one, setting), numbers, cores()), strict=True)
        ]
        append_lines(path, lines)
        done |= {line["number"]: line for line in lines}
        print(f"{setting.name}: {min(len(done), studies)} of {studies}", flush=True)
    rows = [done[number]["outcomes"] for number in range(studies)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Methods that no other beats in both regret and compute, the cheapest first."""
    return sorted(
        (
            name
            for name, (regret, compute) in points.items()
            if not any(r < regret and c < compute for r, c in points.values())
        ),
        key=lambda name: points[name][1],
    )


def table(found: Mapping[str, Array]) -> Iterator[str]:
    """Of one setting: the frontier, and every racing that is not on it with what beats it."""
    points = {name: (float(rows[:, 0].mean()), float(rows[:, 1].mean())) for name, rows in found.items()}
    best = frontier(points)
    rest = [name for name in points if name.startswith("racing") and name not in best]
    yield "| method | compute | regret | stopped a study | false kills | on the frontier |"
    yield "|---|---|---|---|---|---|"
    for name in sorted([*best, *rest, "all runs to the budget"], key=lambda name: points[name][1]):
        rows = found[name]
        error = rows[:, 0].std() / np.sqrt(len(rows))
        regret, compute = points[name]
        beaten = [other for other, (r, c) in points.items() if r < regret and c < compute]
        said = "yes" if not beaten else f"no: {min(beaten, key=lambda other: points[other][0])}"
        yield (
            f"| {name} | {compute:.3f} | {regret:.4f} ± {error:.4f} | {rows[:, 2].mean():.1f} "
            f"| {rows[:, 3].sum() / max(rows[:, 2].sum(), 1):.2%} | {said} |"
        )


def main() -> None:
    """Simulate and print, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--settings", nargs="+", choices=[each.name for each in SETTINGS], metavar="NAME")
    parser.add_argument("--work", type=Path, default=Path("outputs/racing"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [each for each in SETTINGS if options.settings is None or each.name in options.settings]
    lines = [
        "# Racing against halving, Hyperband, the median, signed ranks and the last value",
        "",
        f"Written by `python -m benchmarks.racing --studies {options.studies}`: simulated studies, {options.studies} a "
        f"setting, of {RECIPES} recipes with one run each, {EVALUATIONS} evaluations of {PROMPTS} held-out prompts "
        f"with {SAMPLES} samples, the same prompts for all. Recipes differ in A (sd: the spread), B and C_mid; runs of "
        f"one recipe by {SEED_SD} in A; a policy wanders about its curve by {WANDER}. Compute: share of that of all "
        "runs to the budget, everything observed counted. Regret: how far the named recipe's true reward at the budget "
        "lies below the best one's. False kills: of the stopped, those whose true reward there exceeds that of all "
        f"that are left by more than {MARGIN}. On the frontier: no other method has both less regret and less "
        "compute. Listed are the frontier and every racing; halving was tried with three rates and ten grace periods, "
        "the median and signed ranks with as many, so that the frontier is that of tuned rivals.",
        "",
    ]
    for setting in chosen:
        lines += [f"## {setting.name}", "", *table(simulate(setting, options.studies, options.work)), ""]
    text = "\n".join(lines)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
