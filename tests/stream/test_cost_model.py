"""Tests of the virtual cluster's cost model: which rates are valid, and how long a step takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_scalerl.axes.truncated import MaskTruncated
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.credit import assemble
from tests.axes.test_contract import CREDIT
from tests.helpers import make_group

# Powers of ten, so that each digit of a sum shows which rate contributed to it.
RATES: dict[str, Any] = {
    "generator_devices": 1,
    "trainer_devices": 1,
    "colocated": False,
    "decode_s": 1.0,
    "decode_rollout_s": 0.1,
    "decode_context_s": 0.01,
    "prefill_token_s": 0.001,
    "train_s": 100.0,
    "train_token_s": 10.0,
    "publish_s": 1000.0,
    "source": "test",
}
SECONDS = [field for field in RATES if field.endswith("_s")]


def model(**changed: Any) -> CostModel:
    return CostModel(**{**RATES, **changed})


def report(decoded: int, context: int, prefill: int = 0) -> StepReport:
    return StepReport((), prefill, prefill * 7, decoded, context)


@pytest.mark.parametrize("bad", [-1.0, -1e-9, float("inf"), float("nan"), "1.0", None, True])
@pytest.mark.parametrize("field", SECONDS)
def test_invalid_times_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"cost_model\.{field}: .* must be a number of seconds") as error:
        model(**{field: bad})
    assert "\n" not in str(error.value) and repr(bad) in str(error.value)


@pytest.mark.parametrize("bad", [0, -1, 1.0, 1.5, True, "2", None])
@pytest.mark.parametrize("field", ["generator_devices", "trainer_devices"])
def test_invalid_numbers_of_devices_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"cost_model\.{field}: .* must be a whole number") as error:
        model(**{field: bad})
    assert "\n" not in str(error.value) and repr(bad) in str(error.value)


@pytest.mark.parametrize("bad", ["false", 0, None])
def test_colocated_must_be_a_boolean(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"cost_model\.colocated: {bad!r} must be true or false"):
        model(colocated=bad)


@pytest.mark.parametrize("pair", [("decode_s", "decode_rollout_s"), ("train_s", "train_token_s")])
def test_decoding_and_training_must_take_time(pair: tuple[str, str]) -> None:
    for free in pair:
        model(**{free: 0})
    with pytest.raises(ConfigurationError, match="cost_model: decoding and training must take time"):
        model(**dict.fromkeys(pair, 0.0))


@pytest.mark.parametrize("field", ["decode_context_s", "prefill_token_s", "publish_s"])
def test_other_rates_may_be_zero(field: str) -> None:
    assert getattr(model(**{field: 0}), field) == 0


def test_colocated_devices_are_counted_once() -> None:
    apart, together = (model(generator_devices=4, trainer_devices=4, colocated=both) for both in (False, True))
    assert (apart.devices, together.devices) == (8, 4)
    assert model(generator_devices=64, trainer_devices=16).devices == 80
    with pytest.raises(
        ConfigurationError, match=r"cost_model\.colocated: generator_devices is 4 and trainer_devices 2"
    ):
        model(generator_devices=4, trainer_devices=2, colocated=True)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("drains", [False, True])
def test_only_modes_that_drain_can_be_colocated(colocated: bool, drains: bool) -> None:
    problem = model(colocated=colocated).conflict(drains)
    assert (problem is None) is (drains or not colocated)
    assert problem is None or ("cost_model.colocated: true" in problem and "\n" not in problem)


@pytest.mark.parametrize(
    ("devices", "seconds"),
    [
        # 10 rollouts attend to 20 tokens each: 0.1 + 20 * 0.01 s per rollout. 30 prompt tokens take 0.03 s.
        (1, 1 + 10 * 0.3 + 0.03),
        (2, 1 + 5 * 0.3 + 0.015),
        (3, 1 + 4 * 0.3 + 0.01),
        (4, 1 + 3 * 0.3 + 0.0075),
        (10, 1 + 0.3 + 0.003),
        (64, 1 + 0.3 + 0.03 / 64),
    ],
)
def test_a_token_step_takes_as_long_as_its_fullest_device(devices: int, seconds: float) -> None:
    cluster = model(generator_devices=devices, trainer_devices=7)
    assert cluster.generator_step_s(report(10, 200, prefill=30)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("devices", "partners", "seconds"),
    [
        # Each device of an engine of 4 reads a quarter of the weights and does a quarter of the work.
        (4, 4, (1 + 10 * 0.3) / 4 + 0.5 + 0.0075),
        (8, 4, (1 + 5 * 0.3) / 4 + 0.5 + 0.03 / 8),
        (6, 2, (1 + 4 * 0.3) / 2 + 0.5 + 0.005),
        (64, 64, (1 + 10 * 0.3) / 64 + 0.5 + 0.03 / 64),
        (64, 1, 1 + 0.3 + 0.03 / 64),  # engines of one device exchange nothing
    ],
)
def test_engines_of_several_devices_share_each_step(devices: int, partners: int, seconds: float) -> None:
    cluster = model(generator_devices=devices, tensor_parallel=partners, tensor_parallel_s=0.5)
    assert cluster.generator_step_s(report(10, 200, prefill=30)) == pytest.approx(seconds)
    assert cluster.devices == devices + 1, "each device is paid for"


def test_devices_must_be_a_multiple_of_the_engine_size() -> None:
    with pytest.raises(ConfigurationError, match=r"^cost_model.tensor_parallel: 6 generator devices do not make eng"):
        model(generator_devices=6, tensor_parallel=4)
    with pytest.raises(ConfigurationError, match=r"cost_model\.tensor_parallel: 0 must be a whole number"):
        model(tensor_parallel=0)


def test_a_step_that_only_prefills() -> None:
    assert model(generator_devices=2).generator_step_s(report(0, 0, prefill=30)) == pytest.approx(0.015)
    assert model().generator_step_s(report(0, 0)) == 0
    assert model(prefill_token_s=0).generator_step_s(report(10, 200, prefill=30)) == pytest.approx(4)


def batch_of() -> TrainBatch:
    """Two prompts of 4 and 6 tokens; their rollouts have 3 and 5, then 2 and 1 tokens. The one of 5 was truncated."""
    groups = [make_group([1.0, 0.0], number, prompt_length=length) for number, length in enumerate((4, 6))]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, size in zip(rollouts, (3, 5, 2, 1), strict=True):
        rollout.tokens, rollout.weight_versions, rollout.sources = [1] * size, [0] * size, [0] * size
        rollout.generator_logprobs = [-1.0] * size
    rollouts[1].finish_reason = "length"
    return assemble(groups, CREDIT.replacing(MaskTruncated()), max_new_tokens=5)


@pytest.mark.parametrize(("devices", "seconds"), [(1, 100 + 220), (2, 100 + 110), (16, 100 + 220 / 16)])
def test_training_reads_prompts_and_credited_completions(devices: int, seconds: float) -> None:
    """The trained tokens are (4 + 3) + (6 + 2) + (6 + 1) = 22; the truncated rollout is masked."""
    cluster = model(trainer_devices=devices, generator_devices=7)
    assert cluster.train_step_s(batch_of()) == pytest.approx(seconds)


def test_a_step_without_credit_takes_the_fixed_time() -> None:
    groups = [make_group([1.0, 0.0])]
    for rollout in groups[0].rollouts:
        rollout.finish_reason = "length"
    batch = assemble(groups, CREDIT.replacing(MaskTruncated()), max_new_tokens=5)
    assert model(trainer_devices=3).train_step_s(batch) == 100


# Without subnormal numbers: a rate of 1e-313 has no digits left to divide.
rate = st.floats(0, 10, allow_subnormal=False)


@given(
    rates=st.fixed_dictionaries({field: rate for field in SECONDS}),
    decoded=st.integers(0, 300),
    length=st.floats(1, 500),
    prefill=st.integers(0, 500),
    few=st.integers(1, 64),
    more=st.integers(0, 64),
)
def test_more_devices_are_never_slower(
    rates: dict[str, float], decoded: int, length: float, prefill: int, few: int, more: int
) -> None:
    assume(rates["decode_s"] + rates["decode_rollout_s"] > 0 and rates["train_s"] + rates["train_token_s"] > 0)
    work, batch = report(decoded, int(decoded * length), prefill), batch_of()
    small, large = (model(**rates, generator_devices=size, trainer_devices=size) for size in (few, few + more))
    one = model(**rates)
    assert large.generator_step_s(work) <= small.generator_step_s(work) * (1 + 1e-12)
    assert large.train_step_s(batch) <= small.train_step_s(batch) * (1 + 1e-12)
    # n devices are at most n times as fast as one.
    assert small.generator_step_s(work) * few >= one.generator_step_s(work) * (1 - 1e-12)
    assert small.train_step_s(batch) * few >= one.train_step_s(batch) * (1 - 1e-12)


def test_semantics_include_every_rate() -> None:
    cluster = model(generator_devices=3)
    later = {"grade_s": 0.0, "tensor_parallel": 1, "tensor_parallel_s": 0.0}
    assert cluster.semantics() == {**RATES, "generator_devices": 3, **later}
    assert CostModel(**cluster.semantics()) == cluster
