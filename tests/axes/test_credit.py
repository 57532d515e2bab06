"""Axis `credit`: advantages from the rewards of whole rollouts or of single turns, compared within a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl import ConfigurationError, PromptNormalization, TurnCredit
from lightning_scalerl.axes.advantage import GAE
from lightning_scalerl.axes.aggregation import SampleAggregation
from lightning_scalerl.axes.credit import OutcomeCredit, turn_of_tokens, turn_returns, turn_rewards
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.filter import DynamicSampling, Filter, ZeroVariance
from lightning_scalerl.axes.loss import Reinforce
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Conversation, Group, Scored, Source
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.task.arithmetic_base import new_model
from lightning_scalerl.update.terms import terms
from tests.helpers import make_group, row

OUTCOME, TURN = row(OutcomeCredit()), row(TurnCredit(discount=0.5))
# Per rollout: the length and the reward of each turn. Observations between turns have two tokens.
TURNS = [([3, 2], [0.0, 1.0]), ([2], [0.25]), ([1, 4, 2], [0.5, 0.0, 2.0])]


def conversation_group(turns: list[tuple[list[int], list[float]]], rewarded: bool = True) -> Group:
    group = make_group([sum(rewards) for _, rewards in turns], length=1)
    for number, (rollout, (lengths, rewards)) in enumerate(zip(group.rollouts, turns, strict=True)):
        starts: list[int] = []
        sources: list[int] = []
        for length in lengths:
            sources += [Source.ENVIRONMENT] * 2 if sources else []
            starts.append(len(sources))
            sources += [Source.SAMPLED] * length
        rollout.sources, rollout.tokens = sources, [1 + number] * len(sources)
        rollout.generator_logprobs, rollout.weight_versions = [-1.0] * len(sources), [0] * len(sources)
        rollout.conversation = Conversation(tuple(starts), tuple(rewards), rewarded)
    return group


def by_hand(turns: list[tuple[list[int], list[float]]], discount: float) -> list[list[float]]:
    """The advantage of every turn: its discounted return minus the group's mean return of that turn."""
    returns = [
        [sum(discount ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]
        for _, rewards in turns
    ]
    means = {
        t: sum(values[t] for values in returns if len(values) > t) / sum(len(values) > t for values in returns)
        for t in range(max(map(len, returns)))
    }
    return [[value - means[t] for t, value in enumerate(values)] for values in returns]


turns_of_groups = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.25, 1.0, -2.0])), min_size=1, max_size=4),
    min_size=2,
    max_size=5,
).map(lambda group: [([length for length, _ in some], [reward for _, reward in some]) for some in group])


@given(turns_of_groups)
def test_a_turn_is_compared_with_the_same_turn_of_the_group(turns: list[tuple[list[int], list[float]]]) -> None:
    batch = assemble([conversation_group(turns)], TURN, max_new_tokens=64)
    expected = by_hand(turns, 0.5)
    for index, (lengths, _) in enumerate(turns):
        position = 0
        for turn, length in enumerate(lengths):
            position += 2 if turn else 0
            got = batch.advantages[index, position : position + length]
            torch.testing.assert_close(got, torch.full((length,), expected[index][turn]), atol=1e-6, rtol=0)
            assert batch.loss_mask[index, position : position + length].all()
            if turn:
                assert not batch.loss_mask[index, position - 2 : position].any(), "an observation is not trained on"
            position += length
        assert not batch.loss_mask[index, position:].any()


def test_outcome_gives_all_turns_of_a_rollout_one_advantage() -> None:
    batch = assemble([conversation_group(TURNS)], OUTCOME, max_new_tokens=64)
    rewards = torch.tensor([sum(rewards) for _, rewards in TURNS])
    torch.testing.assert_close(batch.advantages[:, 0], (rewards - rewards.mean()).float())
    assert (batch.advantages == batch.advantages[:, :1]).all()


def test_single_turn_completions_get_the_same_credit_from_both_choices() -> None:
    groups = [make_group([1.0, 0.0, 0.5, 0.0], admission=number) for number in range(3)]
    outcome, turn = (assemble(groups, choices, max_new_tokens=8) for choices in (OUTCOME, TURN))
    assert torch.equal(outcome.advantages * outcome.loss_mask, turn.advantages * turn.loss_mask)


def test_a_turn_that_only_one_rollout_has_gets_no_advantage() -> None:
    choices = row(TurnCredit(), PromptNormalization(eps=0.0))
    batch = assemble([conversation_group(TURNS)], choices, max_new_tokens=64)
    returns = torch.tensor([1.0, 0.25, 2.5], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(batch.advantages[:, 0], expected.float())
    assert batch.advantages[2, 9:11].tolist() == [0.0, 0.0], "nothing to compare the third turn with"
    assert batch.advantages.isfinite().all()


def test_penalties_and_verifier_rewards_count_in_the_last_turn() -> None:
    group = conversation_group(TURNS)
    rollout = group.rollouts[2]
    rollout.reward -= 0.5  # as a length penalty would
    assert turn_rewards(rollout) == [0.5, 0.0, 1.5]
    assert sum(turn_rewards(rollout)) == rollout.reward
    unrewarded = conversation_group([([2, 2], [0.0, 0.0])] * 2, rewarded=False).rollouts[0]
    unrewarded.reward = 1.0  # from the task's verifier
    assert turn_rewards(unrewarded) == [0.0, 1.0] and turn_returns([0.0, 1.0], 0.5) == [0.5, 1.0]


def test_equal_sums_of_rewards_are_equal_exactly() -> None:
    """0.7 + 0.2 + 0.1 is below 1 from left to right. Normalization would magnify the difference."""
    for rewards in ([0.7, 0.2, 0.1], [0.1, 0.2, 0.7]):
        (rollout, _) = conversation_group([([1, 1, 1], rewards)] * 2).rollouts
        rollout.reward = 1.0
        assert turn_rewards(rollout) == rewards, "nothing remains for the last turn"
        assert turn_returns(rewards, 1.0)[0] == 1.0


def test_a_reward_scale_applies_to_each_turn() -> None:
    """The scale multiplies each turn's reward. Only its constant goes to the last turn."""
    group = conversation_group([([2, 2], [1.0, 0.0]), ([2, 2], [0.0, 0.0])])
    for rollout in group.rollouts:
        rollout.reward = 2 * rollout.reward - 1
        rollout.conversation = replace(rollout.conversation, scale=2.0)
    assert [turn_rewards(rollout) for rollout in group.rollouts] == [[2.0, -1.0], [0.0, -1.0]]
    first, second = TurnCredit().comparisons(group)
    assert first.values.tolist() == [1.0, -1.0] and second.values.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("filter", [ZeroVariance(), DynamicSampling()])
def test_a_filter_by_variance_keeps_a_group_whose_turns_differ(filter: Filter) -> None:
    """The rollouts' rewards are equal but earned in different turns, so advantages per turn are not zero."""
    group = conversation_group([([2, 2], [1.0, 0.0]), ([2, 2], [0.0, 1.0])])
    kept = assemble([group], row(TurnCredit(), filter), max_new_tokens=64)
    assert kept.rollouts == 2 and kept.advantages.abs().sum() > 0
    assert assemble([group], row(OutcomeCredit(), filter), max_new_tokens=64).rollouts == 0
    equal = conversation_group([([2, 2], [1.0, 0.0]), ([2, 2], [1.0, 0.0])])
    assert assemble([equal], row(TurnCredit(), filter), max_new_tokens=64).rollouts == 0


def test_an_observation_belongs_to_the_turn_before_it() -> None:
    assert turn_of_tokens(conversation_group(TURNS).rollouts[2]) == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_bad_discounts_and_gae_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"credit\.discount: 2 must be in"):
        TurnCredit(2)
    others = [choice for choice in row() if choice.axis not in ("advantage", "critic", "credit")]
    with pytest.raises(ConfigurationError, match=r"credit: turn .* advantage=GAE"):
        Choices.of([*others, TurnCredit(), GAE(), ValueNetwork()])


@pytest.mark.parametrize("choices", [OUTCOME, TURN], ids=["outcome", "turn"])
def test_the_gradient_equals_a_float64_loop_over_tokens(choices: Choices) -> None:
    """The model reads observations but is not trained on them."""
    model = new_model(width=32, layers=1, seed=0).double()
    group = conversation_group(TURNS)
    for rollout in group.rollouts:
        rollout.tokens = [1 + (3 * place + len(rollout.tokens)) % 15 for place in range(len(rollout.tokens))]
    parameters = list(model.parameters())
    batch = assemble([group], choices.replacing(SampleAggregation()).replacing(Reinforce()), max_new_tokens=16)

    logprobs = model(batch.tokens).logits.log_softmax(-1)
    rows, width = batch.advantages.shape
    aligned = torch.zeros(rows, width, dtype=torch.float64)
    for row_number in range(rows):
        for column in range(int(batch.lengths[row_number] - batch.completion_start[row_number])):
            place = int(batch.completion_start[row_number]) + column
            aligned[row_number, column] = logprobs[row_number, place - 1, batch.tokens[row_number, place]]
    (term,) = terms(choices.replacing(SampleAggregation()).replacing(Reinforce()))
    ours = torch.autograd.grad(term.reduce(Scored(batch, aligned, torch.zeros_like(aligned))), parameters)

    # The same loss by a loop over tokens.
    loss = torch.zeros((), dtype=torch.float64)
    mean = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
    advantages = by_hand(TURNS, 0.5)
    for number, rollout in enumerate(group.rollouts):
        tokens = group.prompt_tokens + rollout.tokens
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        turn, previous_source, sampled, rollout_loss = -1, Source.ENVIRONMENT, 0, torch.zeros((), dtype=torch.float64)
        for place, source in enumerate(rollout.sources):
            turn += source == Source.SAMPLED and previous_source == Source.ENVIRONMENT
            previous_source = Source(source)
            if source != Source.SAMPLED:
                continue
            advantage = advantages[number][turn] if choices is TURN else rollout.reward - mean
            position = len(group.prompt_tokens) + place
            rollout_loss = rollout_loss - advantage * scores[position - 1, tokens[position]]
            sampled += 1
        loss = loss + rollout_loss / sampled / len(group.rollouts)
    for gradient, expected in zip(ours, torch.autograd.grad(loss, parameters), strict=True):
        # The batch stores advantages in FP32, hence the tolerance.
        torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-6)
