"""kill -9, and the same command again: no moment of it changes what a run learns, nor how a study ends.

Journals are compared as read, bit for bit, without the wall clock. The task is small but its rewards vary, so
gradients are not zero and two variants are not the same run.
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
    """Two variants, both at a time."""
    return place.study(output, "variant=none,loss_dapo", "seed=0", "launch.max_parallel=2")


def kill_controller(process: Forked) -> None:
    """Only the process that was started; the members have to notice."""
    process.kill()
    process.wait()


def member_pids(output: Path) -> dict[str, int]:
    """Processes that write to the log of a run below `output`, by run."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            log = (entry / "fd" / "1").readlink()
        except OSError:
            continue
        if log.name == LOG_FILE and log.is_relative_to(output):
            found[log.parent.name] = int(entry.name)
    return found


# --- a single run --------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """For runs in this process as well as in others."""
    found = Place(tmp_path)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found


def run_here(overrides: Sequence[str]) -> Path:
    """What `python -m lightning_scalerl.train OVERRIDES...` does, in this process."""
    (spec,) = plan_members([list(overrides)])
    run_dir = Path(spec.config["output_dir"]) / "runs" / spec.run
    spec.write(run_dir)
    run_member(run_dir)
    assert is_done(run_dir, STEPS, run_dir.name)
    return run_dir


@pytest.mark.slow
def test_a_run_that_hangs_ends_itself_and_continues_bit_for_bit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # A generation that never comes back, in the middle of the run.
    overrides = [*place.overrides("hung", "seed=3"), "launch.hang_factor=2", "launch.hang_min_s=10"]
    monkeypatch.setenv("VERIFIER_GATE", str(place.root / "never"))
    with place.command(["-m", "lightning_scalerl.train", *overrides]) as process:
        assert process.wait(timeout=PATIENCE_S) == HUNG_CODE, place.said()
    said = place.said()
    assert "no sign of life for" in said and "odd_digits" in said and "next_batch" in said, "where it hung"
    monkeypatch.delenv("VERIFIER_GATE")
    undisturbed = run_here(place.overrides("undisturbed", "seed=3"))
    assert not is_done(place.root / "hung/runs" / undisturbed.name, STEPS, undisturbed.name)
    assert deterministic(run_here(overrides)) == deterministic(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adamw_8bit", *(pytest.param(name, marks=pytest.mark.full) for name in ("adamw_bf16_kahan", "muon"))],
)
def test_a_single_run_that_was_killed_continues_bit_for_bit(optimizer: str, place: Place) -> None:
    chosen = ("seed=3", f"optimizer={optimizer}")
    overrides = place.overrides("killed", *chosen)
    (spec,) = plan_members([list(overrides)])
    run_dir = place.root / "killed" / "runs" / spec.run
    with place.command(["-m", "lightning_scalerl.train", *overrides], verifier_s=0.01) as process:
        assert wait_until(lambda: lines(run_dir) >= 11, process), place.said()
        kill_controller(process)
    assert kinds(run_dir)["checkpoint"] >= 1
    assert not is_done(run_dir, STEPS, run_dir.name)
    undisturbed = run_here(place.overrides("undisturbed", *chosen))
    assert run_here(overrides) == run_dir
    assert kinds(run_dir)["resume"] == 1
    assert kinds(undisturbed) == Counter(run=1, eval=5, train=STEPS, checkpoint=4, end=1)
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    gradients = [metrics["train/gradient_norm"] for kind, _, metrics in expected if kind == "train"]
    assert all(gradients)


@pytest.mark.slow
def test_a_run_with_evaluation_sets_of_other_formats_continues_bit_for_bit(place: Place) -> None:
    """AIME-, HumanEval- and GSM8K-shaped sets beside a task of another format, each with settings of its own."""
    own = {"aime": (AIME, "samples=8", "every_n_steps=4"), "humaneval": (HUMANEVAL, "samples=2", "every_n_steps=6")}
    own["gsm8k"] = (GSM8K, "temperature=0", "max_new_tokens=4")
    sets = []
    for name, (rows, *settings) in own.items():
        file, field = place.root / f"{name}.jsonl", f"evaluation.sets.{name}"
        file.write_text("\n".join(map(json.dumps, rows)))
        sets += [f"+task@{field}.task={name}", f"{field}.task.train=null", f"{field}.task.instruction=''"]
        sets += [f"{field}.task.heldout={{test:{file}}}", *(f"+{field}.{setting}" for setting in settings)]
    overrides = place.overrides("killed", *sets)
    (spec,) = plan_members([list(overrides)])
    assert spec.run != plan_members([place.overrides("killed")])[0].run, "a run is its records too"
    run_dir = place.root / "killed" / "runs" / spec.run
    with place.command(["-m", "lightning_scalerl.train", *overrides], verifier_s=0.01) as process:
        assert wait_until(lambda: lines(run_dir) >= 12, process), place.said()
        kill_controller(process)
    assert not is_done(run_dir, STEPS, run_dir.name)
    undisturbed = run_here(place.overrides("undisturbed", *sets))
    assert run_here(overrides) == run_dir
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    steps = {name: [step for _, step, metrics in expected if f"eval/{name}/pass_rate" in metrics] for name in own}
    assert steps == {"aime": [0, 4, 8, 12], "humaneval": [0, 6, 12], "gsm8k": [0, 3, 6, 9, 12]}
    last = expected[-1][2] if expected[-1][0] == "eval" else expected[-2][2]
    assert {"eval/aime/pass@8", "eval/humaneval/pass@2"} <= last.keys() and "eval/gsm8k/pass@2" not in last


@pytest.mark.slow
def test_a_run_that_was_killed_between_its_last_checkpoint_and_its_last_line_is_complete(
    place: Place,
) -> None:
    overrides = place.overrides("out")
    run_dir = run_here(overrides)
    journal = (run_dir / JOURNAL_FILE).read_bytes()
    before = read_journal(run_dir).deterministic()
    *kept, last = journal.splitlines(keepends=True)
    assert b'"end"' in last
    (run_dir / JOURNAL_FILE).write_bytes(b"".join(kept))
    assert not is_done(run_dir, STEPS, run_dir.name)
    assert run_here(overrides) == run_dir
    assert read_journal(run_dir).deterministic() == before


# --- studies -------------------------------------------------------------------------------------------------


# Members of most of them do not train (`tests.light`): what is killed and found again here is a study.


def check_trained(journals: dict[str, Deterministic]) -> None:
    """Nobody was killed, each was trained, and they did not learn the same."""
    one, two = journals.values()
    for journal in (one, two):
        assert len(journal) == 5 + STEPS
        assert sum(metrics["train/gradient_norm"] > 0 for kind, _, metrics in journal if kind == "train") > STEPS / 2
    assert one != two


@pytest.mark.slow
def test_two_undisturbed_members_of_a_light_study_differ(light_undisturbed: dict[str, Deterministic]) -> None:
    check_trained(light_undisturbed)


def check_study(output: Path, expected: dict[str, Deterministic]) -> None:
    """Complete, once each, and the same numbers."""
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
    """Each kill comes once the journals have so many lines more than when the command was given; then it is let be."""
    overrides = study(place, output.name)
    run_dirs = [output / "runs" / run for run in expected]
    for more in kills:
        begin = lines(*run_dirs)
        with place.command(overrides, verifier_s) as process:
            assert wait_until(lambda: lines(*run_dirs) >= begin + more, process), place.said()  # noqa: B023
            members = member_pids(output)
            assert members
            kill(process)
            # Nobody goes on writing into a study that nobody runs.
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
def test_a_study_that_is_killed_again_and_again_ends_as_if_it_never_was(
    light_studies: Place,
    light_undisturbed: dict[str, Deterministic],
    kill: Callable[[Forked], None],
) -> None:
    output = light_studies.root / kill.__name__
    # Before the first checkpoint; past one; as soon as the journals go on; late, so that one may be done already.
    kills = (4, 15, 1, 17)
    # Slower than they need be, or a member would be done before it is killed.
    check_killed_and_continued(light_studies, output, light_undisturbed, kill, kills, verifier_s=0.02)
    assert all(kinds(output / "runs" / run)["resume"] >= 2 for run in light_undisturbed)


@pytest.mark.slow
def test_a_study_that_trains_is_killed_and_ends_as_if_it_never_was(
    studies: Place, undisturbed: dict[str, Deterministic]
) -> None:
    check_trained(undisturbed)
    output = studies.root / "killed"
    # Past a checkpoint, its members with it; they have to notice by themselves.
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
def test_a_member_that_is_killed_fails_alone_and_is_continued_by_the_same_command(
    light_studies: Place, light_undisturbed: dict[str, Deterministic]
) -> None:
    studies, undisturbed = light_studies, light_undisturbed
    output = studies.root / "member"
    overrides = study(studies, "member")
    victim, other = undisturbed
    victim_dir, other_dir = (output / "runs" / run for run in (victim, other))
    already_said = len(studies.said())
    with studies.command(overrides, verifier_s=0.05) as process:
        assert wait_until(lambda: lines(victim_dir) >= 9, process), studies.said()
        os.kill(member_pids(output)[victim], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    states = Ledger(output).fold()
    assert (states[victim].state, states[victim].reason) == ("failed", "killed by SIGKILL")
    assert (states[other].state, states[other].reason) == ("finished", None)
    assert not is_done(victim_dir, STEPS, victim_dir.name)
    said = studies.said()[already_said:]
    assert "Traceback" not in said
    assert f"1 of 2 members failed ({states[victim].recipe} seed 0: killed by SIGKILL)" in said
    untouched = (other_dir / JOURNAL_FILE).read_bytes()

    with studies.command(overrides) as process:
        assert process.wait(PATIENCE_S) == 0, studies.said()
    check_study(output, undisturbed)
    assert (other_dir / JOURNAL_FILE).read_bytes() == untouched
    states = Ledger(output).fold()
    assert (states[victim].attempts, states[other].attempts) == (2, 1)
    assert kinds(victim_dir)["resume"] == 1
