"""Tests of a judge behind an endpoint: verdicts, retries, limits, and settings that are refused at the start."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose
from lightning_scalerl.member.identity import group_identity
from lightning_scalerl.rollouts.grade import Grade, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.session.sampling import Sampling
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.mixture import MixtureTask
from lightning_scalerl.verify import judge_client
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.judge import Judge
from lightning_scalerl.verify.judge_client import JudgeError
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import content, reward_sum
from lightning_scalerl.verify.verification import Verification
from sweeps.redact import redact_override
from tests.verify.stand_in import JUDGE, PROMPT, Reply, by_content, chat, judge_at, refused, sample, stand_in


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(judge_client, "_PAUSE_S", 0.001)
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))


# --- verdicts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "reward"),
    [
        ("Verdict: yes", {}, 1.0),
        ("**Verdict:** No.", {}, 0.0),
        ("Verdict: yes\nbut no\nFinal verdict: no", {}, 0.0),
        ("verdict: incorrect", {}, 0.0),
        ("Score: 7/10", {"high": 10}, 0.7),
        ("Score: -1", {"low": -1, "high": 1}, 0.0),
        ("score = 0.5.", {}, 0.5),
        ('{"grade": 3}', {"pattern": r'"grade": (\d)', "low": 1, "high": 5}, 0.5),
        ("Verdict: not sure", {}, None),
        ("Score: 11", {"high": 10}, None),
        ("Score: 1.2.3", {}, None),
        ("yes", {}, None),
        ("", {}, None),
        ("nan", {"pattern": "(nan)"}, None),
    ],
)
def test_verdict(text: str, settings: dict[str, Any], reward: float | None) -> None:
    with stand_in(lambda *_: chat(text)) as service:
        judge = judge_at(service.url, **settings)
        if reward is not None:
            assert judge.grade(sample("x")).reward == pytest.approx(reward)
            return
        with pytest.raises(JudgeError, match="no verdict in its answer"):
            judge.grade(sample("x"))


def test_the_prompt_template_is_filled_and_other_braces_are_kept() -> None:
    with stand_in(by_content) as service:
        judge = judge_at(
            service.url,
            prompt='{"score": 1} {question}|{prompt}|{answer}|{completion}',
            system="Be fair.",
            options={"seed": 7, "max_tokens": None},
        )
        prompt = Prompt("p", "1+1\nbriefly", "2", question="1+1")
        judge.grade(Sample(prompt, "<think>2</think>{answer}2", "{answer}2"))
    (body,) = service.bodies
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": '{"score": 1} 1+1|1+1\nbriefly|2|{answer}2'},
        ],
        "temperature": 0.0,
        "seed": 7,
    }
    assert service.paths == ["/v1/chat/completions"]


# --- failures are errors, never a reward of 0 -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "error", "requests"),
    [
        (refused(429), "status 429 no", 3),
        (refused(503, "busy"), "status 503 busy", 3),
        (refused(401), "status 401", 1),
        (refused(302, "", Location="http://elsewhere/"), "status 302", 1),
        (None, "Disconnected", 3),
        ((200, {}, b"{not json"), r"not of OpenAI's chat form \('\{not json'\)", 3),
        ((200, {}, b'{"choices": []}'), "not of OpenAI's chat form", 3),
        ((200, {}, b"[1]"), "not of OpenAI's chat form", 3),
        (chat("I like it"), "no verdict in its answer", 1),
        (chat("Verd", "length"), "cut off at max_tokens", 1),
        (chat(None, "length"), "cut off at max_tokens", 1),
    ],
)
def test_an_answer_without_a_verdict_is_an_error(reply: Reply, error: str, requests: int) -> None:
    with stand_in(lambda *_: reply) as service:
        verifiers = InlineVerifiers(judge_at(service.url, retries=2), retries=0)
        outcome = verifiers.wait(verifiers.submit(sample("2")))
    assert outcome.kind == "error"
    assert re.search(error, outcome.why), outcome.why
    assert len(service.bodies) == requests
    assert not (Path(os.environ["SCALERL_CACHE"]) / "judge").exists(), "errors are not cached"


def test_status_429_is_retried() -> None:
    with stand_in(lambda message, number: refused(429) if number < 3 else chat("Verdict: yes")) as service:
        grade = judge_at(service.url, retries=2).grade(sample("2"))
    assert grade.reward == 1.0
    assert len(service.bodies) == 3


def test_the_header_retry_after_is_followed() -> None:
    reply = refused(429, Retry_After="0.2")
    with stand_in(lambda message, number: reply if number == 1 else chat("Verdict: yes")) as service:
        began = time.monotonic()
        assert judge_at(service.url, retries=1).grade(sample("2")).reward == 1.0
        assert time.monotonic() - began >= 0.2
        with pytest.raises(JudgeError, match=r"no time is left of timeout_s=0\.1"):
            service.bodies.clear()
            judge_at(service.url, retries=1, timeout_s=0.1, cache=None).grade(sample("2"))


def test_a_late_answer_is_an_error_after_the_timeout() -> None:
    with stand_in(by_content, wait_s=0.6) as service:
        began = time.monotonic()
        with pytest.raises(JudgeError, match=r"no answer within timeout_s=0\.1$") as raised:
            judge_at(service.url, timeout_s=0.1, retries=5).grade(sample("2"))
        assert time.monotonic() - began < 0.5
    (charge,) = raised.value.charges
    assert charge.key == "" and charge.seconds == pytest.approx(0.1, abs=0.1)


def test_an_endpoint_without_a_server_is_an_error() -> None:
    with stand_in(by_content) as service:
        pass
    with pytest.raises(JudgeError, match="Cannot connect"):
        judge_at(service.url).grade(sample("2"))


def test_a_failed_completion_does_not_affect_the_others_of_its_group() -> None:
    def reply(message: str, number: int) -> Reply:
        return refused(400) if "bad" in message else by_content(message, number)

    with stand_in(reply) as service:
        verifiers = InlineVerifiers(judge_at(service.url, cache=None), retries=0)
        tickets = verifiers.submit_group([sample(text) for text in ("2", "bad", "3")])
        outcomes = [verifiers.wait(ticket) for ticket in tickets]
    assert [(outcome.kind, outcome.reward) for outcome in outcomes] == [("score", 1.0), ("error", 0.0), ("score", 0.0)]


# --- concurrency ----------------------------------------------------------------------------------------------


def test_a_group_is_graded_concurrently_up_to_the_limit() -> None:
    group = [sample(f"{number}") for number in range(8)]
    with stand_in(by_content, wait_s=0.1) as service:
        grades = judge_at(service.url, concurrency=4).grade_group(group)
    assert service.most == 4
    assert [grade.reward for grade in grades if isinstance(grade, Grade)] == [0, 0, 1, 0, 0, 0, 0, 0]


def test_the_judge_works_inside_a_running_event_loop() -> None:
    import asyncio

    async def notebook(judge: Judge) -> float | None:
        return judge.grade(sample("2")).reward

    with stand_in(by_content) as service:
        assert asyncio.run(notebook(judge_at(service.url))) == 1.0


def test_worker_processes_grade_whole_groups_and_share_the_cache(tmp_path: Path) -> None:
    with stand_in(by_content) as service:
        grader = reward_sum("task.rewards", {**JUDGE, "url": service.url, "cache": str(tmp_path / "shared")})
        pool = VerifierPool(grader, workers=2, timeout_s=20.0)
        try:
            for _ in range(2):
                tickets = [*pool.submit_group([sample("2"), sample("3")]), *pool.submit_group([sample("4")])]
                outcomes = [pool.wait(ticket) for ticket in tickets]
                assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0], outcomes
        finally:
            pool.close()
    assert len(service.bodies) == 3
    assert all(not charge.paid for outcome in outcomes for charge in outcome.charges)


# --- refused at the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"url": ""}, "url: '' is no text; give the endpoint"),
        ({"url": None}, "url: None is no text"),
        ({"url": "ftp://host/v1"}, "url: 'ftp://host/v1' must begin with http"),
        ({"url": "host:8000"}, "url: 'host:8000' must begin with http"),
        ({"url": "http://"}, "url: 'http://' must begin with http"),
        ({"url": "http://host:port"}, "url: 'http://host:port' must be an address"),
        ({"url": "https://me:hunter2@host"}, "url: it contains a secret"),
        ({"url": "https://host?api_key=hunter2"}, "url: it contains a secret"),
        ({"model": ""}, "model: '' is no text"),
        ({"prompt": "is {answer} right?"}, r"prompt: 'is \{answer\} right\?' must contain \{completion\}"),
        ({"pattern": "("}, "pattern: .* must be a regular expression"),
        ({"pattern": "yes"}, "pattern: 'yes' must have one group"),
        ({"low": 1}, "low: 1 must be below"),
        ({"high": "ten"}, "high: 'ten' must be a number"),
        ({"options": ["seed"]}, "options: .* must be a mapping"),
        ({"temperature": -1}, "temperature: -1 must be a number, 0 or more"),
        ({"price_prompt": "3"}, "price_prompt: '3' must be a number"),
        ({"max_tokens": 0}, "max_tokens: 0 must be a whole number"),
        ({"retries": -1}, "retries: -1 must be a whole number"),
        ({"concurrency": 0}, "concurrency: 0 must be"),
        ({"timeout_s": 0}, "timeout_s: 0 must be"),
        ({"temprature": 1}, "judge has no such setting"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^task.rewards: (judge: )?{error}") as raised:
        reward_sum("task.rewards", {**JUDGE, **settings})
    assert "\n" not in str(raised.value) and "hunter2" not in str(raised.value)


def test_the_pools_timeout_must_exceed_the_judges() -> None:
    with pytest.raises(ConfigurationError, match=r"^verify\.timeout_s: 10 is less than the 62 s .* judge's timeout_s"):
        Verification().verifiers(reward_sum("task.rewards", JUDGE), trusted=False)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "url: 'http://127.0.0.1:.*/v1/chat/completions' does not answer"),
        ({"key_env": "NO_SUCH_KEY"}, "key_env: 'NO_SUCH_KEY' this environment variable is not set"),
        ({"cache": "/dev/null/judge"}, "cache: '/dev/null/judge' cannot be written"),
    ],
)
def test_a_judge_that_is_not_ready_is_refused(settings: dict[str, Any], error: str) -> None:
    with stand_in(by_content) as service:
        pass
    grader = reward_sum("task.rewards", {**JUDGE, "url": service.url, "retries": 0, **settings})
    with pytest.raises(ConfigurationError, match=f"^task.rewards: judge: {error}"):
        grader.ready()


def test_a_run_checks_its_judge_before_it_starts_a_process() -> None:
    def new_verifiers(url: str, dialogue: Any = None) -> tuple[Any, str]:
        recipe = SimpleNamespace(verify=Verification(workers=0, timeout_s=70.0))
        stage = SimpleNamespace(task=task_of(url=url, retries=0), recipe=recipe)
        return Sampling.new_verifiers(SimpleNamespace(stage=stage, dialogue=dialogue))  # type: ignore[arg-type]

    with stand_in(by_content) as service:
        verifiers, checks = new_verifiers(service.url)
        verifiers.close()
    assert re.match(rf"judge: m at {service.url}/chat/completions answers in [\d.e-]+ s\nverifier: ", checks), checks
    with pytest.raises(ConfigurationError, match="does not answer"):
        new_verifiers(service.url)
    environment = SimpleNamespace(settings=SimpleNamespace(gives_reward=True))
    verifiers, checks = new_verifiers(service.url, environment)
    verifiers.close()
    assert checks == "", "neither asked nor reported where the environment gives the reward"


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", "hunter2-and-more")
    with stand_in(lambda *_: refused(401, "bad key hunter2-and-more")) as service:
        judge = judge_at(service.url, key_env="MY_JUDGE")
        with pytest.raises(ConfigurationError, match=r"status 401 bad key \*\*\*") as raised:
            judge.ready()
    assert service.headers[0]["Authorization"] == "Bearer hunter2-and-more"
    assert "hunter2" not in str(raised.value) + repr(judge)


@pytest.mark.parametrize(
    ("url", "path"),
    [("", "/v1/chat/completions"), ("/api/v1/", "/api/v1/chat/completions"), ("/v1/chat/completions", None)],
)
def test_address(url: str, path: str | None) -> None:
    assert judge_at(f"http://host:1{url}").endpoint.address == f"http://host:1{path or url}"
    assert judge_at("https://host/v1?api-version=3").endpoint.address.endswith("/v1/chat/completions?api-version=3")


# --- as a task's reward ---------------------------------------------------------------------------------------

OVERRIDE = 'task.rewards={use: judge, url: "http://judge-node:8000/v1", model: Qwen/Qwen3-8B, key_env: JUDGE_API_KEY}'


def test_the_documented_command_composes_and_the_name_of_the_key_is_not_redacted(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = [f"task.train={tmp_path}/train.jsonl", f"task.heldout={{test: {tmp_path}/test.jsonl}}", "task.leaks=keep"]
    task = build(compose(["task=dataset", *rows, OVERRIDE, "compute.judge=2.5", "verify.timeout_s=70"]), "task")
    (weighted,) = task.grader().rewards
    assert weighted.grader == Judge(url="http://judge-node:8000/v1", model="Qwen/Qwen3-8B", key_env="JUDGE_API_KEY")
    assert redact_override(OVERRIDE) == OVERRIDE


ROWS = [{"prompt": f"{number}+0", "answer": str(number)} for number in range(6)]


def task_of(**judge: Any) -> DatasetTask:
    return DatasetTask(train=ROWS[:4], heldout=ROWS[4:], rewards={**JUDGE, **judge})


def test_identity_includes_all_that_decides_a_verdict_but_no_address_and_no_key() -> None:
    plain = task_of().identity()
    operational = {
        "url": "https://elsewhere", "key_env": "K", "cache": None, "timeout_s": 5.0, "retries": 1, "concurrency": 2,
    }  # fmt: skip
    assert task_of(**operational).identity() == plain == {"use": "judge", "model": "m", "prompt": PROMPT}
    for change in ({"model": "n"}, {"prompt": "{completion}"}, {"temperature": 0.5}, {"price_prompt": 1.0}):
        assert task_of(**change).identity() != plain
    assert content([{"use": "judge", "url": "u"}, "math"], str) == [{"use": "judge"}, "math"]


def test_compute_judge_is_in_the_identity_unless_it_is_off() -> None:
    group = {"_target_": "lightning_scalerl.ComputeAxes", "judge": None}
    assert group_identity("compute", group) is None
    assert group_identity("compute", {**group, "judge": 2.5}) == {"choice": "ComputeAxes", "judge": 2.5}


def test_rows_need_an_answer_only_if_the_judge_sees_it() -> None:
    rows = [{"prompt": f"a poem about {number}"} for number in range(4)]
    rewards = {**JUDGE, "prompt": "{question} {completion}"}
    assert len(DatasetTask(train=rows[:3], heldout=rows[3:], rewards=rewards).train_prompts()) == 3
    with pytest.raises(ConfigurationError, match="no column answer"):
        DatasetTask(train=rows[:3], heldout=rows[3:], rewards=JUDGE)


def test_a_judge_with_a_name_in_a_mixture() -> None:
    with stand_in(by_content) as service:
        task = MixtureTask({"one": task_of(url=service.url, name="helpful"), "two": task_of(url=service.url)})
        assert [line.partition(" at ")[0] for line in task.grader().ready()] == ["judge: m"] * 2  # type: ignore[attr-defined]
        verifiers = InlineVerifiers(task.grader())
        prompt = next(prompt for prompt in task.train_prompts() if prompt.source == "one")
        (ticket,) = verifiers.submit_group([Sample(prompt, "2", "2")])
        outcome = verifiers.wait(ticket)
    assert outcome.reward == 1.0 and outcome.correct and len(outcome.charges) == 1
    assert set(outcome.parts) == {"one/helpful_prompt_tokens", "one/helpful_completion_tokens"}
    assert outcome.extra == {"helpful": "Verdict: yes"}


def test_completions_for_the_check_of_a_judge(tmp_path: Path) -> None:
    task = DatasetTask(train=ROWS[:4], heldout=ROWS[4:], rewards=JUDGE, right="{answer}", wrong="none")
    assert [known.right for known in task.known()] == [True, False] * 4
