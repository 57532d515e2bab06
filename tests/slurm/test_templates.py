"""Tests of the templates in slurm/, which users copy: one GPU, one node, many nodes, a container, and single runs.

Each is submitted to a real cluster. The jobs ask for fewer resources than the templates, and train on CPUs, because the
lab's GPUs are only counted and assigned.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sweeps.run.journal import JournalView, read_journal
from sweeps.run.progress import is_done
from tests.distributed.test_ranks import OF_ROLLOUTS
from tests.place import STEPS, Deterministic, Place
from tests.slurm.cluster import PATIENCE_S, ROOT, Lab, Sweep, by_run, eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ONE = ("variant=none", "seed=0")
TEMPLATES = ("one_gpu", "one_node", "many_nodes", "engines", "container")
# Up to this step, rollouts come from weights that have hardly changed.
LAST_EQUAL_STEP = 2
# Tolerance of gaps between log-probabilities, which are as inexact as FP32 log-probabilities (tests/test_module.py). On
# one kind of processor, a gap of 1e-3 differed by 3e-6.
LOGPROB_TOLERANCE = 1e-5
# The container's host name.
CONTAINER_HOST = "box"


@dataclass
class FromTemplate(Sweep):
    """A study that is launched with a template."""

    template: str = "one_gpu"

    def command(self, *more: str) -> list[str]:
        """Return the command `python -m lightning_scalerl.train --config-dir slurm --multirun ... cluster=one_gpu`."""
        return [
            *(sys.executable, "-m", "lightning_scalerl.train", "--config-dir", str(ROOT / "slurm"), "--multirun"),
            *self.place.overrides(self.name, *self.overrides),
            *(f"cluster={self.template}", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=3"),
            *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10", "hydra.launcher.require_gpu=false"),
            *more,
        ]

    def kill_rank(self, rank: int) -> None:
        """Kill the process of one rank with SIGKILL."""
        (pid,) = [pid for pid in self.processes() if f"SLURM_PROCID={rank}" in environment_of(pid)]
        os.kill(pid, signal.SIGKILL)

    def batch_logs(self) -> str:
        """Return the output of the batch scripts."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("jobs/*/*_log.out")))


def environment_of(pid: int) -> list[str]:
    """Return the environment of a process."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


def preempt(lab: Lab, where: Sequence[str] = ("-N4",), seconds: int = 1) -> None:
    """Submit a job of higher priority that takes the cluster, or some of its nodes, for `seconds`."""
    lab.sh("sbatch", "-p", "high", *where, "--exclusive", "--wrap", f"sleep {seconds}", "-o", "/dev/null")


@pytest.fixture(scope="session")
def place(studies: Place) -> Place:
    """Return the folder with task files and a model cache, which all real studies share."""
    return studies


@pytest.fixture(scope="session")
def expected(undisturbed_recipe: dict[str, Deterministic]) -> dict[str, Deterministic]:
    """Return the journal of an undisturbed run on this machine, by run identity."""
    return undisturbed_recipe


@pytest.fixture(scope="session")
def expected_of_two_ranks(place: Place, expected: Any) -> JournalView:
    """Run with two ranks on this machine, undisturbed; return the journal."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_scalerl.train"]
    subprocess.run(
        [sys.executable, *torchrun, *place.overrides("two ranks", *ONE)],
        cwd=place.root,
        env=place.environment(),
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    (run,) = expected
    return read_journal(place.root / "two ranks" / "runs" / run)


@pytest.fixture
def sweep(place: Place, ready_lab: Lab, request: pytest.FixtureRequest) -> FromTemplate:
    """Return a study of one member in its own folder."""
    return FromTemplate(place, ready_lab, ONE, name=f"study {request.node.name}")


# --- files ---------------------------------------------------------------------------------------------------


def test_every_template_is_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "slurm/cluster").glob("*.yaml")) == sorted(TEMPLATES)
    assert sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch")) == ["engines.sbatch", "single_run.sbatch"]


def test_links_have_targets() -> None:
    for document in (ROOT / "slurm").glob("*.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


# --- studies -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_gpu(sweep: FromTemplate, expected: Any) -> None:
    sweep.overrides = ("variant=none", "seed=0,1")
    sweep.template = "one_gpu"
    setup = "hydra.launcher.setup=['echo GPU $CUDA_VISIBLE_DEVICES']"
    assert sweep.launch(setup) == 0, sweep.said()
    journals = by_run(sweep.directory)
    assert len(journals) == 2 and expected.items() <= journals.items()
    assert {state.state for state in sweep.states()} == {"finished"}
    assert len(re.findall(r"(?m)^GPU [01]$", sweep.batch_logs())) == 2, "each member has one GPU"
    assert len({str(state.job).split("_")[0] for state in sweep.states()}) == 1, "one array"


@pytest.mark.full
def test_one_node(sweep: FromTemplate, expected: Any, expected_of_two_ranks: JournalView) -> None:
    """Two ranks on one node give the journal of two ranks on this machine bit for bit, and nearly that of one rank."""
    sweep.template = "one_node"
    assert sweep.launch("hydra.launcher.gpus_per_node=2", "launch.threads=1") == 0, sweep.said()
    journal = sweep.journal()
    assert sweep.finished() and journal.header["ranks"] == 2
    assert journal.deterministic() == expected_of_two_ranks.deterministic()
    (run,) = expected
    assert_same_beginning(read_journal(sweep.place.root / "undisturbed" / "runs" / run), journal)
    assert (sweep.run_dir() / "log.rank1.txt").exists()
    assert len(sweep.attempts()) == 1


def assert_same_beginning(one: JournalView, several: JournalView) -> None:
    """Assert that the first steps of one rank and of several agree: rollouts exactly, training up to rounding."""
    for kind in ("eval", "train"):
        assert [record.step for record in one.of_kind(kind)] == [record.step for record in several.of_kind(kind)]
        for a, b in zip(one.of_kind(kind), several.of_kind(kind), strict=True):
            if a.step > LAST_EQUAL_STEP:
                continue
            _, _, one_metrics = a.deterministic()
            _, _, several_metrics = b.deterministic()
            assert several_metrics.keys() == one_metrics.keys()
            for key, value in one_metrics.items():
                tolerance = LOGPROB_TOLERANCE if "_gap" in key else 1e-6
                assert several_metrics[key] == pytest.approx(value, rel=1e-3, abs=tolerance), f"{kind} {a.step}: {key}"
            exact = [
                key for key in one_metrics if kind == "eval" or key.startswith(tuple(f"train/{x}" for x in OF_ROLLOUTS))
            ]
            assert len(exact) >= 3 and [one_metrics[key] for key in exact] == [several_metrics[key] for key in exact]


NODES = ("hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=1")


@pytest.mark.full
def test_many_nodes_preempted(sweep: FromTemplate, expected_of_two_ranks: JournalView) -> None:
    sweep.template = "many_nodes"
    with sweep.launched(*NODES, verifier_s=0.1) as process:
        sweep.reaches(3)
        preempt(sweep.lab)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished() and sweep.journal().header["ranks"] == 2
    assert sweep.journal().deterministic() == expected_of_two_ranks.deterministic()
    first, second = sweep.attempts()
    assert (first.outcome, first.kind, second.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job and second.restart == 1 and second.step >= 3
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "it saved before it ended, so no step was repeated"


@pytest.mark.full
def test_many_nodes_with_a_killed_rank(sweep: FromTemplate, expected_of_two_ranks: JournalView) -> None:
    sweep.template = "many_nodes"
    with sweep.launched(*NODES, verifier_s=0.1) as process:
        sweep.reaches(4)
        sweep.kill_rank(1)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    assert sweep.journal().deterministic() == expected_of_two_ranks.deterministic()
    first, second = sweep.attempts()
    assert first.outcome != "finished" and second.outcome == "finished" and second.job != first.job
    entries = [json.loads(line) for line in (sweep.directory / "ledger.jsonl").read_text().splitlines()]
    (retried,) = [entry for entry in entries if entry["event"] == "retried"]
    assert retried["kind"] == "killed"


@pytest.mark.full
def test_a_container_at_its_time_limit(sweep: FromTemplate, expected: Any) -> None:
    """SLURM's warning reaches Python inside the container. The batch script outside requeues the job."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    sweep.template = "container"
    # The container's own process must survive the signal that is meant for Python. README.md has the same command.
    inside = sweep.place.root / "inside.txt"
    command = sweep.place.root / "boxed_python"
    command.write_text(
        "#!/bin/sh\nexec env --ignore-signal=USR2 --ignore-signal=TERM bwrap --dev-bind / / --unshare-pid --proc /proc "
        f'--unshare-uts --hostname {CONTAINER_HOST} sh -c \'hostname >>{inside}; exec {sys.executable} "$@"\' sh "$@"\n'
    )
    command.chmod(0o700)
    limits = (f"hydra.launcher.python={command}", "hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=60")
    assert sweep.launch(*limits, verifier_s=0.5) == 0, sweep.said()
    assert by_run(sweep.directory) == expected
    attempts = sweep.attempts()
    assert len(attempts) >= 2 and [attempt.outcome for attempt in attempts] == ["interrupted"] * (len(attempts) - 1) + [
        "finished"
    ]
    assert {attempt.kind for attempt in attempts[:-1]} == {"time_limit"} and len(
        {attempt.job for attempt in attempts}
    ) == 1
    assert sweep.steps_written() == list(range(1, STEPS + 1))
    assert inside.read_text().split() == [CONTAINER_HOST] * len(attempts)


# --- single runs ---------------------------------------------------------------------------------------------

SMALL_JOB = ("--cpus-per-task=1", "--mem=3G", "--time=10", "--signal=USR2@60")


def submit(
    lab: Lab,
    place: Place,
    verifier_s: float,
    *arguments: str,
    options: Sequence[str] = (),
    script: str = "single_run.sbatch",
) -> str:
    """Call `sbatch slurm/single_run.sbatch ...` with a `python` in PATH; return the job's id."""
    place_environment = place.environment(verifier_s)
    environment = {
        **lab.environment,
        **{key: place_environment[key] for key in place_environment if os.environ.get(key) != place_environment[key]},
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    result = subprocess.run(
        ["sbatch", "--parsable", *SMALL_JOB, *options, str(ROOT / "slurm" / script), *arguments],
        cwd=place.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.full
def test_single_runs_are_requeued(
    place: Place, ready_lab: Lab, expected: Any, expected_of_two_ranks: JournalView, tiny_model_path: str
) -> None:
    """The runs are commands with one and two ranks, and README.md's script. Each gets SLURM's warning in the middle."""
    (run,) = expected
    single, double = (place.root / name / "runs" / run for name in ("single", "double"))
    readme = (ROOT / "slurm/README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    replacements = (
        ("my_model", tiny_model_path),
        ("max_steps=400", "max_steps=40"),
        ("scale=paper", "scale=arithmetic"),
    )
    for old, new in replacements:
        assert old in script
        script = script.replace(old, new)
    (place.root / "my_script.py").write_text(script)

    train = ("-m", "lightning_scalerl.train")
    two = ("--ntasks-per-node=2", "--gpus-per-node=2")
    jobs = {
        submit(ready_lab, place, 0.1, *train, *place.overrides("single", *ONE)): (single, STEPS),
        submit(ready_lab, place, 0.1, *train, *place.overrides("double", *ONE), options=two): (double, STEPS),
        submit(ready_lab, place, 0.0, "my_script.py"): (place.root / "outputs/my_run", 40),
    }
    warned: set[str] = set()

    def warn() -> bool:
        """Send SLURM's warning before a time limit to each job once it has trained; return whether all were warned."""
        for job, (run_dir, _) in jobs.items():
            if job not in warned and trained_steps(run_dir) and max(trained_steps(run_dir)) >= 2:
                ready_lab.sh("scancel", "--signal=USR2", job)
                warned.add(job)
        return len(warned) == len(jobs)

    eventually(warn, "all under way")
    eventually(lambda: not ready_lab.jobs(), "an empty queue")
    for job, (run_dir, steps) in jobs.items():
        log = (place.root / f"scalerl-{job}.log").read_text()[-3000:]
        assert is_done(run_dir, steps, str(read_journal(run_dir).header["run"])), (
            log
        )  # the run of a script has no planned identity
        assert trained_steps(run_dir) == list(range(1, steps + 1)), "it saved before it ended, so no step was repeated"
        assert len(re.findall(r"(?m)^(?:scalerl train: )?saved .*SIGUSR2", log)) == (2 if run_dir == double else 1), log
        assert ready_lab.sh("sacct", "-X", "-n", "-P", "-j", job, "-o", "State") == "COMPLETED"
    assert read_journal(single).deterministic() == expected[run]
    assert read_journal(double).deterministic() == expected_of_two_ranks.deterministic()


def trained_steps(run_dir: Path) -> list[int]:
    """Return the steps of all training records ever written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == "train"]


@pytest.mark.full
def test_a_cancelled_single_run_stays_cancelled(place: Place, ready_lab: Lab) -> None:
    job = submit(ready_lab, place, 0.3, "-m", "lightning_scalerl.train", *place.overrides("cancelled", *ONE))
    runs = place.root / "cancelled" / "runs"
    eventually(lambda: list(runs.glob("*/metrics.jsonl")), "a beginning")
    ready_lab.sh("scancel", job)
    eventually(lambda: not ready_lab.jobs(), "an empty queue")
    assert ready_lab.sh("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").startswith("CANCELLED")
