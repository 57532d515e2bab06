"""The loss as a sum of terms: the same for any split of a batch, equal to values by hand, and the same on two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_scalerl.axes.advantage import GAE
from lightning_scalerl.axes.aggregation import BY_NAME, TokenAggregation
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Behaviour, Correction, Proximal, importance_weights
from lightning_scalerl.axes.critic import ValueNetwork, clipped_value_loss
from lightning_scalerl.axes.entropy import EntropyByDifficulty, FixedEntropy
from lightning_scalerl.axes.kl import FixedKL, KLByDifficulty
from lightning_scalerl.axes.loss import GMPO, GSPO, PPO, Loss, Reinforce
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Scored, TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import loss_weights, terms
from sweeps.run.journal import read_journal
from tests.axes.test_contract import AGGREGATIONS, JUNK, LOSSES, each_aggregation, each_loss
from tests.distributed.test_ranks import check_same_curve, fit, on_ranks
from tests.examples import every
from tests.helpers import CountingTask, make_group, row

SETS = {
    "policy": (),
    "value": ("value",),
    "kl": ("kl",),
    "entropy": ("entropy",),
    "all": ("value", "kl", "entropy"),
}
SEQUENCE = (GSPO, GMPO)
MODELS = ("trainer_logprobs", "entropies", "values")
# Every sixth combination, so that each loss, each aggregation and each set occurs. `make test-full` runs all.
each_combination = pytest.mark.parametrize(
    ("loss", "aggregation", "names"),
    every(
        6,
        [
            pytest.param(loss, aggregation, SETS[name], id=f"{type(loss).__name__}-{type(aggregation).__name__}-{name}")
            for loss in LOSSES
            for aggregation in AGGREGATIONS
            for name in SETS
        ],
        pytest.mark.full,
    ),
)


def choices_of(
    loss: DesignChoice,
    aggregation: DesignChoice,
    names: tuple[str, ...],
    own: str | None = None,
    correction: Correction | None = None,
) -> Choices:
    """Choices with these terms in addition to the policy's. `own` is the terms' aggregation, by default the policy's.

    GSPO and GMPO are defined for one advantage per sequence and cannot be combined with a critic.
    """
    chosen: list[DesignChoice] = [loss, aggregation, correction or Behaviour()]
    if "value" in names and not isinstance(loss, SEQUENCE):
        chosen += [GAE(), ValueNetwork(coefficient=0.7, clip=0.3, aggregation=own)]
    if "kl" in names:
        chosen += [KLByDifficulty(easy=0.4, hard=0.1, aggregation=own)]
    if "entropy" in names:
        chosen += [EntropyByDifficulty(easy=0.3, hard=0.05, aggregation=own)]
    return row(*chosen)


def batch_of(seed: int = 0) -> TrainBatch:
    """Sixteen rollouts in FP64: forced tokens, advantages per token, outputs of anchor, reference and critic."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.5, 0.0, 1.0]]
    groups = [make_group(values, number, seed=seed, prompt_length=3 + number) for number, values in enumerate(rewards)]
    groups[1].history, groups[2].history = (1.0, 0.5), (0.0,)
    for group in groups:
        for rollout in group.rollouts[1:]:
            rollout.sources = [int(place % 4 == 2) for place in range(len(rollout.tokens))]
    batch = assemble(groups, row(), max_new_tokens=8)
    source = torch.Generator().manual_seed(seed)
    column = torch.arange(batch.loss_mask.shape[1])
    real = (column < (batch.lengths - batch.completion_start).unsqueeze(1)).double()

    def drawn(size: float) -> Tensor:
        return size * real * torch.randn(batch.loss_mask.shape, generator=source, dtype=torch.float64)

    generator = batch.generator_logprobs.double()
    filled = replace(
        batch,
        generator_logprobs=generator,
        anchor_logprobs=generator + drawn(0.3),
        reference_logprobs=generator + drawn(0.8),
        advantages=drawn(1.0),
        values=drawn(0.5),
        returns=drawn(1.0),
    )
    to_double = ("loss_mask", "sample_tokens", "group_tokens", "pass_rates", "rewards")
    return replace(filled, **{name: getattr(filled, name).double() for name in to_double})


def scored_of(batch: TrainBatch, seed: int = 0) -> Scored:
    """Random outputs of the trained models, with gradients."""
    source = torch.Generator().manual_seed(seed + 99)

    def drawn(size: float) -> Tensor:
        return size * torch.randn(batch.loss_mask.shape, generator=source, dtype=torch.float64)

    logprobs, entropies, values = batch.generator_logprobs + drawn(0.3), drawn(1.0).abs(), drawn(1.0)
    return Scored(batch, *(table.requires_grad_(True) for table in (logprobs, entropies, values)))


def loss_and_gradients(scored: Scored, choices: Choices) -> tuple[Tensor, list[Tensor]]:
    """The sum of all terms and its gradients by the model outputs: zeros for outputs that no term reads."""
    loss = torch.stack([term.reduce(scored) for term in terms(choices)]).sum()
    leaves = [getattr(scored, name) for name in MODELS]
    of_leaves = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, of_leaves, strict=True)]
    return loss.detach(), gradients


def padded(table: Tensor, width: int, junk: float) -> Tensor:
    return F.pad(table, (0, width - table.shape[1]), value=junk)


def part_of(whole: Scored, rows: Tensor, padding: int) -> Scored:
    """These rows as a micro-batch, cut to the longest rollout and then padded with values that are not zero."""
    part = whole.batch.select(rows)
    width = part.loss_mask.shape[1]
    tables: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor) and value.dim() == 2 and field.name != "tokens":
            tables[field.name] = padded(value, width + padding, 0 if field.name.endswith("mask") else 3)
    outputs = [padded(getattr(whole, name).detach()[rows, :width], width + padding, -2.0) for name in MODELS]
    return Scored(replace(part, **tables), *(table.requires_grad_(True) for table in outputs))


BOUNDED = [Proximal(level, mode, 0.7, 1.4) for level in ("token", "sequence") for mode in ("truncate", "mask")]
CORRECTIONS = st.sampled_from([Behaviour(), *BOUNDED])


@pytest.mark.slow
@each_combination
@settings(max_examples=4)
@given(data=st.data(), own=st.sampled_from([None, *BY_NAME]), correction=CORRECTIONS)
def test_any_split_gives_the_same_loss_and_gradients(
    loss: Any, aggregation: Any, names: tuple[str, ...], data: st.DataObject, own: str | None, correction: Any
) -> None:
    """Invariant 1 for every set of terms, any split and any padding, with gradients by all three model outputs."""
    choices = choices_of(loss, aggregation, names, own, correction)
    batch = batch_of(seed=data.draw(st.integers(0, 5)))
    order = torch.tensor(data.draw(st.permutations(range(batch.rollouts))))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch.rollouts - 1), max_size=6)))
    whole = scored_of(batch)
    expected, expected_gradients = loss_and_gradients(whole, choices)
    value, gradients = torch.zeros_like(expected), [torch.zeros_like(gradient) for gradient in expected_gradients]
    for rows in torch.tensor_split(order, cuts):
        part = part_of(whole, rows, data.draw(st.integers(0, 2)))
        share, part_gradients = loss_and_gradients(part, choices)
        value += share
        for gradient, part_gradient in zip(gradients, part_gradients, strict=True):
            width = min(gradient.shape[1], part_gradient.shape[1])
            assert not part_gradient[:, width:].any()
            gradient[rows, :width] += part_gradient[:, :width]
    assert value.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(gradients, expected_gradients, strict=True))
    # Every term contributes a gradient. A missing term could not be split wrongly.
    moved = [bool(gradient.any()) for gradient in expected_gradients]
    assert moved == [True, "entropy" in names, "value" in names and not isinstance(loss, SEQUENCE)]


class Careless(Loss):
    """A user's surrogate loss that ignores the mask."""

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -torch.exp(trainer_logprobs - anchor_logprobs) * advantages

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return trainer_logprobs > anchor_logprobs


@pytest.mark.parametrize("loss", [*LOSSES, Careless()], ids=lambda loss: type(loss).__name__)
@each_aggregation
@pytest.mark.parametrize("correction", [Behaviour(), *BOUNDED[:4:3]], ids=["behaviour", "token", "sequence"])
def test_masked_and_forced_tokens_change_nothing(loss: Any, aggregation: Any, correction: Any) -> None:
    """Model outputs on these tokens do not matter, neither before the update nor during it."""
    choices = choices_of(loss, aggregation, SETS["all"], None, correction)
    batch = batch_of()
    outside = batch.loss_mask == 0
    assert (outside & batch.forced_mask).any() and (outside & ~batch.forced_mask).any()
    scored = scored_of(batch)
    value, gradients = loss_and_gradients(scored, choices)
    assert not any(gradient[outside].any() for gradient in gradients)
    names = ("generator_logprobs", "anchor_logprobs", "reference_logprobs", "values", "returns", "advantages")
    for junk in JUNK:
        tables: dict[str, Any] = {name: torch.where(outside, junk, getattr(batch, name)) for name in names}
        outputs = (torch.where(outside, 0.7 * junk, getattr(scored, name).detach()) for name in MODELS)
        disturbed_scored = Scored(replace(batch, **tables), *(table.requires_grad_(True) for table in outputs))
        disturbed, disturbed_gradients = loss_and_gradients(disturbed_scored, choices)
        assert torch.equal(disturbed, value)
        assert all(map(torch.equal, disturbed_gradients, gradients))


@each_loss
@each_aggregation
def test_at_ratio_one_the_gradient_is_reinforce(loss: Any, aggregation: Any) -> None:
    """Trainer and sampler agree. The gradient is advantage times share, plus the entropy bonus; KL adds nothing."""
    choices = choices_of(loss, aggregation, SETS["all"])
    batch = batch_of()
    if isinstance(loss, SEQUENCE):  # defined for one advantage per sequence
        batch = replace(batch, advantages=batch.advantages[:, :1].expand_as(batch.advantages).contiguous())
    batch = replace(batch, reference_logprobs=batch.generator_logprobs)
    logprobs = batch.generator_logprobs.clone().requires_grad_(True)
    scored = replace(scored_of(batch), trainer_logprobs=logprobs)
    _, (logprob_gradient, entropy_gradient, _) = loss_and_gradients(scored, choices)
    shares = aggregation.weights(batch, batch.denominators)
    assert torch.allclose(logprob_gradient, -batch.advantages * shares, atol=1e-12)
    bonus = (0.05 + 0.25 * batch.pass_rates).unsqueeze(1)
    assert torch.allclose(entropy_gradient, -bonus * shares, atol=1e-12)
    assert logprob_gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    "loss", [each for each in LOSSES if not isinstance(each, SEQUENCE)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
def test_in_the_first_pass_a_proximal_anchor_gives_weighted_reinforce(loss: Any, mode: str) -> None:
    batch = batch_of()
    assert batch.anchor_logprobs is not None
    bounds = () if mode == "none" else (0.8, 1.25)
    choices = choices_of(loss, TokenAggregation(), (), None, Proximal("token", mode, *bounds))
    logprobs = batch.anchor_logprobs.clone().requires_grad_(True)
    _, (gradient, *_) = loss_and_gradients(replace(scored_of(batch), trainer_logprobs=logprobs), choices)
    raw = torch.exp(batch.anchor_logprobs - batch.generator_logprobs)
    inside = (raw >= 0.8) & (raw <= 1.25)
    assert 0.1 < inside[batch.loss_mask > 0].double().mean() < 0.9
    weights = {"truncate": raw.clamp(0.8, 1.25), "mask": raw * inside, "none": torch.ones_like(raw)}[mode]
    expected = -weights * batch.advantages * batch.loss_mask / batch.denominators.tokens
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_all_terms_by_hand() -> None:
    """A loop over tokens: PPO against the anchor with importance weights, value loss, KL penalty, entropy bonus."""
    batch, choices = batch_of(), choices_of(PPO(0.2), TokenAggregation(), SETS["all"], "sum", Proximal("token"))
    scored = scored_of(batch)
    expected = dict.fromkeys(("policy", "value", "kl", "entropy"), 0.0)
    seen = set()
    for at in range(batch.rollouts):
        rate = float(batch.pass_rates[at])
        for place in range(batch.loss_mask.shape[1]):
            if not batch.loss_mask[at, place]:
                continue

            def value_at(table: Tensor | None, at: int = at, place: int = place) -> float:
                assert table is not None
                return float(table.detach()[at, place])

            ours, anchor = value_at(scored.trainer_logprobs), value_at(batch.anchor_logprobs)
            advantage, ratio = value_at(batch.advantages), math.exp(ours - anchor)
            weight = min(2.0, math.exp(anchor - value_at(batch.generator_logprobs)))
            surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            expected["policy"] -= weight * surrogate / batch.denominators.tokens
            value, old_value, target = value_at(scored.values), value_at(batch.values), value_at(batch.returns)
            bounded = min(max(value, old_value - 0.3), old_value + 0.3)
            expected["value"] += 0.7 * max((value - target) ** 2, (bounded - target) ** 2)
            gap = value_at(batch.reference_logprobs) - ours
            expected["kl"] += (0.1 + 0.3 * rate) * (math.exp(gap) - gap - 1)
            expected["entropy"] -= (0.05 + 0.25 * rate) * value_at(scored.entropies)
            seen.add((ratio > 1.2, ratio < 0.8, bounded != value, rate))
    loss_terms = terms(choices)
    assert [term.name for term in loss_terms] == list(expected), "the policy's term comes first"
    assert {term.name: float(term.reduce(scored).detach()) for term in loss_terms} == pytest.approx(expected, rel=1e-9)
    assert len(seen) > 8 and len({rate for *_, rate in seen}) == 3, "every case occurs, and the prompts differ"


@pytest.mark.parametrize("own", [None, *BY_NAME])
def test_a_term_has_its_own_aggregation_or_the_runs(own: str | None) -> None:
    for aggregation in AGGREGATIONS:
        loss_terms = terms(choices_of(Reinforce(), aggregation, SETS["all"], own))
        assert type(loss_terms[0].aggregation) is type(aggregation)
        kinds = {type(term.aggregation) for term in loss_terms[1:]}
        assert kinds == {type(aggregation) if own is None else BY_NAME[own]}


@pytest.mark.parametrize(
    ("field", "choice"),
    [
        ("critic", lambda name: [GAE(), ValueNetwork(aggregation=name)]),
        ("kl", lambda name: [FixedKL(aggregation=name)]),
        ("kl", lambda name: [KLByDifficulty(aggregation=name)]),
        ("entropy", lambda name: [FixedEntropy(aggregation=name)]),
        ("entropy", lambda name: [EntropyByDifficulty(aggregation=name)]),
    ],
)
def test_unknown_aggregations_are_refused(field: str, choice: Any) -> None:
    match = rf"{field}\.aggregation: 'mean' is no aggregation; valid: prompt, sample, token, sum, constant"
    with pytest.raises(ConfigurationError, match=match) as caught:
        terms(row(*choice("mean")))
    assert "\n" not in str(caught.value)


def test_a_penalty_in_the_reward_is_not_a_term() -> None:
    choices = row(GAE(), ValueNetwork(), FixedKL(where="reward"))
    assert [term.name for term in terms(choices)] == ["policy", "value"]


# --- value loss, importance weights, settings ----------------------------------------------------------------


def test_the_value_loss_gains_nothing_beyond_the_clip() -> None:
    """Old value 1, clip 0.5: beyond the clip range the gradient towards the return is 0, away from it never."""
    values = torch.tensor([1.2, 1.8, 1.8, 0.2, 0.2], requires_grad=True)
    returns = torch.tensor([3.0, 3.0, 0.0, 0.0, 3.0])
    loss = clipped_value_loss(values, torch.ones(5), returns, clip=0.5)
    assert torch.allclose(loss, torch.tensor([1.8**2, 1.5**2, 1.8**2, 0.5**2, 2.8**2]))
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert torch.allclose(gradient, torch.tensor([-3.6, 0.0, 3.6, 0.0, -5.6]))


def test_importance_weights_by_hand() -> None:
    generator = torch.zeros(2, 3)
    anchor = torch.log(torch.tensor([[2.0, 0.25, 99.0], [0.5, 1.0, 1.2]]))
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])

    def weights(level: str, mode: str) -> list[float]:
        found = importance_weights(anchor, generator, mask, level, mode, 0.4, 1.5)
        return found[mask > 0].tolist()

    assert weights("token", "truncate") == pytest.approx([1.5, 0.4, 0.5, 1.0, 1.2])
    assert weights("token", "mask") == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.2])
    assert weights("sequence", "truncate") == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.6]), (
        "the product over the unmasked tokens"
    )
    assert weights("sequence", "mask") == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.6])
    far = importance_weights(torch.full((1, 9), 90.0), torch.zeros(1, 9), torch.ones(1, 9), "sequence", "none", 0, 1e30)
    assert far.isfinite().all()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Proximal(level="word"), r"correction\.level: 'word' is unknown; valid: token, sequence"),
        (lambda: Proximal(mode="clip"), r"correction\.mode: 'clip' is unknown; valid: truncate, mask, none"),
        (lambda: Proximal(max_weight=0), r"correction\.max_weight: 0"),
        (lambda: Proximal(min_weight=-1), r"correction\.min_weight: -1"),
        (lambda: Proximal("sequence", "none"), r"correction\.level: 'sequence' has no effect .*mode truncate or mask"),
        (lambda: Proximal(mode="none", min_weight=0.5), r"correction\.min_weight: 0\.5 has no effect"),
        (lambda: Proximal(mode="none", max_weight=4.0), r"correction\.max_weight: 4\.0 has no effect"),
        (lambda: Proximal(min_weight=3.0), r"correction\.min_weight: 3\.0 exceeds correction\.max_weight, 2\.0"),
        (lambda: ValueNetwork(coefficient=0), r"critic\.coefficient: 0"),
        (lambda: ValueNetwork(clip=-0.2), r"critic\.clip: -0\.2"),
        (lambda: ValueNetwork(lr=0), r"critic\.lr: 0"),
        (lambda: FixedKL(-0.1), r"kl\.coefficient: -0\.1"),
        (lambda: FixedKL(where="advantage"), r"kl\.where: 'advantage' is unknown; valid: loss, reward"),
        (lambda: KLByDifficulty(easy=float("nan")), r"kl\.easy: nan"),
        (lambda: KLByDifficulty(hard=-1), r"kl\.hard: -1"),
        (lambda: FixedEntropy(float("inf")), r"entropy\.coefficient: inf"),
        (lambda: EntropyByDifficulty(easy=True), r"entropy\.easy: True"),
        (lambda: EntropyByDifficulty(hard="0"), r"entropy\.hard: '0'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_settings_are_refused_by_field(build: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_loss_weights_are_the_gradient_by_rollout() -> None:
    """One table for log-probabilities, one for entropies. The value loss does not move the policy."""
    batch = batch_of()
    keep = torch.tensor([3, 1, 7, 14])
    part = batch.select(keep)
    choices = choices_of(PPO(0.2), TokenAggregation(), SETS["all"])
    scored = scored_of(part)
    _, gradients = loss_and_gradients(scored, choices)
    table = loss_weights(part, scored.trainer_logprobs, choices)
    width = gradients[0].shape[1]
    assert table.shape[:2] == (3, 16) and not table[2].any() and table.shape[2] >= width
    for one, gradient in zip(table[:2], gradients[:2], strict=True):
        assert torch.allclose(one[keep][:, :width], gradient, atol=1e-12)
    others = [number for number in range(16) if number not in keep.tolist()]
    assert not table[:, others].any()


# --- on two processes ----------------------------------------------------------------------------------------

# PPO as usually configured. `eps` is large so that Adam does not magnify rounding differences between ranks.
LIKE_PPO = (
    "advantage=gae",
    "critic=value_network",
    "critic.lr=1e-2",
    "kl=fixed",
    "entropy=fixed",
    "epochs.count=2",
    "loss=ppo",
    "correction=proximal",
    "normalization.centre=true",
    "filter=none",
    "optimizer.eps=1e-4",
    "optimizer.lr=1e-2",
)


@pytest.fixture
def one_thread() -> Any:
    """Use one thread, because a forked child has none of its parent's worker threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_two_ranks(
    model_path: str, tmp_path: Path, overrides: Sequence[str], steps: int = 4, task: CountingTask | None = None
) -> None:
    """Check that two ranks end with the weights and the records of one rank."""

    def run(name: str, ranks: int, rank: int = 0) -> dict[str, Tensor]:
        options: dict[str, Any] = {"recipe": "scalerl_core", "steps": steps, "overrides": overrides, "task": task}
        module = fit(model_path, tmp_path / name, ranks, **options)
        weights: dict[str, Tensor] = module.state_dict()
        torch.save(weights, tmp_path / f"{name}-{rank}.pt")
        return weights

    expected = run("one", 1)
    assert on_ranks(2, lambda rank: str(len(run("two", 2, rank)))) == [str(len(expected))] * 2
    first, second = (torch.load(tmp_path / f"two-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weights in expected.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], weights, rtol=1e-4, atol=2e-5), name
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps)


@pytest.mark.full
def test_two_ranks_train_a_critic_as_one(tiny_model_path: str, tmp_path: Path, one_thread: None) -> None:
    check_two_ranks(tiny_model_path, tmp_path, LIKE_PPO)
    view = read_journal(tmp_path / "two")
    assert view.status == "finished"
    last = view.of_kind("train")[-1].metrics
    assert all(last[f"train/{name}"] for name in ("kl", "loss_value", "loss_entropy", "value_gradient_norm"))
    critic_weight = torch.load(tmp_path / "one-0.pt", weights_only=True)["critic.head.weight"]
    assert critic_weight.abs().max() > 1e-3, "the critic has not learned, so equal weights show nothing"


@pytest.mark.slow
def test_two_ranks_share_running_statistics_and_penalties_in_the_reward(
    tiny_model_path: str, tmp_path: Path, one_thread: None
) -> None:
    others = ("kl.where=reward", "normalization=running", "epochs.count=1", "truncated=mask")
    check_two_ranks(tiny_model_path, tmp_path, [*LIKE_PPO, *others], steps=3)


@pytest.mark.slow
def test_a_rank_without_rows_trains_a_critic_too(tiny_model_path: str, tmp_path: Path, one_thread: None) -> None:
    """One rollout for two ranks."""
    check_two_ranks(tiny_model_path, tmp_path, [*LIKE_PPO, "batch.prompts=1", "batch.completions=1"], steps=3)


@pytest.mark.slow
def test_two_ranks_record_an_empty_batch_as_one_rank(tiny_model_path: str, tmp_path: Path, one_thread: None) -> None:
    class Constant(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            return 1.0

    check_two_ranks(tiny_model_path, tmp_path, ["kl=fixed"], steps=1, task=Constant())
