"""Tests of errors of the operating system: `scalerl` and `scalerl train` print one line and exit with code 1.

All other errors keep their traceback. The tests may run as root, whom permissions do not stop. So patched functions
raise most errors; only files that are in the way are real.
"""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import pytest

from lightning_scalerl import train
from sweeps.cli import main as cli
from sweeps.errors import UserError, describe_os_error, errors_naming
from sweeps.launch.study import Study
from tests.examples import every
from tests.sweeps.cli.test_refused import contents, launch
from tests.sweeps.launch.test_study import ScriptedExecutor, member

REFUSALS = [
    (errno.EROFS, "Read-only file system", "output_dir="),
    (errno.EACCES, "Permission denied", "output_dir="),
    (errno.ENOSPC, "No space left on device", "make room"),
    (errno.EDQUOT, "Disk quota exceeded", "make room within your quota"),
    (errno.ENAMETOOLONG, "File name too long", "shorter"),
    (errno.ENOTDIR, "Not a directory", "in the way"),
    (errno.EEXIST, "File exists", "in the way"),
    (errno.EIO, "Input/output error", "file system fails"),
]


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/data/mine/x")


# --- scalerl COMMAND -----------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """Call `scalerl status` with a command function that raises `error`."""

    def status(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("sweeps.cli.study_commands.status_command", status)
    return cli.main(["status", "x"])


@pytest.mark.parametrize(("number", "why", "remedy"), [*REFUSALS, (errno.ENOENT, "No such file", "")])
def test_a_command_prints_the_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, why: str, remedy: str
) -> None:
    assert command(monkeypatch, refused(number)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"scalerl: /data/mine/x: {why}") and remedy in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), KeyError("k"), OSError("a library's own words")])
def test_other_errors_of_a_command_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    with pytest.raises(type(error)):
        command(monkeypatch, error)


def test_a_broken_pipe_is_not_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "dup2", lambda one, other: other)
    assert command(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "examples/curves.csv", "-o", "FILE/report.html"],
        ["watch", "examples/curves.csv", "--once", "--out", "FILE/fits.jsonl"],
        ["status", "FILE"],
        ["status", "FILE/study"],
        ["status", "LONG"],
        ["collect", "FILE/study"],
        ["collect", "LONG"],
        ["rank", "LONG"],
        ["export", "FILE", "out"],
        ["rollouts", "LONG"],
    ],
)
def test_a_file_in_the_way_or_a_long_name_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    paths = {"FILE": str(tmp_path / "file"), "LONG": str(tmp_path / ("n" * 300))}
    words = [word.replace("FILE", paths["FILE"]).replace("LONG", paths["LONG"]) for word in arguments]
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("scalerl: ") and "Traceback" not in err, err
    assert (tmp_path / "file").read_text() == "mine"


# --- scalerl train -------------------------------------------------------------------------------------------


def train_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """Run `scalerl train` with a Hydra main function that raises `error`. Returns the exit code."""

    def raises() -> None:
        raise error

    monkeypatch.setattr(train, "_hydra_main", raises)
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as stop:
        train.main()
    return stop.value.code


@pytest.mark.parametrize(("number", "why", "remedy"), REFUSALS)
def test_training_prints_the_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, why: str, remedy: str
) -> None:
    assert train_command(monkeypatch, refused(number)) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"scalerl train: /data/mine/x: {why}") and remedy in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("no"), OSError("a library's own words"), FileNotFoundError(2, "No such", "data.txt")]
)
def test_errors_of_user_code_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    with pytest.raises(type(error)):
        train_command(monkeypatch, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    every(
        3,
        [
            (["output_dir=file"], "output_dir: file: File exists; a file is in the way of a folder"),
            (["output_dir=file/x/y"], "output_dir: file/x: Not a directory; a file is in the way"),
            (["output_dir=" + "n" * 300], "File name too long; give a shorter name"),
            (["seed=range(3,3)"], "seed=range(3,3): stands for no value, so the grid is empty"),
            (["hydra.sweeper.rows=[['seed=range(0)']]"], "seed=range(0): stands for no value, so the grid is empty"),
        ],
        pytest.mark.full,
    ),
    ids=["a file", "below a file", "a long name", "an empty grid", "an empty row"],
)
def test_an_impossible_multirun_gives_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = launch(tmp_path, "cluster=debug", *arguments)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize(
    ("call", "number", "why", "remedy"),
    [
        (call, *refusal)
        for call in ("mkdir", "open", "rename")
        for refusal in REFUSALS
        if (call, refusal[0]) != ("open", errno.EEXIST)  # to the lease, EEXIST means that another process was faster
    ],
)
def test_a_study_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, why: str, remedy: str
) -> None:
    """Writing a study begins with mkdir, open and rename (folder, lease, specification). Each may fail."""
    (tmp_path / "notes.txt").write_text("mine")

    def refuses(*arguments: object, **more: object) -> None:
        raise refused(number)

    with monkeypatch.context() as patch:
        if call == "rename":
            patch.setattr(Path, "rename", refuses)  # files are written under a temporary name, then renamed
        else:
            patch.setattr(os, call, refuses)
        executor = ScriptedExecutor()
        with pytest.raises((UserError, OSError)) as refusal:
            Study(tmp_path / "outputs" / "mine", [member("cispo")]).run(executor)
    assert why in str(refusal.value)
    assert executor.submitted == []
    if isinstance(refusal.value, UserError):
        assert str(refusal.value).startswith("output_dir: ") and remedy in str(refusal.value)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


# --- the line ------------------------------------------------------------------------------------------------


def test_a_long_path_is_shortened_in_the_message() -> None:
    message = describe_os_error(OSError(errno.ENAMETOOLONG, "File name too long", "n" * 5000))
    assert message is not None and len(message) < 300


def test_both_file_names_of_an_error_are_printed() -> None:
    assert describe_os_error(OSError(errno.EROFS, "Read-only file system", "a", None, "b")) is not None
    assert str(describe_os_error(OSError(errno.EROFS, "Read-only file system", "a", None, "b"))).startswith(
        "a -> b: Read"
    )


def test_an_error_of_the_system_names_the_field() -> None:
    expected = r"^output_dir: /data/mine/x: Read-only file system; .*output_dir="
    with pytest.raises(UserError, match=expected), errors_naming("output_dir"):
        raise refused(errno.EROFS)
    with pytest.raises(ZeroDivisionError), errors_naming("output_dir"):
        raise ZeroDivisionError
