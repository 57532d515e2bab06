"""The probe: every step says whether trainer and generator compute the same, and a run stops where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_scalerl import ConfigurationError
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.measure.probe import MEAN, P99, check_probe, probe_metrics
from tests.examples import every
from tests.helpers import CountingTask, fit
from tests.test_module import Keep


@pytest.mark.parametrize(
    "mode", every(3, [OnPolicy(), Pipeline(3, "stale"), Pipeline(3, "recompute")]), ids=["on", "stale", "re"]
)
def test_every_step_has_something_to_judge(tiny_model_path: str, mode: Any) -> None:
    """Also where all rollouts are stale: the generator is asked what it would record now."""
    keep = Keep()
    fit(tiny_model_path, steps=6, callbacks=[mode, Precision("fp32"), keep], recipe="scalerl")
    assert len(keep.of(P99)) == 6 and max(keep.of(P99)) < 1e-5


def test_where_the_generator_has_other_weights_there_is_nothing_to_judge(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=7, callbacks=[PPOOffPolicy(3), Precision("fp32"), keep])
    assert [step for kind, step, metrics in keep.records if kind == "train" and P99 in metrics] == [1, 4, 7]


class Constant(CountingTask):
    def reward(self, prompt: Any, completion: str) -> float:
        return 1.0


class Wrong(Callback):
    """The generator's head is scaled: another policy samples than the one that trains."""

    def __init__(self, factor: float, from_step: int = 0) -> None:
        self.factor, self.from_step = factor, from_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Once the run has begun, so that the probe at its start has found nothing."""
        generate = pl_module.driver.next_batch

        def next_batch(stop: Any) -> Any:
            pl_module.driver.next_batch = generate
            self.act(pl_module)
            return generate(stop)

        pl_module.driver.next_batch = next_batch

    def act(self, pl_module: Any) -> None:
        real = pl_module.generator.publish

        def publish(weights: dict[str, torch.Tensor], version: int, recompute_kv: bool = False) -> None:
            if version >= self.from_step:
                weights = {**weights, "lm_head.weight": self.factor * weights["lm_head.weight"]}
            real(weights, version, recompute_kv)

        pl_module.generator.publish = publish
        if self.from_step == 0:
            publish(pl_module.trained.weights(), 0)


@pytest.mark.parametrize("task", [CountingTask(), Constant()], ids=["kept", "nothing kept"])
def test_a_first_batch_is_judged_whether_or_not_it_keeps_anything(tiny_model_path: str, task: CountingTask) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match=r"under the same weights \(allowed in fp32: 0.0001 and 0.0001\)"):
        fit(tiny_model_path, callbacks=[Wrong(1.001), OnPolicy(), Precision("fp32"), keep], task=task)
    assert len(keep.of(P99)) == 1, "recorded before the run stops"


@pytest.mark.parametrize("mode", [OnPolicy(), Pipeline(2, "stale")])
def test_later_steps_are_judged_too(tiny_model_path: str, mode: Any) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match="differ from the trainer's by"):
        fit(tiny_model_path, steps=9, callbacks=[Wrong(1.01, 3), mode, Precision("fp32"), keep], recipe="scalerl")
    assert max(keep.of(P99)[:3]) < 1e-5 and 4 <= len(keep.of(P99)) <= 6


class Tampered(Callback):
    """From before the start on, what is published goes through `tamper`."""

    def __init__(self, tamper: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        self.tamper = tamper

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        real = pl_module.generator.publish
        pl_module.generator.publish = lambda weights, *rest: real(self.tamper(weights), *rest)


def without(part: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


@pytest.mark.parametrize("part", every(3, ["layers.0.mlp.up_proj", "layers.1.input_layernorm", "embed_tokens"]))
def test_a_layer_that_never_arrives_is_named_before_the_first_step(tiny_model_path: str, part: str) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match=rf"published, [^ ]*{part}[^ ]* did not change it as they change"):
        fit(tiny_model_path, callbacks=[Tampered(without(part)), Precision("fp32"), keep])
    assert keep.records == []


def test_a_generator_of_another_policy_is_refused_before_the_first_step(tiny_model_path: str) -> None:
    def scaled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 1.01 * tensor if "norm" in name else tensor for name, tensor in weights.items()}

    with pytest.raises(ConfigurationError, match=r"differ from the trainer's by .* under the same weights"):
        fit(tiny_model_path, callbacks=[Tampered(scaled), Precision("fp32")])


def test_a_generator_that_changes_with_every_publish_is_refused(tiny_model_path: str) -> None:
    times = count(1)

    def worn(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # As one does whose prefix cache outlives its weights, or that adds where it should replace.
        factor = 1.0 if next(times) == 1 else 1.05
        return {name: factor * tensor if "lm_head" in name else tensor for name, tensor in weights.items()}

    with pytest.raises(ConfigurationError, match="published a second time, the same weights give others"):
        fit(tiny_model_path, callbacks=[Tampered(worn), Precision("fp32")])


def test_a_phrase_that_does_not_bind_is_found_at_the_start(tiny_model_path: str) -> None:
    class Deaf(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            real = pl_module.generator.submit
            pl_module.generator.submit = lambda request: real(replace(request, interrupt_at=()))

    with pytest.raises(ConfigurationError, match="did not force the phrase"):
        fit(tiny_model_path, callbacks=[Deaf(), Precision("fp32")], recipe="scalerl")


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_the_start_leaves_the_weights_as_they_were(tiny_model_path: str, policy: str) -> None:
    class Before(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = {k: v.clone() for k, v in pl_module.policy.model.state_dict().items()}

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            now = pl_module.policy.model.state_dict()
            assert all(torch.equal(now[name], tensor) for name, tensor in self.weights.items())
            assert pl_module.generator.version == 0

    fit(tiny_model_path, steps=1, callbacks=[Before(), Precision(policy)])


def test_the_percentile_sees_what_the_mean_hides() -> None:
    gaps = torch.zeros(1000)
    gaps[:25] = 4e-3
    found = probe_metrics(gaps)
    assert found[P99] == pytest.approx(4e-3) and found[MEAN] == pytest.approx(1e-4)
    with pytest.raises(ConfigurationError, match=r"by 0\.0001 on average and 0\.004 at the 99th percentile"):
        check_probe(found, Precision("fp32"), 0)
    check_probe(found, Precision(), 0)
    assert probe_metrics(torch.zeros(0)) == {}
    check_probe({}, Precision("fp32"), 0)


def test_one_large_gap_among_few_tokens_is_chance() -> None:
    gaps = torch.full((60,), 0.01)
    gaps[0] = 5.0
    check_probe(probe_metrics(gaps), Precision(policy="bf16"), 3)
    gaps[:6] = 4.0
    with pytest.raises(ConfigurationError, match="4 at the 99th percentile"):
        check_probe(probe_metrics(gaps), Precision(policy="bf16"), 3)


@pytest.mark.parametrize(("mean", "p99"), [(0.21, 0.1), (0.01, 3.1), (float("nan"), float("nan"))])
def test_sixteen_bits_have_their_own_bounds(mean: float, p99: float) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed in bf16: 0\.2 and 3"):
        check_probe({MEAN: mean, P99: p99}, Precision(), 1)


def test_a_policy_that_has_become_sharp_goes_on() -> None:
    """As measured in a run of honest parts: beyond what is allowed before the first step."""
    check_probe({MEAN: 0.07, P99: 0.795}, Precision(), 895)
    with pytest.raises(ConfigurationError, match=r"allowed in bf16: 0\.05 and 0\.75"):
        check_probe({MEAN: 0.07, P99: 0.1}, Precision(), 0)
    with pytest.raises(ConfigurationError, match=r"allowed in fp32: 0\.0001 and 0\.0001"):
        check_probe({MEAN: 2e-4, P99: 2e-4}, Precision("fp32"), 895)
    check_probe({MEAN: 0.04, P99: 0.7}, Precision(), 0)
