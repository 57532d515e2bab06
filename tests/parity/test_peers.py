"""Our losses, aggregations and advantages against TRL and verl, on arrays stored by make_peer_arrays.py.

Every loss case goes the whole way: rewards and log-probabilities in, `credit.assemble`, loss, aggregation,
and out come the value and d loss / d trainer_logprobs. Where a peer does otherwise under the same name, a
test says what and where.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.advantage import GroupAdvantage
from lightning_scalerl.axes.aggregation import Aggregation, PromptAggregation, SampleAggregation, TokenAggregation
from lightning_scalerl.axes.filter import ZeroVariance
from lightning_scalerl.axes.loss import CISPO, DAPO, GSPO, Loss
from lightning_scalerl.axes.normalization import (
    BatchNormalization,
    NoNormalization,
    Normalization,
    PromptNormalization,
)
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollout import Group, Prompt, Rollout
from lightning_scalerl.stream.credit import assemble
from tests.helpers import row

MAKER = Path(__file__).with_name("make_peer_arrays.py")
STORED = json.loads(Path(__file__).with_name("peer_arrays.json").read_text())
INPUTS = STORED["inputs"]
PEER_LOSSES = {case["name"]: case for case in STORED["losses"]}
PEER_ADVANTAGES = {case["name"]: case for case in STORED["advantages"]}


def choices(loss: Loss, aggregation: Aggregation, **others: DesignChoice) -> Choices:
    return row(loss, aggregation, *others.values())


DAPO_26, DAPO_28, CISPO_5 = DAPO(0.2, 0.26), DAPO(0.2, 0.28), CISPO(5.0)
GSPO_005, GSPO_1 = GSPO(3e-3, 5e-3), GSPO(0.05, 0.1)
TOKEN, SAMPLE, PROMPT = TokenAggregation(), SampleAggregation(), PromptAggregation()
ZERO_VARIANCE = ZeroVariance()

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
    # GRPO as TRL runs it, from rewards to loss.
    "trl grpo from rewards": choices(DAPO(0.2, 0.2), SAMPLE, normalization=PromptNormalization(1, 1e-4)),
    "verl dapo 0.28 token": choices(DAPO_28, TOKEN),
    "verl dapo 0.28 sample": choices(DAPO_28, SAMPLE),
    "verl cispo token": choices(CISPO_5, TOKEN),
    "verl cispo sample": choices(CISPO_5, SAMPLE),
    "verl cispo token forced": choices(CISPO_5, TOKEN),
    # verl gives each token its own share of the gradient; ours and TRL's spread the sequence's. The same, as
    # long as advantages are constant along a sequence.
    "verl gspo 0.005 sample": choices(GSPO_005, SAMPLE),
    "verl gspo 0.1 sample": choices(GSPO_1, SAMPLE),
    "verl gspo 0.1 token": choices(GSPO_1, TOKEN),
    "verl gspo 0.1 token forced": choices(GSPO_1, TOKEN),
}
OTHER_LOSS = {"verl cispo sample forced", "verl dual clip token"}

SAME_ADVANTAGE = {
    "trl group": PromptNormalization(ddof=1, eps=1e-4),
    "trl none": NoNormalization(),
    "verl grpo scaled": PromptNormalization(ddof=1, eps=1e-6),
    "verl grpo unscaled": NoNormalization(),
    # On completions of one token: verl weighs by tokens there, our batch scale counts each rollout once.
    "verl whitened": BatchNormalization(ddof=1, eps=0.0),
}
OTHER_ADVANTAGE = {"trl batch"}


def stored_groups(with_forced: bool) -> list[Group]:
    """The stored rollouts as they would leave a generator; prompts differ in length, to no effect."""
    rows = iter(zip(INPUTS["generator_logprobs"], INPUTS["forced"], strict=True))
    groups = []
    for number, rewards in enumerate(INPUTS["rewards"]):
        rollouts = []
        for reward in rewards:
            logprobs, forced = next(rows)
            length = len(logprobs)
            flags = [with_forced and bool(flag) for flag in forced]
            rollouts.append(Rollout([5] * length, logprobs, [0] * length, flags, "stop", reward=reward))
        groups.append(Group(number, Prompt(str(number), "", ""), [3] * (number + 1), rollouts))
    return groups


def padded(rows: list[list[float]], fill: float) -> Tensor:
    """(R, T) float64."""
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def ours(picked: Choices, with_forced: bool, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Our loss and d loss / d trainer_logprobs, summed over micro-batches; padding holds junk."""
    batch = assemble(stored_groups(with_forced), picked, max_new_tokens=7)
    logprobs = padded(INPUTS["trainer_logprobs"], fill=-1.0).requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for part in batch.micro_batches(micro_batch):
        per_token = picked.loss.per_token(
            logprobs[part.row, : part.loss_mask.shape[1]],
            picked.correction.anchor(part),
            part.advantages,
            part.loss_mask,
        )
        total = total + picked.aggregation.reduce(per_token, part, batch.denominators)
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


def theirs(name: str) -> tuple[Tensor, Tensor]:
    case = PEER_LOSSES[name]
    return torch.tensor(case["value"], dtype=torch.float64), padded(case["gradient"], fill=0.0)


def our_advantages(normalization: Normalization) -> Tensor:
    """(P, G) float64."""
    rewards = [torch.tensor(group, dtype=torch.float64) for group in INPUTS["rewards"]]
    return torch.stack(normalization.scale([GroupAdvantage().estimate(group) for group in rewards], rewards))


def their_advantages(name: str) -> Tensor:
    return torch.tensor(PEER_ADVANTAGES[name]["advantages"], dtype=torch.float64)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The peers compute in float64; a TrainBatch holds advantages, masks and counts in float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_every_stored_case_is_compared() -> None:
    assert set(PEER_LOSSES) == SAME_LOSS.keys() | OTHER_LOSS
    assert set(PEER_ADVANTAGES) == SAME_ADVANTAGE.keys() | OTHER_ADVANTAGE


@pytest.mark.parametrize("micro_batch", [12, 5])
@pytest.mark.parametrize("name", SAME_LOSS)
def test_loss_and_gradient_are_the_peers(name: str, micro_batch: int) -> None:
    value, gradient = ours(SAME_LOSS[name], PEER_LOSSES[name]["forced"], micro_batch)
    peer_value, peer_gradient = theirs(name)
    assert_same(value, peer_value)
    assert_same(gradient, peer_gradient)


@pytest.mark.parametrize("name", SAME_LOSS)
def test_no_other_loss_or_aggregation_would_pass(name: str) -> None:
    """The inputs reach every branch that tells the choices apart; else the parity above would say little."""
    right = SAME_LOSS[name]
    _, peer_gradient = theirs(name)
    others = (DAPO_26, DAPO_28, DAPO(0.3, 0.26), CISPO_5, CISPO(4.0), CISPO(6.0))
    sequences = (GSPO_005, GSPO_1, GSPO(0.2, 0.1), GSPO(0.05, 0.3))
    for loss in (*others, *sequences, right.loss):
        for aggregation in (TOKEN, SAMPLE, PROMPT):
            if loss.same_as(right.loss) and aggregation.same_as(right.aggregation):
                continue
            other = right.having(loss).having(aggregation)
            _, gradient = ours(other, PEER_LOSSES[name]["forced"], micro_batch=12)
            gap = (gradient - peer_gradient).abs().max() / peer_gradient.abs().max()
            assert gap > 0.01, (loss.semantics(), aggregation.semantics())


def test_verl_does_not_count_a_rollout_without_credited_tokens() -> None:
    """verl's sample average leaves it out of the count; ours and TRL's keep it, one of twelve here."""
    value, gradient = ours(choices(CISPO_5, SAMPLE), with_forced=True, micro_batch=12)
    peer_value, peer_gradient = theirs("verl cispo sample forced")
    assert_same(value * 12 / 11, peer_value)
    assert_same(gradient * 12 / 11, peer_gradient)


def test_verl_drops_the_gradient_of_large_ratios_under_its_default_dual_clip() -> None:
    """Only where the advantage is negative and the ratio above 3."""
    _, gradient = ours(choices(DAPO_28, TOKEN), with_forced=False, micro_batch=12)
    _, peer_gradient = theirs("verl dual clip token")
    ratio = (padded(INPUTS["trainer_logprobs"], 0.0) - padded(INPUTS["generator_logprobs"], 0.0)).exp()
    dropped = (ratio > 3) & (our_advantages(NoNormalization()).reshape(-1, 1) < 0)
    assert dropped.any()
    assert (gradient[dropped] > 0).all()
    assert_same(gradient.masked_fill(dropped, 0.0), peer_gradient)


@pytest.mark.parametrize("name", SAME_ADVANTAGE)
def test_advantages_are_the_peers(name: str) -> None:
    assert_same(our_advantages(SAME_ADVANTAGE[name]), their_advantages(name))


def test_the_batch_scale_of_trl_is_not_ours() -> None:
    """TRL divides by the standard deviation of raw rewards, which the difficulty of the prompts widens."""
    value, peer = our_advantages(BatchNormalization(ddof=1, eps=1e-4)), their_advantages("trl batch")
    assert not torch.allclose(value, peer, rtol=1e-2)
    rewards = torch.tensor(INPUTS["rewards"], dtype=torch.float64)
    assert_same(peer, our_advantages(NoNormalization()) / (rewards.std() + 1e-4))


@pytest.mark.slow
@pytest.mark.peers
def test_the_stored_arrays_are_what_the_peers_compute(tmp_path: Path) -> None:
    """Made again, by the interpreter PEERS_PYTHON if set: the peers live in an environment of their own."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    probe = "import importlib.util as u; raise SystemExit(not (u.find_spec('trl') and u.find_spec('verl')))"
    if subprocess.run([python, "-c", probe], check=False).returncode:
        absent = f"{python} has no trl and verl; make_peer_arrays.py says how to make one, PEERS_PYTHON names it"
        if os.environ.get("CI_ALL") == "1":
            pytest.fail(absent)
        pytest.skip(absent)
    again = tmp_path / "peer_arrays.json"
    made = subprocess.run([python, MAKER, "--output", again], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    fresh = json.loads(again.read_text())
    assert without_versions(fresh) == approximately(without_versions(STORED)), fresh["environment"]


def without_versions(content: Any) -> Any:
    """A peer of another version may well compute the same."""
    if isinstance(content, dict):
        return {k: without_versions(v) for k, v in content.items() if k not in ("environment", "version")}
    return [without_versions(value) for value in content] if isinstance(content, list) else content


def approximately(content: Any) -> Any:
    """The same tree with each number as pytest.approx, which does not descend into nested lists itself."""
    if isinstance(content, dict):
        return {key: approximately(value) for key, value in content.items()}
    if isinstance(content, list):
        return [approximately(value) for value in content]
    return pytest.approx(content, rel=1e-9, abs=1e-12) if isinstance(content, float) else content
