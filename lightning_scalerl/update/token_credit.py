"""Advantages per token, after the forward passes: rewards and values -> advantages and returns -> normalization.

Advantages that depend on rewards alone were computed in `stream.credit`; here they are only rounded (axis `precision`).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_scalerl.axes.advantage import terminal_rewards
from lightning_scalerl.axes.normalization import Moments, Sums
from lightning_scalerl.axes.results import check_shape, check_shapes
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Scored, TrainBatch
from lightning_scalerl.update.terms import coefficients_of, kl_estimates


def token_advantages(
    rows: TrainBatch, choices: Choices, sum_over_ranks: Sums, update_statistics: bool = False
) -> TrainBatch:
    """Return `rows` with the advantages that are trained on, and with returns if there is a critic.

    With `remember=False` nothing is changed, so that a mechanism counter can call this a second time for the same
    batch.

    Args:
        rows: this rank's rows of the batch, with the results of `run_forward_passes`.
        choices: the run's design choices.
        sums: sums a tensor over all ranks.
        remember: whether a normalization with running statistics adds this batch to them; True once per step.
    """
    advantages, returns = rows.advantages, rows.returns
    if choices.advantage.after_forward:
        assert rows.values is not None
        rewards = terminal_rewards(rows.rewards, rows.loss_mask)
        if choices.kl.where == "reward":
            assert rows.anchor_logprobs is not None
            coefficients = coefficients_of(choices.kl, rows)
            # `kl_estimates` does not read entropies, so any tensor of the right shape can stand in for them.
            gaps = kl_estimates(Scored(rows, rows.anchor_logprobs, rows.anchor_logprobs).zero_outside_mask(), choices)
            rewards = rewards - coefficients * gaps * rows.loss_mask
        estimates = choices.advantage.estimate_tokens(rewards, rows.values, rows.loss_mask)
        advantages, returns = check_shapes(choices.advantage, "estimate_tokens", estimates, [rewards, rewards])
        if update_statistics:
            # The closure needs a name of its own, because `advantages` is rebound below.
            unscaled = advantages
            choices.normalization.remember(lambda: Moments.of(unscaled[rows.loss_mask > 0], sum_over_ranks))
        scaled = choices.normalization.scale_tokens(advantages, rows.loss_mask, sum_over_ranks)
        advantages = check_shape(choices.normalization, "scale_tokens", scaled, rows.loss_mask.shape)
    advantages = choices.precision.round_to_policy(advantages, choices.precision.fp32_advantage)
    return replace(rows, advantages=advantages, returns=returns)
