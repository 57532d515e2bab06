"""A study of a thousand members: seconds and memory of what the controller does about them, phase by phase.

    python benchmarks/thousand.py [--members 1000] [--recipes 9] [--workers 2]

Nothing trains: jobs of a scheduler that is not there end at once and leave simulated journals. Nine recipes are those
of the leave-one-out, with seeds enough; other numbers of recipes are learning rates. Every phase runs in a child
process of its own, so that its peak memory is its own (`ru_maxrss` never falls again) and its seconds begin when its
imports are done; what the imports alone take stands in columns of their own. Numbers depend on what else the machine is
doing: the load is printed beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from sweeps.executor.attempts import AttemptLog
from sweeps.executor.failure import retries
from sweeps.executor.scheduler import JobInfo
from sweeps.executor.settings import JobSettings
from sweeps.launch.settings import LaunchSettings, run_study
from sweeps.launch.status import counts, overview
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec

EVALUATIONS = 33
# A base model that is made in a moment: making it is no part of planning.
QUICK = ["model.batches=1", "model.width=32", "model.layers=1"]
SPECS = "specs.pickle"
PREPARED = "prepared"

Phase = Callable[[argparse.Namespace], str]


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    """The most memory held so far: of this process, or of the largest child."""
    return resource.getrusage(who).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def grid(members: int, recipes: int) -> list[list[str]]:
    """Override lists: the leave-one-out, or as many learning rates as there are recipes."""
    variants = [
        *("none", "loss_dapo", "precision_bf16_head", "length_control_penalty", "normalization_prompt"),
        *("resampling_uniform", "filter_none", "async_mode_ppo_off_policy", "aggregation_sample"),
    ]
    if recipes == len(variants):
        choices = [[f"variant={variant}"] for variant in variants]
    else:
        choices = [["variant=none", f"optimizer.lr={1e-4 * (1 + number / 100):.6g}"] for number in range(recipes)]
    rows = [[*choice, f"seed={seed}"] for seed in range(-(-members // recipes)) for choice in choices]
    return [["experiment=leave_one_out", *row, *QUICK] for row in rows[:members]]


def write_journals(folder: Path, specs: Sequence[RunSpec]) -> None:
    """What the members will have written: 33 evaluations and 32 train records each."""
    from sweeps.run import journal

    journal.os.fsync = lambda _: None  # type: ignore[attr-defined]  # nothing here must outlive a power cut
    rng = np.random.default_rng(2510)
    labels = sorted({spec.recipe for spec in specs})
    curves = {label: (0.5 + 0.35 * rng.random(), 1.3 + rng.random(), 2 + 2 * rng.random()) for label in labels}
    for spec in specs:
        a, b, c_mid = curves[spec.recipe]
        own = a + 0.01 * rng.standard_normal()
        ticks = map(float, count())
        written = journal.Journal(folder / PREPARED / spec.run, clock=ticks.__next__)
        written.header(**spec.header(), device="cpu")
        for point, hours in enumerate(np.linspace(0.0, 16.0, EVALUATIONS).tolist()):
            compute = {"compute/virtual_device_hours": hours, "compute/flops": hours * 1e15}
            if hours:
                written.record("train", 10 * point, {f"train/{k}": rng.random() for k in range(12)} | compute)
            rate = rng.binomial(2000, 0.15 + (own - 0.15) * (1 / (1 + (c_mid / hours) ** b) if hours else 0.0)) / 2000
            error = float(np.sqrt(rate * (1 - rate) / 2000))
            written.record(
                "eval", 10 * point, {"eval/heldout/pass_rate": rate, "eval/heldout/pass_rate_se": error} | compute
            )
        written.checkpoint(spec.steps)
        written.end(spec.steps, "finished")
        written.close()


@dataclass
class Instant:
    """A scheduler whose jobs end at once, each with its prepared journal."""

    folder: Path
    jobs: dict[str, JobInfo] = field(default_factory=dict)

    def submit(self, script: Path) -> str:
        """Run everything."""
        manifest = json.loads((script.parent / "submission.json").read_text())
        number = 1 + len(self.jobs)
        for task, run in enumerate(manifest["members"]):
            target = self.folder / "study" / "runs" / run
            (self.folder / PREPARED / run / "metrics.jsonl").rename(target / "metrics.jsonl")
            job = f"{number}_{task}" if len(manifest["members"]) > 1 else str(number)
            log = AttemptLog(target, manifest["submission"], job, 0, "n1")
            log.begin(-1)
            log.end("finished")
            self.jobs[job] = JobInfo(job, "COMPLETED", "n1", "", f"study-{manifest['submission']}")
        return str(number)

    def queue(self) -> dict[str, JobInfo]:
        """All of them."""
        return dict(self.jobs)

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """All that are asked for."""
        return {job: self.jobs[job] for job in jobs if job in self.jobs}

    def array_limit(self) -> int:
        """Arrays of a hundred."""
        return 100

    def cancel(self, jobs: Sequence[str]) -> None:
        """Nothing runs."""


# Phases. Each imports what it needs before `started()`, so that seconds are those of the work.


def started() -> None:
    """Imports are done: the clock starts."""
    _marks.append((time.perf_counter(), peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)))


_marks: list[tuple[float, float, float]] = []


def planning(options: argparse.Namespace) -> str:
    """Compose, check and identify."""
    import lightning_scalerl.member.identify as planner

    lists = grid(options.members, options.recipes)
    planner.plan_members(lists[:1])  # makes the base model
    started()
    specs = planner.plan_members(lists)
    if not (options.folder / SPECS).exists():
        (options.folder / SPECS).write_bytes(pickle.dumps(specs))
    return f"{len(specs)} members of {len({spec.curve for spec in specs})} recipes"


def _run(options: argparse.Namespace, scheduler: Instant) -> str:
    study = Study(options.folder / "study", pickle.loads((options.folder / SPECS).read_bytes()))
    plan = LaunchSettings(
        "slurm", "nothing:nothing", (), 1, 1, None, "compute/virtual_device_hours", JobSettings({"timeout_min": 60}),
        retries(),
    )  # fmt: skip
    states = run_study(study, plan, scheduler=scheduler)
    plan.write(study.directory)
    return f"{sum(state.state == 'finished' for state in states.values())} of {len(states)} finished"


def running(options: argparse.Namespace) -> str:
    """Freeze, write the ledger, submit in arrays, see every job end, judge it."""
    started()
    return _run(options, Instant(options.folder))


def status(options: argparse.Namespace) -> str:
    """`scalerl status`."""
    started()
    views = overview(options.folder / "study", Instant(options.folder))
    return counts(views)


def collecting(options: argparse.Namespace) -> str:
    """`scalerl collect` of what is done: the same study taken over by another process."""
    started()
    return _run(options, Instant(options.folder))


def ranking(options: argparse.Namespace) -> str:
    """`scalerl rank`: reading, fitting, ranking."""
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import fit_curves
    from sweeps.source.load import load

    started()
    fits = fit_curves(load([str(options.folder / "study")]).curves, workers=options.workers, regions=False)
    found = rank(fits, workers=options.workers, brief=True)
    return f"{len(found.ranking)} recipes, {sum(fit.identifiable for fit in fits)} identifiable"


PHASES: dict[str, Phase] = {
    "planning": planning,
    "running": running,
    "status": status,
    "collecting": collecting,
    "ranking": ranking,
}


def run_phase(options: argparse.Namespace) -> None:
    """In a child: one phase, and what it took, as JSON on the last line."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        what = PHASES[options.phase](options)
    ready, imports_mb, children_mb = _marks[-1]
    workers_mb = peak_mb(resource.RUSAGE_CHILDREN)
    found = {
        "imports_s": ready - began,
        "imports_mb": imports_mb,
        "s": time.perf_counter() - ready,
        "peak_mb": peak_mb(),
        "workers_mb": workers_mb if workers_mb > children_mb else 0.0,  # imports run programs too
        "what": what,
    }
    print(json.dumps(found))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--recipes", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2, help="processes that share fits and comparisons")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        run_phase(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{options.members} members, {options.workers} workers, load {os.getloadavg()[0]:.1f} of {os.cpu_count()}"
        )
        print(f"{'phase':12}{'s':>8}{'peak MB':>9}{'imports s':>11}{'MB':>6}{'worker MB':>11}  what")
        total = 0.0
        for name in PHASES:
            command = [sys.executable, __file__, "--phase", name, "--folder", folder]
            command += ["--members", str(options.members), "--recipes", str(options.recipes)]
            command += ["--workers", str(options.workers)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            row = json.loads(done.stdout.splitlines()[-1])
            total += row["s"]
            print(
                f"{name:12}{row['s']:8.2f}{row['peak_mb']:9.0f}{row['imports_s']:11.2f}{row['imports_mb']:6.0f}"
                f"{row['workers_mb']:11.0f}  {row['what']}",
                flush=True,
            )
            if name == "planning":
                write_journals(Path(folder), pickle.loads((Path(folder) / SPECS).read_bytes()))
        print(f"{'together':12}{total:8.2f}")


if __name__ == "__main__":
    main()
