"""Tests of a real run with a damaged journal: it resumes before the damage, and ends with the same records."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from sweeps.errors import UserError
from sweeps.run.files import dump_line, parse_line
from sweeps.run.journal import JOURNAL_FILE, read_journal
from sweeps.run.progress import is_done
from sweeps.run.spec import SPEC_FILE
from tests.examples import every
from tests.place import STEPS, Place


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run to its end."""
    place = Place(tmp_path_factory.mktemp("place"))
    old_environment = dict(os.environ)
    os.environ.update(place.environment())
    try:
        (spec,) = plan_members([place.overrides("out")])
        run_dir = place.root / "out" / "runs" / spec.run
        spec.write(run_dir)
        run_member(run_dir)
    finally:
        os.environ.clear()
        os.environ.update(old_environment)
    return run_dir


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in Place(finished_run.parents[2]).environment().items():
        monkeypatch.setenv(name, value)
    return Path(shutil.copytree(finished_run, tmp_path / finished_run.name))


def break_line(run_dir: Path, line: int, end: bool) -> bytes:
    """Break a line of the journal, counted from 1, or from the end if negative.

    Without `end`, the journal's last line is removed.
    """
    path = run_dir / JOURNAL_FILE
    lines = path.read_bytes().splitlines()
    number = line - 1 if line > 0 else len(lines) + line
    lines[number] = lines[number][: len(lines[number]) // 2] + b"\0\0"
    path.write_bytes(b"".join(each + b"\n" for each in (lines if end else lines[:-1])))
    return path.read_bytes()


def entries(run_dir: Path, kind: str) -> list[dict[str, object]]:
    lines = map(json.loads, (run_dir / JOURNAL_FILE).read_text().splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def file_names(run_dir: Path) -> list[str]:
    return sorted(each.name for each in run_dir.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("line", "begin"), [(-4, STEPS - 3), (4, -1)], ids=["near the end", "near the start"])
def test_a_run_resumes_from_the_last_checkpoint_before_a_broken_line(
    finished_run: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], line: int, begin: int
) -> None:
    raw = break_line(run_dir, line, end=False)
    number = raw.count(b"\n", 0, raw.index(b"\0")) + 1
    checkpoints = run_dir / "checkpoints"
    unrecorded = [f"{path.stem}.unrecorded" for path in checkpoints.iterdir() if int(path.stem[5:]) > begin]
    assert unrecorded
    run_member(run_dir)
    output = capfd.readouterr().out
    assert f"{run_dir / JOURNAL_FILE}, line {number}: " in output and "metrics.damaged-1.jsonl" in output
    assert ("from the start" in output) == (begin < 0)
    assert (run_dir / "metrics.damaged-1.jsonl").read_bytes() == raw
    assert [path.name for path in checkpoints.glob("*.unrecorded")] == unrecorded, (
        "these checkpoints are valid, but their records are lost"
    )
    (resume,) = entries(run_dir, "resume")
    assert resume["step"] == begin
    assert resume["mended"] == {"line": number, "kept": "metrics.damaged-1.jsonl", "step": begin}
    after = read_journal(run_dir)
    assert after.deterministic() == read_journal(finished_run).deterministic()
    assert after.status == "finished"
    spent = read_journal(finished_run).of_kind("train")[-1].metrics["compute/flops"]
    kept = 0.0 if begin < 0 else next(r for r in after.of_kind("train") if r.step == begin).metrics["compute/flops"]
    assert after.of_kind("train")[-1].metrics["compute/wasted_flops"] == pytest.approx(spent - kept, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin", every(3, [STEPS - 3, -1], pytest.mark.full), ids=["its end is lost", "all of it is lost"]
)
def test_a_checkpoint_newer_than_the_journal_is_not_used(
    finished_run: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], begin: int
) -> None:
    """A power cut came after the checkpoint was on disk, and before the journal's last lines were."""
    path = run_dir / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    covered = next((n for n, line in enumerate(lines) if b'"checkpoint"' in line and b'"step":%d,' % begin in line), -1)
    if begin < 0:
        path.unlink()
    else:
        path.write_bytes(b"".join(lines[: covered + 2]))
    assert max(each.name for each in (run_dir / "checkpoints").iterdir()) == f"step-{STEPS:08d}.ckpt"
    run_member(run_dir)
    why = "not recorded in metrics.jsonl" if begin < 0 else f"beyond step {begin}"
    assert f"checkpoint step-{STEPS:08d}.ckpt is skipped, {why}" in capfd.readouterr().err
    (resume,) = entries(run_dir, "resume")
    assert resume["step"] == begin and f"step-{STEPS:08d}.ckpt" in str(resume["passed_over"])
    after = read_journal(run_dir)
    assert after.deterministic() == read_journal(finished_run).deterministic()
    assert after.status == "finished" and after.holes == []


@pytest.mark.slow
def test_a_run_killed_right_after_the_repair_continues(
    finished_run: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that must not be used are set aside before the journal is repaired."""
    break_line(run_dir, -4, end=False)

    def killed(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr(RunLog, "_begin", killed)
        run_member(run_dir)
    assert not entries(run_dir, "resume")
    run_member(run_dir)
    assert [entry["step"] for entry in entries(run_dir, "resume")] == [STEPS - 3]
    assert read_journal(run_dir).deterministic() == read_journal(finished_run).deterministic()


@pytest.mark.slow
def test_a_finished_run_stays_done_with_a_broken_line(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raw = break_line(run_dir, 4, end=True)
    assert is_done(run_dir, STEPS, run_dir.name)
    run_member(run_dir)
    assert "done already" in capfd.readouterr().out
    assert (run_dir / JOURNAL_FILE).read_bytes() == raw


@pytest.mark.slow
def test_a_journal_of_another_run_is_refused_and_unchanged(run_dir: Path) -> None:
    path = run_dir / JOURNAL_FILE
    header, rest = path.read_bytes().split(b"\n", 1)
    raw = dump_line({**(parse_line(header) or {}), "run": "somebody"}, checksum=True) + rest
    path.write_bytes(raw)
    before = file_names(run_dir)
    assert (run_dir / SPEC_FILE).exists()
    with pytest.raises(UserError, match=f"{path}: .*another run, somebody, in the folder of {run_dir.name}"):
        run_member(run_dir)
    assert path.read_bytes() == raw
    assert file_names(run_dir) == before


@pytest.mark.slow
def test_a_changed_specification_is_refused_by_the_member(run_dir: Path) -> None:
    """A member started by hand does not read the ledger, so it compares content and identity itself."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / JOURNAL_FILE).unlink()
    path = run_dir / SPEC_FILE
    values = json.loads(path.read_text())
    values["config"]["optimizer"]["lr"] *= 2
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match=f"^{path}: names run {run_dir.name} .*restore what was changed"):
        run_member(run_dir)
    assert not (run_dir / JOURNAL_FILE).exists() and not (run_dir / "checkpoints").exists()
