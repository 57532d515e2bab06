"""A real SLURM cluster, a study on it with the commands of a user, and faults to inject."""

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


def eventually(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition is true; `what` describes it in the failure's message."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.2)


@dataclass
class Lab:
    """The project's own cluster (slurm/lab)."""

    directory: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        command, *options = words
        result = subprocess.run(
            [sys.executable, str(ROOT / "slurm/lab/lab.py"), command, "--dir", str(self.directory), *options],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
        return result.stdout

    def up(self) -> None:
        """Start the nodes and daemons that are not running."""
        self.run("up", "--port", str(self.port), "--node-down-s", "5", "--set", "MessageTimeout=5")
        environment_output = subprocess.run(
            ["bash", "-c", f". {self.directory}/env.sh && env -0"], capture_output=True, text=True, check=True
        )
        self.environment = dict(each.split("=", 1) for each in environment_output.stdout.split("\0") if "=" in each)

    def sh(self, *command: str) -> str:
        """Run one of SLURM's commands and return its output."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the ids of queued and running jobs."""
        return self.sh("squeue", "-h", "-a", "-r", "-o", "%i").split()

    def empty(self) -> None:
        """Cancel all jobs, and wait until all nodes are idle."""
        if jobs := self.jobs():
            self.sh("scancel", *jobs)
        eventually(lambda: not self.jobs(), "an empty queue")
        eventually(lambda: set(self.sh("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, "idle nodes", 60)


@dataclass
class Sweep:
    """A study in a folder, with methods to launch, inspect and kill it."""

    place: Place
    lab: Lab
    overrides: tuple[str, ...]
    name: str = "study"

    @property
    def directory(self) -> Path:
        return self.place.root / self.name

    def command(self, *more: str) -> list[str]:
        """Return the command `python -m lightning_scalerl.train --multirun ... cluster=slurm`."""
        return [
            *(sys.executable, *self.place.study(self.name, *self.overrides, cluster="slurm")),
            *("cluster=slurm", "hydra.launcher.gpus_per_node=2", "hydra.launcher.mem_gb=2"),
            *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10"),
            "hydra.launcher.require_gpu=false",  # the lab's GPUs are only counted
            *more,
        ]

    def environment(self, verifier_s: float, extra: dict[str, str] | None = None) -> dict[str, str]:
        place_environment = self.place.environment(verifier_s)
        return {
            **self.lab.environment,
            **{k: place_environment[k] for k in place_environment if os.environ.get(k) != place_environment[k]},
            **(extra or {}),
        }

    @contextmanager
    def launched(
        self, *more: str, verifier_s: float = 0.0, extra: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Start the command; kill it if the test leaves first. Its jobs continue."""
        with self.log.open("a") as log_file:
            process = subprocess.Popen(
                self.command(*more),
                cwd=self.place.root,
                env=self.environment(verifier_s, extra),
                stdout=log_file,
                stderr=log_file,
                text=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def launch(self, *more: str, verifier_s: float = 0.0, extra: dict[str, str] | None = None) -> int:
        """Run the command to its end and return its exit code."""
        with self.launched(*more, verifier_s=verifier_s, extra=extra) as process:
            return process.wait(timeout=PATIENCE_S)

    def scalerl(self, *words: str, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the console script, as from a later shell."""
        return subprocess.run(
            [sys.executable, "-m", "sweeps.cli.main", *words],
            cwd=self.place.root,
            env=self.environment(0.0, extra),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def status(self) -> dict[str, Any]:
        """Return the output of `scalerl status --json`."""
        result = self.scalerl("status", str(self.directory), "--json")
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    # --- files and processes of the study ----------------------------------------------------------------

    @property
    def log(self) -> Path:
        """Return the file with the output of this study's controllers. Output of other studies would mislead tests."""
        return self.place.root / f"{self.name.replace('/', ' ')}.said.txt"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def states(self) -> list[MemberState]:
        return list(Ledger(self.directory).fold().values())

    def state(self) -> MemberState:
        """Return the state of the only member."""
        (state,) = self.states()
        return state

    def run_dir(self, state: MemberState | None = None) -> Path:
        return self.directory / "runs" / (state or self.state()).run

    def attempts(self) -> list[Attempt]:
        return attempts(self.run_dir())

    def journal(self) -> JournalView:
        return read_journal(self.run_dir())

    def step(self) -> int:
        """Return the newest step in the journal of the only member; -1 before the first."""
        try:
            return max((record.step for record in self.journal().records), default=-1)
        except Exception:
            return -1

    def reaches(self, step: int) -> None:
        """Wait until the only member has reached a step."""
        eventually(lambda: self.step() >= step, f"step {step}; {self.said()[-2000:]}")

    def finished(self) -> bool:
        return self.journal().status == "finished"

    def steps_written(self) -> list[int]:
        """Return the steps of all training records ever written, including replaced ones."""
        lines = (self.run_dir() / "metrics.jsonl").read_bytes().split(b"\n")
        entries = [json.loads(line) for line in lines if line.strip()]
        return [entry["step"] for entry in entries if entry["kind"] == "train"]

    def processes(self) -> list[int]:
        """Return the pids of the Python processes that run members. The lab's nodes are on this machine."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                name = (Path("/proc") / str(parent) / "comm").read_text().strip()
            except (OSError, ValueError, IndexError):
                continue
            is_of_this_study = any(word.startswith(str(self.directory / "jobs").encode()) for word in arguments)
            if b"submitit.core._submit" in arguments and is_of_this_study and name.startswith("slurmstepd"):
                pids.append(int(folder.name))
        return pids

    def kill_member(self) -> None:
        """Kill the only member's process with SIGKILL."""
        (pid,) = self.processes()
        os.kill(pid, signal.SIGKILL)


def baseline(place: Place, *overrides: str) -> dict[str, Deterministic]:
    """Run the same study on this machine without a cluster; return its journals by run identity."""
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
    """Return the journals without wall-clock values, by run identity."""
    return {path.name: read_journal(path).deterministic() for path in sorted((study / "runs").iterdir())}


def specs(study: Path) -> Sequence[RunSpec]:
    """Return the frozen specifications of a study."""
    return [RunSpec.read(path) for path in sorted((study / "runs").iterdir())]


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """Mount a separate file system of `megabytes` MiB at `path`."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# Stops only the process's first thread. The others continue, as in a collective that waits for a dead peer.
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
    """Let a process hang. The returned process holds it: it ends with it, and releases it when it is killed."""
    return subprocess.Popen([sys.executable, "-c", _HOLD, str(pid)])
