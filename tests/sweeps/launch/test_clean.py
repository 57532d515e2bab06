"""Tests of cleaning a study: it deletes only the listed files, and the study continues and is reported as before."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.cli import main as cli
from sweeps.errors import UserError
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.slurm.settings import JobSettings
from sweeps.launch.clean import KINDS, USUAL, clean, format_size, inventory
from sweeps.launch.ledger import Ledger
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.files import parse_lines
from sweeps.run.journal import read_journal
from sweeps.run.lease import Lease
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec, make_spec
from tests import light as light_member
from tests.sweeps.executor.fake_cluster import RAISES, FakeCluster, Place, VirtualTime, light, member
from tests.sweeps.launch.test_study import Behaviour, ScriptedExecutor

STEPS, EVERY = 8, 2
# Number of calls after which the verifier raises; None for never.
_countdown: list[int | None] = [None]


def grade(completion: str, answer: str) -> float:
    """A verifier that fails after `_countdown` calls."""
    if _countdown[0] is not None:
        _countdown[0] -= 1
        if _countdown[0] < 0:
            raise ValueError("broken")
    return float(sum(map(str.isdigit, completion)))


def spec(seed: int, loss: str = "cispo", steps: int = STEPS) -> RunSpec:
    config = {
        "loss": {"choice": loss},
        "task": {"verifier": f"{__name__}:grade"},
        "batch": {"prompts": 1, "completions": 2},
        "checkpoint": {"every_n_steps": EVERY},
        "evaluation": {"every_n_steps": EVERY},
        "seed": seed,
        "budget": {"steps": steps},
    }
    return make_spec(config, {**config, "loss": {"choice": "cispo"}}, f"scalerl+loss={loss}", "scalerl")


def training(broken_after: int | None = None) -> Behaviour:
    """Return a member that trains with checkpoints, and fails after `broken_after` calls of its verifier."""

    def behave(run_dir: Path) -> int:
        _countdown[0] = broken_after
        try:
            light_member.run(run_dir)
        except light_member.RewardError:
            return 1
        return 0

    return behave


def launch(directory: Path, specs: Sequence[RunSpec], broken: dict[str, int] | None = None) -> None:
    script = {each.run: [training((broken or {}).get(each.run))] for each in specs}
    Study(directory, specs).run(ScriptedExecutor(script))


def add_litter(directory: Path) -> list[Path]:
    """Add files of all kinds to each run; return the leftovers of killed writers."""
    left = []
    for run_dir in (directory / "runs").iterdir():
        (run_dir / "log.txt").write_text("said\n" * 10)
        (run_dir / "log.rank1.txt").write_text("said\n")
        (run_dir / "rollouts.jsonl").write_text("{}\n")
        (run_dir / "config.yaml").write_text("a: 1\n")
        (run_dir / "semantics.json").write_text("{}")
        (run_dir / "attempts").mkdir()
        (run_dir / "attempts" / "1-0-abc.jsonl").write_text("{}\n")
        names = ("checkpoints/step-00000004.0a1b2c3d.part", "checkpoints/step-00000006.void", ".spec.json.0123456789ab")
        for name in (*names, ".writer.json.0123abcd"):
            (run_dir / name).write_text("half of")
            left.append(run_dir / name)
    return left


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files, without the leases, whose times change."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and not re.search(r"\.(controller|writer)\.", path.name)
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def no_sleep(seconds: float) -> None:
    """Do not sleep."""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Run two members that finish, and one that fails after its first checkpoint."""
    specs = [spec(0), spec(1), spec(2)]
    launch(tmp_path / "mine", specs, {specs[2].run: 20})
    return tmp_path / "mine"


def members_by_state(directory: Path, done: bool) -> list[Path]:
    """Return the folders of the members that are finished (or not)."""
    folders = sorted((directory / "runs").iterdir())
    return [folder for folder in folders if is_done(folder, STEPS, folder.name) == done]


# --- deleted and kept files ----------------------------------------------------------------------------------


def test_the_inventory_lists_the_files_of_each_kind(study: Path) -> None:
    left = add_litter(study)
    report = inventory(study)
    (unfinished,), finished = members_by_state(study, False), members_by_state(study, True)
    assert (report.finished, report.others, report.at_work, report.linked) == (2, 1, 0, [])
    names = {
        kind: {str(path.relative_to(study / "runs")) for path in files} for kind, files in report.removable.items()
    }
    assert names["checkpoints"] == {f"{run.name}/checkpoints/step-0000000{n}.ckpt" for run in finished for n in (6, 8)}
    assert set(report.removable["leftovers"]) == set(left), (
        "leftovers of unfinished members too, because no process continues a partial file"
    )
    assert names["logs"] == {f"{run.name}/{name}" for run in finished for name in ("log.txt", "log.rank1.txt")}
    assert names["attempts"] == {f"{run.name}/attempts/1-0-abc.jsonl" for run in finished}
    assert names["rollouts"] == {f"{run.name}/rollouts.jsonl" for run in finished}
    assert report.size("leftovers") == len("half of") * len(left)
    removable = set().union(*map(set, report.removable.values()))
    stays = {path.name for path in unfinished.rglob("*") if path.is_file() and path not in removable}
    assert {"metrics.jsonl", "spec.json", "log.txt", "step-00000002.ckpt", "1-0-abc.jsonl"} <= stays


@pytest.mark.parametrize("kinds", [USUAL, ("logs",), ("attempts", "rollouts"), tuple(KINDS)])
@pytest.mark.parametrize("keep", [0, 1])
def test_exactly_the_listed_files_are_deleted(study: Path, kinds: tuple[str, ...], keep: int) -> None:
    add_litter(study)
    before, shown = contents(study), inventory(study, keep)
    assert contents(study) == before, "the inventory changes nothing"
    gone = clean(study, kinds, keep)
    for kind in KINDS:
        assert gone.removable[kind] == (shown.removable[kind] if kind in kinds else {})
    named = {str(path.relative_to(study)) for kind in kinds for path in shown.removable[kind]}
    assert contents(study) == {name: text for name, text in before.items() if name not in named}
    assert all(not files for kind, files in inventory(study, keep).removable.items() if kind in kinds)


def test_the_newest_checkpoints_are_kept(study: Path) -> None:
    for keep, left in ((1, {"step-00000008.ckpt"}), (0, set())):
        clean(study, ["checkpoints"], keep)
        assert all({path.name for path in run.glob("checkpoints/*")} == left for run in members_by_state(study, True))


def test_checkpoints_in_keep_steps_are_kept(study: Path) -> None:
    first, *others = members_by_state(study, True)
    spec = json.loads((first / "spec.json").read_text())
    spec["config"]["checkpoint"]["keep_steps"] = [6]
    (first / "spec.json").write_text(json.dumps(spec))
    clean(study, ["checkpoints"])
    assert [path.name for path in first.glob("checkpoints/*")] == ["step-00000006.ckpt"]
    assert all(not list(run.glob("checkpoints/*")) for run in others)


# --- a study after cleaning ----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    broken=st.lists(st.none() | st.integers(0, 40), min_size=2, max_size=4),
    kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1),
    keep=st.integers(0, 2),
    more=st.integers(0, 2),
)
def test_after_cleaning_members_continue_identically_and_views_do_not_change(
    broken: list[int | None], kinds: set[str], keep: int, more: int
) -> None:
    """Members fail at random times. The study is cleaned, shown and continued, also with a larger budget."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        cleaned, undisturbed = Path(folder) / "mine", Path(folder) / "undisturbed"
        specs = [spec(seed) for seed in range(len(broken))]
        launch(
            cleaned, specs, {member_spec.run: n for member_spec, n in zip(specs, broken, strict=True) if n is not None}
        )
        add_litter(cleaned)
        views_before = overview(cleaned)
        clean(cleaned, sorted(kinds), keep)
        assert [replace(view, attempts=0, node=None) for view in overview(cleaned)] == [
            replace(view, attempts=0, node=None) for view in views_before
        ]
        # A finished run without checkpoints cannot be continued, so its budget stays.
        no_checkpoints = "checkpoints" in kinds and keep == 0
        longer = [one if no_checkpoints and is_done(cleaned / "runs" / one.run, STEPS, one.run) else
                  spec(one.seed, steps=STEPS + EVERY * more) for one in specs]  # fmt: skip
        saved = {member_spec.run: read_journal(cleaned / "runs" / member_spec.run) for member_spec in specs}
        launch(cleaned, longer)
        launch(undisturbed, longer)
        for member_spec in longer:
            lines = parse_lines((cleaned / "runs" / member_spec.run / "metrics.jsonl").read_bytes())
            resumed = [line["step"] for line in lines if line["kind"] == "resume"]
            checkpoint_step = saved[member_spec.run].checkpoint_step
            continues = saved[member_spec.run].status != "finished" or member_spec.steps > STEPS
            assert resumed == ([-1 if checkpoint_step is None else checkpoint_step] if continues else []), (
                "a run resumes from its newest checkpoint"
            )
            journal, expected = (read_journal(root / "runs" / member_spec.run) for root in (cleaned, undisturbed))
            assert journal.status == "finished" and journal.deterministic() == expected.deterministic()


@pytest.mark.full
def test_commands_print_the_same_after_cleaning(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command_outputs() -> list[str]:
        outputs = []
        page = str(tmp_path / "report.html")
        for words in (["status"], ["status", "--json"], ["rank"], ["collect"], ["report", "-o", page]):
            assert cli.main([words[0], str(study), *words[1:]]) == 0
            outputs.append(capsys.readouterr().out)
        return outputs

    add_litter(study)
    before = command_outputs()
    clean(study, tuple(KINDS))
    for old, new in zip(before, command_outputs(), strict=True):
        assert re.sub(r'"attempts": \d', "", old) == re.sub(r'"attempts": \d', "", new)


# --- members that are in use ---------------------------------------------------------------------------------


def test_a_larger_budget_of_a_finished_member_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """The run would only fail, and the ledger would count it as failed."""
    specs = [spec(seed) for seed in (0, 1)]
    launch(tmp_path, specs)
    clean(tmp_path, ["checkpoints"])
    # All files but the lease, which the refused launch held.
    paths = [path for path in tmp_path.rglob("*") if path.is_file() and LEASE_NAME not in path.name]
    before = {path: path.read_bytes() for path in paths}
    with pytest.raises(UserError, match=r"budget.steps=.*: 2 finished members cannot be continued.*loss=cispo seed 0"):
        launch(tmp_path, [spec(seed, steps=STEPS + EVERY) for seed in (0, 1)])
    assert {path: path.read_bytes() for path in before} == before
    launch(tmp_path, [*specs, spec(2)])
    assert [view.state for view in overview(tmp_path)] == ["finished"] * 3


def test_a_study_that_is_being_run_is_not_cleaned(study: Path) -> None:
    before = contents(study)
    lease = Lease(study, LEASE_NAME)
    lease.acquire()
    try:
        with pytest.raises(UserError, match=r"clean: .* is being run by another process"):
            clean(study, USUAL)
        assert inventory(study).size("checkpoints") > 0, "the inventory is allowed"
    finally:
        lease.release()
    assert contents(study) == before


def test_files_of_a_running_process_are_kept(study: Path) -> None:
    """A member that is run alone, outside its study, is not in the ledger as running."""
    add_litter(study)
    busy, other = members_by_state(study, True)
    lease = Lease(busy)
    lease.acquire()
    try:
        report = clean(study, tuple(KINDS))
    finally:
        lease.release()
    assert report.at_work == 1
    assert len(list((busy / "checkpoints").iterdir())) == 4 and (busy / "log.txt").exists()
    assert not list((other / "checkpoints").iterdir())


@pytest.mark.parametrize("alive", [True, False])
def test_a_lease_on_another_machine_is_judged_by_its_heartbeat(study: Path, alive: bool) -> None:
    """The time of the lease's file does not count, because the clocks of machines differ."""
    busy, _ = members_by_state(study, True)
    facts = {"host": "elsewhere", "pid": 1, "token": "t", "beat": 7}
    path = busy / ".writer.json"

    def beat(facts: dict[str, object]) -> None:
        path.write_text(json.dumps(facts))
        os.utime(path, (1.0, 1.0))

    beat(facts)

    def sleep(seconds: float) -> None:
        assert seconds > 5, "a heartbeat comes every five seconds, so a shorter wait could miss it"
        if alive:
            beat({**facts, "beat": 9})

    report = clean(study, USUAL, sleep=sleep)
    assert report.at_work == alive
    assert bool(list((busy / "checkpoints").iterdir())) == alive


def test_members_with_jobs_keep_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    light(monkeypatch)
    specs = [member(seed) for seed in range(2)]
    here = Place(tmp_path, FakeCluster(VirtualTime()), specs, JobSettings.of({}), retry_policy())
    here.run(detach=True)
    for each in specs:
        (here.run_dir(each.run) / "checkpoints").mkdir()
        (here.run_dir(each.run) / "checkpoints" / "step-00000001.0a1b2c3d.part").write_text("being written")
    before = contents(tmp_path)
    assert clean(tmp_path, tuple(KINDS)).others == 2
    assert contents(tmp_path) == before
    here.time.sleep(1_000)
    here.run(again=False)
    for each in specs:
        here.finished_once(each.run)


def test_submission_folders_are_deleted_when_no_member_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light(monkeypatch)
    specs = [member(seed) for seed in range(3)]
    fates = {specs[1].run: [RAISES]}
    here = Place(tmp_path, FakeCluster(VirtualTime(), fates), specs, JobSettings.of({"array_size": 1}))
    here.run()
    failed = Ledger(tmp_path).fold()[specs[1].run].submission
    assert len(list((tmp_path / "jobs").iterdir())) == 3
    clean(tmp_path, ["attempts"])
    assert [each.name for each in (tmp_path / "jobs").iterdir()] == [failed], (
        "the folder of a failed member stays, because its log has the reason"
    )
    here.run()
    clean(tmp_path, ["attempts"])
    assert not list((tmp_path / "jobs").iterdir())
    assert {view.state for view in overview(tmp_path, here.cluster)} == {"finished"}


# --- links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", ["runs", "run", "checkpoints", "checkpoint", "attempts"])
def test_links_are_not_followed(study: Path, tmp_path: Path, linked: str) -> None:
    add_litter(study)
    one, _ = members_by_state(study, True)
    path = {
        "runs": study / "runs",
        "run": one,
        "checkpoints": one / "checkpoints",
        "checkpoint": one / "checkpoints" / "step-00000008.ckpt",
        "attempts": one / "attempts",
    }[linked]
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = contents(tmp_path / "outside") if outside.is_dir() else {"": outside.read_bytes()}
    report = clean(study, tuple(KINDS))
    assert (contents(outside) if outside.is_dir() else {"": outside.read_bytes()}) == before
    assert path.is_symlink()
    assert report.linked == ([] if linked == "checkpoint" else [path])


def test_a_linked_jobs_folder_is_kept(study: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "abc").mkdir(parents=True)
    (tmp_path / "jobs" / "abc" / "submit.sh").write_text("#")
    (study / "jobs").symlink_to(tmp_path / "jobs")
    assert clean(study, tuple(KINDS)).linked == [study / "jobs"]
    assert (tmp_path / "jobs" / "abc" / "submit.sh").exists()


# --- the command ---------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["clean", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_command_deletes_only_with_yes(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_litter(study)
    before = contents(study)
    code, out, err = run(capsys, str(study))
    assert (code, err) == (0, "") and contents(study) == before
    assert "2 of 3 members finished" in out and "Nothing was deleted; --yes deletes these files." in out
    assert re.search(r"checkpoints +4 +\d+ B +checkpoints of finished members", out)
    assert re.search(r"logs +4 +102 B +with --logs", out) is None and "with --logs" in out
    assert "cannot be continued with a larger budget" in out and "--keep 1" in out
    code, out, err = run(capsys, str(study), "--yes")
    assert (code, err) == (0, "") and "Nothing was deleted" not in out
    assert re.search(r"^deleted .*files", out, re.MULTILINE) and re.search(r"checkpoints +4 ", out)
    assert not any("checkpoints" in name for name in contents(study) if members_by_state(study, True)[0].name in name)
    code, out, _ = run(capsys, str(study), "--logs", "--keep", "1")
    assert "cannot be continued" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "no study here; give the folder that a --multirun wrote to"),
        (["STUDY", "--keep", "-1"], 2, "is not a whole number of 0 or more"),
        (["STUDY", "--keep", "x"], 2, "is not a whole number of 0 or more"),
    ],
)
def test_invalid_calls_print_one_line(
    study: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    before = contents(study)
    exit_code, out, err = run(capsys, *[word.replace("STUDY", str(study)) for word in arguments])
    assert exit_code == code and out == "" and message in err
    assert contents(study) == before


def test_an_operating_system_error_is_printed_in_one_line(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".ckpt":
            raise OSError(30, "Read-only file system", str(path))
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    code, _, err = run(capsys, str(study), "--yes")
    assert code == 1 and err.startswith("scalerl: clean: ") and "Read-only file system" in err


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999_600, "1 MB"), (5 * 10**12, "5 TB")],
)
def test_sizes_for_people(size: int, shown: str) -> None:
    assert format_size(size) == shown
