"""Probe of trainer against generator: both must compute the same log-probabilities under the same weights.

At the start the generator samples a little under the weights as they are, under the same ones published again, and
under others that no step has made: what it records must be what the trainer computes with each. So a layer that never
arrives is found before compute is spent.

On each later step with such rollouts, those sampled by this step's weights are compared as they are: what the generator
recorded against what the trainer computes, whether or not a rollout carries credit. Where older weights have sampled
all of them, as asynchrony does, the generator is asked what it would record now, if it holds the weights of this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from scipy.special import bdtrc
from torch import Tensor

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import Generator, GroupRequest
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.rollout import Group, PassSize, Rollout, TrainBatch
from lightning_scalerl.stream.credit import lay_out
from lightning_scalerl.stream.random_streams import PROBE_STREAM
from lightning_scalerl.update.trained import TrainedPolicy

# Rollouts to score again where the batch itself has none to compare.
PROBE_ROLLOUTS = 8
TAIL = 0.01
# Among a few dozen tokens a large gap occurs by chance: the percentile is tested at this level of significance.
BY_CHANCE = 1e-4
LIKELY = 1e-3
# Training may make a policy so sharp that a 16-bit type's rounding moves its log-probabilities beyond the bounds of the
# start: measured, runs of experiment=replication whose parts were all right came to 1.4 times the mean. What does not
# follow the trainer at all drifts beyond this, too.
SHARPER = 4.0
MEAN, P99 = "train/probe_gap_mean", "train/probe_gap_p99"


class Scorer(Protocol):
    """Generator that can score given tokens; not every generator can.

    One that has `score` and cannot under its settings says so by `can_score`. One that has `score_all` is asked for
    several at once.
    """

    @property
    def version(self) -> int:
        """Version of the weights in use: the optimizer steps behind them."""
        ...

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """Return log-probabilities (T,) of a completion's tokens; None where it cannot answer now."""
        ...


# Start probe: rollouts and tokens to sample.
START_ROLLOUTS, START_TOKENS, INTERRUPTED_AT = 4, 8, 2


def start_probe(
    generator: Generator,
    trained: TrainedPolicy,
    prompt_tokens: Sequence[int],
    version: int,
    phrase: Sequence[int] = (),
    thinking_ended: Callable[[list[int]], bool] = lambda tokens: False,
) -> None:
    """Check before the first step that the generator computes what the trainer does, under each weights it is sent.

    Args:
        generator: with nothing in flight; it ends with the policy's own weights.
        trained: the trainer's policy. Its weights are moved and put back, bit for bit.
        prompt_tokens: to sample from.
        version: of the weights.
        phrase: that ends thinking by force; empty if nothing is interrupted.
        thinking_ended: whether a completion has ended its thinking by itself: it is then not interrupted.

    Raises:
        ConfigurationError: they differ, or weights do not arrive (with their names), or the phrase does not bind.
    """
    policy = trained.policy
    slack = _slack(policy.precision, version)
    names = [name for name, _ in policy.model.named_parameters()]
    digests: set[str | None] = set()
    for again in (False, True):
        generator.publish(trained.weights(), version)
        digests.add(getattr(generator, "digest", None))
        gaps = _sampled_gaps(generator, trained, prompt_tokens)
        said = "published a second time, the same weights give others" if again else "under the same weights"
        _check(probe_metrics(gaps), policy.precision, said, slack)
    with trained.moved(names):
        generator.publish(trained.weights(), version)
        # Engines that are sent bytes say which they hold; those of other weights are others.
        digests.add(getattr(generator, "digest", None))
        if hasattr(generator, "digest") and len(digests) != 2:
            raise ConfigurationError(
                "generator: the weights that are published do not follow the trainer's: the same ones twice and moved "
                f"ones gave {len(digests)} digests, not 2; adapters, frozen copies and tied weights are where to look"
            )
        gaps = _sampled_gaps(generator, trained, prompt_tokens)
    if _beyond(probe_metrics(gaps), policy.precision, slack):
        lost = []
        for name in names:
            with trained.moved([name]):
                generator.publish(trained.weights(), version)
                if _beyond(probe_metrics(_sampled_gaps(generator, trained, prompt_tokens)), policy.precision, slack):
                    lost.append(name)
        generator.publish(trained.weights(), version)
        named = f"{', '.join(lost[:5])}{' and others' if len(lost) > 5 else ''}" if lost else "all of them together"
        raise ConfigurationError(
            f"generator: it computes what the trainer does, but not with other weights: published, {named} did not "
            "change it as they change the trainer; adapters, frozen copies and tied weights are where to look"
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
    """Sample a few short rollouts with each process of the generator."""
    for number in range(getattr(generator, "generators", 1)):
        key = (PROBE_STREAM, number)
        generator.submit(GroupRequest(number, tuple(prompt_tokens), START_ROLLOUTS, key, interrupt_at, limit))
    found: list[Rollout] = []
    while generator.in_flight:
        found += [finished.rollout for finished in generator.step().finished]
    return found


def _sampled_gaps(generator: Generator, trained: TrainedPolicy, prompt_tokens: Sequence[int]) -> Tensor:
    """Return |trainer's - generator's| log-probability of rollouts that are sampled now."""
    rollouts = _sample(generator, prompt_tokens, START_TOKENS)
    group = Group(0, Prompt("probe", "", ""), list(prompt_tokens), rollouts)
    ours = _trainer_logprobs([(group, rollout) for rollout in rollouts], trained, PassSize(START_ROLLOUTS))
    return _gaps(ours, [torch.tensor(rollout.generator_logprobs) for rollout in rollouts])


def logprob_gaps(
    batch: TrainBatch,
    trainer_logprobs: Tensor,
    trained: TrainedPolicy,
    version: int,
    size: PassSize,
    generator: object = None,
    asking: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Return |trainer's - generator's| log-probability (n,) under weights `version`; n may be 0.

    Those of the batch cost nothing: the step has computed `trainer_logprobs` (R, T). A batch that keeps none, or a
    policy that trains with dropout, is judged on a few rollouts that go through the policy once more, in passes of at
    most `size`. A `generator` is asked within `asking`. Call it before the optimizer step.
    """
    if not trained.policy.training:
        column = torch.arange(batch.generator_logprobs.shape[1], device=batch.tokens.device)
        real = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        fresh = real & ((batch.weight_versions == version) | ~real).all(1, keepdim=True)
        if fresh.any():
            # Forced tokens were not sampled, and not every engine records their log-probability.
            return (trainer_logprobs - batch.generator_logprobs).abs()[fresh & ~batch.forced_mask].cpu()
    sampled = [(group, rollout) for group in batch.groups for rollout in group.sampled]
    found = [each for each in sampled if set(each[1].weight_versions) == {version}][:PROBE_ROLLOUTS]
    if found:
        ours = _trainer_logprobs(found, trained, size)
        gaps = _gaps(ours, [torch.tensor(rollout.generator_logprobs) for _, rollout in found])
        return gaps[~torch.cat([torch.tensor(rollout.forced) for _, rollout in found])]
    scorer = cast(Scorer, generator)
    if getattr(generator, "can_score", hasattr(generator, "score")) and scorer.version == version:
        found = sampled[:: -(-len(sampled) // PROBE_ROLLOUTS)]  # spread out: rollouts of one prompt are alike
        with asking():
            theirs = _scored(scorer, found)
        if theirs is None:
            return torch.zeros(0)
        ours = _trainer_logprobs(found, trained, size)
        # Tokens of older weights may be very unlikely now, where a 16-bit type has large errors: left out.
        return _gaps(ours, theirs)[torch.cat(theirs) > math.log(LIKELY)]
    return torch.zeros(0)


def _scored(scorer: Scorer, found: Sequence[tuple[Group, Rollout]]) -> list[Tensor] | None:
    """Return log-probabilities that the generator would record now; None as soon as it cannot answer."""
    asked = [(group.prompt_tokens, rollout.tokens) for group, rollout in found]
    if (score_all := getattr(scorer, "score_all", None)) is not None:
        return [logprobs.cpu() for logprobs in score_all(asked)]
    scores: list[Tensor] = []
    for prompt_tokens, tokens in asked:
        logprobs = scorer.score(prompt_tokens, tokens)
        if logprobs is None:
            return None
        scores.append(logprobs.cpu())
    return scores


def _trainer_logprobs(found: Sequence[tuple[Group, Rollout]], trained: TrainedPolicy, size: PassSize) -> list[Tensor]:
    batch = lay_out([(group, rollout, 0.0, 0, row) for row, (group, rollout) in enumerate(found)])
    batch.packed = trained.policy.packs
    logprobs: dict[int, Tensor] = {}
    for cut in batch.cut(size):
        logprobs.update(zip(cut.tolist(), trained.logprobs(batch.select(cut)).cpu(), strict=True))
    return [logprobs[row] for row in range(len(found))]


def _gaps(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    return torch.cat([(row[: len(other)] - other).abs() for row, other in zip(ours, theirs, strict=True)])


def probe_metrics(gaps: Tensor) -> dict[str, float]:
    """Return `train/probe_gap_mean` and `train/probe_gap_p99`; empty where there was nothing to judge.

    The second is a lower confidence bound of the 99th percentile, at a level of 1 in 10,000 (binomial). Of 10,000
    tokens it is nearly the percentile itself, of 60 the sixth largest gap. The mean is of gaps clamped to it.
    """
    if not gaps.numel():
        return {}
    n = gaps.numel()
    beyond = next((m for m in range(1, n + 1) if bdtrc(m - 1, n, TAIL) < BY_CHANCE), n)
    surely = gaps.double().kthvalue(n - beyond + 1).values
    return {MEAN: float(gaps.double().clamp(max=surely).mean()), P99: float(surely)}


def _slack(precision: Precision, version: int) -> float:
    """Return the factor on the bounds under weights of that version."""
    return 1.0 if version == 0 or precision.policy == "fp32" else SHARPER


def check_probe(metrics: Mapping[str, float], precision: Precision, version: int) -> None:
    """Raise if trainer and generator differ by more than the rounding of the policy's type explains.

    Args:
        metrics: of the step, with `train/probe_gap_*` if there was anything to judge.
        precision: the run's.
        version: of the weights that were compared: optimizer steps behind them.

    Raises:
        ConfigurationError: the mean or the 99th percentile is beyond `Precision.probe_bounds`, of trained weights in a
            16-bit type beyond `SHARPER` times them.
    """
    _check(metrics, precision, "under the same weights", _slack(precision, version))


def _beyond(metrics: Mapping[str, float], precision: Precision, slack: float) -> bool:
    mean, p99 = precision.probe_bounds
    return P99 in metrics and not (metrics[MEAN] <= slack * mean and metrics[P99] <= slack * p99)


def _check(metrics: Mapping[str, float], precision: Precision, when: str, slack: float) -> None:
    if _beyond(metrics, precision, slack):
        mean, p99 = (slack * bound for bound in precision.probe_bounds)
        raise ConfigurationError(
            f"generator: its log-probabilities differ from the trainer's by {metrics[MEAN]:.3g} on average and "
            f"{metrics[P99]:.3g} at the 99th percentile, {when} (allowed in {precision.policy}: "
            f"{mean:g} and {p99:g}); compare precision, temperature and tokenizer on both sides, and "
            "torch.get_float32_matmul_precision()"
        )
