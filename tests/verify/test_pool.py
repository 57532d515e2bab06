"""Tests of verifiers in processes of their own: failures of one never affect the trainer or other completions."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Known, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.sandbox import launch
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import reward_sum
from lightning_scalerl.verify.verification import (
    ErrorWatch,
    RewardError,
    Verification,
    Verifiers,
    check_verifiers,
)
from sweeps.run.activity import activity
from tests.examples import every
from tests.paths import ROOT

OBEDIENT = reward_sum("task.rewards", f"{ROOT}/tests/verify/rewards_for_tests.py:obedient")


def ask(text: str, prompt_id: str = "p") -> Sample:
    return Sample(Prompt(prompt_id, "what?", "answer"), text, text)


def outcomes(verifiers: Verifiers, *texts: str) -> list[Outcome]:
    tickets = [verifiers.submit(ask(text)) for text in texts]
    return [verifiers.wait(ticket) for ticket in tickets]


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(OBEDIENT, workers=2, timeout_s=1.0, retries=1, memory_gib=2.0)
    outcomes(pool, "is 1", "is 1")  # wait for the start, so that it does not count in a test's time
    yield pool
    pool.close()


def test_each_outcome_belongs_to_its_ticket(pool: VerifierPool) -> None:
    texts = [f"is {number}" for number in range(200)]
    assert [outcome.reward for outcome in outcomes(pool, *texts)] == list(range(200))
    assert all(outcome.kind == "score" and outcome.attempts == 1 for outcome in outcomes(pool, *texts))


def test_each_grade_is_noted_as_activity(pool: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these notes, a long evaluation would be taken for a run that hangs."""
    noted: list[str] = []
    monkeypatch.setattr(activity, "note", noted.append)
    outcomes(pool, *["is 1"] * 5)
    assert noted == ["grade"] * 5


def test_scores_abstentions_and_errors(pool: VerifierPool) -> None:
    score, abstention, error = outcomes(pool, "is 0.5", "abstain", "raise not today")
    assert (score.kind, score.reward) == ("score", 0.5)
    assert abstention.kind == "abstain" and abstention.why
    assert error.kind == "error" and "ValueError: not today" in error.why and error.attempts == 2


@pytest.mark.parametrize(
    ("text", "why"),
    every(
        4,
        [
            ("spin", "timed out after 1 s"),
            ("sleep 100", "timed out"),
            ("deaf", "timed out"),
            ("die", "its process died (killed by SIGKILL)"),
            ("exit 0", "its process died (exit code 0)"),
            ("memory", "MemoryError"),
            ("is nan", "returned nan"),
            ("is inf", "returned inf"),
        ],
    ),
)
def test_a_failure_is_an_error_of_one_completion(pool: VerifierPool, text: str, why: str) -> None:
    began = time.monotonic()
    bad, *good = outcomes(pool, text, *["is 1"] * 20)
    assert bad.kind == "error" and why in bad.why and bad.attempts == 2
    assert [outcome.reward for outcome in good] == [1.0] * 20
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_others_are_graded_while_one_hangs(pool: VerifierPool) -> None:
    hanging = pool.submit(ask("spin"))
    tickets = [pool.submit(ask(f"is {number}")) for number in range(50)]
    assert [pool.wait(ticket).reward for ticket in tickets] == list(range(50))
    assert not [ticket for ticket, _ in pool.done() if ticket == hanging]
    assert pool.wait(hanging).kind == "error"


def test_jobs_queued_behind_a_lost_worker_are_reassigned() -> None:
    """With a quick grader, jobs are queued at workers in advance. Reassigned jobs do not count as attempts."""
    verifiers = VerifierPool(OBEDIENT, workers=2, timeout_s=1000.0, retries=0)
    outcomes(verifiers, *["is 1"] * 40)
    hanging = verifiers.submit(ask("spin"))
    dying = verifiers.submit(ask("die"))
    graded = outcomes(verifiers, *(f"is {number}" for number in range(50)))
    assert [(outcome.reward, outcome.attempts) for outcome in graded] == [(number, 1) for number in range(50)]
    died = verifiers.wait(dying)
    assert died.kind == "error" and "its process died" in died.why
    assert not [ticket for ticket, _ in verifiers.done() if ticket == hanging]
    verifiers.close()


@pytest.mark.slow
def test_large_completions_are_sent_one_at_a_time(pool: VerifierPool) -> None:
    """A write to a full pipe blocks, so queueing large jobs at a worker that hangs would block the pool."""
    outcomes(pool, *["is 1"] * 40)
    hanging = pool.submit(ask("spin"))
    graded = outcomes(pool, *["pid " + "x" * 400_000] * 12)
    assert [outcome.kind for outcome in graded] == ["score"] * 12 and pool.wait(hanging).kind == "error"


def test_a_worker_is_killed_with_all_processes_that_it_started(pool: VerifierPool, tmp_path: Path) -> None:
    marker = f"scalerl-test-{tmp_path.name}-{os.getpid()}"
    (bad,) = outcomes(pool, f"child {marker}")
    assert bad.kind == "error"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert marker not in listed


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_clusters_warning_does_not_end_workers(pool: VerifierPool, number: signal.Signals) -> None:
    """SLURM sends it to every process of a step. A grade in progress would become an error."""
    for worker in pool._workers:
        os.kill(worker.process.pid, number)
    assert [outcome.attempts for outcome in outcomes(pool, *["is 1"] * 20)] == [1] * 20


def test_a_killed_workers_scratch_folder_is_removed(pool: VerifierPool, tmp_path: Path) -> None:
    """Only the worker's own sandbox folder is removed, and no other."""
    others = Path(launch._new_scratch(None))
    try:
        (bad,) = outcomes(pool, f"folder {tmp_path}/said")
        assert bad.kind == "error" and not Path((tmp_path / "said").read_text()).exists()
        assert others.is_dir()
    finally:
        others.rmdir()


def test_a_temporary_failure_is_retried(pool: VerifierPool, tmp_path: Path) -> None:
    (outcome,) = outcomes(pool, f"once {tmp_path}/marker")
    assert (outcome.kind, outcome.attempts) == ("score", 2)


def test_graders_run_in_the_main_thread_of_another_process(pool: VerifierPool) -> None:
    """SIGALRM needs a main thread; without it, math-verify would grade everything with 0."""
    alarm, pid = outcomes(pool, "alarm", "pid")
    assert alarm.reward == 0.25 and int(pid.reward) != os.getpid()


def test_output_of_graders_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    verifiers = VerifierPool(OBEDIENT, workers=1, timeout_s=5.0)
    try:
        assert outcomes(verifiers, "print")[0].reward == 1.0
    finally:
        verifiers.close()
    assert "noise" not in capfd.readouterr().out


def test_forgotten_tickets_do_not_delay_others(pool: VerifierPool) -> None:
    pool.forget([pool.submit(ask("sleep 0.3")) for _ in range(10)])
    assert [outcome.reward for outcome in outcomes(pool, "is 3")] == [3.0]
    time.sleep(0.5)
    assert pool.done() == []


def test_close_ends_running_workers() -> None:
    verifiers = VerifierPool(OBEDIENT, workers=2, timeout_s=1000.0)
    outcomes(verifiers, "is 1")
    verifiers.submit(ask("deaf"))
    time.sleep(0.3)
    pids = [worker.process.pid for worker in verifiers._workers]
    verifiers.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_end_when_their_trainer_is_killed(tmp_path: Path) -> None:
    """After kill -9 the trainer cannot clean up, so workers must notice its end themselves."""
    code = f"""
import time, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.verify.test_pool import OBEDIENT, ask, outcomes
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.sandbox import launch
pool = VerifierPool(OBEDIENT, workers=2, timeout_s=1000.0)
print(*[int(outcome.reward) for outcome in outcomes(pool, *["pid"] * 8)], flush=True)
pool.submit(ask("deaf")); pool.submit(ask("spin"))
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = {int(word) for word in trainer.stdout.readline().split()}
        time.sleep(0.3)
        trainer.kill()
        trainer.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_lives(pid) for pid in pids):
        time.sleep(0.05)
    assert pids and not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


class Unsendable:
    """Grader with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        self.frame = sys._getframe()

    def grade(self, sample: Sample) -> Grade:
        return Grade(1.0)


def test_a_grader_that_cannot_be_sent_or_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"verifier of Unsendable cannot be sent .*verify\.workers=0"):
        VerifierPool(Unsendable(), workers=1, timeout_s=1.0)
    place = tmp_path / "mine.py"
    place.write_text("def reward(completion, answer):\n    return 1.0\n")
    rewards = reward_sum("task.rewards", f"{place}:reward")
    place.write_text("import something_that_is_not_there\n")
    verifiers = VerifierPool(rewards, workers=2, timeout_s=5.0)
    try:
        with pytest.raises(ConfigurationError, match=r"cannot be loaded in a process of its own: .* has changed since"):
            outcomes(verifiers, "is 1")
    finally:
        verifiers.close()


def test_graders_of_a_script_are_sent_by_value() -> None:
    """Other processes cannot import a class of a script without a main guard."""
    namespace: dict[str, Any] = {"Grade": Grade, "__name__": "__main__"}
    exec("class Mine:\n    def grade(self, sample):\n        return Grade(float(len(sample.completion)))", namespace)
    verifiers = VerifierPool(namespace["Mine"](), workers=1, timeout_s=10.0)
    try:
        assert outcomes(verifiers, "four")[0].reward == 4.0
    finally:
        verifiers.close()


@pytest.mark.slow
def test_a_closed_pool_leaves_no_file_open() -> None:
    def opened() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for _ in range(3):
        verifiers = VerifierPool(OBEDIENT, workers=2, timeout_s=0.3, retries=0)
        outcomes(verifiers, "spin", "is 1")
        verifiers.close()
        del verifiers
    assert opened() <= before


# --- the share of errors, and the check before the first step ----------------------------------------------------


def errors(watch: ErrorWatch, good: int, bad: int) -> None:
    for number in range(good):
        watch.observe(Prompt(f"g{number}", ""), Outcome("score", 1.0))
    for number in range(bad):
        watch.observe(Prompt(f"b{number}", ""), Outcome("error", why="timed out after 1 s"))


def test_a_run_ends_if_the_share_of_errors_is_too_large() -> None:
    errors(ErrorWatch(Verification(max_error_share=0.1)), 990, 100)
    with pytest.raises(RewardError, match=r"100 of the last 999 .*'b97'.*'b98'.*'b99'.*timed out"):
        errors(ErrorWatch(Verification(max_error_share=0.1)), 899, 101)
    errors(ErrorWatch(Verification(max_error_share=0.1)), 0, 10)
    with pytest.raises(RewardError, match="11 of the last 11"):
        errors(ErrorWatch(Verification(max_error_share=0.1)), 0, 11)
    with pytest.raises(RewardError, match="on_error=stop"):
        errors(ErrorWatch(Verification(on_error="stop")), 5, 1)


def test_the_error_watch_continues_from_its_state() -> None:
    one, two = ErrorWatch(Verification()), ErrorWatch(Verification())
    errors(one, 700, 60)
    two.load_state_dict(one.state_dict())
    assert two.metrics() == one.metrics() and two.last_errors == one.last_errors
    with pytest.raises(RewardError):
        errors(two, 0, 60)


def known(right: str, wrong: str) -> list[Known]:
    return [Known(ask(right, "a"), True), Known(ask(wrong, "b"), False)]


def passes(outcome: Outcome) -> bool:
    return outcome.reward >= 1.0


@pytest.mark.slow
def test_the_check_accepts_a_good_verifier_and_refuses_bad_ones(pool: VerifierPool) -> None:
    assert (
        check_verifiers(pool, known("is 1", "is 0"), passes)
        == "verifier: graded all test completions correctly (1 known to be right, 1 known to be wrong)"
    )
    for right, wrong, message in (
        ("is 0", "is 0", r"prompt 'a', a completion known to be right .*rewards it with 0"),
        ("is 1", "is 1", r"prompt 'b', a completion known to be wrong .*rewards it with 1"),
        ("abstain", "is 0", "right .*abstains"),
        ("is 1", "raise oh", "wrong .*ValueError: oh"),
        ("spin", "is 0", "right .*timed out"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_verifiers(pool, known(right, wrong), passes)
    assert "not tested before the first step" in check_verifiers(pool, [], passes)


def test_trusted_graders_need_no_process() -> None:
    assert isinstance(Verification().verifiers(OBEDIENT, trusted=True), InlineVerifiers)
    assert isinstance(Verification(workers=0).verifiers(OBEDIENT, trusted=False), InlineVerifiers)
    inline = InlineVerifiers(OBEDIENT)
    assert [outcome.kind for outcome in outcomes(inline, "is 1", "abstain", "raise x")] == ["score", "abstain", "error"]
    ticket = inline.submit(ask("pid"))
    assert inline.done()[0][0] == ticket and inline.done() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("workers", -1), ("workers", 1.5), ("timeout_s", 0), ("memory_gib", -1.0), ("retries", True),
     ("on_error", "ignore"), ("max_error_share", 1.5), ("max_error_share", "all")],
)  # fmt: skip
def test_invalid_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"verify.{field}: {value!r}"):
        Verification(**{field: value})
