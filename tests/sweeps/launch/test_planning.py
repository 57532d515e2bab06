"""Planning apart: the controller gets members or the planner's own words, and nothing of what it took."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_scalerl.checks import ConfigurationError
from sweeps.cli.launchers import DebugStudyLauncher, StudyLauncher
from sweeps.errors import UserError
from sweeps.launch import planning
from sweeps.launch.planning import Planner, PlannerLostError, plan_apart
from sweeps.run.spec import RunSpec, make_spec
from tests.examples import every
from tests.paths import ROOT


class OddError(Exception):
    """One that does not come back from a pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


def plan(lists: Sequence[Sequence[str]], folders: Sequence[str]) -> list[RunSpec]:
    """What the first word of the first list says."""
    match lists[0][0]:
        case "refuse":
            raise ConfigurationError("optimizer.lr: -1 must be positive")
        case "user":
            raise UserError("model: no such file")
        case "odd":
            raise OddError(1, 2)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "sleep":
            Path(lists[0][1]).write_text(str(os.getpid()))
            try:
                time.sleep(60)
            finally:
                Path(lists[0][1]).with_name("cleaned").touch()
        case "print":
            print("making the base model")
    shared = {"choice": "cispo", "of": list(folders), "process": os.getpid(), "path": sys.path}
    config = {"loss": shared, "budget": {"steps": 1}}
    return [make_spec({**config, "seed": seed}, {**config, "seed": seed}, "r", "r") for seed in range(len(lists))]


PLANNER = f"{__name__}:plan"


def test_members_come_from_another_process_and_share_what_they_shared() -> None:
    specs = plan_apart(PLANNER, [["a"], ["b"], ["c"]], ["/x"])
    assert [spec.seed for spec in specs] == [0, 1, 2]
    loss = specs[0].config["loss"]
    assert loss["of"] == ["/x"] and loss["path"] == sys.path
    assert loss["process"] != os.getpid()
    assert all(spec.config["loss"] is loss and spec.reference["loss"] is loss for spec in specs)


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    every(
        5,
        [
            ("refuse", ConfigurationError, "optimizer.lr: -1 must be positive"),
            ("user", UserError, "model: no such file"),
            ("odd", RuntimeError, "OddError: 1 is not 2"),
            ("exit", SystemExit, "3"),
            ("die", PlannerLostError, "planner: its process ended without an answer (killed by SIGKILL)"),
        ],
    ),
)
def test_what_goes_wrong_there_is_told_here(word: str, kind: type[BaseException], message: str) -> None:
    with pytest.raises(kind) as caught:
        plan_apart(PLANNER, [[word]], [])
    assert type(caught.value) is kind and str(caught.value).startswith(message)
    if word != "die":
        assert any("test_planning.py" in note for note in caught.value.__notes__)  # where it happened


@pytest.mark.slow
def test_it_may_be_asked_again_and_again_also_after_a_refusal() -> None:
    with Planner(PLANNER, []) as ask:
        first, second = ask([["a"]]), ask([["b"], ["c"]])
        with pytest.raises(ConfigurationError):
            ask([["refuse"]])
        third = ask([["d"]])
        assert len({each[0].config["loss"]["process"] for each in (first, second, third)}) == 1
        with pytest.raises(UserError, match="killed by SIGKILL"):
            ask([["die"]])
        other = ask([["e"]])[0].config["loss"]["process"]
        assert other != first[0].config["loss"]["process"], "another process takes its place"
    assert is_gone(other)


def test_what_it_prints_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    plan_apart(PLANNER, [["print"]], [])
    assert "making the base model" in capfd.readouterr().out


def test_a_debugger_sees_the_planner_in_its_own_process() -> None:
    here = DebugStudyLauncher(PLANNER, "nothing:nothing").planned([["a"]])
    elsewhere = StudyLauncher(PLANNER, "nothing:nothing").planned([["a"]])
    assert here[0].config["loss"]["process"] == os.getpid() != elsewhere[0].config["loss"]["process"]


def begun(code: str, marker: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that plans, and the number of the one that it plans in."""
    # What a shell starts in the background inherits that Ctrl-C is ignored; the tests may have been started so.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not marker.exists() or not marker.read_text():
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.02)
    return parent, int(marker.read_text())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def planning_code(marker: Path) -> str:
    words = [["sleep", str(marker)]]
    return f"from sweeps.launch.planning import plan_apart; plan_apart({PLANNER!r}, {words!r}, [])"


def test_ctrl_c_ends_both_and_lets_the_planner_clean_up(tmp_path: Path) -> None:
    parent, child = begun(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.send_signal(signal.SIGINT)  # not to the child, as `kill -INT` does
    _, said = parent.communicate(timeout=30)
    assert b"KeyboardInterrupt" in said and parent.returncode == -signal.SIGINT
    assert is_gone(child) and (tmp_path / "cleaned").exists()


def test_ctrl_c_between_two_requests_is_told_once(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = [
        "import pathlib, time",
        "from sweeps.launch.planning import Planner",
        f"with Planner({PLANNER!r}, []) as ask:",
        "    process = ask([['a']])[0].config['loss']['process']",
        f"    pathlib.Path({str(marker)!r}).write_text(str(process))",
        "    time.sleep(60)",
    ]
    parent, child = begun("\n".join(code), marker)
    os.kill(child, signal.SIGINT)  # to both, as a terminal does
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert said.count(b"Traceback") == 1 and parent.returncode == -signal.SIGINT
    assert is_gone(child)


@pytest.mark.slow
def test_sigterm_ends_both_and_leaves_no_semaphores(tmp_path: Path) -> None:
    """Python's resource tracker writes to standard error what semaphores it finds at the end of a killed process."""
    parent, child = begun(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.send_signal(signal.SIGTERM)
    _, said = parent.communicate(timeout=30)
    assert (said, parent.returncode) == (b"", 128 + signal.SIGTERM)
    assert is_gone(child)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent, child = begun(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.kill()
    parent.wait()
    assert is_gone(child)


@pytest.mark.parametrize("word", every(3, ["a", "user", "die"]))
def test_nothing_is_left_to_an_interpreter_that_cleans_nothing_up(word: str) -> None:
    """Semaphores that a pool still holds then are complained of on standard error."""
    code = [
        "import os",
        "from sweeps.launch.planning import plan_apart",
        f"try: plan_apart({PLANNER!r}, [[{word!r}]], [])",
        "except Exception as error: kept = error",
        "os._exit(0)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_libraries_that_never_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_EXIT_S", 0.5)
    begin = time.monotonic()
    assert len(plan_apart("tests.sweeps.launch.test_planning:plan_with_a_thread", [["a"]], [])) == 1
    assert time.monotonic() - begin < 30


def plan_with_a_thread(lists: Sequence[Sequence[str]], folders: Sequence[str]) -> list[RunSpec]:
    """A thread that outlives it."""
    import threading

    threading.Thread(target=time.sleep, args=(60,)).start()
    return plan(lists, folders)
