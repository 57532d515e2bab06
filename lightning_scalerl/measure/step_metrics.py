"""Metrics of one training step. Rates are sums over sums, never means of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.axes.filter import has_variance
from lightning_scalerl.axes.loss.base import importance_ratio
from lightning_scalerl.choice import MAX_LOG_RATIO
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollout import Part, Rollout, Scored, TrainBatch
from lightning_scalerl.update.terms import distances


@dataclass(frozen=True)
class Pass:
    """One pass over a batch: its parts as scored, each term's total, gradient norms, and whether all were finite."""

    parts: Sequence[Part]
    totals: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    finite: bool = True


@dataclass
class Rate:
    """Rate that adds up as sums over sums, however its data is split."""

    numerator: float = 0.0
    denominator: float = 0.0

    def add(self, numerator: float, denominator: float) -> None:
        """Add one more share to numerator and denominator."""
        self.numerator += numerator
        self.denominator += denominator

    @property
    def value(self) -> float:
        """Numerator over denominator; 0 if the denominator is 0."""
        return self.numerator / self.denominator if self.denominator else 0.0


def step_metrics(
    batch: TrainBatch, passes: Sequence[Pass], choices: Choices, completed_steps: int, dropped: int = 0
) -> dict[str, float]:
    """Return the metrics of the step on `batch`, before which `completed_steps` steps were done.

    `dropped` groups were sampled for it too, and replaced.
    What compares trainer and generator, and entropy, are of the first pass; what the loss does is of all passes.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    everything = [rollout for group in batch.groups for rollout in group.sampled]
    ungraded = len(everything) - len(rollouts)
    constant = sum(not has_variance(group.rewards) for group in batch.groups)
    sampled = len(batch.groups) + dropped
    metrics = {
        **(_reward_metrics(rollouts, choices) if rollouts else {}),
        **_length_metrics(everything, choices, batch),
        **_part_metrics(rollouts),
        **({"train/ungraded": ungraded / len(everything)} if ungraded else {}),
        "train/groups_kept": batch.denominators.prompts / len(batch.groups),
        "train/credited_prompts": batch.denominators.prompts,
        "train/credited_rollouts": batch.denominators.samples,
        "train/credited_tokens": batch.denominators.tokens,
        "train/zero_variance": (constant + dropped) / sampled,
        **({"train/groups_dropped": dropped / sampled} if choices.filter.refills else {}),
        **staleness(everything, completed_steps),
        **_loss_metrics(passes),
        **_first_pass_metrics(batch, passes[0].parts, choices),
        **_ratio_metrics(batch, passes, choices),
    }
    # Values of a pass that was not finite are no measurement, and are left out.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _reward_metrics(rollouts: Sequence[Rollout], choices: Choices) -> dict[str, float]:
    """Return means over the rollouts that have a score."""
    staged = sum(rollout.staged for rollout in rollouts) / len(rollouts)
    return {
        "train/pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "train/reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
        **({"train/rewards_staged": staged} if choices.curriculum.weighs_rewards else {}),
    }


def _length_metrics(rollouts: Sequence[Rollout], choices: Choices, batch: TrainBatch) -> dict[str, float]:
    """Return metrics of length over all rollouts, graded or not."""
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    return {
        "train/completion_tokens": tokens / len(rollouts),
        "train/truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        **_cut_by_stage(rollouts, choices, batch.denominators.max_tokens),
        "train/interrupted": sum(any(rollout.forced) for rollout in rollouts) / len(rollouts),
        "train/forced_tokens": sum(sum(rollout.forced) for rollout in rollouts) / tokens,
    }


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each extra number that graders gave, over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            found.setdefault(name, []).append(value)
    return {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}


def _cut_by_stage(rollouts: Sequence[Rollout], choices: Choices, limit: float) -> dict[str, float]:
    """Return the share of rollouts cut by the curriculum before the context's limit; empty where it cuts none.

    They are part of `train/truncated`, for they are credited as such; alarms leave them out.
    """
    if choices.curriculum.max_new_tokens(int(limit), 0) == limit:
        return {}
    cut = sum(rollout.truncated and len(rollout.tokens) < limit for rollout in rollouts)
    return {"train/cut_by_stage": cut / len(rollouts)}


def _loss_metrics(passes: Sequence[Pass]) -> dict[str, float]:
    """Return means over passes; with several terms, each one apart as well."""
    finite = [each for each in passes if each.finite]
    if not finite:
        return {}
    names = list(finite[0].totals)
    totals = {name: sum(float(each.totals[name]) for each in finite) / len(finite) for name in names}
    metrics = {"train/loss": sum(totals.values())}
    if len(names) > 1:
        metrics |= {f"train/loss_{name}": total for name, total in totals.items()}
    for name in finite[0].norms:
        metrics[f"train/{name}"] = sum(float(each.norms[name]) for each in finite) / len(finite)
    return metrics


def staleness(rollouts: Sequence[Rollout], completed_steps: int) -> dict[str, float]:
    """Return steps between the weights that sampled a token and those it trains: mean, 95th percentile, maximum.

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


def _first_pass_metrics(batch: TrainBatch, parts: Sequence[Part], choices: Choices) -> dict[str, float]:
    """Return metrics of the weights before the update: entropy, and the trainer's gap to the generator, untruncated."""
    tokens = batch.denominators.tokens
    sums = dict.fromkeys(("entropy", "logprob_gap", "mismatch_kl"), 0.0)
    weight = square = 0.0
    scored = [Scored(*part).inside() for part in parts]
    for part in scored:
        mask = part.batch.loss_mask
        gap = part.trainer_logprobs - part.batch.generator_logprobs
        ratio = importance_ratio(part.trainer_logprobs, part.batch.generator_logprobs)
        sums["entropy"] += float((part.entropies * mask).sum())
        sums["logprob_gap"] += float((gap.abs() * mask).sum())
        sums["mismatch_kl"] += float(((torch.expm1(gap.clamp(max=MAX_LOG_RATIO)) - gap) * mask).sum())
        weight += float((ratio * mask).sum())
        square += float((ratio.square() * mask).sum())
    metrics = {f"train/{name}": Rate(value, tokens).value for name, value in sums.items()}
    # (sum w)^2 / (n sum w^2): 1 where all tokens weigh the same. Kish 1965.
    metrics["train/effective_samples"] = Rate(weight * weight, tokens * square).value
    if batch.reference_logprobs is not None:
        distance = Rate()
        for part in scored:
            mask = part.batch.loss_mask
            distance.add(float((distances(part, choices) * mask).sum()), float(mask.sum()))
        metrics["train/kl"] = distance.value
    if batch.values is not None and batch.returns is not None:
        metrics["train/explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
    return metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over credited tokens; 0 for constant returns. Shapes: (R, T)."""
    wanted, found = returns[mask > 0].double(), values[mask > 0].double()
    if wanted.numel() < 2 or not float(wanted.var()) > 0:
        return 0.0
    return float(1 - (wanted - found).var() / wanted.var())


def _ratio_metrics(batch: TrainBatch, passes: Sequence[Pass], choices: Choices) -> dict[str, float]:
    """Return metrics of the ratio that the loss is given, over all passes."""
    clip, mean = Rate(), Rate()
    lowest, largest = math.inf, 0.0
    for each in passes:
        for part in each.parts:
            scored = Scored(*part).inside()
            mask = scored.batch.loss_mask
            anchor = choices.correction.anchor(scored.batch)
            ratio = importance_ratio(scored.trainer_logprobs, anchor)
            clipped = choices.loss.clipped(scored.trainer_logprobs, anchor, scored.batch.advantages, mask)
            tokens = float(mask.sum())
            clip.add(float((clipped * mask).sum()), tokens)
            mean.add(float((ratio * mask).sum()), tokens)
            if tokens:
                largest = max(largest, float((ratio * mask).max()))
                lowest = min(lowest, float(ratio[mask > 0].min()))
    metrics = {"train/clip_fraction": clip.value, "train/ratio_mean": mean.value, "train/ratio_max": largest}
    return metrics if math.isinf(lowest) else {**metrics, "train/ratio_min": lowest}
