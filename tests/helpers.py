"""Tasks and short runs that several tests use."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.axes.advantage import GroupAdvantage
from lightning_scalerl.axes.aggregation import PromptAggregation
from lightning_scalerl.axes.allocation import FixedAllocation
from lightning_scalerl.axes.async_mode import OnPolicy
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Behaviour
from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.axes.length_control import NoLengthControl
from lightning_scalerl.axes.loss import CISPO
from lightning_scalerl.axes.normalization import NoNormalization
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.axes.resampling import UniformResampling
from lightning_scalerl.axes.truncated import KeepTruncated
from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, newest_checkpoint
from lightning_scalerl.callbacks.evaluate import Evaluate
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.choices import Choices
from lightning_scalerl.generator.base import FinishedRollout
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, Rollout
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task
from lightning_scalerl.verify.inline import InlineVerifiers
from sweeps.run.journal import read_journal
from tests.counting import CountingTask

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

# One failure of a verifier ends the run.
STRICT = ("verify.on_error=stop", "verify.retries=0")

SMALL = (
    "scale=arithmetic",
    "batch.prompts=3",
    "batch.completions=4",
    "batch.micro_batch=5",
    "context.max_new_tokens=9",
    "thinking.interrupt_from=4",
    "thinking.interrupt_to=6",
    "generator.slots=7",
    "optimizer.lr=3e-3",
    "async_mode.k=3",
)
# Label of a run of recipe scalerl_core with the overrides in SMALL: only the last one is on an axis.
SMALL_CORE = "scalerl_core+async_mode.k=3"


def row(*chosen: DesignChoice) -> Choices:
    """Complete the given choices to one per axis, with the neutral choice or else the simplest one."""
    plain: list[DesignChoice] = [
        UniformResampling(),
        FixedAllocation(),
        OnPolicy(),
        NoLengthControl(),
        KeepTruncated(),
        NoFilter(),
        GroupAdvantage(),
        NoNormalization(),
        Precision("fp32", fp32_head_trainer=True, fp32_head_generator=True),
        Behaviour(),
        CISPO(max_ratio=5.0),
        PromptAggregation(),
    ]
    claimed = {choice.axis for choice in chosen}
    return Choices.of([*chosen, *(choice for choice in plain if choice.axis not in claimed)])


def make_group(
    rewards: Sequence[float],
    admission: int = 0,
    version: int = 0,
    seed: int = 0,
    prompt_length: int = 4,
    length: int | None = None,
) -> Group:
    """Make a group with these rewards and random log-probabilities. Lengths are random unless `length` is given."""
    source = random.Random(f"{seed} {admission}")
    rollouts = []
    for reward in rewards:
        tokens = source.randint(1, 7) if length is None else length
        rollouts.append(
            Rollout(
                tokens=[source.randint(1, 15) for _ in range(tokens)],
                generator_logprobs=[-source.uniform(0.05, 3.0) for _ in range(tokens)],
                weight_versions=[version] * tokens,
                sources=[0] * tokens,
                finish_reason="stop",
                reward=reward,
                correct=reward >= 1,
            )
        )
    prompt = Prompt(f"p{admission}", "1+1=", "2")
    return Group(admission, prompt, [source.randint(1, 15) for _ in range(prompt_length)], rollouts)


def sampler(decode: Callable[[list[int]], str]) -> Callable[[Prompt, Rollout, int], Sample]:
    """Return the function with which a stream turns rollouts into samples."""

    def sample(prompt: Prompt, rollout: Rollout, step: int) -> Sample:
        text = decode(rollout.tokens)
        return Sample(prompt, text, text, tuple(rollout.tokens), rollout.truncated, step)

    return sample


def inline(stream: RolloutStream) -> InlineVerifiers:
    """Verifiers that grade a stream's rollouts in this process."""
    return InlineVerifiers(stream.task.grader())


def grade(stream: RolloutStream, finished: FinishedRollout) -> None:
    """Report a finished rollout to the stream and grade it immediately."""
    verifiers = inline(stream)
    for place, sample in stream.ended(finished):
        stream.graded(place, verifiers.wait(verifiers.submit(sample)))


def quiet() -> dict[str, Any]:
    """Options of the Trainer that turn off progress output, logging and checkpoints."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


def fit(
    model_path: str,
    run_dir: Path | None = None,
    steps: int = 4,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
    task: Task | None = None,
    seed: int = 0,
    checkpoint_every: int = 1000,
    resume: bool = False,
    recipe: str = "scalerl_core",
    **options: Any,
) -> ScaleRL:
    """Train a tiny model for a few steps. With a run directory, write a journal and checkpoints there.

    `options` are passed to the Trainer.
    """
    module = ScaleRL(model_path, recipe, overrides=[*SMALL, *overrides])
    run_callbacks: list[Any] = []
    resume_from = None
    if run_dir is not None:
        run_callbacks = [
            Evaluate(2, 2),
            RunLog(run_dir),
            ResumableCheckpoint(run_dir / "checkpoints", checkpoint_every),
        ]
        resume_from = newest_checkpoint(run_dir / "checkpoints").path if resume else None
    trainer = Trainer(
        max_steps=steps,
        callbacks=[*callbacks, *run_callbacks],
        **{**quiet(), "enable_checkpointing": run_dir is not None, **options},
    )
    datamodule = RolloutDataModule(task or CountingTask(), seed=seed)
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume_from, weights_only=True)
    return module


@cache
def undisturbed(
    model_path: str,
    steps: int,
    choice: Callable[[], DesignChoice] | None = None,
    checkpoint_every: int = 1000,
    recipe: str = "scalerl_core",
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the journal, without wall-clock times, and the final weights of an uninterrupted run.

    Many tests compare with the same run, so results are cached per process. `choice` is part of the cache's key: pass
    a module-level function.
    """
    with tempfile.TemporaryDirectory() as folder:
        choices = [] if choice is None else [choice()]
        module = fit(
            model_path, Path(folder), steps, choices, checkpoint_every=checkpoint_every, recipe=recipe
        )  # fmt: skip
        return read_journal(Path(folder)).deterministic(), list(module.policy.state_dict().values())
