"""Test of `kill -9` of a run with a judge: it continues bit for bit, and no request is paid twice."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from sweeps.run.journal import read_journal
from tests.place import STEPS, Place, kill_group, kinds, wait_until
from tests.verify.stand_in import Reply, chat, stand_in

READY = "Reply with the word ready."
# After this number of requests the judge is silent until the run was killed, which is after the second checkpoint.
SILENT_AFTER = 75


@pytest.mark.slow
def test_a_killed_run_with_a_judge_continues_bit_for_bit_and_pays_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    killed, answered = threading.Event(), Counter[str]()

    def reply(message: str, number: int) -> Reply:
        if number > SILENT_AFTER:
            killed.wait(60.0)
        answered[message] += 1
        share = sum(character in "13579" for character in message) / max(1, len(message))
        return chat(f"Score: {share:.3f}", usage={"prompt_tokens": 1 + len(message), "completion_tokens": 4})

    def overrides(output: str, url: str) -> list[str]:
        judge = (
            f"{{use: judge, url: '{url}', model: m, prompt: '{{completion}}', price_prompt: 3.0, timeout_s: 50.0,"
            f" cache: '{tmp_path}/cache_of_{output}'}}"
        )
        other_overrides = [
            entry for entry in place.overrides(output) if not entry.startswith(("task=", "task.verifier", "verify"))
        ]
        return [
            *other_overrides,
            "task=dataset",
            f"task.rewards={judge}",
            "verify.timeout_s=60",
            "compute.judge=1e-3",
            "seed=3",
        ]

    def run_here(run_overrides: list[str]) -> Path:
        (spec,) = plan_members([run_overrides])
        run_dir = Path(spec.config["output_dir"]) / "runs" / spec.run
        spec.write(run_dir)
        run_member(run_dir)
        return run_dir

    with stand_in(reply) as service:
        run_overrides = overrides("killed", service.url)
        (spec,) = plan_members([run_overrides])
        run_dir = tmp_path / "killed" / "runs" / spec.run
        cache = tmp_path / "cache_of_killed"
        with place.command(["-m", "lightning_scalerl.train", *run_overrides]) as process:
            assert wait_until(
                lambda: (
                    len(service.bodies) > SILENT_AFTER
                    and len(list(cache.glob("*/*.json"))) == len(answered) - (READY in answered)
                ),
                process,
            ), place.said()
            kill_group(process)
        assert kinds(run_dir)["checkpoint"] >= 1
        before = Counter(answered)
        killed.set()
        requests_before = len(service.bodies)
        assert run_here(run_overrides) == run_dir
        repeated = {message for message in service.messages[requests_before:] if message in before}
        assert repeated == {READY}, "requests answered before the kill are not repeated"
    with stand_in(reply) as service:
        undisturbed = run_here(overrides("undisturbed", service.url))
        messages = Counter(service.messages)
    assert undisturbed.name == run_dir.name, "address and cache of the judge do not change the identity"
    assert set(messages.values()) == {1}
    assert kinds(run_dir)["resume"] == 1
    expected = read_journal(undisturbed).deterministic()
    assert read_journal(run_dir).deterministic() == expected
    *_, last = [metrics for kind, _, metrics in expected if kind == "eval"]
    assert last["compute/judge_tokens"] == last["compute/judge_prompt_tokens"] + last["compute/judge_completion_tokens"]
    assert last["compute/judge_cost"] == pytest.approx(3e-6 * last["compute/judge_prompt_tokens"])
    assert last["eval_cost/judge_tokens"] > 0
    judge_hours = last["compute/judge_cost"] / 1e-3
    measured = read_journal(run_dir).of_kind("eval")[-1].metrics
    assert measured["compute/device_hours_judge"] == pytest.approx(judge_hours)
    assert measured["compute/device_hours"] > judge_hours and last["compute/virtual_device_hours"] > judge_hours
    assert len({metrics["train/gradient_norm"] for kind, _, metrics in expected if kind == "train"}) == STEPS
    rewards = [metrics["reward/judge_prompt_tokens"] for kind, _, metrics in expected if kind == "train"]
    assert all(1 <= tokens <= 40 for tokens in rewards)
