"""Tests of the rollback: a refused launch is undone, an accepted one is not."""

from __future__ import annotations

from pathlib import Path

from sweeps.launch.rollback import Rollback


def change(folder: Path, rollback: Rollback) -> None:
    """Make the changes of a launch: a new member's folder, a file that is written twice, and a new file."""
    rollback.remove(folder / "runs")
    rollback.remove(folder / "runs" / "new")
    (folder / "runs" / "new").mkdir(parents=True)
    (folder / "runs" / "new" / "spec.json").write_text("{}")
    for text in ("once", "twice"):
        rollback.restore_file_on_rollback(folder / "old.json", (folder / "old.json").read_bytes())
        (folder / "old.json").write_text(text)
    rollback.restore_file_on_rollback(folder / "race.jsonl", None)
    (folder / "race.jsonl").write_text("looks")
    rollback.call((folder / "undone").touch)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_launch_leaves_the_first_content_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("as it was")
    with Rollback() as rollback:
        change(tmp_path, rollback)
        assert rollback.pending
    assert contents(tmp_path) == {"old.json": "as it was", "undone": ""}
    assert not (tmp_path / "runs").exists()


def test_nothing_is_undone_after_a_launch_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("as it was")
    with Rollback() as rollback:
        change(tmp_path, rollback)
        rollback.commit()
        rollback.restore_file_on_rollback(tmp_path / "later.json", None)
        (tmp_path / "later.json").write_text("kept")
        assert not rollback.pending
    kept = {"old.json": "twice", "race.jsonl": "looks", "runs/new/spec.json": "{}", "later.json": "kept"}
    assert contents(tmp_path) == kept


def test_a_folder_that_another_process_used_meanwhile_is_kept(tmp_path: Path) -> None:
    with Rollback() as rollback:
        rollback.remove(tmp_path / "run")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "spec.json").write_text("{}")
        (tmp_path / "run" / "metrics.jsonl").write_text("of another")
    assert contents(tmp_path) == {"run/metrics.jsonl": "of another"}


def test_a_binary_file_is_restored(tmp_path: Path) -> None:
    (tmp_path / "optuna.jsonl").write_bytes(b"\xff\x00damaged")
    with Rollback() as rollback:
        rollback.restore_file_on_rollback(tmp_path / "optuna.jsonl", (tmp_path / "optuna.jsonl").read_bytes())
        (tmp_path / "optuna.jsonl").write_text("new")
    assert (tmp_path / "optuna.jsonl").read_bytes() == b"\xff\x00damaged"
