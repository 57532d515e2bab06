"""Tests with a user's data and reward functions, from the command line to the curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_scalerl.callbacks.evaluate import OtherWeightsError
from lightning_scalerl.callbacks.rollout_log import RolloutLog
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.noise import _row, measure_noise
from lightning_scalerl.member.rescore import prompt_of, rescore_run, sample_of
from lightning_scalerl.member.run import run_member
from lightning_scalerl.model.load import load_model
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.arithmetic_base import new_model, tokenizer
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import reward_sum
from lightning_scalerl.verify.verification import RewardError
from sweeps.errors import UserError
from sweeps.run.journal import read_journal
from sweeps.run.rollouts import cut_groups, read_groups, write_groups
from tests import forked, schemas
from tests.helpers import fit

REWARD = """
import os, time

def ones(completion, answer):
    return completion.count("1") / max(1, len(completion)) * 8

def odd(completion, answer):
    if answer == "abstain":
        return None
    if answer == "fail":
        raise OSError("the judge is out")
    return float(sum(character in "13579" for character in completion) > 2)

def sleepy(completion, answer):
    while answer == "sleep":
        time.sleep(1)
    return ones(completion, answer)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, training and held-out prompts, and reward functions."""
    root = tmp_path_factory.mktemp("mine")
    new_model(width=32, layers=1, seed=0).save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    (root / "rewards.py").write_text(REWARD)
    for name, count, first in (("train", 12, 10), ("test", 6, 50)):
        rows = [{"question": f"{first + i}+{7 * i}=", "gold": str(first + 8 * i)} for i in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def overrides(place: Path, *more: str, reward: str = "ones") -> list[str]:
    return [
        "model=path",
        f"model.path={place}/model",
        "task=dataset",
        f"task.train={place}/train.jsonl",
        f"task.heldout={{test: {place}/test.jsonl}}",
        "task.fields.prompt=question",
        "task.fields.answer=gold",
        f"task.rewards={place}/rewards.py:{reward}",
        "scale=trial",
        "reward=zero_one",
        "context.max_prompt_tokens=16",
        "context.max_new_tokens=12",
        "length_control=none",
        "precision=fp32",
        "rollouts.every_n_steps=1",
        "rollouts.groups=2",
        "budget.steps=3",
        *more,
    ]


def train(place: Path, folder: Path, *more: str, reward: str = "ones") -> Path:
    """Run in this process and return the folder of the run."""
    (spec,) = plan_members([[*overrides(place, *more, reward=reward), f"output_dir={folder}"]])
    run_dir = folder / "runs" / spec.run
    spec.write(run_dir)
    run_member(run_dir)
    return run_dir


@pytest.mark.slow
def test_stored_rollouts_can_be_read_and_graded_again(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sweeps.cli.main import main

    run_dir = train(place, tmp_path)
    groups = read_groups(run_dir)
    assert [group["step"] for group in groups] == [1, 1, 2, 2, 3, 3]
    for group in groups:
        assert len(group["rollouts"]) == 4 and group["prompt"].endswith("=")
        for rollout in group["rollouts"]:
            assert rollout["outcome"] == "score"
            assert rollout["reward"] == rollout["completion"].count("1") / max(1, len(rollout["completion"])) * 8
            assert sum(count for _, count in rollout["versions"]) == rollout["tokens"]
    # The same verifier gives the same grades, another one gives its own.
    (same,) = rescore_run(run_dir)
    assert same["rollouts"] == 24 and same["changed"] == 0 and same["before"] == same["after"]
    out = tmp_path / "again.jsonl"
    (other,) = rescore_run(run_dir, f"{place}/rewards.py:odd", out)
    regraded = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [float(sum(c in "13579" for c in e["completion"]) > 2) for g in groups for e in g["rollouts"]]
    assert [rollout["grade"] for group in regraded for rollout in group["rollouts"]] == expected
    assert other["after"]["reward"] == sum(expected) / 24
    with pytest.raises(UserError, match="is there already"):
        rescore_run(run_dir, None, out)
    capsys.readouterr()
    assert main(["rollouts", str(run_dir), "--step", "2", "--json"]) == 0
    assert [group["step"] for group in json.loads(capsys.readouterr().out)] == [2, 2]
    assert main(["rollouts", str(run_dir), "--only", "wrong", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 3, prompt" in shown and "  x 0" in shown and "  + " not in shown and "and 5 before them" in shown
    assert main(["rollouts", str(run_dir), "--outcome", "error"]) == 1
    assert "no rollout is of that kind" in capsys.readouterr().err
    assert main(["rescore", str(run_dir), "--reward", "nonsense"]) == 1
    assert "--reward: 'nonsense' is none of" in capsys.readouterr().err
    # Nothing can be graded: there is no mean, and a lost grade is neither right nor wrong.
    (place / "silent.py").write_text("def silent(completion, answer):\n    return None\n")
    none_graded = rescore_run(run_dir, f"{place}/silent.py:silent")
    schemas.validator("rescore").validate(none_graded)
    assert none_graded[0]["after"] == {"reward": None, "pass_rate": None, "abstained": 24, "errors": 0}
    assert none_graded[0]["changed"] == 0
    assert main(["rescore", str(run_dir), "--reward", f"{place}/silent.py:silent"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-5:] == ["-", "-", "0", "24,", "0"]


def test_rollouts_after_the_checkpoint_are_cut_before_they_are_written_again(tmp_path: Path) -> None:
    def group(step: int, admission: int) -> dict[str, Any]:
        return {"step": step, "admission": admission, "rollouts": []}

    write_groups(tmp_path, [group(1, 0), group(2, 2), group(2, 3), group(3, 4)])
    calls: list[str] = []
    cut_groups(tmp_path, 3, lambda: calls.append("nothing to cut"))
    cut_groups(tmp_path, 1, lambda: calls.append("guard"))
    write_groups(tmp_path, [group(2, 2), group(2, 3)])
    assert [(entry["step"], entry["admission"]) for entry in read_groups(tmp_path)] == [(1, 0), (2, 2), (2, 3)]
    assert calls == ["guard"]
    cut_groups(tmp_path / "nowhere", 1, lambda: calls.append("no file"))
    assert calls == ["guard"]


@pytest.mark.slow
def test_another_reward_gets_the_columns_and_ids_that_it_needs(place: Path, tmp_path: Path) -> None:
    """The run's own verifier needs neither columns nor ids, so its stored prompts do not have them."""
    run_dir = train(place, tmp_path, "task.rewards=exact_match", "reward=plus_minus_one")
    reward_file = tmp_path / "theirs.py"
    reward_file.write_text(
        "def reward(completions, completion_ids, question, gold, **kwargs):\n"
        "    assert question[0].endswith('=') and gold[0].isdigit()\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    lengths = [rollout["tokens"] for group in read_groups(run_dir) for rollout in group["rollouts"]]
    (row,) = rescore_run(run_dir, f"{reward_file}:reward")
    assert row["after"]["errors"] == 0 and row["after"]["reward"] == sum(lengths) / len(lengths)
    # The run's own verifier gives the same grades, although the run rescaled its rewards.
    (same,) = rescore_run(run_dir)
    assert same["before"] == same["after"]


@pytest.mark.slow
def test_a_mixture_is_graded_again_with_its_columns_and_errors_are_shown(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sweeps.cli.main import main

    (tmp_path / "conf/task").mkdir(parents=True)
    parts = "".join(
        f"  {name}:\n    train: {place}/train.jsonl\n    heldout: {{test: {place}/test.jsonl}}\n"
        "    fields: {prompt: question, answer: gold}\n    rewards: exact_match\n    leaks: keep\n"
        f"    instruction: {name}\n"
        for name in ("easy", "hard")
    )
    (tmp_path / "conf/task/both.yaml").write_text(
        "defaults: [mixture, dataset@tasks.easy, dataset@tasks.hard, _self_]\ntasks:\n" + parts
    )
    reward_file = tmp_path / "theirs.py"
    reward_file.write_text(
        "def reward(completions, question, gold, **kwargs):\n"
        "    if question[0][1] in '02468':\n"
        "        raise OSError('the judge is out')\n"
        "    return [float(each.isdigit()) for each in gold]\n"
    )
    arguments = [each for each in overrides(place, "rollouts.groups=4") if not each.startswith("task")]
    arguments += ["task=both", "context.max_prompt_tokens=32", "verify.max_error_share=1"]
    run_dir = tmp_path / "run"
    (spec,) = plan_members([[*arguments, f"output_dir={tmp_path}"]], [str(tmp_path / "conf")])
    spec.write(run_dir)
    run_member(run_dir)
    rows = rescore_run(run_dir, f"{reward_file}:reward")
    schemas.validator("rescore").validate(rows)
    assert {row["source"] for row in rows} == {"easy", "hard"}
    fails = [group["prompt"][1] in "02468" for group in read_groups(run_dir)]
    assert True in fails and False in fails
    assert sum(row["after"]["errors"] for row in rows) == 4 * sum(fails)
    capsys.readouterr()
    assert main(["rescore", str(run_dir), "--reward", f"{reward_file}:reward"]) == 0
    assert "the judge is out" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_stored_rollouts_is_refused_with_a_remedy(place: Path, tmp_path: Path) -> None:
    run_dir = train(place, tmp_path, "rollouts.groups=0", "budget.steps=1")
    assert not (run_dir / "rollouts.jsonl").exists()
    with pytest.raises(UserError, match=r"rollouts\.groups of 1 or more"):
        read_groups(run_dir)


@pytest.mark.slow
def test_conversations_with_an_environment_are_graded_again_by_a_verifier_only(place: Path, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "class Echo:\n"
        "    def reset(self, seed):\n        return '3'\n\n"
        "    def step(self, text):\n        return '1', float('1' in text), False, False, {}\n"
    )
    agent = (f"environment.factory={tmp_path}/echo.py:Echo", "context.max_turns=2", "context.max_turn_tokens=4")
    turns = "environment.at_max_turn_tokens=go_on"
    run_dir = train(place, tmp_path, *agent, turns, "context.max_new_tokens=16", "budget.steps=1")
    groups = read_groups(run_dir)
    assert all(group["prompt"].endswith("=\n\n3") for group in groups), "reset's text is appended to the prompt"
    with pytest.raises(UserError, match=r"its rewards are those of its environment .*echo.py:Echo.*give --reward"):
        rescore_run(run_dir)
    (row,) = rescore_run(run_dir, f"{place}/rewards.py:odd")
    assert row["rollouts"] == sum(len(group["rollouts"]) for group in groups) and row["after"]["errors"] == 0


@pytest.mark.slow
def test_abstentions_and_errors_are_counted_and_leave_their_group(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    for number in (0, 3, 6, 9):
        rows[number]["gold"] = "fail" if number % 2 else "abstain"
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join(map(json.dumps, rows)))
    more = (f"task.train={mixed}", "verify.max_error_share=0.5", "budget.steps=8", "rollouts.groups=8")
    run_dir = train(place, tmp_path, *more, reward="odd")
    last = read_journal(run_dir).of_kind("train")[-1].metrics
    assert (
        last["verify/abstained"] > 0 and last["verify/errors"] > 0 and last["verify/retried"] == last["verify/errors"]
    )
    groups = read_groups(run_dir)
    by_outcome = {rollout["outcome"] for group in groups for rollout in group["rollouts"]}
    assert by_outcome == {"score", "abstain", "error"}
    for group in groups:
        outcomes = {rollout["outcome"] for rollout in group["rollouts"]}
        assert outcomes == {{"fail": "error", "abstain": "abstain"}.get(group["answer"], "score")}
    errors = [rollout for group in groups for rollout in group["rollouts"] if rollout["outcome"] == "error"]
    assert all("the judge is out" in rollout["extra"]["why"] and rollout["reward"] is None for rollout in errors)
    trained = read_journal(run_dir).of_kind("train")
    assert any(record.metrics.get("train/ungraded", 0) == 0.5 for record in trained)


@pytest.mark.slow
def test_a_verifier_that_always_abstains_ends_the_run(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    silent = tmp_path / "silent.jsonl"
    silent.write_text("\n".join(json.dumps({**row, "gold": "abstain"}) for row in rows))
    with pytest.raises(RewardError, match="for 8 steps no completion has had a score"):
        train(place, tmp_path, f"task.train={silent}", "budget.steps=20", "aggregation=token", reward="odd")


def test_a_reward_file_that_changes_under_a_run_is_refused(place: Path, tmp_path: Path) -> None:
    """A worker that is restarted would load other rewards."""
    mine = tmp_path / "mine.py"
    mine.write_text("def reward(completion, answer):\n    return 1.0\n")
    rewards = reward_sum("task.rewards", f"{mine}:reward")
    mine.write_text("def reward(completion, answer):\n    return 0.0\n")
    pool = VerifierPool(rewards, workers=1, timeout_s=20.0)
    try:
        with pytest.raises(ConfigurationError, match="has changed since the run began"):
            pool.wait(pool.submit(Sample(Prompt("p", "?", "1"), "1", "1")))
    finally:
        pool.close()


@pytest.mark.slow
def test_a_batch_without_any_score_changes_no_weights_and_the_run_continues(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    silent = tmp_path / "silent.jsonl"
    silent.write_text("\n".join(json.dumps({**row, "gold": "abstain"}) for row in rows))
    more = (f"task.train={silent}", "optimizer.lr=1e-2", "optimizer.weight_decay=0.1")
    run_dir = train(place, tmp_path, *more, reward="odd")
    view = read_journal(run_dir)
    assert view.status == "finished" and len(view.of_kind("train")) == 3
    for record in view.of_kind("train"):
        assert record.metrics["train/ungraded"] == 1.0 and record.metrics["train/credited_rollouts"] == 0.0
    weights = torch.load(run_dir / "checkpoints" / "step-00000003.ckpt", weights_only=True)["state_dict"]
    before = load_model(str(place / "model")).state_dict()
    assert all(torch.equal(weights[f"policy.model.{name}"], value) for name, value in before.items())


@pytest.mark.slow
def test_a_verifier_that_hangs_on_one_prompt_affects_only_that_prompt(place: Path, tmp_path: Path) -> None:
    """One of 1000 prompts hangs its verifier. Earlier steps are unchanged, and the run finishes."""
    rows = [{"question": f"{i}+{i}=", "gold": str(2 * i)} for i in range(1000)]

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    more = ("async_mode=on_policy", "verify.timeout_s=1.0", "rollouts.groups=9", "budget.steps=6")
    fine = train(place, tmp_path / "fine", *more, f"task.train={write('fine')}", reward="sleepy")
    third = [group for group in read_groups(fine) if group["step"] == 3]
    rows[int(third[0]["prompt_id"])]["gold"] = "sleep"
    hung = train(place, tmp_path / "hung", *more, f"task.train={write('hung')}", reward="sleepy")
    fine_view, hung_view = read_journal(fine), read_journal(hung)
    assert hung_view.status == "finished" and len(hung_view.of_kind("train")) == 6

    def rewards(run_dir: Path, step: int) -> dict[str, list[float | None]]:
        groups = [group for group in read_groups(run_dir) if group["step"] == step]
        return {group["prompt_id"]: [rollout["reward"] for rollout in group["rollouts"]] for group in groups}

    for step in (1, 2):
        assert rewards(fine, step) == rewards(hung, step)
    other = third[1]["prompt_id"]
    assert rewards(hung, 3) == {third[0]["prompt_id"]: [None] * 4, other: rewards(fine, 3)[other]}
    metrics = hung_view.of_kind("train")[-1].metrics
    assert metrics["verify/timeouts"] == metrics["verify/errors"] == 4.0
    # Four completions are each tried twice for one second. This is time of the graders, not of the machine.
    grading_s = metrics["time/verify_total_s"] - fine_view.of_kind("train")[-1].metrics["time/verify_total_s"]
    assert 8.0 <= grading_s < 16.0
    assert metrics["verify/scored"] + 4 == fine_view.of_kind("train")[-1].metrics["verify/scored"]


@pytest.mark.full
def test_the_noise_of_an_evaluation_matches_its_prediction(place: Path) -> None:
    more = [entry for entry in overrides(place, "evaluation.samples=2", reward="odd") if not entry.startswith("model")]
    (row,) = measure_noise(f"{place}/model", [each for each in more if "rollouts" not in each], repeats=12)
    schemas.validator("noise").validate([row])
    assert (row["set"], row["prompts"], row["samples"]) == ("test", 4, 2)
    assert 0 < row["pass_rate"] < 1
    assert row["sampling_error_low"] < row["sampling_error"] < row["sampling_error_high"]
    # The error predicted from one evaluation is within the interval from twelve evaluations.
    assert row["sampling_error_low"] < row["foretold"] < row["sampling_error_high"]


@pytest.mark.parametrize(
    ("pass_rates", "samples", "largest"),
    [
        # No pass in 3 * 100 samples: p may be up to 1 - 0.025^(1/300).
        ([0.0] * 100, 1, ((1 - 0.025 ** (1 / 300)) * 0.025 ** (1 / 300) / 100) ** 0.5),
        ([1.0] * 100, 1, ((1 - 0.025 ** (1 / 300)) * 0.025 ** (1 / 300) / 100) ** 0.5),
        # 1/2 is in the interval of the share of passes.
        ([0.0, 1.0] * 50, 1, (0.25 / 100) ** 0.5),
        # Means that differ by rounding only. For p = 0.3373 a binomial of 120 samples is 30 or less with chance 0.025.
        ([0.1, 0.2, 0.3, 0.4], 10, (0.3373 * 0.6627 / 40) ** 0.5),
    ],
)
def test_equal_evaluations_leave_the_largest_error_that_their_pass_rate_permits(
    pass_rates: list[float], samples: int, largest: float
) -> None:
    rates = torch.tensor(pass_rates, dtype=torch.float64)
    row = _row("test", [(rates, 0.01), (rates.flip(0), 0.01), (rates.roll(1), 0.01)], samples)
    assert (row["sampling_error"], row["sampling_error_low"]) == pytest.approx((0, 0), abs=1e-12)
    assert row["sampling_error_high"] == pytest.approx(largest, rel=1e-3)


def test_equal_greedy_evaluations_have_no_error() -> None:
    rates = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    row = _row("greedy", [(rates, 0.0)] * 4, 1)
    assert (row["sampling_error_high"], row["foretold"]) == (0, 0)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("model", [], "task: say what is evaluated"),
        ("model", ["task=gsm8k", "task.train=t.jsonl", "task.heldout={test: t.jsonl}"], "scale: .*were made for"),
        ("model", ["task=arithmetic"], None),
        ("nothing", ["task=x"], "task=x: no such choice; valid: aime"),
    ],
)
def test_noise_refuses_missing_or_invalid_options(
    place: Path, model: str, more: list[str], message: str | None
) -> None:
    if message is None:
        with pytest.raises(UserError, match="--repeats 1: at least 2"):
            measure_noise(f"{place}/{model}", more, repeats=1)
        return
    with pytest.raises(UserError, match=message):
        measure_noise(f"{place}/{model}", more, repeats=2)


@pytest.mark.slow
def test_a_script_can_use_the_same_data_and_rewards(place: Path, tmp_path: Path) -> None:
    task = DatasetTask(
        format="columns",
        train=f"{place}/train.jsonl",
        heldout={"test": f"{place}/test.jsonl"},
        fields={"prompt": "question", "answer": "gold"},
        rewards=[
            {"use": f"{place}/rewards.py:odd", "name": "main"},
            {"use": f"{place}/rewards.py:ones", "weight": 0.1},
        ],
    )
    fit(str(place / "model"), tmp_path, 3, task=task, callbacks=[RolloutLog(tmp_path, groups=1, every_n_steps=1)])
    record = read_journal(tmp_path).of_kind("train")[-1].metrics
    assert record["train/reward"] == pytest.approx(
        2 * (record["reward/main"] + 0.1 * record["reward/ones"]) - 1, abs=1e-6
    )
    for group in read_groups(tmp_path):
        for each in group["rollouts"]:
            assert each["correct"] == (each["parts"]["main"] >= 1.0)


@pytest.mark.slow
def test_a_verifier_that_rejects_right_answers_stops_the_run_before_its_first_step(place: Path, tmp_path: Path) -> None:
    mirrored = place / "mirrored.py"
    mirrored.write_text("def reward(completion, answer):\n    return float(answer not in completion)\n")
    words = [*overrides(place, "task.right='it is {answer}'"), f"task.rewards={mirrored}:reward"]
    (spec,) = plan_members([[*words, f"output_dir={tmp_path}"]])
    run_dir = tmp_path / "runs" / spec.run
    spec.write(run_dir)
    with pytest.raises(Exception, match=r"wrong before the first step: .* known to be right"):
        run_member(run_dir)
    assert not (run_dir / "metrics.jsonl").exists() or not read_journal(run_dir).records


@pytest.mark.slow
def test_the_number_of_grading_workers_does_not_change_the_curve(place: Path, tmp_path: Path) -> None:
    """Graded in the trainer's process, or in one or three workers, the curve is the same bit for bit."""
    more = ("async_mode=pipeline", "context.max_new_tokens=9", "budget.steps=6", "cost_model.grade_s=0.01")
    journals = [
        read_journal(train(place, tmp_path / str(workers), *more, f"verify.workers={workers}")).deterministic()
        for workers in (0, 1, 3)
    ]
    assert journals[0] == journals[1] == journals[2] and len(journals[0]) > 6


@pytest.mark.slow
def test_an_evaluation_of_other_weights_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator does not load new weights, and reports the version that it has."""
    publish = TorchGenerator.publish

    def late(self: TorchGenerator, weights: Any, version: int, recompute_kv: bool = False) -> None:
        publish(self, weights, min(version, 1), recompute_kv)

    monkeypatch.setattr(TorchGenerator, "publish", late)
    with pytest.raises(OtherWeightsError, match=r"evaluation of test: it is of step 3, .* weights of step 1"):
        train(place, tmp_path, "evaluation.every_n_steps=3", "async_mode=ppo_off_policy", "async_mode.k=8")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [record.metrics["eval/weight_version"] for record in read_journal(run_dir).of_kind("eval")] == [0.0]


@pytest.mark.full
def test_a_mixture_has_a_curve_for_each_of_its_tasks(place: Path, tmp_path: Path) -> None:
    """A mixture of mathematics and programs from the user's files and configuration, run by the real commands."""
    (tmp_path / "task").mkdir()
    math = [{"question": f"What is {i} and {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(8)]
    code = [
        {
            "task_id": i,
            "text": f"Add {i}.",
            "code": f"def f(a):\n    return a + {i}",
            "test_list": [f"assert f(1) == {1 + i}"],
        }
        for i in range(8)
    ]
    for name, rows in (("math", math), ("code", code)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[:6])))
        (tmp_path / f"{name}_test.jsonl").write_text("\n".join(map(json.dumps, rows[6:])))
    (tmp_path / "task" / "both.yaml").write_text(
        f"""defaults:
  - /task@tasks.math: gsm8k
  - /task@tasks.code: mbpp
  - _self_
_target_: lightning_scalerl.MixtureTask
tasks:
  math:
    train: {tmp_path}/math.jsonl
    heldout: {{test: {tmp_path}/math_test.jsonl}}
  code:
    train: {tmp_path}/code.jsonl
    heldout: {{test: {tmp_path}/code_test.jsonl}}
"""
    )
    arguments = [
        "--config-dir", str(tmp_path), "model=path", f"model.path={place}/model", "task=both", "scale=trial",
        "length_control=none", "precision=fp32", "context.max_new_tokens=12", "chat.template=none", "budget.steps=14",
        "evaluation.every_n_steps=2", f"output_dir={tmp_path}/out",
    ]  # fmt: skip
    result = scalerl("train", *arguments)
    assert result.returncode == 0, result.stderr
    assert (
        "6 of math, 6 of code" in result.stdout
        and "graded all test completions correctly" in result.stdout
        and "sandbox: " in result.stdout
    )
    (run_dir,) = (tmp_path / "out" / "runs").iterdir()
    for name in ("math", "code"):
        fitted = scalerl("fit", str(run_dir), "--metric", f"eval/{name}/pass_rate", "--json")
        assert fitted.returncode == 0, fitted.stderr
        (entry,) = json.loads(fitted.stdout)
        assert entry["n"] == 8 and entry["verdict"] != "too_few_points"
    both = scalerl("fit", str(run_dir), "--metric", "all", "--json")
    assert len(json.loads(both.stdout)) == 2


def scalerl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sweeps.cli.main", *words]
    return forked.run(command, timeout=300)


def test_a_stored_conversation_is_graded_as_in_training() -> None:
    """A reward function gets all turns, but only the tokens of the last turn."""
    stored = {
        "completion": "4", "finish_reason": "stop", "ids": [5, 6, 7, 8], "conversation": {"starts": [0, 3]},
        "turns": [["sampled", "2+2?"], ["environment", "try"], ["sampled", "4"]],
    }  # fmt: skip
    sample = sample_of(Prompt("p", "What?", "4"), stored, 2)
    assert sample.turns == (("sampled", "2+2?"), ("environment", "try"), ("sampled", "4")) and sample.tokens == (8,)
    plain = sample_of(Prompt("p", "What?", "4"), {"completion": "4", "finish_reason": "stop", "ids": [5, 6]}, 2)
    assert plain.turns == () and plain.tokens == (5, 6)
    assert plain.step == 1 and sample_of(plain.prompt, {**stored, "versions": [[0, 2], [7, 2]]}, 9).step == 7
    assert sample_of(plain.prompt, {**stored, "versions": [[7, 4]], "completed_steps": 8}, 9).step == 8
    failed = {**stored, "conversation": {"starts": [0, 3], "failed": "timeout: slow"}}
    assert sample_of(plain.prompt, failed, 2).settled == Outcome("error", why="environment: timeout: slow")


def test_a_prompt_of_an_older_version_is_restored_from_its_last_text() -> None:
    messages = ({"role": "system", "content": "Think."}, {"role": "user", "content": "What?"})
    group = {"prompt": "What?\n\nbegin", "rollouts": [{"conversation": {"starts": [0]}}]}
    restored = prompt_of(group, Prompt("p", "What?", messages=messages))
    assert restored.text == "What?\n\nbegin"
    assert restored.messages == (messages[0], {"role": "user", "content": "What?\n\nbegin"})
    assert prompt_of(group, Prompt("p", "What?")).messages == ()


SEEN = """
def text(sample):
    return float(sum(map(ord, str((sample.prompt.text, sample.prompt.messages, sample.completion)))) % 97)

def step(sample):
    return float(sample.step)
"""
BEGINS = """
class Texts:
    def reset(self, seed):
        return f"begin {seed}"

    def step(self, text):
        return "on", None, True, False, {}

class Tools:
    def reset(self, **row):
        return [{"role": "user", "content": "begin"}]

    def add(self, a: int) -> int:
        \"\"\"Add.

        Args:
            a: a number.
        \"\"\"
        return a
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["", pytest.param("Texts", marks=pytest.mark.full), "Tools"])
@pytest.mark.parametrize("function", [pytest.param("text", marks=pytest.mark.full), "step"])
def test_a_runs_own_verifier_gets_the_prompt_and_the_step_of_training(
    place: Path, tmp_path: Path, environment: str, function: str
) -> None:
    """The prompt has the environment's first observation and tools; the step counts from 0."""
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "begins.py").write_text(BEGINS)
    more = ["environment.reward=task", f"environment.factory={tmp_path}/begins.py:{environment}"] if environment else []
    if environment == "Tools":  # messages need a template
        (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
        more += [f"chat.template={tmp_path}/chat.jinja", "environment.convention=plain"]
    more += [f"task.rewards={tmp_path}/seen.py:{function}", "context.max_prompt_tokens=200", "filter=none"]
    run_dir = train(place, tmp_path, *more)
    groups = read_groups(run_dir)
    assert len({rollout["grade"] for group in groups for rollout in group["rollouts"]}) > 1
    rescore_run(run_dir, out=tmp_path / "again.jsonl", trust=True)
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert again == groups
