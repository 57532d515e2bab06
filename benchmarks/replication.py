"""Which findings of ScaleRL appear at this scale? The study `experiment=replication`, and its page.

The page is docs/measured/replication.md. Tables and figure are made from the curves committed in
docs/measured/replication/ and written between the page's marks; the rest of the page is written by hand. With --run the
study is first run or continued, and its curves are written again; with --seeds only the table of pass@4 and prompts is.

    python benchmarks/replication.py [--run] [--parallel 2] [--seeds 0,1]
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.marks import between
from sweeps.curve import FLOPS, VIRTUAL_HOURS, Array, Curve, make_curve
from sweeps.decide.at_k import at_k
from sweeps.decide.margin import MARGIN
from sweeps.decide.pairwise import Difference, compare
from sweeps.decide.rank import rank
from sweeps.decide.standing import draw_asymptotes
from sweeps.fit.fit import Fit, Interval, fit_curves
from sweeps.fit.fit import format_interval as display
from sweeps.fit.predict import quantiles
from sweeps.parallel import cores
from sweeps.run.journal import JournalView
from sweeps.run.passes import read_passes
from sweeps.source import load

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "outputs" / "replication"
FOLDER = ROOT / "docs" / "measured" / "replication"
CURVES, STEPS, PASSES = (FOLDER / f"{name}.csv" for name in ("curves", "steps", "passes"))
PAGE = ROOT / "docs" / "measured" / "replication.md"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
BASE = "scalerl"
UNDECIDED = "undecided"
REWARD = "eval/heldout/pass_rate"
# Columns of compute in the committed table, and the journals' axes.
AXES = {"flops": FLOPS, "virtual_device_hours": VIRTUAL_HOURS}
# Columns of a point. `sd` is the name under which `scalerl fit` reads the standard error of the reward.
POINT = ("recipe", "seed", "step", *AXES, "reward", "sd")
# pass@4, and shares of held-out prompts: passed by none or all of four completions, gained or lost since the first
# evaluation.
AT_K = "eval/heldout/pass@4"
PROMPTS = ("never", "always", "gained", "lost")
# Metrics whose means over a run's steps show whether a mechanism could act at all.
METRICS = ("train/clip_fraction", "train/logprob_gap", "train/truncated", "train/zero_variance", "train/staleness_mean")
_FAR = f"{BASE}+async_mode=ppo_off_policy+async_mode.k=32"
_SHORT = f"{BASE}+context.max_new_tokens=12+thinking.interrupt_from=5+thinking.interrupt_to=7"


def _variant(name: str) -> str:
    return f"{BASE}+{name}"


HIGHER, SAME, FASTER = "has the higher A", "has the same A", "takes less compute"


@dataclass(frozen=True)
class Finding:
    """A finding of the paper on two recipes.

    Attributes:
        text: the finding in words.
        source: section of the paper; empty if the paper does not compare this pair.
        ours, other: labels of the recipes.
        says: the claim on `ours` compared with `other`: `HIGHER`, `SAME` or `FASTER`.
        axis: column of compute for the comparison. Virtual device hours correspond to the paper's GPU hours. Models of
            different sizes are compared by FLOPs, because the virtual cluster's rates do not depend on size.
    """

    text: str
    source: str
    ours: str
    other: str
    says: str
    axis: str = "virtual_device_hours"


_DAPO, _GSPO, _REINFORCE = (_variant(f"loss={name}") for name in ("dapo", "gspo", "reinforce"))
_PPO_8, _ON_POLICY = (_variant(f"async_mode={name}") for name in ("ppo_off_policy", "on_policy"))
_FEW, _MANY = (
    _variant(f"batch.prompts={prompts}+evaluation.every_n_steps={every}") for prompts, every in ((4, 20), (64, 3))
)
_TWO, _THIRTY_TWO = (_variant(f"batch.rollouts=128+batch.completions={count}") for count in (2, 32))
_SMALL, _LARGE = (_variant(f"model.width={width}") for width in (32, 128))
_PROMPT, _UNIFORM = _variant("normalization=prompt"), _variant("resampling=uniform")
_FLOPS = "flops"

FINDINGS = (
    Finding("CISPO ends higher than DAPO's loss", "3.2", BASE, _DAPO, HIGHER),
    Finding("CISPO ends higher than DAPO's loss: 32 updates off-policy", "3.2", _FAR, f"{_FAR}+loss=dapo", HIGHER),
    Finding("GSPO ends higher than DAPO's loss", "3.2", _GSPO, _DAPO, HIGHER),
    Finding("a head in FP32 ends higher", "3.2", _variant("precision=bf16"), _variant("precision=bf16_head"), HIGHER),
    Finding("prompt average ends higher than sample average", "3.2", BASE, _variant("aggregation=sample"), HIGHER),
    Finding("prompt average ends higher than token average", "3.2", BASE, _variant("aggregation=token"), HIGHER),
    Finding("filtering groups of zero variance ends higher", "3.2", BASE, _variant("filter=none"), HIGHER),
    Finding("leaving out solved prompts ends higher", "3.2", BASE, _UNIFORM, HIGHER),
    Finding("normalization by batch has the same ceiling as by prompt", "3.2", BASE, _PROMPT, SAME),
    Finding(
        "normalization by batch has the same ceiling as no normalization",
        "3.2",
        BASE,
        _variant("normalization=none"),
        SAME,
    ),
    Finding("PipelineRL-8 has the same ceiling as PPO-off-policy-8", "3.1", BASE, _PPO_8, SAME),
    Finding("a larger batch ends higher: 16 prompts against 4", "4", BASE, _FEW, HIGHER),
    Finding("a larger batch ends higher: 64 prompts against 16", "4", _MANY, BASE, HIGHER),
    Finding("a longer context ends higher: 16 tokens against 12", "4", BASE, _SHORT, HIGHER),
    Finding("a larger model ends higher: width 64 against 32", "4", BASE, _SMALL, HIGHER, _FLOPS),
    Finding("a larger model ends higher: width 128 against 64", "4", _LARGE, BASE, HIGHER, _FLOPS),
    Finding("completions per prompt are second order: 8 against 2", "4", BASE, _TWO, SAME),
    Finding("completions per prompt are second order: 8 against 32", "4", BASE, _THIRTY_TWO, SAME),
    Finding("PipelineRL-8 is faster than PPO-off-policy-8", "3.1", BASE, _PPO_8, FASTER),
    Finding("CISPO is faster than DAPO's loss", "5", BASE, _DAPO, FASTER),
    Finding("leaving out solved prompts is faster", "5", BASE, _UNIFORM, FASTER),
    Finding("normalization by batch is faster than by prompt", "5", BASE, _PROMPT, FASTER),
    Finding("a smaller batch is faster: 16 prompts against 64", "4", BASE, _MANY, FASTER),
    Finding("a shorter context is faster: 12 tokens against 16", "4", _SHORT, BASE, FASTER),
)
OURS = (
    Finding("PipelineRL-8 is faster than on-policy", "", BASE, _ON_POLICY, FASTER),
    Finding("PipelineRL-8 has the same ceiling as on-policy", "", BASE, _ON_POLICY, SAME),
    Finding("a truncated ratio ends higher than none (REINFORCE)", "", BASE, _REINFORCE, HIGHER),
    Finding("a truncated ratio is faster than none", "", BASE, _REINFORCE, FASTER),
    Finding("a truncated ratio ends higher: 32 updates off-policy", "", _FAR, f"{_FAR}+loss=reinforce", HIGHER),
    Finding("a smaller model is faster: width 64 against 128", "", BASE, _LARGE, FASTER, _FLOPS),
    Finding("fewer completions per prompt are faster: 8 against 32", "", BASE, _THIRTY_TWO, FASTER),
)


def run(parallel: int, seeds: str | None = None) -> None:
    """Run or continue the study, or some of its seeds, and write its tables to docs/measured/replication."""
    launch = ["train", "--multirun", "experiment=replication", f"launch.max_parallel={parallel}"]
    launch += [] if seeds is None else [f"seed={seeds}"]
    subprocess.run([SCALERL, *launch], check=True, cwd=ROOT)
    views = sorted(load([STUDY]).runs, key=lambda view: (view.header["recipe"], view.header["seed"]))
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = [view for view in views if seeds is None or str(view.header["seed"]) in seeds.split(",")]
    write_table(PASSES, (*POINT, "pass@4", "pass@4_sd", *PROMPTS), (row for view in chosen for row in passes(view)))
    if seeds is not None:
        return
    write_table(CURVES, POINT, (row for view in views for row in points(view)))
    write_table(STEPS, ("recipe", "seed", "metric", "mean"), (row for view in views for row in means(view)))


def points(view: JournalView) -> Iterable[tuple[object, ...]]:
    """Yield one row per evaluation."""
    for record in view.of_kind("eval"):
        at = record.metrics
        compute = (f"{at[axis]:.6g}" for axis in AXES.values())
        yield (*_of(view), record.step, *compute, f"{at[REWARD]:.6g}", f"{at[f'{REWARD}_se']:.4g}")


def passes(view: JournalView) -> Iterable[tuple[object, ...]]:
    """Yield one row per evaluation: a point, pass@4, and shares of prompts."""
    metrics = {record.step: record.metrics for record in view.of_kind("eval")}
    passes_by_step = read_passes(view.path.parent, "heldout", list(metrics))
    first = np.array(passes_by_step[min(passes_by_step)].passed)
    for point in points(view):
        at, prompt_passes = metrics[int(str(point[2]))], passes_by_step[int(str(point[2]))]
        passed, scored = np.array(prompt_passes.passed), np.array(prompt_passes.scored)
        shares = (passed == 0, passed == scored, (first == 0) & (passed > 0), (first > 0) & (passed == 0))
        yield (*point, f"{at[AT_K]:.6g}", f"{at[f'{AT_K}_se']:.4g}", *(f"{share.mean():.4g}" for share in shares))


def means(view: JournalView) -> Iterable[tuple[object, ...]]:
    """Yield rows with the shares of steps in which changed choices had an effect, and means of METRICS over steps."""
    steps = [record.metrics for record in view.of_kind("train")]
    for name, value in steps[-1].items():
        if name.startswith("mechanism/"):
            yield (*_of(view), name, f"{value:.4g}")
    for name in METRICS:
        yield (*_of(view), name, f"{fmean(each[name] for each in steps if name in each):.4g}")


def _of(view: JournalView) -> tuple[str, int]:
    return str(view.header["recipe"]), int(view.header["seed"])


def write_table(path: Path, names: Sequence[str], rows: Iterable[tuple[object, ...]]) -> None:
    """Write a table as CSV with Unix line ends."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows(rows)


@dataclass(frozen=True, eq=False)
class Study:
    """All recipes over one axis of compute."""

    fits: dict[str, Fit]

    @classmethod
    def of(cls, axis: str) -> Study:
        """Fit the committed curves over an axis."""
        curves = load([CURVES], x=axis, y="reward").curves
        return cls({fit.recipe: fit for fit in fit_curves(curves, workers=cores())})

    @cached_property
    def asymptotes(self) -> dict[str, Array]:
        """Joint draws of every recipe's asymptote, including the spread between seeds; refused recipes are included.

        For a recipe that does not rise, the value at twice its compute is used.
        """
        return {
            recipe: one.asymptote()
            for recipe, one in zip(self.fits, draw_asymptotes(list(self.fits.values())), strict=True)
        }

    def compared(self, findings: Sequence[Finding]) -> dict[tuple[str, str], Difference]:
        """Compare each pair like `scalerl compare`; the bounds hold simultaneously for all pairs."""
        pairs = list(dict.fromkeys((finding.ours, finding.other) for finding in findings))
        rows = compare(list(self.fits.values()), pairs).rows if pairs else ()
        return {(row.recipe, row.other): row for row in rows}


def interval(draws: Array) -> tuple[float, float, float]:
    """Return median and 95% bounds of draws, which may be infinite."""
    quantile_summary = quantiles(draws)
    value, low, high = (
        math.inf if each is None else each
        for each in (quantile_summary.value, quantile_summary.low, quantile_summary.high)
    )
    return value, low, high


def verdict(says: str, low: float, high: float) -> str:
    """Return the verdict of a 95% interval on a claim.

    The interval is of the difference of A or, for FASTER, of the compute of `ours` divided by that of `other`. A tie in
    A is a difference below MARGIN. NaN bounds are undecided.
    """
    if says == FASTER:
        return "**replicates**" if high < 1 else "**the other way round**" if low > 1 else UNDECIDED
    if says == HIGHER:
        if low > 0:
            return "**replicates**"
        if high < 0:
            return "**the other way round**"
        return "**does not show**" if high < MARGIN else UNDECIDED
    if low > -MARGIN and high < MARGIN:
        return "**replicates**"
    return "**the ceiling moves**" if low > 0 or high < 0 else UNDECIDED


def bounds(estimate: Interval | None) -> tuple[float, float, float]:
    """Return value, low and high; infinite where open, NaN if there is no interval."""
    if estimate is None:
        return (math.nan,) * 3
    low = -math.inf if estimate.low is None else estimate.low
    return tuple(math.inf if each is None else each for each in (estimate.value, low, estimate.high))  # type: ignore[return-value]


def cells_of(finding: Finding, row: Difference, by_metric: Mapping[tuple[str, str], float]) -> tuple[str, list[str]]:
    """Return the verdict and the row of the table."""
    verdict_text = verdict(finding.says, *bounds(row.ratio if finding.says == FASTER else row.A)[1:])
    departing = finding.ours if finding.other in (BASE, _FAR) else finding.other
    acted = [
        f"{metric.removeprefix('mechanism/')} {value:.2f}"
        for (recipe, metric), value in sorted(by_metric.items())
        if metric.startswith("mechanism/") and recipe == departing
    ]
    cells = [
        finding.text,
        *([finding.source] if finding.source else []),
        verdict_text if finding.source else verdict_text.replace("replicates", "yes"),
        display(row.A, "+.3f"),
        display(row.R, "+.3f"),
        display(row.ratio, ".2f"),
        ", ".join(acted) or "-",
    ]
    return verdict_text, cells


def rows_of(
    part: Sequence[Finding], studies: Mapping[str, Study], by_metric: Mapping[tuple[str, str], float]
) -> list[tuple[str, list[str]]]:
    """Return verdict and row of each finding. Findings over the same axis are compared together."""
    on = {axis: study.compared([each for each in part if each.axis == axis]) for axis, study in studies.items()}
    return [cells_of(each, on[each.axis][each.ours, each.other], by_metric) for each in part]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(f"| {' | '.join(row)} |" for row in rows)]


def recipes(study: Study, by_metric: dict[tuple[str, str], float]) -> list[str]:
    """Return the table of recipes: measured rewards, fit, and METRICS."""
    rows = []
    for recipe, fit in study.fits.items():
        curve = fit.curve
        last = [curve.reward[curve.seed == seed][-3:].mean() for seed in sorted(set(curve.seed))]
        named = fit.identifiable and fit.A.value is not None
        value, low, high = interval(study.asymptotes[recipe])
        rows.append(
            [
                shown(recipe),
                str(len(last)),
                f"{fmean(map(float, last)):.3f} ({min(last):.3f} to {max(last):.3f})",
                f"{fit.A.value:.3f}" if named else fit.verdict,
                f"{value:.3f} [{low:.3f}, {high:.3f}]",
                *(f"{by_metric[recipe, name]:.3g}" for name in METRICS),
            ]
        )
    names = ["recipe", "seeds", "last three evaluations (range of seeds)", "A fitted", "A in the joint posterior"]
    return table([*names, *(name.split("/")[1].replace("_", " ") for name in METRICS)], rows)


def prompts(path: Path) -> list[str]:
    """Return the ranking by pass@1 and pass@4 as a sentence, and the table of both with the shares of prompts."""
    with path.open(newline="") as file:
        table_rows = list(csv.DictReader(file))
    by_recipe: dict[str, list[dict[str, str]]] = {}
    for row in table_rows:
        by_recipe.setdefault(row["recipe"], []).append(row)
    by_one, by_k = (
        rank(fit_curves([_curve(recipe, rows, *names) for recipe, rows in by_recipe.items()], workers=cores()))
        for names in (("reward", "sd"), ("pass@4", "pass@4_sd"))
    )
    ranked_at_k = at_k(by_one, by_k, AT_K)
    assert ranked_at_k is not None
    cells = []
    for recipe, rows in by_recipe.items():
        runs = [[row for row in rows if row["seed"] == seed] for seed in sorted({row["seed"] for row in rows})]
        last = [row for seed_rows in runs for row in seed_rows[-3:]]
        ends = [seed_rows[-1] for seed_rows in runs]
        rates = [f"{fmean(float(row[name]) for row in last):.3f}" for name in ("reward", "pass@4")]
        shares = [f"{fmean(float(row[name]) for row in ends):.3f}" for name in PROMPTS]
        cells.append([shown(recipe), str(len(runs)), *rates, *shares])
    start = {name: fmean(float(row[name]) for row in table_rows if row["step"] == "0") for name in PROMPTS[:2]}
    sentence = (
        f"At {ranked_at_k.compute:.3g} virtual device hours, which all recipes spent, {ranked_at_k.sentence}. Before "
        f"training, none of the four completions passes in {start['never']:.0%} of the prompts, and all four pass in "
        f"{start['always']:.0%}."
    )
    names = ["recipe", "seeds", "pass@1, last three", "pass@4, last three", "at 0, end", "at 1, end", "gained", "lost"]
    return [sentence, "", *table(names, cells)]


def _curve(recipe: str, rows: Sequence[Mapping[str, str]], reward: str, sd: str) -> Curve:
    axis = "virtual_device_hours"
    compute, rewards, errors = ([float(row[name]) for row in rows] for name in (axis, reward, sd))
    seeds = np.array([row["seed"] for row in rows])
    return make_curve(recipe, compute, rewards, seeds, errors, axis, reward, bounds=(0.0, 1.0))


def shown(recipe: str) -> str:
    """Return a recipe's label without the common base."""
    return f"`{recipe.removeprefix(BASE + '+')}`"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw one panel per part of the study, with the base: the mean of seeds over virtual device hours."""
    parts: dict[str, Callable[[str], bool]] = {
        "loss and precision": lambda name: name.startswith(("loss", "precision")),
        "aggregation, normalization": lambda name: name.startswith(("aggregation", "normalization")),
        "filter, resampling, async mode": lambda name: (
            name.startswith(("filter", "resampling")) or name in ("async_mode=ppo_off_policy", "async_mode=on_policy")
        ),
        "batch": lambda name: name.startswith("batch"),
        "context, model": lambda name: name.startswith(("context", "model")),
        "32 updates off-policy": lambda name: "k=32" in name,
    }
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), sharex=True, sharey=True, layout="constrained")
    for panel, (title, belongs) in zip(axes.flat, parts.items(), strict=True):
        for curve in curves:
            name = curve.recipe.removeprefix(f"{BASE}+")
            if curve.recipe != BASE and not belongs(name):
                continue
            seeds = [curve.seed == seed for seed in sorted(set(curve.seed))]
            length = min(int(mask.sum()) for mask in seeds)
            mean = [np.mean([row[mask][:length] for mask in seeds], axis=0) for row in (curve.compute, curve.reward)]
            grey = {"color": "0.35", "linestyle": "--"} if curve.recipe == BASE else {}
            panel.plot(mean[0][1:], mean[1][1:], label=name.split("+thinking")[0], linewidth=1.4, **grey)
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.supxlabel("virtual device hours")
    figure.supylabel("held-out pass rate, mean of seeds")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the study first, or what is left of it")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--seeds", help="with --run: these only, such as 0,1; then only passes.csv is written")
    parser.add_argument("--page", default=PAGE, type=Path, help="written instead of docs/measured/replication.md")
    options = parser.parse_args()
    if options.run:
        run(options.parallel, options.seeds)
    with STEPS.open() as file:
        rows = list(csv.DictReader(file))
    keys = {(row["recipe"], row["metric"]) for row in rows}
    by_metric = {
        key: fmean(float(row["mean"]) for row in rows if (row["recipe"], row["metric"]) == key) for key in sorted(keys)
    }
    studies = {axis: Study.of(axis) for axis in AXES}
    hours = studies["virtual_device_hours"]
    draw([fit.curve for fit in hours.fits.values()], options.page.parent / "replication" / "curves.png")
    done, extra = (rows_of(part, studies, by_metric) for part in (FINDINGS, OURS))
    decided = sum(finding_verdict != UNDECIDED for finding_verdict, _ in done)
    head = [
        "here",
        "difference of A",
        "difference of pass rate at common compute",
        "times the compute",
        "share of steps with an effect",
    ]
    runs = len({(row["recipe"], row["seed"]) for row in rows})
    summary = (
        f"{len(hours.fits)} recipes, {runs} runs. **{decided} of {len(done)} comparisons are decided**, one way or the "
        "other, at a level of 95% for all of them together."
    )
    text = PAGE.read_text()
    for mark, lines in (
        ("findings", [summary, "", *table(["the paper's finding", "section", *head], [cells for _, cells in done])]),
        ("ours", table(["not in the paper", *head], [cells for _, cells in extra])),
        ("recipes", recipes(hours, by_metric)),
        ("prompts", prompts(PASSES)),
    ):
        text = between(text, mark, lines)
    options.page.write_text(text)
    print(f"{decided} of {len(done)} decided; {options.page} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
