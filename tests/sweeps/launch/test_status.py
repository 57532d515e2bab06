"""Tests of the overview of a study: the state of a member follows from ledger, scheduler, jobs and journals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sweeps.cli import main as cli
from sweeps.cli import study_commands
from sweeps.errors import UserError
from sweeps.executor.slurm.scheduler import JobInfo
from sweeps.executor.slurm.settings import JobSettings
from sweeps.launch import status
from sweeps.launch.ledger import Ledger
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.status import STATES, MemberView, counts, log_tail, overview, to_json
from sweeps.run.journal import LOG_FILE, Journal
from sweeps.run.lease import Lease
from tests.sweeps.executor.fake_cluster import (
    IS_CANCELLED,
    IS_FORGOTTEN,
    NODE_FAILS,
    RAISES,
    REQUEUES,
    STEPS,
    FakeCluster,
    Fate,
    Killed,
    Place,
    VirtualTime,
    light,
    member,
)


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    light(monkeypatch)


def place(
    directory: Path, fates: Mapping[int, Sequence[Fate]] | None = None, members: int = 1, **cluster: object
) -> Place:
    specs = [member(seed) for seed in range(members)]
    by_run = {specs[number].run: each for number, each in (fates or {}).items()}
    return Place(directory, FakeCluster(VirtualTime(), by_run, **cluster), specs, JobSettings())  # type: ignore[arg-type]


def states(here: Place, scheduler: bool = True) -> list[str]:
    return [view.state for view in overview(here.directory, here.cluster if scheduler else None)]


def first(here: Place, scheduler: bool = True) -> MemberView:
    return overview(here.directory, here.cluster if scheduler else None)[0]


# --- on a cluster --------------------------------------------------------------------------------------------


def test_a_member_is_followed_from_the_queue_to_its_end(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [REQUEUES]}, wait_s=50)
    here.run(detach=True)
    job = here.cluster.jobs[0]
    assert (first(here).state, first(here).job, first(here).attempts) == ("queued", "1", 1)
    here.time.sleep(60)
    assert job.state == "RUNNING"
    view = first(here)
    assert (view.state, view.node, view.step, view.steps) == ("running", job.node, None, STEPS)
    here.time.sleep(60)
    assert job.state == "PENDING"
    view = first(here)
    assert (view.state, view.step, view.pass_rate, view.reason) == ("queued", 1, 0.5, "BeginTime")
    here.time.sleep(50)
    assert (first(here).state, first(here).attempts) == ("running", 2)
    here.time.sleep(100)
    view = first(here)
    assert (view.state, view.step, view.kind, view.reason) == ("finished", STEPS, None, None)
    assert here.count(here.specs[0].run, "finished") == 0, "the overview writes nothing to the ledger"


def test_a_running_member_without_activity_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(tmp_path)
    here.run(detach=True)
    here.time.sleep(20)
    assert (first(here).state, first(here).idle_s) == ("running", None), (
        "no heartbeat yet, or a heartbeat of an older version"
    )
    monkeypatch.setattr(study_commands, "_scheduler", lambda study: here.cluster)
    run_dir = here.run_dir(here.specs[0].run)
    outputs = {}
    for silent_s in (5.0, 300.0):
        lease = Lease(run_dir, facts=lambda: {"doing": "decode", "idle_s": silent_s}, beat_s=0.05)  # noqa: B023
        lease.acquire()
        with lease:
            deadline = time.monotonic() + 30
            while (view := first(here)).idle_s is None:
                assert time.monotonic() < deadline, "no heartbeat within 30 s"
                time.sleep(0.02)
            assert view.doing == "decode" and view.idle_s is not None and silent_s <= view.idle_s < silent_s + 50
            assert cli.main(["status", str(here.directory)]) == 0
            outputs[silent_s] = capsys.readouterr().out
    assert (
        "no sign of life" not in outputs[5.0] and "no sign of life for 5 min (last activity: decode)" in outputs[300.0]
    )
    assert first(here).idle_s is None, "the process has ended"


def test_trainer_and_engines_of_a_live_member_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places and states come from the heartbeat, idle shares and rates from the journal."""
    here = place(tmp_path)
    here.run(detach=True)
    here.time.sleep(20)
    assert first(here).sides == (), "a run without engines in its heartbeat shows no sides"
    monkeypatch.setattr(study_commands, "_scheduler", lambda study: here.cluster)
    run_dir = here.run_dir(here.specs[0].run)
    engines = [
        {"where": "srun n2", "state": "up"},
        {"where": "file:/shared/engines/1", "state": "starting"},
        {"where": "local", "state": "starting"},  # has no measurements yet
    ]
    with Lease(run_dir, facts=lambda: {"doing": "x", "idle_s": 1.0, "engines": engines}, beat_s=0.05) as lease:
        lease.acquire()
        deadline = time.monotonic() + 30
        while not first(here).sides:
            assert time.monotonic() < deadline, "no heartbeat within 30 s"
            time.sleep(0.02)
        assert {(side.idle, side.tokens_s) for side in first(here).sides} == {(None, None)}
        journal = Journal(run_dir)
        both = {"live/trainer_idle": 0.125, "live/trainer_tokens_s": 5300.4}
        journal.record("train", 1, {**both, "live/engine0_idle": 0.5, "live/engine0_tokens_s": 1234.5})
        journal.record("train", 2, {**both, "live/engine0_idle": 0.25, "live/engine0_tokens_s": 2000.0})
        journal.close()
        (node,) = {side.where for side in first(here).sides if side.side == "trainer"}
        assert node == json.loads((run_dir / ".writer.json").read_text())["host"]
        assert [(side.side, side.where, side.state, side.idle, side.tokens_s) for side in first(here).sides] == [
            ("trainer", node, "running", 0.125, 5300.4),
            ("engine 0", "srun n2", "up", 0.25, 2000.0),
            ("engine 1", "file:/shared/engines/1", "starting", None, None),
            ("engine 2", "local", "starting", None, None),
        ]
        assert cli.main(["status", str(here.directory)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["trainer", node, "running", "12%", "5,300"] in lines
        assert ["engine", "0", "srun", "n2", "up", "25%", "2,000"] in lines
        assert ["engine", "1", "file:/shared/engines/1", "starting", "-", "-"] in lines
        (member_json,) = to_json(here.directory, overview(here.directory, here.cluster))["members"]
        assert member_json["sides"][1] == {
            "side": "engine 0", "where": "srun n2", "state": "up", "idle": 0.25, "tokens_s": 2000.0
        }  # fmt: skip
    here.time.sleep(1_000)
    final_view = first(here)
    assert final_view.state == "finished" and final_view.sides == (), (
        "the last steps of this run have no engine metrics"
    )
    assert cli.main(["status", str(here.directory)]) == 0
    assert "trainer and engines:" not in capsys.readouterr().out


def test_a_finished_live_run_keeps_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "a")
    journal.header(run="a", recipe="r", seed=0)
    journal.record("train", 1, {"live/trainer_idle": 0.9, "live/engine0_idle": 0.9, "live/engine10_idle": 0.9})
    # The newest values are in an evaluation record.
    newest = {"live/trainer_idle": 0.5, "live/engine0_idle": 0.1, "live/engine10_idle": 0.2}
    journal.record("eval", 1, {"eval/heldout/pass_rate": 0.5, **newest})
    journal.end(1, "finished", None)
    journal.close()
    (view,) = overview(tmp_path)
    assert view.pass_rate == 0.5
    assert [side.side for side in view.sides] == ["trainer", *(f"engine {number}" for number in range(11))]
    assert [(side.where, side.state, side.idle) for side in (view.sides[0], view.sides[11], view.sides[5])] == [
        (None, "finished", 0.5), (None, "finished", 0.2), (None, "finished", None)
    ]  # fmt: skip
    assert cli.main(["status", str(tmp_path)]) == 0 and "engine 1" not in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path), "--all"]) == 0 and "engine 10" in capsys.readouterr().out


def test_a_job_that_ended_badly_while_nobody_looked_has_ended(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [RAISES], 1: [NODE_FAILS], 2: [IS_CANCELLED]}, members=4)
    here.run(detach=True)
    here.time.sleep(100)
    assert states(here) == ["ended", "ended", "ended", "finished"]
    assert [view.reason for view in overview(here.directory, here.cluster)][:3] == ["FAILED", "NODE_FAIL", "CANCELLED"]
    here.time.sleep(1_000)
    assert states(here) == ["ended", "ended", "ended", "finished"], "also when the queue no longer shows them"
    here.run(again=False)
    assert states(here) == ["failed", "finished", "cancelled", "finished"]
    view = first(here)
    assert (view.kind, view.reason) == ("error", "ValueError: no good")


def test_a_reused_job_id_is_not_ours(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN]})
    here.run(detach=True)
    here.time.sleep(100)
    here.cluster.foreign(1, state="RUNNING")
    assert states(here) == ["ended"]


def test_without_an_answer_of_the_scheduler_the_jobs_record_counts(tmp_path: Path) -> None:
    here = place(tmp_path, wait_s=50)
    here.run(detach=True)
    here.cluster.silent = lambda now: True
    assert (first(here).state, first(here).reason) == ("queued", "last known state; the scheduler does not answer")
    here.time.sleep(60)
    assert states(here) == ["running"]
    assert states(here, scheduler=False) == ["running"]
    here.time.sleep(100)
    assert states(here) == ["finished"]


def test_unsubmitted_members_wait_while_a_controller_runs(tmp_path: Path) -> None:
    here = place(tmp_path, members=3, submit_limit=0)
    here.run(detach=True)
    assert states(here) == ["ended"] * 3, "submission was refused, and no controller is left to retry"
    with Lease(here.directory, LEASE_NAME) as lease:
        lease.acquire()
        assert states(here) == ["waiting"] * 3


def test_a_member_whose_controller_died_while_submitting_is_shown_as_ended(tmp_path: Path) -> None:
    here = place(tmp_path, members=2)
    with pytest.raises(Killed):
        here.run(killed_at=("after", 2))
    assert states(here) == ["ended"] * 2
    assert first(here).reason == "was being submitted"


def test_a_job_that_no_controller_has_recorded_is_shown_as_queued(tmp_path: Path) -> None:
    """The controller died just after `sbatch`; the job's name shows whose it is."""
    here = place(tmp_path, members=2, wait_s=1e6)
    with pytest.raises(Killed):
        here.run(killed_at=("before", 3))
    assert here.cluster.jobs and first(here).job is None
    assert [(view.state, view.reason) for view in overview(here.directory, here.cluster)] == [
        ("queued", "was being submitted; a job of its submission is in the queue")
    ] * 2
    for job in here.cluster.jobs:
        job.name = "another-study"
    assert states(here) == ["ended"] * 2


def test_a_member_at_work_is_shown_as_running_if_its_controller_died_while_submitting(tmp_path: Path) -> None:
    """Nobody has recorded its job, so only the lease of the job's process shows that it runs."""
    here = place(tmp_path, members=2)
    with pytest.raises(Killed):
        here.run(killed_at=("after", 2))
    run_dir = here.run_dir(here.specs[0].run)
    with Lease(run_dir) as lease:
        lease.acquire()
        views = overview(here.directory, here.cluster)
    assert [(view.state, view.reason) for view in views] == [
        ("running", None),
        ("ended", "was being submitted"),
    ]
    assert states(here) == ["ended"] * 2


def test_the_reason_of_a_queued_job_is_shown_unless_it_is_priority(tmp_path: Path) -> None:
    here = place(tmp_path, wait_s=1e6)
    here.run(detach=True)
    assert first(here).reason is None
    here.cluster.jobs[0].reason = "QOSMaxJobsPerUserLimit"
    assert first(here).reason == "QOSMaxJobsPerUserLimit"


@pytest.mark.parametrize(
    ("slurm_state", "state"),
    [("COMPLETING", "running"), ("SUSPENDED", "running"), ("CONFIGURING", "queued"), ("TIMEOUT", "ended")],
)
def test_states_of_slurm_map_to_ours(tmp_path: Path, slurm_state: str, state: str) -> None:
    here = place(tmp_path)
    here.run(detach=True)
    here.cluster.jobs[0].state = slurm_state
    assert states(here) == [state]


def test_the_overview_changes_nothing(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [RAISES], 1: [REQUEUES]}, members=3)
    here.run(detach=True)
    here.time.sleep(30)

    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in here.directory.rglob("*") if path.is_file()}

    before = everything()
    for view in overview(here.directory, here.cluster):
        log_tail(here.directory, view)
    assert everything() == before
    assert here.cluster.cancelled == []


# --- on this machine -----------------------------------------------------------------------------------------


def test_local_members_end_with_their_controller(tmp_path: Path) -> None:
    specs = [member(0), member(1)]
    ledger = Ledger(tmp_path)
    ledger.append_all("planned", [{"run": spec.run, "recipe": spec.recipe, "seed": spec.seed} for spec in specs])
    for spec in specs:
        spec.write(tmp_path / "runs" / spec.run)
    ledger.append("started", specs[0].run)
    with Lease(tmp_path, LEASE_NAME) as lease:
        lease.acquire()
        assert [view.state for view in overview(tmp_path)] == ["running", "waiting"]
    gone, waiting = overview(tmp_path)
    assert (gone.state, waiting.state) == ("ended", "waiting") and "process that started it is gone" in str(gone.reason)
    ledger.append("failed", specs[0].run, kind="killed", reason="killed by SIGKILL")
    view = overview(tmp_path)[0]
    assert (view.state, view.kind, view.reason, view.attempts) == ("failed", "killed", "killed by SIGKILL", 1)
    ledger.append("failed", specs[1].run, kind="cancelled", reason="by hand")
    assert overview(tmp_path)[1].state == "cancelled"


def test_runs_without_a_ledger_have_the_state_of_their_journals(tmp_path: Path) -> None:
    for name, ending in (("a", "finished"), ("b", "failed"), ("c", None)):
        journal = Journal(tmp_path / name)
        journal.header(run=name, recipe=f"recipe-{name}", seed=3)
        journal.record("train", 2, {"train/loss": 1.0})
        journal.record("eval", 2, {"eval/heldout/pass_rate": 0.25})
        if ending:
            journal.end(2, ending, "why" if ending == "failed" else None)
        journal.close()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.jsonl").write_text("")
    views = overview(tmp_path)
    assert [view.state for view in views] == ["finished", "failed", "running", "waiting"]
    assert [(view.recipe, view.seed, view.step, view.pass_rate) for view in views[:3]] == [
        (f"recipe-{name}", 3, 2, 0.25) for name in "abc"
    ]
    assert [view.reason for view in views] == [None, "why", None, None]


def test_an_absent_log_of_a_failed_run_is_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single run writes to the terminal, and has no log."""
    journal = Journal(tmp_path / "runs" / "a")
    journal.header(run="a", recipe="r", seed=0)
    journal.end(0, "failed", "why")
    journal.close()
    assert cli.main(["status", str(tmp_path)]) == 0 and "log.txt" not in capsys.readouterr().out
    (tmp_path / "runs" / "a" / LOG_FILE).write_text("a line\n")
    assert cli.main(["status", str(tmp_path)]) == 0 and "log.txt:\n    a line\n" in capsys.readouterr().out


def test_a_run_without_a_ledger_has_ended_if_its_writer_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, saved on SIGTERM (lease released), alive; the last two on other machines, silent and alive."""
    for name in ("killed", "saved", "alive", "silent", "remote", "finished"):
        journal = Journal(tmp_path / name)
        journal.header(run=name, recipe="r", seed=0)
        journal.record("train", 2, {"train/loss": 1.0})
        if name == "finished":
            journal.end(2, "finished")
        journal.close()
    monkeypatch.setattr(status, "_WATCH_WRITERS_S", 0.05)
    killed = f"""
import os
from pathlib import Path
from sweeps.run.lease import Lease
Lease(Path({str(tmp_path / "killed")!r})).acquire()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    for name in ("saved", "finished"):
        with Lease(tmp_path / name) as lease:
            lease.acquire()
    for name, age_s in (("silent", 1000), ("remote", 10)):
        path = tmp_path / name / ".writer.json"
        path.write_text('{"host": "elsewhere", "pid": 1, "token": "a"}')
        os.utime(path, (time.time() - age_s,) * 2)
    with Lease(tmp_path / "alive") as lease:
        lease.acquire()
        views = {view.run: view for view in overview(tmp_path)}
    assert {run: view.state for run, view in views.items()} == {
        "killed": "ended", "saved": "ended", "alive": "running", "silent": "ended", "remote": "running",
        "finished": "finished",
    }  # fmt: skip
    gone = "the process that started it is gone; the same command continues it"
    assert [views[run].reason for run in ("killed", "saved", "silent", "alive")] == [gone, gone, gone, None]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no study here"):
        overview(tmp_path)
    with pytest.raises(UserError, match="no study here"):
        overview(tmp_path / "nowhere")


# --- text and JSON -------------------------------------------------------------------------------------------


def view(state: str, run: str = "a") -> MemberView:
    return MemberView(run, "scalerl", 0, state, None, 4, None, 1)


def test_counts_are_complete_and_in_one_line() -> None:
    views = [view(state) for state in STATES for _ in range(STATES.index(state) + 1)]
    line = counts(views)
    numbers = {part.split(" ")[1]: int(part.split(" ")[0]) for part in line.split(", ")}
    assert numbers == Counter(each.state for each in views)
    assert counts([]) == ""


def test_the_json_has_every_member_and_the_counts(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [RAISES]}, members=3)
    here.run()
    content = to_json(here.directory, overview(here.directory))
    assert content["counts"] == {"failed": 1, "finished": 2}
    assert [each["run"] for each in content["members"]] == [spec.run for spec in here.specs]
    assert content["members"][0]["reason"] == "ValueError: no good"
    assert content["members"][1]["step"] == STEPS


def test_members_continued_with_other_code_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text and JSON, for a study and for a folder of runs without a ledger."""
    code = {"commit": "aaaa", "diff": None, "files": "aa", "folders": {}, "versions": {}}
    here = place(tmp_path / "study", members=2)
    here.run()
    description = "from step 2: commit aaaa -> bbbb"
    for number, spec in enumerate(here.specs):
        for run_dir in (here.run_dir(spec.run), tmp_path / "scripts" / spec.run):
            journal = Journal(run_dir)
            journal.header(run=spec.run, recipe=spec.recipe, seed=spec.seed, code=code)
            journal.resume(2, code={**code, "commit": "bbbb", "files": "bb"} if number else code)
            journal.close()
    for folder in (here.directory, tmp_path / "scripts"):
        views = {each.run: each for each in overview(folder)}
        assert [views[spec.run].code for spec in here.specs] == [None, description]
        lacks = None if folder == here.directory else "no records of steps 1 to 2"
        assert {views[spec.run].reason for spec in here.specs} == {lacks}
        codes_in_json = {each["run"]: each["code"] for each in to_json(folder, list(views.values()))["members"]}
        assert [codes_in_json[spec.run] for spec in here.specs] == [None, description]
        assert cli.main(["status", str(folder)]) == 0
        changed = [line for line in capsys.readouterr().out.splitlines() if "other code" in line]
        assert changed == [
            f"{here.specs[1].recipe} seed {here.specs[1].seed} was continued with other code: {description}"
        ]


def test_the_end_of_a_log_is_short_and_masks_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "something-of-ours")
    run_dir = tmp_path / "runs" / "a"
    run_dir.mkdir(parents=True)
    assert log_tail(tmp_path, view("failed")) == []
    text = "x" * 40_000 + "\n" + "".join(f"line {number}\n\n" for number in range(9)) + "with something-of-ours\n"
    (run_dir / LOG_FILE).write_bytes(text.encode() + b"\xff\xfe\n")
    tail = log_tail(tmp_path, view("failed"), lines=4)
    assert tail[:3] == ["line 7", "line 8", "with ***"]
    assert len(tail) == 4


def test_a_torn_ledger_and_a_missing_specification_are_tolerated(tmp_path: Path) -> None:
    here = place(tmp_path, members=2)
    here.run(detach=True)
    with here.directory.joinpath("ledger.jsonl").open("a") as handle:
        handle.write('{"event": "finis')
    (here.run_dir(here.specs[0].run) / "spec.json").unlink()
    views = overview(here.directory, here.cluster)
    assert [each.state for each in views] == ["queued", "queued"]
    assert [each.steps for each in views] == [None, STEPS]


def test_a_job_without_our_name_is_ignored(tmp_path: Path) -> None:
    here = place(tmp_path)
    here.run(detach=True)

    class Confused(FakeCluster):
        def queue(self) -> dict[str, JobInfo] | None:
            return {"1": JobInfo("1", "RUNNING", "n0", "None", "", "")}

    assert overview(here.directory, Confused(VirtualTime()))[0].state == "ended"


def test_missing_steps_in_a_members_journal_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run resumed from a checkpoint that is newer than its journal."""
    here = place(tmp_path, members=2)
    here.run()
    journal = Journal(here.run_dir(here.specs[1].run))
    journal.resume(STEPS + 3)
    journal.close()
    lacks = f"no records of steps {STEPS + 1} to {STEPS + 3}"
    views = {each.run: each.reason for each in overview(here.directory)}
    assert [views[spec.run] for spec in here.specs] == [None, lacks]
    assert cli.main(["status", str(here.directory)]) == 0
    assert lacks in " ".join(capsys.readouterr().out.split())
