"""What stands in slurm/ for users to copy, submitted for real: one GPU, one node, many nodes, a container, single runs.

The jobs ask for less than the templates do, and train on CPUs: the lab's GPUs are only counted and assigned.
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
# Up to this step rollouts come from weights that hardly a step has changed.
STEPS_ALIKE = 2
# Gaps between log-probabilities are known no better than these are in FP32 (tests/test_module.py): on one kind of
# processor one was off by 3e-6 of its 1e-3.
OF_LOGPROBS = 1e-5
# The container's host name.
BOX = "box"


@dataclass
class FromTemplate(Sweep):
    """A study that is launched with one of the templates."""

    template: str = "one_gpu"

    def command(self, *more: str) -> list[str]:
        """`python -m lightning_scalerl.train --config-dir slurm --multirun ... cluster=one_gpu`."""
        return [
            *(sys.executable, "-m", "lightning_scalerl.train", "--config-dir", str(ROOT / "slurm"), "--multirun"),
            *self.place.overrides(self.name, *self.overrides),
            *(f"cluster={self.template}", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=3"),
            *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10", "hydra.launcher.require_gpu=false"),
            *more,
        ]

    def kill_rank(self, rank: int) -> None:
        """kill -9 of one rank's process, by pid."""
        (pid,) = [pid for pid in self.processes() if f"SLURM_PROCID={rank}" in variables(pid)]
        os.kill(pid, signal.SIGKILL)

    def batch_logs(self) -> str:
        """What the batch scripts said."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("jobs/*/*_log.out")))


def variables(pid: int) -> list[str]:
    """A process's environment."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


def preempt(lab: Lab, where: Sequence[str] = ("-N4",), seconds: int = 1) -> None:
    """A job of higher priority takes the whole cluster, or some of its nodes, for a moment."""
    lab.sh("sbatch", "-p", "high", *where, "--exclusive", "--wrap", f"sleep {seconds}", "-o", "/dev/null")


@pytest.fixture(scope="session")
def place(studies: Place) -> Place:
    """Task files and a model cache, shared by all real studies."""
    return studies


@pytest.fixture(scope="session")
def truth(undisturbed_recipe: dict[str, Deterministic]) -> dict[str, Deterministic]:
    """The journal of an undisturbed run on this machine, by run identity."""
    return undisturbed_recipe


@pytest.fixture(scope="session")
def truth_of_two(place: Place, truth: Any) -> JournalView:
    """The journal of an undisturbed run with two ranks on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_scalerl.train"]
    subprocess.run(
        [sys.executable, *torchrun, *place.overrides("two ranks", *ONE)],
        cwd=place.root,
        env=place.environment(),
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    (run,) = truth
    return read_journal(place.root / "two ranks" / "runs" / run)


@pytest.fixture
def sweep(place: Place, whole: Lab, request: pytest.FixtureRequest) -> FromTemplate:
    """A study of one member, in a folder of its own."""
    return FromTemplate(place, whole, ONE, name=f"study {request.node.name}")


# --- what the files say --------------------------------------------------------------------------------------


def test_every_template_is_tried_here() -> None:
    assert sorted(path.stem for path in (ROOT / "slurm/cluster").glob("*.yaml")) == sorted(TEMPLATES)
    assert sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch")) == ["engines.sbatch", "single_run.sbatch"]


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "slurm").glob("*.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


# --- studies -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_gpu(sweep: FromTemplate, truth: Any) -> None:
    sweep.overrides = ("variant=none", "seed=0,1")
    sweep.template = "one_gpu"
    setup = "hydra.launcher.setup=['echo GPU $CUDA_VISIBLE_DEVICES']"
    assert sweep.launch(setup) == 0, sweep.said()
    found = by_run(sweep.directory)
    assert len(found) == 2 and truth.items() <= found.items()
    assert {state.state for state in sweep.states()} == {"finished"}
    assert len(re.findall(r"(?m)^GPU [01]$", sweep.batch_logs())) == 2, "each has one GPU"
    assert len({str(state.job).split("_")[0] for state in sweep.states()}) == 1, "one array"


@pytest.mark.full
def test_one_node(sweep: FromTemplate, truth: Any, truth_of_two: JournalView) -> None:
    """Two trainers on one node learn what two trainers on this machine do, bit for bit, and what one does, nearly."""
    sweep.template = "one_node"
    assert sweep.launch("hydra.launcher.gpus_per_node=2", "launch.threads=1") == 0, sweep.said()
    journal = sweep.journal()
    assert sweep.finished() and journal.header["ranks"] == 2
    assert journal.deterministic() == truth_of_two.deterministic()
    (run,) = truth
    check_begins_alike(read_journal(sweep.place.root / "undisturbed" / "runs" / run), journal)
    assert (sweep.run_dir() / "log.rank1.txt").exists()
    assert len(sweep.attempts()) == 1


def check_begins_alike(one: JournalView, several: JournalView) -> None:
    """One rank's curve and that of several: the first rollouts exactly, what was learnt from them up to rounding."""
    for kind in ("eval", "train"):
        assert [record.step for record in one.of_kind(kind)] == [record.step for record in several.of_kind(kind)]
        for a, b in zip(one.of_kind(kind), several.of_kind(kind), strict=True):
            if a.step > STEPS_ALIKE:
                continue
            _, _, these = a.deterministic()
            _, _, those = b.deterministic()
            assert those.keys() == these.keys()
            for key, value in these.items():
                least = OF_LOGPROBS if "_gap" in key else 1e-6
                assert those[key] == pytest.approx(value, rel=1e-3, abs=least), f"{kind} {a.step}: {key}"
            exact = [key for key in these if kind == "eval" or key.startswith(tuple(f"train/{x}" for x in OF_ROLLOUTS))]
            assert len(exact) >= 3 and [these[key] for key in exact] == [those[key] for key in exact]


NODES = ("hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=1")


@pytest.mark.full
def test_many_nodes_preempted(sweep: FromTemplate, truth_of_two: JournalView) -> None:
    sweep.template = "many_nodes"
    with sweep.launched(*NODES, verifier_s=0.1) as process:
        sweep.reaches(3)
        preempt(sweep.lab)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished() and sweep.journal().header["ranks"] == 2
    assert sweep.journal().deterministic() == truth_of_two.deterministic()
    first, second = sweep.attempts()
    assert (first.outcome, first.kind, second.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job and second.restart == 1 and second.step >= 3
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "it saved before it left: no step twice"


@pytest.mark.full
def test_many_nodes_of_which_one_loses_its_trainer(sweep: FromTemplate, truth_of_two: JournalView) -> None:
    sweep.template = "many_nodes"
    with sweep.launched(*NODES, verifier_s=0.1) as process:
        sweep.reaches(4)
        sweep.kill_rank(1)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    assert sweep.journal().deterministic() == truth_of_two.deterministic()
    first, second = sweep.attempts()
    assert first.outcome != "finished" and second.outcome == "finished" and second.job != first.job
    entries = [json.loads(line) for line in (sweep.directory / "ledger.jsonl").read_text().splitlines()]
    (retried,) = [entry for entry in entries if entry["event"] == "retried"]
    assert retried["kind"] == "killed"


@pytest.mark.full
def test_a_container_at_its_time_limit(sweep: FromTemplate, truth: Any) -> None:
    """SLURM's warning reaches Python inside; the batch script, outside, requeues."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    sweep.template = "container"
    # The container's own process must survive the signal that is meant for Python; README.md has the same.
    inside = sweep.place.root / "inside.txt"
    command = sweep.place.root / "boxed_python"
    command.write_text(
        "#!/bin/sh\nexec env --ignore-signal=USR2 --ignore-signal=TERM bwrap --dev-bind / / --unshare-pid --proc /proc "
        f'--unshare-uts --hostname {BOX} sh -c \'hostname >>{inside}; exec {sys.executable} "$@"\' sh "$@"\n'
    )
    command.chmod(0o700)
    limits = (f"hydra.launcher.python={command}", "hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=60")
    assert sweep.launch(*limits, verifier_s=0.5) == 0, sweep.said()
    assert by_run(sweep.directory) == truth
    own = sweep.attempts()
    assert len(own) >= 2 and [attempt.outcome for attempt in own] == ["interrupted"] * (len(own) - 1) + ["finished"]
    assert {attempt.kind for attempt in own[:-1]} == {"time_limit"} and len({attempt.job for attempt in own}) == 1
    assert sweep.steps_written() == list(range(1, STEPS + 1))
    assert inside.read_text().split() == [BOX] * len(own)


# --- single runs ---------------------------------------------------------------------------------------------

FITS = ("--cpus-per-task=1", "--mem=3G", "--time=10", "--signal=USR2@60")


def submitted(
    lab: Lab,
    place: Place,
    verifier_s: float,
    *arguments: str,
    options: Sequence[str] = (),
    script: str = "single_run.sbatch",
) -> str:
    """`sbatch slurm/single_run.sbatch ...` with a `python` in PATH; the job's id."""
    own = place.environment(verifier_s)
    environment = {**lab.environment, **{key: own[key] for key in own if os.environ.get(key) != own[key]}}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["sbatch", "--parsable", *FITS, *options, str(ROOT / "slurm" / script), *arguments],
        cwd=place.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_single_runs_are_requeued(
    place: Place, whole: Lab, truth: Any, truth_of_two: JournalView, tiny_model_path: str
) -> None:
    """The command line's with one and two trainers, and README.md's script, each warned in the middle."""
    (run,) = truth
    single, double = (place.root / name / "runs" / run for name in ("single", "double"))
    readme = (ROOT / "slurm/README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    tiny = (("my_model", tiny_model_path), ("max_steps=400", "max_steps=40"), ("scale=paper", "scale=arithmetic"))
    for printed, tried in tiny:
        assert printed in script
        script = script.replace(printed, tried)
    (place.root / "my_script.py").write_text(script)

    train = ("-m", "lightning_scalerl.train")
    two = ("--ntasks-per-node=2", "--gpus-per-node=2")
    jobs = {
        submitted(whole, place, 0.1, *train, *place.overrides("single", *ONE)): (single, STEPS),
        submitted(whole, place, 0.1, *train, *place.overrides("double", *ONE), options=two): (double, STEPS),
        submitted(whole, place, 0.0, "my_script.py"): (place.root / "outputs/my_run", 40),
    }
    warned: set[str] = set()

    def warn() -> bool:
        """What SLURM does before a time limit, to each of them as soon as it is under way."""
        for job, (run_dir, _) in jobs.items():
            if job not in warned and trained(run_dir) and max(trained(run_dir)) >= 2:
                whole.sh("scancel", "--signal=USR2", job)
                warned.add(job)
        return len(warned) == len(jobs)

    eventually(warn, "all under way")
    eventually(lambda: not whole.jobs(), "an empty queue")
    for job, (run_dir, steps) in jobs.items():
        said = (place.root / f"scalerl-{job}.log").read_text()[-3000:]
        assert is_done(run_dir, steps, str(read_journal(run_dir).header["run"])), said  # a script's has no identity
        assert trained(run_dir) == list(range(1, steps + 1)), "it saved before it left: no step twice"
        assert len(re.findall(r"(?m)^(?:scalerl train: )?saved .*SIGUSR2", said)) == (2 if run_dir == double else 1), (
            said
        )
        assert whole.sh("sacct", "-X", "-n", "-P", "-j", job, "-o", "State") == "COMPLETED"
    assert read_journal(single).deterministic() == truth[run]
    assert read_journal(double).deterministic() == truth_of_two.deterministic()


def trained(run_dir: Path) -> list[int]:
    """Every training record that was ever written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == "train"]


@pytest.mark.full
def test_a_cancelled_single_run_stays_cancelled(place: Place, whole: Lab) -> None:
    job = submitted(whole, place, 0.3, "-m", "lightning_scalerl.train", *place.overrides("cancelled", *ONE))
    runs = place.root / "cancelled" / "runs"
    eventually(lambda: list(runs.glob("*/metrics.jsonl")), "a beginning")
    whole.sh("scancel", job)
    eventually(lambda: not whole.jobs(), "an empty queue")
    assert whole.sh("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").startswith("CANCELLED")
