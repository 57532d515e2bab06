"""The probe: every step measures whether trainer and generator agree, and a run stops if they do not."""

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
from lightning_scalerl.measure.probe import MEAN, P99, bound_rank, check_probe, probe_metrics
from tests.examples import every
from tests.helpers import CountingTask, fit
from tests.test_module import Keep


@pytest.mark.parametrize(
    "mode", every(3, [OnPolicy(), Pipeline(3, "stale"), Pipeline(3, "recompute")]), ids=["on", "stale", "re"]
)
def test_every_step_has_a_probe(tiny_model_path: str, mode: Any) -> None:
    """If all rollouts are stale, the generator scores some of them again with its present weights."""
    keep = Keep()
    fit(tiny_model_path, steps=6, callbacks=[mode, Precision("fp32"), keep], recipe="scalerl")
    assert len(keep.of(P99)) == 6 and max(keep.of(P99)) < 1e-5


def test_steps_with_older_generator_weights_have_no_probe(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=7, callbacks=[PPOOffPolicy(3), Precision("fp32"), keep])
    assert [step for kind, step, metrics in keep.records if kind == "train" and P99 in metrics] == [1, 4, 7]


class Constant(CountingTask):
    def reward(self, prompt: Any, completion: str) -> float:
        return 1.0


class ScaleHead(Callback):
    """Scale the generator's head, so that another policy samples than the one that trains."""

    def __init__(self, factor: float, from_step: int = 0) -> None:
        self.factor, self.from_step = factor, from_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Act once the run has started, after the probe at the start has passed."""
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
def test_the_first_batch_is_probed_even_if_the_filter_keeps_nothing(tiny_model_path: str, task: CountingTask) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match=r"under the same weights \(allowed in fp32: 0.0001 and 0.0001\)"):
        fit(tiny_model_path, callbacks=[ScaleHead(1.001), OnPolicy(), Precision("fp32"), keep], task=task)
    assert len(keep.of(P99)) == 1, "the probe is recorded before the run stops"


@pytest.mark.parametrize("mode", [OnPolicy(), Pipeline(2, "stale")])
def test_later_steps_are_probed_too(tiny_model_path: str, mode: Any) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match="differ from the trainer's by"):
        fit(tiny_model_path, steps=9, callbacks=[ScaleHead(1.01, 3), mode, Precision("fp32"), keep], recipe="scalerl")
    assert max(keep.of(P99)[:3]) < 1e-5 and 4 <= len(keep.of(P99)) <= 6


class TamperPublished(Callback):
    """Pass all published weights through `tamper`, from before the start on."""

    def __init__(self, tamper: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        self.tamper = tamper

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        real = pl_module.generator.publish
        pl_module.generator.publish = lambda weights, *rest: real(self.tamper(weights), *rest)


def without_layer(part: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


@pytest.mark.parametrize("part", every(3, ["layers.0.mlp.up_proj", "layers.1.input_layernorm", "embed_tokens"]))
def test_a_layer_that_never_arrives_is_named_before_the_first_step(tiny_model_path: str, part: str) -> None:
    keep = Keep()
    with pytest.raises(ConfigurationError, match=rf"published, [^ ]*{part}[^ ]* did not change it as they change"):
        fit(tiny_model_path, callbacks=[TamperPublished(without_layer(part)), Precision("fp32"), keep])
    assert keep.records == []


def test_a_generator_of_another_policy_is_refused_before_the_first_step(tiny_model_path: str) -> None:
    def scaled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 1.01 * tensor if "norm" in name else tensor for name, tensor in weights.items()}

    with pytest.raises(ConfigurationError, match=r"differ from the trainer's by .* under the same weights"):
        fit(tiny_model_path, callbacks=[TamperPublished(scaled), Precision("fp32")])


def test_a_generator_that_changes_with_every_publish_is_refused(tiny_model_path: str) -> None:
    publish_count = count(1)

    def worn(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Like a generator whose prefix cache outlives its weights, or that adds weights instead of replacing them.
        factor = 1.0 if next(publish_count) == 1 else 1.05
        return {name: factor * tensor if "lm_head" in name else tensor for name, tensor in weights.items()}

    with pytest.raises(ConfigurationError, match="published a second time, the same weights give others"):
        fit(tiny_model_path, callbacks=[TamperPublished(worn), Precision("fp32")])


def test_a_phrase_that_is_not_forced_is_detected_at_the_start(tiny_model_path: str) -> None:
    class DropInterruptions(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            real = pl_module.generator.submit
            pl_module.generator.submit = lambda request: real(replace(request, interrupt_at=()))

    with pytest.raises(ConfigurationError, match="did not force the phrase"):
        fit(tiny_model_path, callbacks=[DropInterruptions(), Precision("fp32")], recipe="scalerl")


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_the_probe_at_the_start_does_not_change_the_weights(tiny_model_path: str, policy: str) -> None:
    class RecordWeights(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = {k: v.clone() for k, v in pl_module.policy.model.state_dict().items()}

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            current = pl_module.policy.model.state_dict()
            assert all(torch.equal(current[name], tensor) for name, tensor in self.weights.items())
            assert pl_module.generator.version == 0

    fit(tiny_model_path, steps=1, callbacks=[RecordWeights(), Precision(policy)])


def test_the_percentile_sees_what_the_mean_hides() -> None:
    gaps = torch.zeros(1000)
    gaps[:25] = 4e-3
    metrics = probe_metrics(gaps)
    assert metrics[P99] == pytest.approx(4e-3) and metrics[MEAN] == pytest.approx(1e-4)
    with pytest.raises(ConfigurationError, match=r"by 0\.0001 on average and 0\.004 at the 99th percentile"):
        check_probe(metrics, Precision("fp32"), 0)
    check_probe(metrics, Precision(), 0)
    assert probe_metrics(torch.zeros(0)) == {}


@pytest.mark.parametrize("n", [1, 2, 60, 1_000, 100_000])
def test_the_bound_of_the_percentile_has_the_least_rank_that_is_improbable(n: int) -> None:
    from scipy.stats import binom

    rank = bound_rank(n)
    assert rank == n or binom.sf(rank - 1, n, 0.01) < 1e-4
    assert rank == 1 or binom.sf(rank - 2, n, 0.01) >= 1e-4
    check_probe({}, Precision("fp32"), 0)


def test_one_large_gap_among_few_tokens_is_accepted() -> None:
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


def test_larger_gaps_are_allowed_after_the_first_step() -> None:
    """Gaps measured in a correct run, larger than those allowed before the first step."""
    check_probe({MEAN: 0.07, P99: 0.795}, Precision(), 895)
    with pytest.raises(ConfigurationError, match=r"allowed in bf16: 0\.05 and 0\.75"):
        check_probe({MEAN: 0.07, P99: 0.1}, Precision(), 0)
    with pytest.raises(ConfigurationError, match=r"allowed in fp32: 0\.0001 and 0\.0001"):
        check_probe({MEAN: 2e-4, P99: 2e-4}, Precision("fp32"), 895)
    check_probe({MEAN: 0.04, P99: 0.7}, Precision(), 0)
