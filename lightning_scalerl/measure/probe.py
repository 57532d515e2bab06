"""Probe of trainer against generator: both must compute the same log-probabilities with the same weights.

Before the first step, the generator samples a few rollouts with the initial weights, with the same weights published a
second time, and with perturbed weights. Each time its log-probabilities must match the trainer's. This finds, before
compute is spent, a layer whose weights never reach the generator.

At later steps, rollouts that were sampled with this step's weights are compared directly, whether they are in the loss
or not. In async modes older weights may have sampled all rollouts. The generator then scores some of them again, if it
holds the weights of this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import Generator, GroupRequest
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, PassSize, Rollout, TrainBatch
from lightning_scalerl.stream.credit import to_tensors
from lightning_scalerl.stream.random_streams import PROBE_STREAM
from lightning_scalerl.update.trained import TrainedPolicy

# Number of rollouts to score again if no rollout of the batch can be compared directly.
PROBE_ROLLOUTS = 8
# Share of gaps above the 99th percentile.
TAIL_SHARE = 0.01
# Significance level of the test of the 99th percentile: among a few dozen tokens a large gap occurs by chance.
SIGNIFICANCE = 1e-4
# Tokens below this probability are not compared if other weights than the current ones sampled them.
MIN_PROBABILITY = 1e-3
# Factor on the bounds after the first step. Training can make a policy so sharp that the rounding of a 16-bit type
# exceeds the bounds: correct runs of experiment=replication reached 1.4 times the bound on the mean. A generator that
# does not follow the trainer drifts beyond the relaxed bounds too.
LATER_SLACK = 4.0
MEAN, P99 = "train/probe_gap_mean", "train/probe_gap_p99"


class Scorer(Protocol):
    """Generator that can compute log-probabilities of existing completions.

    If a generator's settings prevent this, its attribute `can_score` is false. If it has a method `score_all`, that
    method is called with several completions at once, instead of `score`.
    """

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of optimizer steps that led to them."""

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """Return log-probabilities (T,) of a completion's tokens, or None if the generator cannot answer now."""


# Start probe: number of rollouts, tokens of each, and the token at which thinking is interrupted.
START_ROLLOUTS, START_TOKENS, INTERRUPTED_AT = 4, 8, 2


def start_probe(
    generator: Generator,
    trained: TrainedPolicy,
    prompt_tokens: Sequence[int],
    version: int,
    phrase: Sequence[int] = (),
    thinking_ended: Callable[[list[int]], bool] = lambda tokens: False,
) -> None:
    """Check before the first step that the generator follows the trainer's weights.

    Args:
        generator: a generator with nothing in flight. It has the policy's weights afterwards.
        trained: the trainer's policy. Its weights are perturbed and restored bit for bit.
        prompt_tokens: the prompt to sample from.
        version: version of the weights.
        phrase: tokens that interrupt thinking; empty without interruption.
        thinking_ended: function of completion tokens that returns whether thinking has ended by itself. Such a rollout
            is not interrupted.

    Raises:
        ConfigurationError: log-probabilities differ, weights do not reach the generator (the error names them), or the
            phrase is not forced.
    """
    policy = trained.policy
    slack = _slack(policy.precision, version)
    names = [name for name, _ in policy.model.named_parameters()]
    digests: set[str | None] = set()
    for is_repeated in (False, True):
        generator.publish(trained.weights(), version)
        digests.add(getattr(generator, "digest", None))
        gaps = _sampled_gaps(generator, trained, prompt_tokens)
        situation = "published a second time, the same weights give others" if is_repeated else "under the same weights"
        _check(probe_metrics(gaps), policy.precision, situation, slack)
    with trained.perturbed(names):
        generator.publish(trained.weights(), version)
        # Engines report a digest of their weights. Two different sets of weights were published, so there must be
        # exactly two digests.
        digests.add(getattr(generator, "digest", None))
        if hasattr(generator, "digest") and len(digests) != 2:
            raise ConfigurationError(
                "generator: the weights that are published do not follow the trainer's: the same ones twice and moved "
                f"ones gave {len(digests)} digests, not 2; adapters, frozen copies and tied weights are where to look"
            )
        gaps = _sampled_gaps(generator, trained, prompt_tokens)
    if _exceeds_bounds(probe_metrics(gaps), policy.precision, slack):
        # Perturb one parameter at a time to find out which of them the generator does not follow.
        unresponsive = []
        for name in names:
            with trained.perturbed([name]):
                generator.publish(trained.weights(), version)
                if _exceeds_bounds(
                    probe_metrics(_sampled_gaps(generator, trained, prompt_tokens)), policy.precision, slack
                ):
                    unresponsive.append(name)
        generator.publish(trained.weights(), version)
        if not unresponsive:
            _check(probe_metrics(gaps), policy.precision, "under perturbed weights", slack)
        names_text = f"{', '.join(unresponsive[:5])}{' and others' if len(unresponsive) > 5 else ''}"
        raise ConfigurationError(
            f"generator: it computes what the trainer does, but not with other weights: published, {names_text} did "
            "not change it as they change the trainer; adapters, frozen copies and tied weights are where to look"
        )
    generator.publish(trained.weights(), version)
    if phrase:
        limit = INTERRUPTED_AT + len(phrase) + 1
        for rollout in _sample(generator, prompt_tokens, limit, (INTERRUPTED_AT,) * START_ROLLOUTS):
            tokens, forced = rollout.tokens[INTERRUPTED_AT:], rollout.forced[INTERRUPTED_AT:]
            if thinking_ended(rollout.tokens[:INTERRUPTED_AT]):
                continue
            if tokens and (tokens[: len(phrase)] != list(phrase) or not all(forced[: len(phrase)])):
                raise ConfigurationError(
                    "generator: asked to end a completion's thinking it did not force the phrase of "
                    f"length_control (tokens {list(phrase)}), but went on with {tokens[: len(phrase)]}"
                )


def _sample(
    generator: Generator, prompt_tokens: Sequence[int], limit: int, interrupt_at: tuple[int, ...] = ()
) -> list[Rollout]:
    """Sample a few short rollouts on each process of the generator."""
    for number in range(getattr(generator, "generators", 1)):
        key = (PROBE_STREAM, number)
        generator.submit(GroupRequest(number, tuple(prompt_tokens), START_ROLLOUTS, key, interrupt_at, limit))
    rollouts: list[Rollout] = []
    while generator.in_flight:
        rollouts += [finished.rollout for finished in generator.step().finished]
    return rollouts


def _sampled_gaps(generator: Generator, trained: TrainedPolicy, prompt_tokens: Sequence[int]) -> Tensor:
    """Sample rollouts now, and return |trainer's - generator's| log-probability of their tokens."""
    rollouts = _sample(generator, prompt_tokens, START_TOKENS)
    group = Group(0, Prompt("probe", "", ""), list(prompt_tokens), rollouts)
    rollout_logprobs = _trainer_logprobs([(group, rollout) for rollout in rollouts], trained, PassSize(START_ROLLOUTS))
    return _gaps(rollout_logprobs, [torch.tensor(rollout.generator_logprobs) for rollout in rollouts])


def logprob_gaps(
    batch: TrainBatch,
    trainer_logprobs: Tensor,
    trained: TrainedPolicy,
    version: int,
    size: PassSize,
    generator: object = None,
    timing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Return |trainer's - generator's| log-probability (n,) under weights `version`; n may be 0.

    Call it before the optimizer step. Rollouts of the batch are compared without another pass, by the step's own
    `trainer_logprobs`. If none of them were sampled by these weights, or the policy trains with dropout, a few rollouts
    are scored once more.

    Args:
        batch: the batch of this step.
        trainer_logprobs: (R, T), from the step's first pass.
        trained: the trainer's policy.
        version: version of the trainer's weights.
        size: size of the passes that score rollouts again.
        generator: generator that scores rollouts of older weights again, if it can; None to score none again.
        timing: context manager around the request to the generator.
    """
    if not trained.policy.training:
        column = torch.arange(batch.generator_logprobs.shape[1], device=batch.tokens.device)
        # `is_fresh`: rollouts whose tokens were all sampled by these weights. The rest of each row is padding.
        is_token = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        is_fresh = is_token & ((batch.weight_versions == version) | ~is_token).all(1, keepdim=True)
        if is_fresh.any():
            # Inserted tokens were not sampled, and some engines do not record their log-probability.
            return (trainer_logprobs - batch.generator_logprobs).abs()[is_fresh & ~batch.forced_mask].cpu()
    sampled = [(group, rollout) for group in batch.groups for rollout in group.sampled]
    fresh_rollouts = [pair for pair in sampled if set(pair[1].weight_versions) == {version}][:PROBE_ROLLOUTS]
    if fresh_rollouts:
        rollout_logprobs = _trainer_logprobs(fresh_rollouts, trained, size)
        gaps = _gaps(rollout_logprobs, [torch.tensor(rollout.generator_logprobs) for _, rollout in fresh_rollouts])
        return gaps[~torch.cat([torch.tensor(rollout.inserted) for _, rollout in fresh_rollouts])]
    scorer = cast(Scorer, generator)
    if can_score(generator) and scorer.version == version:
        # Take every n-th rollout, so that the rollouts come from many prompts: rollouts of one prompt are similar.
        spaced_rollouts = sampled[:: -(-len(sampled) // PROBE_ROLLOUTS)]
        with timing():
            generator_logprobs = generator_scores(
                scorer, [(group.prompt_tokens, rollout.tokens) for group, rollout in spaced_rollouts]
            )
        if generator_logprobs is None:
            return torch.zeros(0)
        rollout_logprobs = _trainer_logprobs(spaced_rollouts, trained, size)
        # Tokens that older weights sampled may be very unlikely now, where 16-bit types have large errors: skip them.
        return _gaps(rollout_logprobs, generator_logprobs)[torch.cat(generator_logprobs) > math.log(MIN_PROBABILITY)]
    return torch.zeros(0)


def can_score(generator: object) -> bool:
    """Return whether a generator can compute log-probabilities of existing completions with its current settings."""
    return bool(getattr(generator, "can_score", hasattr(generator, "score")))


def generator_scores(scorer: Scorer, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor] | None:
    """Return the generator's log-probabilities (T,) of completions with its current weights, None if it cannot answer.

    Args:
        scorer: the generator.
        requests: tokens of prompt and completion.
    """
    if (score_all := getattr(scorer, "score_all", None)) is not None:
        return [logprobs.cpu() for logprobs in score_all(requests)]
    scores: list[Tensor] = []
    for prompt_tokens, tokens in requests:
        logprobs = scorer.score(prompt_tokens, tokens)
        if logprobs is None:
            return None
        scores.append(logprobs.cpu())
    return scores


def _trainer_logprobs(
    rollouts: Sequence[tuple[Group, Rollout]], trained: TrainedPolicy, size: PassSize
) -> list[Tensor]:
    batch = to_tensors([(group, rollout, [0.0], 0, row) for row, (group, rollout) in enumerate(rollouts)])
    batch.packed = trained.policy.packs
    logprobs: dict[int, Tensor] = {}
    for cut in batch.cut(size):
        logprobs.update(zip(cut.tolist(), trained.logprobs(batch.select(cut)).cpu(), strict=True))
    return [logprobs[row] for row in range(len(rollouts))]


def _gaps(trainer_rows: Sequence[Tensor], generator_rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [(row[: len(other)] - other).abs() for row, other in zip(trainer_rows, generator_rows, strict=True)]
    )


def bound_rank(n: int) -> int:
    """Return the smallest m with P(m or more of n gaps exceed their 99th percentile) < 1e-4.

    The m-th largest gap is then a lower confidence bound of the percentile. If there is no such m, n is returned.
    """
    rank, probability = 0, 1.0  # P(`rank` or more exceed it), binomial; importing scipy for it takes 0.3 s
    while probability >= SIGNIFICANCE and rank < n:
        log_ways = math.lgamma(n + 1) - math.lgamma(rank + 1) - math.lgamma(n - rank + 1)
        probability -= math.exp(log_ways + rank * math.log(TAIL_SHARE) + (n - rank) * math.log1p(-TAIL_SHARE))
        rank += 1
    return rank


def probe_metrics(gaps: Tensor) -> dict[str, float]:
    """Return `train/probe_gap_mean` and `train/probe_gap_p99`; empty without gaps.

    `train/probe_gap_p99` is a lower confidence bound of the 99th percentile, at a level of 1 in 10,000 (binomial). For
    10,000 tokens it is close to the percentile itself, for 60 tokens it is the sixth largest gap. Gaps are clamped to
    this bound before the mean is taken.
    """
    if not gaps.numel():
        return {}
    bound = gaps.double().kthvalue(gaps.numel() - bound_rank(gaps.numel()) + 1).values
    return {MEAN: float(gaps.double().clamp(max=bound).mean()), P99: float(bound)}


def _slack(precision: Precision, version: int) -> float:
    """Return the factor by which the bounds are relaxed for weights of this version."""
    return 1.0 if version == 0 or precision.policy == "fp32" else LATER_SLACK


def check_probe(metrics: Mapping[str, float], precision: Precision, version: int) -> None:
    """Raise if trainer and generator differ by more than rounding in the policy's type explains.

    Args:
        metrics: metrics of the step, with `train/probe_gap_*` if anything was compared.
        precision: the run's precision.
        version: version of the compared weights: the number of optimizer steps that led to them.

    Raises:
        ConfigurationError: the mean or the 99th percentile exceeds `Precision.probe_bounds`; after the first step in a
            16-bit type, `LATER_SLACK` times these bounds.
    """
    _check(metrics, precision, "under the same weights", _slack(precision, version))


def _exceeds_bounds(metrics: Mapping[str, float], precision: Precision, slack: float) -> bool:
    mean, p99 = precision.probe_bounds
    return P99 in metrics and not (metrics[MEAN] <= slack * mean and metrics[P99] <= slack * p99)


def _check(metrics: Mapping[str, float], precision: Precision, situation: str, slack: float) -> None:
    if _exceeds_bounds(metrics, precision, slack):
        mean, p99 = (slack * bound for bound in precision.probe_bounds)
        raise ConfigurationError(
            f"generator: its log-probabilities differ from the trainer's by {metrics[MEAN]:.3g} on average and "
            f"{metrics[P99]:.3g} at the 99th percentile, {situation} (allowed in {precision.policy}: "
            f"{mean:g} and {p99:g}); compare precision, temperature and tokenizer on both sides, and "
            "torch.get_float32_matmul_precision()"
        )
