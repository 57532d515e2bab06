"""Whole runs with environments: training data, limits, failures, and kill -9 in the middle of a turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_scalerl import CalculatorTask, ConfigurationError, RolloutLog, ScaleRL, calculator_base_model
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.rollouts.rollout import Group, Source
from lightning_scalerl.session.sampling import Sampling
from lightning_scalerl.task.arithmetic_base import arithmetic_base_model
from sweeps.cli.main import main as scalerl
from sweeps.run.journal import read_journal
from sweeps.run.rollouts import pick_examples, read_groups
from tests.helpers import CountingTask, fit
from tests.member.test_kill import kill_controller, run_here
from tests.place import STEPS, Place, lines, wait_until

GAMES = "tests.environment.games"
ENVIRONMENT = (
    f"environment.factory={GAMES}:Adding",
    "environment.processes=2",
    "context.max_new_tokens=24",
    "context.max_turn_tokens=5",
    "environment.at_max_turn_tokens=go_on",
    "verify.workers=0",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return arithmetic_base_model(width=32, layers=1, batches=2)


def train(model: str, *overrides: str, steps: int = 3, **options: Any) -> tuple[ScaleRL, list[Group]]:
    """Train, and return the module and all groups that it was trained on."""
    groups: list[Group] = []
    training_step = ScaleRL.training_step

    def record_groups(self: ScaleRL, batch: Any, index: int) -> None:
        groups.extend(batch.groups)
        sampled = torch.tensor(
            [
                source == Source.SAMPLED
                for group in batch.groups
                for rollout in group.rollouts
                for source in rollout.sources
            ]
        )
        assert batch.loss_mask.sum() <= sampled.sum()
        training_step(self, batch, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScaleRL, "training_step", record_groups)
        return fit(model, steps=steps, overrides=[*ENVIRONMENT, *overrides], **options), groups


def test_a_conversation_in_a_run(model: str, tmp_path: Path) -> None:
    module, groups = train(model, "length_control=none", run_dir=tmp_path)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert rollouts and any(rollout.conversation and rollout.conversation.turns == 3 for rollout in rollouts)
    tokenizer = module.models.tokenizer
    for group in groups:
        for rollout in group.rollouts:
            conversation = rollout.conversation
            assert conversation is not None and conversation.rewarded and not conversation.failed
            for start in conversation.starts[1:]:
                assert rollout.sources[start - 1 : start + 1] == [Source.ENVIRONMENT, Source.SAMPLED]
            assert rollout.grade == pytest.approx(sum(conversation.rewards))
            texts = [(source, tokenizer.decode(rollout.tokens[a:b])) for source, a, b in rollout.source_spans]
            observations = [text for source, text in texts if source == Source.ENVIRONMENT]
            # Each observation ends a turn; the last turn has none.
            assert len(observations) == conversation.turns - 1
            numbers = {text.partition("+")[0] for text in observations}
            assert (
                len(numbers) <= 1
                and [text.partition("+")[2] for text in observations] == ["1=", "2="][: len(observations)]
            )
            odd = [
                sum(character in "13579" for character in text.rstrip(".")) / 6
                for source, text in texts
                if source == Source.SAMPLED
            ]
            # A turn that the token limit cuts off is not sent to the environment.
            assert list(conversation.rewards) == pytest.approx(
                [*odd[:-1], 0.0] if rollout.truncated and len(rollout.tokens) == 24 else odd
            )
    records = [metrics for kind, _, metrics in read_journal(tmp_path).deterministic() if kind == "train"]
    assert all(1 <= record["environment/turns"] <= 3 and record["environment/tokens"] > 0 for record in records)
    assert all(record["environment/failed"] == 0 for record in records)
    # Trainer and generator agree on every sampled token, of all turns (FP32 throughout).
    assert all(record["train/logprob_gap"] < 1e-5 for record in records if record["train/staleness_mean"] == 0)


@pytest.mark.slow
def test_rewards_of_an_environment_start_no_verifier_process(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lightning_scalerl.verify.verification.VerifierPool")
    monkeypatch.setattr(CountingTask, "trusted", False)
    train(model, "verify.workers=2", steps=1)
    with pytest.raises(NameError, match="VerifierPool"):
        train(model, "verify.workers=2", "environment.reward=task", steps=1)


def test_the_same_seed_gives_the_same_run_with_any_number_of_processes(model: str) -> None:
    one, two = (train(model, f"environment.processes={count}")[1] for count in (1, 12))
    assert [r.tokens for g in one for r in g.rollouts] == [r.tokens for g in two for r in g.rollouts]
    assert [r.conversation for g in one for r in g.rollouts] == [r.conversation for g in two for r in g.rollouts]


@pytest.mark.parametrize(
    ("overrides", "truncated", "turns"),
    [
        (("context.max_turns=1",), True, 1),
        (("context.max_turns=2",), True, 2),
        (("context.max_turns=2", "environment.at_max_turns=answer", "environment.last_turn='9'"), False, 2),
        (("context.max_new_tokens=5",), True, 1),
        (("context.max_new_tokens=9",), True, 2),
        (("environment.at_max_turn_tokens=truncated", "context.max_turn_tokens=1"), True, 3),
    ],
)
def test_limits_of_turns_and_tokens(model: str, overrides: tuple[str, ...], truncated: bool, turns: int) -> None:
    module, groups = train(model, *overrides, "truncated=keep", "length_control=none", steps=1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert max(rollout.conversation.turns for rollout in rollouts if rollout.conversation) <= turns
    # A last turn that reaches its limit of 5 tokens always counts as truncated. Leave those rollouts out.
    not_cut = [
        rollout
        for rollout in rollouts
        if not rollout.conversation or len(rollout.tokens) - rollout.conversation.starts[-1] < 5
    ]
    assert any(rollout.truncated for rollout in (rollouts if truncated else not_cut)) == truncated
    limit = module.recipe.context.max_new_tokens
    assert not any(group.ungraded for group in groups), "a rollout that is cut off in its first turn has the reward 0"
    assert all(len(rollout.tokens) <= limit for rollout in rollouts)
    if "environment.last_turn='9'" in overrides:
        with_last_turn = [
            rollout.tokens for rollout in rollouts if rollout.conversation and rollout.conversation.turns == 2
        ]
        assert with_last_turn and all("9" in module.models.tokenizer.decode(tokens) for tokens in with_last_turn)


def test_step_rewards_that_add_up_to_1_are_a_pass(model: str) -> None:
    _, groups = train(model, f"environment.factory={GAMES}:Shares", "length_control=none", "filter=none", steps=1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    whole = [
        rollout for rollout in rollouts if rollout.conversation and rollout.conversation.rewards == (0.7, 0.2, 0.1)
    ]
    assert whole and all(rollout.grade == 1.0 for rollout in whole)


def test_a_failing_environment_removes_only_its_own_rollouts(model: str, tmp_path: Path) -> None:
    overrides = (f"environment.factory={GAMES}:Failing", "environment.timeout_s=0.5", "verify.max_error_share=1")
    overrides += ("environment.processes=6",)
    _, groups = train(
        model,
        *overrides,
        "environment.max_characters=10",
        "filter=none",
        run_dir=tmp_path,
        steps=4,
    )
    sampled = [rollout for group in groups for rollout in group.sampled]
    failed = [rollout for rollout in sampled if rollout.conversation and rollout.conversation.failed]
    kinds = {rollout.conversation.failed.partition(":")[0] for rollout in failed if rollout.conversation}
    assert kinds >= {"timeout", "died", "raised", "answer"}, kinds
    assert all(rollout.outcome == "error" for rollout in failed)
    assert not any(rollout in group.rollouts for group in groups for rollout in failed), (
        "a failed rollout is trained on"
    )
    flooded = [rollout for rollout in sampled if rollout.conversation and rollout.conversation.cut]
    assert flooded and all("[" not in str(rollout.outcome) for rollout in flooded)
    records = [metrics for kind, _, metrics in read_journal(tmp_path).deterministic() if kind == "train"]
    assert any(record["environment/failed"] > 0 for record in records)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("environment.factory=nowhere.py:Game",), r"environment\.factory: there is no file 'nowhere\.py'"),
        ((f"environment.factory={GAMES}:Missing",), r"environment\.factory: 'Missing' of .* cannot be loaded"),
        (("environment.factory=tests.environment.environments_for_tests:Formless",), "Formless has neither TRL's form"),
        (("environment.reward=both",), r"environment\.reward: 'both' must be one of environment, task"),
        (("environment.last_turn=9",), r"environment\.last_turn: 9 must be a text"),
        (("environment.last_turn=now",), r"environment\.last_turn: 'now' would never be said"),
        (("verify.on_error=zero",), r"verify\.on_error: zero would give a reward of 0"),
        (("context.max_turns=0",), r"context\.max_turns: 0"),
    ],
)
def test_bad_settings_are_refused_before_any_compute(model: str, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        fit(model, overrides=[*ENVIRONMENT, *overrides])


def test_a_fit_that_cannot_start_leaves_no_process(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments' processes start at the first observations, before verifiers and generator are built."""

    def refuse(self: Sampling) -> None:
        raise ConfigurationError("no verifier")

    monkeypatch.setattr(Sampling, "new_verifiers", refuse)
    with pytest.raises(ConfigurationError, match="no verifier"):
        fit(model, overrides=ENVIRONMENT)
    assert "environment" not in [thread.name for thread in threading.enumerate()]


def test_an_answer_takes_the_virtual_time_that_the_environment_declares(model: str, tmp_path: Path) -> None:
    hours = []
    for game in ("Adding", "Slow"):
        train(model, f"environment.factory={GAMES}:{game}", steps=2, run_dir=tmp_path / game)
        *_, (_, _, metrics) = read_journal(tmp_path / game).deterministic()
        hours.append(metrics["compute/virtual_device_hours"])
    assert hours[0] < 0.1 and hours[1] > 2.0, "at least one answer per step"


def test_a_tool_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["environment.factory=lightning_scalerl.task.calculator:Calculator", "environment.describe_tools=false"]
    overrides += ["environment.reward=task", "context.max_turns=3", "context.max_new_tokens=48", "length_control=none"]
    overrides += ["environment.processes=2", "batch.completions=32", "context.max_prompt_tokens=16"]
    task = CalculatorTask(train=20, heldout=4)
    fit(
        calculator_base_model(),
        tmp_path,
        steps=2,
        overrides=overrides,
        task=task,
        callbacks=[RolloutLog(tmp_path, 4, 1)],
    )
    rollouts = [rollout for group in read_groups(tmp_path) for rollout in group["rollouts"]]
    called = [
        rollout for rollout in rollouts if rollout["conversation"]["calls"] and rollout["conversation"]["turns"] == 2
    ]
    assert called and any(rollout["correct"] for rollout in called) and len(called) < len(rollouts) / 2
    for rollout in called:
        (_, call), (source, observation), (_, answer) = rollout["turns"]
        assert source == "environment" and call.startswith("<call>calculate(")
        numbers = call.removeprefix("<call>calculate(").removesuffix(")</call>")
        if set(numbers) <= set("0123456789+") and not numbers.startswith("+"):
            assert observation == f"?{sum(map(int, numbers.split('+')))}="
        assert rollout["completion"] == answer
    (reported,) = pick_examples([("recipe", tmp_path)])
    outcome, text = reported.written[0]
    assert "2 turns" in outcome and "\n[environment] ?" in text, "the best of a group has called the tool"
    scalerl(["rollouts", str(tmp_path), "--limit", "0"])
    printed = capsys.readouterr().out
    assert (
        "conversation: 2 turns, 1 calls" in printed
        and "[environment] ?" in printed
        and "[model] <call>calculate(" in printed
    )


# --- kill -9 -------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = Place(tmp_path)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "driver"),
    [
        pytest.param("Adding", "virtual", marks=pytest.mark.full),
        pytest.param("AddingOnce", "virtual", marks=pytest.mark.full),
        ("Adding", "live"),
    ],
)
def test_a_run_that_was_killed_in_the_middle_of_a_turn_continues(
    place: Place, game: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bit for bit if the environment can be replayed and the clock is virtual. No rollout fails in any case."""
    processes = 4 if game == "Adding" else 32
    settings = [rollout for rollout in ENVIRONMENT if "factory" not in rollout and "processes" not in rollout]
    settings += [f"environment.factory={GAMES}:{game}", f"environment.processes={processes}", f"driver={driver}"]
    settings += ["cost_model.decode_s=0.01"]
    overrides = place.overrides("killed", "seed=3", *settings)
    (spec,) = plan_members([list(overrides)])
    run_dir = place.root / "killed" / "runs" / spec.run
    monkeypatch.setenv("ENVIRONMENT_S", "0.01")
    with place.command(["-m", "lightning_scalerl.train", *overrides]) as process:
        assert wait_until(lambda: lines(run_dir) >= 11, process), place.said()
        kill_controller(process)
    monkeypatch.delenv("ENVIRONMENT_S")
    state = newest_state(run_dir)
    assert state["conversations"], "no conversation was open at the kill"
    assert run_here(overrides) == run_dir
    if (game, driver) == ("Adding", "virtual"):
        undisturbed = run_here(place.overrides("undisturbed", "seed=3", *settings))
        assert read_journal(run_dir).deterministic() == read_journal(undisturbed).deterministic()
    records = [metrics for kind, _, metrics in read_journal(run_dir).deterministic() if kind == "train"]
    assert len(records) == STEPS and all(record["environment/failed"] == 0 for record in records)
    turns = [
        rollout
        for group in read_groups(run_dir)
        for rollout in group["rollouts"]
        if rollout["conversation"]["turns"] > 1
    ]
    assert turns and turns[0]["turns"][1][0] == "environment"


def newest_state(run_dir: Path) -> dict[str, Any]:
    """Return the driver's state in the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return dict(torch.load(newest, weights_only=False)["scalerl"]["driver"])
