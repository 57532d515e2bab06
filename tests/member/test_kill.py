"""Tests of `kill -9` followed by the same command: runs and studies end exactly as without the kill.

Journals are compared bit for bit, without wall-clock values. The task is small but its rewards vary, so gradients are
not zero and two variants give different runs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from sweeps.launch.ledger import Ledger
from sweeps.run.activity import HUNG_CODE
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, find_runs, read_journal
from sweeps.run.progress import is_done
from tests.callbacks.test_evaluation_sets import AIME, GSM8K, HUMANEVAL
from tests.forked import Forked
from tests.place import PATIENCE_S, STEPS, Deterministic, Place, deterministic, kill_group, kinds, lines, wait_until


def study(place: Place, output: str) -> list[str]:
    """Return the arguments of a study of two variants that run at the same time."""
    return place.study(output, "variant=none,loss_dapo", "seed=0", "launch.max_parallel=2")


def kill_controller(process: Forked) -> None:
    """Kill only the controller; its members must notice that and end."""
    process.kill()
    process.wait()


def member_pids(output: Path) -> dict[str, int]:
    """Return the process that writes to the log of each run below `output`, by run."""
    pids = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            log = (entry / "fd" / "1").readlink()
        except OSError:
            continue
        if log.name == LOG_FILE and log.is_relative_to(output):
            pids[log.parent.name] = int(entry.name)
    return pids


# --- a single run --------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Create a place for runs in this process and in others."""
    new_place = Place(tmp_path)
    for name, value in new_place.environment().items():
        monkeypatch.setenv(name, value)
    return new_place


def run_here(overrides: Sequence[str]) -> Path:
    """Do the work of `python -m lightning_scalerl.train OVERRIDES...` in this process; return the folder of the run."""
    (spec,) = plan_members([list(overrides)])
    run_dir = Path(spec.config["output_dir"]) / "runs" / spec.run
    spec.write(run_dir)
    run_member(run_dir)
    assert is_done(run_dir, STEPS, run_dir.name)
    return run_dir


@pytest.mark.slow
def test_a_hanging_run_ends_itself_and_continues_bit_for_bit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # The verifier waits forever for the gate's file in the middle of the run.
    overrides = [*place.overrides("hung", "seed=3"), "launch.hang_factor=2", "launch.hang_min_s=10"]
    monkeypatch.setenv("VERIFIER_GATE", str(place.root / "never"))
    with place.command(["-m", "lightning_scalerl.train", *overrides]) as process:
        assert process.wait(timeout=PATIENCE_S) == HUNG_CODE, place.said()
    output = place.said()
    assert "no sign of life for" in output and "odd_digits" in output and "next_batch" in output, (
        "the log names the place of the hang"
    )
    monkeypatch.delenv("VERIFIER_GATE")
    undisturbed = run_here(place.overrides("undisturbed", "seed=3"))
    assert not is_done(place.root / "hung/runs" / undisturbed.name, STEPS, undisturbed.name)
    assert deterministic(run_here(overrides)) == deterministic(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    ["adamw_8bit", *(pytest.param(name, marks=pytest.mark.full) for name in ("adamw", "adamw_bf16_kahan", "muon"))],
)
def test_a_killed_single_run_continues_bit_for_bit(optimizer: str, place: Place) -> None:
    options = ("seed=3", f"optimizer={optimizer}")
    overrides = place.overrides("killed", *options)
    (spec,) = plan_members([list(overrides)])
    run_dir = place.root / "killed" / "runs" / spec.run
    with place.command(["-m", "lightning_scalerl.train", *overrides], verifier_s=0.01) as process:
        assert wait_until(lambda: lines(run_dir) >= 11, process), place.said()
        kill_controller(process)
    assert kinds(run_dir)["checkpoint"] >= 1
    assert not is_done(run_dir, STEPS, run_dir.name)
    undisturbed = run_here(place.overrides("undisturbed", *options))
    assert run_here(overrides) == run_dir
    assert kinds(run_dir)["resume"] == 1
    assert kinds(undisturbed) == Counter(run=1, eval=5, train=STEPS, checkpoint=4, end=1)
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    gradients = [metrics["train/gradient_norm"] for kind, _, metrics in expected if kind == "train"]
    assert all(gradients)


@pytest.mark.full
def test_a_killed_run_with_several_evaluation_sets_continues_bit_for_bit(place: Place) -> None:
    """Evaluation sets in the formats of AIME, HumanEval and GSM8K, each with its own settings, next to another task."""
    evaluation_sets = {
        "aime": (AIME, "samples=8", "every_n_steps=4"),
        "humaneval": (HUMANEVAL, "samples=2", "every_n_steps=6"),
    }
    evaluation_sets["gsm8k"] = (GSM8K, "temperature=0", "max_new_tokens=4")
    sets = []
    for name, (rows, *settings) in evaluation_sets.items():
        file, field = place.root / f"{name}.jsonl", f"evaluation.sets.{name}"
        file.write_text("\n".join(map(json.dumps, rows)))
        sets += [f"+task@{field}.task={name}", f"{field}.task.train=null", f"{field}.task.instruction=''"]
        sets += [f"{field}.task.heldout={{test:{file}}}", *(f"+{field}.{setting}" for setting in settings)]
    overrides = place.overrides("killed", *sets)
    (spec,) = plan_members([list(overrides)])
    assert spec.run != plan_members([place.overrides("killed")])[0].run, (
        "evaluation sets change the records, so they are part of a run's identity"
    )
    run_dir = place.root / "killed" / "runs" / spec.run
    with place.command(["-m", "lightning_scalerl.train", *overrides], verifier_s=0.01) as process:
        assert wait_until(lambda: lines(run_dir) >= 12, process), place.said()
        kill_controller(process)
    assert not is_done(run_dir, STEPS, run_dir.name)
    undisturbed = run_here(place.overrides("undisturbed", *sets))
    assert run_here(overrides) == run_dir
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    steps = {
        name: [step for _, step, metrics in expected if f"eval/{name}/pass_rate" in metrics] for name in evaluation_sets
    }
    assert steps == {"aime": [0, 4, 8, 12], "humaneval": [0, 6, 12], "gsm8k": [0, 3, 6, 9, 12]}
    last = expected[-1][2] if expected[-1][0] == "eval" else expected[-2][2]
    assert {"eval/aime/pass@8", "eval/humaneval/pass@2"} <= last.keys() and "eval/gsm8k/pass@2" not in last


@pytest.mark.slow
def test_a_run_killed_after_its_last_checkpoint_is_completed(
    place: Place,
) -> None:
    overrides = place.overrides("out")
    run_dir = run_here(overrides)
    journal = (run_dir / JOURNAL_FILE).read_bytes()
    before = read_journal(run_dir).deterministic()
    *other_lines, last = journal.splitlines(keepends=True)
    assert b'"end"' in last
    (run_dir / JOURNAL_FILE).write_bytes(b"".join(other_lines))
    assert not is_done(run_dir, STEPS, run_dir.name)
    assert run_here(overrides) == run_dir
    assert read_journal(run_dir).deterministic() == before


# --- studies -------------------------------------------------------------------------------------------------


# Members of most studies do not train (`tests.light`), because these tests are about the study.


def check_trained(journals: dict[str, Deterministic]) -> None:
    """Assert that two undisturbed members were trained, and that their records differ."""
    one, two = journals.values()
    for journal in (one, two):
        assert len(journal) == 5 + STEPS
        assert sum(metrics["train/gradient_norm"] > 0 for kind, _, metrics in journal if kind == "train") > STEPS / 2
    assert one != two


@pytest.mark.slow
def test_two_undisturbed_members_of_a_light_study_differ(light_undisturbed: dict[str, Deterministic]) -> None:
    check_trained(light_undisturbed)


def check_study(output: Path, expected: dict[str, Deterministic]) -> None:
    """Assert that every member finished once, with the expected records."""
    assert deterministic(output) == expected
    ledger = Ledger(output)
    assert {run: state.state for run, state in ledger.fold().items()} == dict.fromkeys(expected, "finished")
    finished = Counter(entry["run"] for entry in ledger.entries() if entry["event"] == "finished")
    assert finished == dict.fromkeys(expected, 1)
    for run_dir in find_runs(output):
        assert kinds(run_dir)["end"] == 1
        assert kinds(run_dir)["run"] == 1


def check_killed_and_continued(
    place: Place,
    output: Path,
    expected: dict[str, Deterministic],
    kill: Callable[[Forked], None],
    kills: Sequence[int],
    verifier_s: float = 0.01,
) -> None:
    """Kill and relaunch a study several times, then let it finish and check it.

    Each of `kills` is the number of new lines in the journals after which the kill comes.
    """
    overrides = study(place, output.name)
    run_dirs = [output / "runs" / run for run in expected]
    for new_lines in kills:
        begin = lines(*run_dirs)
        with place.command(overrides, verifier_s) as process:
            assert wait_until(lambda: lines(*run_dirs) >= begin + new_lines, process), place.said()  # noqa: B023
            members = member_pids(output)
            assert members
            kill(process)
            # No member may keep writing without a controller.
            deadline = time.monotonic() + 5
            while member_pids(output) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert member_pids(output) == {}
        assert not all(is_done(run_dir, STEPS, run_dir.name) for run_dir in run_dirs)
    with place.command(overrides) as process:
        assert process.wait(PATIENCE_S) == 0, place.said()
    check_study(output, expected)
    assert max(state.attempts for state in Ledger(output).fold().values()) == len(kills) + 1


@pytest.mark.full
@pytest.mark.parametrize("kill", [kill_controller, kill_group])
def test_a_study_killed_several_times_ends_as_an_undisturbed_one(
    light_studies: Place,
    light_undisturbed: dict[str, Deterministic],
    kill: Callable[[Forked], None],
) -> None:
    output = light_studies.root / kill.__name__
    # Kill before the first checkpoint, after one, right after resuming, and late, when one member may be finished.
    kills = (4, 15, 1, 17)
    # The verifier is slowed down, or a member would finish before it is killed.
    check_killed_and_continued(light_studies, output, light_undisturbed, kill, kills, verifier_s=0.02)
    assert all(kinds(output / "runs" / run)["resume"] >= 2 for run in light_undisturbed)


@pytest.mark.slow
def test_a_killed_study_with_training_ends_as_an_undisturbed_one(
    studies: Place, undisturbed: dict[str, Deterministic]
) -> None:
    check_trained(undisturbed)
    output = studies.root / "killed"
    # Kill after a checkpoint; the members must notice that their controller is gone.
    check_killed_and_continued(studies, output, undisturbed, kill_controller, (15,))
    assert any(kinds(output / "runs" / run)["resume"] for run in undisturbed)


@pytest.mark.slow
def test_the_same_command_again_changes_nothing(
    light_studies: Place, light_undisturbed: dict[str, Deterministic]
) -> None:
    output = light_studies.root / "undisturbed"
    check_study(output, light_undisturbed)
    before = {path: path.read_bytes() for path in (*output.glob("runs/*/*.jsonl"), output / "ledger.jsonl")}
    assert len(before) == 3
    with light_studies.command(study(light_studies, "undisturbed")) as process:
        assert process.wait(PATIENCE_S) == 0, light_studies.said()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.full
def test_a_killed_member_fails_alone_and_the_same_command_continues_it(
    light_studies: Place, light_undisturbed: dict[str, Deterministic]
) -> None:
    studies, undisturbed = light_studies, light_undisturbed
    output = studies.root / "member"
    overrides = study(studies, "member")
    victim, other = undisturbed
    victim_dir, other_dir = (output / "runs" / run for run in (victim, other))
    old_length = len(studies.said())
    with studies.command(overrides, verifier_s=0.05) as process:
        assert wait_until(lambda: lines(victim_dir) >= 9, process), studies.said()
        os.kill(member_pids(output)[victim], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    states = Ledger(output).fold()
    assert (states[victim].state, states[victim].reason) == ("failed", "killed by SIGKILL")
    assert (states[other].state, states[other].reason) == ("finished", None)
    assert not is_done(victim_dir, STEPS, victim_dir.name)
    new_output = studies.said()[old_length:]
    assert "Traceback" not in new_output
    assert f"1 of 2 members failed ({states[victim].recipe} seed 0: killed by SIGKILL)" in new_output
    untouched = (other_dir / JOURNAL_FILE).read_bytes()

    with studies.command(overrides) as process:
        assert process.wait(PATIENCE_S) == 0, studies.said()
    check_study(output, undisturbed)
    assert (other_dir / JOURNAL_FILE).read_bytes() == untouched
    states = Ledger(output).fold()
    assert (states[victim].attempts, states[other].attempts) == (2, 1)
    assert kinds(victim_dir)["resume"] == 1
