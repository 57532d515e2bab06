"""Tests of running our recipes with TRL's GRPOTrainer: refusals before a start, compute of a step, and real members.

Tests that start TRL (marker `peers`) need an interpreter that has it, named by PEERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_scalerl.checks import ONE_TRAINER, ConfigurationError
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.member.trl import plan_trl
from lightning_scalerl.task.arithmetic_base import new_model
from lightning_scalerl.translate.trl_run import Journal, forward_flops, make_reward, sampling_flops, standard_error
from sweeps.launch.status import overview
from sweeps.run.journal import JournalView, read_journal
from tests.paths import ROOT
from tests.translate.test_translate import peers_python

# The parts of scalerl_core that TRL can express, at the smallest size; two passes per batch make losses differ.
ON_TRL = (
    *("recipe=scalerl_core", "async_mode=on_policy", "filter=none", "normalization=prompt", "normalization.eps=1e-4"),
    *("aggregation=token", "schedule.warmup_steps=0", "optimizer.weight_decay=0", "epochs.count=2", "model.digits=2"),
    *(
        "task.train=[50,200]",
        "task.heldout=[4,8]",
        "context.max_new_tokens=16",
        "batch.prompts=4",
        "batch.completions=4",
    ),
    *("thinking.interrupt_from=9", "thinking.interrupt_to=11", "evaluation.every_n_steps=2", "reward=zero_one"),
)

PASS_RATE = "eval/heldout/pass_rate"


def test_choices_that_trl_cannot_express_are_refused_by_name() -> None:
    """All of them are named in one line, before the interpreter is started."""
    with pytest.raises(ConfigurationError, match=r"^trainer=trl: what TRL 1.16.0 cannot express: ") as refused:
        plan_trl(
            [["trainer=trl", "trainer.python=/nowhere/python", *ON_TRL, "resampling=no_positive", "kl=by_difficulty"]]
        )
    assert "resampling=NoPositiveResampling(pass_rate=0.9) (" in str(refused.value)
    assert "kl=KLByDifficulty(" in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"strategy\.devices: 2; TRL trains a member in one process"):
        plan_trl([["trainer=trl", "trainer.python=/nowhere/python", *ON_TRL, "strategy.devices=2"]])
    for setting, message in (
        ("", "trainer.python: needs a value"),
        ("trainer.python=/nowhere/python", "/nowhere/python: No such"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            plan_trl([["trainer=trl", *filter(None, [setting]), *ON_TRL]])


@pytest.mark.slow
def test_an_interpreter_without_trl_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        ConfigurationError, match=r"(No module named|No package metadata).*; an environment with trl 1.16.0"
    ):
        plan_trl([["trainer=trl", f"trainer.python={sys.executable}", *ON_TRL]])


@pytest.mark.parametrize("trainers", ["trl,ours", "ours,trl"])
def test_a_grid_of_both_trainers_is_refused_with_the_reason(trainers: str, tmp_path: Path) -> None:
    """The error must not be about a key that one of the trainers lacks: both have planners of their own."""
    refused = scalerl(
        "train", "--multirun", f"trainer={trainers}", "trainer.python=/nowhere/python", *ON_TRL, cwd=tmp_path
    )
    assert refused.returncode == 1
    assert refused.stderr.strip() == f"scalerl train: {ONE_TRAINER}"


def test_flops_of_a_token_are_those_of_our_meter() -> None:
    """One group of three completions after a prompt of ten tokens."""
    ours = FlopModel.of(new_model(64, 3, 0))
    model = {"body": ours.body_per_token, "head": ours.head, "context": ours.per_context}
    lengths = [8, 13, 1]
    assert sum(forward_flops(model, 10, length) for length in lengths) == ours.forward([18, 23, 11], [10, 10, 10])
    decoded_positions = [position for length in lengths for position in range(10, 10 + length - 1)]
    decoded = ours.decode(len(decoded_positions), sum(position + 1 for position in decoded_positions))
    assert sampling_flops(model, 10, lengths) == ours.prefill(10, 55, 1) + decoded


def test_the_reward_for_trl_includes_our_length_penalty() -> None:
    from lightning_scalerl.axes.length_control import overlong_penalty

    lengths_seen: list[tuple[list[int], list[int]]] = []
    settings = {"reward": {"correct": 1.0, "incorrect": -1.0}, "penalty": {"limit": 16, "buffer": 4}}
    reward = make_reward(settings, lambda *lengths: lengths_seen.append(lengths))
    rewards = reward(["7", "8"], answer=["7", "7"], prompt_tokens=[10, 10], completion_ids=[[1] * 14, [1] * 3])
    assert rewards == [1.0 + overlong_penalty(14, 16, 4), -1.0]
    assert lengths_seen == [([10, 10], [14, 3])]


def test_the_standard_error_is_that_of_our_evaluation() -> None:
    import torch

    from lightning_scalerl.callbacks.evaluate import standard_error as ours

    for passed in ([0, 4, 2], [4, 4, 4]):
        assert standard_error(passed, 4) == pytest.approx(ours(torch.tensor(passed) / 4, 4))


def test_evaluations_after_the_last_checkpoint_are_logged_again(tmp_path: Path) -> None:
    """Two of TRL's steps make one step of the recipe. A line cut off by a kill is dropped."""
    journal = Journal(tmp_path, passes=2)
    for step in (0, 2, 4):
        journal.add(step=step, reward=0.5)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "scalerl-2.json").write_text('{"flops": 7.0}')
    resumed = Journal(tmp_path, passes=2)
    resumed.resume(checkpoint)
    resumed.add(step=4, reward=0.25)
    assert (steps_of(tmp_path), resumed.flops) == ([0, 2, 4, 4], 7.0)


def member(folder: Path, *overrides: str) -> list[str]:
    """Return the command that runs one member outside of a study."""
    module = [sys.executable, "-m", "lightning_scalerl.translate.trl_member"]
    return [*module, "--python", peers_python(), "--folder", str(folder), *ON_TRL, *overrides]


def environment() -> dict[str, str]:
    """Return an environment with one thread and this checkout's modules."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the evaluations so far."""
    file = folder / "evaluations.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def until(holds: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 600) -> None:
    """Wait until `holds` returns True; fail if the process ends first."""
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process.stderr and process.stderr.read()[-2000:]
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.live
@pytest.mark.peers
def test_a_stopped_member_continues(tmp_path: Path) -> None:
    """SIGTERM ends a member with a checkpoint after the current step. Restarted, it runs each remaining step once."""
    first = subprocess.Popen(
        member(tmp_path, "budget.steps=200"), env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(steps_of(tmp_path)) >= 2, first)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 3
    reached = steps_of(tmp_path)[-1]
    budget = f"budget.steps={reached + 3}"
    done = subprocess.run(
        member(tmp_path, budget), env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == reached + 3
    compute = [line["compute"] for line in lines]
    assert compute[0] == 0 and all(earlier < later for earlier, later in pairwise(compute))
    # The length of completions varies by a few tokens, and so does the compute of a step.
    spent = [more - less for less, more in pairwise(compute)]
    costs = [flops / (after - before) for flops, (before, after) in zip(spent, pairwise(steps), strict=True)]
    assert max(costs) < 1.5 * min(costs)


def scalerl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would."""
    command = [sys.executable, "-m", "sweeps.cli.main", *arguments]
    return subprocess.run(command, env=environment(), cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.live
@pytest.mark.peers
def test_a_study_of_trl_is_killed_twice_and_finished(tmp_path: Path) -> None:
    """Two losses with three seeds. First the controller is killed, then a member; finally all commands work."""
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    grid = ["--multirun", "trainer=trl", f"trainer.python={peers_python()}", "study=two", "seed=0,1,2"]
    grid += ["loss=cispo,dapo", *ON_TRL, "budget.steps=16", "checkpoint.every_n_steps=4", f"mlflow.uri={tracking}"]
    command = [sys.executable, "-m", "sweeps.cli.main", "train", *grid]
    runs = tmp_path / "outputs" / "two" / "runs"

    def reached() -> int:
        return max((len(steps_of(path)) for path in runs.glob("*/trl")), default=0)

    controller = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: reached() >= 2, controller)
    controller.kill()
    controller.wait()
    restarted = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    before = reached()
    until(lambda: reached() > before, restarted)
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:
            continue
        if b"trl_run.py" in words and str(runs).encode() in words:
            os.kill(int(file.parent.name), signal.SIGKILL)
            break
    assert restarted.wait(1200) in (0, 1)  # 1: a member that was killed is retried by the next launch
    done = scalerl("train", *grid, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    journals: list[JournalView] = [read_journal(path) for path in runs.iterdir()]
    assert len(journals) == 6
    for journal in journals:
        steps = [record.step for record in journal.of_kind("eval")]
        assert steps == list(range(0, 17, 2))
        assert journal.status == "finished" and journal.header["axis"] == "compute/flops"
    spent = str(min(journal.of_kind("eval")[-1].metrics["compute/flops"] for journal in journals))
    for arguments in (("rank",), ("race", "--budget", spent), ("report", "-o", "report.html"), ("status",)):
        shown = scalerl(arguments[0], "outputs/two", *arguments[1:], cwd=tmp_path)
        assert shown.returncode == 0, (arguments, shown.stderr)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert tracked(tracking, "two") == [("FINISHED", seed, 16.0) for seed in "001122"]


@pytest.mark.full
@pytest.mark.live
@pytest.mark.peers
def test_a_race_stops_the_trl_recipe_that_does_not_learn(tmp_path: Path) -> None:
    """The learning rate 0.03 is far too high: it is stopped at the first look, and the other runs to its end."""
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    grid = ["--multirun", "trainer=trl", f"trainer.python={peers_python()}", "study=raced", "seed=0,1", "loss=cispo"]
    grid += ["optimizer.lr=1e-4,0.03", *ON_TRL, "budget.steps=400", "checkpoint.every_n_steps=50"]
    grid += [
        "launch.max_parallel=4",
        "race.mode=live",
        "race.budget=2.5e11",
        "race.first=0.1",
        f"mlflow.uri={tracking}",
    ]
    done = scalerl("train", *grid, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    views = {(view.recipe.rpartition("=")[2], view.seed): view for view in overview(tmp_path / "outputs" / "raced")}
    assert {key: view.state for key, view in views.items()} == {
        ("0.0001", 0): "finished",
        ("0.0001", 1): "finished",
        ("0.03", 0): "stopped",
        ("0.03", 1): "stopped",
    }
    assert all("of ending ahead of" in str(view.reason) for (lr, _), view in views.items() if lr == "0.03")
    for view in views.values():
        steps = [record.step for record in read_journal(tmp_path / "outputs/raced/runs" / view.run).of_kind("eval")]
        assert steps == list(range(0, steps[-1] + 1, 2)) and (steps[-1] == 400) == (view.state == "finished")
    assert [status for status, _, _ in tracked(tracking, "raced")] == ["FINISHED", "FINISHED", "KILLED", "KILLED"]


def tracked(uri: str, study: str) -> list[tuple[str, str, float]]:
    """Return status, seed and last step of every member in MLflow, sorted."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(study)
    assert experiment is not None
    members = client.search_runs([experiment.experiment_id], "tags.kind = 'member'")
    last = {
        run.info.run_id: max(
            (point.step for point in client.get_metric_history(run.info.run_id, PASS_RATE)), default=-1
        )
        for run in members
    }
    return sorted((run.info.status, run.data.tags["seed"], float(last[run.info.run_id])) for run in members)
