"""SAPO, GMPO, DPPO, Clip-Cov, KL-Cov and MaxRL in float64: values and gradients against hand-written loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.correction import Behaviour, Proximal
from lightning_scalerl.axes.loss import DPPO, GMPO, SAPO, ClipCov, KLCov, Loss
from lightning_scalerl.axes.loss.covariance import covariances
from lightning_scalerl.axes.normalization import MaxRLNormalization
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import PassSize, Scored, TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import loss_inputs, terms, with_selection
from tests.axes.test_contract import CREDIT
from tests.helpers import make_group, row

KEY = (3, 6, 11)


def tables(seed: int = 0, rows: int = 6, columns: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Trainer and anchor log-probabilities, advantages (one per row; both signs and 0) and a mask with holes."""
    random = torch.Generator().manual_seed(seed)
    anchor = -2 * torch.rand(rows, columns, generator=random, dtype=torch.float64)
    trainer = anchor + 0.7 * torch.randn(rows, columns, generator=random, dtype=torch.float64)
    trainer = trainer.clamp(max=-0.01)
    advantages = torch.linspace(-1.5, 1.5, rows, dtype=torch.float64).unsqueeze(1).repeat(1, columns)
    advantages[2] = 0.0
    mask = (torch.rand(rows, columns, generator=random) < 0.8).double()
    return trainer.requires_grad_(True), anchor, advantages, mask


Token = Callable[[float, float, float], tuple[float, float]]


def sapo_token(p: float, q: float, advantage: float) -> tuple[float, float]:
    """Loss of a token, and its derivative by the log-probability. Trainer probability p, anchor probability q."""
    tau = 1.3 if advantage > 0 else 1.7
    gate = 1 / (1 + math.exp(-tau * (p / q - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * (p / q) * advantage


def dppo_tv_token(p: float, q: float, advantage: float) -> tuple[float, float]:
    if (advantage > 0 and p - q > 0.1) or (advantage < 0 and q - p > 0.05):
        return 0.0, 0.0
    weight = min(p / q, 1.5)
    return -weight * advantage * math.log(p), -weight * advantage


def dppo_kl_token(p: float, q: float, advantage: float) -> tuple[float, float]:
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if divergence > 0.02 and ((advantage > 0 and p > q) or (advantage < 0 and p < q)):
        return 0.0, 0.0
    weight = min(p / q, 1.5)
    return -weight * advantage * math.log(p), -weight * advantage


@pytest.mark.parametrize(
    ("loss", "token"),
    [
        (SAPO(1.3, 1.7), sapo_token),
        (DPPO("tv", 0.05, 0.1, 1.5), dppo_tv_token),
        (DPPO("kl", 0.02, 0.02, 1.5), dppo_kl_token),
    ],
    ids=["sapo", "dppo tv", "dppo kl"],
)
def test_losses_by_token(loss: Loss, token: Token) -> None:
    trainer, anchor, advantages, mask = tables()
    values = loss.per_token(trainer, anchor, advantages, mask)
    (gradients,) = torch.autograd.grad((values * mask).sum(), trainer)
    without_gradient = 0
    for place in zip(*torch.nonzero(mask, as_tuple=True), strict=True):
        p, q, advantage = (float(table[place].detach()) for table in (trainer.exp(), anchor.exp(), advantages))
        value, gradient = token(p, q, advantage)
        assert float(values[place].detach()) == pytest.approx(value, rel=1e-6, abs=1e-12)
        assert float(gradients[place]) == pytest.approx(gradient, rel=1e-6, abs=1e-12)
        without_gradient += advantage != 0 and gradient == 0
    assert without_gradient > 3 or isinstance(loss, SAPO), "no token is outside the trust region"


def test_sapo_weights_fall_with_the_ratio_and_stay_positive() -> None:
    """The weight of the gradient, 4 r s (1 - s) in the paper, falls from 1 as the ratio rises above 1."""
    ratios = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    logprobs, zeros, ones = ratios.log().requires_grad_(True), torch.zeros_like(ratios), torch.ones_like(ratios)
    for advantages in (ones, -ones):
        loss = SAPO(1.0, 1.05).per_token(logprobs, zeros, advantages, ones)
        weights = (torch.autograd.grad(loss.sum(), logprobs)[0] / -advantages)[0].tolist()
        assert weights[0] == pytest.approx(1) and weights[1] > weights[2] > weights[3] > 0
    assert not SAPO().clipped(logprobs, zeros, ones, ones).any()


def test_gmpo_by_sequence() -> None:
    trainer, anchor, advantages, mask = tables()
    mask[5] = 0  # a row without a token
    low, high = 0.3, 0.4
    loss = GMPO(low, high)
    values = loss.per_token(trainer, anchor, advantages, mask)
    # Averaged over the tokens of each sequence, as the aggregation `sample` does.
    lengths = mask.sum(1)
    (gradients,) = torch.autograd.grad(((values * mask).sum(1) / lengths.clamp(min=1)).sum(), trainer)
    clipped = loss.clipped(trainer.detach(), anchor, advantages, mask)
    cases = set()
    for number in range(5):
        advantage = float(advantages[number, 0])
        places = [t for t in range(mask.shape[1]) if mask[number, t]]
        product = 1.0
        for t in places:
            ratio = float((trainer - anchor)[number, t].detach().exp())
            product *= min(ratio, math.exp(high)) if advantage > 0 else max(ratio, math.exp(-low))
        mean = product ** (1 / len(places))
        for t in places:
            ratio = float((trainer - anchor)[number, t].detach())
            is_clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < -low)
            expected = 0.0 if is_clipped else -mean * advantage / len(places)
            assert float(values[number, t].detach()) == pytest.approx(-mean * advantage, rel=1e-10)
            assert float(gradients[number, t]) == pytest.approx(expected, rel=1e-10, abs=1e-14)
            assert bool(clipped[number, t]) == is_clipped
            cases.add((advantage > 0, is_clipped))
    assert not gradients[5].any() and len(cases) == 4


def test_covariances_by_hand() -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0, -3.0, -6.0]), torch.tensor([2.0, 2.0, 0.0, 0.0])
    assert covariances(logprobs, advantages).tolist() == [2.0, 1.0, 0.0, 3.0]


def selected_by_loop(loss: Any, anchor: Tensor, advantages: Tensor, mask: Tensor) -> list[tuple[int, int]]:
    places = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    mean_logprob = math.fsum(float(anchor[place]) for place in places) / len(places)
    mean_advantage = math.fsum(float(advantages[place]) for place in places) / len(places)
    covariance = {p: (float(anchor[p]) - mean_logprob) * (float(advantages[p]) - mean_advantage) for p in places}
    count = max(1, math.floor(loss.share * len(places)))
    if isinstance(loss, KLCov):
        return sorted(sorted(places, key=lambda place: -covariance[place])[:count])
    candidates = [place for place in places if loss.low < covariance[place] < loss.high]
    order = np.random.default_rng(list(KEY)).permutation(len(candidates))
    return sorted(candidates[number] for number in order[:count])


@pytest.mark.parametrize("share", [1e-4, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["kl_cov", "clip_cov"])
def test_selections_by_hand(kind: str, share: float) -> None:
    loss: Any = KLCov(share) if kind == "kl_cov" else ClipCov(share, low=0.1, high=1.0)
    _, anchor, advantages, mask = tables()
    expected = selected_by_loop(loss, anchor, advantages, mask)
    junk = torch.where(mask > 0, anchor, math.nan), torch.where(mask > 0, advantages, math.inf)
    for logprobs, credit in ((anchor, advantages), junk):
        chosen = loss.select(logprobs, credit, mask, KEY)
        assert chosen.dtype == torch.bool and sorted(map(tuple, torch.nonzero(chosen).tolist())) == expected
    # Wider padding changes nothing.
    wide = [torch.nn.functional.pad(table, (0, 3)) for table in (anchor, advantages, mask)]
    assert torch.equal(loss.select(*wide, KEY)[:, :7], loss.select(anchor, advantages, mask, KEY))
    if kind == "clip_cov" and share < 0.3:
        assert not torch.equal(loss.select(anchor, advantages, mask, (3, 6, 12)), loss.select(*wide, KEY)[:, :7])


def test_selecting_from_nothing() -> None:
    for loss in (KLCov(), ClipCov()):
        for shape in ((0, 0), (2, 3)):
            zeros = torch.zeros(shape)
            assert not loss.select(zeros, zeros, zeros, KEY).any()
    few = torch.tensor([[-0.5, -1.0]]), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    assert not ClipCov(low=1.0, high=5.0).select(*few, KEY).any(), "none in the interval"
    assert SAPO().select(*few, KEY) is None


def test_ties_do_not_enlarge_the_selection() -> None:
    """Many tokens of a confident model have equal covariances. The first in batch order count, on every device."""
    anchor, advantages = torch.zeros(4, 50), torch.ones(4, 50)
    anchor[2:], advantages[2:] = -3.0, -1.0
    chosen = KLCov(share=0.05).select(anchor, advantages, torch.ones(4, 50), KEY)
    assert torch.nonzero(chosen).tolist() == [[0, t] for t in range(10)]


def test_covariance_losses_by_token() -> None:
    trainer, anchor, advantages, mask = tables()
    for loss in (ClipCov(0.3, 0.1, 1.0, clip_low=0.2, clip_high=0.3), KLCov(0.3, coefficient=0.7)):
        chosen = loss.select(anchor, advantages, mask, KEY)
        assert chosen.sum() > 5
        values = loss.per_token(trainer, anchor, advantages, mask, chosen)
        (gradients,) = torch.autograd.grad((values * mask).sum(), trainer)
        clipped = loss.clipped(trainer.detach(), anchor, advantages, mask, chosen)
        for place in zip(*torch.nonzero(mask, as_tuple=True), strict=True):
            ratio, advantage = float((trainer - anchor)[place].detach().exp()), float(advantages[place])
            value = gradient = -ratio * advantage
            if isinstance(loss, KLCov):
                value += 0.7 * abs(math.log(ratio)) * bool(chosen[place])
                gradient += math.copysign(0.7, math.log(ratio)) * bool(chosen[place])
                assert not clipped[place]
            else:
                stopped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8)
                value = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
                gradient = 0.0 if stopped or chosen[place] else gradient
                value = 0.0 if chosen[place] else value
                assert bool(clipped[place]) == (stopped or bool(chosen[place]))
            assert float(values[place].detach()) == pytest.approx(value, rel=1e-10, abs=1e-14)
            assert float(gradients[place]) == pytest.approx(gradient, rel=1e-10, abs=1e-14)


def whole_batch() -> TrainBatch:
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    groups = [make_group(values, admission=i, seed=2, prompt_length=3 + i) for i, values in enumerate(rewards)]
    batch = assemble(groups, CREDIT, max_new_tokens=8)
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1))
    return replace(batch, anchor_logprobs=batch.generator_logprobs + 0.3 * noise)


@pytest.mark.parametrize("loss", [ClipCov(0.2, 0.05, 5.0), KLCov(0.2)], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("correction", [Behaviour(), Proximal()], ids=["behaviour", "proximal"])
def test_micro_batches_use_the_selection_of_the_whole_batch(loss: Loss, correction: DesignChoice) -> None:
    """Loss and gradient do not depend on the micro-batch size. The selection uses the anchor of axis `correction`."""
    choices = row(loss, correction)
    batch = with_selection(whole_batch(), choices, KEY)
    anchor = choices.correction.anchor(batch)
    assert batch.selected is not None and 3 < batch.selected.sum() < batch.loss_mask.sum() / 2
    assert torch.equal(batch.selected, loss.select(anchor, batch.advantages, batch.loss_mask, KEY))  # type: ignore[arg-type]
    noise = torch.randn(anchor.shape, generator=torch.Generator().manual_seed(5))
    policy = terms(choices)[0]
    results = []
    for size in (1, 3, 5, 12):
        logprobs = (batch.generator_logprobs + 0.4 * noise).double().requires_grad_(True)
        total = torch.zeros((), dtype=torch.float64)
        for rows in batch.cut(PassSize(size)):
            part = batch.select(rows)
            part_logprobs = logprobs[rows, : part.loss_mask.shape[1]]
            scored = Scored(part, part_logprobs, torch.zeros_like(part_logprobs))
            assert len(loss_inputs(scored, choices, scored.batch.advantages)) == 5
            total = total + policy.reduce(scored)
        results.append((float(total.detach()), torch.autograd.grad(total, logprobs)[0]))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-12)
        assert torch.allclose(gradient, results[0][1], rtol=1e-12, atol=1e-15)
    # Without the selection the loss differs, so the comparison above does test it.
    plain = Scored(replace(batch, selected=None), logprobs, torch.zeros_like(logprobs))
    assert abs(float(policy.reduce(plain).detach()) - results[0][0]) > 1e-3


def test_the_blank_pass_of_a_sharded_model_selects_nothing() -> None:
    batch = with_selection(whole_batch(), row(KLCov(0.2)), KEY)
    blank = batch.blank()
    assert blank.selected is not None and blank.selected.shape == (1, 1) and not blank.selected.any()


# --- MaxRL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("correct", "incorrect"), [(1.0, 0.0), (1.0, -1.0)])
def test_maxrl_by_hand(correct: float, incorrect: float) -> None:
    """(x - p) / p, where x is 1 if correct and p the pass rate. The reward scale does not matter."""
    passes = [[1, 0, 0, 0], [1, 1, 0], [0, 0], [1, 1]]
    rewards = [torch.tensor([correct if x else incorrect for x in values], dtype=torch.float64) for values in passes]
    scaled = MaxRLNormalization(eps=0.0, incorrect=incorrect).scale(
        [values - values.mean() for values in rewards], rewards
    )
    assert [values.tolist() for values in scaled] == [
        pytest.approx([3.0, -1.0, -1.0, -1.0]),
        pytest.approx([0.5, 0.5, -1.0]),
        [0.0, 0.0],  # no success to learn from
        [0.0, 0.0],
    ]


def test_maxrl_never_reverses_a_gradient() -> None:
    """A penalty can push the mean below the reward of an incorrect completion. All advantages are then 0."""
    rewards = [torch.tensor([0.0, -1.0]), torch.tensor([0.5, 0.5, 0.5])]
    scaled = MaxRLNormalization(incorrect=0.0).scale([values - values.mean() for values in rewards], rewards)
    assert [values.tolist() for values in scaled] == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    assert MaxRLNormalization(eps=0.5, incorrect=0.0).scale([torch.ones(1)], [torch.ones(1)])[
        0
    ].item() == pytest.approx(1 / 1.5)


# --- invalid settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SAPO(tau_pos=0), r"loss\.tau_pos: 0 must be a number above 0"),
        (lambda: SAPO(tau_neg=-1.0), r"loss\.tau_neg: -1\.0"),
        (lambda: GMPO(clip_low=0), r"loss\.clip_low: 0 "),
        (lambda: GMPO(clip_high=math.inf), r"loss\.clip_high: inf "),
        (lambda: DPPO(divergence="js"), r"loss\.divergence: 'js' is unknown; valid: tv, kl"),
        (lambda: DPPO(max_divergence_low=0), r"loss\.max_divergence_low: 0 "),
        (lambda: DPPO(max_ratio=math.nan), r"loss\.max_ratio: nan "),
        (lambda: ClipCov(share=0), r"loss\.share: 0 must be above 0 and at most 1"),
        (lambda: ClipCov(low=5.0, high=1.0), r"loss\.low: 5\.0 must be below loss\.high, 1\.0"),
        (lambda: ClipCov(clip_low=1.5), r"loss\.clip_low: 1\.5 must be at most 1"),
        (lambda: KLCov(share=1.5), r"loss\.share: 1\.5 "),
        (lambda: KLCov(coefficient=-1), r"loss\.coefficient: -1 "),
        (lambda: MaxRLNormalization(eps=-1.0), r"normalization\.eps: -1\.0 "),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        make()
