"""Measurements of one training step on rank 0: gaps to the generator, mechanism counters, and the step's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.measure.probe import logprob_gaps
from lightning_scalerl.measure.step_metrics import Pass, step_metrics
from lightning_scalerl.rollouts.rollout import TrainBatch, whole
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.update.health import at_the_limit


def generator_gaps(module: Parts, batch: TrainBatch, done: Pass) -> Tensor:
    """Return the log-probability gaps between trainer and generator before the first update, on rank 0."""
    if not done.finite:  # a skipped update, whose numbers say nothing about the generator
        return torch.zeros(0)
    trainer_logprobs, _ = whole(batch, done.parts)
    asked = module.generator if module.driver.may_probe else None
    size = module.recipe.batch.a_pass
    return logprob_gaps(
        batch, trainer_logprobs, module.trained, module.completed_steps, size, asked, lambda: _asking(module)
    )


def count_mechanisms(module: Parts, batch: TrainBatch, passes: Sequence[Pass]) -> None:
    """Count the axes that depart from the recipe and had an effect in this step, on rank 0."""
    if module.mechanism.axes:
        last, first = (whole(batch, each.parts)[0] for each in (passes[-1], passes[0]))
        module.mechanism.observe(batch, last, first)


@contextmanager
def _asking(module: Parts) -> Iterator[None]:
    """Record the time of a generator probe under the driver's phase."""
    with module.meter.phase(module.driver.probe_phase), module.driver.asking():
        yield


def metrics_of(module: Parts, batch: TrainBatch, passes: Sequence[Pass]) -> dict[str, Any]:
    """Return the metrics of the step on `batch`, on rank 0, except the gaps to the generator."""
    assert module.optimizer is not None
    metrics = step_metrics(batch, passes, module.choices, module.completed_steps - 1, module.stream.dropped_for_batch)
    clip = module.recipe.optimizer.clip_norm
    clipped = [clip is not None and float(each.norms["gradient_norm"]) > clip for each in passes]
    return {
        "train/learning_rate": module.optimizer.param_groups[0]["lr"],
        "train/epoch": module.prompts.epoch,
        "train/prompts_retired": module.prompts.retired,
        **metrics,
        "train/gradient_clipped": sum(clipped) / len(clipped),
        **module.meter.reward_rate(sum(float(group.rewards.sum()) for group in batch.groups)),
        **module.stream.watch.metrics(),
        **module.skipped.metrics(),
        **({"train/loss_scale": module.loss_scale.factor} if module.loss_scale.acts else {}),
        **module.alarm.observe(at_the_limit(metrics), module.completed_steps),
        **module.mechanism.metrics(),
    }
