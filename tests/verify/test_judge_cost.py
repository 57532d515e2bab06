"""Tests of a judge's cost: each answer is paid for once, cached on disk, and counted in a ledger."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Charge, Grade
from lightning_scalerl.verify import judge_client
from lightning_scalerl.verify.charges import ChargeLedger, ComputeAxes
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.judge_client import Answer, AnswerCache
from lightning_scalerl.verify.registry import reward_sum
from tests.verify.stand_in import JUDGE, by_content, chat, judge_at, sample, stand_in


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(judge_client, "_PAUSE_S", 0.001)
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))


# --- cache and cost -------------------------------------------------------------------------------------------


def test_equal_completions_are_paid_for_once_and_cached_ones_are_free() -> None:
    group = [sample("2"), sample("3"), sample("2")]
    with stand_in(by_content) as service:
        judge = judge_at(service.url, price_prompt=2.0, price_completion=4.0)
        first, second = judge.grade_group(group), judge.grade_group(group)
    assert len(service.bodies) == 2
    charges = [[grade.charges[0] for grade in grades if isinstance(grade, Grade)] for grades in (first, second)]
    assert [charge.paid for charge in charges[0]] == [True, True, False]
    assert [charge.paid for charge in charges[1]] == [False, False, False]
    assert [(charge.key, charge.seconds) for charge in charges[0]] == [(c.key, c.seconds) for c in charges[1]]
    assert charges[0][0].cost == pytest.approx((2 * 10 + 4 * 3) / 1e6)
    assert isinstance(first[0], Grade)
    assert first[0].parts == {
        "judge_prompt_tokens": 10.0,
        "judge_completion_tokens": 3.0,
        "judge_cost": pytest.approx(32e-6),
    }
    assert first[0].extra == {"judge": "Verdict: yes"}


@pytest.mark.parametrize("change", [{"model": "n"}, {"system": "s"}, {"temperature": 1.0}, {"max_tokens": 9}])
def test_a_changed_request_is_sent_again(change: dict[str, Any]) -> None:
    with stand_in(by_content) as service:
        judge_at(service.url).grade(sample("2"))
        judge_at(service.url, timeout_s=4.0, concurrency=1).grade(sample("2"))
        assert len(service.bodies) == 1, "these settings are not part of the request"
        judge_at(service.url, **change).grade(sample("2"))
    assert len(service.bodies) == 2


def test_a_cached_answer_that_the_pattern_does_not_match_is_replaced() -> None:
    replies = iter([chat("Verdict: yes"), chat("Grade: 1")])
    with stand_in(lambda *_: next(replies)) as service:
        judge_at(service.url).grade(sample("2"))
        for _ in range(2):
            assert judge_at(service.url, pattern=r"Grade: (\d)").grade(sample("2")).reward == 1.0
    assert len(service.bodies) == 2


def test_the_first_stored_answer_wins_and_an_incomplete_file_is_ignored(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        stored = list(threads.map(lambda number: cache.put("ab1", Answer(f"{number}", float(number))), range(8)))
    assert len(set(stored)) == 1 and cache.get("ab1") == stored[0]
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["ab1.json"]
    for torn in ("", '{"text": "a', "[]", '{"other": 1}', '{"text": 1, "seconds": 2.0}'):
        (tmp_path / "ab" / "ab1.json").write_text(torn)
        assert cache.get("ab1") is None
        assert cache.put("ab1", Answer("new", 1.0)) == Answer("new", 1.0) == cache.get("ab1")


def test_the_cache_works_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(self: Path, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "hardlink_to", no_link)
    cache = AnswerCache(tmp_path)
    assert cache.put("ab1", Answer("a", 1.0)) == cache.get("ab1") == Answer("a", 1.0)


def test_a_cache_that_becomes_unwritable_does_not_lose_the_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with stand_in(by_content) as service:
        assert judge_at(service.url, cache=str(tmp_path / "file")).grade(sample("2")).reward == 1.0
    assert "could not be cached and will be paid for again" in caplog.text


def test_failed_attempts_are_counted_in_the_cost() -> None:
    replies = iter([chat("hm"), chat("Verdict: yes")])
    with stand_in(lambda *_: next(replies)) as service:
        verifiers = InlineVerifiers(reward_sum("task.rewards", {**JUDGE, "url": service.url}), retries=1)
        (ticket,) = verifiers.submit_group([sample("2")])
        outcome = verifiers.wait(ticket)
    assert (outcome.kind, outcome.attempts) == ("score", 2)
    assert [charge.prompt_tokens for charge in outcome.charges] == [10, 10]


def test_an_error_of_another_reward_keeps_the_judges_charges() -> None:
    def raises(completion: str, answer: str) -> float:
        raise ValueError("oh")

    with stand_in(by_content) as service:
        grader = reward_sum("task.rewards", [{**JUDGE, "url": service.url}, {"use": raises}])
        verifiers = InlineVerifiers(grader, retries=0)
        (ticket,) = verifiers.submit_group([sample("2")])
        outcome = verifiers.wait(ticket)
    assert outcome.kind == "error" and "ValueError: oh" in outcome.why and "reward function raises" in outcome.why
    assert len(outcome.charges) == 1


def test_the_ledger_counts_an_answer_once_also_after_a_checkpoint() -> None:
    ledger = ChargeLedger()
    assert ledger.metrics() == ledger.evaluation_metrics() == {}
    one, two = "1" * 64, "2" * 64
    ledger.add([Charge(one, 3600.0, 10, 3, 0.5), Charge(one, 3600.0, 10, 3, 0.5, paid=False)])
    ledger.add([Charge("", 1800.0, 1, 1, 0.25)] * 2)
    ledger.add([Charge(one, 60.0, 2, 1, 0.1, paid=False)], evaluation=True)
    resumed = ChargeLedger()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    for entry in (ledger, resumed):
        entry.add([Charge(one, 3600.0, 10, 3, 0.5), Charge(two, 7200.0, 5, 5, 1.0, paid=False)])
    assert (
        resumed.metrics()
        == ledger.metrics()
        == {
            "compute/judge_hours": 4.0,
            "compute/judge_tokens": 27.0,
            "compute/judge_prompt_tokens": 17.0,
            "compute/judge_completion_tokens": 10.0,
            "compute/judge_cost": 2.0,
            "verify/judge_asked": 4.0,
            "verify/judge_cached": 3.0,
        }
    )
    assert resumed.evaluation_metrics()["eval_cost/judge_tokens"] == 3.0
    assert ComputeAxes().device_hours(resumed.training) == 0.0
    assert ComputeAxes("device_hours").device_hours(resumed.training) == 4.0
    assert ComputeAxes(2.5).device_hours(resumed.training) == 0.8


def test_an_axis_without_values_is_not_recorded() -> None:
    ledger = ChargeLedger()
    ledger.add([Charge("", 36.0, 5, 0, 0.0)], evaluation=True)
    ledger.add([Charge("1" * 64, 0.0, 0, 0, 0.0, paid=False)])
    axes = {name: value for name, value in ledger.metrics().items() if name.startswith("compute/")}
    assert axes == {"compute/judge_hours": 0.0, "compute/judge_tokens": 0.0, "compute/judge_prompt_tokens": 0.0}


@pytest.mark.parametrize("value", ["hours", 0, -1.0, True, float("nan"), float("inf")])
def test_compute_judge_is_checked(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^compute\.judge: .* must be null, device_hours"):
        ComputeAxes(value)
