"""What one training step looked like. Rates are sums over sums, never means of means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_scalerl.axes.loss.base import importance_ratio
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollout import Part, Rollout, TrainBatch


def step_metrics(batch: TrainBatch, parts: Sequence[Part], choices: Choices, completed_steps: int) -> dict[str, float]:
    """Metrics of the step on `batch`, which `completed_steps` steps went before."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    return {
        "train/pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "train/reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
        "train/completion_tokens": tokens / len(rollouts),
        "train/truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "train/interrupted": sum(any(rollout.forced) for rollout in rollouts) / len(rollouts),
        "train/forced_tokens": sum(sum(rollout.forced) for rollout in rollouts) / tokens,
        "train/groups_kept": batch.denominators.prompts / len(batch.groups),
        **staleness(rollouts, completed_steps),
        **_credited_token_metrics(batch, parts, choices),
    }


def staleness(rollouts: Sequence[Rollout], completed_steps: int) -> dict[str, float]:
    """Optimizer steps between the weights that sampled a token and those it trains: mean, 95th percentile, maximum.

    A token's staleness is what passed while its rollout was in flight (up to its last token) and what passed
    while the rollout was queued (from then on); the parts are given as well.
    """
    versions = np.array([version for rollout in rollouts for version in rollout.weight_versions])
    lengths = [len(rollout.tokens) for rollout in rollouts]
    last = np.repeat([rollout.weight_versions[-1] for rollout in rollouts], lengths)
    metrics = {}
    for name, steps in (
        ("staleness", completed_steps - versions),
        ("staleness_in_flight", last - versions),
        ("staleness_queued", completed_steps - last),
    ):
        metrics[f"train/{name}_mean"] = float(steps.mean())
        metrics[f"train/{name}_p95"] = float(np.percentile(steps, 95, method="inverted_cdf"))
        metrics[f"train/{name}_max"] = float(steps.max())
    return metrics


def _credited_token_metrics(batch: TrainBatch, parts: Sequence[Part], choices: Choices) -> dict[str, float]:
    tokens = max(1.0, batch.denominators.tokens)
    sums = dict.fromkeys(("entropy", "clip_fraction", "logprob_gap", "ratio_mean"), 0.0)
    largest = 0.0
    for micro_batch, trainer_logprobs, entropies in parts:
        mask = micro_batch.loss_mask
        anchor = choices.correction.anchor(micro_batch)
        ratio = importance_ratio(trainer_logprobs, anchor)
        gap = (trainer_logprobs - micro_batch.generator_logprobs).abs()
        clipped = choices.loss.clipped(trainer_logprobs, anchor, micro_batch.advantages, mask)
        sums["entropy"] += float((entropies * mask).sum())
        sums["clip_fraction"] += float((clipped * mask).sum())
        sums["logprob_gap"] += float((gap * mask).sum())
        sums["ratio_mean"] += float((ratio * mask).sum())
        largest = max(largest, float((ratio * mask).max()))
    return {**{f"train/{name}": value / tokens for name, value in sums.items()}, "train/ratio_max": largest}
