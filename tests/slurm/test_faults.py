"""What happens to jobs on a cluster: whatever it is, a member ends done, once, or failed with the true reason.

Every fault is injected into a real SLURM cluster, into real training runs. What a run learns must not depend on it:
journals are compared bit for bit with those of the same study run on this machine without a cluster.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest

from tests.place import STEPS, Place
from tests.slurm.cluster import Lab, Sweep, baseline, by_run, eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ONE = ("variant=none", "seed=0")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Any]:
    """Task files, model cache, and the journal of an undisturbed run."""
    place = Place(tmp_path_factory.mktemp("place"))
    return place, baseline(place, *ONE)


@pytest.fixture
def sweep(truth: tuple[Place, Any], whole: Lab, request: pytest.FixtureRequest) -> Sweep:
    """A study of one member, in a folder of its own."""
    return Sweep(truth[0], whole, ONE, name=f"study {request.node.name}")


def check(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    """Done, exactly once, and nothing lost or doubled."""
    assert sweep.state().state == "finished", sweep.said()[-3000:]
    assert by_run(sweep.directory) == truth[1]
    events = [entry["event"] for entry in map(json.loads, (sweep.directory / "ledger.jsonl").read_text().splitlines())]
    assert Counter(events)["finished"] == 1


def test_preempted(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(3)
        # A job of higher priority takes the whole cluster.
        sweep.lab.sh("sbatch", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 2", "-o", "/dev/null")
        assert process.wait(timeout=200) == 0, sweep.said()
    check(sweep, truth)
    first, second = sweep.attempts()
    assert (first.outcome, first.kind, second.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job and second.restart == 1 and second.step >= 3
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "it saved before it left: no step twice"
    assert [record.metrics["compute/wasted_flops"] for record in sweep.journal().of_kind("train")][-1] == 0


def test_the_time_limit_is_reached_twice(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    """A chain of jobs: each one minute long, warned half a minute before its end."""
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30")
    assert sweep.launch(*limits, verifier_s=0.4) == 0, sweep.said()
    check(sweep, truth)
    own = sweep.attempts()
    assert [attempt.outcome for attempt in own] == ["interrupted"] * (len(own) - 1) + ["finished"]
    assert len(own) >= 3 and {attempt.kind for attempt in own[:-1]} == {"time_limit"}
    assert len({attempt.job for attempt in own}) == 1, "the job was requeued, not submitted anew"
    assert sweep.steps_written() == list(range(1, STEPS + 1))


def test_a_limit_on_time_limits_is_kept(sweep: Sweep) -> None:
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=30", "hydra.launcher.max_num_timeout=0")
    assert sweep.launch(*limits, verifier_s=0.4) == 1
    state = sweep.state()
    assert (state.state, state.kind) == ("failed", "gave_up") and "max_num_timeout=0" in str(state.reason)
    assert len(sweep.attempts()) == 1


def test_killed(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(5)
        sweep.kill_member()
        assert process.wait(timeout=200) == 0, sweep.said()
    check(sweep, truth)
    first, second = sweep.attempts()
    assert (first.outcome, second.outcome) == (None, "finished") and second.job != first.job
    entries = [json.loads(line) for line in (sweep.directory / "ledger.jsonl").read_text().splitlines()]
    (retried,) = [entry for entry in entries if entry["event"] == "retried"]
    assert retried["kind"] == "killed" and first.node in retried["reason"] and retried["node"] == first.node
    assert second.node != first.node, "the next attempt keeps off the node"
    # What was lost is reported, and on no axis.
    assert sweep.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] > 0


def test_killed_again_and_again_with_a_torn_line_and_a_truncated_checkpoint(
    sweep: Sweep, truth: tuple[Place, Any]
) -> None:
    never = "hydra.launcher.retries={killed:0}"
    with sweep.launched(never, verifier_s=0.1) as process:
        sweep.reaches(8)
        sweep.kill_member()
        assert process.wait(timeout=200) == 1
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
    check(sweep, truth)
    assert sweep.attempts()[-1].outcome == "finished"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    (resumed,) = [entry["step"] for entry in entries if entry["kind"] == "resume"]
    assert resumed == int(previous.stem.removeprefix("step-"))


def test_a_node_is_powered_off(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.1) as process:
        sweep.reaches(5)
        (first,) = sweep.attempts()
        sweep.lab.run("node-off", first.node.removeprefix("n"))
        assert process.wait(timeout=200) == 0, sweep.said()
    check(sweep, truth)
    own = sweep.attempts()
    assert own[0].outcome is None and own[-1].outcome == "finished" and own[-1].node != first.node


def test_a_node_loses_its_slurmd_and_the_job_runs_twice(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    """SLURM gives the node up and starts the job elsewhere, while the first copy lives on."""
    with sweep.launched(verifier_s=0.7) as process:
        sweep.reaches(1)
        (first,) = sweep.attempts()
        sweep.lab.run("kill", f"slurmd:{first.node}")
        eventually(lambda: len(sweep.attempts()) == 2, "a second copy")
        assert len(sweep.processes()) == 2
        assert process.wait(timeout=300) == 0, sweep.said()
    check(sweep, truth)
    assert sweep.steps_written() == list(range(1, STEPS + 1)), "one writes, and the other finds it done"
    assert {attempt.outcome for attempt in sweep.attempts()} == {"finished"}
    assert sweep.journal().of_kind("train")[-1].metrics["compute/wasted_flops"] == 0


def test_the_first_copy_dies_and_the_second_goes_on(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.5) as process:
        sweep.reaches(1)
        (first,) = sweep.attempts()
        (pid,) = sweep.processes()
        sweep.lab.run("kill", f"slurmd:{first.node}")
        eventually(lambda: len(sweep.attempts()) == 2, "a second copy")
        os.kill(pid, 9)
        assert process.wait(timeout=300) == 0, sweep.said()
    check(sweep, truth)
    assert [attempt.outcome for attempt in sweep.attempts()] == [None, "finished"]


def test_slurmctld_dies_after_the_submission(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    """The worst moment: jobs may be forgotten, and their ids given out again. Asked for again, they run."""
    with sweep.launched(verifier_s=0.05) as process:
        eventually(lambda: sweep.directory.exists() and any(s.job for s in sweep.states()), "a submission")
        sweep.lab.run("kill", "slurmctld")
        time.sleep(3)
        sweep.lab.up()
        assert process.wait(timeout=300) == 0, sweep.said()
    check(sweep, truth)


def test_slurmctld_is_away_when_the_study_is_launched(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    sweep.lab.run("kill", "slurmctld")
    with sweep.launched() as process:
        eventually(lambda: "wait to be submitted" in sweep.said(), "a refusal that is only for now")
        sweep.lab.up()
        assert process.wait(timeout=300) == 0, sweep.said()
    check(sweep, truth)
    assert len(sweep.attempts()) == 1


def test_cancelled_by_hand(sweep: Sweep) -> None:
    with sweep.launched(verifier_s=0.2) as process:
        sweep.reaches(2)
        sweep.lab.sh("scancel", sweep.state().job or "")
        assert process.wait(timeout=200) == 1
    state = sweep.state()
    assert (state.state, state.kind) == ("failed", "cancelled")
    assert not sweep.lab.jobs(), "a cancelled job is not requeued"
    assert sweep.status()["counts"] == {"cancelled": 1}


def test_the_same_command_twice_at_once(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.1) as first:
        eventually(lambda: sweep.directory.exists() and sweep.states(), "the first")
        assert sweep.launch(verifier_s=0.1) == 1
        assert "is being run by another process" in sweep.said() and f"process {first.pid}" in sweep.said()
        assert first.wait(timeout=200) == 0
    check(sweep, truth)
    assert len(sweep.attempts()) == 1


def test_the_controller_is_killed_and_a_later_shell_takes_over(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    with sweep.launched(verifier_s=0.2) as process:
        sweep.reaches(1)
        process.kill()
        process.wait()
    assert sweep.status()["counts"] == {"running": 1}
    done = sweep.scalerl("collect", str(sweep.directory), "--wait")
    assert done.returncode == 0, done.stderr
    assert "1 finished" in done.stdout
    check(sweep, truth)
    assert len(sweep.attempts()) == 1


def test_detached(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    assert sweep.launch("--detach", verifier_s=0.05) == 0
    assert "scalerl collect" in sweep.said()
    assert sweep.state().state == "started"
    eventually(lambda: sweep.status()["counts"] == {"finished": 1}, "the end")
    done = sweep.scalerl("collect", str(sweep.directory))
    assert done.returncode == 0, done.stderr
    check(sweep, truth)


def test_a_larger_budget_goes_on(sweep: Sweep, truth: tuple[Place, Any]) -> None:
    assert sweep.launch("budget.steps=6") == 0, sweep.said()
    assert sweep.launch(f"budget.steps={STEPS}") == 0, sweep.said()
    assert by_run(sweep.directory) == truth[1]
    assert [attempt.step for attempt in sweep.attempts()] == [-1, 6]
