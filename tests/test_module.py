"""Tests of the training step under Lightning: gradients, precision, choices as callbacks, resuming."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.autograd.graph import saved_tensors_hooks

from lightning_scalerl import ConfigurationError, Evaluate, RolloutDataModule, ScaleRL
from lightning_scalerl.axes.aggregation import SampleAggregation, TokenAggregation
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.axes.length_control import NoLengthControl, Penalty
from lightning_scalerl.axes.loss import CISPO, DAPO, GSPO
from lightning_scalerl.axes.normalization import NoNormalization, PromptNormalization
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.axes.resampling import UniformResampling
from lightning_scalerl.axes.truncated import KeepTruncated
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.checkpointing import checkpoints, newest_checkpoint
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.model import policy
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.session import placement
from lightning_scalerl.stream.random_streams import EVALUATION_STREAM
from lightning_scalerl.verify.verification import RewardError
from sweeps.run.journal import read_journal
from tests.examples import every
from tests.helpers import SMALL, SMALL_CORE, CountingTask, fit, quiet
from tests.measure.test_compute_meter import check_hours


class Keep(Recorder):
    """Collects every record."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, float]]] = []

    def on_record(self, kind: str, step: int, metrics: Any) -> None:
        self.records.append((kind, step, dict(metrics)))

    def of(self, key: str) -> list[float]:
        return [metrics[key] for kind, _, metrics in self.records if kind == "train"]


def weights_of(module: ScaleRL) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


def test_on_policy_trainer_and_generator_agree(tiny_model_path: str) -> None:
    """In FP32 log-probabilities differ by less than 1e-5, so the ratio is 1 before the first update of a batch."""
    keep = Keep()
    fit(tiny_model_path, callbacks=[OnPolicy(), keep], steps=5)
    assert max(keep.of("train/logprob_gap")) < 1e-5
    assert max(keep.of("train/ratio_max")) < 1 + 1e-4
    assert keep.of("train/staleness_max") == [0] * 5


def test_a_generator_that_disagrees_stops_the_run(tiny_model_path: str) -> None:
    class Wrong(Keep):
        """Scales the generator's head, and stops the trainer from publishing weights to it."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.generator.publish = lambda weights, version: None
            pl_module.generator.policy.model.get_output_embeddings().weight.mul_(9.0)

    with pytest.raises(ConfigurationError, match="differ from the trainer's by"):
        fit(tiny_model_path, callbacks=[Wrong()])


def test_off_policy_staleness_is_as_configured(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, callbacks=[keep], steps=7)
    assert keep.of("train/staleness_max") == [0, 1, 2, 0, 1, 2, 0]
    gaps = keep.of("train/logprob_gap")
    assert max(gaps[0], gaps[3], gaps[6]) < 1e-5 < min(gaps[1], gaps[2], gaps[4], gaps[5])


@pytest.mark.parametrize(
    "size",
    [
        *every(3, ["micro_batch=1", "micro_batch=4", "micro_batch=12"], pytest.mark.full),
        *every(1, ["micro_tokens=25", "micro_tokens=1"], pytest.mark.full),
    ],
)
@pytest.mark.parametrize("aggregation", [SampleAggregation, TokenAggregation, None])
def test_micro_batches_do_not_change_the_weights(tiny_model_path: str, size: str, aggregation: Any) -> None:
    """With the real model, one step gives the same weights for every limit of the micro-batches."""

    def one_step(override: str) -> dict[str, torch.Tensor]:
        callbacks = [aggregation()] if aggregation else []
        return weights_of(fit(tiny_model_path, steps=1, callbacks=callbacks, overrides=[f"batch.{override}"]))

    # Adam divides by the gradient's size, which amplifies rounding. The tolerance is small against a step of 3e-3.
    expected, actual = one_step("micro_batch=5"), one_step(size)
    assert all(torch.allclose(expected[name], actual[name], atol=2e-5) for name in expected)


def test_recomputing_activations_does_not_change_the_weights(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer runs twice per pass, and the weights are the same."""
    runs: list[int] = []

    class Counting(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            layer = pl_module.policy.model.model.layers[0]
            runs.append(0)
            layer.self_attn.register_forward_hook(lambda *_: runs.append(runs.pop() + torch.is_grad_enabled()))

    monkeypatch.setattr(
        policy, "sharing_pays_off", lambda batch: False
    )  # a shared prompt would be one more forward pass
    overrides = ["batch.micro_batch=12", "precision=fp32"]
    without_recomputing = weights_of(fit(tiny_model_path, steps=1, callbacks=[Counting()], overrides=overrides))
    with_recomputing = weights_of(
        fit(tiny_model_path, steps=1, callbacks=[Counting()], overrides=[*overrides, "batch.recompute=true"])
    )
    assert runs == [1, 2]
    assert all(
        torch.allclose(without_recomputing[name], with_recomputing[name], atol=2e-5) for name in without_recomputing
    )


def test_offloading_does_not_change_the_weights(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are the same bit for bit. Only one hidden state per layer and pass is moved to the host."""
    recorded_shapes: list[torch.Size] = []

    def copied() -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
            recorded_shapes.append(tensor.shape)
            return tensor.detach().numpy().copy()

        return saved_tensors_hooks(pack, torch.from_numpy)

    overrides = ["batch.micro_batch=12", "precision=fp32"]
    without_offload = weights_of(fit(tiny_model_path, steps=2, overrides=[*overrides, "batch.recompute=true"]))
    assert not [record for record in caplog.records if "batch.offload" in record.message]
    for hooks in (placement.on_host, copied):
        monkeypatch.setattr(placement, "on_host", hooks)
        with_offload = weights_of(fit(tiny_model_path, steps=2, overrides=[*overrides, "batch.offload=true"]))
        assert all(torch.equal(without_offload[name], with_offload[name]) for name in without_offload)
    layers, width = 2, load_model(tiny_model_path).config.hidden_size
    assert (
        recorded_shapes
        and len(recorded_shapes) % layers == 0
        and {(len(shape), shape[-1]) for shape in recorded_shapes} == {(3, width)}
    )
    warnings = [each for each in caplog.records if "batch.offload: this run already trains on the host" in each.message]
    assert len(warnings) == 2, "once per run"


def test_activations_of_large_models_are_recomputed_by_default(tiny_model_path: str) -> None:
    batch = load_recipe("scalerl").batch
    assert batch.recompute is None and not batch.recomputes(2**28 - 1) and batch.recomputes(2**28)
    assert not load_recipe("scalerl", ["batch.recompute=false"]).batch.recomputes(2**40)
    assert load_recipe("scalerl", ["batch.offload=true"]).batch.recomputes(1)
    with pytest.raises(ConfigurationError, match=r"^batch\.offload: .*batch\.recompute is false; leave .* out$"):
        load_recipe("scalerl", ["batch.offload=true", "batch.recompute=false"])

    class Without(type(load_model(tiny_model_path))):  # type: ignore[misc]
        supports_gradient_checkpointing = False

    model = load_model(tiny_model_path)
    model.__class__ = Without
    for setting in ("recompute", "offload"):
        with pytest.raises(ConfigurationError, match=rf"^batch\.{setting}: Without has no gradient checkpointing"):
            offload_overrides = [*SMALL, f"batch.{setting}=true"]
            module = ScaleRL(model, overrides=offload_overrides, tokenizer=load_tokenizer(tiny_model_path))
            Trainer(max_steps=1, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))


def test_untrainable_models_and_tokenizers_are_refused_at_once(tiny_model_path: str) -> None:
    model, tokenizer = load_model(tiny_model_path), load_tokenizer(tiny_model_path)
    tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match=r"^tokenizer: it has no eos_token"):
        ScaleRL(model, overrides=SMALL, tokenizer=tokenizer)
    model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"^model: all its parameters are frozen"):
        ScaleRL(model, overrides=SMALL, tokenizer=load_tokenizer(tiny_model_path))
    adapted = ScaleRL(model, overrides=[*SMALL, "adapter=lora"], tokenizer=load_tokenizer(tiny_model_path))
    assert any(parameter.requires_grad for parameter in adapted.policy.parameters())


@pytest.mark.parametrize("seed", [-1, None, "a", True])
def test_a_seed_is_a_whole_number_of_0_or_more(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^seed: .* must be a whole number, 0 or more"):
        RolloutDataModule(CountingTask(), seed=seed)


def test_a_stop_text_within_the_forced_phrase_is_refused(tiny_model_path: str) -> None:
    """Otherwise graders would see a completion only up to the forced phrase."""
    overrides = [
        *SMALL,
        "length_control=interruption",
        "length_control.phrase='time#'",
        "length_control.end_of_thinking='#'",
    ]
    module = ScaleRL(
        tiny_model_path, overrides=[*overrides, "length_control.low=1", "length_control.high=2", "chat.stop=['me']"]
    )
    with pytest.raises(ConfigurationError, match=r"^chat\.stop: 'me' is part of length_control\.phrase"):
        Trainer(max_steps=1, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))


def test_choices_are_callbacks(tiny_model_path: str) -> None:
    """A callback of the Trainer sets the choice on its axis. The recipe sets the others, always the same instances."""
    dapo = DAPO(clip_low=0.2, clip_high=0.3)
    module = fit(tiny_model_path, steps=1, callbacks=[dapo])
    assert module.choices.loss is dapo
    assert type(module.choices.filter).__name__ == "ZeroVariance"
    assert module.choices.filter is module.recipe.choices.filter
    assert module.mechanism.axes == ["loss"]
    first, second = module.configure_callbacks(), module.configure_callbacks()
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_two_choices_on_one_axis_are_refused(tiny_model_path: str) -> None:
    with pytest.raises(ConfigurationError, match="loss: two choices on one axis, CISPO and DAPO"):
        fit(tiny_model_path, callbacks=[CISPO(max_ratio=4.0), DAPO(clip_low=0.2, clip_high=0.3)])


def test_a_choice_needs_our_module() -> None:
    class Other(LightningModule):
        def training_step(self, *args: Any) -> None: ...

        def configure_optimizers(self) -> None:
            return None

    trainer = Trainer(max_steps=1, callbacks=[NoFilter()], logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"NoFilter \(axis filter\) needs a ScaleRL module, got Other"):
        trainer.fit(Other(), train_dataloaders=[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"precision": "bf16-mixed"}, "leave it at 32-true"),
        ({"max_steps": -1, "max_epochs": 1}, "max_steps: -1 must be 1 or more, because the rollout stream has no end"),
        ({"max_steps": 0}, "max_steps: 0 must be 1 or more"),
    ],
)
def test_trainer_settings_that_contradict_ours_are_refused(tiny_model_path: str, options: Any, match: str) -> None:
    module = ScaleRL(tiny_model_path, overrides=SMALL)
    trainer = Trainer(**{"max_steps": 1, **options}, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=match):
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))


@pytest.mark.parametrize(
    ("overrides", "match"),
    every(
        4,
        [
            (["loss=foo"], "loss=foo: no such choice; valid: cispo, clip_cov, dapo"),
            (["loss.max_ration=4"], "valid here: _target_, max_ratio"),
            (["nonsense=1"], "valid here: .*async_mode.*loss"),
            (["loss.max_ratio=0"], r"loss\.max_ratio: 0 must be a number above 0"),
            (["async_mode.k=0"], r"async_mode\.k: 0"),
            (["precision.policy=fp8"], "valid: fp32, bf16"),
            (["optimizer.lr=-1"], r"optimizer\.lr: -1"),
            (["batch.prompts=0"], r"batch\.prompts: 0"),
            (["recipe=nothing"], "scalerl_core"),
            (["normalization.ddof=3"], r"normalization\.ddof: 3"),
        ],
    ),
)
def test_errors_of_a_bad_recipe_list_valid_values(tiny_model_path: str, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        ScaleRL(tiny_model_path, overrides=overrides)
    assert "\n" not in str(caught.value)


def test_missing_models_and_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"model\.path: .* holds no config\.json; give a folder",
    ):
        ScaleRL(str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match=r"task=nothing: no such choice; valid: .*arithmetic, .*jsonl"):
        RolloutDataModule("nothing")
    with pytest.raises(ConfigurationError, match="object has no method for a verifier"):
        RolloutDataModule(object())  # type: ignore[arg-type]


def test_tasks_with_other_forms_of_prompts_or_passes_are_refused(tiny_model_path: str) -> None:
    class Streamed(CountingTask):
        def train_prompts(self) -> Any:
            return (prompt for prompt in self.pool)

    class OneSet(CountingTask):
        def eval_sets(self) -> Any:
            return self.pool[-3:]

    class WithoutReturn(CountingTask):
        def is_correct(self, reward: float) -> bool:
            bool(reward >= 0.1)

    with pytest.raises(ConfigurationError, match=r"Streamed\.train_prompts\(\) must return a list of prompts"):
        RolloutDataModule(Streamed())
    with pytest.raises(ConfigurationError, match=r"OneSet\.eval_sets\(\) must return \{name: list of prompts\}"):
        RolloutDataModule(OneSet())
    with pytest.raises(ConfigurationError, match=r"WithoutReturn\.is_correct\(.*\) returned None; return whether"):
        fit(tiny_model_path, steps=1, task=WithoutReturn())


def test_groups_of_one_are_refused(tiny_model_path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"batch\.completions: 1"):
        fit(tiny_model_path, overrides=["batch.completions=1"])


def test_learning_rate_zero_learns_nothing(tiny_model_path: str) -> None:
    module = fit(tiny_model_path, steps=3, overrides=["optimizer.lr=0"])
    fresh = ScaleRL(tiny_model_path, overrides=SMALL)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(module).values(), weights_of(fresh).values(), strict=True))


@pytest.mark.slow
def test_the_reward_doubles_in_forty_steps(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=40, callbacks=[keep, OnPolicy()], overrides=["batch.completions=8"])
    rewards = keep.of("train/reward")
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


VARIANTS = [
    ("loss", DAPO(clip_low=0.05, clip_high=0.05)),
    ("aggregation", TokenAggregation()),
    ("aggregation", SampleAggregation()),
    ("normalization", PromptNormalization(ddof=1, eps=1e-6)),
    ("normalization", NoNormalization()),
    ("precision", Precision("bf16", True, True)),
    ("precision", Precision("bf16", False, False)),
    ("async_mode", OnPolicy()),
]


@pytest.mark.parametrize(
    ("axis", "choice"), every(4, every(2, VARIANTS, pytest.mark.full)), ids=lambda value: str(type(value).__name__)
)
def test_mechanism_counter_sees_each_variant_act(tiny_model_path: str, axis: str, choice: Any) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=6, callbacks=[choice, keep])
    assert keep.of(f"mechanism/{axis}")[-1] > 0


REVERTED = [
    ("async_mode", PPOOffPolicy(k=3)),
    ("async_mode", OnPolicy()),
    ("async_mode", Pipeline(3, "recompute")),
    ("length_control", Penalty(limit=9, buffer=8)),
    ("length_control", NoLengthControl()),
    ("truncated", KeepTruncated()),
    ("resampling", UniformResampling()),
    ("precision", Precision("bf16", False, False)),
    ("loss", GSPO(clip_low=3e-3, clip_high=5e-3)),
]


@pytest.mark.parametrize(
    ("axis", "choice"), every(3, REVERTED, pytest.mark.full), ids=lambda value: str(type(value).__name__)
)
def test_mechanism_counter_sees_each_reverted_choice_of_scalerl_act(
    tiny_model_path: str, axis: str, choice: Any
) -> None:
    keep = Keep()
    # For `resampling`: a low pass rate and a small pool, so that the recipe drops prompts in the second epoch. For the
    # other axes the pool is large.
    overrides = ["resampling.pass_rate=0.5"] if axis == "resampling" else []
    task = CountingTask(11 if axis == "resampling" else 60)
    fit(tiny_model_path, steps=8, callbacks=[choice, keep], recipe="scalerl", overrides=overrides, task=task)
    share = keep.of(f"mechanism/{axis}")[-1]
    assert 0 < share <= 1
    assert sum(key.startswith("mechanism/") for key in keep.records[-1][2]) == 1


def test_pipeline_updates_weights_during_rollouts_within_its_bound(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=12, callbacks=[keep], recipe="scalerl", overrides=["generator.slots=20"])
    assert max(keep.of("train/staleness_in_flight_max")) > 0
    assert 0 < max(keep.of("train/staleness_max")) <= 3
    hours = keep.of("compute/virtual_device_hours")
    assert hours == sorted(hours) and hours[0] > 0
    for party in ("trainer", "generator"):
        assert all(0 <= share <= 1 for share in keep.of(f"virtual/{party}_idle"))


@pytest.mark.slow
def test_virtual_time_decides_which_weights_sample(tiny_model_path: str) -> None:
    """Another cost model changes the curve of a pipeline. In a mode that drains, it changes only the clock."""
    curves = {}
    for recipe in ("scalerl", "scalerl_core"):
        for trainers in (1, 4):
            keep = Keep()
            overrides = [f"cost_model.trainer_devices={trainers}"]
            fit(tiny_model_path, steps=6, callbacks=[keep], recipe=recipe, overrides=overrides)
            curves[recipe, trainers] = keep.of("train/loss")
    assert curves["scalerl", 1] != curves["scalerl", 4]
    assert curves["scalerl_core", 1] == curves["scalerl_core", 4]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["cost_model.colocated=true", "cost_model.trainer_devices=1"], "the async mode never drains"),
        (["cost_model.colocated=true"], "the same devices are as many"),
        (["thinking.interrupt_to=8"], r"length_control\.high: 8 and a phrase of 1 tokens .*context\.max_new_tokens, 9"),
        (["thinking.phrase='12#'"], r"length_control\.high: 6 and a phrase of 3 tokens .*context\.max_new_tokens, 9"),
        (["async_mode.kv_on_update=fresh"], r"async_mode\.kv_on_update: 'fresh'; valid: stale, recompute"),
        (["resampling.pass_rate=0"], r"resampling\.pass_rate: 0"),
        (["thinking.phrase=stop"], r"length_control\.phrase: 'stop' must end with"),
        (["cost_model.decode_s=-1"], r"cost_model\.decode_s: -1"),
    ],
)
def test_contradictory_settings_are_refused(tiny_model_path: str, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(tiny_model_path, recipe="scalerl", overrides=overrides)


def test_mechanism_counter_of_a_filter(tiny_model_path: str) -> None:
    """It counts NoFilter as acting when a group without variance is trained on."""

    class Sometimes(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            return 1.0 if int(prompt.prompt_id[1:]) % 2 else super().reward(prompt, completion)

    keep = Keep()
    fit(tiny_model_path, steps=6, callbacks=[NoFilter(), keep], task=Sometimes())
    assert keep.of("mechanism/filter")[-1] > 0


@pytest.mark.parametrize("same", every(3, [PPOOffPolicy(k=3), Precision("fp32", False, False), CISPO(max_ratio=1e6)]))
def test_mechanism_counter_stays_at_zero_when_nothing_changes(tiny_model_path: str, same: Any) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=4, callbacks=[same, keep])
    shares = [v for _, _, metrics in keep.records for k, v in metrics.items() if k.startswith("mechanism/")]
    assert not any(shares)


def test_a_batch_without_variance_is_a_step_without_gradient(tiny_model_path: str) -> None:
    class Constant(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            return 1.0

    keep = Keep()
    fit(tiny_model_path, steps=3, callbacks=[keep], task=Constant())
    assert keep.of("train/groups_kept") == [0, 0, 0]
    assert keep.of("train/loss") == [0, 0, 0]


@pytest.mark.slow
def test_a_batch_without_kept_groups_does_not_move_weights(tiny_model_path: str, tmp_path: Path) -> None:
    """Neither momentum nor weight decay moves the weights, whether or not the run was resumed before that batch."""

    class NothingAtTheThird(CountingTask, Callback):
        run: Any = None
        before: Any = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.run = pl_module

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.before = weights_of(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            same = all(map(torch.equal, self.before.values(), weights_of(pl_module).values()))
            assert same == (pl_module.completed_steps == 3)

        def reward(self, prompt: Any, completion: str) -> float:
            return 0.0 if self.run.completed_steps == 2 else super().reward(prompt, completion)

    def part(run: str, steps: int, resume: bool = False) -> ScaleRL:
        task = NothingAtTheThird()
        options: dict[str, Any] = {"callbacks": [OnPolicy(), task], "task": task, "checkpoint_every": 1}
        return fit(tiny_model_path, tmp_path / run, steps, resume=resume, **options)

    whole = part("whole", 4)
    part("parts", 2)
    parts = part("parts", 4, resume=True)
    assert all(map(torch.equal, weights_of(whole).values(), weights_of(parts).values()))
    kept = [record.metrics["train/groups_kept"] for record in read_journal(tmp_path / "parts").of_kind("train")]
    assert kept[2] == 0 < min(kept[0], kept[1], kept[3]) and parts.trainer.global_step == 4


RESUMED = {
    "on_policy": ("scalerl_core", OnPolicy()),
    "ppo_off_policy": ("scalerl_core", PPOOffPolicy(k=3)),
    "pipeline_stale": ("scalerl", Pipeline(3, "stale")),
    "pipeline_recompute": ("scalerl", Pipeline(3, "recompute")),
}


def run_in_mode(model_path: str, run_dir: Path, mode: str, steps: int, resume: bool = False) -> ScaleRL:
    recipe, choice = RESUMED[mode]
    options: dict[str, Any] = {"checkpoint_every": 1, "recipe": recipe, "resume": resume}
    return fit(model_path, run_dir, steps, callbacks=[choice], **options)


@pytest.fixture(scope="module")
def whole_run(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ScaleRL]]:
    """Return a function that runs six uninterrupted steps in a mode, once for all tests."""

    @cache
    def run_once(mode: str) -> tuple[Path, ScaleRL]:
        run_dir = tmp_path_factory.mktemp("whole") / mode
        return run_dir, run_in_mode(tiny_model_path, run_dir, mode, 6)

    return run_once


@pytest.mark.parametrize("mode", every(4, every(2, reversed(RESUMED), pytest.mark.full)))
@pytest.mark.parametrize(
    "stop",
    [2, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 3, 5))],
)
def test_resume_is_exact(
    tiny_model_path: str, tmp_path: Path, whole_run: Callable[[str], tuple[Path, ScaleRL]], mode: str, stop: int
) -> None:
    """A run that stops after any step and resumes in a new module has the same journal and weights, bit for bit."""
    whole_dir, whole = whole_run(mode)
    run_in_mode(tiny_model_path, tmp_path / "parts", mode, stop)
    parts = run_in_mode(tiny_model_path, tmp_path / "parts", mode, 6, resume=True)
    one, two = read_journal(whole_dir), read_journal(tmp_path / "parts")
    steps = {0, 2, 4, 6}  # at an odd stop, the first part ends with an additional evaluation
    assert [r for r in one.deterministic() if r[0] == "train"] == [r for r in two.deterministic() if r[0] == "train"]
    assert without_cost(one, steps) == without_cost(two, steps)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole).values(), weights_of(parts).values(), strict=True))


def without_cost(view: Any, steps: set[int]) -> list[Any]:
    """Return the evaluations at `steps` without their cost, which an additional evaluation in between increases."""
    return [
        (step, {key: value for key, value in metrics.items() if not key.startswith("eval_cost/")})
        for kind, step, metrics in view.deterministic()
        if kind == "eval" and step in steps
    ]


def test_same_seed_same_curve_other_seed_other_curve(tiny_model_path: str, tmp_path: Path) -> None:
    views = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit(tiny_model_path, tmp_path / name, steps=3, seed=seed)
        views.append(read_journal(tmp_path / name).deterministic())
    assert views[0] == views[1]
    assert views[0] != views[2]


def test_a_truncated_checkpoint_is_skipped(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=3, checkpoint_every=1)
    newest, previous = checkpoints(tmp_path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:1000])
    assert newest_checkpoint(tmp_path / "checkpoints").path == previous


def test_journal_semantics_and_compute(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=4, callbacks=[DAPO(clip_low=0.2, clip_high=0.26)])
    view = read_journal(tmp_path)
    assert view.status == "finished"
    assert view.header["recipe"] == f"{SMALL_CORE}+loss=DAPO"
    assert view.header["parameters"] == sum(p.numel() for p in load_model(tiny_model_path).parameters())
    assert [record.step for record in view.of_kind("eval")] == [0, 2, 4]
    assert [record.step for record in view.of_kind("train")] == [1, 2, 3, 4]
    for axis in ("compute/flops", "compute/device_hours"):
        values = [record.metrics[axis] for record in view.of_kind("eval")]
        assert values[0] == 0 or axis.endswith("hours")
        assert values == sorted(values) and values[-1] > values[0]
    for record in view.records:
        check_hours(record.metrics)
    first = view.of_kind("eval")[0].metrics
    assert 0 <= first["eval/heldout/pass_rate"] <= 1 and first["eval/heldout/pass_rate_se"] > 0
    semantics = json.loads((tmp_path / "semantics.json").read_text())
    assert semantics["choices"]["loss"]["ratio_interval"] == [0.8, 1.26]
    assert semantics["choices"]["normalization"]["ddof"] == 1
    assert semantics["departs_from_recipe_on"] == ["async_mode", "loss"]
    assert all(math.isfinite(value) for record in view.records for value in record.metrics.values())


def test_recorded_runs_are_never_overwritten(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match="holds a finished run; choose another directory"):
        fit(tiny_model_path, tmp_path, steps=2)
    with pytest.raises(ConfigurationError, match="holds a run with seed 0, this one has 1"):
        fit(tiny_model_path, tmp_path, steps=2, seed=1)
    with pytest.raises(ConfigurationError, match=re.escape(f"holds a run with recipe {SMALL_CORE!r}, this one has")):
        fit(tiny_model_path, tmp_path, steps=2, callbacks=[OnPolicy()])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_evaluation_noise_differs_between_seeds_but_not_recipes(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds must not share evaluation noise, or their curves would bend alike. Recipes share it to pair differences."""

    def keys(seed: int, *callbacks: Callback) -> set[tuple[int, ...]]:
        random_keys: set[tuple[int, ...]] = set()
        submit = TorchGenerator.submit

        def recording_submit(generator: TorchGenerator, request: GroupRequest) -> None:
            if request.random_key[1] == EVALUATION_STREAM:
                random_keys.add(request.random_key)
            submit(generator, request)

        with monkeypatch.context() as patch:
            patch.setattr(TorchGenerator, "submit", recording_submit)
            fit(tiny_model_path, steps=1, callbacks=[Evaluate(1, 2), *callbacks], seed=seed)
        return random_keys

    first = keys(0)
    assert first and first.isdisjoint(keys(1)) and first == keys(0, DAPO())


@pytest.mark.slow
def test_evaluations_do_not_count_as_compute(tiny_model_path: str, tmp_path: Path) -> None:
    """More frequent evaluation must not move the curve."""
    flops = []
    for steps in (1, 4):
        keep = Keep()
        fit(tiny_model_path, steps=4, callbacks=[Evaluate(steps, 3), keep])
        flops.append(keep.of("compute/flops")[-1])
    assert flops[0] == flops[1]


def test_a_broken_reward_stops_the_run_after_the_journal_is_flushed(tiny_model_path: str, tmp_path: Path) -> None:
    class Breaks(CountingTask):
        calls = 0

        def reward(self, prompt: Any, completion: str) -> float:
            self.calls += 1
            return float("nan") if self.calls > 60 else super().reward(prompt, completion)

    with pytest.raises(RewardError, match="returned nan"):
        fit(tiny_model_path, tmp_path, steps=50, task=Breaks())
    view = read_journal(tmp_path)
    assert view.status == "failed" and "could not be graded" in str(view.reason) and "(prompt 'p" in str(view.reason)
    assert view.of_kind("train")


def test_flops_equal_those_that_torch_counts(tiny_model: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from lightning_scalerl.measure.flops import FlopModel

    model = FlopModel.of(tiny_model)
    length = 40
    tiny_model.set_attn_implementation("eager")  # the counter does not know the CPU's fused attention
    with FlopCounterMode(display=False) as counter:
        tiny_model(torch.ones(1, length, dtype=torch.long))
    # Torch counts attention over all pairs of tokens; our model counts only the pairs that a causal mask leaves.
    causal = model.per_context * length * (length + 1) / 2
    full = model.per_context * length * length
    assert model.decode(length, length * (length + 1) // 2) - causal + full == pytest.approx(
        counter.get_total_flops(), rel=1e-6
    )


def test_huge_vocabularies_are_scored_in_chunks(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_scalerl.model import policy as policy_module
    from lightning_scalerl.model.policy import Policy
    from tests.generator.test_torch_generator import one_row

    batch = one_row((1, 2), Rollout([3, 4, 5, 6, 7], [0.0] * 5, [0] * 5, [False] * 5, "stop"))
    policy = Policy(tiny_model, Precision("fp32", True, True))
    whole, _ = policy(batch)
    whole.sum().backward()
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 2 * 16)
    parts, _ = policy(batch)
    parts.sum().backward()
    assert torch.allclose(whole, parts, atol=1e-6)
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(expected, policy.parameters(), strict=True))
