"""Credit per token: GAE by hand, rewards and KL penalties per token, normalization, ranks and precision."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_scalerl.axes.advantage import GAE, generalized_advantages, terminal_rewards
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Proximal
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.kl import FixedKL, KLByDifficulty, k3
from lightning_scalerl.axes.loss import CISPO
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    BatchRewardNormalization,
    Moments,
    NoNormalization,
    Normalization,
    RunningNormalization,
    scale_by_batch,
)
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Group, Source, TrainBatch
from lightning_scalerl.stream.credit import assemble, update_moments
from lightning_scalerl.update.token_credit import token_advantages
from tests.examples import examples
from tests.helpers import make_group, row

Numbers = list[list[float]]
BY_TOKEN = (NoNormalization(), ValueNetwork())


def alone(numbers: Tensor) -> Tensor:
    """The sum over ranks of a run on one rank."""
    return numbers


def by_token(*given: DesignChoice) -> Choices:
    """Choices with GAE, a critic and no normalization, except on the axes of the given choices."""
    claimed = {choice.axis for choice in given}
    defaults = [choice for choice in (GAE(), *BY_TOKEN) if choice.axis not in claimed]
    return row(*given, *defaults)


def gae_by_hand(
    rewards: Numbers, values: Numbers, sampled: list[list[bool]], discount: float, trace: float
) -> tuple[Numbers, Numbers]:
    """A_t = sum over l of (discount * trace)^l d_{t+l}, over the sampled tokens of a row. Returns (A, returns)."""
    advantages, returns = [], []
    for reward, value, mask in zip(rewards, values, sampled, strict=True):
        places = [place for place, is_sampled in enumerate(mask) if is_sampled]
        changes = []
        for at, place in enumerate(places):
            following = value[places[at + 1]] if at + 1 < len(places) else 0.0
            changes.append(reward[place] + discount * following - value[place])
        row_advantages, row_returns = [0.0] * len(mask), [0.0] * len(mask)
        for at, place in enumerate(places):
            row_advantages[place] = sum((discount * trace) ** lag * change for lag, change in enumerate(changes[at:]))
            row_returns[place] = row_advantages[place] + value[place]
        advantages.append(row_advantages)
        returns.append(row_returns)
    return advantages, returns


SHARES = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@settings(max_examples=examples(150))
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 7), discount=SHARES, trace=SHARES)
def test_gae_is_its_definition_whatever_was_forced(
    data: st.DataObject, rows: int, width: int, discount: float, trace: float
) -> None:
    """Any tokens may be forced, even all of a row. Rewards may be on any token."""

    def table(element: Any) -> Any:
        return data.draw(st.lists(st.lists(element, min_size=width, max_size=width), min_size=rows, max_size=rows))

    number = st.floats(-3, 3, width=32)
    rewards, values, sampled = table(number), table(number), table(st.booleans())
    expected = gae_by_hand(rewards, values, sampled, discount, trace)
    mask = torch.tensor(sampled)
    arguments = torch.tensor(rewards).double(), torch.tensor(values).double()
    credit = generalized_advantages(*arguments, mask.double(), discount, trace)
    for ours, reference in zip(credit, expected, strict=True):
        assert torch.allclose(ours, torch.tensor(reference).double(), atol=1e-9)
    # Values and rewards of forced tokens are ignored.
    disturbed = [torch.where(mask, table, 1e6) for table in arguments]
    disturbed_credit = generalized_advantages(disturbed[0], disturbed[1], mask.double(), discount, trace)
    assert all(map(torch.equal, disturbed_credit, credit))


def test_gae_with_trace_0_and_1() -> None:
    """Trace 1 gives the return minus the value, trace 0 the change from one token to the next."""
    values = torch.tensor([[0.5, 9.0, 0.25, -1.0, 7.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    rewards = terminal_rewards(torch.tensor([2.0]), mask)
    assert rewards.tolist() == [[0, 0, 0, 2.0, 0]]
    advantages, returns = generalized_advantages(rewards, values, mask, 1.0, 1.0)
    assert returns.tolist() == [[2.0, 0, 2.0, 2.0, 0]]
    assert advantages.tolist() == [[1.5, 0, 1.75, 3.0, 0]]
    advantages, returns = generalized_advantages(rewards, values, mask, 1.0, 0.0)
    assert advantages.tolist() == [[-0.25, 0, -1.25, 3.0, 0]]
    assert returns.tolist() == [[0.25, 0, -1.0, 2.0, 0]]
    advantages, _ = generalized_advantages(rewards, torch.zeros(1, 5), mask, 0.5, 0.5)
    assert advantages.tolist() == [[0.125, 0, 0.5, 2.0, 0]], "one discount per sampled token, none for forced tokens"


@pytest.mark.parametrize("bad", [-0.1, 1.1, True, "1", None, float("nan")])
@pytest.mark.parametrize("field", ["discount", "trace"])
def test_bad_discounts_and_traces_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"advantage\.{field}: .* must be in \[0, 1\]"):
        GAE(**{field: bad})


def test_the_reward_stands_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rewards = terminal_rewards(torch.tensor([1.0, -0.5, 0.25, 7.0]), mask)
    assert rewards.tolist() == [[0, 1.0, 0, 0], [0, 0, 0, -0.5], [0, 0, 0.25, 0], [0, 0, 0, 0]]


# --- credit of a batch ---------------------------------------------------------------------------------------


def groups_of(seed: int = 0, rewards: Sequence[Sequence[float]] = ((1.0, 0.0, 0.5), (0.0, 1.0, 1.0))) -> list[Group]:
    """Groups with forced tokens. In the first two rollouts the last token is forced too."""
    groups = [make_group(each, admission=number, seed=seed) for number, each in enumerate(rewards)]
    for number, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        length = len(rollout.tokens)
        rollout.sources = [int(place % 3 == 1 or (number < 2 and place == length - 1)) for place in range(length)]
        rollout.sources[0] = Source.SAMPLED
    return groups


def scored(groups: list[Group], choices: Choices, seed: int = 0) -> TrainBatch:
    """A batch with values, anchor and reference log-probabilities, also on forced tokens."""
    batch = assemble(groups, choices, max_new_tokens=9)
    source = torch.Generator().manual_seed(seed)
    column = torch.arange(batch.loss_mask.shape[1])
    real = column < (batch.lengths - batch.completion_start).unsqueeze(1)

    def drawn() -> Tensor:
        return torch.where(real, torch.randn(batch.loss_mask.shape, generator=source), 0.0)

    anchor = batch.generator_logprobs + 0.3 * drawn()
    return replace(batch, values=drawn(), anchor_logprobs=anchor, reference_logprobs=anchor + 0.5 * drawn())


def credit_by_hand(batch: TrainBatch, choices: Choices, rewards: Numbers) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a batch by hand, from rewards per token."""
    assert batch.values is not None and isinstance(choices.advantage, GAE)
    mask = (batch.loss_mask > 0).tolist()
    shares = choices.advantage.discount, choices.advantage.trace
    found = gae_by_hand(rewards, batch.values.tolist(), mask, *shares)
    return torch.tensor(found[0]), torch.tensor(found[1])


def rewards_of(batch: TrainBatch) -> Numbers:
    table = []
    for mask, reward in zip(batch.loss_mask.tolist(), batch.rewards.tolist(), strict=True):
        places = [place for place, is_sampled in enumerate(mask) if is_sampled]
        table.append([reward * (place == places[-1]) for place in range(len(mask))])
    return table


@pytest.mark.parametrize("gae", [GAE(), GAE(0.9, 0.5), GAE(1.0, 1.0)], ids=lambda gae: f"{gae.discount}-{gae.trace}")
def test_credit_of_a_batch_by_hand(gae: GAE) -> None:
    choices = by_token(gae)
    batch = scored(groups_of(), choices)
    assert batch.forced_mask.any() and not batch.advantages.any(), "without values there is no credit yet"
    ours = token_advantages(batch, choices, alone)
    advantages, returns = credit_by_hand(batch, choices, rewards_of(batch))
    assert ours.returns is not None
    assert torch.allclose(ours.advantages, advantages, atol=1e-6) and torch.allclose(ours.returns, returns, atol=1e-6)
    assert not ours.advantages[batch.loss_mask == 0].any()
    assert batch.returns is None and not batch.advantages.any(), "the batch itself must not change"


def test_credit_within_groups_is_unchanged() -> None:
    choices = row(BatchNormalization(), Proximal())
    batch = scored(groups_of(), choices)
    credited_batch = token_advantages(batch, choices, alone, update_statistics=True)
    assert torch.equal(credited_batch.advantages, batch.advantages) and credited_batch.returns is None


KLS = [FixedKL(0.2, where="reward"), KLByDifficulty(easy=0.5, hard=0.1, where="reward")]


@pytest.mark.parametrize("kl", KLS, ids=lambda kl: type(kl).__name__)
def test_kl_lowers_the_reward_of_each_token(kl: Any) -> None:
    """The penalty per sampled token is exp(d) - d - 1; d is the reference's minus the anchor's log-probability."""
    choices = by_token(kl, GAE(0.9, 0.8))
    groups = groups_of()
    groups[0].history = (1.0, 0.0)
    batch = scored(groups, choices)
    assert batch.anchor_logprobs is not None and batch.reference_logprobs is not None
    rewards = rewards_of(batch)
    for at, group in enumerate(each for each in groups for _ in each.rollouts):
        rate = (sum(group.history) + group.pass_rate) / (len(group.history) + 1)
        coefficient = 0.2 if isinstance(kl, FixedKL) else 0.1 + 0.4 * rate
        for place in range(batch.loss_mask.shape[1]):
            gap = float(batch.reference_logprobs[at, place] - batch.anchor_logprobs[at, place])
            rewards[at][place] -= coefficient * (math.exp(gap) - gap - 1) * float(batch.loss_mask[at, place])
    advantages, returns = credit_by_hand(batch, choices, rewards)
    ours = token_advantages(batch, choices, alone)
    assert ours.returns is not None
    assert torch.allclose(ours.advantages, advantages, atol=1e-5) and torch.allclose(ours.returns, returns, atol=1e-5)
    without_kl = token_advantages(batch, by_token(GAE(0.9, 0.8)), alone)
    assert not torch.allclose(ours.advantages, without_kl.advantages, atol=1e-2)
    # A forced token has no penalty, because the policy did not choose it.
    for junk in (5.0, math.nan):
        forced = torch.where(batch.forced_mask, junk, batch.reference_logprobs)
        disturbed = token_advantages(replace(batch, reference_logprobs=forced), choices, alone)
        assert torch.equal(disturbed.advantages, ours.advantages)


def test_k3_by_hand_and_at_extreme_gaps() -> None:
    ours = torch.log(torch.tensor([0.5, 0.25, 0.1])).requires_grad_(True)
    reference = torch.log(torch.tensor([0.25, 0.25, 0.8]))
    values = k3(ours, reference)
    assert torch.allclose(values, torch.tensor([0.5 + math.log(2) - 1, 0.0, 8 - math.log(8) - 1]), atol=1e-6)
    (gradient,) = torch.autograd.grad(values.sum(), ours)
    assert torch.allclose(gradient, torch.tensor([1 - 0.5, 0.0, 1 - 8.0]), atol=1e-6)
    assert k3(torch.tensor([-900.0, 0.0]), torch.tensor([0.0, -900.0])).isfinite().all()


def test_k3_of_a_policy_that_has_hardly_moved() -> None:
    """About d^2 / 2 also in FP32, where exp(d) - 1 keeps only one digit of d. Never negative."""
    gaps = torch.tensor([3e-3, 1e-3, 1e-4, -1e-4, -1e-3, -3e-3])
    exact = torch.expm1(gaps.double()) - gaps.double()
    assert torch.allclose(k3(torch.zeros(6), gaps).double(), exact, rtol=2e-3, atol=0)
    many = torch.cat([torch.logspace(-12, 1, 4000), -torch.logspace(-12, 1, 4000)])
    assert bool((k3(torch.zeros(8000), many) >= 0).all())


# --- scales --------------------------------------------------------------------------------------------------


def credited(batch: TrainBatch, advantages: Tensor) -> list[float]:
    return advantages[batch.loss_mask > 0].double().tolist()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("centre", [False, True])
def test_a_batch_of_tokens_has_one_scale(ddof: int, centre: bool) -> None:
    """Each credited token counts once, whatever its rollout's length. Forced tokens and padding do not count."""
    unscaled_choices = by_token()
    batch = scored(groups_of(), unscaled_choices)
    raw = token_advantages(batch, unscaled_choices, alone)
    numbers = credited(batch, raw.advantages)
    deviation = (statistics.pstdev if ddof == 0 else statistics.stdev)(numbers)
    shift = statistics.fmean(numbers) if centre else 0.0
    choices = by_token(BatchNormalization(ddof, 1e-3, centre))
    scaled = token_advantages(batch, choices, alone)
    expected = torch.where(batch.loss_mask > 0, (raw.advantages - shift) / (deviation + 1e-3), 0.0)
    assert abs(statistics.fmean(numbers)) > 0.05, "with a mean near zero, centring would not show"
    assert torch.allclose(scaled.advantages, expected, atol=1e-5)
    assert raw.returns is not None and scaled.returns is not None
    assert torch.equal(scaled.returns, raw.returns), "the critic learns in the units of the reward"


def test_a_single_token_is_not_scaled() -> None:
    choices = by_token(BatchNormalization(ddof=1, centre=True))
    group = make_group([1.0, 0.0])
    for rollout in group.rollouts:
        rollout.sources = [Source.FORCED] * len(rollout.tokens)
    group.rollouts[0].sources[0] = Source.SAMPLED
    batch = scored([group], choices)
    assert batch.denominators.tokens == 1
    scaled = token_advantages(batch, choices, alone)
    assert torch.equal(scaled.advantages, token_advantages(batch, by_token(), alone).advantages)


NUMBERS = st.lists(st.floats(-5, 5, width=32), max_size=12)


@settings(max_examples=examples(100))
@given(parts=st.lists(NUMBERS, max_size=4), ddof=st.sampled_from([0, 1]))
def test_moments_add_up(parts: list[list[float]], ddof: int) -> None:
    together = Moments()
    for part in parts:
        together = together + Moments.of(torch.tensor(part, dtype=torch.float32))
    everything = np.array([number for part in parts for number in part], dtype=np.float64)
    assert together.count == everything.size
    if everything.size > ddof:
        assert together.mean == pytest.approx(everything.mean(), abs=1e-9)
        assert together.deviation(ddof) == pytest.approx(everything.std(ddof=ddof), abs=1e-6)
    else:
        assert together.deviation(ddof) is None


def steps_by_token(choices: Choices, seeds: Sequence[int]) -> list[Tensor]:
    """Advantages of successive training steps, with credit per token."""
    return [token_advantages(scored(groups_of(seed), choices, seed), choices, alone, True).advantages for seed in seeds]


def steps_by_group(choices: Choices, seeds: Sequence[int]) -> list[Tensor]:
    """Advantages of successive training steps, with credit within groups as the stream computes it."""
    advantages = []
    for seed in seeds:
        groups = groups_of(seed, ((1.0, 0.0, 0.1 * seed), (0.0, 1.0 + seed, 1.0)))
        update_moments(groups, choices)
        advantages.append(assemble(groups, choices, 9).advantages[:, 0])
    return advantages


Steps = Callable[[Choices, Sequence[int]], list[Tensor]]


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("steps", "kind"), [(steps_by_token, by_token), (steps_by_group, row)])
def test_running_statistics_are_of_all_advantages_so_far(steps: Steps, kind: Any, centre: bool) -> None:
    """The statistics equal numpy's over all advantages up to and including each batch."""
    seeds = [1, 2, 3, 4]
    raw_steps = steps(kind(NoNormalization()), seeds)
    scaled_steps = steps(kind(RunningNormalization(1, 1e-3, centre)), seeds)
    seen: list[float] = []
    for seed, raw, scaled in zip(seeds, raw_steps, scaled_steps, strict=True):
        if raw.dim() == 2:
            inside = scored(groups_of(seed), by_token()).loss_mask > 0
        else:
            inside = torch.ones_like(raw, dtype=torch.bool)
        seen += raw[inside].double().tolist()
        shift, scale = float(np.mean(seen)) * centre, float(np.std(seen, ddof=1)) + 1e-3
        expected = torch.where(inside, (raw - shift) / scale, 0.0)
        assert torch.allclose(scaled.float(), expected.float(), atol=1e-5)
    batch_steps = steps(kind(BatchNormalization(1, 1e-3, centre)), seeds)
    assert torch.allclose(scaled_steps[0], batch_steps[0], atol=1e-6), "after one batch, both scales are the same"
    assert not torch.allclose(scaled_steps[-1], batch_steps[-1], atol=1e-2)


@pytest.mark.parametrize(("steps", "kind"), [(steps_by_token, by_token), (steps_by_group, row)])
def test_running_statistics_survive_a_stop(steps: Steps, kind: Any) -> None:
    whole = steps(kind(RunningNormalization()), [1, 2, 3, 4])
    first, second = RunningNormalization(), RunningNormalization()
    first_steps = steps(kind(first), [1, 2])
    state = first.state_dict()
    steps(kind(first), [9])
    second.load_state_dict(state)
    assert all(map(torch.equal, first_steps + steps(kind(second), [3, 4]), whole))


def test_crediting_a_batch_twice_does_not_change_the_statistics() -> None:
    """A mechanism counter credits the batch again, which must not count in the running statistics."""
    once, twice = by_token(RunningNormalization()), by_token(RunningNormalization())
    expected = steps_by_token(once, [1, 2, 3])
    advantages = []
    for seed in (1, 2, 3):
        batch = scored(groups_of(seed), twice, seed)
        token_advantages(batch, twice, alone)
        advantages.append(token_advantages(batch, twice, alone, update_statistics=True).advantages)
        assert torch.equal(token_advantages(batch, twice, alone).advantages, advantages[-1])
        update_moments(groups_of(seed), twice)  # no effect: with GAE, the stream has no advantages to remember
    assert all(map(torch.equal, advantages, expected))


def test_group_advantages_centred_by_hand() -> None:
    one, two = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0, 7.0])
    scaled = scale_by_batch([one, two], ddof=0, eps=0.0, centre=True)
    numbers = np.array([1.0, 3.0, 2.0, 2.0, 7.0])
    assert torch.cat(scaled).tolist() == pytest.approx((numbers - 3.0) / numbers.std())
    assert [len(each) for each in scaled] == [2, 3]
    running = RunningNormalization(ddof=0, eps=0.0, centre=True)
    running.remember(lambda: Moments.of(one))
    running.remember(lambda: Moments.of(two))  # from here on, `one` is part of the history
    assert torch.cat(running.scale([two], [])).tolist() == pytest.approx(((numbers - 3.0) / numbers.std())[2:])
    assert scale_by_batch([], 1, 1e-6, centre=True) == []


@pytest.mark.parametrize("ddof", [0, 1])
def test_the_scale_of_batch_rewards_includes_prompt_difficulty(ddof: int) -> None:
    """One group mostly fails and the other mostly passes. The scale includes this difference."""
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    groups = [make_group(group_rewards, number) for number, group_rewards in enumerate(rewards)]
    numbers = np.array(rewards)
    choice = BatchRewardNormalization(ddof, 1e-2)
    advantages = assemble(groups, row(choice), 9).advantages[:, 0]
    expected = (numbers - numbers.mean(1, keepdims=True)) / (numbers.std(ddof=ddof) + 1e-2)
    assert advantages.tolist() == pytest.approx(expected.reshape(-1).tolist())
    assert BatchRewardNormalization().eps == 1e-4, "TRL's default"
    single = choice.scale([torch.tensor([0.5])], [torch.tensor([1.0])])
    assert choice.scale([], []) == [] and (ddof == 0 or single[0].tolist() == [0.5])


# --- over ranks ----------------------------------------------------------------------------------------------


def on_ranks(parts: Sequence[TrainBatch], work: Callable[[TrainBatch, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Run `work` on each part in a thread of its own. Sums wait for all threads, as they do for ranks."""
    barrier, table = threading.Barrier(len(parts), timeout=20), [torch.zeros(0)] * len(parts)
    results: list[Any] = [None] * len(parts)

    def rank(number: int) -> None:
        def sums(numbers: Tensor) -> Tensor:
            table[number] = numbers
            barrier.wait()
            total = torch.stack(table).sum(0)
            barrier.wait()
            return total

        try:
            results[number] = work(parts[number], sums)
        except BaseException as error:
            results[number] = error
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results


def check_ranks(cuts: Sequence[int], normalization: Callable[[], Normalization]) -> None:
    """Check that ranks with unequal numbers of rollouts get the advantages of one rank, for three steps."""
    one = by_token(normalization())
    several = [by_token(normalization()) for _ in range(len(cuts) + 1)]
    for seed in (1, 2, 3):
        batch = scored(groups_of(seed), one, seed)
        parts = [batch.select(part) for part in torch.tensor_split(torch.arange(batch.rollouts), list(cuts))]
        whole = token_advantages(batch, one, alone, update_statistics=True)
        choices_by_part = {id(part): choices for part, choices in zip(parts, several, strict=True)}

        def credit(part: TrainBatch, sums: Any, choices_by_part: dict[int, Choices] = choices_by_part) -> TrainBatch:
            return token_advantages(part, choices_by_part[id(part)], sums, update_statistics=True)

        for part, credited_part in zip(parts, on_ranks(parts, credit), strict=True):
            width = credited_part.advantages.shape[1]
            of_this_rank = torch.isin(batch.row, part.row)
            assert torch.allclose(credited_part.advantages, whole.advantages[of_this_rank][:, :width], atol=1e-5)


SCALES = [lambda: BatchNormalization(centre=True), lambda: RunningNormalization(centre=True), NoNormalization]


@pytest.mark.parametrize("normalization", SCALES, ids=["batch", "running", "none"])
@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 3)], ids=str)
def test_all_ranks_share_one_scale(cuts: tuple[int, ...], normalization: Any) -> None:
    check_ranks(cuts, normalization)


@pytest.mark.parametrize("normalization", SCALES, ids=["batch", "running", "none"])
def test_a_rank_without_rows_takes_part_in_the_scale(normalization: Any) -> None:
    check_ranks((6,), normalization)


def test_an_empty_batch_gets_empty_credit() -> None:
    choices = by_token(BatchNormalization(centre=True), FixedKL(where="reward"))
    empty = scored([], choices)
    credited = token_advantages(empty, choices, alone, update_statistics=True)
    assert credited.returns is not None and credited.advantages.numel() == credited.returns.numel() == 0


# --- precision -----------------------------------------------------------------------------------------------

FULL, HALF = Precision("bf16"), Precision("bf16", fp32_advantage=False)


@pytest.mark.parametrize("kind", [by_token, row], ids=["gae", "group"])
def test_advantages_are_rounded_where_precision_says_so(kind: Any) -> None:
    def credit(precision: Precision) -> Tensor:
        choices = kind(precision, BatchNormalization())
        return token_advantages(scored(groups_of(), choices), choices, alone).advantages

    exact, rounded = credit(FULL), credit(HALF)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)
    assert torch.equal(credit(Precision("fp16", fp32_advantage=False)), exact.half().float())
    assert torch.equal(credit(Precision("fp32", fp32_advantage=False)), exact), "the policy's type is FP32"


def test_kl_uses_rounded_log_probabilities_where_precision_says_so() -> None:
    kl = FixedKL(1.0, where="reward")
    choices = by_token(kl, Precision("bf16", fp32_kl=False), GAE(1.0, 0.0))
    batch = scored(groups_of(), choices)
    assert batch.anchor_logprobs is not None and batch.reference_logprobs is not None
    rounded = replace(
        batch,
        anchor_logprobs=batch.anchor_logprobs.bfloat16().float(),
        reference_logprobs=batch.reference_logprobs.bfloat16().float(),
    )
    full = by_token(kl, Precision("bf16"), GAE(1.0, 0.0))
    advantages = token_advantages(batch, choices, alone).advantages
    assert torch.equal(advantages, token_advantages(rounded, full, alone).advantages)
    assert not torch.equal(advantages, token_advantages(batch, full, alone).advantages)


def test_invalid_pairs_are_refused() -> None:
    """The error names both choices in one line."""
    for choices, match in (
        ([GAE()], r"advantage: gae \(GAE\) needs values; choose critic=value_network"),
        ([ValueNetwork()], r"critic: value_network .* is not asked by advantage GroupAdvantage; choose advantage=gae"),
        ([GAE(), ValueNetwork(), BatchRewardNormalization()], r"BatchRewardNormalization .* advantage=gae \(GAE\)"),
        ([FixedKL(where="reward")], r"kl\.where: 'reward' needs advantages per token \(advantage=gae\)"),
    ):
        with pytest.raises(ConfigurationError, match=match) as caught:
            row(*choices, CISPO())
        assert "\n" not in str(caught.value)


def test_an_axis_that_adjusts_group_advantages_is_refused_with_gae() -> None:
    class Tilt(DesignChoice):
        axis = "tilt"
        neutral = {"choice": "NoTilt"}  # noqa: RUF012

    class NoTilt(Tilt):
        pass

    class Upwards(Tilt):
        def adjust_advantages(self, advantages: list[Tensor], groups: Sequence[Group]) -> list[Tensor]:
            return [each + 1 for each in advantages]

    assert by_token(NoTilt()).user_axes["tilt"].same_as(NoTilt())
    with pytest.raises(ConfigurationError, match=r"tilt: Upwards adjusts the advantages of groups, and advantage=gae"):
        by_token(Upwards())
