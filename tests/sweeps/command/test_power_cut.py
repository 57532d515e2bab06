"""Test that after a power cut a command's logged steps are kept, or their loss is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.command import runner
from sweeps.command.runner import CommandFailedError, run_member
from sweeps.errors import UserError
from sweeps.launch.status import overview
from sweeps.run.interruption import interruption
from sweeps.run.journal import Journal
from sweeps.run.progress import is_done
from sweeps.source import load
from tests.sweeps.command.toy import SCRIPT, steps_of, view, write_study, written

# The first attempt exits after the checkpoint of step 10. It sleeps first, so that the member polls its log.
END = "    if step == 10 and not os.path.exists(out + '/go'): time.sleep(0.3); sys.exit(7)\n"
ENDS_AT_10 = SCRIPT.replace("    if step == int(", f"{END}    if step == int(")
CHECKPOINTS = {"add": "--from={checkpoint}", "checkpoints": "{run_dir}/state-*.json"}


class Disk:
    """Simulate a power cut: files are truncated to the length at their last fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lengths: dict[int, int] = {}
        self._on = True
        fsync, journal_end = os.fsync, Journal.end

        def record_length(descriptor: int) -> None:
            fsync(descriptor)
            if self._on:
                status = os.fstat(descriptor)
                self._lengths[status.st_ino] = status.st_size

        def cut(journal: Journal, step: int, status: str, reason: str | None = None) -> None:
            self._on = status == "finished"  # the end of the failed attempt is written after the power cut
            journal_end(journal, step, status, reason)

        monkeypatch.setattr(os, "fsync", record_length)
        monkeypatch.setattr(Journal, "end", cut)

    def cut(self, *files: Path) -> None:
        for file in files:
            os.truncate(file, self._lengths.get(file.stat().st_ino, 0))


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    interruption.clear()
    monkeypatch.setattr(runner, "_POLL_S", 0.02)
    monkeypatch.setattr(runner, "_STOP_CHECK_S", 0.02)


@pytest.mark.parametrize(
    ("source", "resume"), [("stdout", {}), ("stdout", CHECKPOINTS), ("{run_dir}/out.jsonl", CHECKPOINTS)]
)
def test_steps_logged_before_a_checkpoint_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, resume: dict[str, str]
) -> None:
    script = ENDS_AT_10 if source == "stdout" else ENDS_AT_10.replace(
        "print(json.dumps(row), flush=True)", "open(out + '/out.jsonl', 'a').write(json.dumps(row) + '\\n')"
    )  # fmt: skip
    metrics = {"source": source, "reward": "eval_reward"}
    spec, run_dir = written(write_study(tmp_path, script, metrics=metrics, resume=resume))
    disk = Disk(monkeypatch)
    with pytest.raises(CommandFailedError):
        run_member(run_dir)
    disk.cut(run_dir / "metrics.jsonl", run_dir / ("stdout.txt" if source == "stdout" else "out.jsonl"))
    (run_dir / "go").touch()
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run)
    if resume:
        assert steps_of(run_dir) == list(range(1, 31)) and view(run_dir).missing is None
    else:  # without known checkpoints the log is not synced, and the loss is reported
        assert view(run_dir).missing == "no records of steps 1 to 10"


def test_lost_steps_are_reported_in_status_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, run_dir = written(write_study(tmp_path, ENDS_AT_10, resume=CHECKPOINTS))
    with pytest.raises(CommandFailedError):
        run_member(run_dir)
    for name, lines in (
        ("metrics.jsonl", 7),
        ("stdout.txt", 3),
    ):  # lines of the journal: header, attempt, 4 steps, 1 reward
        whole = (run_dir / name).read_bytes().split(b"\n")
        (run_dir / name).write_bytes(b"\n".join([*whole[:lines], b""]))
    (run_dir / "go").touch()
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run) and steps_of(run_dir) == [*range(1, 6), *range(11, 31)]
    assert view(run_dir).holes == [(6, 10)]
    (member_view,) = overview(run_dir.parent)
    assert member_view.reason == "no records of steps 6 to 10"
    (curve,) = load([run_dir]).curves
    assert any(
        "has no records of steps 6 to 10: it continued from a checkpoint that is newer" in warning
        for warning in curve.warnings
    )


def test_a_checkpoint_without_a_step_before_it_is_refused_by_name(tmp_path: Path) -> None:
    _, run_dir = written(write_study(tmp_path, ENDS_AT_10, resume=CHECKPOINTS))
    with pytest.raises(CommandFailedError):
        run_member(run_dir)
    header = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[0]
    (run_dir / "metrics.jsonl").write_bytes(header + b"\n")
    (run_dir / "stdout.txt").write_bytes(b"")
    (run_dir / "go").touch()
    with pytest.raises(
        UserError, match=r"^command.resume.checkpoints: .*/state-10.json: no step before it is in the j"
    ):
        run_member(run_dir)
    (run_dir / "state-10.json").unlink()
    run_member(run_dir)
    assert steps_of(run_dir) == list(range(1, 31)) and view(run_dir).missing is None


def test_a_checkpoint_before_the_first_logged_step_is_resumed(tmp_path: Path) -> None:
    script = ENDS_AT_10.replace("    print(", "    if step % 15 == 0: print(")
    _, run_dir = written(write_study(tmp_path, script, resume=CHECKPOINTS))
    with pytest.raises(CommandFailedError):
        run_member(run_dir)
    assert not view(run_dir).records and view(run_dir).checkpoint_name == "state-10.json"
    (run_dir / "go").touch()
    run_member(run_dir)
    assert steps_of(run_dir) == [15, 30] and view(run_dir).missing is None


def test_a_final_checkpoint_whose_steps_are_lost_is_refused(tmp_path: Path) -> None:
    _, run_dir = written(write_study(tmp_path, ENDS_AT_10, steps=10, resume=CHECKPOINTS))
    with pytest.raises(CommandFailedError):
        run_member(run_dir)
    for name, lines in (("metrics.jsonl", 7), ("stdout.txt", 3)):
        whole = (run_dir / name).read_bytes().split(b"\n")
        (run_dir / name).write_bytes(b"\n".join([*whole[:lines], b""]))
    with pytest.raises(CommandFailedError, match=r"state-10.json: the command continued from it and logged nothing; "):
        run_member(run_dir)


DAMAGE = ["", '{"attempts": "many", "cuts": 3}', '{"cuts": [[1], "x", [true, 2]], "attempts": null}', "\0\0", None]


def test_a_damaged_command_json_does_not_stop_a_member(tmp_path: Path) -> None:
    script = SCRIPT.replace("step % 10", "step % 5").replace(
        "    if step == int(", "    if step % 5 == 0: sys.exit(7)\n    if step == int("
    )
    _, run_dir = written(write_study(tmp_path, script, steps=24, resume=CHECKPOINTS))
    for number, damage in enumerate(DAMAGE, start=1):
        if number < len(DAMAGE):
            with pytest.raises(CommandFailedError, match=f"exit code 7 at step {5 * number} of 24"):
                run_member(run_dir)
        else:
            run_member(run_dir)
        assert len(view(run_dir).attempts) == number
        assert f'"attempts": {number}' in (run_dir / "command.json").read_text()
        if damage is None:
            (run_dir / "command.json").unlink()
        else:
            (run_dir / "command.json").write_text(damage)
    assert steps_of(run_dir) == list(range(1, 25)) and view(run_dir).missing is None
