"""Per-token credit after the forward passes: rewards and values -> advantages and returns -> normalization.

What rewards alone decide was done before (`stream.credit`); where the estimator is of that kind, nothing happens here.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_scalerl.axes.advantage import terminal_rewards
from lightning_scalerl.axes.normalization import Moments, Sums
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollout import Scored, TrainBatch
from lightning_scalerl.update.terms import distances


def token_credit(rows: TrainBatch, choices: Choices, sums: Sums, remember: bool = False) -> TrainBatch:
    """Return `rows` with the advantages that are trained on, and with returns where there is a critic.

    A pure function but for `remember`, so that a mechanism counter can credit a batch a second time.

    Args:
        rows: this rank's rows of the batch, with the results of `scored_before`.
        choices: the run's design choices.
        sums: adds numbers up over all ranks.
        remember: whether a normalization with a memory takes in this batch; once a step.
    """
    advantages, returns = rows.advantages, rows.returns
    if choices.advantage.after_forward:
        assert rows.values is not None
        rewards = terminal_rewards(rows.rewards, rows.loss_mask)
        if choices.kl.where == "reward":
            assert rows.anchor_logprobs is not None
            coefficients = choices.kl.coefficients(rows.pass_rates).unsqueeze(1)
            # `distances` reads no entropies: any table of that shape does in their place.
            gaps = distances(Scored(rows, rows.anchor_logprobs, rows.anchor_logprobs).inside(), choices)
            rewards = rewards - coefficients * gaps * rows.loss_mask
        advantages, returns = choices.advantage.estimate_tokens(rewards, rows.values, rows.loss_mask)
        if remember:
            unscaled = advantages
            choices.normalization.remember(lambda: Moments.of(unscaled[rows.loss_mask > 0], sums))
        advantages = choices.normalization.scale_tokens(advantages, rows.loss_mask, sums)
    advantages = choices.precision.kept(advantages, choices.precision.fp32_advantage)
    return replace(rows, advantages=advantages, returns=returns)
