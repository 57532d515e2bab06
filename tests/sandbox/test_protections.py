"""Tests of finding the protections of this machine: they are tried, reported, and required unless the user opts out."""

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
    available = place.protections
    assert available.walls.isolated
    lines = available.lines()
    assert len(lines) == 6
    assert lines[0].startswith("bubblewrap: missing") == (place.mode == "landlock")
    assert ("separate user: missing, only root can assign one" in lines[3]) == (place.uid != 0)
    assert lines[4] == "scratch directory of bounded size: in memory"


def test_running_without_protections_must_be_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.unprotected=true") as caught:
        check_protections(False, "none")
    assert "\n" not in str(caught.value)
    available = check_protections(True, "none")
    assert not available.walls.isolated
    assert "bubblewrap: missing, left out" in available.lines()
    assert run_program("print(1)", "", Limits(), available).stdout == "1\n"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.mode"):
        check_protections(True, "docker")  # type: ignore[arg-type]


def test_a_machine_without_any_protection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protections, "landlock_abi", lambda: 0)
    monkeypatch.setattr(protections, "seccomp_obstacle", lambda: "prctl: not here")
    monkeypatch.setattr(protections.shutil, "which", lambda _: None)
    with pytest.raises(ConfigurationError, match="bwrap is not installed") as caught:
        check_protections(False)
    assert "prctl: not here" in str(caught.value) and "turned off" in str(caught.value)
    available = check_protections(True)
    assert available.walls.landlock == 0 and not available.walls.isolated
    assert "bubblewrap: missing, bwrap is not installed" in available.lines()


def test_a_bubblewrap_that_fails_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report quotes its error and the kernel setting that forbids namespaces."""
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
    available = check_protections(True)
    assert available.walls.bubblewrap == ""
    assert f"{setting} is 1" in available.lines()[0]


def test_walls_that_do_not_contain_the_trial_program_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fake bubblewrap only runs its command, so it starts, but the trial program can escape."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(protections.shutil, "which", lambda _: str(fake))
    monkeypatch.setattr(protections, "landlock_abi", lambda: 0)
    monkeypatch.setattr(protections, "seccomp_obstacle", lambda: "left out")
    available = check_protections(True)
    assert not available.walls.bubblewrap
    assert "in reach" in available.lines()[0] or "does not" in available.lines()[0] or "gone" in available.lines()[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wall_s", 0), ("wall_s", float("inf")), ("cpu_s", -1), ("memory_mib", 0.5), ("memory_mib", 8),
        ("output_kib", 0), ("file_mib", True), ("processes", "4"),
    ],
)  # fmt: skip
def test_invalid_limits_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.sandbox\.{field}"):
        Limits(**{field: value})


def test_which_walls_isolate() -> None:
    assert Walls("bwrap").isolated and Walls(landlock=1, seccomp=True).isolated
    assert not Walls(landlock=1).isolated and not Walls(seccomp=True).isolated and not Walls().isolated


@pytest.mark.parametrize("user_namespace", [True, False])
def test_bubblewrap_binds_one_folder_for_writing(user_namespace: bool) -> None:
    """Otherwise a program could change the user's own Python."""
    command = launch._bubblewrap(Walls("bwrap", user_namespace), "/tmp/scratch", 9)
    writable = [command[at + 1] for at, word in enumerate(command) if word in ("--bind", "--dev-bind")]
    assert writable == [*launch._DEVICES, "/tmp/scratch"]
    assert command.index("--remount-ro") > max(at for at, word in enumerate(command) if "bind" in word)
    bound = [command[at + 1] for at, word in enumerate(command) if word == "--ro-bind"]
    assert bound and not {"/", "/etc", "/proc", "/home", "/root", str(Path.home()), str(ROOT)} & set(bound)


def test_the_sandbox_imports_nothing_of_training() -> None:
    """It imports neither torch, Lightning, transformers and NumPy, nor more of this package than `checks`."""
    code = (
        "import sys, lightning_scalerl.sandbox\n"
        "ours = {n for n in sys.modules if n.startswith('lightning_scalerl.')}\n"
        "others = {n.partition('.')[2] for n in ours if '.sandbox' not in n}\n"
        "assert others == {'checks'}, others\n"
        "assert not {'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
