"""Compare forecasts and chances on other people's real curves with the later rewards.

Each CSV file of a folder (columns recipe, seed, compute, reward) is a study; its name begins with `eval` or `train`.
Every file is used for two tests:

1. Each curve (a recipe and seed) is cut at 40, 55 and 70% of its compute, and the mean of its last quarter is forecast.
   Baselines are the last value and the mean of the last five. An interval is correct if it contains the later mean. It
   includes the sampling error of that mean.
2. Recipes are cut at 30, 50 and 70%, and their chances of being best at the end are computed. The best recipe has the
   highest mean over its last quarter. A choice may be decided or not. It is right if the chosen recipe ends within the
   margin of the best.

    python benchmarks/real_curves.py [FOLDER] [--ablate] [--out docs/measured/real_curves.md]

The default folder is `benchmarks/real`, with the curves whose licence allows copying. With `--ablate` the forecasts are
repeated without each law in turn, and without the random walk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy.stats import binomtest

from sweeps.curve import Curve
from sweeps.decide.margin import MARGIN
from sweeps.decide.standing import chances_of_being_best, choose_at_horizon, draw_rewards
from sweeps.fit import posterior
from sweeps.fit.fit import fit_curves
from sweeps.fit.predict import can_forecast, predict_mean
from sweeps.source import load

FORECAST_AT, CHANCES_AT = (0.4, 0.55, 0.7), (0.3, 0.5, 0.7)
LEAST = 8
# A run was level at a cut if its last quarter before the cut is within LEVEL of the later mean, after a rise of RISE.
LEVEL, RISE = 0.03, 0.05
# Factor on the distance by which a 95% interval misses (Gneiting and Raftery 2007, section 6.2).
MISS = 40
HEAD = (
    "| curves | intervals contain the truth | error | last value's error | error of the last five's mean "
    "| interval score |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Forecast:
    """One forecast (value, low, high), the later mean (came), and the baselines (last, five)."""

    file: str
    curve: str
    share: float
    value: float
    low: float
    high: float
    came: float
    last: float
    five: float
    verdict: str
    a: tuple[float, float] | None
    level: bool
    rose: float

    @property
    def holds(self) -> bool:
        """Whether the interval contains the later mean."""
        return self.low <= self.came <= self.high

    @property
    def score(self) -> float:
        """Interval score: width plus the penalty of a miss."""
        return self.high - self.low + MISS * max(self.low - self.came, self.came - self.high, 0.0)


def part(curve: Curve, until: float, seed: str | None = None) -> Curve | None:
    """Return a curve's evaluations up to a compute, of one seed or of all; None if there are none."""
    keep = curve.compute <= until * (1 + 1e-9)
    if seed is not None:
        keep &= curve.seed == seed
    name = curve.recipe if seed is None else f"{curve.recipe} seed {seed}"
    if not keep.any():
        return None
    return replace(curve.take(keep), recipe=name)


def forecasts(file: Path, curves: Sequence[Curve]) -> list[Forecast]:
    """Forecast every curve of a file at every cut."""
    all_forecasts = []
    for share in FORECAST_AT:
        cut, whole = [], []
        for curve in curves:
            for seed in sorted(set(curve.seed)):
                mine = curve.take(curve.seed == seed)
                seen = part(curve, share * float(mine.compute.max()), seed)
                if len(mine.reward) >= LEAST and seen is not None:
                    cut.append(seen)
                    whole.append(mine)
        for fit, seen, mine in zip(fit_curves(cut), cut, whole, strict=True):
            last_quarter = mine.compute > 0.75 * mine.compute.max()
            if not can_forecast(fit):
                continue
            value, low, high = predict_mean(fit, mine.compute[last_quarter])
            came, scale = float(mine.reward[last_quarter].mean()), mine.scale
            last, five = float(seen.reward[-1]), float(seen.reward[-5:].mean())
            named = fit.A if fit.identifiable else None
            a = None if named is None else ((named.low or 0.0) / scale, (named.high or 1.0) / scale)
            late = float(seen.reward[seen.compute > 0.75 * seen.compute.max()].mean())
            level = abs(came - late) < LEVEL * scale and late - float(seen.reward[0]) > RISE * scale
            rose = (came - float(seen.reward[0])) / scale
            all_forecasts.append(
                Forecast(
                    file=file.stem,
                    curve=seen.recipe,
                    share=share,
                    value=value / scale,
                    low=low / scale,
                    high=high / scale,
                    came=came / scale,
                    last=last / scale,
                    five=five / scale,
                    verdict=fit.verdict,
                    a=a,
                    level=level,
                    rose=rose,
                )
            )
    return all_forecasts


@dataclass(frozen=True)
class Decision:
    """A choice for the end of a study's runs, made at a share of their compute."""

    file: str
    share: float
    decided: bool
    right: bool
    regret: float
    by_last: float


def chances(file: Path, curves: Sequence[Curve]) -> tuple[list[tuple[float, bool]], list[Decision]]:
    """Return (chance of being best at the end, whether it was) of every recipe at every cut, and the choices."""
    ends = [float(curve.compute.max()) for curve in curves]
    end = min(ends)
    reached = [curve.take(curve.compute <= end * (1 + 1e-9)) for curve in curves]
    late = [curve.reward[curve.compute > 0.75 * end] for curve in reached]
    if not all(map(len, late)):
        return [], []
    came = [float(rewards.mean()) for rewards in late]
    chance_pairs, decisions = [], []
    margin = MARGIN * max(curve.scale for curve in curves)
    for share in CHANCES_AT:
        parts = [part(curve, share * end) for curve in curves]
        cut = [each for each in parts if each is not None]
        if len(cut) < max(len(curves), 2):
            continue
        fits = fit_curves(cut)
        probabilities = chances_of_being_best(draw_rewards(fits, 0.875 * end))
        chance_pairs += [(p, reward == max(came)) for p, reward in zip(probabilities, came, strict=True)]
        choice = choose_at_horizon(fits, margin, 0.875 * end)
        if choice is not None and choice.leader is not None:
            shortfall = max(came) - came[[fit.recipe for fit in fits].index(choice.leader)]
            last = max(range(len(cut)), key=lambda i: float(cut[i].reward[cut[i].compute.argmax()]))
            scale = margin / MARGIN
            decisions.append(
                Decision(
                    file.stem,
                    share,
                    choice.decided,
                    shortfall <= margin,
                    shortfall / scale,
                    (max(came) - came[last]) / scale,
                )
            )
    return chance_pairs, decisions


def _share(count: int, of: int) -> str:
    """Format a share with its 95% interval (Wilson)."""
    interval = binomtest(count, of).proportion_ci(method="wilson")
    return f"{count} of {of} ({count / of:.2f} [{interval.low:.2f}, {interval.high:.2f}])"


def table(title: str, rows: Sequence[Forecast]) -> list[str]:
    """Return a line of the table."""
    error, last, five = (
        float(np.mean([abs(getattr(row, name) - row.came) for row in rows])) for name in ("value", "last", "five")
    )
    held = _share(sum(row.holds for row in rows), len(rows))
    score = float(np.mean([row.score for row in rows]))
    return [f"| {title} | {held} | {error:.4f} | {last:.4f} | {five:.4f} | {score:.3f} |"]


def report(
    reported: Sequence[Forecast], chance_results: Sequence[tuple[float, bool]], decisions: Sequence[Decision], name: str
) -> list[str]:
    """Return the lines of the page."""
    evaluations = [row for row in reported if row.file.startswith("eval")]
    training = [row for row in reported if not row.file.startswith("eval")]
    rows = []
    for title, selected in (("all", reported), ("evaluations", evaluations), ("training rewards", training)):
        rows += table(title, selected) if selected else []
    for share in FORECAST_AT:
        rows += table(f"cut at {share:.0%}", [row for row in reported if row.share == share])
    for file in sorted({row.file for row in reported}):
        rows += table(file, [row for row in reported if row.file == file])
    low, high = [best for p, best in chance_results if p < 0.05], [best for p, best in chance_results if p > 0.9]
    lines = [
        "# Forecasts on real curves",
        "",
        "How good are forecasts on published reward curves of other projects? How much does each part of the model "
        "contribute: its two laws of growth (a sigmoid and a Weibull curve), its law *none* (a level curve), and the "
        "random walk around them?",
        "",
        f"Written by `python benchmarks/real_curves.py {name}`. Every curve (one seed of a recipe) of {LEAST} points "
        f"or more is cut at {', '.join(f'{share:.0%}' for share in FORECAST_AT)} of its compute. The mean reward over "
        "its last quarter, the *later reward*, is forecast from the points before the cut. Two simple forecasts are "
        "compared: the last value before the cut, and the mean of the last five values. The repository contains only "
        "the curves in `benchmarks/real`; the licences of the others do not allow copying.",
        "",
        "- **intervals contain the truth**: how many 95% intervals contain the later reward; in brackets the share, "
        "with its own 95% interval (Wilson).",
        "- **error**: mean absolute error of the forecast, as a share of the reward's scale.",
        f"- **interval score**: width of the 95% interval, plus {MISS} times the distance by which it misses the later "
        "reward. Lower is better.",
        "- **rows**: after the rows by cut, one row per file. The name of a file begins with `eval` (held-out "
        "evaluations) or `train` (training rewards).",
        "",
        *HEAD,
        *rows,
        "",
        *_verdicts(reported),
        "",
        "How good are the predicted probabilities that a recipe is the best at the end? Here each file is a study, cut "
        f"at {', '.join(f'{s:.0%}' for s in CHANCES_AT)} of its compute. A case is one recipe at one cut:",
        "",
        f"- the probability was below 0.05 in {len(low)} cases: "
        + (f"{_share(sum(low), len(low))} were best" if low else "-"),
        f"- the probability was above 0.9 in {len(high)} cases: "
        + (f"{_share(sum(high), len(high))} were best" if high else "-"),
        "",
        "How good is the recipe that is chosen at the cut? A choice is *decided* if, with 95% probability, the chosen "
        f"recipe ends within the margin ({MARGIN:g} of the reward's scale) of the best one. *Regret* is the best "
        "recipe's later reward minus the chosen recipe's, as a share of the scale. The last column is the regret of "
        "choosing by the last value.",
        "",
        "| cut at | studies | decided | of the decided: within the margin | regret | regret by last value |",
        "|---|---|---|---|---|---|",
    ]
    for share in CHANCES_AT:
        cut = [each for each in decisions if each.share == share]
        sure = [each.right for each in cut if each.decided]
        regrets = [float(np.mean([getattr(each, name) for each in cut])) for name in ("regret", "by_last")]
        right = _share(sum(sure), len(sure)) if sure else "-"
        lines.append(f"| {share:.0%} | {len(cut)} | {len(sure)} | {right} | {regrets[0]:.4f} | {regrets[1]:.4f} |")
    return lines


def _verdicts(cut_rows: Sequence[Forecast]) -> list[str]:
    """Return the lines on named asymptotes that were exceeded, and on curves called flat that rose."""
    named = [row for row in cut_rows if row.a is not None]
    level = [row for row in cut_rows if row.level]
    flat = [row for row in cut_rows if row.verdict == "flat"]
    lines = ["Verdicts (see the [glossary](../README.md#glossary)) and later rewards:", ""]
    if named:
        ends = [row.a for row in named if row.a is not None]
        above = sum(row.came > a[1] for row, a in zip(named, ends, strict=True))
        below = sum(row.came < a[0] for row, a in zip(named, ends, strict=True))
        width = float(np.median([high - low for low, high in ends]))
        lines.append(
            f"- The verdict was `identifiable`, so that A is reported, at {len(named)} of {len(cut_rows)} cuts. The "
            f"median width of A's interval was {width:.3f}. The later reward was above this interval in {above} cases, "
            f"and below it in {below}."
        )
    if level:
        lines.append(
            f"- At {len(level)} cuts the run was already level: it had risen by {RISE:g}, and was within {LEVEL:g} of "
            f"the later reward. The verdict was `identifiable` at {sum(row.a is not None for row in level)} of these "
            "cuts."
        )
    rose = sum(row.rose > 0.02 for row in flat)
    lines.append(
        f"- The verdict was `flat` at {len(flat)} cuts. In {rose} of these cases the later reward was more than 0.02 "
        "above the first value."
    )
    return lines


def ablation(files: Sequence[tuple[Path, Sequence[Curve]]], forecasts_with_all_laws: Sequence[Forecast]) -> list[str]:
    """Return the table of forecasts repeated without each law in turn."""
    rows = table("all laws", forecasts_with_all_laws)
    for law in posterior.LAWS:
        others = tuple(replace(each, prior=1e-12 if each is law else each.prior) for each in posterior.LAWS)
        with patch.object(posterior, "LAWS", others):
            rows += table(f"without {law.name}", [row for file, curves in files for row in forecasts(file, curves)])
    with patch.object(posterior, "WALK_PRIOR", (-9.0, 0.01)):
        rows += table("without a walk", [row for file, curves in files for row in forecasts(file, curves)])
    return [
        "",
        "The forecasts of the first row, repeated by models that lack one law or the random walk:",
        "",
        *HEAD,
        *rows,
    ]


def main() -> None:
    """Print the page, and write it with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "real")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = [(file, load([str(file)]).curves) for file in sorted(options.folder.glob("*.csv"))]
    main_forecasts = [row for file, curves in files for row in forecasts(file, curves)]
    chances_by_file = [chances(file, curves) for file, curves in files]
    all_chances, decisions = ([each for pair in chances_by_file for each in pair[i]] for i in (0, 1))
    lines = report(main_forecasts, all_chances, decisions, options.folder.name)  # type: ignore[arg-type]
    if options.ablate:
        lines += ablation(files, main_forecasts)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
