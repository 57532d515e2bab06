"""Tests of the record of a run's code: which changes count, and how a journal shows them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.run import provenance
from sweeps.run.health import code_changes as warnings_of
from sweeps.run.journal import Journal, read_journal
from sweeps.run.provenance import TOO_MANY, changes_line, code_changes, code_facts, files_named
from tests.paths import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a repository with our packages."""
    root = tmp_path / "checkout"
    for package in ("sweeps", "lightning_scalerl"):
        (root / package).mkdir(parents=True)
        (root / package / "one.py").write_text("loss = 1\n")
    (root / "README.md").write_text("read me\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    result = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", ".")
    git(root, "commit", "-qm", "a change")
    return git(root, "rev-parse", "HEAD")


def test_commits_and_uncommitted_changes_are_named(checkout: Path) -> None:
    first = code_facts(root=checkout)
    assert first["commit"] == git(checkout, "rev-parse", "HEAD") and first["diff"] is None
    assert code_changes(first, code_facts(root=checkout)) == ()
    (checkout / "lightning_scalerl" / "one.py").write_text("loss = 3\n")
    edited = code_facts(root=checkout)
    assert code_changes(first, edited) == (f"uncommitted changes none -> {edited['diff']}",)
    (checkout / "lightning_scalerl" / "one.py").write_text("loss = 4\n")
    assert code_changes(edited, code_facts(root=checkout)) != ()
    commit(checkout)
    second = code_facts(root=checkout)
    assert code_changes(first, second) == (f"commit {first['commit'][:12]} -> {second['commit'][:12]}",)


def test_a_change_with_the_same_size_and_time_is_detected(checkout: Path) -> None:
    """Git compares only size and time of files older than the index, so the copied index must keep its time."""
    git(checkout, "config", "core.trustctime", "false")
    source = checkout / "sweeps" / "one.py"
    then = 1_700_000_000
    os.utime(source, (then, then))
    git(checkout, "add", ".")
    os.utime(checkout / ".git" / "index", (then, then))
    source.write_text("loss = 3\n")
    os.utime(source, (then, then))
    assert code_facts(root=checkout)["diff"] is not None


def test_another_commit_with_the_same_code_is_not_a_change(checkout: Path) -> None:
    first = code_facts(root=checkout)
    (checkout / "README.md").write_text("read me again\n")
    edited = code_facts(root=checkout)
    commit(checkout)
    second = code_facts(root=checkout)
    assert first["commit"] != second["commit"]
    assert code_changes(first, edited) == code_changes(first, second) == ()


def test_an_untracked_file_of_the_package_counts(checkout: Path) -> None:
    first = code_facts(root=checkout)
    (checkout / "sweeps" / "two.py").write_text("more = 1\n")
    second = code_facts(root=checkout)
    assert code_changes(first, second) == (f"files of the package {first['files']} -> {second['files']}",)
    (checkout / "sweeps" / "__pycache__").mkdir()
    (checkout / "sweeps" / "__pycache__" / "three.py").write_text("")
    (checkout / "sweeps" / "notes.txt").write_text("no code")
    assert code_facts(root=checkout) == second


def test_files_changed_after_the_import_do_not_count(checkout: Path) -> None:
    first = code_facts(root=checkout)
    (checkout / "sweeps" / "one.py").write_text("loss = 3\n")
    later = code_facts(imported=first["files"], root=checkout)
    assert code_changes(first, later) == () and later["commit"] is None
    assert code_changes(later, code_facts(root=checkout)) != ()


@pytest.mark.parametrize("around", ["nothing", "somebody else's repository"])
def test_without_git_the_files_are_compared(
    checkout: Path, tmp_path: Path, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is installed by pip, perhaps into an environment inside another project's repository."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    site = tmp_path / "project" / "site-packages"
    shutil.copytree(checkout, site, ignore=shutil.ignore_patterns(".git"))
    if around != "nothing":
        (tmp_path / "project" / "theirs.py").write_text("")
        (tmp_path / "project" / ".gitignore").write_text("site-packages")
        git(tmp_path / "project", "init", "-q")
        commit(tmp_path / "project")
    first = code_facts(root=site)
    assert first["commit"] is None and first["diff"] is None
    assert first["files"] == code_facts(root=checkout)["files"], "the same files give the same digest"
    (site / "lightning_scalerl" / "one.py").write_text("loss = 3\n")
    assert code_changes(first, code_facts(root=site))[0].startswith("files of the package ")


def test_the_users_own_folders_and_files_count(tmp_path: Path, checkout: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "loss").mkdir(parents=True)
    (mine / "loss" / "own.yaml").write_text("_target_: own.Own")
    (mine / "own.py").write_text("class Own: ...\n")
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def right(): ...\n")
    config = {"task": {"rewards": [{"use": f"{rewards}:right"}, "math"]}, "model": {"path": "no.py"}, "seed": 1}
    assert files_named(config) == [str(rewards)]
    named = [mine, *files_named(config)]
    first = code_facts(named, root=checkout)
    (mine / "loss" / "own.yaml").write_text("_target_: own.Other")
    assert code_facts(named, root=checkout) == first, (
        "configuration files do not count, because the run's configuration is frozen"
    )
    shutil.copytree(mine, tmp_path / "elsewhere")
    moved = code_facts([tmp_path / "elsewhere", rewards], root=checkout)
    assert code_changes(first, moved) == (), "the same content under another path is not a change"
    rewards.write_text("def right(): return 1\n")
    (mine / "own.py").write_text("class Own: loss = 3\n")
    changes = code_changes(first, code_facts(named, root=checkout))
    assert [change.split(" ")[0] for change in changes] == [str(mine), str(rewards)]
    assert code_changes(first, code_facts([], root=checkout)) != ()


def test_files_written_by_a_study_below_the_users_folder_do_not_count(tmp_path: Path, checkout: Path) -> None:
    """A study below the user's folder may have ten thousand runs, and each job would read all of them."""
    study = tmp_path / "outputs" / "mine"
    for folder in ("runs/1", "jobs/2"):
        (study / folder).mkdir(parents=True)
        (study / folder / "written.py").write_text("1\n")
    (study / "own.py").write_text("2\n")
    (study / "ledger.jsonl").touch()
    before = code_facts([tmp_path / "outputs"], root=checkout)
    (study / "runs/1/written.py").write_text("3\n")
    assert code_changes(before, code_facts([tmp_path / "outputs"], root=checkout)) == ()
    (study / "own.py").write_text("3\n")
    assert code_changes(before, code_facts([tmp_path / "outputs"], root=checkout)) != ()


def test_reading_the_checkout_does_not_write_its_index(checkout: Path) -> None:
    """Hundreds of jobs read the checkout; they must not write to its index while the user commits."""
    os.utime(checkout / "sweeps" / "one.py", (1, 1))
    index = checkout / ".git" / "index"
    before = index.stat()
    code_facts(root=checkout)
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_large_folder_is_not_read_completely(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for hidden in (".cache", "env", "site-packages"):
        (home / hidden).mkdir(parents=True)
        (home / hidden / "x.py").write_text("")
    (home / "env" / "pyvenv.cfg").write_text("")
    empty = code_facts([home], root=checkout)["folders"][str(home)]
    (home / "env" / "x.py").write_text("changed")
    assert code_facts([home], root=checkout)["folders"][str(home)] == empty
    monkeypatch.setattr(provenance, "MAX_FILES", 3)
    for number in range(4):
        (home / f"{number}.py").write_text("")
    assert code_facts([home], root=checkout)["folders"][str(home)] == TOO_MANY


def test_versions_are_named_without_importing_anything(checkout: Path) -> None:
    first = code_facts(root=checkout)
    assert set(first["versions"]) == {"python", "torch", "lightning", "transformers", "numpy", "vllm"}
    second = {**first, "versions": {**first["versions"], "torch": "9.1", "vllm": "8.0"}}
    versions = first["versions"]
    assert code_changes(first, second) == (f"torch {versions['torch']} -> 9.1", f"vllm {versions['vllm']} -> 8.0")
    program = "import sys; from sweeps.run.provenance import code_facts; code_facts(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize("damaged", [None, [], "x", {"folders": 3, "versions": [1]}, {}])
def test_damaged_facts_are_not_a_change(checkout: Path, damaged: Any) -> None:
    assert code_changes(damaged, damaged) == ()
    assert isinstance(code_changes(damaged, code_facts(root=checkout)), tuple)


def test_many_changes_are_shortened_to_one_line() -> None:
    assert (
        changes_line([f"p{n} 1 -> 2" for n in range(9)]) == ", ".join(f"p{n} 1 -> 2" for n in range(6)) + ", and 3 more"
    )


# --- in a journal -----------------------------------------------------------------------------------------------


def facts(name: str) -> dict[str, Any]:
    return {"commit": name, "diff": None, "files": name, "folders": {}, "versions": {}}


def write_journal(tmp_path: Path, header: str | None, *resumes: tuple[int, str | None]) -> Any:
    journal = Journal(tmp_path)
    journal.header(run="r", recipe="scalerl", seed=3, **({} if header is None else {"code": facts(header)}))
    for step, name in resumes:
        journal.resume(step, **({} if name is None else {"code": facts(name)}))
    journal.close()
    return read_journal(tmp_path)


@pytest.mark.parametrize(
    ("header", "resumes", "expected"),
    [
        ("a", [], []),
        ("a", [(4, "a")], []),
        ("a", [(4, "b")], [(4, "a -> b")]),
        ("a", [(4, "b"), (8, "b")], [(4, "a -> b")]),
        ("a", [(4, "b"), (8, "c")], [(4, "a -> b"), (8, "b -> c")]),
        ("a", [(4, "b"), (8, "a")], [(4, "a -> b"), (8, "b -> a")]),
        # The records of code b are void, so all remaining records are of code a.
        ("a", [(4, "b"), (4, "a")], []),
        ("a", [(8, "b"), (4, "c")], [(4, "a -> c")]),
        ("a", [(0, "b")], [(0, "a -> b")]),
        ("a", [(-1, "b")], []),
        ("a", [(-1, "b"), (2, "c")], [(2, "b -> c")]),
        # Journals of versions that recorded no code.
        (None, [(4, None)], []),
        (None, [(4, "a")], []),
        (None, [(4, "a"), (8, "b")], [(8, "a -> b")]),
    ],
)
def test_a_journal_shows_at_which_step_the_code_changed(
    tmp_path: Path, header: str | None, resumes: list[tuple[int, str | None]], expected: list[tuple[int, str]]
) -> None:
    view = write_journal(tmp_path, header, *resumes)
    assert [
        (change.step, changes_line(change.what).removeprefix("commit ")) for change in view.code_changes
    ] == expected
    noted = [f"scalerl seed 3: continued from step {step} with other code: commit {what}" for step, what in expected]
    assert warnings_of([view]) == noted


def test_what_a_run_was_made_with_until_a_step(tmp_path: Path) -> None:
    view = write_journal(tmp_path, "a", (4, "b"), (8, "c"))
    codes = [view.code_before(step) for step in (-1, 0, 4, 5, 8, 9)]
    assert [code and code["commit"] for code in codes] == [None, "a", "a", "b", "b", "c"]


def test_passed_over_checkpoints_are_those_of_the_newest_resume(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.header(run="r")
    skipped = [{"checkpoint": "step-00000008.ckpt", "why": "damaged"}]
    journal.resume(4, passed_over=skipped)
    assert read_journal(tmp_path).passed_over == skipped
    journal.resume(6)
    journal.close()
    assert read_journal(tmp_path).passed_over == []
