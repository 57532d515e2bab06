"""kill -9, and the same command again: no moment of it changes what a run learns, nor how a study ends.

Journals are compared as read, bit for bit, without the wall clock. The task is small but its rewards vary, so
gradients are not zero and two variants are not the same run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_scalerl.member.identify import plan
from lightning_scalerl.member.run import run_member
from sweeps.launch.ledger import Ledger
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, JournalView, find_runs, read_journal
from sweeps.run.progress import is_done

# From where this module has its name, here and in the processes that look up the verifier.
IMPORT_ROOT = Path(__file__).parents[__name__.count(".")]
STEPS = 12
PATIENCE_S = 240.0

Deterministic = list[tuple[str, int, dict[str, float]]]


def odd_digits(completion: str, answer: str) -> float:
    """The task's verifier: random text already varies in it. `VERIFIER_S` gives the tests time to aim."""
    time.sleep(float(os.environ.get("VERIFIER_S", "0")))
    return sum(character in "13579" for character in completion) / 6


@dataclass
class Place:
    """A directory with the task's files and the model's cache, where commands are run."""

    root: Path

    def __post_init__(self) -> None:
        for name, count, first in (("train", 12, 10), ("heldout", 6, 50)):
            prompts = [{"prompt": f"{first + i:>4}+{7 * i:>4}=", "answer": ""} for i in range(count)]
            (self.root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, prompts)))

    def overrides(self, output: str, *more: str) -> list[str]:
        return [
            "model.batches=2",
            "model.width=32",
            "model.layers=1",
            "task=jsonl",
            f"task.train={self.root}/train.jsonl",
            f"task.heldout={{heldout:{self.root}/heldout.jsonl}}",
            f"task.verifier={__name__}:odd_digits",
            "batch.prompts=2",
            "batch.completions=4",
            "async_mode.k=2",
            f"budget.steps={STEPS}",
            "checkpoint.every_n_steps=3",
            "evaluation.every_n_steps=3",
            "evaluation.samples=1",
            f"output_dir={self.root}/{output}",
            *more,
        ]

    def environment(self, verifier_s: float = 0.0) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SCALERL_CACHE": str(self.root / "cache"),
            "PYTHONPATH": str(IMPORT_ROOT),
            "VERIFIER_S": str(verifier_s),
        }

    @contextmanager
    def command(self, overrides: Sequence[str], verifier_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
        """`python -m lightning_scalerl.train OVERRIDES...`, in a process group of its own; none of it outlives us."""
        with (self.root / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_scalerl.train", *overrides],
                cwd=self.root,
                env=self.environment(verifier_s),
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_group(process)

    def said(self) -> str:
        return (self.root / "said.txt").read_text(errors="replace")


def study(place: Place, output: str) -> list[str]:
    """Two variants, both at a time."""
    return ["--multirun", *place.overrides(output, "variant=none,loss_dapo", "seed=0", "launch.max_parallel=2")]


def kill_controller(process: subprocess.Popen[bytes]) -> None:
    """Only the process that was started; the members have to notice."""
    process.kill()
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Controller, members and their parent, all at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> bool:
    """Whether it became true before the process ended."""
    deadline = time.monotonic() + patience_s
    while not true():
        if process.poll() is not None:
            return true()
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.002)
    return True


def lines(*run_dirs: Path) -> int:
    """Of journal, written so far."""
    files = [run_dir / JOURNAL_FILE for run_dir in run_dirs]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def kinds(run_dir: Path) -> Counter[str]:
    """Records by kind, superseded ones too."""
    return Counter(json.loads(line)["kind"] for line in (run_dir / JOURNAL_FILE).read_bytes().splitlines())


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


def views(output: Path) -> dict[str, JournalView]:
    return {run_dir.name: read_journal(run_dir) for run_dir in find_runs(output)}


def deterministic(output: Path) -> dict[str, Deterministic]:
    return {run: view.deterministic() for run, view in views(output).items()}


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
    (spec,) = plan([list(overrides)])
    run_dir = Path(spec.config["output_dir"]) / "runs" / spec.run
    spec.write(run_dir)
    run_member(run_dir)
    assert is_done(run_dir, STEPS)
    return run_dir


def test_a_single_run_that_was_killed_continues_bit_for_bit(place: Place) -> None:
    overrides = place.overrides("killed", "seed=3")
    with place.command(overrides, verifier_s=0.01) as process:
        undisturbed = run_here(place.overrides("undisturbed", "seed=3"))
        run_dir = place.root / "killed" / "runs" / undisturbed.name
        assert wait_until(lambda: lines(run_dir) >= 11, process), place.said()
        kill_controller(process)
    assert kinds(run_dir)["checkpoint"] >= 1
    assert not is_done(run_dir, STEPS)
    assert run_here(overrides) == run_dir
    assert kinds(run_dir)["resume"] == 1
    assert kinds(undisturbed) == Counter(run=1, eval=5, train=STEPS, checkpoint=4, end=1)
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    gradients = [metrics["train/gradient_norm"] for kind, _, metrics in expected if kind == "train"]
    assert all(gradients)


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
    assert not is_done(run_dir, STEPS)
    assert run_here(overrides) == run_dir
    assert read_journal(run_dir).deterministic() == before


# --- studies -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where all studies of this module run; they share the model."""
    return Place(tmp_path_factory.mktemp("studies"))


@pytest.fixture(scope="module")
def undisturbed(studies: Place) -> dict[str, Deterministic]:
    """The journals of a study that nobody killed."""
    with studies.command(study(studies, "undisturbed")) as process:
        assert process.wait(PATIENCE_S) == 0, studies.said()
    found = deterministic(studies.root / "undisturbed")
    one, two = found.values()
    for journal in (one, two):
        assert len(journal) == 5 + STEPS
        assert sum(metrics["train/gradient_norm"] > 0 for kind, _, metrics in journal if kind == "train") > STEPS / 2
    assert one != two
    return found


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


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_controller, kill_group])
def test_a_study_that_is_killed_again_and_again_ends_as_if_it_never_was(
    studies: Place, undisturbed: dict[str, Deterministic], kill: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    output = studies.root / kill.__name__
    overrides = study(studies, kill.__name__)
    run_dirs = [output / "runs" / run for run in undisturbed]
    # Before the first checkpoint; past one; as soon as the journals go on; late, so that one may be done already.
    for more in (4, 15, 1, 17):
        begin = lines(*run_dirs)
        with studies.command(overrides, verifier_s=0.01) as process:
            assert wait_until(lambda: lines(*run_dirs) >= begin + more, process), studies.said()  # noqa: B023
            members = member_pids(output)
            assert members
            kill(process)
            # Nobody goes on writing into a study that nobody runs.
            deadline = time.monotonic() + 5
            while member_pids(output) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert member_pids(output) == {}
        assert not all(is_done(run_dir, STEPS) for run_dir in run_dirs)
    with studies.command(overrides) as process:
        assert process.wait(PATIENCE_S) == 0, studies.said()
    check_study(output, undisturbed)
    assert all(kinds(run_dir)["resume"] >= 2 for run_dir in run_dirs)
    assert max(state.attempts for state in Ledger(output).fold().values()) == 5


@pytest.mark.slow
def test_the_same_command_again_changes_nothing(studies: Place, undisturbed: dict[str, Deterministic]) -> None:
    output = studies.root / "undisturbed"
    check_study(output, undisturbed)
    before = {path: path.read_bytes() for path in (*output.glob("runs/*/*.jsonl"), output / "ledger.jsonl")}
    assert len(before) == 3
    with studies.command(study(studies, "undisturbed")) as process:
        assert process.wait(PATIENCE_S) == 0, studies.said()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_member_that_is_killed_fails_alone_and_is_continued_by_the_same_command(
    studies: Place, undisturbed: dict[str, Deterministic]
) -> None:
    output = studies.root / "member"
    overrides = study(studies, "member")
    victim, other = undisturbed
    victim_dir, other_dir = (output / "runs" / run for run in (victim, other))
    already_said = len(studies.said())
    with studies.command(overrides, verifier_s=0.01) as process:
        assert wait_until(lambda: lines(victim_dir) >= 9, process), studies.said()
        os.kill(member_pids(output)[victim], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    states = Ledger(output).fold()
    assert (states[victim].state, states[victim].reason) == ("failed", "killed by SIGKILL")
    assert (states[other].state, states[other].reason) == ("finished", None)
    assert not is_done(victim_dir, STEPS)
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
