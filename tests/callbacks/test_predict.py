"""Trainer.predict: prompts in, completions with rewards out, of the weights that were trained."""

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
    """A share of the longest; by the row's own goal."""
    return [len(text) / of for text, of in zip(completions, goal, strict=True)]


ROWS = [{"prompt": f"{n}+{n}=", "goal": n + 1} for n in range(8)]


def predicted(module: ScaleRL, task: Task | None = None, **given: Any) -> list[Prediction]:
    data = RolloutDataModule(task or CountingTask(), **given)
    return Trainer(**quiet()).predict(module, datamodule=data)  # type: ignore[return-value]


def made(model: str) -> ScaleRL:
    return ScaleRL(model, "scalerl_core", overrides=[*SMALL, "verify.workers=0"])


def test_without_prompts_it_is_the_held_out_set(tiny_model_path: str) -> None:
    module = fit(tiny_model_path, steps=1)
    found = predicted(module, samples=3)
    assert [each.prompt for each in found] == ["8+8=", "9+9=", "10+10="]
    assert [len(each.completions) for each in found] == [3, 3, 3]
    for each in (completion for prediction in found for completion in prediction.completions):
        assert isinstance(each, Completion) and each.text
        assert each.reward == each.text.count("1") / len(each.text) and each.correct == (each.reward >= 0.1)
    assert found == predicted(module, samples=3), "the same weights, the same completions"
    assert module.completed_steps == 1


def test_a_fit_goes_on_after_it_as_if_nothing_had_been(tiny_model_path: str) -> None:
    whole, parts = fit(tiny_model_path, steps=2), made(tiny_model_path)
    for steps in (1, 2):
        Trainer(max_steps=steps, **quiet()).fit(parts, datamodule=RolloutDataModule(CountingTask()))
        predicted(parts, samples=2)
    assert all(bool((whole.state_dict()[name] == value).all()) for name, value in parts.state_dict().items())


def test_prompts_of_ones_own(tiny_model_path: str) -> None:
    """One of the task's own is graded; of another nothing is known; a row of the task's form brings what is needed."""
    task = DatasetTask(train=ROWS[:6], heldout=ROWS[6:], rewards=length)
    given = ["2+2=", "what?", {"prompt": "3*3=", "goal": 100}, Prompt("x", "5-5=", columns={"goal": 1000})]
    own, strange, row, prompt = predicted(made(tiny_model_path), task, predict=given, samples=2)
    for prediction, goal in ((own, 3), (row, 100), (prompt, 1000)):
        assert [each.reward for each in prediction.completions] == [
            len(each.text) / goal for each in prediction.completions
        ]
    assert [each.reward for each in strange.completions] == [None, None]
    assert "none of the task's" in strange.completions[0].why and strange.completions[0].correct is None
    assert [each.prompt for each in (own, strange, row, prompt)] == ["2+2=", "what?", "3*3=", "5-5="]


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
def test_what_is_no_prompt(tiny_model_path: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        predicted(made(tiny_model_path), predict=given)


def test_samples_are_a_whole_number() -> None:
    with pytest.raises(ConfigurationError, match=r"^samples: 0 must be a whole number"):
        RolloutDataModule(CountingTask(), samples=0)


def test_what_cannot_be_graded_says_why(tiny_model_path: str) -> None:
    class Fails(CountingTask):
        def reward(self, prompt: Prompt, completion: str) -> float:
            raise LookupError("no gold")

        def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
            return {"heldout": self.pool[-1:]}

    ((completion,),) = [each.completions for each in predicted(made(tiny_model_path), Fails())]
    assert completion.reward is None and completion.why == "raised LookupError: no gold"
