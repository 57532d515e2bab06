"""Tests of our losses, aggregations, credit, weights and distances against TRL and verl.

The peers' values are stored by make_peer_arrays.py. Every loss case runs all our code: rewards and the models' outputs
go through `credit.assemble`, `token_credit` and the loss terms, and the value and the gradients are compared. If a
peer does something else under the same name, a test of its own states the difference.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.advantage import GAE, GroupAdvantage
from lightning_scalerl.axes.aggregation import (
    Aggregation,
    ConstantAggregation,
    PromptAggregation,
    SampleAggregation,
    SumAggregation,
    TokenAggregation,
)
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Behaviour, Proximal
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.entropy import FixedEntropy, NoEntropyBonus
from lightning_scalerl.axes.filter import ZeroVariance
from lightning_scalerl.axes.kl import FixedKL, NoKL, k3
from lightning_scalerl.axes.loss import CISPO, DAPO, DPPO, GMPO, GSPO, PPO, SAPO, ClipCov, KLCov, Loss, Reinforce
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    BatchRewardNormalization,
    NoNormalization,
    Normalization,
    PromptNormalization,
    RunningNormalization,
)
from lightning_scalerl.axes.truncated import KeepTruncated, MaskTruncated
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Group, PassSize, Prompt, Rollout, Scored, TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import terms, with_selection
from lightning_scalerl.update.token_credit import token_advantages
from tests.examples import every
from tests.helpers import row

MAKER = Path(__file__).with_name("make_peer_arrays.py")
STORED = json.loads(Path(__file__).with_name("peer_arrays.json").read_text())
INPUTS = STORED["inputs"]
PEER_LOSSES = {case["name"]: case for case in STORED["losses"]}
PEER_ADVANTAGES = {case["name"]: case for case in STORED["advantages"]}
PEER_TOKEN_ADVANTAGES = {case["name"]: case for case in STORED["token_advantages"]}
PEER_WEIGHTS = {case["name"]: case for case in STORED["weights"]}
PEER_DISTANCES = {case["name"]: case for case in STORED["distances"]}
# More than the longest completion, which has 7 tokens.
MAX_TOKENS = 9
GRADIENTS = ("gradient", "entropy_gradient", "value_gradient")


def choices(loss: Loss, aggregation: Aggregation, **others: DesignChoice) -> Choices:
    return row(loss, aggregation, *others.values())


DAPO_26, DAPO_28, CISPO_5 = DAPO(0.2, 0.26), DAPO(0.2, 0.28), CISPO(5.0)
GSPO_005, GSPO_1 = GSPO(3e-3, 5e-3), GSPO(0.05, 0.1)
PPO_2, REINFORCE = PPO(0.2), Reinforce()
SAPO_1, SAPO_2, GMPO_4 = SAPO(1.0, 1.05), SAPO(2.0, 3.0), GMPO(0.4, 0.4)
DPPO_TV, DPPO_KL = DPPO("tv", 0.02, 0.05, 3.0), DPPO("kl", 0.01, 0.02, 3.0)
TOKEN, SAMPLE, PROMPT = TokenAggregation(), SampleAggregation(), PromptAggregation()
SUM, CONSTANT = SumAggregation(), ConstantAggregation()
NAMED = {"token": TOKEN, "sample": SAMPLE, "sum": SUM, "constant": CONSTANT}
ZERO_VARIANCE, MASK_TRUNCATED = ZeroVariance(), MaskTruncated()
DISTANCE, BONUS = FixedKL(0.2), FixedEntropy(0.01)
# TRL's entropy bonus is a mean over tokens for every loss type.
TOKEN_BONUS = FixedEntropy(0.01, aggregation="token")
PROXIMAL = Proximal(mode="none")
# Named as in TRL; names with "0.5" have a lower bound too. verl's masks always have one.
WEIGHTS = {
    f"{level} {mode}{f' {low}' if low else ''}": Proximal(level, mode, low, 3.0)
    for low in (0.0, 0.5)
    for level in ("token", "sequence")
    for mode in ("truncate", "mask")
}
TRL_WEIGHTS = {name: choice for name, choice in WEIGHTS.items() if not name.endswith("0.5")}
VERL_WEIGHTS = {name: choice for name, choice in WEIGHTS.items() if (choice.mode == "mask") == name.endswith("0.5")}
# verl whitens advantages with rsqrt(variance + 1e-8) and the unbiased variance. Without any eps ours is closest: the
# variances here are above 0.1, so that the results differ by less than 1e-7 of their size.
WHITENED = BatchNormalization(ddof=1, eps=0.0, centre=True)


def actor_critic(aggregation: Aggregation, gae: GAE, critic: ValueNetwork, **others: DesignChoice) -> Choices:
    return choices(PPO_2, aggregation, advantage=gae, critic=critic, normalization=WHITENED, **others)


SAME_LOSS = {
    "trl dapo 0.26 token": choices(DAPO_26, TOKEN),
    "trl dapo 0.26 sample": choices(DAPO_26, SAMPLE),
    "trl dapo 0.26 prompt": choices(DAPO_26, PROMPT),
    "trl dapo 0.28 token": choices(DAPO_28, TOKEN),
    "trl dapo 0.28 sample": choices(DAPO_28, SAMPLE),
    "trl dapo 0.28 prompt": choices(DAPO_28, PROMPT),
    "trl cispo token": choices(CISPO_5, TOKEN),
    "trl cispo prompt": choices(CISPO_5, PROMPT),
    "trl dapo 0.26 token filtered": choices(DAPO_26, TOKEN, filter=ZERO_VARIANCE),
    "trl dapo 0.26 sample filtered": choices(DAPO_26, SAMPLE, filter=ZERO_VARIANCE),
    "trl cispo prompt filtered": choices(CISPO_5, PROMPT, filter=ZERO_VARIANCE),
    "trl dapo 0.26 token forced": choices(DAPO_26, TOKEN),
    "trl dapo 0.26 sample forced": choices(DAPO_26, SAMPLE),
    "trl cispo prompt forced": choices(CISPO_5, PROMPT),
    "trl gspo 0.005 sample": choices(GSPO_005, SAMPLE),
    "trl gspo 0.1 sample": choices(GSPO_1, SAMPLE),
    "trl gspo 0.1 token": choices(GSPO_1, TOKEN),
    "trl gspo 0.1 prompt": choices(GSPO_1, PROMPT),
    "trl gspo 0.1 sample forced": choices(GSPO_1, SAMPLE),
    # GRPO as in TRL, from rewards to loss.
    "trl grpo from rewards": choices(PPO_2, SAMPLE, normalization=PromptNormalization(1, 1e-4)),
    "trl ppo token": choices(PPO_2, TOKEN),
    "trl ppo sample": choices(PPO_2, SAMPLE),
    "trl ppo prompt": choices(PPO_2, PROMPT),
    "trl ppo constant": choices(PPO_2, CONSTANT),
    "trl dapo 0.28 constant": choices(DAPO_28, CONSTANT),
    "trl gspo 0.1 constant": choices(GSPO_1, CONSTANT),
    "trl ppo prompt forced": choices(PPO_2, PROMPT),
    # The divisor counts all twelve rollouts, also the one without a credited token.
    "trl ppo constant forced": choices(PPO_2, CONSTANT),
    "trl ppo token batch rewards": choices(PPO_2, TOKEN, normalization=BatchRewardNormalization(1, 1e-4)),
    "trl ppo token truncated": choices(PPO_2, TOKEN, truncated=MASK_TRUNCATED),
    "trl ppo prompt truncated": choices(PPO_2, PROMPT, truncated=MASK_TRUNCATED),
    "trl ppo constant truncated": choices(PPO_2, CONSTANT, truncated=MASK_TRUNCATED),
    "trl cispo token truncated": choices(CISPO_5, TOKEN, truncated=MASK_TRUNCATED),
    "trl ppo token truncated forced": choices(PPO_2, TOKEN, truncated=MASK_TRUNCATED),
    "trl ppo token truncated from rewards": choices(
        PPO_2, TOKEN, truncated=MASK_TRUNCATED, normalization=PromptNormalization(1, 1e-4)
    ),
    "trl ppo token kl": choices(PPO_2, TOKEN, kl=DISTANCE),
    "trl ppo sample kl": choices(PPO_2, SAMPLE, kl=DISTANCE),
    "trl ppo prompt kl": choices(PPO_2, PROMPT, kl=DISTANCE),
    "trl ppo constant kl": choices(PPO_2, CONSTANT, kl=DISTANCE),
    "trl cispo token kl forced": choices(CISPO_5, TOKEN, kl=DISTANCE),
    "trl ppo token kl truncated": choices(PPO_2, TOKEN, kl=DISTANCE, truncated=MASK_TRUNCATED),
    "trl ppo token entropy": choices(PPO_2, TOKEN, entropy=TOKEN_BONUS),
    "trl ppo sample entropy": choices(PPO_2, SAMPLE, entropy=TOKEN_BONUS),
    "trl cispo token entropy forced": choices(CISPO_5, TOKEN, entropy=TOKEN_BONUS),
    "trl ppo token proximal": choices(PPO_2, TOKEN, correction=PROXIMAL),
    "trl ppo token kl proximal": choices(PPO_2, TOKEN, correction=PROXIMAL, kl=DISTANCE),
    **{
        f"trl {head} weights {name}{tail}": choices(loss, TOKEN, correction=weights, **others)
        for name, weights in TRL_WEIGHTS.items()
        for head, loss, tail, others in (
            ("ppo token", PPO_2, "", {}),
            ("cispo token", CISPO_5, "", {}),
            ("ppo token", PPO_2, " forced", {}),
            ("ppo token kl", PPO_2, "", {"kl": DISTANCE}),
        )
    },
    "trl ppo sample weights sequence mask": choices(PPO_2, SAMPLE, correction=WEIGHTS["sequence mask"]),
    "trl ppo constant weights token truncate": choices(PPO_2, CONSTANT, correction=WEIGHTS["token truncate"]),
    "trl ppo prompt weights token truncate 0.5": choices(PPO_2, PROMPT, correction=WEIGHTS["token truncate 0.5"]),
    "trl ppo sample weights sequence mask 0.5": choices(PPO_2, SAMPLE, correction=WEIGHTS["sequence mask 0.5"]),
    "trl gspo 0.1 sample weights sequence truncate": choices(GSPO_1, SAMPLE, correction=WEIGHTS["sequence truncate"]),
    "trl sapo sample": choices(SAPO_1, SAMPLE),
    "trl sapo sample forced": choices(SAPO_1, SAMPLE),
    "trl sapo 2 sample proximal": choices(SAPO_2, SAMPLE, correction=PROXIMAL),
    "trl gmpo sample": choices(GMPO_4, SAMPLE),
    "trl gmpo sample proximal": choices(GMPO_4, SAMPLE, correction=PROXIMAL),
    "verl sapo sample": choices(SAPO_1, SAMPLE),
    "verl gmpo sample": choices(GMPO_4, SAMPLE),
    "verl gmpo sample forced": choices(GMPO_4, SAMPLE),
    "verl dppo tv token": choices(DPPO_TV, TOKEN),
    "verl dppo tv sample": choices(DPPO_TV, SAMPLE),
    "verl dppo tv token forced": choices(DPPO_TV, TOKEN),
    "verl dppo kl token": choices(DPPO_KL, TOKEN),
    "verl dppo kl sample": choices(DPPO_KL, SAMPLE),
    "verl dppo kl token forced": choices(DPPO_KL, TOKEN),
    "verl dapo 0.28 token": choices(DAPO_28, TOKEN),
    "verl dapo 0.28 sample": choices(DAPO_28, SAMPLE),
    "verl cispo token": choices(CISPO_5, TOKEN),
    "verl cispo sample": choices(CISPO_5, SAMPLE),
    "verl cispo token forced": choices(CISPO_5, TOKEN),
    # verl gives each token its own part of the gradient; ours and TRL's spread the sequence's gradient. Both are equal
    # if advantages are constant along a sequence.
    "verl gspo 0.005 sample": choices(GSPO_005, SAMPLE),
    "verl gspo 0.1 sample": choices(GSPO_1, SAMPLE),
    "verl gspo 0.1 token": choices(GSPO_1, TOKEN),
    "verl gspo 0.1 token forced": choices(GSPO_1, TOKEN),
    # The following cases use verl's workers, which get the batch's number of rollouts: their sample average counts
    # rollouts without a credited token too. The constant is `loss_scale_factor`.
    **{
        f"verl {head} {name}{tail}": choices(loss, aggregation, **others)
        for name, aggregation in NAMED.items()
        for head, loss, tail, others in (
            ("ppo", PPO_2, "", {}),
            ("ppo", PPO_2, " forced", {}),
            ("reinforce", REINFORCE, "", {}),
            ("ppo", PPO_2, " kl", {"kl": DISTANCE}),
            ("ppo", PPO_2, " entropy", {"entropy": BONUS}),
        )
    },
    "verl dapo 0.28 sum": choices(DAPO_28, SUM),
    "verl dapo 0.28 constant": choices(DAPO_28, CONSTANT),
    "verl cispo sum": choices(CISPO_5, SUM),
    "verl cispo constant": choices(CISPO_5, CONSTANT),
    "verl cispo sum forced": choices(CISPO_5, SUM),
    "verl cispo constant forced": choices(CISPO_5, CONSTANT),
    "verl gspo 0.1 sum": choices(GSPO_1, SUM),
    "verl ppo token kl entropy forced": choices(PPO_2, TOKEN, kl=DISTANCE, entropy=BONUS),
    "verl ppo token proximal": choices(PPO_2, TOKEN, correction=PROXIMAL),
    "verl ppo token kl proximal": choices(PPO_2, TOKEN, correction=PROXIMAL, kl=DISTANCE),
    **{
        f"verl {head} weights {name}": choices(loss, TOKEN, correction=weights, **others)
        for name, weights in VERL_WEIGHTS.items()
        for head, loss, others in (
            ("ppo token", PPO_2, {}),
            ("ppo token kl", PPO_2, {"kl": DISTANCE}),
            ("reinforce token", REINFORCE, {}),
        )
    },
    "verl cispo sample weights token truncate": choices(CISPO_5, SAMPLE, correction=WEIGHTS["token truncate"]),
    # The sum of the actor's and the critic's losses; each has gradients of its own.
    "verl ppo gae token": actor_critic(TOKEN, GAE(1.0, 0.95), ValueNetwork()),
    "verl ppo gae sample": actor_critic(SAMPLE, GAE(1.0, 0.95), ValueNetwork()),
    "verl ppo gae sum": actor_critic(SUM, GAE(1.0, 0.95), ValueNetwork()),
    "verl ppo gae token forced": actor_critic(TOKEN, GAE(1.0, 0.95), ValueNetwork()),
    "verl ppo gae sample, critic token": actor_critic(SAMPLE, GAE(0.9, 0.5), ValueNetwork(aggregation="token")),
    "verl ppo gae token kl reward": actor_critic(
        TOKEN, GAE(1.0, 0.95), ValueNetwork(), correction=PROXIMAL, kl=FixedKL(0.2, "reward")
    ),
}
# verl selects tokens by the current policy's log-probabilities in every call; we do by the anchor's, once per step.
SELECTS = {
    "verl clip_cov token": ClipCov(share=1.0, low=0.1, high=0.5, clip_low=1.0, clip_high=1e6),
    "verl kl_cov token": KLCov(share=0.2, coefficient=0.5),
}
OTHER_LOSS = {
    *(f"{name}{tail}" for name in SELECTS for tail in ("", " forced")),
    "trl gmpo 0.2 sample forced",
    "verl cispo sample forced",
    "verl dual clip token",
    "verl ppo constant width",
    "verl ppo constant forced bare",
    "trl ppo sample truncated",
    "trl ppo token kl biased",
}

SAME_ADVANTAGE = {
    "trl group": PromptNormalization(ddof=1, eps=1e-4),
    "trl batch": BatchRewardNormalization(ddof=1, eps=1e-4),
    "trl none": NoNormalization(),
    "verl grpo scaled": PromptNormalization(ddof=1, eps=1e-6),
    "verl grpo unscaled": NoNormalization(),
    # With completions of one token: verl weights by tokens, and our batch scale counts each rollout once.
    "verl whitened": BatchNormalization(ddof=1, eps=0.0),
}
# Advantages of the rollouts that are not masked.
MASKED_ADVANTAGE = {
    "trl group truncated": PromptNormalization(ddof=1, eps=1e-4),
    "trl batch truncated": BatchRewardNormalization(ddof=1, eps=1e-4),
}
SAME_TOKEN_ADVANTAGE = {
    f"verl gae {discount} {trace} kl {beta}{tail}": (GAE(discount, trace), FixedKL(beta, "reward"))
    for discount, trace, beta in ((1.0, 0.95, 0.0), (0.9, 0.5, 0.0), (1.0, 1.0, 0.2))
    for tail in ("", " forced")
}
SAME_WEIGHTS = {
    f"{peer} {name}{tail}": weights
    for peer, known in (("trl", WEIGHTS), ("verl", VERL_WEIGHTS))
    for name, weights in known.items()
    for tail in ("", " forced")
}


def stored_groups(with_forced: bool) -> list[Group]:
    """The stored rollouts as a generator would return them. The prompts' different lengths have no effect."""
    rows = iter(zip(INPUTS["generator_logprobs"], INPUTS["forced"], strict=True))
    truncated = iter(INPUTS["truncated"])
    groups = []
    for number, rewards in enumerate(INPUTS["rewards"]):
        rollouts = []
        for reward in rewards:
            logprobs, forced = next(rows)
            length = len(logprobs)
            flags = [int(with_forced and bool(flag)) for flag in forced]
            reason = "length" if next(truncated) else "stop"
            rollouts.append(Rollout([5] * length, logprobs, [0] * length, flags, reason, reward=reward))
        groups.append(Group(number, Prompt(str(number), "", ""), [3] * (number + 1), rollouts))
    return groups


def padded(rows: list[list[float]], fill: float) -> Tensor:
    """Return rows as (R, T) float64, padded with `fill`."""
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def credited(picked: Choices, with_forced: bool) -> TrainBatch:
    """Return the batch for an update, with the models' outputs that its choices need. Padding is filled with junk."""
    batch = assemble(stored_groups(with_forced), picked, MAX_TOKENS)

    def before(name: str, needed: bool) -> Tensor | None:
        return padded(INPUTS[name], fill=-1.0)[batch.row, : batch.loss_mask.shape[1]] if needed else None

    rows = replace(
        batch,
        anchor_logprobs=before("proximal_logprobs", picked.needs_logprobs_before_update),
        reference_logprobs=before("reference_logprobs", bool(picked.kl.where)),
        values=before("values", picked.critic.has_values),
    )
    return token_advantages(rows, picked, sum_over_ranks=lambda numbers: numbers)


def ours(picked: Choices, with_forced: bool, micro_batch: int) -> dict[str, Tensor]:
    """Return our loss and its gradients (R, T), summed over micro-batches. Padding of inputs is filled with junk."""
    return on_batch(credited(picked, with_forced), picked, micro_batch)


def on_batch(batch: TrainBatch, picked: Choices, micro_batch: int) -> dict[str, Tensor]:
    """Return the same as `ours` for a batch that already has credit."""
    names = ("trainer_logprobs", "entropies", "new_values")
    leaves = [padded(INPUTS[name], fill=-1.0).requires_grad_(True) for name in names]
    total = torch.zeros((), dtype=torch.float64)
    for part in batch.micro_batches(PassSize(micro_batch)):
        scored = Scored(part, *(leaf[part.row, : part.loss_mask.shape[1]] for leaf in leaves))
        total = total + torch.stack([term.reduce(scored) for term in terms(picked)]).sum()
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return {"value": total.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def theirs(name: str) -> dict[str, Tensor]:
    """Return the peer's loss and gradients in the form of `ours`; gradients that are not stored are 0."""
    case = PEER_LOSSES[name]
    nothing = [[0.0] * len(row) for row in INPUTS["forced"]]
    gradients = {key: padded(case.get(key, nothing), fill=0.0) for key in GRADIENTS}
    return {"value": torch.tensor(case["value"], dtype=torch.float64), **gradients}


def sampled(with_forced: bool) -> Tensor:
    """Return (R, T, bool): True for tokens that are neither padding nor forced."""
    return padded([[1 - (with_forced and flag) for flag in row] for row in INPUTS["forced"]], fill=0.0) > 0


def our_advantages(normalization: Normalization) -> Tensor:
    """Return our advantages, (P, G) float64."""
    rewards = [torch.tensor(group, dtype=torch.float64) for group in INPUTS["rewards"]]
    return torch.stack(normalization.scale([GroupAdvantage().estimate(group) for group in rewards], rewards))


def their_advantages(name: str) -> Tensor:
    return torch.tensor(PEER_ADVANTAGES[name]["advantages"], dtype=torch.float64)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Compare with a tolerance: peers use float64; a TrainBatch holds advantages, masks and counts in float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def assert_same_step(actual: dict[str, Tensor], expected: dict[str, Tensor], times: float = 1.0) -> None:
    """Compare the loss and all gradients, ours multiplied by `times`."""
    for name in ("value", *GRADIENTS):
        assert_same(actual[name] * times, expected[name])


def test_every_stored_case_is_compared() -> None:
    assert set(PEER_LOSSES) == SAME_LOSS.keys() | OTHER_LOSS
    assert set(PEER_ADVANTAGES) == SAME_ADVANTAGE.keys() | MASKED_ADVANTAGE.keys()
    assert set(PEER_TOKEN_ADVANTAGES) == SAME_TOKEN_ADVANTAGE.keys()
    assert set(PEER_WEIGHTS) == SAME_WEIGHTS.keys()
    assert set(PEER_DISTANCES) == {"verl k3", "verl k3 far"}


@pytest.mark.parametrize("micro_batch", [12, 5])
@pytest.mark.parametrize("name", SAME_LOSS)
def test_loss_and_gradients_are_those_of_the_peers(name: str, micro_batch: int) -> None:
    assert_same_step(ours(SAME_LOSS[name], PEER_LOSSES[name]["forced"], micro_batch), theirs(name))


@pytest.mark.parametrize("micro_batch", [12, 5])
@pytest.mark.parametrize("name", SELECTS)
@pytest.mark.parametrize("forced", [False, True])
def test_selected_tokens_and_their_loss_are_those_of_verl(name: str, forced: bool, micro_batch: int) -> None:
    """Our selection runs on the log-probabilities by which verl selects."""
    loss, picked = SELECTS[name], choices(SELECTS[name], TOKEN)
    batch = credited(picked, forced)
    trainer = padded(INPUTS["trainer_logprobs"], fill=-1.0)[batch.row, : batch.loss_mask.shape[1]]
    chosen = loss.select(trainer, batch.advantages, batch.loss_mask, key=(0,))
    assert 3 < chosen.sum() < batch.loss_mask.sum() / 2
    expected = theirs(name + " forced" * forced)
    assert_same_step(on_batch(replace(batch, selected=chosen), picked, micro_batch), expected)
    # Selected by the anchor, as in a run, tokens and loss differ. So the inputs distinguish the two.
    by_anchor = with_selection(batch, picked, key=(0,))
    assert (on_batch(by_anchor, picked, 12)["gradient"] - expected["gradient"]).abs().max() > 1e-3


def other_choices(right: Choices) -> Iterator[Choices]:
    """Yield choices that a wrong implementation could equal: other losses and aggregations, or one other axis."""
    clipped = (PPO_2, PPO(0.3), DAPO_26, DAPO_28, DAPO(0.3, 0.26), CISPO_5, CISPO(4.0), CISPO(6.0), REINFORCE)
    sequences = (GSPO_005, GSPO_1, GSPO(0.2, 0.1), GSPO(0.05, 0.3), GMPO(0.3, 0.4), GMPO(0.4, 0.2))
    regions = (DPPO("tv", 0.05, 0.05), DPPO("tv", 0.02, 0.02), DPPO("kl", 0.02, 0.02), DPPO("kl", 0.01, 0.01))
    for loss in (*clipped, *sequences, *regions, SAPO(1.0, 2.0), SAPO(2.0, 1.05), right.loss):
        for aggregation in (TOKEN, SAMPLE, PROMPT, SUM, CONSTANT):
            yield right.replacing(loss).replacing(aggregation)
    yield from map(right.replacing, other_corrections(right))
    yield from map(right.replacing, other_credit(right))
    yield from map(right.replacing, other_terms(right))


def other_corrections(right: Choices) -> list[DesignChoice]:
    if not right.correction.recomputes:
        # REINFORCE has no ratio, so the anchor of a ratio does not matter.
        return [WEIGHTS["sequence mask"], *([] if isinstance(right.loss, Reinforce) else [PROXIMAL])]
    tighter = [Proximal(level, mode, 0.0, 2.0) for level in ("token", "sequence") for mode in ("truncate", "mask")]
    return [Behaviour(), PROXIMAL, *WEIGHTS.values(), *tighter]


def other_credit(right: Choices) -> list[DesignChoice]:
    wrong_choices: list[DesignChoice] = [KeepTruncated(), MASK_TRUNCATED, NoNormalization(), BatchNormalization(1, 0.0)]
    return [*wrong_choices, *((GAE(1.0, 0.9), GAE(0.99, 0.95)) if right.critic.has_values else ())]


def other_terms(right: Choices) -> list[DesignChoice]:
    wrong_choices: list[DesignChoice] = [DISTANCE, BONUS]
    if right.kl.where:
        wrong_choices += [NoKL(), FixedKL(0.1, right.kl.where), *(FixedKL(0.2, "loss", name) for name in NAMED)]
    if right.entropy.acts:
        wrong_choices += [NoEntropyBonus(), FixedEntropy(0.005), *(FixedEntropy(0.01, name) for name in NAMED)]
    if right.critic.has_values:
        wrong_choices += [
            ValueNetwork(0.4),
            ValueNetwork(clip=0.1),
            *(ValueNetwork(aggregation=name) for name in NAMED),
        ]
    return wrong_choices


def meaning(picked: Choices, axis: str) -> dict[str, Any]:
    """Return the semantics of the choice on an axis, with its own aggregation or the run's."""
    choice = picked.on(axis)
    assert choice is not None
    name = getattr(choice, "aggregation", None)
    return {**choice.semantics(), "aggregation": (NAMED[name] if name else picked.aggregation).semantics()}


@pytest.mark.slow
@pytest.mark.parametrize("name", every(12, SAME_LOSS, pytest.mark.full))
def test_every_other_loss_or_aggregation_would_fail(name: str) -> None:
    """The inputs distinguish all choices; otherwise the comparison with the peers would prove little."""
    right, peer, with_forced = SAME_LOSS[name], theirs(name), PEER_LOSSES[name]["forced"]
    batch = credited(right, with_forced)
    for other in other_choices(right):
        changed = [axis for axis, choice in other.items() if choice is not right.on(axis)]
        if all(meaning(other, axis) == meaning(right, axis) for axis in changed):
            continue
        after_credit = set(changed) <= {"loss", "aggregation"}
        step = on_batch(batch if after_credit else credited(other, with_forced), other, micro_batch=12)
        gaps = [(step[key] - peer[key]).abs().max() / peer[key].abs().max().clamp(min=1e-12) for key in GRADIENTS]
        assert max(gaps) > 0.01, [meaning(other, axis) for axis in changed]


def test_verl_does_not_count_a_rollout_without_credited_tokens() -> None:
    """verl's single functions leave it out of the average. We, TRL and verl's workers count it, as one of twelve."""
    cispo = ours(choices(CISPO_5, SAMPLE), with_forced=True, micro_batch=12)
    assert_same_step(cispo, theirs("verl cispo sample forced"), times=12 / 11)
    # Without a `loss_scale_factor`, verl divides by the padded width.
    ppo = ours(choices(PPO_2, CONSTANT), with_forced=True, micro_batch=12)
    assert_same_step(ppo, theirs("verl ppo constant forced bare"), times=12 / 11 * 9 / 7)


def test_trl_adds_a_constant_for_a_sequence_without_credited_tokens() -> None:
    """TRL's mean over no ratios is 1 there, so minus the advantage is added to its loss, without a gradient."""
    gmpo, peer = ours(choices(GMPO(0.2, 0.3), SAMPLE), True, micro_batch=12), theirs("trl gmpo 0.2 sample forced")
    (advantage,) = (
        reward - sum(group) / len(group)
        for number, (group, reward) in enumerate((group, reward) for group in INPUTS["rewards"] for reward in group)
        if all(INPUTS["forced"][number])
    )
    assert_same_step({**gmpo, "value": gmpo["value"] - advantage / 12}, peer)


def test_verls_constant_is_the_padded_width_by_default() -> None:
    """The width is 7 here and the limit 9. verl's constant varies with the micro-batch; ours and TRL's do not."""
    ppo = ours(choices(PPO_2, CONSTANT), with_forced=False, micro_batch=12)
    assert_same_step(ppo, theirs("verl ppo constant width"), times=9 / 7)


def test_a_filter_does_not_change_the_constant() -> None:
    """The divisor still counts the constant group, as in TRL, which has no filter; the group's advantages are 0."""
    filtered = ours(choices(PPO_2, CONSTANT, filter=ZERO_VARIANCE), with_forced=False, micro_batch=12)
    assert_same_step(filtered, theirs("trl ppo constant"))


def test_trl_counts_masked_completions_in_its_sample_average() -> None:
    """TRL divides by all twelve rollouts; we divide by the nine that are not masked."""
    masked = ours(choices(PPO_2, SAMPLE, truncated=MASK_TRUNCATED), with_forced=False, micro_batch=12)
    assert sum(INPUTS["truncated"]) == 3
    assert_same_step(masked, theirs("trl ppo sample truncated"), times=9 / 12)


def test_trl_weights_the_distance_by_the_ratio_by_default() -> None:
    """TRL's default `use_bias_correction_kl` corrects k3, because tokens were sampled by the weights before the update.

    Ours is k3 without the correction, as in GRPO's paper and in TRL without that setting.
    """
    plain, peer = choices(PPO_2, TOKEN, kl=DISTANCE), theirs("trl ppo token kl biased")
    assert not torch.allclose(ours(plain, False, 12)["gradient"], peer["gradient"], rtol=1e-2)
    policy = ours(choices(PPO_2, TOKEN), with_forced=False, micro_batch=12)
    logprobs = padded(INPUTS["trainer_logprobs"], 0.0).requires_grad_(True)
    ratio = (logprobs - padded(INPUTS["generator_logprobs"], 0.0)).exp()
    scaled_distance = 0.2 * (ratio * k3(logprobs, padded(INPUTS["reference_logprobs"], 0.0)))[sampled(False)].mean()
    assert_same(policy["value"] + scaled_distance.detach(), peer["value"])
    assert_same(policy["gradient"] + torch.autograd.grad(scaled_distance, logprobs)[0], peer["gradient"])


@pytest.mark.parametrize("name", [name for name in SAME_LOSS if " kl weights " in name])
def test_importance_weights_never_scale_the_distance(name: str) -> None:
    """In TRL, verl and ours: the KL term adds the same to a loss with weights as to one without."""
    peer = name.split()[0]

    def kl_contribution(case_name: str, step_of: Any) -> tuple[Tensor, Tensor]:
        with_kl, without = step_of(case_name), step_of(case_name.replace(" kl", ""))
        return with_kl["value"] - without["value"], with_kl["gradient"] - without["gradient"]

    def ours_of(case: str) -> dict[str, Tensor]:
        return ours(SAME_LOSS[case], with_forced=False, micro_batch=12)

    for step_of in (theirs, ours_of):
        for weighted, plain in zip(
            kl_contribution(name, step_of), kl_contribution(f"{peer} ppo token kl proximal", step_of), strict=True
        ):
            assert plain.abs().max() > 1e-4
            torch.testing.assert_close(weighted, plain, rtol=1e-6, atol=1e-10)


def test_verl_drops_the_gradient_of_large_ratios_under_its_default_dual_clip() -> None:
    """The gradient is dropped where the advantage is negative and the ratio above 3."""
    gradient = ours(choices(DAPO_28, TOKEN), with_forced=False, micro_batch=12)["gradient"]
    ratio = (padded(INPUTS["trainer_logprobs"], 0.0) - padded(INPUTS["generator_logprobs"], 0.0)).exp()
    dropped = (ratio > 3) & (our_advantages(NoNormalization()).reshape(-1, 1) < 0)
    assert dropped.any()
    assert (gradient[dropped] > 0).all()
    assert_same(gradient.masked_fill(dropped, 0.0), theirs("verl dual clip token")["gradient"])


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_weights_are_those_of_the_peers(name: str) -> None:
    """Compared inside the mask only. Outside it verl's are 0 and ours are 1, which has no effect."""
    case = PEER_WEIGHTS[name]
    weights = SAME_WEIGHTS[name].weights(credited(choices(PPO_2, TOKEN, correction=SAME_WEIGHTS[name]), case["forced"]))
    assert weights is not None
    peer, inside = padded(case["weights"], fill=0.0), sampled(case["forced"])
    assert_same(weights[inside], peer[inside])
    for other in WEIGHTS.values():
        if not other.same_as(SAME_WEIGHTS[name]):
            other_weights = other.weights(credited(choices(PPO_2, TOKEN, correction=other), case["forced"]))
            assert other_weights is not None
            assert not torch.allclose(other_weights[inside], peer[inside], rtol=1e-2)


def test_distances_are_those_of_verl_below_its_bound() -> None:
    """verl bounds k3 at 10 and drops the gradient above. Ours is bounded only where its exponential would overflow."""
    for name in ("verl k3", "verl k3 far"):
        case, inside = PEER_DISTANCES[name], sampled(False)
        logprobs = padded(INPUTS["trainer_logprobs"], 0.0).requires_grad_(True)
        distance = k3(logprobs, padded(INPUTS["reference_logprobs"], 0.0) + case["settings"]["shift"] * inside)
        (gradient,) = torch.autograd.grad(distance.sum(), logprobs)
        beyond = (distance > 10) & inside
        assert beyond.any() == (name == "verl k3 far")
        peer_distance, peer_gradient = (padded(case[key], fill=0.0) for key in ("distance", "gradient"))
        assert_same(distance.detach().clamp(max=10), peer_distance)
        assert_same(gradient.masked_fill(beyond, 0.0), peer_gradient)
        assert (gradient[beyond] < 0).all()


@pytest.mark.parametrize("name", SAME_ADVANTAGE)
def test_advantages_are_those_of_the_peers(name: str) -> None:
    assert_same(our_advantages(SAME_ADVANTAGE[name]), their_advantages(name))


@pytest.mark.parametrize("name", MASKED_ADVANTAGE)
def test_a_masked_completion_counts_in_the_baseline(name: str) -> None:
    """As in TRL, its reward counts in the mean and the standard deviation; only its tokens are left out."""
    picked = choices(PPO_2, TOKEN, truncated=MASK_TRUNCATED, normalization=MASKED_ADVANTAGE[name])
    batch = credited(picked, with_forced=False)
    assert batch.rollouts == len(INPUTS["truncated"]) - sum(INPUTS["truncated"])
    assert_same(batch.advantages[:, 0].double(), their_advantages(name).reshape(-1)[batch.row])
    assert torch.equal(their_advantages(name), their_advantages(name.removesuffix(" truncated")))


@pytest.mark.parametrize("normalization", [WHITENED, RunningNormalization(ddof=1, eps=0.0, centre=True)])
@pytest.mark.parametrize("name", SAME_TOKEN_ADVANTAGE)
def test_token_advantages_are_those_of_the_peers(name: str, normalization: Normalization) -> None:
    """Rewards are at the last sampled token. A running scale whitens its first batch by that batch alone."""
    case, (gae, distance) = PEER_TOKEN_ADVANTAGES[name], SAME_TOKEN_ADVANTAGE[name]
    others = {"critic": ValueNetwork(), "kl": distance, "normalization": normalization}
    batch = credited(choices(PPO_2, TOKEN, advantage=gae, **others), case["forced"])
    assert batch.returns is not None
    inside = sampled(case["forced"])
    assert_same(batch.advantages, padded(case["advantages"], fill=0.0) * inside)
    assert_same(batch.returns, padded(case["returns"], fill=0.0) * inside)


def test_trls_batch_scale_differs_from_ours() -> None:
    """TRL divides by the standard deviation of raw rewards, which grows if prompts differ in difficulty."""
    value, peer = our_advantages(BatchNormalization(ddof=1, eps=1e-4)), their_advantages("trl batch")
    assert not torch.allclose(value, peer, rtol=1e-2)
    rewards = torch.tensor(INPUTS["rewards"], dtype=torch.float64)
    assert_same(peer, our_advantages(NoNormalization()) / (rewards.std() + 1e-4))


@pytest.mark.slow
@pytest.mark.peers
def test_the_stored_arrays_can_be_computed_again(tmp_path: Path) -> None:
    """Uses the interpreter named by PEERS_PYTHON if set, because the peers need an environment of their own."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    probe = "import importlib.util as u; raise SystemExit(not (u.find_spec('trl') and u.find_spec('verl')))"
    if subprocess.run([python, "-c", probe], check=False).returncode:
        absent = f"{python} has no trl and verl; set PEERS_PYTHON to an interpreter made as in make_peer_arrays.py"
        if os.environ.get("CI_ALL") == "1":
            pytest.fail(absent)
        pytest.skip(absent)
    output = tmp_path / "peer_arrays.json"
    done = subprocess.run([python, MAKER, "--output", output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fresh = json.loads(output.read_text())
    assert without_versions(fresh) == approximately(without_versions(STORED)), fresh["environment"]


def without_versions(content: Any) -> Any:
    """Drop versions from the tree: another version of a peer may compute the same."""
    if isinstance(content, dict):
        return {k: without_versions(v) for k, v in content.items() if k not in ("environment", "version")}
    return [without_versions(value) for value in content] if isinstance(content, list) else content


def approximately(content: Any) -> Any:
    """Return the tree with each number as pytest.approx, which itself does not support nested lists."""
    if isinstance(content, dict):
        return {key: approximately(value) for key, value in content.items()}
    if isinstance(content, list):
        return [approximately(value) for value in content]
    return pytest.approx(content, rel=1e-9, abs=1e-12) if isinstance(content, float) else content
