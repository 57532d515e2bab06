"""Whether trainer and generator compute the same, asked on every step at which both hold the same weights.

Rollouts that the very weights of this step have sampled are compared as they are: what the generator recorded against
what the trainer computes, whether or not a rollout carries credit. Where older weights have sampled all of them, as
asynchrony does, the generator is asked what it would record now, if it holds the weights of this step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model.head import eval_mode
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollout import Group, Rollout, TrainBatch
from lightning_scalerl.stream.credit import lay_out

# Rollouts that are put through the policy once more where the batch itself has none to judge.
PROBE_ROLLOUTS = 8
SHARE = 0.99
LIKELY = 1e-3
MEAN, P99 = "train/probe_gap_mean", "train/probe_gap_p99"


class Scorer(Protocol):
    """A generator that can be asked for the log-probabilities of tokens that are given. Not every one can."""

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights in use."""
        ...

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Log-probabilities (T,) of a completion's tokens."""
        ...


def logprob_gaps(
    batch: TrainBatch,
    trainer_logprobs: Tensor,
    policy: Policy,
    version: int,
    micro_batch: int,
    generator: object = None,
) -> Tensor:
    """|trainer's - generator's| log-probability (n,) under weights `version`; n may be 0.

    Those of the batch cost nothing: the step has computed `trainer_logprobs` (R, T). A batch that keeps none, or a
    policy that trains with dropout, is judged on a few rollouts that go through the policy once more, `micro_batch`
    of them at a time. Call it before the optimizer step.
    """
    if not policy.training:
        column = torch.arange(batch.generator_logprobs.shape[1], device=batch.tokens.device)
        real = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        fresh = real & ((batch.weight_versions == version) | ~real).all(1, keepdim=True)
        if fresh.any():
            return (trainer_logprobs - batch.generator_logprobs).abs()[fresh].cpu()
    sampled = [(group, rollout) for group in batch.groups for rollout in group.rollouts]
    found = [each for each in sampled if set(each[1].weight_versions) == {version}][:PROBE_ROLLOUTS]
    if found:
        ours = _trainer_logprobs(found, policy, batch.tokens.device, micro_batch)
        return _gaps(ours, [torch.tensor(rollout.generator_logprobs) for _, rollout in found])
    scorer = cast(Scorer, generator)
    if hasattr(generator, "score") and scorer.version == version:
        found = sampled[:: -(-len(sampled) // PROBE_ROLLOUTS)]  # one here and there: rollouts of one prompt are alike
        ours = _trainer_logprobs(found, policy, batch.tokens.device, micro_batch)
        theirs = [scorer.score(group.prompt_tokens, rollout.tokens).cpu() for group, rollout in found]
        # Older weights have sampled tokens that these hardly would, and of those a 16-bit type knows little.
        return _gaps(ours, theirs)[torch.cat(theirs) > math.log(LIKELY)]
    return torch.zeros(0)


def _trainer_logprobs(
    found: Sequence[tuple[Group, Rollout]], policy: Policy, device: torch.device, micro_batch: int
) -> list[Tensor]:
    logprobs: list[Tensor] = []
    with torch.no_grad(), eval_mode(policy):
        for first in range(0, len(found), micro_batch):
            part = found[first : first + micro_batch]
            rows: list[Any] = [(group, rollout, 0.0, 0, row) for row, (group, rollout) in enumerate(part)]
            logprobs += policy(lay_out(rows).to(device))[0].cpu()
    return logprobs


def _gaps(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    return torch.cat([(row[: len(other)] - other).abs() for row, other in zip(ours, theirs, strict=True)])


def probe_metrics(gaps: Tensor) -> dict[str, float]:
    """`train/probe_gap_mean` and `train/probe_gap_p99` (99th percentile); nothing where there was nothing to judge."""
    if not gaps.numel():
        return {}
    place = max(1, math.ceil(SHARE * gaps.numel()))
    return {
        MEAN: float(gaps.double().mean()),
        P99: float(gaps.kthvalue(place).values),
    }


def check_probe(metrics: Mapping[str, float], precision: Precision) -> None:
    """Stop where trainer and generator differ by more than rounding in the policy's type explains.

    Raises:
        ConfigurationError: the mean or the 99th percentile is beyond `Precision.probe_bounds`.
    """
    if P99 not in metrics:
        return
    mean, p99 = precision.probe_bounds
    if not (metrics[MEAN] <= mean and metrics[P99] <= p99):
        raise ConfigurationError(
            f"generator: its log-probabilities differ from the trainer's by {metrics[MEAN]:.3g} on average and "
            f"{metrics[P99]:.3g} at the 99th percentile, under the same weights (allowed in {precision.policy}: "
            f"{mean:g} and {p99:g}); compare precision, temperature and tokenizer on both sides, and "
            "torch.get_float32_matmul_precision()"
        )
