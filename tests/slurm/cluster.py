"""A study on a real SLURM cluster as a user sees it, and the ways to hurt it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.executor.node.attempts import Attempt, attempts
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.spec import RunSpec
from tests.paths import ROOT
from tests.place import Deterministic, Place

PATIENCE_S = 480.0


def eventually(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.2)


@dataclass
class Lab:
    """The project's own cluster (slurm/lab)."""

    directory: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        command, *rest = words
        done = subprocess.run(
            [sys.executable, str(ROOT / "slurm/lab/lab.py"), command, "--dir", str(self.directory), *rest],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> None:
        """Whatever is missing."""
        self.run("up", "--port", str(self.port), "--node-down-s", "5", "--set", "MessageTimeout=5")
        said = subprocess.run(
            ["bash", "-c", f". {self.directory}/env.sh && env -0"], capture_output=True, text=True, check=True
        )
        self.environment = dict(each.split("=", 1) for each in said.stdout.split("\0") if "=" in each)

    def sh(self, *command: str) -> str:
        """One of SLURM's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Ids of jobs that wait or run."""
        return self.sh("squeue", "-h", "-a", "-r", "-o", "%i").split()

    def empty(self) -> None:
        """No jobs, and all nodes ready for some."""
        if jobs := self.jobs():
            self.sh("scancel", *jobs)
        eventually(lambda: not self.jobs(), "an empty queue")
        eventually(lambda: set(self.sh("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, "idle nodes", 60)


@dataclass
class Sweep:
    """A study in a folder: launched, looked at, hurt."""

    place: Place
    lab: Lab
    overrides: tuple[str, ...]
    name: str = "study"

    @property
    def directory(self) -> Path:
        return self.place.root / self.name

    def command(self, *more: str) -> list[str]:
        """`python -m lightning_scalerl.train --multirun ... cluster=slurm`, or a light study's."""
        return [
            *(sys.executable, *self.place.study(self.name, *self.overrides, cluster="slurm")),
            *("cluster=slurm", "hydra.launcher.gpus_per_node=2", "hydra.launcher.mem_gb=2"),
            *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10"),
            "hydra.launcher.require_gpu=false",  # the lab's are only counted
            *more,
        ]

    def environment(self, verifier_s: float, extra: dict[str, str] | None = None) -> dict[str, str]:
        own = self.place.environment(verifier_s)
        return {**self.lab.environment, **{k: own[k] for k in own if os.environ.get(k) != own[k]}, **(extra or {})}

    @contextmanager
    def launched(
        self, *more: str, verifier_s: float = 0.0, extra: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """The command, running; ended by pid if the test leaves first (its jobs go on)."""
        with self.log.open("a") as said:
            process = subprocess.Popen(
                self.command(*more),
                cwd=self.place.root,
                env=self.environment(verifier_s, extra),
                stdout=said,
                stderr=said,
                text=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def launch(self, *more: str, verifier_s: float = 0.0, extra: dict[str, str] | None = None) -> int:
        """The command, to its end; its exit code."""
        with self.launched(*more, verifier_s=verifier_s, extra=extra) as process:
            return process.wait(timeout=PATIENCE_S)

    def scalerl(self, *words: str, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The console script, from a later shell."""
        return subprocess.run(
            [sys.executable, "-m", "sweeps.cli.main", *words],
            cwd=self.place.root,
            env=self.environment(0.0, extra),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def status(self) -> dict[str, Any]:
        """What `scalerl status --json` says."""
        done = self.scalerl("status", str(self.directory), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    # --- what there is -----------------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        """What this study's controllers print, and no other's: a test that looks for a line must find its own."""
        return self.place.root / f"{self.name.replace('/', ' ')}.said.txt"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def states(self) -> list[MemberState]:
        return list(Ledger(self.directory).fold().values())

    def state(self) -> MemberState:
        """Of a study of one member."""
        (state,) = self.states()
        return state

    def run_dir(self, state: MemberState | None = None) -> Path:
        return self.directory / "runs" / (state or self.state()).run

    def attempts(self) -> list[Attempt]:
        return attempts(self.run_dir())

    def journal(self) -> JournalView:
        return read_journal(self.run_dir())

    def step(self) -> int:
        """The newest step in the journal of a study of one member; -1 before the first."""
        try:
            return max((record.step for record in self.journal().records), default=-1)
        except Exception:
            return -1

    def reaches(self, step: int) -> None:
        """Wait until the member has come so far."""
        eventually(lambda: self.step() >= step, f"step {step}; {self.said()[-2000:]}")

    def finished(self) -> bool:
        return self.journal().status == "finished"

    def steps_written(self) -> list[int]:
        """Every training record that was ever written, superseded ones too."""
        lines = (self.run_dir() / "metrics.jsonl").read_bytes().split(b"\n")
        entries = [json.loads(line) for line in lines if line.strip()]
        return [entry["step"] for entry in entries if entry["kind"] == "train"]

    def processes(self) -> list[int]:
        """Pids, on this machine, of the Python processes that run the member."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                name = (Path("/proc") / str(parent) / "comm").read_text().strip()
            except (OSError, ValueError, IndexError):
                continue
            ours = any(word.startswith(str(self.directory / "jobs").encode()) for word in words)
            if b"submitit.core._submit" in words and ours and name.startswith("slurmstepd"):
                found.append(int(folder.name))
        return found

    def kill_member(self) -> None:
        """kill -9 of the member's process, by pid."""
        (pid,) = self.processes()
        os.kill(pid, signal.SIGKILL)


def baseline(place: Place, *overrides: str) -> dict[str, Deterministic]:
    """The journals of the same study run on this machine, by run identity."""
    output = "baseline"
    subprocess.run(
        [sys.executable, *place.study(output, *overrides)],
        cwd=place.root,
        env=place.environment(),
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return by_run(place.root / output)


def by_run(study: Path) -> dict[str, Deterministic]:
    """Journals as read, without the wall clock, by run identity."""
    return {path.name: read_journal(path).deterministic() for path in sorted((study / "runs").iterdir())}


def specs(study: Path) -> Sequence[RunSpec]:
    """Frozen specifications of a study."""
    return [RunSpec.read(path) for path in sorted((study / "runs").iterdir())]


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own, of so many MiB."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# The process's first thread alone: the others go on, as in a collective whose peer is gone.
_HOLD = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
pid, seize, interrupt, all_threads = int(sys.argv[1]), 0x4206, 0x4207, 0x40000000
if libc.ptrace(seize, pid, None, None) or libc.ptrace(interrupt, pid, None, None):
    sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
while True:
    ended, status = os.waitpid(pid, os.WNOHANG | all_threads)
    if ended and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        break
    time.sleep(0.05)
"""


def hold_still(pid: int) -> subprocess.Popen[bytes]:
    """A process hangs from now on; the one that holds it ends with it, or lets it go when it is ended itself."""
    return subprocess.Popen([sys.executable, "-c", _HOLD, str(pid)])
