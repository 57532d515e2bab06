"""Measure CPU seconds and memory of the controller of a study of ten thousand members, phase by phase.

    python benchmarks/scale.py [--members 1000 10000] [--recipes 9] [--values 4] [--ranking]

Nothing trains: jobs of a fake scheduler end at once and leave simulated journals, and the files that a batch script
leaves in its submission's folder. One job in twenty fails at first. Members are the nine recipes of the leave-one-out,
times values of the learning rate, times as many seeds as needed. `--recipes` sets another number of recipes, such as
the number of members. A phase is linear if its ratio equals the ratio of members. Every phase runs in a new process,
because peak memory (`ru_maxrss`) never decreases, and its seconds start after the imports. Seconds are CPU time (user
and system, including child processes), so other work on the machine does not count.

The last rows are a controller that follows 256 running members with journals of 10,000 steps (15 MB each), as it does
for MLflow: its first look at all of them, the first look of a controller that takes over from another, and a later look
after each member has written one more line. Every eighth journal is a real file; the others are hard links to it.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np

from sweeps.executor.failure import retries
from sweeps.executor.node.attempts import AttemptLog
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.executor.slurm.handover import Request
from sweeps.executor.slurm.scheduler import JobInfo
from sweeps.launch.ledger import MemberState
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study
from sweeps.launch.status import counts, overview
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec

EVALUATIONS = 33
# A tiny base model, because making the model is not part of planning.
QUICK = ["model.batches=1", "model.width=32", "model.layers=1"]
SPECS = "specs.pickle"
PREPARED = "prepared"
FIRST_FAILS = 20  # one member in this many fails at first
RUNNING, STEPS, REAL = 256, 10_000, 8  # running members, their steps so far, and how many share a file

Phase = Callable[[argparse.Namespace], str]


def peak_mb(usage_of: int = resource.RUSAGE_SELF) -> float:
    """Return the peak memory so far, of this process or of the largest child."""
    return resource.getrusage(usage_of).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def cpu_s() -> float:
    """Return the CPU seconds so far, of this process and of its ended children."""
    of_this_process, of_children = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return of_this_process.ru_utime + of_this_process.ru_stime + of_children.ru_utime + of_children.ru_stime


def grid(members: int, recipes: int, values: int) -> list[list[str]]:
    """Return override lists: the leave-one-out at several learning rates, or one learning rate per recipe."""
    variants = [
        *("none", "loss_dapo", "precision_bf16_head", "length_control_penalty", "normalization_prompt"),
        *("resampling_uniform", "filter_none", "async_mode_ppo_off_policy", "aggregation_sample"),
    ]
    if recipes == len(variants):
        rates = [f"optimizer.lr={1e-4 * (1 + number):.6g}" for number in range(values)]
        choices = [[f"variant={variant}", rate] for rate in rates for variant in variants]
    else:
        choices = [["variant=none", f"optimizer.lr={1e-4 * (1 + number / 100):.6g}"] for number in range(recipes)]
    rows = [[*choice, f"seed={seed}"] for seed in range(-(-members // len(choices))) for choice in choices]
    return [["experiment=leave_one_out", *row, *QUICK] for row in rows[:members]]


def write_journals(folder: Path, specs: Sequence[RunSpec]) -> None:
    """Write the members' journals in advance, with 33 evaluations and 32 train records each."""
    from sweeps.run import journal

    journal.os.fsync = lambda _: None  # type: ignore[attr-defined]  # these files need not survive a power cut
    rng = np.random.default_rng(2510)
    labels = sorted({spec.recipe for spec in specs})
    curves = {label: (0.5 + 0.35 * rng.random(), 1.3 + rng.random(), 2 + 2 * rng.random()) for label in labels}
    for spec in specs:
        a, b, c_mid = curves[spec.recipe]
        seed_asymptote = a + 0.01 * rng.standard_normal()
        ticks = map(float, count())
        written = journal.Journal(folder / PREPARED / spec.run, clock=ticks.__next__)
        written.header(**spec.header(), device="cpu")
        for point, hours in enumerate(np.linspace(0.0, 16.0, EVALUATIONS).tolist()):
            compute = {"compute/virtual_device_hours": hours, "compute/flops": hours * 1e15}
            if hours:
                written.record("train", 10 * point, {f"train/{k}": rng.random() for k in range(12)} | compute)
            rate = (
                rng.binomial(2000, 0.15 + (seed_asymptote - 0.15) * (1 / (1 + (c_mid / hours) ** b) if hours else 0.0))
                / 2000
            )
            error = float(np.sqrt(rate * (1 - rate) / 2000))
            written.record(
                "eval", 10 * point, {"eval/heldout/pass_rate": rate, "eval/heldout/pass_rate_se": error} | compute
            )
        written.checkpoint(spec.steps)
        written.end(spec.steps, "finished")
        written.close()


@dataclass
class Instant:
    """A scheduler whose jobs end at once. They leave their prepared journals, or fail at first and leave none."""

    folder: Path
    jobs: dict[str, JobInfo] = field(default_factory=dict)
    submissions: int = 0
    failed: set[str] = field(default_factory=set)

    def submit(self, request: Request) -> str:
        """Run all jobs of a submission. Their time is not counted as the controller's."""
        begin = cpu_s()
        job = self._run(Path(request.folder))
        _job_seconds.append(cpu_s() - begin)
        return job

    def _run(self, folder: Path) -> str:
        manifest = json.loads((folder / "submission.json").read_text())
        self.submissions += 1
        is_array = len(manifest["members"]) > 1
        for task, run in enumerate(manifest["members"]):
            target = self.folder / "study" / "runs" / run
            job = f"{self.submissions}_{task}" if is_array else str(self.submissions)
            (folder / f"started-{job}-0").touch()
            (folder / f"{job}_0_log.out").write_text("srun: a line\n" * 20)
            failed = run not in self.failed and task % FIRST_FAILS == 0
            if failed:
                self.failed.add(run)
            else:
                (self.folder / PREPARED / run / "metrics.jsonl").rename(target / "metrics.jsonl")
                log = AttemptLog(target, manifest["submission"], job, 0, "n1")
                log.begin(-1)
                log.end("finished")
            state = "FAILED" if failed else "COMPLETED"
            self.jobs[job] = JobInfo(job, state, "n1", "", f"study-{manifest['submission']}")
        return str(self.submissions)

    def queue(self) -> dict[str, JobInfo]:
        """Return all jobs."""
        return dict(self.jobs)

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """Return the requested jobs."""
        return {job: self.jobs[job] for job in jobs if job in self.jobs}

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return exit code 1 for each job."""
        return dict.fromkeys(jobs, "1:0")

    def array_limit(self) -> int:
        """Return SLURM's default."""
        return 1001

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Do nothing: no job is running."""


# Phases. Each imports its modules before `started()`, so that imports do not count.


def started() -> None:
    """Start the clock, after the imports."""
    _marks.append((cpu_s(), peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)))


_marks: list[tuple[float, float, float]] = []
_job_seconds: list[float] = []


def planning(options: argparse.Namespace) -> str:
    """Plan: compose, check and identify the members."""
    import lightning_scalerl.member.identify as planner

    lists = grid(options.members, options.recipes, options.values)
    planner.plan_members(lists[:1])  # makes the base model, which does not count
    started()
    specs = planner.plan_members(lists)
    if not (options.folder / SPECS).exists():
        (options.folder / SPECS).write_bytes(pickle.dumps(specs))
    return f"{len(specs)} members of {len({spec.curve for spec in specs})} recipes"


def running(options: argparse.Namespace) -> str:
    """Run the study: write specs and ledger, submit in arrays, and classify each job when it ends."""
    specs = pickle.loads((options.folder / SPECS).read_bytes())
    started()
    study = Study(options.folder / "study", specs)
    settings = SlurmCluster({"timeout_min": 60}, poll_s=0.01)
    axis = "compute/virtual_device_hours"
    plan = LaunchSettings("slurm", "nothing:nothing", (), 1, 1, None, axis, settings, retries())
    with _at_once(options.folder), prepare_study(study, plan) as prepared:
        return _finished(prepared.commit({study.directory / LAUNCH_FILE: plan.text()}))


def _at_once(folder: Path) -> AbstractContextManager[object]:
    """Make `Instant` the scheduler of studies."""
    return patch.object(SlurmCluster, "scheduler", lambda cluster: Instant(folder))


def _finished(states: Mapping[str, MemberState]) -> str:
    return f"{sum(state.state == 'finished' for state in states.values())} of {len(states)} finished"


def status(options: argparse.Namespace) -> str:
    """Run `scalerl status`."""
    started()
    views = overview(options.folder / "study", Instant(options.folder))
    return counts(views)


def collecting(options: argparse.Namespace) -> str:
    """Run `scalerl collect` on the finished study, in another process than the one that ran it."""
    started()
    study = Study.read(options.folder / "study")
    plan = LaunchSettings.read(study.directory)
    with _at_once(options.folder), prepare_study(study, plan, again=False) as prepared:
        return _finished(prepared.commit(detach=True))


def long_journal(path: Path) -> None:
    """Write a journal of 10,000 steps of 1.5 KB, with a checkpoint per hundred and an evaluation per fifty steps."""
    metrics = {f"train/some_metric_{number}": number / 7 for number in range(40)}
    with path.open("w") as handle:

        def write(**entry: object) -> None:
            handle.write(json.dumps(entry, separators=(",", ":")) + "\n")

        write(kind="run", time=0.0, run=path.parent.name, recipe="r", seed=0)
        for step in range(1, STEPS + 1):
            write(kind="train", time=float(step), step=step, metrics=metrics)
            if step % 50 == 0:
                write(kind="eval", time=float(step), step=step, metrics={"eval/heldout/pass_rate": 0.5})
            if step % 100 == 0:
                write(kind="checkpoint", time=float(step), step=step)


def _running(options: argparse.Namespace) -> list[Path]:
    """Return the run directories of running members, the same for all phases."""
    folders = [options.folder / "long" / str(number) for number in range(RUNNING)]
    for number, folder in enumerate(folders):
        if not folder.exists():
            folder.mkdir(parents=True)
            first = folders[number - number % REAL] / "metrics.jsonl"
            if number % REAL:
                os.link(first, folder / "metrics.jsonl")
            else:
                long_journal(first)
    return folders


def following(options: argparse.Namespace) -> str:
    """Take the first look of the thread that feeds MLflow. Records that were sent are dropped from memory."""
    from sweeps.run.tail import JournalTail

    folders = _running(options)
    started()
    tails = [JournalTail(folder) for folder in folders]
    records = 0
    for tail in tails:
        records += len(tail.update().durable())
        tail.forget({"train": STEPS, "eval": STEPS})
    return f"first look at {len(folders)} journals of {STEPS} steps: {records} records"


def following_anew(options: argparse.Namespace) -> str:
    """Take the first look of a second controller, after the first one has sent all but the last hundred steps."""
    from sweeps.run.tail import JournalTail

    folders = _running(options)
    started()
    records = 0
    for folder in folders:
        tail = JournalTail(folder)
        tail.forget({"train": STEPS - 100, "eval": STEPS - 100})
        records += len(tail.update().durable())
    return f"another controller's first look at the same: {records} records"


def following_on(options: argparse.Namespace) -> str:
    """Take the next look, after each member has written one more line."""
    from sweeps.run.tail import JournalTail

    folders = _running(options)
    tails = [JournalTail(folder) for folder in folders]
    for tail in tails:
        tail.update()
        tail.forget({"train": STEPS, "eval": STEPS})
    for folder in folders[::REAL]:
        with (folder / "metrics.jsonl").open("a") as handle:
            handle.write(f'{{"kind":"train","time":1.0,"step":{STEPS + 1},"metrics":{{"train/loss":1.0}}}}\n')
    started()
    new_records = 0
    for tail in tails:
        new_records += len(tail.update().records)
    return f"a later look at the same: {new_records} new records"


def ranking(options: argparse.Namespace) -> str:
    """Run `scalerl rank`: read, fit and rank."""
    from sweeps.decide.rank import rank
    from sweeps.fit.fit import fit_curves
    from sweeps.source.load import load

    started()
    fits = fit_curves(load([str(options.folder / "study")]).curves, workers=options.workers)
    ranking_result = rank(fits, workers=options.workers, brief=True)
    return f"{len(ranking_result.ranking)} recipes, {sum(fit.identifiable for fit in fits)} identifiable"


PHASES: dict[str, Phase] = {
    "planning": planning,
    "running": running,
    "status": status,
    "collecting": collecting,
    "ranking": ranking,
    "following": following,
    "following_anew": following_anew,
    "following_on": following_on,
}
OF_A_STUDY = ("planning", "running", "status", "collecting")


def run_phase(options: argparse.Namespace) -> None:
    """Run one phase in a child process, and print its measurements as JSON on the last line."""
    started_at = cpu_s()
    with contextlib.redirect_stdout(sys.stderr):
        phase_summary = PHASES[options.phase](options)
    ready, imports_mb, children_mb = _marks[-1]
    workers_mb = peak_mb(resource.RUSAGE_CHILDREN)
    phase_result = {
        "imports_s": ready - started_at,
        "imports_mb": imports_mb,
        "s": cpu_s() - ready - sum(_job_seconds),
        "peak_mb": peak_mb(),
        "workers_mb": workers_mb if workers_mb > children_mb else 0.0,  # imports may have started child processes too
        "what": phase_summary,
    }
    print(json.dumps(phase_result))


def measured(options: argparse.Namespace, name: str, folder: str, members: int) -> dict[str, float]:
    """Run one phase in a new process, and print its row."""
    command = [sys.executable, __file__, "--phase", name, "--folder", folder, "--members", str(members)]
    command += ["--recipes", str(options.recipes), "--values", str(options.values), "--workers", str(options.workers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    smaller_study_s = _rows.get(name)
    ratio = f"{row['s'] / smaller_study_s:7.1f}" if smaller_study_s else f"{'':7}"
    _rows[name] = row["s"]
    print(
        f"{name:15}{members:8}{row['s']:8.2f}{ratio}{row['peak_mb']:9.0f}{row['imports_s']:11.2f}"
        f"{row['imports_mb']:6.0f}{row['workers_mb']:11.0f}  {row['what']}",
        flush=True,
    )
    return row


_rows: dict[str, float] = {}


def of_a_study(options: argparse.Namespace, members: int) -> dict[str, dict[str, float]]:
    """Run all phases of one study; return their rows by name."""
    rows_by_phase = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*OF_A_STUDY, *(["ranking"] if options.ranking else [])):
            rows_by_phase[name] = measured(options, name, folder, members)
            if name == "planning":
                write_journals(Path(folder), pickle.loads((Path(folder) / SPECS).read_bytes()))
    return rows_by_phase


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--recipes", type=int, default=9)
    parser.add_argument("--values", type=int, default=4, help="of a setting, with the nine recipes")
    parser.add_argument("--ranking", action="store_true", help="also read, fit and rank")
    parser.add_argument("--workers", type=int, default=2, help="processes that share fits and comparisons")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        options.members = options.members[0]
        run_phase(options)
        return
    print(
        f"{'phase':15}{'members':>8}{'CPU s':>8}{'ratio':>7}{'peak MB':>9}{'imports s':>11}{'MB':>6}{'worker MB':>11}"
    )
    for members in options.members:
        of_a_study(options, members)
    _rows.clear()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("following", "following_anew", "following_on"):
            measured(options, name, folder, RUNNING)


if __name__ == "__main__":
    main()
