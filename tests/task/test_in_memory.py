"""Tests of a task as users of TRL write it: rows in memory, and reward functions called with a whole group."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from lightning.pytorch import Trainer

from lightning_scalerl import DatasetTask, Evaluate, RolloutDataModule, ScaleRL
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.task.base import passes
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.verification import Verifiers
from tests.helpers import SMALL, quiet
from tests.paths import ROOT

ROWS = [{"prompt": f"{n}+{n}=", "solution": str(2 * n)} for n in range(12)]
TRAIN, HELDOUT = ROWS[:9], ROWS[9:]


def accuracy(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    return [float(text.strip() == gold) for text, gold in zip(completions, solution, strict=True)]


def shortest(completions: list[str], **kwargs: Any) -> list[float]:
    """1 for the shortest completions of the call, so a completion graded alone always gets 1."""
    least = min(map(len, completions))
    return [float(len(text) == least) for text in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


async def judged(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if not text else 0.5 for text in completions]


def task_of(rewards: Any, train: Any = TRAIN, heldout: Any = HELDOUT, **more: Any) -> DatasetTask:
    return DatasetTask(train=train, heldout=heldout, rewards=rewards, **more)


def grade_texts(task: DatasetTask, *texts: str, verifiers: Verifiers | None = None) -> list[Outcome]:
    """The outcomes of a group of completions of the first prompt."""
    prompt = task.train_prompts()[0]
    verifiers = verifiers or InlineVerifiers(task.grader(), retries=0)
    tickets = verifiers.submit_group([Sample(prompt, text, text, (1,) * len(text)) for text in texts])
    return [verifiers.wait(ticket) for ticket in tickets]


# --- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, tuple, datasets.Dataset.from_list])
def test_rows_in_memory(form: Callable[[Any], Any]) -> None:
    task = task_of(accuracy, form(TRAIN), form(HELDOUT))
    assert [prompt.text for prompt in task.train_prompts()] == [row["prompt"] for row in TRAIN]
    assert {name: len(part) for name, part in task.eval_sets().items()} == {"heldout": 3}
    assert task.train_prompts()[1].columns["solution"] == "2"


def test_a_dataset_dict_gives_held_out_sets_by_split() -> None:
    splits = datasets.DatasetDict({"easy": datasets.Dataset.from_list(HELDOUT[:1]), "hard": HELDOUT[1:]})
    assert {name: len(part) for name, part in task_of(accuracy, heldout=splits).eval_sets().items()} == {
        "easy": 1,
        "hard": 2,
    }


def test_a_file_and_rows_in_memory_in_one_task(tmp_path: Path) -> None:
    datasets.Dataset.from_list(TRAIN).to_json(tmp_path / "train.jsonl")
    task = task_of(accuracy, tmp_path / "train.jsonl", {"test": HELDOUT})
    assert len(task.train_prompts()) == 9 and list(task.eval_sets()) == ["test"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, "^task.train: holds no rows$"),
        ({"train": ["2+2="]}, "^task.train: row 0 is no dict, but '2\\+2='$"),
        ({"train": datasets.DatasetDict({"a": datasets.Dataset.from_list(TRAIN)})}, r"has the splits a; say .*\['a'\]"),
        ({"train": datasets.Dataset.from_list(TRAIN).to_iterable_dataset()}, r"IterableDataset must .*list\(stream"),
        (
            {"train": [{"question": "2+2="}]},
            "^task.train: the rows given, row 0: no column prompt; its columns are que",
        ),
        ({"train": None, "heldout": 0.1}, "^task.train: needs a value"),
        ({"heldout": []}, r"^task.heldout: \[\] must name at least one set"),
        ({"heldout": [8]}, r"^task.heldout: \[8\] must .* arithmetic task's, as scale=tiny sets them"),
        ({"heldout": "test.jsonl"}, "^task.heldout: 'test.jsonl' must name at least one set"),
        ({"rewards": None}, "^task.rewards: needs a value; give a function"),
        ({"rewards": []}, "^task.rewards: give at least one"),
        ({"rewards": 3}, "^task.rewards: 3 must be a name, a place, a function, or"),
        ({"rewards": lambda a, b: 1.0}, r"^task.rewards: its parameters \(a, b\) are of no known form; TRL's takes"),
        ({"rewards": [accuracy, accuracy]}, "two are called 'accuracy'; give one of them a name"),
        ({"rewards": functools.partial(len)}, "source text of .* cannot be read .* def or lambda"),
        ({"rewards": len}, "its source text|the source text of len cannot be read"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task_of(**{"rewards": accuracy, **arguments})


def test_rows_are_identified_by_content() -> None:
    def content(**changed: Any) -> Any:
        return DatasetTask.content({"train": TRAIN, "heldout": {"a": HELDOUT}, "rewards": accuracy, **changed})

    assert content() == content(train=datasets.Dataset.from_list(TRAIN))
    assert content() != content(train=TRAIN[:-1]) and content() != content(rewards=shortest)


# --- functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (accuracy, [1.0, 0.0, 0.0]),
        (lambda completions, solution, **_: [float(a == solution[0]) for a in completions], [1.0, 0.0, 0.0]),
        (lambda completion, answer: float(len(completion)), [1.0, 2.0, 0.0]),
        (compute_score, [0.0, 0.0, 1.0]),  # these rows have no answer, so the ground truth is ""
        (judged, [0.5, 0.5, None]),
        ([accuracy, shortest], [1.0, 0.0, 1.0]),
        ([accuracy, {"use": shortest, "weight": 0.5, "name": "brief"}], [1.0, 0.0, 0.5]),
        (["exact_match", accuracy], [1.0, 1.0, 0.0]),
    ],
    ids=["def", "lambda", "ours", "verl", "async", "list", "weights", "mixed"],
)
def test_every_form_of_function(rewards: Any, expected: list[float | None]) -> None:
    mixed = isinstance(rewards, list) and "exact_match" in rewards
    rows = [[{**row, "answer": "11"} for row in part] if mixed else part for part in (TRAIN, HELDOUT)]
    task = task_of(rewards, *rows)
    outcomes = grade_texts(task, "0", "11", "")
    assert [None if outcome.kind == "abstain" else outcome.reward for outcome in outcomes] == expected
    assert {outcome.kind for outcome in outcomes} <= {"score", "abstain"}


def test_a_function_is_called_with_the_whole_group() -> None:
    assert [outcome.reward for outcome in grade_texts(task_of(shortest), "aaa", "a", "aa")] == [0.0, 1.0, 0.0]


def test_a_group_in_a_process_of_its_own() -> None:
    """A function is sent by value, with the variables around it. One of this module would import Lightning there."""
    bonus = 0.25

    def accuracy(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [float(text.strip() == gold) for text, gold in zip(completions, solution, strict=True)]

    def with_bonus(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [len(completions) + bonus for _ in completions]

    task = task_of([with_bonus, accuracy])
    pool = VerifierPool(task.grader(), workers=2, timeout_s=60.0, retries=0)
    try:
        outcomes = grade_texts(task, "0", "1", "2", verifiers=pool)
    finally:
        pool.close()
    assert [outcome.reward for outcome in outcomes] == [4.25, 3.25, 3.25]
    assert outcomes[0].parts == {"with_bonus": 3.25, "accuracy": 1.0} and passes(task, outcomes[1])


def test_logged_values_belong_to_each_completion() -> None:
    def logging(completions: list[str], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_metric("length", sum(map(len, completions)) / len(completions))
        log_extra("said", [text.upper() for text in completions])
        log_extra("all", "one for all")
        return [1.0] * len(completions)

    outcomes = grade_texts(task_of(logging), "a", "bbb")
    assert [outcome.extra for outcome in outcomes] == [
        {"said": "A", "all": "one for all"},
        {"said": "BBB", "all": "one for all"},
    ]
    assert [outcome.parts for outcome in outcomes] == [{"length": 2.0}] * 2


@pytest.mark.parametrize(
    ("returned", "kinds", "why"),
    [
        ([1.0, 2.0], ["error"] * 3, "raised ValueError: 2 rewards for 3 completions (in reward function bad)"),
        (1.0, ["error"] * 3, "returns a list, not float (in reward function bad)"),
        ([1.0, None, 0.0], ["score", "abstain", "score"], ""),
        ([1.0, float("nan"), 0.0], ["score", "error", "score"], "bad returned nan; a reward must be a finite number"),
        ([1.0, "much", 0.0], ["score", "error", "score"], "not the text 'much', which bad returned"),
        (KeyError("gold"), ["error"] * 3, "raised KeyError: 'gold' (in reward function bad)"),
    ],
    ids=["count", "number", "none", "nan", "text", "exception"],
)
@pytest.mark.parametrize("paired", [False, True])
def test_errors_of_a_reward_function_name_it(returned: Any, kinds: list[str], why: str, paired: bool) -> None:
    def bad(completions: list[str], **kwargs: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    outcomes = grade_texts(task_of([bad, accuracy] if paired else bad), "0", "b", "c")
    if paired:  # where one function abstains, the other one's reward counts
        kinds = ["score" if kind == "abstain" else kind for kind in kinds]
    assert [outcome.kind for outcome in outcomes] == kinds
    errors = [outcome.why for outcome in outcomes if outcome.kind == "error"]
    assert all(why in error for error in errors) and bool(errors) == bool(why)


def test_a_function_that_hangs_is_killed_and_named(tmp_path: Path) -> None:
    def hangs(completions: list[str], **kwargs: Any) -> list[float]:
        while "hang" in completions:
            pass
        return [1.0] * len(completions)

    task = task_of(hangs)
    pool = VerifierPool(task.grader(), workers=1, timeout_s=1.0, retries=0)
    try:
        lost, recovered = grade_texts(task, "hang", "b", verifiers=pool), grade_texts(task, "a", "b", verifiers=pool)
    finally:
        pool.close()
    # One second for each of the two completions.
    assert [outcome.why for outcome in lost] == ["timed out after 2 s (in reward function hangs)"] * 2
    assert [outcome.reward for outcome in recovered] == [1.0, 1.0]


def test_after_an_error_the_whole_group_is_graded_again() -> None:
    calls: list[int] = []

    def flaky(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("away")
        return [1.0] * len(completions)

    task = task_of(flaky)
    outcomes = grade_texts(task, "a", "b", verifiers=InlineVerifiers(task.grader(), retries=1))
    assert calls == [2, 2] and [(outcome.kind, outcome.attempts) for outcome in outcomes] == [("score", 2)] * 2


def test_a_function_that_cannot_be_sent_is_refused_with_a_remedy() -> None:
    lock = threading.Lock()

    def locked(completions: list[str], **kwargs: Any) -> list[float]:
        with lock:
            return [1.0] * len(completions)

    task = task_of(locked)
    assert grade_texts(task, "a")[0].reward == 1.0, "it can grade in the trainer's process"
    with pytest.raises(
        ConfigurationError, match=r'^task.rewards: locked cannot be sent .*"file.py:locked"; verify.wor'
    ):
        VerifierPool(task.grader(), workers=1, timeout_s=1.0)


def test_identity_is_the_source_text() -> None:
    def make_reward(bonus: float) -> Any:
        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            return [bonus for _ in completions]

        return reward

    same, other = task_of(make_reward(1.0)).identity(), task_of(make_reward(2.0)).identity()
    assert same == task_of(make_reward(1.0)).identity() != other
    assert task_of(accuracy).identity() != task_of(shortest).identity()
    assert task_of([accuracy, "exact_match"], heldout=[{**row, "answer": "1"} for row in HELDOUT],
                   train=[{**row, "answer": "1"} for row in TRAIN]).identity()[1] == "exact_match"  # fmt: skip


# --- a run ---------------------------------------------------------------------------------------------------


def fit_task(model: str, rewards: Any, *overrides: str, steps: int = 2, **options: Any) -> ScaleRL:
    module = ScaleRL(model, "scalerl_core", overrides=[*SMALL, *overrides])
    trainer = Trainer(max_steps=steps, callbacks=[Evaluate(2, 2)], **{**quiet(), **options})
    trainer.fit(module, datamodule=RolloutDataModule(task_of(rewards)))
    return module


@pytest.mark.parametrize("grade_s", [0.0, 40.0])
def test_a_run_grades_whole_groups(grade_s: float, tiny_model_path: str) -> None:
    """A group has four completions of one prompt in training, and two in an evaluation."""
    sizes: list[tuple[int, int]] = []

    def record_sizes(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        sizes.append((len(completions), len(set(prompts))))
        return [len(text) / 10 for text in completions]

    overrides = ["verify.workers=0", f"cost_model.grade_s={grade_s}"]
    module = fit_task(tiny_model_path, record_sizes, *overrides)
    assert module.completed_steps == 2
    assert {prompts for _, prompts in sizes} == {1} and {count for count, _ in sizes} == {2, 4}


def test_rewards_per_group_and_per_completion_train_equal_weights(tiny_model_path: str) -> None:
    """A function that looks at each completion alone gives the same run, whether it is called with a group or not."""

    def by_list(completions: list[str], **kwargs: Any) -> list[float]:
        return [text.count("1") / max(1, len(text)) for text in completions]

    def by_one(completion: str, answer: str) -> float:
        return completion.count("1") / max(1, len(completion))

    weights = [
        {
            name: value.clone()
            for name, value in fit_task(tiny_model_path, function, "verify.workers=0").state_dict().items()
        }
        for function in (by_list, by_one)
    ]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])


@pytest.mark.slow
def test_a_script_with_its_own_reward_function(tiny_model_path: str, tmp_path: Path) -> None:
    """A function of `__main__`, which no other process can import, grades in verifier processes."""
    script = tmp_path / "mine.py"
    script.write_text(
        f"""
from lightning.pytorch import Trainer
from lightning_scalerl import DatasetTask, RolloutDataModule, ScaleRL

def reward(completions, **kwargs):
    return [float(len(completions)) for _ in completions]

if __name__ == "__main__":
    rows = [{{"prompt": f"{{n}}+{{n}}="}} for n in range(9)]
    module = ScaleRL({tiny_model_path!r}, "scalerl_core", overrides={[*SMALL]!r})
    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    task = DatasetTask(train=rows, heldout=rows[:2], leaks="keep", rewards=reward)
    trainer.fit(module, datamodule=RolloutDataModule(task))
    print("reward", float(trainer.callback_metrics["train/reward"]))
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert "reward 7.0" in done.stdout, "a reward of 4 is 7 on the recipe's scale, which maps 0 and 1 to -1 and 1"


def test_a_changed_reward_function_is_refused_when_a_run_continues(tiny_model_path: str) -> None:
    module = fit_task(tiny_model_path, accuracy, "verify.workers=0", steps=1)
    trainer = Trainer(max_steps=2, **quiet())
    with pytest.raises(ConfigurationError, match="task would change now"):
        trainer.fit(module, datamodule=RolloutDataModule(task_of(shortest)))


def test_names_of_functions(tiny_model_path: str) -> None:
    names: Sequence[Sequence[str]] = task_of([accuracy, shortest]).reward_sums()
    assert names == [["accuracy", "shortest"]]
