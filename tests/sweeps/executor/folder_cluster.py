"""A second kind of cluster: its queue is a folder, and a small daemon starts the jobs as processes.

A job is the file `<submission>.<number>.job`. The daemon marks it by files with the same stem, `.began` and `.ended`.
`python -m tests.sweeps.executor.folder_cluster ROOT PLACES` runs the daemon until it is killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sweeps.executor.base import Executor, Launch, Outcome
from sweeps.executor.node.ending import newest_attempt, outcome_of
from sweeps.executor.node.entry import run_task
from sweeps.executor.node.manifest import make_folder, write_manifest
from sweeps.process import die_with_parent
from sweeps.run.files import write_atomically
from sweeps.run.interruption import ask_to_stop

LIMITS = {"timeout_min": 60, "signal_delay_s": 60, "max_num_timeout": None, "gpus": False}


def shown(job: Path) -> tuple[str, str | None]:
    if job.with_suffix(".ended").exists():
        return "ended", "gone"
    return ("running" if job.with_suffix(".began").exists() else "queued"), None


@dataclass(frozen=True)
class FolderCluster:
    root: str = ""
    asks_for_gpus = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FolderCluster:
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        return {"root": self.root}

    def commands(self) -> dict[str, Any]:
        return {}

    def scheduler(self) -> FolderCluster:
        return self

    def queue(self) -> Mapping[str, Any]:
        jobs = Path(self.root).glob("*.job")
        return {job.stem: SimpleNamespace(name=job.name.split(".")[0], shown=shown(job)) for job in jobs}

    def executor(self, study: Path, entry: str, threads: int) -> FolderExecutor:
        return FolderExecutor(study.resolve(), Path(self.root), entry)


@dataclass
class FolderExecutor(Executor):
    study: Path
    root: Path
    entry: str
    outlives: bool = True
    _followed: dict[str, tuple[Launch, Path]] = field(default_factory=dict)

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        return len(waiting)

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        folder = make_folder(self.study, submission)
        write_manifest(folder, members, self.entry, LIMITS, {"root": str(self.root)})
        for number, member in enumerate(members):
            job = {"folder": str(folder), "run_dir": str(member.run_dir.resolve()), "run": member.run}
            path = self.root / f"{submission}.{number}.job"
            write_atomically(path, json.dumps(job))
            self._followed[member.run] = (member, path)
        return {member.run: self._followed[member.run][1].stem for member in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        for member in members:
            for path in self.root.glob(f"{member.submission}.*.job"):
                if json.loads(path.read_text())["run"] == member.run:
                    self._followed[member.run] = (member, path)
        return {run: self._followed[run][1].stem for run in self.running()}

    def poll(self, timeout_s: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        while not (ended := self._runs_in_state("ended")) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [self._outcome(*self._followed.pop(run)) for run in ended]

    def _outcome(self, member: Launch, path: Path) -> Outcome:
        attempt = newest_attempt(member.run_dir, path.name.split(".")[0], path.stem)
        failure = attempt.failure if attempt else ("cancelled", "it never began")
        kind, reason = failure or ("killed", "killed from outside")
        return outcome_of(member, kind, reason, attempt, attempt.node if attempt else None)

    def stop(self, runs: Sequence[str], reason: str) -> None:
        for run in set(runs) & self._followed.keys():
            ask_to_stop(self._followed[run][0].run_dir, reason)  # a queued job then ends before its member begins

    def running(self) -> list[str]:
        return list(self._followed)

    def queued(self) -> frozenset[str]:
        return frozenset(self._runs_in_state("queued"))

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        return

    def _runs_in_state(self, state: str) -> list[str]:
        return [run for run, (_, path) in self._followed.items() if shown(path)[0] == state]


def start(path: Path) -> int:
    pid = os.fork()  # a fork needs no new imports, which take seconds
    if pid == 0:
        die_with_parent(os.getppid())
        request, job = json.loads(path.read_text()), path.stem
        facts: Any = SimpleNamespace(
            rank=lambda: 0, step_tasks=lambda: 1, restart_count=lambda: 0, length_s=lambda: None
        )
        facts.job_id, facts.identity = lambda: job, lambda: {"job": job}
        facts.node_name, facts.length_s = socket.gethostname, lambda: None
        run_task(Path(request["folder"]), Path(request["run_dir"]), facts)
    path.with_suffix(".began").write_text(str(pid))
    return pid


def serve(root: Path, places: int) -> None:
    running_jobs: dict[int, Path] = {}
    while True:
        for path in sorted(root.glob("*.job")):
            if shown(path)[0] == "queued" and len(running_jobs) < places:
                running_jobs[start(path)] = path
        while running_jobs and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            running_jobs.pop(pid).with_suffix(".ended").touch()
        time.sleep(0.02)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
