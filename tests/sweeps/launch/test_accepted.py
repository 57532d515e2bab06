"""Truths about a launch that is refused, and about the moment in which one is accepted.

A refused launch has changed nothing: not how the study was launched before, not what its ledger, its members'
specifications and its folders say. The cluster exists only in virtual time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import UserError
from sweeps.executor.failure import NO_RETRIES
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.executor.slurm.scheduler import RefusedError
from sweeps.executor.slurm.settings import JobSettings
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.interruption import ask_to_stop, requested_stop
from sweeps.run.lease import Lease
from sweeps.run.spec import RunSpec, make_spec
from tests.sweeps.executor.fake_cluster import (
    FINISHES,
    IS_CANCELLED,
    RAISES,
    FakeCluster,
    Fate,
    Killed,
    MortalLease,
    Place,
    RecordingObserver,
    VirtualTime,
    light,
    member,
)
from tests.sweeps.launch.test_study import ScriptedExecutor


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    light(monkeypatch)


def place(directory: Path, fates: dict[int, Sequence[Fate]] | None = None, members: int = 2) -> Place:
    specs = [member(seed) for seed in range(members)]
    by_run = {specs[number].run: each for number, each in (fates or {}).items()}
    return Place(directory, FakeCluster(VirtualTime(), by_run), specs, JobSettings.of({}), retry_policy())


def launch(
    here: Place,
    detach: bool = False,
    again: bool = True,
    specs: Sequence[RunSpec] | None = None,
    partition: str = "gpu",
    told: RecordingObserver | None = None,
) -> dict[str, MemberState]:
    """As the launcher does: `launch.json` is kept when the launch is accepted."""
    plan = LaunchSettings("slurm", "a:b", (), 1, 1, None, "x", SlurmCluster.of({"partition": partition}), here.retries)
    study = Study(here.directory, here.specs if specs is None else specs)
    with study.prepare(here.executor(), [told] if told else [], here.retries, again) as prepared:
        return prepared.commit({here.directory / LAUNCH_FILE: plan.text()}, detach)


def contents(folder: Path) -> dict[str, bytes]:
    """All files, and folders; but the lease's, which say when it was held last."""
    found = {path: path for path in folder.rglob("*") if LEASE_NAME not in path.name}
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder" for path in found}


def longer(spec: RunSpec) -> RunSpec:
    return replace(spec, steps=spec.steps + 10)


def test_a_study_that_was_refused_is_not_there(tmp_path: Path) -> None:
    here, told = place(tmp_path / "outputs" / "mine"), RecordingObserver()
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here, partition="nope", told=told)
    assert not list(tmp_path.iterdir())
    assert told.closed == [(2, 0)]


def test_a_refused_launch_leaves_the_study_as_it_was(tmp_path: Path) -> None:
    """Members that are done, members that were given up, one more seed, and a larger budget for all of them."""
    here = place(tmp_path / "mine", {1: [RAISES]})
    launch(here)
    ask_to_stop(here.run_dir(here.specs[1].run), "no longer needed")
    before, told = contents(tmp_path), RecordingObserver()
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here, specs=[*map(longer, here.specs), member(7)], partition="nope", told=told)
    assert contents(tmp_path) == before
    assert told.closed == [(0, 3)], "all go on, or do not, as they did"
    assert requested_stop(here.run_dir(here.specs[1].run)) == "no longer needed"
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "gpu"
    launch(here, specs=[*here.specs, member(7)])
    assert {state.state for state in Ledger(here.directory).fold().values()} == {"finished"}


def test_a_folder_that_was_there_without_a_study_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    here = place(tmp_path)
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_refused_launch_is_not_accepted_for_the_jobs_that_run(tmp_path: Path) -> None:
    here = place(tmp_path / "mine")
    launch(here, detach=True)
    before = contents(tmp_path)
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here, specs=[*here.specs, member(7)], partition="nope")
    assert contents(tmp_path) == before
    launch(here, again=False)
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


def test_members_on_a_cluster_are_out_of_reach_of_this_machine(tmp_path: Path) -> None:
    here, told = place(tmp_path / "mine"), RecordingObserver()
    launch(here, detach=True)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"have jobs on a cluster \(1_0, 1_1\); .*collect --wait .*mine"):
        Study(here.directory, [*here.specs, member(7)]).run(ScriptedExecutor(), [told])
    assert contents(tmp_path) == before
    assert told.opened == 0, "MLflow was not told of what never began"


@pytest.mark.parametrize("error", [UserError("no"), OSError(28, "No space left on device")])
def test_what_goes_wrong_before_anything_was_submitted_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    here = place(tmp_path / "mine")

    def fails(*arguments: object, **more: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("sweeps.executor.slurm.executor.ClusterExecutor.next_batch", fails)
        with pytest.raises(type(error)):
            launch(here)
    assert not list(tmp_path.iterdir())


def test_it_is_accepted_once_members_are_taken_and_before_the_ledger_says_so(tmp_path: Path) -> None:
    here = place(tmp_path / "mine", members=3)
    here.settings = JobSettings.of({"array_size": 2})
    seen: list[tuple[int, list[str]]] = []

    class Accepted(RecordingObserver):
        def accepted(self) -> None:
            assert (here.directory / LAUNCH_FILE).is_file()
            seen.append((len(here.cluster.jobs), [entry["event"] for entry in Ledger(here.directory).entries()]))

    launch(here, told=Accepted())
    assert seen == [(2, ["planned"] * 3 + ["submitting"] * 2)]


def test_what_needs_no_submission_is_accepted_too(tmp_path: Path) -> None:
    here = place(tmp_path / "mine")
    launch(here, detach=True)
    launch(here, partition="other")  # all are under way
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "other"
    launch(here, partition="third")  # all are done
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "third"


def test_a_launch_that_waits_for_the_scheduler_can_be_gone_on_with(tmp_path: Path) -> None:
    """It is no refusal; and of a study that was not there before nothing is spoilt."""
    here = place(tmp_path / "mine")
    here.cluster.faults.extend(["no_answer", "killed_before"])
    with pytest.raises(Killed):
        launch(here)
    MortalLease.holder_was_killed = False
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "gpu"
    launch(here)
    for spec in here.specs:
        here.finished_once(spec.run)


def test_what_was_put_off_is_not_taken_back_when_it_is_refused_later(tmp_path: Path) -> None:
    """The scheduler may have taken it without an answer; how the study was launched before still holds."""
    here = place(tmp_path / "mine")
    launch(here, specs=here.specs[:1])
    here.cluster.faults.extend(["no_answer", "refused"])
    with pytest.raises(UserError, match="partition"):
        launch(here, partition="nope")
    assert Ledger(here.directory).fold()[here.specs[1].run].state == "submitting"
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "gpu"
    launch(here)
    here.finished_once(here.specs[1].run)


def test_killed_between_the_submission_and_launch_json(tmp_path: Path) -> None:
    """The same command finds the jobs by their names; what was known of an earlier launch still holds."""
    here = place(tmp_path / "mine", members=2)
    launch(here, specs=here.specs[:1])
    before = (here.directory / LAUNCH_FILE).read_bytes()
    here.cluster.faults.append("killed_after")
    with pytest.raises(Killed):
        launch(here, partition="other")
    MortalLease.holder_was_killed = False
    assert (here.directory / LAUNCH_FILE).read_bytes() == before
    launch(here, partition="other")
    assert len(here.cluster.jobs) == 2
    for spec in here.specs:
        here.finished_once(spec.run)
    assert (here.directory / LAUNCH_FILE).read_bytes() != before


# --- cancelled jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remembers_s", [300.0, 10.0], ids=["in the queue", "in accounting"])
@pytest.mark.parametrize("detach", [True, False])
def test_a_job_that_was_cancelled_is_written_down_and_submitted_again_by_one_command(
    tmp_path: Path, detach: bool, remembers_s: float
) -> None:
    here = place(tmp_path / "mine", {0: [IS_CANCELLED], 1: [RAISES]}, members=3)
    here.cluster.remembers_s = remembers_s
    launch(here, detach=True)
    here.time.sleep(100)
    told = RecordingObserver()
    launch(here, detach=detach, told=told)
    for spec, kind in zip(here.specs, ("cancelled", "error", None), strict=True):
        failed = [entry["kind"] for entry in here.events(spec.run) if entry["event"] == "failed"]
        assert failed == ([kind] if kind else [])
        assert len(here.cluster.jobs_of(spec.run)) == (2 if kind else 1)
        assert ("retried" in told.events[spec.run]) == (kind is not None)
    if not detach:
        assert {each.state for each in Ledger(here.directory).fold().values()} == {"finished"}
        assert all(each[-1] == "finished" for each in told.events.values())


def test_without_being_asked_a_cancelled_member_stays_cancelled(tmp_path: Path) -> None:
    here = place(tmp_path / "mine", {0: [IS_CANCELLED]})
    launch(here, detach=True)
    here.time.sleep(100)
    states = launch(here, again=False)
    assert states[here.specs[0].run].kind == "cancelled"
    assert len(here.cluster.jobs_of(here.specs[0].run)) == 1


def test_a_job_that_is_cancelled_while_the_command_watches_stays_cancelled(tmp_path: Path) -> None:
    """Of this command's own jobs, and of those that it has found under way."""
    for adopted in (False, True):
        here = place(tmp_path / str(adopted), {0: [IS_CANCELLED, FINISHES]})
        if adopted:
            launch(here, detach=True)
            here.time.sleep(20)  # it runs
        states = launch(here)
        assert states[here.specs[0].run].kind == "cancelled"
        assert len(here.cluster.jobs_of(here.specs[0].run)) == 1


def test_another_chance_is_one_chance(tmp_path: Path) -> None:
    """A member that was cancelled, is submitted again, and is cancelled once more."""
    here = place(tmp_path / "mine", {0: [IS_CANCELLED] * 5})
    launch(here, detach=True)
    here.time.sleep(100)
    states = launch(here)
    assert states[here.specs[0].run].kind == "cancelled"
    assert len(here.cluster.jobs_of(here.specs[0].run)) == 2


def test_status_after_a_refused_launch_of_this_machine(tmp_path: Path) -> None:
    """Cancelled jobs are not called running: how the study was launched is still known."""
    here = place(tmp_path / "mine", {0: [IS_CANCELLED], 1: [IS_CANCELLED]})
    launch(here, detach=True)
    here.time.sleep(100)
    study = Study(here.directory, here.specs)
    plan = LaunchSettings("local", "a:b", (), 1, 1, None, "x", retries=NO_RETRIES)
    with pytest.raises(UserError, match="have jobs on a cluster"), prepare_study(study, plan) as prepared:
        prepared.commit({here.directory / LAUNCH_FILE: plan.text()})
    assert LaunchSettings.read(here.directory).kind == "slurm"
    assert {view.state for view in overview(here.directory, here.cluster)} == {"ended"}


# --- labels --------------------------------------------------------------------------------------------------


def recipe(lr: float, label: str = "scalerl", seed: int = 0, **more: object) -> RunSpec:
    config = {"optimizer": {"lr": lr, **more}, "seed": seed, "budget": {"steps": 4}}
    return make_spec(config, config, label, "scalerl")


def test_a_label_that_stands_for_something_else_is_refused_before_anything_starts(tmp_path: Path) -> None:
    Study(tmp_path, [recipe(0.001), recipe(0.001, seed=1)]).run(ScriptedExecutor())
    before, executor, told = contents(tmp_path), ScriptedExecutor(), RecordingObserver()
    with pytest.raises(UserError) as refusal:
        Study(tmp_path, [recipe(0.003), recipe(0.002, "scalerl+loss=dapo")]).run(executor, [told])
    said = str(refusal.value)
    assert said.startswith("recipe: 'scalerl' already stands for other runs in ")
    assert "optimizer.lr is 0.003, there 0.001" in said and "study=NAME" in said and "\n" not in said
    assert executor.submitted == [] and told.opened == 0 and contents(tmp_path) == before


def test_a_folder_that_became_a_study_meanwhile_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands at once into a folder that was not there: one is accepted, then the other is refused."""
    acquire = Lease.acquire

    def late(lease: Lease, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        Study(tmp_path / "mine", [recipe(0.001)]).run(ScriptedExecutor())
        acquire(lease, *arguments, **options)

    monkeypatch.setattr(Lease, "acquire", late)
    with pytest.raises(UserError, match="already stands for other runs"):
        Study(tmp_path / "mine", [recipe(0.003)]).run(ScriptedExecutor())
    assert Ledger(tmp_path / "mine").fold()[recipe(0.001).run].state == "finished"


def test_what_somebody_else_has_put_into_a_members_folder_meanwhile_stays(tmp_path: Path) -> None:
    here = place(tmp_path / "mine")
    launch(here)
    new = member(7)

    def refuse(script: Path) -> str:
        (here.run_dir(new.run) / "metrics.jsonl").write_text("of a run that was trained by itself\n")
        raise RefusedError("sbatch: error: invalid partition specified: nope")

    here.cluster.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(UserError, match="partition"):
        launch(here, specs=[*here.specs, new], partition="nope")
    assert [path.name for path in here.run_dir(new.run).iterdir()] == ["metrics.jsonl"]


def test_the_same_curve_another_label_and_what_is_known_are_not_refused(tmp_path: Path) -> None:
    first = recipe(0.001)
    Study(tmp_path, [first]).run(ScriptedExecutor())
    for more in ([recipe(0.001, seed=1)], [replace(first, steps=9)], [recipe(0.003, "scalerl+optimizer.lr=0.003")]):
        executor = ScriptedExecutor()
        Study(tmp_path, more).run(executor)
        assert executor.submitted == [more[0].run]


def without_curves(directory: Path) -> None:
    """As an earlier version wrote it."""
    ledger = directory / "ledger.jsonl"
    ledger.write_text(re.sub(r',"(curve|crc)":"\w+"', "", ledger.read_text()))


def test_a_ledger_without_curves_is_read_with_its_specifications(tmp_path: Path) -> None:
    Study(tmp_path, [recipe(0.001)]).run(ScriptedExecutor())
    without_curves(tmp_path)
    assert [state.curve for state in Ledger(tmp_path).fold().values()] == [None]
    with pytest.raises(UserError, match=r"optimizer\.lr is 0\.003, there 0\.001"):
        Study(tmp_path, [recipe(0.003)]).run(ScriptedExecutor())
    Study(tmp_path, [recipe(0.001, seed=1)]).run(ScriptedExecutor())


def test_a_study_that_has_pooled_two_curves_goes_on_with_either(tmp_path: Path) -> None:
    """An earlier version let both in; their seeds are still wanted."""
    one, other = recipe(0.001), recipe(0.003)
    Study(tmp_path, [one]).run(ScriptedExecutor())
    Ledger(tmp_path).append("planned", other.run, recipe="scalerl", seed=0)
    other.write(tmp_path / "runs" / other.run)
    for lr in (0.001, 0.003):
        Study(tmp_path, [recipe(lr, seed=1)]).run(ScriptedExecutor())
    with pytest.raises(UserError, match=r"optimizer\.lr is 0\.01, there 0\.001"):
        Study(tmp_path, [recipe(0.01)]).run(ScriptedExecutor())


def test_what_differs_is_told_as_far_as_it_is_known(tmp_path: Path) -> None:
    first = recipe(0.001, a=1, b=2, c=3, d=4)
    Study(tmp_path, [first]).run(ScriptedExecutor())
    with pytest.raises(UserError, match=r"optimizer.lr is 0.01, there 0.001; .*; and 2 more; give"):
        Study(tmp_path, [recipe(0.01, a=0, b=0, c=0, d=0, e=0)]).run(ScriptedExecutor())
    same = replace(recipe(0.001, a=1, b=2, c=3, d=4, seed=1), curve="another")
    with pytest.raises(UserError, match="the values are the same, but a file that they name"):
        Study(tmp_path, [same]).run(ScriptedExecutor())
    (tmp_path / "runs" / first.run / "spec.json").write_text("damaged")
    with pytest.raises(UserError, match="their configuration differs"):
        Study(tmp_path, [recipe(0.01)]).run(ScriptedExecutor())
