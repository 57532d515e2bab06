"""Results of `Trainer.predict`: completions of prompts under the current weights, with their rewards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_scalerl.callbacks.evaluate import EvaluationStoppedError, sample_and_submit
from lightning_scalerl.callbacks.run import Run
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.random_streams import PREDICTION_STREAM
from lightning_scalerl.task.base import passes

# Name of the set of prompts that `Trainer.predict` uses.
PREDICT = "predict"


# Not frozen, because Lightning copies the dataclasses that `predict_step` returns, and sets fields of the copies.
@dataclass
class Completion:
    """One sampled completion of a prompt, with its reward.

    Attributes:
        text: the whole completion, without special tokens.
        answer: the text after the end of thinking.
        reward: the task's reward; None if the grader abstains or fails, or if the prompt is not one of the task's.
        correct: whether it counts as a pass; None without a reward.
        truncated: whether it reached the limit `context.max_new_tokens`.
        why: why there is no reward; "" if there is one.
    """

    text: str
    answer: str
    reward: float | None
    correct: bool | None
    truncated: bool
    why: str = ""


@dataclass
class Prediction:
    """A prompt with its sampled completions.

    Attributes:
        prompt: text of the prompt; of a conversation, its last message.
        completions: `RolloutDataModule.samples` sampled completions.
    """

    prompt: str
    completions: Sequence[Completion]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Prediction:
        """Make a prediction from the plain values that `asdict` returned for it."""
        return cls(plain["prompt"], tuple(Completion(**fields) for fields in plain["completions"]))


UNKNOWN = Outcome(
    "abstain",
    why="the prompt is none of the task's, so there is no answer to compare with; give a row of the task's form",
)


def predicted(module: Any) -> Sequence[Prediction]:
    """Return the predictions for the prompts of the Trainer's datamodule, on every rank."""
    data = module.trainer.datamodule
    # Rank 0 predicts. The other ranks receive the predictions as plain values.
    plain = module.ranks.share(
        lambda: [
            asdict(prediction)
            for prediction in predictions(module, module.eval_sets[PREDICT], data.predicted.unknown, data.samples)
        ]
    )
    return [Prediction.of(values) for values in plain]


def predictions(run: Run, prompts: PromptSet, unknown: Collection[str], samples: int) -> list[Prediction]:
    """Sample completions of each prompt on rank 0, and grade those of prompts that the task knows.

    Args:
        run: the run whose weights are sampled from.
        prompts: the prompts and their tokens.
        unknown: ids of prompts that the task does not know.
        samples: completions per prompt.

    Raises:
        EvaluationStoppedError: a stop was requested.
    """
    requests = [
        GroupRequest(
            prompt_index, tuple(tokens), samples, (PREDICTION_STREAM, prompt_index, run.completed_steps, run.seed)
        )
        for prompt_index, tokens in enumerate(prompts.tokens)
    ]
    ungraded = {prompt_index for prompt_index, prompt in enumerate(prompts.prompts) if prompt.prompt_id in unknown}
    completions: list[list[Completion]] = [[] for _ in requests]
    with run.meter.phase("evaluate"), run.generating() as generator, run.verifying() as verifiers:
        generator.publish(run.trained.weights(), run.completed_steps)
        submitted = sample_and_submit(run, prompts.prompts, requests, generator, verifiers, "predict", ungraded)
        if submitted is None:
            raise EvaluationStoppedError(f"step {run.completed_steps}: asked to stop in the middle of a prediction")
        for entry in submitted:
            outcome = UNKNOWN if entry.ticket is None else verifiers.wait(entry.ticket)
            completions[entry.prompt_index].append(_completion(run, entry.sample, outcome))
    return [Prediction(prompt.text, group) for prompt, group in zip(prompts.prompts, completions, strict=True)]


def _completion(run: Run, sample: Sample, outcome: Outcome) -> Completion:
    scored = outcome.kind == "score"
    return Completion(
        text=sample.completion,
        answer=sample.answer,
        reward=outcome.reward if scored else None,
        correct=passes(run.task, outcome) if scored else None,
        truncated=sample.truncated,
        why=outcome.why,
    )
