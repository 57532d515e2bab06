"""`Trainer.predict`: completions of prompts and their rewards, from the trained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_scalerl import (
    Completion,
    ConfigurationError,
    DatasetTask,
    Prediction,
    Prompt,
    RolloutDataModule,
    ScaleRL,
)
from lightning_scalerl.task.base import Task
from tests.helpers import SMALL, CountingTask, fit, quiet


def length(completions: list[str], goal: list[int], **kwargs: Any) -> list[float]:
    """Reward the length of a completion as a share of the row's goal."""
    return [len(text) / row_goal for text, row_goal in zip(completions, goal, strict=True)]


ROWS = [{"prompt": f"{n}+{n}=", "goal": n + 1} for n in range(8)]


def predict(module: ScaleRL, task: Task | None = None, **given: Any) -> list[Prediction]:
    data = RolloutDataModule(task or CountingTask(), **given)
    return Trainer(**quiet()).predict(module, datamodule=data)  # type: ignore[return-value]


def new_module(model: str) -> ScaleRL:
    return ScaleRL(model, "scalerl_core", overrides=[*SMALL, "verify.workers=0"])


def test_without_prompts_the_held_out_set_is_predicted(tiny_model_path: str) -> None:
    module = fit(tiny_model_path, steps=1)
    predictions = predict(module, samples=3)
    assert [each.prompt for each in predictions] == ["8+8=", "9+9=", "10+10="]
    assert [len(each.completions) for each in predictions] == [3, 3, 3]
    for each in (completion for prediction in predictions for completion in prediction.completions):
        assert isinstance(each, Completion) and each.text
        assert each.reward == each.text.count("1") / len(each.text) and each.correct == (each.reward >= 0.1)
    assert predictions == predict(module, samples=3), "the same weights, the same completions"
    assert module.completed_steps == 1


def test_predict_does_not_change_a_later_fit(tiny_model_path: str) -> None:
    whole, parts = fit(tiny_model_path, steps=2), new_module(tiny_model_path)
    for steps in (1, 2):
        Trainer(max_steps=steps, **quiet()).fit(parts, datamodule=RolloutDataModule(CountingTask()))
        predict(parts, samples=2)
    assert all(bool((whole.state_dict()[name] == value).all()) for name, value in parts.state_dict().items())


def test_a_users_own_prompts(tiny_model_path: str) -> None:
    """Prompts of the task, rows with its columns and `Prompt`s are graded. An unknown text is not."""
    task = DatasetTask(train=ROWS[:6], heldout=ROWS[6:], rewards=length)
    prompts = ["2+2=", "what?", {"prompt": "3*3=", "goal": 100}, Prompt("x", "5-5=", columns={"goal": 1000})]
    known, unknown, row, prompt = predict(new_module(tiny_model_path), task, predict=prompts, samples=2)
    for prediction, goal in ((known, 3), (row, 100), (prompt, 1000)):
        assert [each.reward for each in prediction.completions] == [
            len(each.text) / goal for each in prediction.completions
        ]
    assert [each.reward for each in unknown.completions] == [None, None]
    assert "none of the task's" in unknown.completions[0].why and unknown.completions[0].correct is None
    assert [each.prompt for each in (known, unknown, row, prompt)] == ["2+2=", "what?", "3*3=", "5-5="]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"^predict: \[\] must be a list of prompts"),
        ("what?", r"^predict: 'what\?' must be a list"),
        (["2+2=", " "], "^predict: entry 1 is blank"),
        ([[{"role": "user", "content": None}]], "^predict: entry 0 is blank"),
        ([3], "^predict: entry 0, '3', must be a text, a list of messages"),
        ([{"prompt": "1+1="}], "^predict: entry 0, .* a row of a DatasetTask's form"),
    ],
)
def test_bad_prompts_are_refused(tiny_model_path: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        predict(new_module(tiny_model_path), predict=given)


def test_samples_are_a_whole_number() -> None:
    with pytest.raises(ConfigurationError, match=r"^samples: 0 must be a whole number"):
        RolloutDataModule(CountingTask(), samples=0)


def test_a_completion_that_cannot_be_graded_has_a_reason(tiny_model_path: str) -> None:
    class Fails(CountingTask):
        def reward(self, prompt: Prompt, completion: str) -> float:
            raise LookupError("no gold")

        def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
            return {"heldout": self.pool[-1:]}

    ((completion,),) = [each.completions for each in predict(new_module(tiny_model_path), Fails())]
    assert completion.reward is None and completion.why == "raised LookupError: no gold"
