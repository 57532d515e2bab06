"""Which findings of ScaleRL show at this scale? The study `experiment=replication`, and its page docs/replication.md.

Tables and figure are made from the curves that are committed in docs/replication/ and written between the page's marks;
the words there are ours. With --run the study is run first, or what is left of it, and the curves are written anew.

    python benchmarks/replication.py [--run] [--parallel 2]
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sweeps.curve import FLOPS, VIRTUAL_HOURS, Array, Curve
from sweeps.decide.margin import MARGIN
from sweeps.decide.reach import first_above
from sweeps.decide.standing import joint
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import paths_over_seeds
from sweeps.parallel import cores
from sweeps.run.journal import JournalView
from sweeps.source import load

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "outputs" / "replication"
FOLDER = ROOT / "docs" / "replication"
CURVES, STEPS, FIGURE = FOLDER / "curves.csv", FOLDER / "steps.csv", FOLDER / "curves.png"
PAGE = ROOT / "docs" / "replication.md"
SCALERL = str(Path(sys.executable).with_name("scalerl"))
BASE = "scalerl"
REWARD = "eval/heldout/pass_rate"
# Column of the committed table, its axis, and the name in the page.
AXES = {"flops": (FLOPS, "FLOPs"), "virtual_device_hours": (VIRTUAL_HOURS, "virtual device hours")}
# Means over a run's steps that say whether a mechanism could act at all.
SEEN = ("train/clip_fraction", "train/logprob_gap", "train/truncated", "train/zero_variance", "train/staleness_mean")
_FAR = f"{BASE}+async_mode=ppo_off_policy+async_mode.k=32"
_SHORT = f"{BASE}+context.max_new_tokens=16+thinking.interrupt_from=9+thinking.interrupt_to=11"


def _variant(name: str) -> str:
    return f"{BASE}+{name}"


@dataclass(frozen=True)
class Finding:
    """What the paper says of two recipes, and where.

    raises: that `ours` has the higher asymptote than `other`; else that the two have the same and differ in efficiency.
    axis: column of compute on which they are compared.
    """

    text: str
    source: str
    ours: str
    other: str
    raises: bool
    axis: str = "flops"


FINDINGS = (
    Finding("CISPO ends higher than DAPO's loss", "3.2", BASE, _variant("loss=dapo"), True),
    Finding("GSPO ends higher than DAPO's loss", "3.2", _variant("loss=gspo"), _variant("loss=dapo"), True),
    Finding("the same, 32 updates off-policy", "3.2", _FAR, f"{_FAR}+loss=dapo", True),
    Finding("a truncated ratio ends higher than none (REINFORCE)", "5.1", BASE, _variant("loss=reinforce"), True),
    Finding("the same, 32 updates off-policy", "5.1", _FAR, f"{_FAR}+loss=reinforce", True),
    Finding("the head in FP32 raises the ceiling", "3.2", BASE, _variant("precision=bf16_head"), True),
    Finding("prompt average raises it, against sample average", "3.2", BASE, _variant("aggregation=sample"), True),
    Finding("prompt average raises it, against token average", "3.2", BASE, _variant("aggregation=token"), True),
    Finding("dropping groups without variance raises it", "3.2", BASE, _variant("filter=none"), True),
    Finding("retiring solved prompts raises it", "3.2", BASE, _variant("resampling=uniform"), True),
    Finding(
        "normalization moves only the efficiency: batch, prompt", "3.2", BASE, _variant("normalization=prompt"), False
    ),
    Finding("normalization moves only the efficiency: batch, none", "3.2", BASE, _variant("normalization=none"), False),
    Finding(
        "PipelineRL-8 moves only the efficiency, against PPO-off-policy-8",
        "3.1",
        BASE,
        _variant("async_mode=ppo_off_policy"),
        False,
        "virtual_device_hours",
    ),
    Finding(
        "eight steps of staleness cost nothing, against on-policy",
        "3.1",
        BASE,
        _variant("async_mode=on_policy"),
        False,
        "virtual_device_hours",
    ),
    Finding("a larger batch raises it: 16 prompts against 4", "4", BASE, _variant("batch.prompts=4"), True),
    Finding("a larger batch raises it: 64 prompts against 16", "4", _variant("batch.prompts=64"), BASE, True),
    Finding("a longer context raises it: 24 tokens against 16", "4", BASE, _SHORT, True),
    Finding("a larger model raises it: width 64 against 32", "4", BASE, _variant("model.width=32"), True),
    Finding("a larger model raises it: width 128 against 64", "4", _variant("model.width=128"), BASE, True),
    Finding(
        "completions a prompt at a fixed batch: second order, 8 against 2",
        "4",
        BASE,
        _variant("batch.rollouts=128+batch.completions=2"),
        False,
    ),
    Finding(
        "completions a prompt at a fixed batch: second order, 8 against 32",
        "4",
        BASE,
        _variant("batch.rollouts=128+batch.completions=32"),
        False,
    ),
)


def run(parallel: int) -> None:
    """Run what is left of the study, and write its curves to docs/replication."""
    launch = ("train", "--multirun", "experiment=replication", f"launch.max_parallel={parallel}")
    subprocess.run([SCALERL, *launch], check=True, cwd=ROOT)
    views = sorted(load([STUDY]).runs, key=lambda view: (view.header["recipe"], view.header["seed"]))
    FOLDER.mkdir(parents=True, exist_ok=True)
    _write(CURVES, ("recipe", "seed", "step", *AXES, "reward", "sd"), (row for view in views for row in points(view)))
    _write(STEPS, ("recipe", "seed", "metric", "mean"), (row for view in views for row in means(view)))


def points(view: JournalView) -> Iterable[tuple[object, ...]]:
    """One row an evaluation."""
    for record in view.of_kind("eval"):
        at = record.metrics
        compute = (f"{at[axis]:.6g}" for axis, _ in AXES.values())
        yield (*_of(view), record.step, *compute, f"{at[REWARD]:.6g}", f"{at[f'{REWARD}_se']:.4g}")


def means(view: JournalView) -> Iterable[tuple[object, ...]]:
    """The shares of steps in which departures acted, and means over steps."""
    steps = [record.metrics for record in view.of_kind("train")]
    for name, value in steps[-1].items():
        if name.startswith("mechanism/"):
            yield (*_of(view), name, f"{value:.4g}")
    for name in SEEN:
        yield (*_of(view), name, f"{fmean(each[name] for each in steps if name in each):.4g}")


def _of(view: JournalView) -> tuple[str, int]:
    return str(view.header["recipe"]), int(view.header["seed"])


def _write(path: Path, names: Sequence[str], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows(rows)


@dataclass(frozen=True, eq=False)
class Study:
    """All recipes over one axis of compute."""

    axis: str
    fits: dict[str, Fit] = field(default_factory=dict)

    @classmethod
    def of(cls, axis: str) -> Study:
        """Fitted to the committed curves."""
        curves = load([CURVES], x=axis, y="reward").curves
        return cls(axis, {fit.recipe: fit for fit in fit_curves(curves, workers=cores())})

    @cached_property
    def asymptotes(self) -> dict[str, Array]:
        """Joint draws of what every recipe comes to, between seeds included; a refused one with all its width."""
        return {recipe: one.asymptote() for recipe, one in zip(self.fits, joint(list(self.fits.values())), strict=True)}


def interval(draws: Array) -> tuple[float, float, float]:
    """Median and 95% interval."""
    low, value, high = np.quantile(draws, [0.025, 0.5, 0.975], method="inverted_cdf")
    return float(value), float(low), float(high)


def verdict(finding: Finding, low: float, high: float) -> str:
    """What the 95% interval of the difference of asymptotes says of a finding; a tie is a difference below MARGIN."""
    if finding.raises:
        if low > 0:
            return "**replicates**"
        if high < 0:
            return "**the other way round**"
        return "**does not show here**" if high < MARGIN else "undecided"
    if low > 0 or high < 0:
        return "**does not hold here: A moves**"
    return "**replicates**" if low > -MARGIN and high < MARGIN else "undecided"


def compared(finding: Finding, study: Study, seen: dict[tuple[str, str], float]) -> tuple[str, list[str]]:
    """The verdict and one row of the table."""
    ours, other = study.fits[finding.ours], study.fits[finding.other]
    delta, low, high = interval(study.asymptotes[finding.ours] - study.asymptotes[finding.other])
    said = verdict(finding, low, high)
    assert ours.window is not None and other.window is not None
    compute = min(ours.window[1], other.window[1])
    looks = np.linspace(0, compute, 201)
    paths = [paths_over_seeds(fit, looks) for fit in (ours, other)]
    gap = interval(paths[0][:, -1] - paths[1][:, -1])
    # Most of what the slower has gained by then: both have passed it, unless one has gained nothing.
    begin, ends = float(np.median(paths[0][:, 0])), [float(np.median(each[:, -1])) for each in paths]
    times = [first_above(each, looks, begin + 0.8 * (min(ends) - begin)) for each in paths]
    both = np.isfinite(times[0]) & np.isfinite(times[1]) & (times[1] > 0)
    ratio = "-"
    if min(ends) > begin and both.mean() > 0.95:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*interval(times[0][both] / times[1][both]))
    departing = finding.ours if finding.other in (BASE, _FAR) else finding.other
    acted = [
        f"{metric.removeprefix('mechanism/')} {value:.2f}"
        for (recipe, metric), value in sorted(seen.items())
        if metric.startswith("mechanism/") and recipe == departing
    ]
    cells = [
        finding.text,
        finding.source,
        said,
        f"{delta:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"{gap[0]:+.3f} [{gap[1]:+.3f}, {gap[2]:+.3f}]",
        ratio,
        ", ".join(acted) or "-",
    ]
    return said, cells


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(f"| {' | '.join(row)} |" for row in rows)]


def recipes(study: Study, seen: dict[tuple[str, str], float]) -> list[str]:
    """One row a recipe: what was measured and what the fit says."""
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
                *(f"{seen[recipe, name]:.3g}" for name in SEEN),
            ]
        )
    names = ["recipe", "seeds", "last three evaluations (range of seeds)", "A fitted", "A in the joint posterior"]
    return table([*names, *(name.split("/")[1].replace("_", " ") for name in SEEN)], rows)


def shown(recipe: str) -> str:
    """Without what all share."""
    return f"`{recipe.removeprefix(BASE + '+')}`"


def draw(curves: Sequence[Curve]) -> None:
    """Small multiples: each part of the study against its base, the mean of seeds over FLOPs."""
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
            length = min(int(of.sum()) for of in seeds)
            mean = [np.mean([row[of][:length] for of in seeds], axis=0) for row in (curve.compute, curve.reward)]
            grey = {"color": "0.35", "linestyle": "--"} if curve.recipe == BASE else {}
            panel.plot(mean[0][1:], mean[1][1:], label=name.split("+thinking")[0], linewidth=1.4, **grey)
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.supxlabel("FLOPs")
    figure.supylabel("held-out pass rate, mean of seeds")
    figure.savefig(FIGURE, dpi=100)


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the study first, or what is left of it")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    given = parser.parse_args()
    if given.run:
        run(given.parallel)
    with STEPS.open() as file:
        rows = list(csv.DictReader(file))
    keys = {(row["recipe"], row["metric"]) for row in rows}
    seen = {
        key: fmean(float(row["mean"]) for row in rows if (row["recipe"], row["metric"]) == key) for key in sorted(keys)
    }
    studies = {axis: Study.of(axis) for axis in AXES}
    flops = studies["flops"]
    draw([fit.curve for fit in flops.fits.values()])
    done = [compared(finding, studies[finding.axis], seen) for finding in FINDINGS]
    decided = sum(said != "undecided" for said, _ in done)
    head = ["the paper's finding", "section", "here", "difference of A [95%]", "of pass rate at common compute"]
    head += ["times the compute to a common pass rate", "acted in a share of steps"]
    runs = len({(row["recipe"], row["seed"]) for row in rows})
    summary = (
        f"{len(flops.fits)} recipes, {runs} runs. **{decided} of "
        f"{len(done)} comparisons are decided at 95%**, one way or the other."
    )
    text = PAGE.read_text()
    for mark, lines in (
        ("findings", [summary, "", *table(head, [cells for _, cells in done])]),
        ("recipes", recipes(flops, seen)),
    ):
        begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        section = "\n".join([begin, *lines, end])
        text, found = re.subn(f"{begin}.*{end}", lambda _, section=section: section, text, flags=re.DOTALL)
        assert found == 1, f"{PAGE}: the marks of {mark} are gone"
    PAGE.write_text(text)
    print(f"{decided} of {len(done)} decided; {PAGE.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
