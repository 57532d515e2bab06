"""Tests that the work of a controller grows linearly with the number of members.

Counted are calls of Python and C functions, which do not depend on the machine's load. `benchmarks/scale.py` measures
seconds and megabytes at ten thousand members.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.executor.base import Launch
from sweeps.executor.failure import retries
from sweeps.executor.node.attempts import AttemptLog
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.executor.slurm.handover import Request
from sweeps.executor.slurm.scheduler import JobInfo, Scheduler
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.settings import LaunchSettings, prepare_study
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import JOURNAL_FILE, Journal
from sweeps.run.spec import RunSpec, make_spec

FEW, MANY = 200, 800
# Four times the members may need four times the calls, with a margin. A quadratic part would need sixteen times.
MAX_RATIO = 4.2


class InstantScheduler:
    """A scheduler whose jobs end at once and leave the usual files. Every fifth member fails at its first attempt."""

    def __init__(self, study: Path) -> None:
        self.study = study
        self.jobs: dict[str, JobInfo] = {}
        self.submissions = 0
        self.failed: set[str] = set()

    def submit(self, request: Request) -> str:
        """Submit an array; calls in its jobs are not counted, because they are not the controller's work."""
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return self._run(Path(request.folder))
        finally:
            sys.setprofile(profile)

    def _run(self, folder: Path) -> str:
        manifest = json.loads((folder / "submission.json").read_text())
        self.submissions += 1
        for task, run in enumerate(manifest["members"]):
            job = f"{self.submissions}_{task}" if len(manifest["members"]) > 1 else str(self.submissions)
            (folder / f"started-{job}-0").touch()
            (folder / f"{job}_0_log.out").write_text("srun: a line\n")
            fails = task % 5 == 0 and run not in self.failed
            if fails:
                self.failed.add(run)
            else:
                journal = Journal(self.study / "runs" / run)
                journal.header(run=run)
                journal.record("train", 1, {"train/loss": 1})
                journal.end(1, "finished")
                journal.close()
                log = AttemptLog(self.study / "runs" / run, manifest["submission"], job, 0, "n1")
                log.begin(-1)
                log.end("finished")
            state = "FAILED" if fails else "COMPLETED"
            self.jobs[job] = JobInfo(job, state, "n1", "", f"x-{manifest['submission']}")
        return str(self.submissions)

    def queue(self) -> dict[str, JobInfo]:
        """Return all jobs."""
        return dict(self.jobs)

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return exit code 1 for every job."""
        return dict.fromkeys(jobs, "1:0")

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """Return the queue's record of the jobs."""
        return {job: self.jobs[job] for job in jobs if job in self.jobs}

    def array_limit(self) -> int:
        """Return a limit that allows one array for all members."""
        return 10_000

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Do nothing, because no job runs."""


def count_calls(action: Callable[[], object]) -> int:
    """Count the calls of Python and C functions while `action` runs."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def members(number: int) -> list[RunSpec]:
    config: dict[str, Any] = {"loss": {"choice": "cispo"}, "budget": {"steps": 1}}
    return [make_spec({**config, "seed": seed}, {**config, "seed": seed}, "r", "r") for seed in range(number)]


PLAN = LaunchSettings(
    "slurm",
    "nothing:nothing",
    (),
    1,
    1,
    None,
    "compute/flops",
    None,
    retries(),
)


def count_calls_by_phase(folder: Path, number: int) -> dict[str, int]:
    """Count the calls of each phase of a study, without those of its jobs."""
    counts: dict[str, int] = {}
    specs, scheduler = members(number), InstantScheduler(folder)

    class InstantCluster(SlurmCluster):
        """A cluster with this scheduler."""

        def scheduler(self) -> Scheduler:
            return scheduler

    cluster = InstantCluster({"timeout_min": 60}, poll_s=0.001)

    def run(study: Study, detach: bool = False) -> dict[str, MemberState]:
        with prepare_study(study, replace(PLAN, cluster=cluster)) as prepared:
            return prepared.commit(detach=detach)

    def launch() -> None:
        states = run(Study(folder, specs))
        assert all(state.state == "finished" for state in states.values())

    counts["launch"] = count_calls(launch)
    counts["status"] = count_calls(lambda: overview(folder, scheduler))
    counts["collect"] = count_calls(lambda: run(Study.read(folder), detach=True))
    # As if the controller had been killed between submitting the array and recording its id.
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    cut = next(at for at, line in enumerate(lines) if '"started"' in line)
    (folder / "ledger.jsonl").write_text("".join(lines[:cut]))
    for spec in specs:
        (folder / "runs" / spec.run / JOURNAL_FILE).rename(folder / "runs" / spec.run / "kept")
    study = Study.read(folder)
    executor = replace(PLAN, cluster=cluster).executor(folder)
    states = Ledger(folder).fold()
    launches = [Launch(spec.run, study.run_dir(spec), submission=states[spec.run].submission) for spec in specs]
    counts["adopt"] = count_calls(lambda: executor.adopt(launches))
    assert len(executor.running()) == number
    counts["judge"] = count_calls(lambda: executor.poll(0.0))
    assert not executor.running()
    return counts


@pytest.mark.full
def test_every_phase_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    few, many = count_calls_by_phase(tmp_path / "few", FEW), count_calls_by_phase(tmp_path / "many", MANY)
    ratios = {name: many[name] / few[name] for name in few}
    assert set(ratios) == {"launch", "status", "collect", "adopt", "judge"}
    assert {name: round(ratio, 1) for name, ratio in ratios.items() if ratio > MAX_RATIO} == {}
