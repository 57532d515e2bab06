"""Tests of planning in a separate process: the controller gets the members or the planner's error, and no leftovers."""

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
from sweeps.launch.planning import Planner, PlannerLostError, plan_in_subprocess
from sweeps.run.spec import RunSpec, make_spec
from tests.examples import every
from tests.paths import ROOT


class OddError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


def plan(lists: Sequence[Sequence[str]], folders: Sequence[str]) -> list[RunSpec]:
    """Plan, or fail in the way that the first word of the first list names."""
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


def test_members_from_another_process_still_share_their_objects() -> None:
    specs = plan_in_subprocess(PLANNER, [["a"], ["b"], ["c"]], ["/x"])
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
def test_errors_of_the_planner_are_raised_in_the_controller(word: str, kind: type[BaseException], message: str) -> None:
    with pytest.raises(kind) as caught:
        plan_in_subprocess(PLANNER, [[word]], [])
    assert type(caught.value) is kind and str(caught.value).startswith(message)
    if word != "die":
        assert any("test_planning.py" in note for note in caught.value.__notes__)  # the traceback of the planner


@pytest.mark.slow
def test_a_planner_answers_several_requests_also_after_an_error() -> None:
    with Planner(PLANNER, []) as ask:
        first, second = ask([["a"]]), ask([["b"], ["c"]])
        with pytest.raises(ConfigurationError):
            ask([["refuse"]])
        third = ask([["d"]])
        assert len({specs[0].config["loss"]["process"] for specs in (first, second, third)}) == 1
        with pytest.raises(UserError, match="killed by SIGKILL"):
            ask([["die"]])
        new_process = ask([["e"]])[0].config["loss"]["process"]
        assert new_process != first[0].config["loss"]["process"], "a new process replaces the one that died"
    assert is_gone(new_process)


def test_output_of_the_planner_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    plan_in_subprocess(PLANNER, [["print"]], [])
    assert "making the base model" in capfd.readouterr().out


def test_the_debug_launcher_plans_in_its_own_process() -> None:
    debug_specs = DebugStudyLauncher(PLANNER, "nothing:nothing").plan_members([["a"]])
    usual_specs = StudyLauncher(PLANNER, "nothing:nothing").plan_members([["a"]])
    assert debug_specs[0].config["loss"]["process"] == os.getpid() != usual_specs[0].config["loss"]["process"]


def start_planning(code: str, marker: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process that plans; return it and the id of its planner's process."""
    # A shell starts background jobs with SIGINT ignored, and the tests may be such a job.
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
    lists = [["sleep", str(marker)]]
    return f"from sweeps.launch.planning import plan_in_subprocess; plan_in_subprocess({PLANNER!r}, {lists!r}, [])"


def test_ctrl_c_ends_both_processes_and_lets_the_planner_clean_up(tmp_path: Path) -> None:
    parent, child = start_planning(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.send_signal(signal.SIGINT)  # only to the parent, as `kill -INT` sends it
    _, stderr = parent.communicate(timeout=30)
    assert b"KeyboardInterrupt" in stderr and parent.returncode == -signal.SIGINT
    assert is_gone(child) and (tmp_path / "cleaned").exists()


def test_ctrl_c_between_two_requests_prints_one_traceback(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = [
        "import pathlib, time",
        "from sweeps.launch.planning import Planner",
        f"with Planner({PLANNER!r}, []) as ask:",
        "    process = ask([['a']])[0].config['loss']['process']",
        f"    pathlib.Path({str(marker)!r}).write_text(str(process))",
        "    time.sleep(60)",
    ]
    parent, child = start_planning("\n".join(code), marker)
    os.kill(child, signal.SIGINT)  # to both processes, as a terminal sends it
    parent.send_signal(signal.SIGINT)
    _, stderr = parent.communicate(timeout=30)
    assert stderr.count(b"Traceback") == 1 and parent.returncode == -signal.SIGINT
    assert is_gone(child)


@pytest.mark.slow
def test_sigterm_ends_both_and_leaves_no_semaphores(tmp_path: Path) -> None:
    """Python's resource tracker reports leaked semaphores on standard error when a process is killed."""
    parent, child = start_planning(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.send_signal(signal.SIGTERM)
    _, stderr = parent.communicate(timeout=30)
    assert (stderr, parent.returncode) == (b"", 128 + signal.SIGTERM)
    assert is_gone(child)


def test_the_planner_ends_with_its_parent(tmp_path: Path) -> None:
    parent, child = start_planning(planning_code(tmp_path / "pid"), tmp_path / "pid")
    parent.kill()
    parent.wait()
    assert is_gone(child)


@pytest.mark.parametrize("word", every(3, ["a", "user", "die"]))
def test_no_semaphores_are_left_without_an_orderly_exit(word: str) -> None:
    """`os._exit` skips all clean-up: semaphores that a pool still holds would be reported on standard error."""
    code = [
        "import os",
        "from sweeps.launch.planning import plan_in_subprocess",
        f"try: plan_in_subprocess({PLANNER!r}, [[{word!r}]], [])",
        "except Exception as error: kept = error",
        "os._exit(0)",
    ]
    result = subprocess.run([sys.executable, "-c", "\n".join(code)], cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")


def test_threads_of_libraries_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_EXIT_S", 0.5)
    begin = time.monotonic()
    assert len(plan_in_subprocess("tests.sweeps.launch.test_planning:plan_with_a_thread", [["a"]], [])) == 1
    assert time.monotonic() - begin < 30


def plan_with_a_thread(lists: Sequence[Sequence[str]], folders: Sequence[str]) -> list[RunSpec]:
    """Plan, and start a thread that outlives the planner."""
    import threading

    threading.Thread(target=time.sleep, args=(60,)).start()
    return plan(lists, folders)
