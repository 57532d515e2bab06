"""What this machine gives is tried out, told, and insisted upon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox import Limits, check_protections, launch, protections, run_program
from lightning_scalerl.sandbox.walls import Walls
from tests.paths import ROOT
from tests.sandbox.places import Place


def test_lines_say_what_is_given(place: Place) -> None:
    found = place.protections
    assert found.walls.isolated
    lines = found.lines()
    assert len(lines) == 6
    assert lines[0].startswith("bubblewrap: missing") == (place.mode == "landlock")
    assert ("separate user: missing, only root can assign one" in lines[3]) == (place.uid != 0)
    assert lines[4] == "scratch directory of bounded size: in memory"


def test_none_is_said_and_must_be_wanted() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.unprotected=true") as caught:
        check_protections(False, "none")
    assert "\n" not in str(caught.value)
    found = check_protections(True, "none")
    assert not found.walls.isolated
    assert "bubblewrap: missing, left out" in found.lines()
    assert run_program("print(1)", "", Limits(), found).stdout == "1\n"


def test_a_mode_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.mode"):
        check_protections(True, "docker")  # type: ignore[arg-type]


def test_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protections, "landlock_abi", lambda: 0)
    monkeypatch.setattr(protections, "seccomp_obstacle", lambda: "prctl: not here")
    monkeypatch.setattr(protections.shutil, "which", lambda _: None)
    with pytest.raises(ConfigurationError, match="bwrap is not installed") as caught:
        check_protections(False)
    assert "prctl: not here" in str(caught.value) and "turned off" in str(caught.value)
    found = check_protections(True)
    assert found.walls.landlock == 0 and not found.walls.isolated
    assert "bubblewrap: missing, bwrap is not installed" in found.lines()


def test_bubblewrap_that_is_there_but_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own words are the obstacle, with the settings that forbid it."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    setting = tmp_path / "unprivileged"
    setting.write_text("1\n")
    monkeypatch.setattr(protections.shutil, "which", lambda _: str(fake))
    monkeypatch.setattr(protections, "_SETTINGS", ((str(setting), "1"), (str(tmp_path / "absent"), "0")))
    with pytest.raises(ConfigurationError, match="No permissions to create new namespace"):
        check_protections(False, "bubblewrap")
    found = check_protections(True)
    assert found.walls.bubblewrap == ""
    assert f"{setting} is 1" in found.lines()[0]


def test_walls_that_let_something_through_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bubblewrap that only runs its command: it starts, and the trial run gets out."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(protections.shutil, "which", lambda _: str(fake))
    monkeypatch.setattr(protections, "landlock_abi", lambda: 0)
    monkeypatch.setattr(protections, "seccomp_obstacle", lambda: "left out")
    found = check_protections(True)
    assert not found.walls.bubblewrap
    assert "in reach" in found.lines()[0] or "does not" in found.lines()[0] or "gone" in found.lines()[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wall_s", 0), ("wall_s", float("inf")), ("cpu_s", -1), ("memory_mib", 0.5), ("memory_mib", 8),
        ("output_kib", 0), ("file_mib", True), ("processes", "4"),
    ],
)  # fmt: skip
def test_limits_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.sandbox\.{field}"):
        Limits(**{field: value})


def test_walls() -> None:
    assert Walls("bwrap").isolated and Walls(landlock=1, seccomp=True).isolated
    assert not Walls(landlock=1).isolated and not Walls(seccomp=True).isolated and not Walls().isolated


@pytest.mark.parametrize("user_namespace", [True, False])
def test_bubblewrap_binds_one_folder_for_writing(user_namespace: bool) -> None:
    """A user's own Python would be theirs to change."""
    command = launch._bubblewrap(Walls("bwrap", user_namespace), "/tmp/scratch", 9)
    writable = [command[at + 1] for at, word in enumerate(command) if word in ("--bind", "--dev-bind")]
    assert writable == [*launch._DEVICES, "/tmp/scratch"]
    assert command.index("--remount-ro") > max(at for at, word in enumerate(command) if "bind" in word)
    bound = [command[at + 1] for at, word in enumerate(command) if word == "--ro-bind"]
    assert bound and not {"/", "/etc", "/proc", "/home", "/root", str(Path.home()), str(ROOT)} & set(bound)


def test_light() -> None:
    """Nothing of training is imported."""
    code = (
        "import sys, lightning_scalerl.sandbox\n"
        "ours = {n for n in sys.modules if n.startswith('lightning_scalerl.')}\n"
        "others = {n.partition('.')[2] for n in ours if '.sandbox' not in n}\n"
        "assert others == {'checks'}, others\n"
        "assert not {'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
