"""Metrics of one training step. Each rate is a sum divided by a sum, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO
from lightning_scalerl.axes.filter import has_variance
from lightning_scalerl.axes.loss.base import importance_ratio
from lightning_scalerl.axes.results import check_shape
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Part, Rollout, Scored, Source, TrainBatch
from lightning_scalerl.update.terms import anchor_of, kl_estimates, loss_inputs


@dataclass(frozen=True)
class Pass:
    """Pass over a batch with one optimizer update.

    Attributes:
        parts: the scored micro-batches.
        totals: total of each loss term, by name.
        norms: gradient norms, by metric name.
        finite: whether loss and gradients were finite.
    """

    parts: Sequence[Part]
    totals: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    finite: bool = True


@dataclass
class Rate:
    """Ratio of two sums, which does not depend on how the data is split."""

    numerator: float = 0.0
    denominator: float = 0.0

    def add(self, numerator: float, denominator: float) -> None:
        """Add to both sums."""
        self.numerator += numerator
        self.denominator += denominator

    @property
    def value(self) -> float:
        """Numerator over denominator; 0 if the denominator is 0."""
        return self.numerator / self.denominator if self.denominator else 0.0


def step_metrics(
    batch: TrainBatch, passes: Sequence[Pass], choices: Choices, completed_steps: int, dropped: int = 0
) -> dict[str, float]:
    """Return the metrics of one optimizer step.

    Entropy and the comparison of trainer and generator are measured in the first pass, metrics of the loss in all
    passes.

    Args:
        batch: the batch of this step.
        passes: the passes over this batch.
        choices: the run's choices.
        completed_steps: number of steps before this one.
        dropped: number of groups that were sampled for this batch and replaced by a refilling filter.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    all_rollouts = [rollout for group in batch.groups for rollout in group.sampled]
    ungraded = len(all_rollouts) - len(rollouts)
    constant = sum(not has_variance(group.rewards) for group in batch.groups)
    sampled = len(batch.groups) + dropped
    metrics = {
        **(_reward_metrics(rollouts, choices) if rollouts else {}),
        **_length_metrics(all_rollouts, choices, batch),
        **_part_metrics(rollouts),
        **_environment_metrics(all_rollouts),
        **({"train/ungraded": ungraded / len(all_rollouts)} if ungraded else {}),
        "train/groups_kept": batch.denominators.prompts / len(batch.groups),
        "train/credited_prompts": batch.denominators.prompts,
        "train/credited_rollouts": batch.denominators.samples,
        "train/credited_tokens": batch.denominators.tokens,
        "train/zero_variance": (constant + dropped) / sampled,
        **({"train/groups_dropped": dropped / sampled} if choices.filter.refills else {}),
        **staleness(all_rollouts, completed_steps),
        **_loss_metrics(passes),
        **_first_pass_metrics(batch, passes[0].parts, choices),
        **_ratio_metrics(batch, passes, choices),
    }
    # A value that is not finite, from a failed pass, is not a measurement: leave it out.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _reward_metrics(rollouts: Sequence[Rollout], choices: Choices) -> dict[str, float]:
    staged = sum(rollout.staged for rollout in rollouts) / len(rollouts)
    return {
        "train/pass_rate": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "train/reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
        **({"train/rewards_staged": staged} if choices.curriculum.weighs_rewards else {}),
    }


def _length_metrics(rollouts: Sequence[Rollout], choices: Choices, batch: TrainBatch) -> dict[str, float]:
    """Return metrics of completion length over all rollouts, graded or not."""
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    return {
        "train/completion_tokens": tokens / len(rollouts),
        "train/truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        **_cut_by_stage(rollouts, choices, batch.denominators.max_tokens),
        "train/interrupted": sum(any(rollout.forced) for rollout in rollouts) / len(rollouts),
        "train/forced_tokens": sum(sum(rollout.forced) for rollout in rollouts) / tokens,
    }


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each extra number from the graders, over the rollouts that have it."""
    by_name: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            by_name.setdefault(name, []).append(value)
    return {f"reward/{name}": sum(values) / len(values) for name, values in by_name.items()}


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over the rollouts with an environment; with several environments, their pass rates as well."""
    conversations = [(rollout, rollout.conversation) for rollout in rollouts if rollout.conversation is not None]
    if not conversations:
        return {}
    metrics = {
        "environment/turns": fmean(conversation.turns for _, conversation in conversations),
        "environment/calls": fmean(conversation.calls for _, conversation in conversations),
        "environment/malformed": fmean(conversation.malformed for _, conversation in conversations),
        "environment/raised": fmean(conversation.raised for _, conversation in conversations),
        "environment/failed": fmean(bool(conversation.failed) for _, conversation in conversations),
        "environment/tokens": fmean(rollout.sources.count(Source.ENVIRONMENT) for rollout, _ in conversations),
        "environment/characters_cut": fmean(conversation.cut for _, conversation in conversations),
    }
    values: dict[str, list[float]] = {}
    for rollout, conversation in conversations:
        for name, value in conversation.info.items():
            values.setdefault(f"environment/info_{name}", []).append(value)
        if conversation.environment and rollout.outcome == "score":
            values.setdefault(f"environment/pass_rate_{conversation.environment}", []).append(float(rollout.correct))
    return metrics | {name: fmean(values_of_name) for name, values_of_name in values.items()}


def _cut_by_stage(rollouts: Sequence[Rollout], choices: Choices, limit: float) -> dict[str, float]:
    """Return the share of rollouts truncated by the curriculum's shorter limit; empty if the limit is not shorter.

    These rollouts also count in `train/truncated`, because they are treated as truncated. Alarms ignore them.
    """
    if choices.curriculum.max_new_tokens(int(limit), 0) == limit:
        return {}
    num_cut = sum(rollout.truncated and len(rollout.tokens) < limit for rollout in rollouts)
    return {"train/cut_by_stage": num_cut / len(rollouts)}


def _loss_metrics(passes: Sequence[Pass]) -> dict[str, float]:
    """Return means over the finite passes: the loss, each of its terms if there are several, and gradient norms."""
    finite = [one_pass for one_pass in passes if one_pass.finite]
    if not finite:
        return {}
    names = list(finite[0].totals)
    totals = {name: sum(float(one_pass.totals[name]) for one_pass in finite) / len(finite) for name in names}
    metrics = {"train/loss": sum(totals.values())}
    if len(names) > 1:
        metrics |= {f"train/loss_{name}": total for name, total in totals.items()}
    for name in finite[0].norms:
        metrics[f"train/{name}"] = sum(float(one_pass.norms[name]) for one_pass in finite) / len(finite)
    return metrics


def staleness(rollouts: Sequence[Rollout], completed_steps: int) -> dict[str, float]:
    """Return the tokens' staleness in optimizer steps: mean, 95th percentile and maximum.

    Staleness is the number of steps between the weights that sampled a token and the weights that it trains. Its two
    parts are returned as well: `in_flight`, until the last token of the rollout was sampled, and `queued`, after that.
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
    """Return metrics of the weights before the update: entropy, gap to the generator, KL, explained variance.

    Importance ratios between trainer and generator are not truncated here. Without tokens in the loss there is no mean,
    and the metrics are left out: an entropy of 0 would look like a collapse.
    """
    tokens = batch.denominators.tokens
    if not tokens:
        return {}
    sums = dict.fromkeys(("entropy", "logprob_gap", "mismatch_kl"), 0.0)
    weight_sum = square_sum = 0.0
    scored = [Scored(*part).zero_outside_mask() for part in parts]
    for part in scored:
        mask = part.batch.loss_mask
        gap = part.trainer_logprobs - part.batch.generator_logprobs
        ratio = importance_ratio(part.trainer_logprobs, part.batch.generator_logprobs)
        sums["entropy"] += float((part.entropies * mask).sum())
        sums["logprob_gap"] += float((gap.abs() * mask).sum())
        # k3 estimator of KL(generator || trainer), exp(gap) - 1 - gap (Schulman 2020); clamped against overflow.
        sums["mismatch_kl"] += float(((torch.expm1(gap.clamp(max=MAX_LOG_RATIO)) - gap) * mask).sum())
        weight_sum += float((ratio * mask).sum())
        square_sum += float((ratio.square() * mask).sum())
    metrics = {f"train/{name}": Rate(value, tokens).value for name, value in sums.items()}
    # Effective sample size as a share, (sum w)^2 / (n sum w^2) (Kish 1965): 1 if all tokens have the same weight.
    metrics["train/effective_samples"] = Rate(weight_sum * weight_sum, tokens * square_sum).value
    if batch.reference_logprobs is not None or any(part.batch.divergences is not None for part in scored):
        distance = Rate()
        for part in scored:
            mask = part.batch.loss_mask
            distance.add(float((kl_estimates(part, choices) * mask).sum()), float(mask.sum()))
        metrics["train/kl"] = distance.value
    if batch.values is not None and batch.returns is not None:
        metrics["train/explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
    return metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over tokens in the loss, (R, T); 0 for constant returns."""
    targets, predictions = returns[mask > 0].double(), values[mask > 0].double()
    if targets.numel() < 2 or not float(targets.var()) > 0:
        return 0.0
    return float(1 - (targets - predictions).var() / targets.var())


def _ratio_metrics(batch: TrainBatch, passes: Sequence[Pass], choices: Choices) -> dict[str, float]:
    """Return metrics of the importance ratio in the loss, over all passes; empty without tokens in the loss."""
    clip, mean = Rate(), Rate()
    lowest, largest = math.inf, 0.0
    for one_pass in passes:
        for part in one_pass.parts:
            scored = Scored(*part).zero_outside_mask()
            mask = scored.batch.loss_mask
            anchor = anchor_of(scored.batch, choices)
            ratio = importance_ratio(scored.trainer_logprobs, anchor)
            clipped = choices.loss.clipped(*loss_inputs(scored, choices, scored.batch.advantages))
            check_shape(choices.loss, "clipped", clipped, mask.shape)
            tokens = float(mask.sum())
            clip.add(float((clipped * mask).sum()), tokens)
            mean.add(float((ratio * mask).sum()), tokens)
            if tokens:
                largest = max(largest, float((ratio * mask).max()))
                lowest = min(lowest, float(ratio[mask > 0].min()))
    if math.isinf(lowest):
        return {}
    return {
        "train/clip_fraction": clip.value,
        "train/ratio_mean": mean.value,
        "train/ratio_max": largest,
        "train/ratio_min": lowest,
    }
