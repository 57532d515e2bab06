"""Tests of refused launches, and of the moment in which a launch is accepted.

A refused launch changes nothing: neither `launch.json` nor the ledger, the members' specifications and their folders.
The cluster is a fake one in virtual time.
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
from sweeps.launch.labels import labelled_as_before
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.interruption import ask_to_stop, requested_stop
from sweeps.run.lease import Lease
from sweeps.run.spec import RunSpec, make_spec, run_of_curve
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
    by_run = {specs[number].run: fates_of_run for number, fates_of_run in (fates or {}).items()}
    return Place(directory, FakeCluster(VirtualTime(), by_run), specs, JobSettings.of({}), retry_policy())


def launch(
    here: Place,
    detach: bool = False,
    again: bool = True,
    specs: Sequence[RunSpec] | None = None,
    partition: str = "gpu",
    observer: RecordingObserver | None = None,
) -> dict[str, MemberState]:
    """Launch as the launcher does: `launch.json` is written when the launch is accepted."""
    plan = LaunchSettings("slurm", "a:b", (), 1, 1, None, "x", SlurmCluster.of({"partition": partition}), here.retries)
    study = Study(here.directory, here.specs if specs is None else specs)
    with study.prepare(here.executor(), [observer] if observer else [], here.retries, again) as prepared:
        return prepared.commit({here.directory / LAUNCH_FILE: plan.text()}, detach)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files and folders, without the lease's, whose times change."""
    paths = {path: path for path in folder.rglob("*") if LEASE_NAME not in path.name}
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder" for path in paths}


def longer(spec: RunSpec) -> RunSpec:
    return replace(spec, steps=spec.steps + 10)


def test_a_refused_new_study_leaves_no_folder(tmp_path: Path) -> None:
    here, observer = place(tmp_path / "outputs" / "mine"), RecordingObserver()
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here, partition="nope", observer=observer)
    assert not list(tmp_path.iterdir())
    assert observer.closed == [(2, 0)]


def test_a_refused_launch_leaves_the_study_unchanged(tmp_path: Path) -> None:
    """The refused launch has finished and failed members, a new seed, and a larger budget for all."""
    here = place(tmp_path / "mine", {1: [RAISES]})
    launch(here)
    ask_to_stop(here.run_dir(here.specs[1].run), "no longer needed")
    before, observer = contents(tmp_path), RecordingObserver()
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        launch(here, specs=[*map(longer, here.specs), member(7)], partition="nope", observer=observer)
    assert contents(tmp_path) == before
    assert observer.closed == [(0, 3)], "no member counts as failed by the refusal"
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


def test_a_refused_launch_leaves_running_jobs_and_launch_json_unchanged(tmp_path: Path) -> None:
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


def test_members_with_jobs_on_a_cluster_are_not_run_locally(tmp_path: Path) -> None:
    here, observer = place(tmp_path / "mine"), RecordingObserver()
    launch(here, detach=True)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"have jobs on a cluster \(1_0, 1_1\); .*collect --wait .*mine"):
        Study(here.directory, [*here.specs, member(7)]).run(ScriptedExecutor(), [observer])
    assert contents(tmp_path) == before
    assert observer.opened == 0, "observers such as MLflow are not opened for a refused launch"


@pytest.mark.parametrize("error", [UserError("no"), OSError(28, "No space left on device")])
def test_an_error_before_the_first_submission_leaves_no_files(
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


def test_a_launch_is_accepted_after_the_submission_and_before_its_ledger_entry(tmp_path: Path) -> None:
    here = place(tmp_path / "mine", members=3)
    here.settings = JobSettings.of({"array_size": 2})
    states: list[tuple[int, list[str]]] = []

    class Accepted(RecordingObserver):
        def accepted(self) -> None:
            assert (here.directory / LAUNCH_FILE).is_file()
            states.append((len(here.cluster.jobs), [entry["event"] for entry in Ledger(here.directory).entries()]))

    launch(here, observer=Accepted())
    assert states == [(2, ["planned"] * 3 + ["submitting"] * 2)]


def test_a_launch_that_submits_nothing_is_accepted(tmp_path: Path) -> None:
    here = place(tmp_path / "mine")
    launch(here, detach=True)
    launch(here, partition="other")  # all members have jobs
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "other"
    launch(here, partition="third")  # all members are finished
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "third"


def test_a_launch_killed_while_it_waits_for_the_scheduler_can_be_continued(tmp_path: Path) -> None:
    """Waiting is not a refusal, so a killed launch keeps `launch.json`; the study is new, so no earlier one is lost."""
    here = place(tmp_path / "mine")
    here.cluster.faults.extend(["no_answer", "killed_before"])
    with pytest.raises(Killed):
        launch(here)
    MortalLease.holder_was_killed = False
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "gpu"
    launch(here)
    for spec in here.specs:
        here.finished_once(spec.run)


def test_an_unanswered_submission_is_kept_when_its_retry_is_refused(tmp_path: Path) -> None:
    """The first submission may have been accepted without an answer, so it stays in the ledger.

    `launch.json` keeps the settings of the earlier launch.
    """
    here = place(tmp_path / "mine")
    launch(here, specs=here.specs[:1])
    here.cluster.faults.extend(["no_answer", "refused"])
    with pytest.raises(UserError, match="partition"):
        launch(here, partition="nope")
    assert Ledger(here.directory).fold()[here.specs[1].run].state == "submitting"
    assert LaunchSettings.read(here.directory).cluster.to_mapping()["partition"] == "gpu"
    launch(here)
    here.finished_once(here.specs[1].run)


def test_a_launch_killed_before_it_writes_launch_json_can_be_continued(tmp_path: Path) -> None:
    """The same command finds the jobs by their names. Until then the earlier `launch.json` stays."""
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
def test_one_launch_records_a_cancelled_job_and_submits_its_member_again(
    tmp_path: Path, detach: bool, remembers_s: float
) -> None:
    here = place(tmp_path / "mine", {0: [IS_CANCELLED], 1: [RAISES]}, members=3)
    here.cluster.remembers_s = remembers_s
    launch(here, detach=True)
    here.time.sleep(100)
    observer = RecordingObserver()
    launch(here, detach=detach, observer=observer)
    for spec, kind in zip(here.specs, ("cancelled", "error", None), strict=True):
        failed = [entry["kind"] for entry in here.events(spec.run) if entry["event"] == "failed"]
        assert failed == ([kind] if kind else [])
        assert len(here.cluster.jobs_of(spec.run)) == (2 if kind else 1)
        assert ("retried" in observer.events[spec.run]) == (kind is not None)
    if not detach:
        assert {each.state for each in Ledger(here.directory).fold().values()} == {"finished"}
        assert all(each[-1] == "finished" for each in observer.events.values())


def test_a_cancelled_member_stays_cancelled_unless_again_is_set(tmp_path: Path) -> None:
    here = place(tmp_path / "mine", {0: [IS_CANCELLED]})
    launch(here, detach=True)
    here.time.sleep(100)
    states = launch(here, again=False)
    assert states[here.specs[0].run].kind == "cancelled"
    assert len(here.cluster.jobs_of(here.specs[0].run)) == 1


def test_a_job_cancelled_during_the_launch_stays_cancelled(tmp_path: Path) -> None:
    """Both for jobs that this command submitted, and for jobs that it adopted while they ran."""
    for adopted in (False, True):
        here = place(tmp_path / str(adopted), {0: [IS_CANCELLED, FINISHES]})
        if adopted:
            launch(here, detach=True)
            here.time.sleep(20)  # it runs
        states = launch(here)
        assert states[here.specs[0].run].kind == "cancelled"
        assert len(here.cluster.jobs_of(here.specs[0].run)) == 1


def test_a_launch_retries_a_cancelled_member_only_once(tmp_path: Path) -> None:
    """A cancelled member is submitted again once. When it is cancelled a second time, it stays cancelled."""
    here = place(tmp_path / "mine", {0: [IS_CANCELLED] * 5})
    launch(here, detach=True)
    here.time.sleep(100)
    states = launch(here)
    assert states[here.specs[0].run].kind == "cancelled"
    assert len(here.cluster.jobs_of(here.specs[0].run)) == 2


def test_status_after_a_refused_local_launch(tmp_path: Path) -> None:
    """Cancelled jobs are not shown as running, because `launch.json` still names the cluster."""
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


def test_a_label_of_other_runs_is_refused_before_any_start(tmp_path: Path) -> None:
    Study(tmp_path, [recipe(0.001), recipe(0.001, seed=1)]).run(ScriptedExecutor())
    before, executor, observer = contents(tmp_path), ScriptedExecutor(), RecordingObserver()
    with pytest.raises(UserError) as refusal:
        Study(tmp_path, [recipe(0.003), recipe(0.002, "scalerl+loss=dapo")]).run(executor, [observer])
    message = str(refusal.value)
    assert message.startswith("recipe: 'scalerl' already stands for other runs in ")
    assert "optimizer.lr is 0.003, there 0.001" in message and "study=NAME" in message and "\n" not in message
    assert executor.submitted == [] and observer.opened == 0 and contents(tmp_path) == before


def test_a_label_of_runs_of_another_script_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    def members(digest: str) -> list[RunSpec]:
        config = {"command": {"line": "python t.py", "named": {"t.py": digest}}, "seed": 0, "budget": {"steps": 4}}
        return [make_spec(config, config, "mine", "mine")]

    Study(tmp_path / "one", members("598b")).run(ScriptedExecutor())
    with pytest.raises(UserError) as refusal:
        Study(tmp_path / "one", members("c675")).run(ScriptedExecutor())
    assert str(refusal.value).endswith(
        "one: the command's file t.py has changed; give these a folder of their own (study=NAME), or restore the file "
        "to continue its runs"
    )
    Study(tmp_path / "two", members("c675")).run(ScriptedExecutor())
    Study(tmp_path / "one", members("598b")).run(ScriptedExecutor())


def test_a_study_made_by_another_command_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands start a new study in the same folder. One is accepted, then the other is refused."""
    acquire = Lease.acquire

    def late(lease: Lease, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        Study(tmp_path / "mine", [recipe(0.001)]).run(ScriptedExecutor())
        acquire(lease, *arguments, **options)

    monkeypatch.setattr(Lease, "acquire", late)
    with pytest.raises(UserError, match="already stands for other runs"):
        Study(tmp_path / "mine", [recipe(0.003)]).run(ScriptedExecutor())
    assert Ledger(tmp_path / "mine").fold()[recipe(0.001).run].state == "finished"


def test_files_of_another_process_in_a_members_folder_are_kept(tmp_path: Path) -> None:
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


def test_new_seeds_budgets_and_labels_are_accepted(tmp_path: Path) -> None:
    first = recipe(0.001)
    Study(tmp_path, [first]).run(ScriptedExecutor())
    for more in ([recipe(0.001, seed=1)], [replace(first, steps=9)], [recipe(0.003, "scalerl+optimizer.lr=0.003")]):
        executor = ScriptedExecutor()
        Study(tmp_path, more).run(executor)
        assert executor.submitted == [more[0].run]


def test_a_launch_of_fewer_members_gives_known_curves_their_labels(tmp_path: Path) -> None:
    """Such a launch would give a label without the settings that differ between the other members."""
    known = [replace(recipe(lr, f"scalerl+optimizer.lr={lr}"), settings={"lr": str(lr)}) for lr in (0.001, 0.003)]
    Study(tmp_path, known).run(ScriptedExecutor())
    larger, seed, new = labelled_as_before(
        tmp_path, [replace(recipe(0.003), steps=9), recipe(0.003, seed=1), recipe(0.01)]
    )
    assert (larger.recipe, larger.settings, larger.steps) == ("scalerl+optimizer.lr=0.003", {"lr": "0.003"}, 9)
    assert (seed.recipe, seed.settings, seed.seed) == ("scalerl+optimizer.lr=0.003", {"lr": "0.003"}, 1)
    assert seed.reference["seed"] == 1 and seed.run == recipe(0.003, seed=1).run
    assert new == recipe(0.01)
    Study(tmp_path, [larger, seed]).run(ScriptedExecutor())
    assert {state.recipe for state in Ledger(tmp_path).fold().values()} == {spec.recipe for spec in known}


def test_a_single_run_keeps_its_label(tmp_path: Path) -> None:
    single = recipe(0.001, "scalerl+optimizer.lr=0.001")
    single.write(tmp_path / "runs" / single.run)
    assert labelled_as_before(tmp_path, [recipe(0.001, seed=1), recipe(0.001)])[1] == single
    assert run_of_curve(tmp_path / "runs", recipe(0.001, seed=1).curve) == tmp_path / "runs" / single.run
    assert run_of_curve(tmp_path / "runs", recipe(0.003).curve) is None


def remove_curves(directory: Path) -> None:
    """Remove curves and checksums from the ledger, which earlier versions did not write."""
    ledger = directory / "ledger.jsonl"
    ledger.write_text(re.sub(r',"(curve|crc)":"\w+"', "", ledger.read_text()))


def test_a_ledger_without_curves_is_read_with_its_specifications(tmp_path: Path) -> None:
    Study(tmp_path, [recipe(0.001)]).run(ScriptedExecutor())
    remove_curves(tmp_path)
    assert [state.curve for state in Ledger(tmp_path).fold().values()] == [None]
    with pytest.raises(UserError, match=r"optimizer\.lr is 0\.003, there 0\.001"):
        Study(tmp_path, [recipe(0.003)]).run(ScriptedExecutor())
    Study(tmp_path, [recipe(0.001, seed=1)]).run(ScriptedExecutor())


def test_a_study_with_two_curves_under_one_label_continues_both(tmp_path: Path) -> None:
    """An earlier version accepted both curves under one label, and users still want more seeds of them."""
    one, other = recipe(0.001), recipe(0.003)
    Study(tmp_path, [one]).run(ScriptedExecutor())
    Ledger(tmp_path).append("planned", other.run, recipe="scalerl", seed=0)
    other.write(tmp_path / "runs" / other.run)
    for lr in (0.001, 0.003):
        Study(tmp_path, [recipe(lr, seed=1)]).run(ScriptedExecutor())
    with pytest.raises(UserError, match=r"optimizer\.lr is 0\.01, there 0\.001"):
        Study(tmp_path, [recipe(0.01)]).run(ScriptedExecutor())


def test_the_refusal_of_a_label_names_the_known_differences(tmp_path: Path) -> None:
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
