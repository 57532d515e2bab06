"""Mechanism counters of the newer choices: 0 if a choice cannot act in a step, 1 if it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.axes.advantage import GAE
from lightning_scalerl.axes.aggregation import ConstantAggregation, SumAggregation, TokenAggregation
from lightning_scalerl.axes.allocation import AllocationByDifficulty, FixedAllocation
from lightning_scalerl.axes.async_mode import OnPolicy
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Behaviour, Proximal
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.curriculum import (
    ExponentialCurriculum,
    LinearCurriculum,
    NoCurriculum,
    StagedLength,
    StagedRewards,
)
from lightning_scalerl.axes.entropy import EntropyByDifficulty, FixedEntropy, NoEntropyBonus
from lightning_scalerl.axes.epochs import Epochs
from lightning_scalerl.axes.filter import DynamicSampling, NoFilter, ZeroVariance
from lightning_scalerl.axes.kl import FixedKL, KLByDifficulty, NoKL
from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.axes.loss import CISPO, DAPO, PPO, Reinforce
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    BatchRewardNormalization,
    NoNormalization,
    RunningNormalization,
)
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.axes.resampling import NoPositiveResampling, UniformResampling
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import Group, Source, TrainBatch
from lightning_scalerl.stream.credit import assemble, update_moments
from lightning_scalerl.update.token_credit import token_advantages
from lightning_scalerl.update.trained import TrainedPolicy
from tests.helpers import fit, make_group, row
from tests.test_module import Keep

VARIED = ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))
PPO_LIKE: tuple[DesignChoice, ...] = (GAE(), ValueNetwork())


def groups_of(rewards: Sequence[Sequence[float]] = VARIED, history: tuple[float, ...] = ()) -> list[Group]:
    groups = [make_group(each, number) for number, each in enumerate(rewards)]
    for group in groups:
        group.history = history
    return groups


def batch_of(choices: Choices, groups: list[Group], drift: float = 0.0, away: float = 0.0) -> tuple[TrainBatch, Tensor]:
    """Return the batch of a step and the trainer's log-probabilities.

    These differ from the generator's by about `drift`, and a reference differs from them by about `away`. A critic has
    a random value for every token.
    """
    update_moments(groups, choices)
    batch = assemble(groups, choices, max_new_tokens=8)
    source = torch.Generator().manual_seed(1)
    noise, reference_noise, values = torch.randn(3, *batch.loss_mask.shape, generator=source)
    logprobs = batch.generator_logprobs + drift * noise * batch.loss_mask
    outputs: dict[str, Any] = {}
    if choices.needs_logprobs_before_update:
        outputs["anchor_logprobs"] = logprobs
    if choices.kl.where:
        outputs["reference_logprobs"] = logprobs + away * reference_noise * batch.loss_mask
    if choices.critic.has_values:
        outputs["values"] = values * batch.loss_mask
    return token_advantages(
        replace(batch, **outputs), choices, lambda numbers: numbers, update_statistics=True
    ), logprobs


class CountedRun:
    """Mechanism counters over steps that the test makes."""

    def __init__(self, ours: Choices, theirs: Choices, policy: Any = None, **stream: Any) -> None:
        self.choices = ours
        prompts = SimpleNamespace(histories=lambda: [])
        stream_fields: dict[str, Any] = {
            "admitted": 6,
            "completed_steps": 0,
            "groups_per_step": 2,
            "completions": 3,
            "dropped_for_batch": 0,
            "max_new_tokens": 8,
            "prompts": prompts,
            "seed": 0,
            "reward_sums": [["math", "format"]],
            **stream,
        }
        self.counters = MechanismCounters(ours, theirs, SimpleNamespace(**stream_fields), policy, str)  # type: ignore[arg-type]

    def step(self, groups: list[Group] | None = None, drift: float = 0.0, away: float = 0.0) -> dict[str, float]:
        self.counters.observe(*batch_of(self.choices, groups if groups is not None else groups_of(), drift, away))
        return self.counters.metrics()


Row = tuple[DesignChoice, ...]


def counters_of(ours: Row, theirs: Row, groups: list[Group] | None = None, **options: Any) -> dict[str, float]:
    """Return the counters by axis after one step of a run with `ours`, whose recipe has `theirs`."""
    drift, away = options.pop("drift", 0.0), options.pop("away", 0.0)
    counters = CountedRun(row(*ours), row(*theirs), **options).step(groups, drift, away)
    return {name.removeprefix("mechanism/"): share for name, share in counters.items()}


# --- scenes --------------------------------------------------------------------------------------------------


def one_token_each() -> list[Group]:
    """Groups in which only the first token of each rollout was sampled."""
    groups = groups_of()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.sources = [int(place > 0) for place in range(len(rollout.tokens))]
    return groups


def nothing_sampled() -> list[Group]:
    """Groups in which every token was forced, so no token has credit."""
    groups = groups_of()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.sources = [Source.FORCED] * len(rollout.tokens)
    return groups


def one_token_in_all() -> list[Group]:
    groups = nothing_sampled()
    groups[0].rollouts[0].sources[0] = Source.SAMPLED
    return groups


def sizes(*counts: int, history: tuple[float, ...]) -> list[Group]:
    return groups_of([[1.0] + [0.0] * (count - 1) for count in counts], history)


def with_two_rewards() -> list[Group]:
    """Groups whose rewards are sums of two terms."""
    groups = groups_of()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.grade, rollout.terms = rollout.reward + 0.2, {"math": rollout.reward, "format": 0.2}
    return groups


CONSTANT = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
MIXED = (*VARIED, CONSTANT[0])
UNSOLVED = ((0.5, 0.0, 0.2), (0.1, 0.0, 0.3))
ONE_MEAN = ((1.0, 0.0), (0.0, 1.0))
NEW = FixedAllocation(), AllocationByDifficulty()
SMALL_DRIFT, LARGE_DRIFT = {"drift": 0.15}, {"drift": 1.5}

# Axis, choices of the run, choices of the recipe, a step in which the choice cannot act, a step in which it must.
CASES: dict[str, tuple[str, Row, Row, dict[str, Any], dict[str, Any]]] = {
    "gae": ("advantage", PPO_LIKE, (), {"groups": nothing_sampled()}, {}),
    "no gae": ("advantage", (), PPO_LIKE, {"groups": []}, {}),
    "critic": ("critic", PPO_LIKE, (), {"groups": nothing_sampled()}, {}),
    "trace": ("advantage", PPO_LIKE, (GAE(trace=0.2), ValueNetwork()), {"groups": one_token_each()}, {}),
    "discount": ("advantage", (GAE(0.5), ValueNetwork()), PPO_LIKE, {"groups": one_token_each()}, {}),
    "critic's clip": ("critic", PPO_LIKE, (GAE(), ValueNetwork(clip=9.0)), {"groups": nothing_sampled()}, {}),
    "kl": ("kl", (FixedKL(),), (), {}, {"away": 0.5}),
    "kl of no size": ("kl", (FixedKL(0.0),), (FixedKL(1e-9),), {"away": 0.5}, {"away": 0.5, "theirs": (FixedKL(),)}),
    "kl by difficulty": (
        "kl",
        (KLByDifficulty(0.5, 0.0),),
        (),
        {"away": 0.5, "groups": groups_of(UNSOLVED)},
        {"away": 0.5},
    ),
    "kl flat": ("kl", (KLByDifficulty(0.1, 0.1),), (FixedKL(0.1),), {"away": 0.5}, {"away": 0.5, "theirs": (NoKL(),)}),
    "no kl": ("kl", (ZeroVariance(),), (FixedKL(), ZeroVariance()), {"groups": groups_of(CONSTANT)}, {}),
    "kl in the reward": ("kl", (*PPO_LIKE, FixedKL(where="reward")), PPO_LIKE, {}, {"away": 0.5}),
    "kl elsewhere": ("kl", (*PPO_LIKE, FixedKL(where="reward")), (*PPO_LIKE, FixedKL()), {}, {"away": 0.5}),
    "entropy": ("entropy", (FixedEntropy(),), (), {"groups": nothing_sampled()}, {}),
    "entropy of no size": ("entropy", (FixedEntropy(0.0),), (), {}, {"theirs": (FixedEntropy(0.01),)}),
    "entropy by difficulty": ("entropy", (EntropyByDifficulty(),), (), {"groups": groups_of(UNSOLVED)}, {}),
    "no entropy": ("entropy", (NoEntropyBonus(),), (EntropyByDifficulty(),), {"groups": groups_of(UNSOLVED)}, {}),
    "linear": ("curriculum", (LinearCurriculum(0.2, 9),), (), {"completed_steps": 9}, {"completed_steps": 8}),
    "exponential": ("curriculum", (ExponentialCurriculum(0.2, 9),), (), {"completed_steps": 9}, {"completed_steps": 8}),
    "curve": (
        "curriculum",
        (ExponentialCurriculum(0.2, 9),),
        (LinearCurriculum(0.2, 9),),
        {"completed_steps": 0},
        {"completed_steps": 4},
    ),
    "stages": ("curriculum", (StagedLength([0.5, 1.0], 3),), (), {"completed_steps": 3}, {"completed_steps": 2}),
    "no stages": ("curriculum", (NoCurriculum(),), (StagedLength([0.5, 1.0], 3),), {"completed_steps": 3}, {}),
    "uniform": (
        "resampling",
        (UniformResampling(),),
        (NoPositiveResampling(0.9),),
        {"groups": groups_of(history=(0.8,)), "waiting_histories": [(0.8,)]},
        {"groups": groups_of(history=(0.9,)), "waiting_histories": []},
    ),
    "uniform, drawn and not yet trained": (
        "resampling",
        (UniformResampling(),),
        (NoPositiveResampling(0.9),),
        {"waiting_histories": [()]},
        {"waiting_histories": [(), (0.5, 0.9)]},
    ),
    "penalty of all": (
        "length_control",
        (Penalty(1, 1, only_correct=False),),
        (Penalty(1, 1),),
        {"groups": groups_of([CONSTANT[0]])},
        {},
    ),
    "staged rewards": (
        "curriculum",
        (StagedRewards(total_steps=10),),
        (),
        {"completed_steps": 6, "groups": with_two_rewards()},
        {"completed_steps": 5, "groups": with_two_rewards()},
    ),
    "no staged rewards": (
        "curriculum",
        (),
        (StagedRewards(total_steps=10),),
        {"groups": groups_of([(0.0, 0.0, 0.0)])},
        {"groups": with_two_rewards()},
    ),
    "adapter": ("adapter", (LoRA(),), (), {"groups": nothing_sampled()}, {}),
    "another rank": ("adapter", (LoRA(4),), (LoRA(8),), {"groups": []}, {}),
    "no adapter": ("adapter", (), (LoRA(),), {"groups": nothing_sampled()}, {}),
    "epochs": ("epochs", (Epochs(2), ZeroVariance()), (ZeroVariance(),), {"groups": groups_of(CONSTANT)}, {}),
    "refilling": ("filter", (DynamicSampling(),), (ZeroVariance(),), {}, {"dropped_for_batch": 1}),
    "refilling not dropping": ("filter", (DynamicSampling(),), (NoFilter(),), {}, {"dropped_for_batch": 1}),
    "no refilling": ("filter", (NoFilter(),), (DynamicSampling(),), {}, {"groups": groups_of(MIXED)}),
    "more rollouts": (
        "allocation",
        (AllocationByDifficulty(),),
        (),
        {"groups": sizes(3, 3, history=())},
        {"groups": sizes(3, 4, history=(0.0,))},
    ),
    "as many rollouts": (
        "allocation",
        (),
        (AllocationByDifficulty(),),
        {"groups": sizes(3, 3, history=(0.5,))},
        {"groups": sizes(3, 3, history=(0.0,))},
    ),
    "proximal": ("correction", (Proximal(),), (), {}, LARGE_DRIFT),
    "proximal within its bounds": ("correction", (Proximal(),), (), SMALL_DRIFT, LARGE_DRIFT),
    "masked weights": ("correction", (Proximal(mode="mask"),), (), SMALL_DRIFT, LARGE_DRIFT),
    "no weights": ("correction", (Proximal(mode="none"),), (), {}, SMALL_DRIFT),
    "no weights, no ratio": (
        "correction",
        (Proximal(mode="none"), Reinforce()),
        (Reinforce(),),
        LARGE_DRIFT,
        {**SMALL_DRIFT, "ours": (Proximal(), Reinforce())},
    ),
    "behaviour": ("correction", (Behaviour(),), (Proximal(),), SMALL_DRIFT, LARGE_DRIFT),
    "sequences": ("correction", (Proximal("sequence"),), (Proximal(),), {}, SMALL_DRIFT),
    "scale of rewards": (
        "normalization",
        (BatchRewardNormalization(),),
        (BatchNormalization(),),
        {"groups": groups_of(ONE_MEAN)},
        {},
    ),
    "centre": (
        "normalization",
        (BatchNormalization(centre=True),),
        (BatchNormalization(),),
        {},
        {"ours": (*PPO_LIKE, BatchNormalization(centre=True)), "theirs": (*PPO_LIKE, BatchNormalization())},
    ),
    "ppo": ("loss", (PPO(0.2),), (CISPO(5.0),), {}, LARGE_DRIFT),
    "ppo under another name": (
        "loss",
        (PPO(0.2),),
        (DAPO(0.2, 0.2),),
        LARGE_DRIFT,
        {**LARGE_DRIFT, "theirs": (DAPO(0.2, 2.0),)},
    ),
    "reinforce": ("loss", (Reinforce(),), (PPO(0.2),), {}, SMALL_DRIFT),
    "sum": ("aggregation", (SumAggregation(),), (TokenAggregation(),), {"groups": one_token_in_all()}, {}),
    "constant": ("aggregation", (ConstantAggregation(),), (TokenAggregation(),), {"groups": nothing_sampled()}, {}),
}


@pytest.mark.parametrize(("axis", "ours", "theirs", "silent", "acting"), CASES.values(), ids=CASES)
def test_a_counter_is_zero_if_the_choice_cannot_act_and_one_if_it_must(
    axis: str, ours: Row, theirs: Row, silent: dict[str, Any], acting: dict[str, Any]
) -> None:
    for expected, scene in ((0, silent), (1, acting)):
        rows = {"ours": ours, "theirs": theirs, **scene}
        assert counters_of(**rows)[axis] == expected, (axis, expected)


def test_departures_on_several_axes_are_counted_on_each() -> None:
    ours = (*PPO_LIKE, FixedKL(), FixedEntropy(), Epochs(4), Proximal(), PPO(0.2), BatchNormalization(centre=True))
    assert set(counters_of(ours, (), drift=1.5, away=0.5)) == {
        "advantage",
        "critic",
        "kl",
        "entropy",
        "epochs",
        "correction",
        "loss",
        "normalization",
    }
    assert counters_of(ours, ours) == {}


@pytest.mark.parametrize(("clip_high", "expected"), [(0.2, 0), (2.0, 1)])
def test_later_passes_use_the_anchor_of_the_first(clip_high: float, expected: int) -> None:
    """Both ratios compare the last pass with the first, so the same clip under two names makes no difference."""
    ours = row(PPO(0.2), Proximal())
    run = CountedRun(ours, row(DAPO(0.2, clip_high), Proximal()))
    batch, first = batch_of(ours, groups_of(), drift=0.1)
    last = first + torch.randn(first.shape, generator=torch.Generator().manual_seed(2)) * batch.loss_mask
    run.counters.observe(batch, last, first)
    assert run.counters.metrics() == {"mechanism/loss": expected}


# --- choices with state --------------------------------------------------------------------------------------


each_credit = pytest.mark.parametrize("credit", [(), PPO_LIKE], ids=["group", "gae"])


def with_smaller_rewards() -> list[Group]:
    """Groups with a tenth of the rewards of `groups_of`, so that their statistics differ."""
    return groups_of([[0.1 * reward for reward in each] for each in VARIED])


@each_credit
def test_running_statistics_act_from_the_second_batch_on(credit: Row) -> None:
    """After one batch both scales are equal. After a batch with smaller rewards they differ."""
    run = CountedRun(row(*credit, RunningNormalization()), row(*credit, BatchNormalization()))
    assert run.step() == {"mechanism/normalization": 0}
    for step in (2, 3, 4):
        assert run.step(with_smaller_rewards()) == {"mechanism/normalization": (step - 1) / step}


def test_counts_survive_a_resume() -> None:
    run = CountedRun(row(FixedKL()), row())
    run.step(away=0.5)
    run.step()
    resumed = CountedRun(row(FixedKL()), row())
    resumed.counters.load_state_dict(run.counters.state_dict())
    assert resumed.counters.metrics() == {"mechanism/kl": 1 / 2} and resumed.step(away=0.5) == {"mechanism/kl": 2 / 3}


# --- precision -----------------------------------------------------------------------------------------------


def precision_counter(model: Any, ours: Precision, theirs: Precision, *others: DesignChoice, **options: Any) -> float:
    policy = TrainedPolicy(Policy(model, ours), Ranks)
    return counters_of((ours, *others), (theirs, *others), policy=policy, **options)["precision"]


def test_the_policys_type_acts_on_log_probabilities(tiny_model: Any) -> None:
    single, half = Precision("fp32"), Precision("fp16")
    for ours, theirs in ((half, single), (single, half), (half, Precision("bf16")), (Precision("bf16"), half)):
        assert precision_counter(tiny_model, ours, theirs) == 1
    assert precision_counter(tiny_model, half, single, ZeroVariance(), groups=groups_of(CONSTANT)) == 0


def replace_types(precision: Precision, policy: str) -> Precision:
    return Precision(**{**precision.parameters(), "policy": policy})


PARTS: list[tuple[str, Row]] = [
    ("fp32_value", PPO_LIKE),
    ("fp32_kl", (FixedKL(1.0),)),
    ("fp32_advantage", (BatchNormalization(),)),
]


@pytest.mark.parametrize(("part", "others"), PARTS, ids=[part for part, _ in PARTS])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_kept_in_fp32_act_if_the_batch_has_them(tiny_model: Any, part: str, others: Row, turned: bool) -> None:
    rows = Precision("bf16"), Precision("bf16", **{part: False})
    ours, theirs = reversed(rows) if turned else rows
    assert precision_counter(tiny_model, ours, theirs, *others, away=0.5) == 1
    if part == "fp32_advantage":  # also in FP16, which rounds eight times less than BF16
        halves = (replace_types(each, "fp16") for each in (ours, theirs))
        assert precision_counter(tiny_model, *halves, *others, away=0.5) == 1
    # Without critic and reference, and with all advantages zero, nothing is kept in FP32.
    assert precision_counter(tiny_model, ours, theirs, groups=groups_of(CONSTANT)) == 0
    # With a policy in FP32 all parts are in FP32 and their switches have no effect, so nothing departs.
    assert counters_of((Precision("fp32", **{part: False}),), (Precision("fp32"),)) == {}


def test_advantages_that_rounding_does_not_change_do_not_count(tiny_model: Any) -> None:
    """Rewards of 0 and 1 in groups of four, unscaled, give multiples of a quarter, which are exact in every type."""
    groups = groups_of(((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 0.0)))
    ours, theirs = Precision("bf16", fp32_advantage=False), Precision("bf16")
    assert precision_counter(tiny_model, ours, theirs, NoNormalization(), groups=groups) == 0


@each_credit
def test_removed_running_statistics_count(credit: Row) -> None:
    run = CountedRun(row(*credit, BatchNormalization()), row(*credit, RunningNormalization()))
    assert run.step() == {"mechanism/normalization": 0}
    assert run.step(with_smaller_rewards()) == {"mechanism/normalization": 1 / 2}


def test_a_removed_critic_counts() -> None:
    assert counters_of((), PPO_LIKE) == {"advantage": 1, "critic": 1}


def test_removed_refilling_counts_if_a_group_would_have_been_replaced() -> None:
    ours, theirs = (ZeroVariance(),), (DynamicSampling(),)
    assert counters_of(ours, theirs) == {"filter": 0}
    assert counters_of(ours, theirs, groups=groups_of(MIXED)) == {"filter": 1}


def test_a_loss_that_clips_only_in_later_passes_counts(tiny_model_path: str) -> None:
    """On policy, the ratio of the first pass is 1, so two clips can differ only from the second pass on."""
    keep = Keep()
    overrides = ["loss=ppo", "epochs.count=3", "optimizer.lr=1e-2"]
    fit(tiny_model_path, steps=3, callbacks=[OnPolicy(), DAPO(1e-3, 1e-3), keep], overrides=overrides)
    assert min(keep.of("train/clip_fraction")) > 0.01
    assert keep.of("mechanism/loss")[-1] > 0
