"""Completions of prompts under a module's current weights, with their rewards: what `Trainer.predict` returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_scalerl.callbacks.evaluate import EvaluationStoppedError, sampled
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.run import Run
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.random_streams import PREDICTION_STREAM
from lightning_scalerl.task.base import passes
from lightning_scalerl.verify.grade import Outcome, Sample

# Name of the set of prompts that `Trainer.predict` samples completions of.
PREDICT = "predict"


# Not frozen: Lightning goes through the fields of what `predict_step` returns.
@dataclass
class Completion:
    """One sampled completion of a prompt, with its reward.

    Attributes:
        text: the whole of it, without special tokens.
        answer: what follows the end of thinking.
        reward: by the task's rewards; None where it abstains, cannot grade, or knows nothing of the prompt.
        correct: whether it counts as a pass; None where there is no reward.
        truncated: whether it hit the limit of `context.max_new_tokens`.
        why: reason why there is no reward.
    """

    text: str
    answer: str
    reward: float | None
    correct: bool | None
    truncated: bool
    why: str = ""


@dataclass
class Prediction:
    """Prompt with the completions that were sampled of it.

    Attributes:
        prompt: as it was given: the text, of a conversation the last message.
        completions: as many as were asked for.
    """

    prompt: str
    completions: Sequence[Completion]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Prediction:
        """Return the prediction that `asdict` has made plain."""
        return cls(plain["prompt"], tuple(Completion(**each) for each in plain["completions"]))


UNKNOWN = Outcome(
    "abstain",
    why="the prompt is none of the task's, so there is no answer to compare with; give a row of the task's form",
)


def predicted(module: Any) -> Sequence[Prediction]:
    """Return the predictions for the prompts that a module's Trainer was given, the same on every rank."""
    data = module.trainer.datamodule
    plain = module.ranks.share(
        lambda: [
            asdict(each)
            for each in predictions(module, module.eval_sets[PREDICT], data.predicted.unknown, data.samples)
        ]
    )
    return [Prediction.of(each) for each in plain]


def predictions(run: Run, prompts: PromptSet, unknown: Collection[str], samples: int) -> list[Prediction]:
    """Sample completions of each prompt, and grade those of prompts that the task knows. On rank 0.

    Args:
        run: with the weights to sample from.
        prompts: with their tokens.
        unknown: ids of those that the task knows nothing of.
        samples: completions a prompt.

    Raises:
        EvaluationStoppedError: the run was asked to stop.
    """
    requests = [
        GroupRequest(place, tuple(tokens), samples, (PREDICTION_STREAM, place, run.completed_steps, run.seed))
        for place, tokens in enumerate(prompts.tokens)
    ]
    ungraded = {place for place, prompt in enumerate(prompts.prompts) if prompt.prompt_id in unknown}
    completions: list[list[Completion]] = [[] for _ in requests]
    with run.meter.phase("evaluate"), run.generating() as generator, run.verifying() as verifiers:
        generator.publish(run.trained.weights(), run.completed_steps)
        submitted = sampled(run, prompts.prompts, requests, generator, verifiers, "predict", ungraded)
        if submitted is None:
            raise EvaluationStoppedError(f"step {run.completed_steps}: asked to stop in the middle of a prediction")
        for each in submitted:
            outcome = UNKNOWN if each.ticket is None else verifiers.wait(each.ticket)
            completions[each.place].append(_completion(run, each.sample, outcome))
    return [Prediction(prompt.text, mine) for prompt, mine in zip(prompts.prompts, completions, strict=True)]


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
