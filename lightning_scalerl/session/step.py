"""Measurements of one training step on rank 0: log-probability gaps, mechanism counters, and the step's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.measure.probe import logprob_gaps
from lightning_scalerl.measure.step_metrics import Pass, step_metrics
from lightning_scalerl.rollouts.rollout import TrainBatch, whole
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.updates import Updates
from lightning_scalerl.update.health import truncated_at_context_limit


def generator_gaps(path: DataPath, batch: TrainBatch, first_pass: Pass) -> Tensor:
    """Return log-probability gaps between trainer and generator before the first update; empty if not finite."""
    if not first_pass.finite:  # NaN or infinity from the trainer: no comparison with the generator is possible
        return torch.zeros(0)
    trainer_logprobs, _ = whole(batch, first_pass.parts)
    scorer = path.generator if path.driver.may_probe else None
    trained, size = path.stage.models.trained, path.stage.recipe.batch.pass_size
    version = path.stream.completed_steps
    return logprob_gaps(batch, trainer_logprobs, trained, version, size, scorer, lambda: _probing(path))


def count_mechanisms(path: DataPath, batch: TrainBatch, passes: Sequence[Pass]) -> None:
    """Count, for each axis that differs from the recipe, whether the difference had an effect in this step."""
    if path.mechanism.axes:
        last, first = (whole(batch, each.parts)[0] for each in (passes[-1], passes[0]))
        path.mechanism.observe(batch, last, first)


@contextmanager
def _probing(path: DataPath) -> Iterator[None]:
    """Count the time of a generator probe as the meter phase `driver.probe_phase`."""
    with path.meter.phase(path.driver.probe_phase), path.driver.probing():
        yield


def metrics_of(path: DataPath, updates: Updates, batch: TrainBatch, passes: Sequence[Pass]) -> dict[str, Any]:
    """Return the metrics of the step on `batch`, except the gaps to the generator."""
    steps, stage = path.stream.completed_steps, path.stage
    metrics = step_metrics(batch, passes, stage.choices, steps - 1, path.stream.dropped_for_batch)
    clip = stage.recipe.optimizer.clip_norm
    clipped = [clip is not None and float(each.norms["gradient_norm"]) > clip for each in passes]
    return {
        "train/learning_rate": updates.learning_rate,
        "train/epoch": path.prompts.epoch,
        "train/prompts_retired": path.prompts.retired,
        **metrics,
        "train/gradient_clipped": sum(clipped) / len(clipped),
        **path.meter.reward_rate(sum(float(group.rewards.sum()) for group in batch.groups)),
        **path.stream.watch.metrics(),
        **updates.skipped.metrics(),
        **({"train/loss_scale": updates.loss_scale.factor} if updates.loss_scale.enabled else {}),
        **path.alarm.observe(truncated_at_context_limit(metrics), steps),
        **path.mechanism.metrics(),
    }
