"""Tests of updates in tiny runs: choices train and resume bit for bit; non-finite updates, health, schedules."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_scalerl import ConfigurationError, RolloutDataModule, ScaleRL, composition
from lightning_scalerl.axes.advantage import GAE
from lightning_scalerl.axes.async_mode import OnPolicy, PPOOffPolicy
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.kl import FixedKL
from lightning_scalerl.axes.loss import CISPO
from lightning_scalerl.axes.normalization import BatchNormalization, PromptNormalization, RunningNormalization
from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, checkpoints, newest_checkpoint
from lightning_scalerl.checks import CannotGoOnError
from lightning_scalerl.composition import compose, load_recipe
from lightning_scalerl.measure.semantics import resolved_choices
from lightning_scalerl.optim import ConstantSchedule, CosineSchedule, SqrtBatchSchedule
from lightning_scalerl.task.base import RewardScale
from lightning_scalerl.update import loss_scale as loss_scale_module
from lightning_scalerl.update.health import Health, HealthWatch, UnhealthyError
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from sweeps.run.journal import read_journal
from tests.examples import every, examples
from tests.helpers import SMALL, CountingTask, fit, quiet
from tests.test_module import Keep, weights_of


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache composed configurations: Hydra takes longer than a tiny run."""
    monkeypatch.setattr(composition, "compose", _composed)


@cache
def _composed_once(overrides: tuple[str, ...]) -> Any:
    return compose(overrides)


def _composed(overrides: Sequence[str], folders: Sequence[str] = ()) -> Any:
    assert not folders
    return deepcopy(_composed_once(tuple(overrides)))


WITH_CRITIC = ("advantage=gae", "critic=value_network", "filter=none")


def all_weights(module: ScaleRL) -> dict[str, Tensor]:
    """Return copies of the weights of policy and critic."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_weights(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Staged(CountingTask, Callback):
    """A task whose rewards can depend on the step. It is also a callback, to read the step from the module."""

    run: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.run = pl_module

    @property
    def step(self) -> int:
        return int(self.run.completed_steps)


class Sometimes(CountingTask):
    """A task whose every third prompt always has reward 1, so its group has no variance."""

    def reward(self, prompt: Any, completion: str) -> float:
        return 1.0 if int(prompt.prompt_id[1:]) % 3 == 0 else super().reward(prompt, completion)


# --- choices train -------------------------------------------------------------------------------------------

# Overrides, and the terms of the loss besides the policy's.
TRAINED: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "gae, one rollout a prompt": (
        (*WITH_CRITIC, "batch.completions=1", "normalization.centre=true", "critic.lr=1e-2"),
        {"value"},
    ),
    "gae, running": ((*WITH_CRITIC, "normalization=running", "critic.aggregation=token"), {"value"}),
    "kl": (("kl=by_difficulty", "kl.aggregation=constant"), {"kl"}),
    "kl in the reward": ((*WITH_CRITIC, "kl=by_difficulty", "kl.where=reward", "kl.easy=0.5"), {"value"}),
    "entropy": (("entropy=by_difficulty", "loss=reinforce", "aggregation=constant"), {"entropy"}),
    "fixed entropy": (("entropy=fixed", "entropy.aggregation=sum", "aggregation=sum"), {"entropy"}),
    "proximal": (("correction=proximal", "correction.level=sequence", "correction.mode=mask", "loss=ppo"), set()),
    "lengths": (("curriculum=staged_length", "curriculum.steps=1", "normalization=batch_reward_std"), set()),
    "easy first": (("curriculum=exponential", "curriculum.over_steps=3"), set()),
    "sapo, maxrl": (("loss=sapo", "normalization=maxrl", "aggregation=sample"), set()),
    "gmpo": (("loss=gmpo", "aggregation=sample"), set()),
    "dppo": (("loss=dppo", "loss.divergence=kl", "loss.max_divergence_low=0.05"), set()),
    "kl_cov": (("loss=kl_cov", "loss.share=0.1", "epochs.count=2"), set()),
    "rounded": (
        (*WITH_CRITIC, "kl=fixed", "precision=bf16", "precision.fp32_value=false", "precision.fp32_kl=false"),
        {"value", "kl"},
    ),
}


class BeforeTheStep(Callback):
    """Records the norm of the gradient that the optimizer receives."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [each.grad for each in pl_module.policy.parameters() if each.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))))


@pytest.mark.parametrize("clip_norm", ["null", "0.01"])
def test_a_gradient_is_measured_whether_or_not_it_is_clipped(tiny_model_path: str, clip_norm: str) -> None:
    keep, before = Keep(), BeforeTheStep()
    fit(tiny_model_path, steps=2, callbacks=[keep, before], overrides=[f"optimizer.clip_norm={clip_norm}"])
    measured = keep.of("train/gradient_norm")
    assert min(measured) > 0.01
    clipped = clip_norm != "null"
    assert before.norms == pytest.approx([0.01, 0.01] if clipped else measured, rel=1e-3)
    assert keep.of("train/gradient_clipped") == [float(clipped)] * 2


def test_no_clipping_is_reported_and_invalid_clips_are_refused() -> None:
    recipe = load_recipe("scalerl_core", ["optimizer.clip_norm=null"])
    assert resolved_choices(recipe, recipe.choices)["optimizer"]["clip"] == "none"
    assert resolved_choices(load_recipe("scalerl_core"), recipe.choices)["optimizer"]["clip"] == "global norm"
    for bad, remedy in (
        ("inf", " above 0, or null for no clipping"),
        ("0", " above 0"),
        ("-1", " above 0"),
        ("no", ""),
    ):
        with pytest.raises(ConfigurationError, match=rf"optimizer\.clip_norm: .* must be a number{remedy}"):
            load_recipe("scalerl_core", [f"optimizer.clip_norm={bad}"])


@pytest.mark.parametrize(("overrides", "others"), every(4, every(2, TRAINED.values(), pytest.mark.full)), ids=TRAINED)
def test_choices_train_with_all_terms_of_the_loss(
    tiny_model_path: str, overrides: tuple[str, ...], others: set[str]
) -> None:
    """All metrics are finite, and every term of the loss is recorded and not 0."""
    keep = Keep()
    module = fit(tiny_model_path, steps=3, callbacks=[keep], overrides=overrides)
    assert len(keep.records) == 3
    assert all(math.isfinite(value) for _, _, metrics in keep.records for value in metrics.values())
    assert not any(keep.of("train/skipped_updates")) and all(keep.of("train/gradient_norm"))
    metrics = keep.records[-1][2]
    parts = {name: metrics[f"train/loss_{name}"] for name in ("policy", *others) if others}
    assert metrics["train/loss"] == pytest.approx(sum(parts.values())) or not others
    assert all(parts.values()) and len([name for name in metrics if name.startswith("train/loss_")]) == len(parts)
    if module.critic is not None:
        assert metrics["train/value_gradient_norm"] > 0 and module.critic.head.weight.abs().max() > 0
        assert keep.of("train/explained_variance")[0] == 0, "the first values are all zero"
    if module.choices.kl.where:
        assert keep.of("train/kl")[0] < 1e-6 < metrics["train/kl"]


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_its_passes(tiny_model_path: str) -> None:
    """FLOPs of a step follow from its forward and backward passes. The first batch of all runs is the same."""

    def flops(*overrides: str) -> float:
        keep = Keep()
        fit(tiny_model_path, steps=1, callbacks=[keep], overrides=["filter=none", *overrides])
        return keep.of("compute/flops_train")[0]

    one = flops()
    assert flops("epochs.count=3", "kl=fixed", "correction=proximal") == pytest.approx((3 + 2 / 3) * one)
    assert one < flops("advantage=gae", "critic=value_network") < 7 / 3 * one, "a critic has no vocabulary"


@pytest.mark.slow
def test_an_entropy_bonus_raises_entropy(tiny_model_path: str) -> None:
    """Compared with the same run without the bonus."""
    entropy = {}
    for coefficient in (0.0, 3.0):
        keep = Keep()
        overrides = ["entropy=fixed", f"entropy.coefficient={coefficient}"]
        fit(tiny_model_path, steps=3, callbacks=[OnPolicy(), keep], overrides=overrides)
        entropy[coefficient] = keep.of("train/entropy")
    assert entropy[0.0][0] == entropy[3.0][0] and entropy[0.0][-1] < entropy[3.0][-1]


@pytest.mark.slow
def test_completions_are_limited_by_the_stage(tiny_model_path: str) -> None:
    """Limits are 3, 5 and 9 tokens, one step each. On-policy, so that no batch has rollouts of an earlier stage."""
    keep = Keep()
    overrides = ["curriculum=staged_length", "curriculum.steps=1", "curriculum.shares=[0.25,0.5,1]"]
    fit(tiny_model_path, steps=4, callbacks=[OnPolicy(), keep], overrides=overrides)
    lengths = keep.of("train/completion_tokens")
    assert lengths[0] <= 3 and 3 < lengths[1] <= 5 and 5 < lengths[2] <= 9 and 5 < lengths[3] <= 9


@pytest.mark.slow
def test_the_reward_scale_does_not_matter_under_normalization(tiny_model_path: str) -> None:
    weights, rewards = [], []
    for reward in ("zero_one", "plus_minus_one"):
        keep = Keep()
        overrides = [f"reward={reward}", "optimizer.eps=1e-4"]
        module = fit(tiny_model_path, steps=2, callbacks=[keep], overrides=overrides)
        weights.append(weights_of(module))
        rewards.append(keep.of("train/reward"))
        assert keep.of("train/pass_rate")[0] > 0
    assert rewards[1] == pytest.approx([2 * reward - 1 for reward in rewards[0]])
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])


def test_reward_scales() -> None:
    paper = RewardScale(correct=1.0, incorrect=-1.0)
    assert [paper.scale(reward) for reward in (0.0, 0.25, 1.0)] == [-1.0, -0.5, 1.0]
    assert RewardScale().scale(0.1) == 0.1
    bad: Any
    for bad in ({"correct": float("nan")}, {"incorrect": True}, {"correct": "1"}, {"incorrect": 1.0}):
        with pytest.raises(ConfigurationError, match=r"reward\."):
            RewardScale(**bad)


# --- stopping and resuming -----------------------------------------------------------------------------------

RESUMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "gae": ("scalerl_core", WITH_CRITIC),
    "running": ("scalerl_core", ("normalization=running", "normalization.centre=true")),
    "running, gae": ("scalerl", (*WITH_CRITIC, "normalization=running", "precision=fp32")),
    "dynamic_sampling": ("scalerl_core", ("filter=dynamic_sampling",)),
    "curriculum": (
        "scalerl",
        ("curriculum=linear", "curriculum.start=0.3", "curriculum.over_steps=6", "precision=fp32"),
    ),
    "by_difficulty": ("scalerl", ("allocation=by_difficulty", "resampling=uniform", "precision=fp32")),
    "epochs": ("scalerl_core", ("epochs.count=2",)),
    "fp16": ("scalerl_core", ("precision=fp16",)),
    "kl": ("scalerl_core", ("kl=fixed", "kl.coefficient=0.5")),
    "proximal": ("scalerl", ("correction=proximal", "precision=fp32")),
    "clip_cov": (
        "scalerl",
        ("loss=clip_cov", "loss.share=0.1", "loss.low=1e-3", "precision=fp32", "async_mode=pipeline"),
    ),
    "kl_cov": ("scalerl_core", ("loss=kl_cov", "loss.share=0.1", "epochs.count=2")),
    "together": (
        "scalerl",
        (
            "advantage=gae",
            "critic=value_network",
            "kl=by_difficulty",
            "entropy=by_difficulty",
            "epochs.count=2",
            "loss=ppo",
            "correction=proximal",
            "normalization=running",
            "filter=dynamic_sampling",
            "allocation=by_difficulty",
            "curriculum=exponential",
            "curriculum.over_steps=6",
            "schedule=cosine",
            "schedule.total_steps=6",
            "precision=fp16",
            "truncated=keep",
        ),
    ),
}


SELECTING = {
    "clip_cov": ("loss=clip_cov", "loss.low=1e-3", "loss.share=0.1"),
    # With this correction the ratio is exactly 1 in the first pass. Near 1, rounding decides the gradient's sign.
    "kl_cov": ("loss=kl_cov", "loss.share=0.1", "correction=proximal"),
}


@pytest.mark.parametrize("name", SELECTING)
def test_selected_tokens_do_not_depend_on_micro_batches(tiny_model_path: str, name: str) -> None:
    """Each batch has two passes, because the penalty of kl_cov has no gradient in the first."""
    runs = {}
    for size in (1, 3, 100, 0):  # 0 stands for 100, with the selection switched off
        keep = Keep()
        overrides = [*SELECTING[name], f"batch.micro_batch={size or 100}", "epochs.count=2", "precision=fp32"]
        overrides += [] if size else ["loss.coefficient=0" if name == "kl_cov" else "loss.low=4.9"]
        module = fit(tiny_model_path, steps=2, callbacks=[keep], overrides=overrides)
        runs[size] = weights_of(module), keep.of("train/clip_fraction"), keep.of("train/loss")
    for size in (1, 3):
        assert all(torch.allclose(runs[size][0][each], runs[100][0][each], atol=1e-5) for each in runs[100][0])
        assert runs[size][1] == pytest.approx(runs[100][1]) and runs[size][2] == pytest.approx(runs[100][2], rel=1e-4)
    assert not any(torch.allclose(runs[0][0][each], runs[100][0][each], atol=1e-5) for each in runs[100][0])
    assert min(runs[100][1]) > 0.01 or name == "kl_cov"


def test_the_mechanism_counter_applies_the_recipes_selection(tiny_model_path: str) -> None:
    keep = Keep()
    fit(tiny_model_path, steps=2, callbacks=[CISPO(5.0), keep], overrides=SELECTING["clip_cov"])
    assert keep.of("mechanism/loss")[-1] == 1.0, "tokens that the recipe's clip_cov excludes have a gradient with CISPO"


def effective_updates(keep: Keep) -> list[bool]:
    """Return for each step whether it made a finite update with a loss other than 0."""
    return [bool(metrics.get("train/loss")) for kind, _, metrics in keep.records if kind == "train"]


# Initial loss scale, so large that FP16 overflows at first and the scale is lowered during the run.
FIRST_LOSS_SCALE = 2.0**19
# Conditions on the uninterrupted run, without which losing the state would not show.
CONDITIONS: dict[str, Callable[[Keep], bool]] = {
    "dynamic_sampling": lambda keep: max(keep.of("train/groups_dropped")[:3]) > 0,
    "fp16": lambda keep: keep.of("train/loss_scale")[2] < FIRST_LOSS_SCALE and sum(effective_updates(keep)[3:]) > 1,
    "kl": lambda keep: keep.of("train/kl")[-1] > 1e-4,
    "clip_cov": lambda keep: max(keep.of("train/clip_fraction")[3:]) > 0.01,
    "proximal": lambda keep: max(keep.of("train/staleness_max")) > 0,
    "together": lambda keep: (
        max(keep.of("train/groups_dropped")[:3]) > 0
        and keep.of("train/loss_scale")[2] < FIRST_LOSS_SCALE
        and effective_updates(keep)[3:] == [True] * 3
        and keep.of("train/kl")[-1] > 1e-4
    ),
}


FULL = pytest.mark.full
# Each of these is also part of "together".
IN_TOGETHER = (
    "gae",
    "running",
    "running, gae",
    "dynamic_sampling",
    "curriculum",
    "by_difficulty",
    "epochs",
    "fp16",
    "kl",
    "proximal",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=FULL if n in IN_TOGETHER else pytest.mark.slow) for n in RESUMED]
)
def test_resume_is_exact(tiny_model_path: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops after three steps and resumes in a new module has the same journal and weights, bit for bit."""
    monkeypatch.setattr(loss_scale_module, "INITIAL_SCALE", FIRST_LOSS_SCALE)
    recipe, overrides = RESUMED[name]
    keep = Keep()

    def run(place: str, steps: int, resume: bool = False) -> ScaleRL:
        options: dict[str, Any] = {"recipe": recipe, "overrides": overrides, "resume": resume, "checkpoint_every": 3}
        callbacks = [keep] if place == "whole" else []
        return fit(tiny_model_path, tmp_path / place, steps, callbacks=callbacks, task=Sometimes(), **options)

    whole = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6, resume=True)
    one, two = (
        [record for record in read_journal(tmp_path / place).deterministic() if record[0] == "train"]
        for place in ("whole", "parts")
    )
    assert [step for _, step, _ in two] == [1, 2, 3, 4, 5, 6]
    assert one == two
    assert same_weights(all_weights(whole), all_weights(parts))
    assert name not in CONDITIONS or CONDITIONS[name](keep)


@pytest.mark.slow
def test_mechanism_counters_keep_the_recipes_statistics_on_resume(tiny_model_path: str, tmp_path: Path) -> None:
    """The mechanism counter keeps the recipe's running statistics, which the run does not use, in the checkpoint."""
    journals = []
    for place, stops in (("whole", [4]), ("parts", [2, 4])):
        for stop in stops:
            options: dict[str, Any] = {"overrides": ["normalization=running"], "resume": stop != stops[0]}
            fit(tiny_model_path, tmp_path / place, stop, callbacks=[BatchNormalization()], **options)
        journals.append([r for r in read_journal(tmp_path / place).deterministic() if r[0] == "train"])
    assert journals[0][-1][2]["mechanism/normalization"] > 0
    assert journals[0] == journals[1]


def curve_of(keep: Keep) -> list[dict[str, float]]:
    clock = ("compute/", "time/", "virtual/")
    return [
        {key: value for key, value in metrics.items() if not key.startswith(clock)}
        for kind, _, metrics in keep.records
        if kind == "train"
    ]


def fit_again(module: ScaleRL, steps: int, **options: Any) -> list[dict[str, float]]:
    """Fit a module once more and return the new curve."""
    keep = Keep()
    trainer = Trainer(max_steps=steps, callbacks=[keep], **quiet())
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), weights_only=True, **options)
    return curve_of(keep)


@pytest.mark.slow
def test_the_same_module_can_be_fitted_again(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second fit continues from the module's state, or from a checkpoint, like a run that never stopped.

    The module must keep or restore critic, reference, running statistics and the loss scale.
    """
    monkeypatch.setattr(loss_scale_module, "INITIAL_SCALE", FIRST_LOSS_SCALE)
    overrides, keep = [*WITH_CRITIC, "kl=fixed", "normalization=running", "precision=fp16", "epochs.count=2"], Keep()
    fit(tiny_model_path, steps=4, callbacks=[keep], overrides=overrides)
    expected = curve_of(keep)
    assert keep.of("train/loss_scale")[0] < FIRST_LOSS_SCALE and effective_updates(keep)[1:] == [True] * 3
    module = fit(tiny_model_path, tmp_path, steps=2, overrides=overrides, checkpoint_every=1)
    assert fit_again(module, 4) == expected[2:]
    (first,) = [path for path in checkpoints(tmp_path / "checkpoints") if path.stem == "step-00000001"]
    assert fit_again(module, 4, ckpt_path=first) == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (*WITH_CRITIC, "normalization=running", "precision=fp16"),
        ("kl=fixed",),
    ],
    ids=["memory", "kl"],
)
def test_a_module_loaded_from_a_checkpoint_resumes_its_run(
    tiny_model_path: str, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """load_from_checkpoint(path), then fit(ckpt_path=path) resumes the run. It does not start a new one."""
    keep = Keep()
    fit(tiny_model_path, steps=4, callbacks=[keep], overrides=overrides)
    fit(tiny_model_path, tmp_path, steps=2, overrides=overrides)
    path = newest_checkpoint(tmp_path / "checkpoints").path
    assert path is not None
    loaded = ScaleRL.load_from_checkpoint(path, weights_only=True)
    assert fit_again(loaded, 4, ckpt_path=path) == curve_of(keep)[2:]


class Fails(Callback):
    """Raises an error after a given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.completed_steps == self.step:
            raise RuntimeError("a disk, a driver, a bug")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(*WITH_CRITIC, "normalization=running"), ("kl=fixed",)], ids=["memory", "kl"])
def test_a_module_that_failed_resumes_from_its_checkpoint(
    tiny_model_path: str, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Steps after the checkpoint are discarded, and the KL reference is still the initial model."""
    keep = Keep()
    fit(tiny_model_path, steps=5, callbacks=[keep], overrides=overrides)
    module = ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, *overrides])
    callbacks = [Fails(3), ResumableCheckpoint(tmp_path, 2)]
    trainer = Trainer(max_steps=5, callbacks=callbacks, **{**quiet(), "enable_checkpointing": True})
    with pytest.raises(RuntimeError, match="a disk"):
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    assert fit_again(module, 5, ckpt_path=tmp_path / "step-00000002.ckpt") == curve_of(keep)[2:]


@pytest.mark.slow
def test_a_run_started_from_a_checkpoints_weights_resumes(tiny_model_path: str, tmp_path: Path) -> None:
    """The KL reference is the weights this run started with: not its last weights, and not the original model."""
    fit(tiny_model_path, tmp_path / "first", steps=2, overrides=["kl=fixed"])
    path = newest_checkpoint(tmp_path / "first" / "checkpoints").path
    assert path is not None
    expected = fit_again(ScaleRL.load_from_checkpoint(path, weights_only=True), 4)
    loaded = ScaleRL.load_from_checkpoint(path, weights_only=True)
    trainer = Trainer(
        max_steps=2,
        callbacks=[ResumableCheckpoint(tmp_path / "second", 2)],
        **{**quiet(), "enable_checkpointing": True},
    )
    trainer.fit(loaded, datamodule=RolloutDataModule(CountingTask()))
    newest = newest_checkpoint(tmp_path / "second").path
    assert newest is not None
    assert fit_again(loaded, 4, ckpt_path=newest) == expected[2:]
    another_module = ScaleRL.load_from_checkpoint(path, weights_only=True)
    assert fit_again(another_module, 4, ckpt_path=newest) == expected[2:], (
        "another process can resume from the same initial weights"
    )
    with pytest.raises(ConfigurationError, match=r"kl: the reference .* made with other weights"):
        fit_again(ScaleRL.load_from_checkpoint(newest, weights_only=True), 4, ckpt_path=newest)


NEW_RUNS: dict[str, tuple[str, ...]] = {"gae": WITH_CRITIC, "kl": ("kl=fixed",), "running": ("normalization=running",)}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", every(3, map(pytest.param, NEW_RUNS.values()), pytest.mark.full), ids=NEW_RUNS)
def test_a_checkpoints_weights_alone_start_a_new_run(
    tiny_model_path: str, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """`Trainer.validate` loads only a checkpoint's weights. A later fit starts a new run, like a new module."""
    module = fit(tiny_model_path, tmp_path, steps=2, overrides=overrides)
    path = newest_checkpoint(tmp_path / "checkpoints").path
    assert path is not None
    fresh = ScaleRL.load_from_checkpoint(path, weights_only=True)
    data = RolloutDataModule(CountingTask())
    Trainer(**quiet()).validate(module, datamodule=data, ckpt_path=path, verbose=False, weights_only=True)
    assert fit_again(module, 2) == fit_again(fresh, 2)


def test_a_choice_reused_in_another_run_has_no_memory_of_the_first(tiny_model_path: str) -> None:
    choice, curves = RunningNormalization(), []
    for _ in range(2):
        keep = Keep()
        fit(tiny_model_path, steps=2, callbacks=[choice, keep])
        curves.append(curve_of(keep))
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_a_critic_is_in_the_checkpoint_but_not_needed_to_load_it(tiny_model_path: str, tmp_path: Path) -> None:
    """Evaluating a checkpoint, or starting a new run from it, loads only the policy's weights."""
    overrides = [*WITH_CRITIC, "optimizer.lr=1e-2"]
    module = fit(tiny_model_path, tmp_path, steps=4, overrides=overrides)
    path = newest_checkpoint(tmp_path / "checkpoints").path
    assert path is not None
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in saved} == {"policy", "critic"}, "and no reference"
    assert saved["critic.head.weight"].any()
    assert same_weights(saved, all_weights(module))
    groups = module.optimizers().param_groups  # type: ignore[union-attr]
    assert [len(group["params"]) for group in groups] == [21, 22]
    # Lightning's metrics are in single precision, the journal's in double precision.
    recorded = read_journal(tmp_path).of_kind("eval")[-1].metrics["eval/heldout/pass_rate"]
    expected = pytest.approx(recorded, rel=1e-6)
    evaluation = next(each for each in module.trainer.callbacks if type(each).__name__ == "Evaluate")  # type: ignore[attr-defined]
    data = RolloutDataModule(CountingTask())

    def validated(module: ScaleRL, **options: Any) -> float:
        trainer = Trainer(callbacks=[type(evaluation)(2, 2)], **quiet())
        (validation_metrics,) = trainer.validate(module, datamodule=data, verbose=False, **options)
        return float(validation_metrics["eval/heldout/pass_rate"])

    loaded = ScaleRL.load_from_checkpoint(path, weights_only=True)
    assert loaded.critic is None
    assert same_weights(weights_of(loaded), weights_of(module))
    assert validated(loaded) == validated(module) == expected
    fresh = ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, *overrides])
    assert validated(fresh, ckpt_path=path, weights_only=True) == expected
    assert same_weights(weights_of(fresh), weights_of(module))
    # A run started with these weights builds its own critic from them.
    fit_again(loaded, 1)
    assert {name.split(".")[0] for name in loaded.state_dict()} == {"policy", "critic"}
    assert loaded.completed_steps == 1


@pytest.mark.slow
def test_a_critic_has_its_own_learning_rate_under_the_same_schedule(tiny_model_path: str) -> None:
    def rates(*overrides: str) -> list[float]:
        critic_overrides = [*WITH_CRITIC, "schedule.warmup_steps=3", *overrides]
        module = fit(tiny_model_path, steps=2, overrides=critic_overrides)
        return [group["lr"] for group in module.optimizers().param_groups]  # type: ignore[union-attr]

    assert rates() == pytest.approx([0.5 * 3e-3, 0.5 * 3e-3])
    assert rates("critic.lr=0.02") == pytest.approx([0.5 * 3e-3, 0.5 * 0.02])


# --- updates that are not finite -----------------------------------------------------------------------------


class Breaks(CISPO):
    """A loss that is not finite on the given passes, counted from 0 over the whole run.

    `value` is the factor on the loss, "nan" or "inf"; "gradient" makes only the gradient non-finite.
    """

    def __init__(self, passes: Sequence[int] = (), value: str = "nan") -> None:
        super().__init__(5.0)
        self.passes = list(passes)
        self.value = value
        self.pass_number = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        backward = pl_module._backward

        def counted(*arguments: Any) -> Any:
            self.pass_number += 1
            return backward(*arguments)

        pl_module._backward = counted

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        loss = super().per_token(trainer_logprobs, anchor_logprobs, advantages, mask)
        if self.pass_number not in self.passes:
            return loss
        if self.value == "gradient":
            return loss + (trainer_logprobs - trainer_logprobs.detach()).sqrt()
        return loss * float(self.value)


class Weights(Callback):
    """Records all weights and the optimizer's state before the first step and after each step."""

    def __init__(self) -> None:
        self.stopping_step: list[dict[str, Tensor]] = []
        self.memory: list[list[Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.stopping_step.append(all_weights(pl_module))
        self.memory.append([])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.stopping_step.append(all_weights(pl_module))
        state = pl_module.optimizers().state
        self.memory.append([value.clone() for parameter_state in state.values() for value in parameter_state.values()])

    def unchanged(self) -> list[bool]:
        """Return for each step whether no weight changed."""
        pairs = zip(self.stopping_step, self.stopping_step[1:], strict=False)
        return [same_weights(before, after) for before, after in pairs]


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the `train` lines of a journal. Check that no number in any line is NaN or infinite."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"the journal holds {constant}")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    journal_lines = [json.loads(line, parse_constant=refuse) for line in lines]
    assert not any("not_finite" in line for line in journal_lines)
    return [line for line in journal_lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("value", "overrides"), every(3, [("inf", WITH_CRITIC), ("nan", ()), ("gradient", WITH_CRITIC)])
)
def test_an_update_that_is_not_finite_is_skipped(
    tiny_model_path: str, tmp_path: Path, value: str, overrides: tuple[str, ...]
) -> None:
    """No weight and no momentum changes, the skipped update is counted, and the run continues."""
    weights = Weights()
    fit(tiny_model_path, tmp_path, steps=4, callbacks=[Breaks([1], value), weights], overrides=overrides)
    lines = train_lines(tmp_path)
    assert [line["metrics"]["train/skipped_updates"] for line in lines] == [0, 1, 1, 1]
    assert ["train/loss" in line["metrics"] for line in lines] == [True, False, True, True]
    assert ["train/gradient_norm" in line["metrics"] for line in lines] == [True, False, True, True]
    assert weights.unchanged() == [False, True, False, False]
    assert all(map(torch.equal, weights.memory[1], weights.memory[2])) and weights.memory[1]
    assert not all(map(torch.equal, weights.memory[2], weights.memory[3]))
    assert read_journal(tmp_path).status == "finished"


def test_one_pass_of_several_can_be_skipped(tiny_model_path: str, tmp_path: Path) -> None:
    """The other pass of the step is applied, and its numbers are recorded. Passes 0 and 3 of two per step fail."""
    weights = Weights()
    callbacks = [Breaks([0, 3]), weights]
    fit(tiny_model_path, tmp_path, steps=3, callbacks=callbacks, overrides=["epochs.count=2"])
    metrics = [line["metrics"] for line in train_lines(tmp_path)]
    assert [each["train/skipped_updates"] for each in metrics] == [1, 2, 2]
    assert all(each["train/gradient_norm"] > 0 and "train/loss" in each for each in metrics)
    assert weights.unchanged() == [False] * 3


@pytest.mark.slow
def test_three_skipped_updates_in_a_row_end_the_run(tiny_model_path: str, tmp_path: Path) -> None:
    weights = Weights()
    with pytest.raises(CannotGoOnError, match=r"of 3 updates in a row was not finite.*Lower optimizer\.lr") as caught:
        fit(tiny_model_path, tmp_path, steps=9, callbacks=[Breaks([1, 3, 4, 6, 7, 8]), weights])
    assert "\n" not in str(caught.value) and "the last after step 8" in str(caught.value)
    view = read_journal(tmp_path)
    assert view.status == "failed" and str(view.reason).startswith("CannotGoOnError: train: loss or gradient of 3")
    counts = [line["metrics"]["train/skipped_updates"] for line in train_lines(tmp_path)]
    assert counts == [0, 1, 1, 2, 3, 3, 4, 5], "the third one ends the run before its step is recorded"
    assert weights.unchanged() == [False, True, False, True, True, False, True, True]


@pytest.mark.slow
def test_skipped_updates_in_a_row_are_counted_across_a_resume(tiny_model_path: str, tmp_path: Path) -> None:
    """Two skipped updates before the stop and one after it are three in a row."""
    fit(tiny_model_path, tmp_path, steps=3, callbacks=[Breaks([1, 2, 3])])
    again = Breaks([1, 2, 3])
    again.pass_number = 2
    with pytest.raises(CannotGoOnError, match="of 3 updates in a row was not finite, the last after step 3"):
        fit(tiny_model_path, tmp_path, steps=6, callbacks=[again], resume=True)


EMPTIED: dict[str, tuple[str, ...]] = {
    "group": ("kl=fixed", "entropy=fixed", "epochs.count=2", "normalization=running"),
    "gae": ("advantage=gae", "critic=value_network", "kl=fixed", "kl.where=reward", "normalization=running"),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", every(3, map(pytest.param, EMPTIED.values())), ids=EMPTIED)
def test_empty_batches_in_a_row_change_nothing(
    tiny_model_path: str, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """No weight changes, and no update counts as skipped: the loss of an empty batch is 0, which is finite."""

    class Between(Staged):
        def reward(self, prompt: Any, completion: str) -> float:
            return 1.0 if self.step in (1, 2, 3) else super().reward(prompt, completion)

    task, weights = Between(), Weights()
    fit(tiny_model_path, tmp_path, 6, callbacks=[OnPolicy(), task, weights], task=task, overrides=overrides)
    assert weights.unchanged() == [False, True, True, True, False, False]
    metrics = [line["metrics"] for line in train_lines(tmp_path)]
    assert [each["train/groups_kept"] > 0 for each in metrics] == [True, False, False, False, True, True]
    assert not any(each["train/skipped_updates"] for each in metrics)
    assert [each["train/loss"] for each in metrics[1:4]] == [0, 0, 0]


class Overflows(Callback):
    """Makes log-probabilities NaN in the trainer's forward pass of one step, as an FP16 overflow would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        backward, score = pl_module._backward, pl_module.policy._score

        def overflowing(*arguments: Any) -> Any:
            logprobs, entropies = score(*arguments)
            return logprobs * math.nan, entropies * math.nan

        def disturbed(*arguments: Any) -> Any:
            pl_module.policy._score = overflowing if pl_module.completed_steps == self.step else score
            try:
                return backward(*arguments)
            finally:
                pl_module.policy._score = score

        pl_module._backward = disturbed


@pytest.mark.slow
@pytest.mark.parametrize("mode", [OnPolicy, lambda: PPOOffPolicy(3)], ids=["fresh", "stale"])
def test_a_forward_pass_that_is_not_finite_is_skipped(
    tiny_model_path: str, tmp_path: Path, mode: Callable[[], DesignChoice]
) -> None:
    """NaN log-probabilities are blamed on the update, not on the generator, and are not recorded."""
    weights = Weights()
    fit(tiny_model_path, tmp_path, steps=3, callbacks=[mode(), Overflows(1), weights])
    assert [line["metrics"]["train/skipped_updates"] for line in train_lines(tmp_path)] == [0, 1, 1]
    assert weights.unchanged() == [False, True, False]


# --- FP16 ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fp16_lowers_its_loss_scale_and_trains(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial loss scale is far too large. Every overflow halves it and skips the update, any number in a row."""
    monkeypatch.setattr(loss_scale_module, "INITIAL_SCALE", 2.0**32)
    weights = Weights()
    overrides = ["precision=fp16", "epochs.count=6"]
    fit(tiny_model_path, tmp_path, steps=4, callbacks=[weights], overrides=overrides)
    metrics = [line["metrics"] for line in train_lines(tmp_path)]
    skipped = [each["train/skipped_updates"] for each in metrics]
    assert skipped[0] == 6 < skipped[-1] < 24
    assert [each["train/loss_scale"] for each in metrics] == [2.0 ** (32 - count) for count in skipped]
    assert skipped[-1] == skipped[-2], "the scale has settled"
    assert weights.unchanged()[0] and not weights.unchanged()[-1]


@pytest.mark.slow
def test_the_fp16_loss_scale_does_not_change_results(tiny_model_path: str) -> None:
    """Loss and gradient do not depend on the loss scale, and are close to FP32's."""
    curves = {}
    for start in (2.0**6, 2.0**12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_scale_module, "INITIAL_SCALE", start)
            keep = Keep()
            fit(tiny_model_path, steps=1, callbacks=[keep], overrides=["precision=fp16"])
            curves[start] = (keep.of("train/loss")[0], keep.of("train/gradient_norm")[0])
    keep = Keep()
    fit(tiny_model_path, steps=1, callbacks=[keep])
    exact = (keep.of("train/loss")[0], keep.of("train/gradient_norm")[0])
    assert curves[2.0**6] == pytest.approx(curves[2.0**12], rel=1e-3)
    assert curves[2.0**6] == pytest.approx(exact, rel=0.05)


@settings(max_examples=examples(100))
@given(finite=st.lists(st.booleans(), max_size=40))
def test_the_loss_scale_follows_torchs_grad_scaler(finite: list[bool]) -> None:
    """torch.amp.GradScaler is the reference, with a growth interval of three so that growth occurs."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=loss_scale_module.INITIAL_SCALE, growth_interval=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale_module, "GROWTH_INTERVAL", 3)
        ours = LossScale(acts=True)
        for number, is_finite in enumerate(finite):
            optimizer.zero_grad()
            theirs.scale(parameter.sum() * (1.0 if is_finite else math.inf)).backward()  # type: ignore[no-untyped-call]
            theirs.step(optimizer)
            theirs.update()
            ours.update(is_finite)
            assert ours.factor == theirs.get_scale()
            if number % 5 == 4:  # the run stops and resumes
                again = LossScale(acts=True)
                again.load_state_dict(pickle.loads(pickle.dumps(ours.state_dict())))
                ours = again


def test_scaling_and_unscaling_of_a_loss() -> None:
    scale = LossScale(acts=True)
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    scale.scaled((parameters[0] * torch.tensor([1.0, 3.0])).sum()).backward()  # type: ignore[no-untyped-call]
    assert parameters[0].grad is not None and parameters[0].grad.tolist() == [65536.0, 3 * 65536.0]
    scale.unscale(parameters)
    assert parameters[0].grad.tolist() == [1.0, 3.0] and parameters[1].grad is None
    for _ in range(99):
        scale.update(False)
    assert scale.factor == loss_scale_module.MIN_SCALE
    off = LossScale(acts=False)
    off.update(False)
    off.unscale(parameters)
    assert off.factor == 1.0 and off.scaled(torch.tensor(3.0)).item() == 3.0
    assert parameters[0].grad.tolist() == [1.0, 3.0]


def observe_updates(skipped: SkippedUpdates, scale: LossScale, *finite: bool) -> None:
    for each in finite:
        skipped.observe(each, scale, 7)


def test_which_skipped_updates_count_as_in_a_row() -> None:
    plain = LossScale(acts=False)
    skipped = SkippedUpdates()
    observe_updates(skipped, plain, False, False, True, False, False)
    assert skipped.metrics() == {"train/skipped_updates": 4}
    again = SkippedUpdates()
    again.load_state_dict(pickle.loads(pickle.dumps(skipped.state_dict())))
    with pytest.raises(CannotGoOnError, match="of 3 updates in a row was not finite, the last after step 7"):
        observe_updates(again, plain, False)
    # Under FP16 an overflow is blamed on the loss scale, until the scale is 1. Then it must be the model.
    scale, skipped = LossScale(acts=True), SkippedUpdates()
    observe_updates(skipped, scale, *[False] * 16)
    assert scale.factor == 1.0
    observe_updates(skipped, scale, False, False)
    with pytest.raises(CannotGoOnError):
        observe_updates(skipped, scale, False)
    assert skipped.metrics() == {"train/skipped_updates": 19}


# --- health --------------------------------------------------------------------------------------------------


class Collapses(Staged):
    """A task whose rewards drop to a tenth from the fourth step on."""

    def reward(self, prompt: Any, completion: str) -> float:
        return (1.0 if self.step < 3 else 0.1) * super().reward(prompt, completion)


PROBLEMS: dict[str, tuple[tuple[str, ...], str]] = {
    "reward": (
        ("health.truncated=1", "health.entropy=0"),
        r"health: reward collapsed at step \d: .*health\.reward_share",
    ),
    "entropy": (
        ("health.truncated=1", "health.entropy=9", "health.reward_share=0"),
        r"health: entropy died at step 2: ",
    ),
    "truncated": (("health.reward_share=0",), r"health: completions are cut off at step 2: .* the bound is 0\.15 "),
}


@pytest.mark.parametrize("problem", every(3, PROBLEMS))
def test_an_unhealthy_run_stops(tiny_model_path: str, tmp_path: Path, problem: str) -> None:
    """The run fails with the reason in its journal, after the step that showed the problem is recorded."""
    overrides, match = PROBLEMS[problem]
    task = Collapses()
    options: dict[str, Any] = {"callbacks": [OnPolicy(), task], "task": task}
    stop = ("health=stop", "health.window_steps=2", *overrides)
    with pytest.raises(UnhealthyError, match=match) as caught:
        fit(tiny_model_path, tmp_path, steps=9, overrides=stop, **options)
    assert "\n" not in str(caught.value)
    view = read_journal(tmp_path)
    assert view.status == "failed" and view.reason == f"UnhealthyError: {caught.value}"
    last = view.of_kind("train")[-1].step
    assert f"at step {last}:" in str(caught.value) and last < 9
    if problem == "reward":
        assert last >= 4


@pytest.mark.slow
def test_completions_cut_by_a_stage_do_not_count_as_truncated(tiny_model_path: str, tmp_path: Path) -> None:
    """Completions cut by a stage's limit do not count as truncated. From step 4 on the context's limit cuts them."""
    overrides = ("health=stop", "health.window_steps=2", "health.reward_share=0", "curriculum=staged_length")
    overrides += ("curriculum.steps=3", "curriculum.shares=[0.5,1]")
    with pytest.raises(UnhealthyError, match=r"completions are cut off at step [45]:"):
        fit(tiny_model_path, tmp_path, steps=9, overrides=overrides, callbacks=[OnPolicy()])
    rows = [record.metrics for record in read_journal(tmp_path).of_kind("train")]
    assert all(0.15 < row["train/cut_by_stage"] == row["train/truncated"] for row in rows[:3])
    assert all(row["train/cut_by_stage"] == 0 and row["train/truncated"] > 0.15 for row in rows[3:])


@pytest.mark.slow
def test_unhealthy_runs_continue_by_default(tiny_model_path: str) -> None:
    task = Collapses()
    overrides = ["health=stop", "health.stop=false", "health.window_steps=1"]
    module = fit(tiny_model_path, steps=6, callbacks=[OnPolicy(), task], task=task, overrides=overrides)
    assert module.completed_steps == 6
    assert not fit(tiny_model_path, steps=1).recipe.health.stop


def stopping_step(watch: HealthWatch, *records: dict[str, float]) -> int:
    """Return the step at which the watch stops the run, or -1."""
    for number, record in enumerate(records, start=1):
        try:
            watch.check(record, number)
        except UnhealthyError:
            return number
    return -1


def records_of_rewards(*rewards: float) -> list[dict[str, float]]:
    return [{"train/reward": reward, "train/entropy": 1.0, "train/truncated": 0.0} for reward in rewards]


def test_reward_collapse_is_detected() -> None:
    """Means of two steps are 0.5, 0.75, 0.5, 0.35. The last is below half of the best."""
    health = Health(stop=True, window_steps=2)
    assert stopping_step(HealthWatch(health), *records_of_rewards(0.4, 0.6, 0.9, 0.1, 0.6)) == 5
    assert stopping_step(HealthWatch(health), *records_of_rewards(0.4, 0.6, 0.9, 0.1, 0.65)) == -1, (
        "exactly half is not below it"
    )
    # Rewards count from `incorrect_reward`, the reward of an incorrect completion: a fall from 0 to -0.6 is one from 1
    # to 0.4.
    assert stopping_step(HealthWatch(health, incorrect_reward=-1.0), *records_of_rewards(0.0, 0.0, -0.6, -0.6)) == 4
    assert stopping_step(HealthWatch(health), *records_of_rewards(0.0, 0.0, 0.0)) == -1, (
        "a reward that never rose cannot collapse"
    )
    assert stopping_step(HealthWatch(Health(stop=False, window_steps=1)), *records_of_rewards(1.0, 0.0, 0.0)) == -1


def test_low_entropy_and_truncation_are_detected() -> None:
    def record(entropy: float, truncated: float) -> dict[str, float]:
        return {"train/reward": 1.0, "train/entropy": entropy, "train/truncated": truncated}

    health = Health(stop=True, window_steps=2, entropy=0.5, truncated=0.5)
    assert stopping_step(HealthWatch(health), record(0.4, 0.0), record(0.5, 0.0)) == 2
    assert stopping_step(HealthWatch(health), record(0.4, 0.0), record(0.6, 0.0)) == -1
    assert stopping_step(HealthWatch(health), record(0.6, 0.0), *[{"train/reward": 1.0}] * 9) == -1, (
        "steps without credited tokens have no entropy"
    )
    assert stopping_step(HealthWatch(health), record(1.0, 0.9), record(1.0, 0.1)) == 2, (
        "the bound itself counts as too much"
    )
    assert stopping_step(HealthWatch(health), record(1.0, 0.9), record(1.0, 0.09), record(1.0, 0.9)) == -1


@pytest.mark.parametrize("stop", range(7))
def test_a_health_watch_resumes(stop: int) -> None:
    health, records = Health(stop=True, window_steps=3), records_of_rewards(0.1, 0.9, 0.9, 0.9, 0.3, 0.3, 0.3, 0.3)
    whole = stopping_step(HealthWatch(health), *records)
    first, second = HealthWatch(health), HealthWatch(health)
    assert stopping_step(first, *records[:stop]) == -1
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert stop + stopping_step(second, *records[stop:]) == whole == 7


def test_a_health_watch_can_be_reset_to_an_earlier_state() -> None:
    """A module that failed resumes from a checkpoint of an earlier step: loading replaces later observations."""
    health, records = Health(stop=True, window_steps=4), records_of_rewards(0.9, 0.8, 0.7)
    watch = HealthWatch(health)
    stopping_step(watch, records[0])
    state = pickle.loads(pickle.dumps(watch.state_dict()))
    stopping_step(watch, *records[1:])
    watch.load_state_dict(state)
    assert watch.state_dict() == state


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("stop", 1),
        ("window_steps", 0),
        ("reward_share", 1.1),
        ("truncated", -0.1),
        ("entropy", -1.0),
        ("entropy", float("nan")),
    ],
)
def test_invalid_health_settings_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"health\.{field}: "):
        Health(**{field: bad})


# --- incompatible settings -----------------------------------------------------------------------------------

INCOMPATIBLE: dict[str, tuple[tuple[str, ...], str]] = {
    "maxrl of another scale": (
        ("normalization=maxrl", "normalization.incorrect=0.5"),
        r"normalization\.incorrect: 0\.5 must be reward\.incorrect, -1\.0: maxrl measures",
    ),
    "gmpo with gae": (
        ("loss=gmpo", "advantage=gae", "critic=value_network", "normalization=batch"),
        r"loss: gmpo takes the geometric mean of a sequence, and advantage=gae",
    ),
    "gspo with gae": (
        ("loss=gspo", "advantage=gae", "critic=value_network", "normalization=batch"),
        r"loss: gspo clips the ratio of a sequence",
    ),
    "rollouts": (("schedule=sqrt_batch", "schedule.rollouts=0"), r"schedule\.rollouts: 0 must be a whole number"),
    "gae without critic": (("advantage=gae",), r"advantage: gae \(GAE\) needs values; choose critic=value_network"),
    "critic without gae": (
        ("critic=value_network",),
        r"critic: value_network .*advantage GroupAdvantage.*advantage=gae",
    ),
    "kl in the reward without gae": (("kl=fixed", "kl.where=reward"), r"kl\.where: 'reward' needs .*advantage=gae"),
    "groups' scale with gae": (
        (*WITH_CRITIC, "normalization=prompt"),
        r"normalization: PromptNormalization .*advantage=gae \(GAE\)",
    ),
    "unknown aggregation of kl": (("kl=fixed", "kl.aggregation=mean"), r"kl\.aggregation: 'mean' is no aggregation"),
    "a pool without numbers": (("curriculum=linear",), r"curriculum: prompt 'p0' has no number in its difficulty"),
    "no end of a cosine": (
        ("schedule=cosine", "schedule.total_steps=2"),
        r"schedule\.total_steps: 2 must be more than",
    ),
}


class Unlabelled(CountingTask):
    def __init__(self) -> None:
        super().__init__()
        self.pool = [type(prompt)(prompt.prompt_id, prompt.text, prompt.answer, "hard") for prompt in self.pool]


@pytest.mark.parametrize(("overrides", "match"), every(3, INCOMPATIBLE.values(), pytest.mark.full), ids=INCOMPATIBLE)
def test_incompatible_settings_are_refused(tiny_model_path: str, overrides: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        fit(tiny_model_path, overrides=overrides, task=Unlabelled())
    assert "\n" not in str(caught.value)


CALLBACKS: dict[str, tuple[list[Callable[[], DesignChoice]], str]] = {
    "prompt": ([GAE, ValueNetwork, PromptNormalization], "PromptNormalization is defined for groups"),
    "aggregation": ([lambda: FixedKL(aggregation="all")], "'all' is no aggregation"),
}


@pytest.mark.parametrize(("given", "match"), CALLBACKS.values(), ids=CALLBACKS)
def test_incompatible_callbacks_are_refused(
    tiny_model_path: str, given: list[Callable[[], DesignChoice]], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(tiny_model_path, callbacks=[build() for build in given])


def test_an_allocation_minimum_above_the_total_is_refused(tiny_model_path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"allocation\.least: 5 .*batch\.completions, 4"):
        fit(tiny_model_path, steps=1, overrides=["allocation=by_difficulty", "allocation.least=5"])


@pytest.mark.parametrize("chosen", ["zero_variance", "dynamic_sampling"])
def test_a_filter_by_variance_needs_groups_of_two(tiny_model_path: str, chosen: str) -> None:
    overrides = ["advantage=gae", "critic=value_network", f"filter={chosen}", "batch.completions=1"]
    with pytest.raises(ConfigurationError, match=rf"batch\.completions: 1 .*filter={chosen}"):
        fit(tiny_model_path, steps=1, overrides=overrides)


# --- schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.5, math.nan, math.inf, -1])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ConstantSchedule, "warmup_steps"),
        (CosineSchedule, "warmup_steps"),
        (CosineSchedule, "total_steps"),
        (SqrtBatchSchedule, "warmup_steps"),
    ],
)
def test_steps_of_a_schedule_are_whole_numbers(kind: Any, field: str, value: float) -> None:
    settings = {
        ConstantSchedule: {"warmup_steps": 2},
        CosineSchedule: {"warmup_steps": 2, "total_steps": 9},
        SqrtBatchSchedule: {"warmup_steps": 2, "prompts": 2, "completions": 2, "reference": 8},
    }[kind]
    with pytest.raises(ConfigurationError, match=rf"^schedule\.{field}: {value!r} must be a whole number"):
        kind(**{**settings, field: value})


def test_the_cosine_schedule() -> None:
    schedule = CosineSchedule(warmup_steps=2, total_steps=10, final=0.1)
    factors = [schedule.factor(step) for step in range(12)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert factors[6] == pytest.approx(0.1 + 0.9 * 0.5), "half way down"
    assert factors[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factors[10] == factors[11] == pytest.approx(0.1), "and stays there"
    assert factors[2:11] == sorted(factors[2:11], reverse=True)
    assert CosineSchedule(0, 4, 0.0).factor(4) == pytest.approx(0.0, abs=1e-12)
    assert CosineSchedule(0, 4, 1.0).factor(3) == pytest.approx(1.0)


def test_the_square_root_schedule() -> None:
    schedule = SqrtBatchSchedule(warmup_steps=3, prompts=8, completions=6, reference=12)
    assert [schedule.factor(step) for step in range(6)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    plain = SqrtBatchSchedule(warmup_steps=3, prompts=4, completions=3, reference=12)
    constant = ConstantSchedule(warmup_steps=3)
    assert [plain.factor(step) for step in range(6)] == [constant.factor(step) for step in range(6)]


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: CosineSchedule(-1, 10), r"schedule\.warmup_steps: -1"),
        (lambda: CosineSchedule(10, 10), r"schedule\.total_steps: 10 must be more than schedule\.warmup_steps, 10"),
        (lambda: CosineSchedule(1, 10, 1.5), r"schedule\.final: 1\.5"),
        (lambda: CosineSchedule(1, 10, float("nan")), r"schedule\.final: nan"),
        (lambda: SqrtBatchSchedule(-1, 1, 1, 1), r"schedule\.warmup_steps: -1"),
        (lambda: SqrtBatchSchedule(0, 1, 1, 0), r"schedule\.reference: 0"),
    ],
)
def test_invalid_schedules_are_refused(build: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        build()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("schedule=cosine", "schedule.warmup_steps=0", "schedule.total_steps=4", "schedule.final=0.5"),
            [1, 0.92678, 0.75],
        ),
        (("schedule=sqrt_batch", "schedule.warmup_steps=1", "schedule.reference=3"), [1, 2, 2]),
    ],
)
def test_schedules_set_the_learning_rate_of_a_run(
    tiny_model_path: str, overrides: tuple[str, ...], expected: list[float]
) -> None:
    """The run has twelve rollouts per step and a learning rate of 3e-3."""
    keep = Keep()
    fit(tiny_model_path, steps=3, callbacks=[keep], overrides=overrides)
    assert keep.of("train/learning_rate") == pytest.approx([3e-3 * factor for factor in expected], rel=1e-4)
