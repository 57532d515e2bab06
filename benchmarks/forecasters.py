"""Compare forecasts of the last quarter's mean on real curves with those of other forecasters.

Each CSV file of the folders (columns recipe, seed, compute, reward) is a source. Its name begins with its class
(`eval`, `train`, `digits`); names with `enduro` are a separate class. A curve is one recipe and seed. It is cut at 30,
40, 50, 60 and 70% of its compute. Rivals are the last value, exponential smoothing (0.3), and with `--reference FILE` a
module that has `forecast(x, z, ahead, bounds) -> (median, low, high, ...)`. Differences are averaged over the cuts of a
curve, then over curves, and given with their standard error. Below zero, ours is better.

    python -m benchmarks.forecasters FOLDER... [--reference FILE] [--most 40]
        [--out docs/measured/forecasters.md --part tuned]
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marks import rewrite
from benchmarks.real_curves import MISS
from sweeps.curve import Array, Curve, make_curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.predict import predict_mean
from sweeps.source import load

CUTS = (0.3, 0.4, 0.5, 0.6, 0.7)
LEAST_POINTS, LEAST_COMPUTES = 6, 5
SMOOTHING = 0.3
OURS, LAST, SMOOTH, REFERENCE = "ours", "last value", "smoothing", "reference"
# Sections of the page: sources that were not used for tuning, and sources that were.
PARTS = ("not_tuned", "tuned")
Rival = Callable[..., Any]


@dataclass(frozen=True)
class Cut:
    """One cut of one curve: the later mean, and each forecaster's (value, low, high) on a scale of width 1."""

    group: str
    curve: str
    later_mean: float
    forecasts: dict[str, tuple[float, float, float]]

    def error(self, name: str) -> float:
        """Return a forecaster's absolute error."""
        return abs(self.forecasts[name][0] - self.later_mean)

    def score(self, name: str) -> float:
        """Return a forecaster's interval score (Gneiting and Raftery 2007)."""
        _, low, high = self.forecasts[name]
        return high - low + MISS * max(low - self.later_mean, self.later_mean - high, 0.0)

    def holds(self, name: str) -> bool:
        """Return whether a forecaster's interval contains the later mean."""
        return self.forecasts[name][1] <= self.later_mean <= self.forecasts[name][2]


def group_of(file: Path) -> str:
    """Return the class of a source by its file's name."""
    name = file.stem
    if "enduro" in name:
        return "enduro"
    return next((each for each in ("digits", "eval") if name.startswith(each)), "train")


def cuts(file: Path, curves: Sequence[Curve], most: int, reference: Rival | None) -> Iterator[Cut]:
    """Forecast every cut of at most `most` curves of a file."""
    curves_and_seeds = [(curve, seed) for curve in curves for seed in sorted(set(curve.seed))]
    if len(curves_and_seeds) > most:
        curves_and_seeds = [curves_and_seeds[int(i)] for i in np.linspace(0, len(curves_and_seeds) - 1, most)]
    bounded = all(curve.range is not None for curve in curves)
    for curve, seed in curves_and_seeds:
        mine = curve.take(curve.seed == seed)
        x, z = mine.compute, mine.reward
        for share in CUTS:
            seen, later = x <= share * x.max() * (1 + 1e-9), x > 0.75 * x.max()
            if seen.sum() < LEAST_POINTS or len(np.unique(x[seen])) < LEAST_COMPUTES or not later.any():
                continue
            low, width = (0.0, 1.0) if bounded else (float(z[seen].min()), float(np.ptp(z[seen])))
            if width <= 0:
                continue
            name = f"{file.stem} {curve.recipe} {seed}"
            yield forecast(
                group_of(file),
                name,
                x[seen],
                (z - low)[seen] / width,
                x[later],
                (z - low)[later] / width,
                bounded,
                reference,
            )


def forecast(
    group: str, name: str, x: Array, z: Array, ahead: Array, later_mean: Array, bounded: bool, reference: Rival | None
) -> Cut:
    """Apply every forecaster to one cut. Rewards are on a scale of width 1 (for the observed part, if unbounded)."""
    # Rewards outside [0, 1] make our fit treat the curve as unbounded, so stretch them.
    wide = z if bounded else 3 * z - 1
    fit = fit_curve(make_curve(name, x, wide))
    ours = predict_mean(fit, ahead)
    if not bounded:
        ours = tuple((value + 1) / 3 for value in ours)  # type: ignore[assignment]
    smooth = float(z[0])
    for value in z[1:]:
        smooth += SMOOTHING * (float(value) - smooth)
    forecasts = {OURS: ours, LAST: (float(z[-1]),) * 3, SMOOTH: (smooth,) * 3}
    if reference is not None:
        forecasts[REFERENCE] = tuple(reference(x, z, ahead, (0.0, 1.0) if bounded else (-9e9, 9e9))[:3])
    return Cut(group, name, float(later_mean.mean()), forecasts)


def paired(selected: Sequence[Cut], measure: str, rival: str) -> tuple[float, float]:
    """Return the mean difference to a rival over curves, and its standard error."""
    by_curve = defaultdict(list)
    for cut in selected:
        by_curve[cut.curve].append(getattr(cut, measure)(OURS) - getattr(cut, measure)(rival))
    means = np.array([np.mean(each) for each in by_curve.values()])
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.nan


def rows(measured_cuts: Sequence[Cut], reference: bool) -> list[str]:
    """Return the table by class and over all cuts."""
    lines = [
        "| curves | cuts | error | interval score | coverage | error minus last value's | error minus smoothing's"
        + (
            " | reference: error | reference: coverage | error minus reference's | score minus reference's |"
            if reference
            else " |"
        ),
        "|---|---|---|---|---|---|---" + ("|---|---|---|---|" if reference else "|"),
    ]
    for group in (*sorted({cut.group for cut in measured_cuts}), "all"):
        selected = [cut for cut in measured_cuts if group in (cut.group, "all")]
        cells = [
            f"{np.mean([cut.error(OURS) for cut in selected]):.4f}",
            f"{np.mean([cut.score(OURS) for cut in selected]):.3f}",
        ]
        cells.append(f"{np.mean([cut.holds(OURS) for cut in selected]):.2f}")
        cells += ["{:+.4f} +- {:.4f}".format(*paired(selected, "error", rival)) for rival in (LAST, SMOOTH)]
        if reference:
            cells.append(f"{np.mean([cut.error(REFERENCE) for cut in selected]):.4f}")
            cells.append(f"{np.mean([cut.holds(REFERENCE) for cut in selected]):.2f}")
            cells += [
                "{:+.4f} +- {:.4f}".format(*paired(selected, measure, REFERENCE)) for measure in ("error", "score")
            ]
        lines.append(f"| {group} | {len(selected)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table, and write the page with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders of CSV files, or files")
    parser.add_argument("--reference", type=Path, help="module with `forecast`")
    parser.add_argument("--most", type=int, default=40, help="curves of a file, at most")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="section of the page that is written")
    options = parser.parse_args()
    rival: Rival | None = None
    if options.reference is not None:
        spec = importlib.util.spec_from_file_location("reference", options.reference)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rival = module.forecast
    files = [file for each in options.folders for file in (sorted(each.glob("*.csv")) if each.is_dir() else [each])]
    cuts_of_files = [cut for file in files for cut in cuts(file, load([str(file)]).curves, options.most, rival)]
    lines = rows(cuts_of_files, rival is not None)
    print("\n".join(lines))
    if options.out:
        rewrite(options.out, options.part, lines)


if __name__ == "__main__":
    main()
