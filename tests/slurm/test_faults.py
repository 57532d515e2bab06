"""What happens to jobs on a cluster: whatever it is, a member ends done, once, or failed with the true reason.

Every fault is injected into a real SLURM cluster. What a run learns must not depend on it: journals are compared bit
for bit with those of the same study run on this machine without a cluster. Where the fault reaches into training (the
fixture `sweep`) the runs are real ones; where it is the controller's, the scheduler's or a whole process's (`light`),
members only do as if they trained.
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
from sweeps.run.lease import alive
from tests.place import PATIENCE_S, STEPS, Deterministic, Place
from tests.slurm.cluster import Lab, Sweep, by_run, eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ONE = ("variant=none", "seed=0")


@dataclass
class OneMember(Sweep):
    """A study of one member, in a folder of its own, and what the member learns when nothing happens to it."""

    truth: dict[str, Deterministic] = field(default_factory=dict)

    @property
    def gate(self) -> Path:
        """Behind it a member waits in its third step until `touch`."""
        return self.place.root / f"{self.name}.gate"

    def held(self) -> AbstractContextManager[subprocess.Popen[str]]:
        """The command, running, its member behind the gate."""
        return self.launched(extra={"VERIFIER_GATE": str(self.gate)})

    def check(self) -> None:
        """Done, exactly once, and nothing lost or doubled."""
        assert self.state().state == "finished", self.said()[-3000:]
        assert by_run(self.directory) == self.truth
        lines = (self.directory / "ledger.jsonl").read_text().splitlines()
        assert Counter(entry["event"] for entry in map(json.loads, lines))["finished"] == 1


@pytest.fixture
def sweep(
    studies: Place, undisturbed_recipe: dict[str, Deterministic], whole: Lab, request: pytest.FixtureRequest
) -> OneMember:
    """A member that trains."""
    return OneMember(studies, whole, ONE, name=f"study {request.node.name}", truth=undisturbed_recipe)


@pytest.fixture
def light(
    light_studies: Place, light_undisturbed_recipe: dict[str, Deterministic], whole: Lab, request: pytest.FixtureRequest
) -> OneMember:
    """A member that does not train: what is tested is what happens to its job."""
    return OneMember(light_studies, whole, ONE, name=f"study {request.node.name}", truth=light_undisturbed_recipe)


def test_preempted(sweep: OneMember) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(3)
        # A job of higher priority takes the whole cluster.
        sweep.lab.sh("sbatch", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 2", "-o", "/dev/null")
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    sweep.check()
    first, second = sweep.attempts()
    assert (first.outcome, first.kind, second.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job and second.restart == 1 and second.step >= 3
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "it saved before it left: no step twice"
    assert [record.metrics["compute/wasted_flops"] for record in sweep.journal().of_kind("train")][-1] == 0


@pytest.mark.full
def test_the_time_limit_is_reached_twice(sweep: OneMember) -> None:
    """A chain of jobs: each one minute long, warned half a minute before its end."""
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30")
    assert sweep.launch(*limits, verifier_s=0.4) == 0, sweep.said()
    sweep.check()
    own = sweep.attempts()
    assert [attempt.outcome for attempt in own] == ["interrupted"] * (len(own) - 1) + ["finished"]
    assert len(own) >= 3 and {attempt.kind for attempt in own[:-1]} == {"time_limit"}
    assert len({attempt.job for attempt in own}) == 1, "the job was requeued, not submitted anew"
    assert sweep.steps_written() == list(range(1, STEPS + 1))


@pytest.mark.full
def test_a_limit_on_time_limits_is_kept(light: OneMember) -> None:
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30", "hydra.launcher.max_num_timeout=0")
    assert light.launch(*limits, verifier_s=0.8) == 1
    state = light.state()
    assert (state.state, state.kind) == ("failed", "gave_up") and "max_num_timeout=0" in str(state.reason)
    assert len(light.attempts()) == 1


@pytest.mark.full
def test_killed(light: OneMember) -> None:
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
    assert second.node != first.node, "the next attempt keeps off the node"
    # What was lost is reported, and on no axis.
    assert light.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] > 0


@pytest.mark.full
def test_killed_again_and_again_with_a_torn_line_and_a_truncated_checkpoint(sweep: OneMember) -> None:
    never = "hydra.launcher.retries={killed:0}"
    with sweep.launched(never, verifier_s=0.1) as process:
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
    # The same command goes on, from the checkpoint before.
    assert sweep.launch(never) == 0, sweep.said()
    sweep.check()
    assert sweep.attempts()[-1].outcome == "finished"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    # What was lost is reported, and on no axis.
    assert sweep.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] > 0
    (resumed,) = [entry["step"] for entry in entries if entry["kind"] == "resume"]
    assert resumed == int(previous.stem.removeprefix("step-"))


@pytest.mark.full
def test_a_node_is_powered_off(sweep: OneMember) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(5)
        (first,) = sweep.attempts()
        sweep.lab.run("node-off", first.node.removeprefix("n"))
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    sweep.check()
    own = sweep.attempts()
    assert own[0].outcome is None and own[-1].outcome == "finished" and own[-1].node != first.node


@pytest.mark.full
def test_a_node_loses_its_slurmd_and_the_job_runs_twice(light: OneMember) -> None:
    """SLURM gives the node up and starts the job elsewhere, while the first copy lives on."""
    with light.held() as process:
        light.reaches(1)
        (first,) = light.attempts()
        light.lab.run("kill", f"slurmd:{first.node}")
        eventually(lambda: len(light.attempts()) == 2, "a second copy")
        assert len(light.processes()) == 2
        light.gate.touch()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()
    assert light.steps_written() == list(range(1, STEPS + 1)), "one writes, and the other finds it done"
    assert {attempt.outcome for attempt in light.attempts()} == {"finished"}
    assert light.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] == 0


@pytest.mark.full
def test_the_first_copy_dies_and_the_second_goes_on(light: OneMember) -> None:
    with light.held() as process:
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
def test_one_that_hangs_ends_itself_and_goes_on_elsewhere(light: OneMember) -> None:
    quick = ("launch.hang_factor=2", "launch.hang_min_s=8")
    with light.launched(*quick, extra={"VERIFIER_GATE": str(light.gate)}) as process:
        light.reaches(2)
        eventually(lambda: any(attempt.kind == "hang" for attempt in light.attempts()), "the end of one that hangs")
        light.gate.touch()
        assert process.wait(timeout=PATIENCE_S) == 0, light.said()
    light.check()
    first, *_, last = light.attempts()
    assert first.kind == "hang" and last.outcome == "finished" and last.node != first.node
    assert first.reason is not None and "no sign of life for" in first.reason
    assert "odd_digits" in (light.run_dir() / "log.txt").read_text(), "where it hung"


def test_slurmctld_dies_after_the_submission(light: OneMember) -> None:
    """The worst moment: jobs may be forgotten, and their ids given out again. Asked for again, they run."""
    with light.launched(verifier_s=0.1) as process:
        eventually(lambda: light.directory.exists() and any(s.job for s in light.states()), "a submission")
        light.lab.run("kill", "slurmctld")
        time.sleep(3)
        light.lab.up()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()


@pytest.mark.full
def test_slurmctld_is_away_when_the_study_is_launched(light: OneMember) -> None:
    light.lab.run("kill", "slurmctld")
    with light.launched() as process:
        eventually(lambda: "not submitted yet (" in light.said(), "a refusal that is only for now")
        light.lab.up()
        assert process.wait(timeout=300) == 0, light.said()
    light.check()
    assert len(light.attempts()) == 1


def test_cancelled_by_hand(light: OneMember) -> None:
    with light.launched(verifier_s=0.2) as process:
        light.reaches(2)
        light.lab.sh("scancel", light.state().job or "")
        assert process.wait(timeout=PATIENCE_S) == 1
    state = light.state()
    assert (state.state, state.kind) == ("failed", "cancelled")
    assert not light.lab.jobs(), "a cancelled job is not requeued"
    assert light.status()["counts"] == {"cancelled": 1}


@pytest.mark.full
def test_the_same_command_twice_at_once(light: OneMember) -> None:
    with light.held() as first:
        eventually(lambda: light.directory.exists() and light.states(), "the first")
        assert light.launch() == 1
        assert "is being run by another process" in light.said() and f"process {first.pid}" in light.said()
        light.gate.touch()
        assert first.wait(timeout=PATIENCE_S) == 0
    light.check()
    assert len(light.attempts()) == 1


def test_the_controller_is_killed_and_a_later_shell_takes_over(light: OneMember) -> None:
    with light.held() as process:
        light.reaches(1)
        process.kill()
        process.wait()
    assert light.status()["counts"] == {"running": 1}
    with ThreadPoolExecutor(1) as shell:
        collecting = shell.submit(light.scalerl, "collect", str(light.directory), "--wait", "--trust")
        # The job has to be under way still when somebody else looks for it.
        mine = (None, process.pid)
        eventually(lambda: (alive(light.directory, LEASE_NAME) or {}).get("pid") not in mine, "another controller")
        time.sleep(2)
        light.gate.touch()
        done = collecting.result()
    assert done.returncode == 0, done.stderr
    assert "1 finished" in done.stdout
    light.check()
    assert len(light.attempts()) == 1


@pytest.mark.full
def test_detached(light: OneMember) -> None:
    assert light.launch("--detach", verifier_s=0.05) == 0
    assert "scalerl collect" in light.said()
    assert light.state().state == "started"
    eventually(lambda: light.status()["counts"] == {"finished": 1}, "the end")
    done = light.scalerl("collect", str(light.directory), "--trust")
    assert done.returncode == 0, done.stderr
    light.check()


@pytest.mark.full
def test_a_larger_budget_goes_on(light: OneMember) -> None:
    assert light.launch("budget.steps=6") == 0, light.said()
    assert light.launch(f"budget.steps={STEPS}") == 0, light.said()
    assert by_run(light.directory) == light.truth
    assert [attempt.step for attempt in light.attempts()] == [-1, 6]


# sbatch as it is, but at the first time whoever has called it is gone when it has taken the job.
KILLS = """#!/bin/sh
{sbatch} "$@" || exit
[ ! -e '{once}' ] || exit 0
touch '{once}'
read -r pid name state controller rest </proc/$PPID/stat
kill -9 $PPID {whom}
"""


def killing(light: OneMember, folder: Path, whom: str) -> dict[str, str]:
    """An environment with that sbatch."""
    folder.mkdir()
    path = light.lab.environment.get("PATH", os.environ["PATH"])
    real = shutil.which("sbatch", path=path)
    (folder / "sbatch").write_text(KILLS.format(sbatch=real, once=folder / "once", whom=whom))
    (folder / "sbatch").chmod(0o755)
    return {"PATH": f"{folder}:{path}"}


def test_a_submission_killed_before_its_pickle_had_its_name_is_completed(light: OneMember, tmp_path: Path) -> None:
    """submitit is killed between sbatch and the pickle's name; the job waits a minute for it, and finds it."""
    assert light.launch(extra=killing(light, tmp_path / "bin", "")) == 0, light.said()
    light.check()
    assert [attempt.outcome for attempt in light.attempts()] == ["finished"]
    assert len(list((light.directory / "jobs").iterdir())) == 1


def test_a_job_that_starts_without_its_pickle_costs_the_member_nothing(light: OneMember, tmp_path: Path) -> None:
    """The controller is killed with it, and comes back when the job has failed."""
    assert light.launch(extra=killing(light, tmp_path / "bin", "$controller")) != 0
    (folder,) = (light.directory / "jobs").iterdir()
    assert not list(folder.glob("*_submitted.pkl"))
    eventually(lambda: not light.lab.jobs(), "the end of a job that waits for its pickle")
    assert "could not find submitted jobs" in "".join(log.read_text() for log in folder.glob("*_log.out"))
    assert light.launch("hydra.launcher.retries.launch=0") == 0, light.said()
    light.check()
    entries = [json.loads(line) for line in (light.directory / "ledger.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries if entry["event"] == "retried"] == ["half_submitted"]
    assert [attempt.outcome for attempt in light.attempts()] == ["finished"]
