"""Loss of a step as a list of terms. Each is per token and has its own coefficient and aggregation.

    policy    surrogate of axis `loss`, with the ratio's denominator and the weights of axis `correction`
    value     clipped squared error of the critic
    kl        estimate of the KL from policy to reference; with `kl.estimate=k1` the surrogate with minus this estimate
              as advantage
    entropy   minus the entropy bonus

All terms divide by the global denominators of the batch, so any split of a batch sums to the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_scalerl.axes.aggregation import Aggregation, named_aggregation
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.entropy import Entropy
from lightning_scalerl.axes.kl import KL, SAMPLED_ESTIMATES
from lightning_scalerl.axes.results import check_loss, check_shape
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Scored, TrainBatch


@dataclass(frozen=True)
class Term:
    """Term of the loss: `per_token` gives values (R, T) with the coefficient, and `aggregation` reduces them."""

    name: str
    per_token: Callable[[Scored], Tensor]
    aggregation: Aggregation

    def reduce(self, scored: Scored) -> Tensor:
        """Return the (micro-)batch's share of the term, a scalar. Values outside the loss mask are not read."""
        scored = scored.zero_outside_mask()
        return self.aggregation.reduce(self.per_token(scored), scored.batch, scored.batch.denominators)


def terms(choices: Choices) -> list[Term]:
    """Return the terms of a run's loss; the policy's term comes first.

    Raises:
        ConfigurationError: the aggregation of a term is unknown.
    """

    def surrogate(scored: Scored, advantages: Tensor) -> Tensor:
        loss, correction, logprobs = choices.loss, choices.correction, scored.trainer_logprobs
        per_token = check_loss(loss, "per_token", loss.per_token(*loss_inputs(scored, choices, advantages)), logprobs)
        weights = correction.weights(scored.batch)
        if weights is not None:
            check_shape(correction, "weights", weights, logprobs.shape)
        return per_token if weights is None else per_token * weights

    def policy(scored: Scored) -> Tensor:
        batch, logprobs = scored.batch, scored.trainer_logprobs
        per_token = surrogate(scored, batch.advantages)
        # Axes that the user defines come last, so they see the corrected loss.
        for choice in choices.user_axes.values():
            per_token = check_loss(choice, "adjust_loss", choice.adjust_loss(per_token, batch, logprobs), logprobs)
        return per_token

    def kl(scored: Scored) -> Tensor:
        coefficients, per_token = coefficients_of(choices.kl, scored.batch), kl_estimates(scored, choices)
        if choices.kl.estimate == "k1":
            # On samples of the policy the gradient of k1 itself is 0 on average (arXiv 2506.09477).
            per_token = surrogate(scored, -per_token.detach())
        return coefficients * per_token

    def entropy(scored: Scored) -> Tensor:
        return -coefficients_of(choices.entropy, scored.batch) * scored.entropies

    def aggregation_of(choice: KL | Entropy | ValueNetwork) -> Aggregation:
        return named_aggregation(f"{choice.axis}.aggregation", choice.aggregation) or choices.aggregation

    active = [Term("policy", policy, choices.aggregation)]
    critic = choices.critic
    if isinstance(critic, ValueNetwork):

        def value(scored: Scored) -> Tensor:
            batch = scored.batch
            assert scored.values is not None and batch.values is not None and batch.returns is not None
            return critic.coefficient * critic.per_token(scored.values, batch.values, batch.returns)

        active.append(Term("value", value, aggregation_of(critic)))
    if choices.kl.where == "loss":
        active.append(Term("kl", kl, aggregation_of(choices.kl)))
    if choices.entropy.acts:
        active.append(Term("entropy", entropy, aggregation_of(choices.entropy)))
    return active


def coefficients_of(choice: KL | Entropy, batch: TrainBatch) -> Tensor:
    """Return the coefficient of each rollout, (R, 1)."""
    coefficients = choice.coefficients(batch.pass_rates)
    return check_shape(choice, "coefficients", coefficients, batch.pass_rates.shape).unsqueeze(1)


def anchor_of(batch: TrainBatch, choices: Choices) -> Tensor:
    """Return the log-probabilities (R, T) in the denominator of the ratio."""
    anchor = choices.correction.anchor(batch)
    return check_shape(choices.correction, "anchor", anchor, batch.loss_mask.shape)


def loss_inputs(scored: Scored, choices: Choices, advantages: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of `Loss.per_token` and `Loss.clipped` for these advantages; each is (R, T)."""
    batch = scored.batch
    inputs = (scored.trainer_logprobs, anchor_of(batch, choices), advantages, batch.loss_mask)
    # Only losses that select tokens have a fifth parameter.
    return inputs if batch.selected is None else (*inputs, batch.selected)


def with_selection(batch: TrainBatch, choices: Choices, key: Sequence[int]) -> TrainBatch:
    """Return the whole `batch` with `selected` set to the tokens that `Loss.select` selects."""
    mask = batch.loss_mask
    selected = choices.loss.select(anchor_of(batch, choices), batch.advantages, mask, key)
    if selected is not None:
        check_shape(choices.loss, "select", selected, mask.shape, torch.bool)
    return replace(batch, selected=selected)


def kl_estimates(scored: Scored, choices: Choices) -> Tensor:
    """Return each token's KL estimate (R, T) by `kl.estimate`, in the dtype of axis `precision`."""
    round_to_policy, fp32 = choices.precision.round_to_policy, choices.precision.fp32_kl
    if choices.kl.reads_vocabulary:
        divergences = scored.batch.divergences if scored.divergences is None else scored.divergences
        assert divergences is not None
        return round_to_policy(divergences, fp32)
    reference = scored.batch.reference_logprobs
    assert reference is not None
    logprobs = round_to_policy(scored.trainer_logprobs, fp32)
    return SAMPLED_ESTIMATES[choices.kl.estimate](logprobs, round_to_policy(reference, fp32))


def loss_weights(batch: TrainBatch, trainer_logprobs: Tensor, choices: Choices) -> Tensor:
    """Return the tokens' weights in the update, shape (3, all rollouts, T).

    They are d loss / d (trainer_logprobs, entropies, divergences).

    Row i belongs to rollout i of the groups (`batch.row`), so two batches of the same groups can be compared even if
    they contain different rollouts. Rollouts that are not in the loss have weight zero. The value term is left out,
    because it does not change the policy.
    """
    logprobs = trainer_logprobs.detach().requires_grad_(True)
    # The terms are linear in entropies and divergences, so their gradient does not depend on these values.
    entropies, divergences = (torch.zeros_like(logprobs).requires_grad_(True) for _ in range(2))
    scored = Scored(batch, logprobs, entropies, divergences=divergences)
    policy_terms = [term for term in terms(choices) if term.name != "value"]
    loss = torch.stack([term.reduce(scored) for term in policy_terms]).sum()
    # `allow_unused`: without an entropy bonus, no term depends on the entropies.
    gradients = torch.autograd.grad(loss, (logprobs, entropies, divergences), allow_unused=True)
    total = sum(len(group.rollouts) for group in batch.groups)
    longest = max(len(rollout.tokens) for group in batch.groups for rollout in group.rollouts) if total else 0
    weights = logprobs.new_zeros(3, total, longest)
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            weights[number, batch.row, : gradient.shape[1]] = gradient
    return weights
