"""Tests of faults on a cluster: a member finishes exactly once, or fails with the true reason.

Every fault is injected into a real SLURM cluster. Faults must not change the results, so journals are compared bit for
bit with those of the same study on this machine without a cluster. Members train if the fault affects training (fixture
`sweep`). Members only imitate training if the fault affects the controller, the scheduler or a process (`light`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sweeps.launch.members import LEASE_NAME
from sweeps.run.lease import holder_facts
from tests.place import PATIENCE_S, STEPS, Deterministic, Place
from tests.slurm.cluster import Lab, Sweep, by_run, eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ONE = ("variant=none", "seed=0")


@dataclass
class OneMember(Sweep):
    """A study of one member in its own folder, and the journal of the undisturbed member."""

    expected: dict[str, Deterministic] = field(default_factory=dict)

    @property
    def gate(self) -> Path:
        """Return the path of a file that a member waits for in its third step."""
        return self.place.root / f"{self.name}.gate"

    def launched_behind_gate(self) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start the command with a member that waits for the gate's file."""
        return self.launched(extra={"VERIFIER_GATE": str(self.gate)})

    def check(self) -> None:
        """Assert that the member finished exactly once, with the expected journal."""
        assert self.state().state == "finished", self.said()[-3000:]
        assert by_run(self.directory) == self.expected
        lines = (self.directory / "ledger.jsonl").read_text().splitlines()
        assert Counter(entry["event"] for entry in map(json.loads, lines))["finished"] == 1


@pytest.fixture
def sweep(
    studies: Place, undisturbed_recipe: dict[str, Deterministic], ready_lab: Lab, request: pytest.FixtureRequest
) -> OneMember:
    """Return a study of a member that trains."""
    return OneMember(studies, ready_lab, ONE, name=f"study {request.node.name}", expected=undisturbed_recipe)


@pytest.fixture
def light(
    light_studies: Place,
    light_undisturbed_recipe: dict[str, Deterministic],
    ready_lab: Lab,
    request: pytest.FixtureRequest,
) -> OneMember:
    """Return a study of a member that does not train, for tests of its job."""
    return OneMember(
        light_studies, ready_lab, ONE, name=f"study {request.node.name}", expected=light_undisturbed_recipe
    )


def test_a_preempted_member_continues(sweep: OneMember) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(3)
        # A job of higher priority takes all nodes.
        sweep.lab.sh("sbatch", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 2", "-o", "/dev/null")
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    sweep.check()
    first, second = sweep.attempts()
    assert (first.outcome, first.kind, second.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job and second.restart == 1 and second.step >= 3
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "it saved before it ended, so no step was repeated"
    assert [record.metrics["compute/wasted_flops"] for record in sweep.journal().of_kind("train")][-1] == 0


@pytest.mark.full
def test_the_time_limit_is_reached_twice(sweep: OneMember) -> None:
    """A chain of starts: each has one minute, and is warned half a minute before its end."""
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30")
    assert sweep.launch(*limits, verifier_s=0.4) == 0, sweep.said()
    sweep.check()
    attempts = sweep.attempts()
    assert [attempt.outcome for attempt in attempts] == ["interrupted"] * (len(attempts) - 1) + ["finished"]
    assert len(attempts) >= 3 and {attempt.kind for attempt in attempts[:-1]} == {"time_limit"}
    assert len({attempt.job for attempt in attempts}) == 1, "the job was requeued, and no new one submitted"
    assert sweep.steps_written() == list(range(1, STEPS + 1))


@pytest.mark.full
def test_max_num_timeout_is_respected(light: OneMember) -> None:
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30", "hydra.launcher.max_num_timeout=0")
    assert light.launch(*limits, verifier_s=0.8) == 1
    state = light.state()
    assert (state.state, state.kind) == ("failed", "gave_up") and "max_num_timeout=0" in str(state.reason)
    assert len(light.attempts()) == 1


@pytest.mark.full
def test_a_killed_member_continues_on_another_node(light: OneMember) -> None:
    with light.launched(verifier_s=0.1) as process:
        light.reaches(5)
        light.kill_member()
        assert process.wait(timeout=PATIENCE_S) == 0, light.said()
    light.check()
    first, second = light.attempts()
    assert (first.outcome, second.outcome) == (None, "finished") and second.job != first.job
    entries = [json.loads(line) for line in (light.directory / "ledger.jsonl").read_text().splitlines()]
    (retried,) = [entry for entry in entries if entry["event"] == "retried"]
    assert retried["kind"] == "killed" and first.node in retried["reason"] and retried["node"] == first.node
    assert second.node != first.node, "the next attempt avoids the node"
    # Compute of lost steps is reported separately, and is not part of the compute axes.
    assert light.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] > 0


@pytest.mark.full
def test_a_killed_member_continues_after_a_torn_line_and_a_truncated_checkpoint(sweep: OneMember) -> None:
    no_retries = "hydra.launcher.retries={killed:0}"
    with sweep.launched(no_retries, verifier_s=0.1) as process:
        sweep.reaches(8)
        sweep.kill_member()
        assert process.wait(timeout=PATIENCE_S) == 1
    state = sweep.state()
    assert (state.state, state.kind) == ("failed", "killed")
    assert "killed from outside" in sweep.said()
    journal = sweep.run_dir() / "metrics.jsonl"
    with journal.open("ab") as handle:
        handle.write(b'{"kind":"train","time":1795264034.6,"step":9,"metr')
    newest, previous = sorted((sweep.run_dir() / "checkpoints").glob("*.ckpt"), reverse=True)
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    # The same command continues from the previous checkpoint.
    assert sweep.launch(no_retries) == 0, sweep.said()
    sweep.check()
    assert sweep.attempts()[-1].outcome == "finished"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    # Compute of lost steps is reported separately, and is not part of the compute axes.
    assert sweep.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] > 0
    (resumed,) = [entry["step"] for entry in entries if entry["kind"] == "resume"]
    assert resumed == int(previous.stem.removeprefix("step-"))


@pytest.mark.full
def test_a_member_continues_after_its_node_was_powered_off(sweep: OneMember) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(5)
        (first,) = sweep.attempts()
        sweep.lab.run("node-off", first.node.removeprefix("n"))
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    sweep.check()
    attempts = sweep.attempts()
    assert attempts[0].outcome is None and attempts[-1].outcome == "finished" and attempts[-1].node != first.node


@pytest.mark.full
def test_a_job_that_runs_twice_after_a_lost_slurmd_is_written_once(light: OneMember) -> None:
    """SLURM gives the node up and starts the job elsewhere, while the first copy continues."""
    with light.launched_behind_gate() as process:
        light.reaches(1)
        (first,) = light.attempts()
        light.lab.run("kill", f"slurmd:{first.node}")
        eventually(lambda: len(light.attempts()) == 2, "a second copy")
        assert len(light.processes()) == 2
        light.gate.touch()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()
    assert light.steps_written() == list(range(1, STEPS + 1)), "only one copy writes; the other one finds the run done"
    assert {attempt.outcome for attempt in light.attempts()} == {"finished"}
    assert light.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] == 0


@pytest.mark.full
def test_the_second_copy_continues_when_the_first_dies(light: OneMember) -> None:
    with light.launched_behind_gate() as process:
        light.reaches(1)
        (first,) = light.attempts()
        (pid,) = light.processes()
        light.lab.run("kill", f"slurmd:{first.node}")
        eventually(lambda: len(light.attempts()) == 2, "a second copy")
        os.kill(pid, 9)
        light.gate.touch()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()
    assert [attempt.outcome for attempt in light.attempts()] == [None, "finished"]


@pytest.mark.full
def test_a_hanging_member_ends_itself_and_continues_on_another_node(light: OneMember) -> None:
    short_patience = ("launch.hang_factor=2", "launch.hang_min_s=8")
    with light.launched(*short_patience, extra={"VERIFIER_GATE": str(light.gate)}) as process:
        light.reaches(2)
        eventually(lambda: any(attempt.kind == "hang" for attempt in light.attempts()), "the end of one that hangs")
        light.gate.touch()
        assert process.wait(timeout=PATIENCE_S) == 0, light.said()
    light.check()
    first, *_, last = light.attempts()
    assert first.kind == "hang" and last.outcome == "finished" and last.node != first.node
    assert first.reason is not None and "no sign of life for" in first.reason
    assert "odd_digits" in (light.run_dir() / "log.txt").read_text(), "the log names the place of the hang"


def test_a_study_survives_a_crash_of_slurmctld_after_the_submission(light: OneMember) -> None:
    """This is the worst moment: slurmctld may lose jobs and reuse their ids. The study submits lost jobs again."""
    with light.launched(verifier_s=0.1) as process:
        eventually(lambda: light.directory.exists() and any(s.job for s in light.states()), "a submission")
        light.lab.run("kill", "slurmctld")
        time.sleep(3)
        light.lab.up()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()


@pytest.mark.full
def test_a_study_waits_for_slurmctld_when_it_is_launched(light: OneMember) -> None:
    light.lab.run("kill", "slurmctld")
    with light.launched() as process:
        eventually(lambda: "not submitted yet (" in light.said(), "a refusal that is only for now")
        light.lab.up()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()
    assert len(light.attempts()) == 1


def test_a_job_cancelled_by_hand_is_not_retried(light: OneMember) -> None:
    with light.launched(verifier_s=0.2) as process:
        light.reaches(2)
        light.lab.sh("scancel", light.state().job or "")
        assert process.wait(timeout=PATIENCE_S) == 1
    state = light.state()
    assert (state.state, state.kind) == ("failed", "cancelled")
    assert not light.lab.jobs(), "a cancelled job is not requeued"
    assert light.status()["counts"] == {"cancelled": 1}


@pytest.mark.full
def test_a_second_launch_at_the_same_time_is_refused(light: OneMember) -> None:
    with light.launched_behind_gate() as first:
        eventually(lambda: light.directory.exists() and light.states(), "the first")
        assert light.launch() == 1
        assert "is being run by another process" in light.said() and f"process {first.pid}" in light.said()
        light.gate.touch()
        assert first.wait(timeout=PATIENCE_S) == 0
    light.check()
    assert len(light.attempts()) == 1


def test_collect_takes_over_from_a_killed_controller(light: OneMember) -> None:
    with light.launched_behind_gate() as process:
        light.reaches(1)
        process.kill()
        process.wait()
    assert light.status()["counts"] == {"running": 1}
    with ThreadPoolExecutor(1) as shell:
        collecting = shell.submit(light.scalerl, "collect", str(light.directory), "--wait", "--trust")
        # The job must still run when the other controller looks for it.
        old_pids = (None, process.pid)
        eventually(
            lambda: (holder_facts(light.directory, LEASE_NAME) or {}).get("pid") not in old_pids, "another controller"
        )
        time.sleep(2)
        light.gate.touch()
        result = collecting.result()
    assert result.returncode == 0, result.stderr
    assert "1 finished" in result.stdout
    light.check()
    assert len(light.attempts()) == 1


@pytest.mark.full
def test_a_detached_study_is_collected_later(light: OneMember) -> None:
    assert light.launch("--detach", verifier_s=0.05) == 0
    assert "scalerl collect" in light.said()
    assert light.state().state == "started"
    eventually(lambda: light.status()["counts"] == {"finished": 1}, "the end")
    result = light.scalerl("collect", str(light.directory), "--trust")
    assert result.returncode == 0, result.stderr
    light.check()


@pytest.mark.full
def test_a_larger_budget_continues_the_run(light: OneMember) -> None:
    assert light.launch("budget.steps=6") == 0, light.said()
    assert light.launch(f"budget.steps={STEPS}") == 0, light.said()
    assert by_run(light.directory) == light.expected
    assert [attempt.step for attempt in light.attempts()] == [-1, 6]


# Calls the real sbatch. After the first accepted job it kills its caller, and the processes in `whom`.
KILLING_SBATCH = """#!/bin/sh
{sbatch} "$@" || exit
[ ! -e '{once}' ] || exit 0
touch '{once}'
read -r pid name state controller rest </proc/$PPID/stat
kill -9 $PPID {whom}
"""


def killing_sbatch(light: OneMember, folder: Path, whom: str) -> dict[str, str]:
    """Return an environment whose sbatch kills its caller."""
    folder.mkdir()
    path = light.lab.environment.get("PATH", os.environ["PATH"])
    real = shutil.which("sbatch", path=path)
    (folder / "sbatch").write_text(KILLING_SBATCH.format(sbatch=real, once=folder / "once", whom=whom))
    (folder / "sbatch").chmod(0o755)
    return {"PATH": f"{folder}:{path}"}


def test_a_submission_killed_before_it_named_its_pickle_is_completed(light: OneMember, tmp_path: Path) -> None:
    """submitit is killed after sbatch, before it names the pickle. The job waits for the pickle and finds it."""
    assert light.launch(extra=killing_sbatch(light, tmp_path / "bin", "")) == 0, light.said()
    light.check()
    assert [attempt.outcome for attempt in light.attempts()] == ["finished"]
    assert len(list((light.directory / "jobs").iterdir())) == 1


@pytest.mark.full
def test_a_job_without_its_pickle_is_retried_at_no_cost(light: OneMember, tmp_path: Path) -> None:
    """The controller is killed too, and the next one starts only after the job has failed."""
    assert light.launch(extra=killing_sbatch(light, tmp_path / "bin", "$controller")) != 0
    (folder,) = (light.directory / "jobs").iterdir()
    assert not list(folder.glob("*_submitted.pkl"))
    eventually(lambda: not light.lab.jobs(), "the end of a job that waits for its pickle")
    assert "could not find submitted jobs" in "".join(log.read_text() for log in folder.glob("*_log.out"))
    assert light.launch("hydra.launcher.retries.launch=0") == 0, light.said()
    light.check()
    entries = [json.loads(line) for line in (light.directory / "ledger.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries if entry["event"] == "retried"] == ["half_submitted"]
    assert [attempt.outcome for attempt in light.attempts()] == ["finished"]
