"""Inject random faults into a real SLURM cluster that runs studies, then compare the studies' journals.

    python benchmarks/storm.py [--minutes 60] [--every-s 8] [--random 0]

The long variant of tests/slurm. Needs root and the developer's environment; starts a cluster (slurm/lab) and removes
it. A round is a study of 24 small real runs: six seeds of four async modes. Rounds repeat until the time is up. Damage
of a fault is repaired before the next one. Exits with 1 unless every member of every round finished exactly once, with
the journal of an undisturbed local run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sweeps.executor.node.attempts import attempts
from sweeps.launch.ledger import Ledger
from sweeps.run.journal import JOURNAL_FILE, JournalError, read_journal
from tests.place import Deterministic, Place
from tests.slurm.cluster import Lab, Sweep, baseline, by_run, hold_still, small_disk

MODES = "variant=none,async_mode_pipeline_1,async_mode_ppo_off_policy_4,async_mode_on_policy"
STUDY = (MODES, "seed=0,1,2,3,4,5")
# Hangs must be detected during a round. A run of this size takes a second per step.
HANG_SETTINGS = ("launch.hang_factor=5", "launch.hang_min_s=25")
# One member may be hit many times. Many retries are allowed, because the test is that nothing is lost.
MANY_RETRIES = "hydra.launcher.retries={killed:50,node:50,lost:50,launch:50,hang:50,storage:50}"
DISK_MIB = 400
# Number of members that the cluster runs at the same time.
ALL_AT_ONCE = 8


class Anywhere(Place):
    """A place that sets nothing on the axis async_mode, which the study varies."""

    def overrides(self, output: str, *more: str) -> list[str]:
        """Return the overrides of a place without async_mode."""
        return [word for word in super().overrides(output, *more) if not word.startswith("async_mode.")]


@dataclass
class Storm:
    """A running study, and the faults to inject into it."""

    sweep: Sweep
    source: random.Random
    controller: subprocess.Popen[str] | None = None
    done: Counter[str] = field(default_factory=Counter)

    @property
    def bad_nodes(self) -> Path:
        """File with the names of nodes on which jobs fail before they start their member."""
        return self.sweep.place.root / "bad_nodes"

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return the faults by name. Each undoes damage that does not repair itself."""
        return {
            "kill a member": lambda: self._on_random_member(lambda pid: os.kill(pid, signal.SIGKILL)),
            "hang a member": lambda: self._on_random_member(hold_still),
            "suspend a member": lambda: self._on_random_member(self._suspend),
            "warn a job": self._warn,
            "cancel a job": lambda: self._scancel("--state=RUNNING"),
            "power a node off": self._power_off,
            "kill a slurmd": self._kill_slurmd,
            "kill slurmctld": lambda: self._lab("kill", "slurmctld"),
            "kill the controller": self._kill_controller,
            "a node that launches nothing": self._bad_node,
            "flip a bit in the newest checkpoint": self._flip_a_bit,
            "break a line of a journal": self._break_a_line,
            "a launch that is refused": self._refused,
            "a full disk": self._fill_the_disk,
        }

    def strike(self) -> str:
        """Inject one random fault and return its name."""
        name = self.source.choice(list(self.faults()))
        self.done[name] += 1
        self.faults()[name]()
        self.sweep.lab.up()
        return name

    def _lab(self, *words: str) -> None:
        self.sweep.lab.run(*words)

    def _on_random_member(self, harm: Callable[[int], object]) -> None:
        if pids := self.sweep.processes():
            with suppress(ProcessLookupError):
                harm(self.source.choice(pids))

    def _suspend(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.source.choice((2, 15)))
        os.kill(pid, signal.SIGCONT)

    def _scancel(self, *words: str) -> None:
        if jobs := self.sweep.lab.jobs():
            environment = self.sweep.lab.environment
            subprocess.run(["scancel", *words, self.source.choice(jobs)], env=environment, check=False)

    def _warn(self) -> None:
        self._scancel("--signal=USR2")

    def _power_off(self) -> None:
        self._lab("node-off", str(self.source.randint(1, 4)))
        time.sleep(self.source.choice((0, 20)))

    def _kill_slurmd(self) -> None:
        self._lab("kill", f"slurmd:n{self.source.randint(1, 4)}")
        time.sleep(self.source.choice((0, 20)))

    def _kill_controller(self) -> None:
        assert self.controller is not None
        self.controller.kill()
        self.controller.wait()

    def _bad_node(self) -> None:
        self.bad_nodes.write_text(f"n{self.source.randint(1, 4)}\n")
        time.sleep(15)
        self.bad_nodes.write_text("")

    def _unfinished(self, pattern: str) -> list[Path]:
        """Return the newest matching file of each unfinished member."""
        open_runs = [state for state in self.sweep.states() if state.state != "finished"]
        newest = [max(self.sweep.run_dir(state).glob(pattern), default=None) for state in open_runs]
        return [path for path in newest if path is not None]

    def _flip_a_bit(self) -> None:
        if paths := self._unfinished("checkpoints/step-*.ckpt"):
            path = self.source.choice(paths)
            with suppress(FileNotFoundError), path.open("r+b") as handle:
                position = self.source.randrange(path.stat().st_size)
                handle.seek(position)
                (byte,) = handle.read(1)
                handle.seek(position)
                handle.write(bytes([byte ^ 1 << self.source.randrange(8)]))
        self._on_random_member(lambda pid: os.kill(pid, signal.SIGKILL))

    def _break_a_line(self) -> None:
        """Overwrite a middle line of an unfinished journal, after killing all members.

        A running member would not notice the damage and continue after the line, and finished runs stay finished.
        """
        for pid in self.sweep.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)  # until they have ended; new ones take seconds to start
        if paths := [path for path in self._unfinished(JOURNAL_FILE) if _is_unfinished(path)]:
            path = self.source.choice(paths)
            lines = path.read_bytes().split(b"\n")
            if len(lines) > 4:
                # Keep the length, so that a process that still writes appends at the right place.
                number = self.source.randrange(1, len(lines) - 2)
                begin = sum(len(line) + 1 for line in lines[:number])
                with path.open("r+b") as handle:
                    handle.seek(begin)
                    handle.write(b"#" * min(20, len(lines[number])))

    def _refused(self) -> None:
        """Launch the same study locally and on a missing partition. Both must be refused and change nothing."""
        place = self.sweep.place
        local_command = [sys.executable, *place.study(self.sweep.name, *self.sweep.overrides)]
        for command in (local_command, self.sweep.command("hydra.launcher.partition=nope")):
            environment = {**self.sweep.environment(0.0), "SBATCH_JOB_NAME": "another"}
            done = subprocess.run(command, cwd=place.root, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode != 0, done.stdout

    def _fill_the_disk(self) -> None:
        ballast = self.sweep.directory.parent / "ballast"
        with suppress(OSError), ballast.open("wb") as handle:
            while True:
                handle.write(bytes(1 << 16))
                handle.flush()
        time.sleep(self.source.choice((1, 10)))
        ballast.unlink(missing_ok=True)


def _is_unfinished(journal: Path) -> bool:
    """Whether a journal is readable and unfinished."""
    try:
        return read_journal(journal).status != "finished"
    except JournalError:
        return False


def one_round(lab: Lab, place: Place, name: str, source: random.Random, every_s: float) -> Storm:
    """Run a study under faults until all members are finished."""
    storm = Storm(Sweep(place, lab, (*STUDY, *HANG_SETTINGS), name=f"disk/{name}"), source)
    storm.bad_nodes.write_text("")
    setup = f"grep -q $SLURMD_NODENAME {storm.bad_nodes} && exit 1"
    more = (MANY_RETRIES, f"hydra.launcher.setup=['{setup}']")
    pauses = 1.0
    while True:
        # If a cancelled job or a full disk ended the study, the same command continues it.
        extra = {"SBATCH_JOB_NAME": "another"} if source.random() < 0.5 else {}
        with storm.sweep.launched(*more, verifier_s=0.1, extra=extra) as controller:
            storm.controller = controller
            while controller.poll() is None:
                time.sleep(source.uniform(0.5, 1.5) * every_s * pauses)
                states = Counter(state.state for state in storm.sweep.states())
                # With few members left, longer pauses give them time to get past their start.
                pauses = max(1.0, ALL_AT_ONCE / max(1, 24 - states["finished"]))
                if controller.poll() is None:
                    print(f"{name}: {storm.strike()}; {dict(states)}", flush=True)
        states = Counter(state.state for state in storm.sweep.states())
        if states["finished"] == states.total() == 24:
            return storm
        if controller.returncode not in (0, 1, -signal.SIGKILL):
            raise SystemExit(f"the controller ended with {controller.returncode}: {storm.sweep.said()[-3000:]}")


def check(storm: Storm, truth: dict[str, Deterministic]) -> bool:
    """Check that each member finished once, with the same journal as without faults."""
    ends = Counter(entry["run"] for entry in Ledger(storm.sweep.directory).entries() if entry["event"] == "finished")
    journals: dict[str, Deterministic] = {}
    try:
        journals = by_run(storm.sweep.directory)
    except JournalError as error:
        print(error, flush=True)
    wrong = [run for run in truth if journals.get(run) != truth[run] or ends[run] != 1]
    tries = Counter(
        attempt.kind or attempt.outcome or "no last word"
        for state in storm.sweep.states()
        for attempt in attempts(storm.sweep.run_dir(state))
    )
    print(
        f"{storm.sweep.name}: {len(ends)} members in {tries.total()} attempts {dict(tries)}; wrong: {wrong}", flush=True
    )
    return not wrong and journals.keys() == truth.keys()


def main() -> int:
    """Run rounds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--every-s", type=float, default=8.0, help="between faults, on average; longer when few are left"
    )
    parser.add_argument("--random", type=int, default=0, help="the storm's own seed")
    options = parser.parse_args()
    source = random.Random(options.random)
    root = Path(tempfile.mkdtemp(prefix="scalerl-storm-"))
    lab = Lab(root / "lab", port=28800)
    faults: Counter[str] = Counter()
    rounds, right = 0, False
    try:
        lab.up()
        (root / "place").mkdir()
        place = Anywhere(root / "place")
        truth = baseline(place, *STUDY)
        started_at = time.monotonic()
        with small_disk(root / "place/disk", DISK_MIB):
            while time.monotonic() - started_at < 60 * options.minutes:
                rounds += 1
                storm = one_round(lab, place, f"round{rounds}", source, options.every_s)
                faults += storm.done
                right = check(storm, truth)
                if not right:
                    shutil.copytree(storm.sweep.directory, root / "wrong")
                    break
                shutil.rmtree(storm.sweep.directory)
        minutes = (time.monotonic() - started_at) / 60
        print(
            f"{minutes:.0f} minutes, {rounds} rounds of {len(truth)} members, {faults.total()} faults: {dict(faults)}"
        )
        print(f"each member finished once, journals as without faults: {right}")
        return int(not right)
    finally:
        lab.run("down", "--wipe")
        if right:
            shutil.rmtree(root, ignore_errors=True)
        else:
            print(f"what went wrong is in {root}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
