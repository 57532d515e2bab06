"""A recipe in other trainers' words: what is said, what is refused by name, and that the names are theirs.

Names and classes of TRL and verl are asked of the installed packages (marker `peers`); those of SkyRL and prime-rl
stand in names_*.txt, as of the commits that they begin with.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.loss import PPO
from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import build, conf_dir, names_in
from lightning_scalerl.optim import ConstantSchedule, CosineSchedule
from lightning_scalerl.translate import to_trl
from lightning_scalerl.translate.command import TRAINERS, translate
from lightning_scalerl.translate.record import Run, Translation
from sweeps.cli.main import main
from sweeps.errors import UserError
from tests import schemas
from tests.examples import every
from tests.paths import ROOT

HERE = Path(__file__).parent
# What all four can say but for the loss: each case below departs from it in one thing.
PLAIN = (
    *("recipe=scalerl_core", "async_mode=on_policy", "filter=none", "normalization=none", "loss=ppo"),
    *("aggregation=token", "schedule.warmup_steps=0", "optimizer.weight_decay=0", "optimizer.eps=1e-8"),
)
# One recipe of each kind: prompt average and pipeline; sample average, masks; constant and no deviation.
SHOWN = ("scalerl", "dapo", "grpo_deepseek", "dr_grpo")


@cache
def run_of(*overrides: str) -> Run:
    """A run, composed once."""
    return Run.of(list(overrides), [])


def said(to: str, *overrides: str) -> Translation:
    """A plain run with these changes, in a trainer's words."""
    return TRAINERS[to](run_of(*PLAIN, *overrides))


def lacking(to: str, *overrides: str) -> set[str]:
    """Keys that have no counterpart."""
    return {each.key for each in said(to, *overrides).missing}


@pytest.mark.parametrize("to", TRAINERS)
def test_texts_are_as_they_were(to: str) -> None:
    """Recipes as they are, at the numbers of the arithmetic task: what is said of them, and what is not.

    Written anew by `python -m tests.translate.test_translate`.
    """
    assert golden(to) == (HERE / f"golden_{to}.txt").read_text()


def golden(to: str) -> str:
    """The texts of the recipes that are shown."""
    return "\n".join(f"=== recipe={name}\n{TRAINERS[to](run_of(f'recipe={name}')).text()}" for name in SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", every(4, names_in("recipe"), pytest.mark.full))
def test_every_recipe_has_a_text_that_its_trainer_can_read(name: str) -> None:
    """In the trainer's form, and with names that it knows."""
    run = run_of(f"recipe={name}")
    for to, translate_run in TRAINERS.items():
        found = translate_run(run)
        assert read_back(found) == found.settings
        if (pinned := HERE / f"names_{to}.txt").exists():
            assert found.settings.keys() <= set(pinned.read_text().split()), to
            assert found.version in pinned.read_text().splitlines()[0]
        for each in found.missing:
            assert each.key.split(".")[0] in run.config and each.value and each.why


def read_back(found: Translation) -> dict[str, object]:
    """A text as YAML, TOML or OmegaConf reads it, with dots between the levels."""
    text = found.text()
    if found.form == "yaml":
        content: dict[str, object] = yaml.safe_load(text)
        return content
    if found.form == "toml":
        return flat(tomllib.loads(text))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not any(set(line) & set(" '\"$") for line in lines), "one word of a shell each"
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(lines)}


def flat(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    """A nested table with dots between its levels."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


# A trainer, changes, and the keys that then have no counterpart.
REFUSED = [
    ("trl", "", ""),
    ("verl", "", ""),
    ("skyrl", "correction=proximal correction.mode=none", "precision"),
    ("prime-rl", "", "loss seed precision"),
    # denominators
    ("trl", "aggregation=prompt", "aggregation"),
    ("trl", "aggregation=sum", "aggregation"),
    ("trl", "aggregation=token async_mode=ppo_off_policy", "aggregation"),
    ("trl", "aggregation=sample async_mode=ppo_off_policy", ""),
    ("trl", "aggregation=sample truncated=mask", "truncated"),
    ("trl", "aggregation=constant truncated=mask", ""),
    ("trl", "aggregation=token truncated=mask", ""),
    ("trl", "loss=cispo aggregation=sample", "aggregation"),
    ("verl", "aggregation=prompt", "aggregation"),
    ("verl", "truncated=mask", "truncated"),
    ("skyrl", "loss=cispo aggregation=prompt", "precision"),
    ("skyrl", "loss=cispo aggregation=prompt filter=zero_variance", "filter precision"),
    ("skyrl", "loss=cispo aggregation=token filter=zero_variance", "precision"),
    ("skyrl", "loss=cispo aggregation=token truncated=mask", "precision"),
    # Whether a group varies is asked there of its unmasked rollouts.
    ("skyrl", "loss=cispo aggregation=token filter=zero_variance truncated=mask", "filter precision"),
    ("skyrl", "loss=cispo aggregation=sample truncated=mask", "truncated precision"),
    ("skyrl", "loss=cispo aggregation=sum", "aggregation precision"),
    ("prime-rl", "aggregation=sample", "loss seed precision aggregation"),
    # losses
    *((to, "loss=reinforce correction=proximal correction.mode=none", "loss") for to in ("trl", "verl")),
    ("skyrl", "loss=reinforce correction=proximal correction.mode=none", "loss precision"),
    ("trl", "loss=sapo aggregation=sample", ""),
    ("trl", "loss=sapo aggregation=token async_mode=ppo_off_policy", "aggregation"),
    ("trl", "loss=gmpo aggregation=sample", "loss"),
    *(("trl", f"loss={name}", "loss") for name in ("dppo", "clip_cov", "kl_cov")),
    ("verl", "loss=sapo aggregation=sample", ""),
    ("verl", "loss=sapo aggregation=token", "aggregation"),
    ("verl", "loss=dppo loss.divergence=kl", ""),
    ("verl", "loss=gmpo aggregation=sample batch.micro_batch=128", ""),
    ("verl", "loss=gmpo aggregation=token batch.micro_batch=128", "loss"),
    ("verl", "loss=gmpo aggregation=sample batch.micro_batch=64", "loss"),
    ("verl", "loss=gmpo aggregation=sample batch.micro_batch=128 correction=proximal", "loss"),
    *(("verl", f"loss={name} batch.micro_batch=128", "loss") for name in ("clip_cov", "kl_cov")),
    *(("verl", f"loss={name} batch.micro_batch=128 correction=proximal", "") for name in ("clip_cov", "kl_cov")),
    ("verl", "loss=kl_cov batch.micro_batch=64 correction=proximal", "loss"),
    ("verl", "loss=kl_cov batch.micro_batch=128 correction=proximal epochs.count=2", "loss"),
    ("skyrl", "loss=sapo correction=proximal correction.mode=none", "precision"),
    *(
        ("skyrl", f"loss={name} correction=proximal correction.mode=none", "loss precision")
        for name in ("gmpo", "dppo", "clip_cov", "kl_cov")
    ),
    # advantages
    *((to, "normalization=maxrl", "normalization") for to in ("trl", "verl")),
    ("trl", "normalization=batch", "normalization"),
    ("trl", "normalization=batch_reward_std", ""),
    ("trl", "normalization=batch_reward_std normalization.eps=1e-6", "normalization"),
    ("trl", "normalization=batch_reward_std aggregation=sample async_mode=ppo_off_policy", "normalization"),
    ("trl", "normalization=prompt", "normalization"),
    ("trl", "normalization=prompt normalization.eps=1e-4", ""),
    ("verl", "normalization=prompt", ""),
    ("verl", "normalization=prompt normalization.eps=1e-4", "normalization"),
    ("verl", "normalization=prompt normalization.ddof=0", "normalization"),
    ("skyrl", "loss=cispo normalization=batch", "normalization precision"),
    # what is sampled, and when
    ("trl", "filter=dynamic_sampling", "filter"),
    ("verl", "filter=dynamic_sampling", ""),
    ("verl", "filter=zero_variance", "filter"),
    ("skyrl", "loss=cispo filter=dynamic_sampling", "precision"),
    *((to, "resampling=no_positive", "resampling") for to in ("trl", "verl")),
    ("trl", "curriculum=linear", "curriculum"),
    ("verl", "allocation=by_difficulty", "allocation"),
    ("trl", "length_control=interruption", "length_control"),
    ("trl", "length_control=penalty", "length_control"),
    ("trl", "length_control=penalty length_control.only_correct=false", ""),
    ("verl", "length_control=penalty length_control.only_correct=false", "length_control"),
    ("verl", "async_mode=pipeline correction=behaviour", "async_mode"),
    ("trl", "async_mode=ppo_off_policy aggregation=sample epochs.count=2", "epochs"),
    ("trl", "async_mode=ppo_off_policy aggregation=sample +evaluation.sets.a={task:{}}", "evaluation.sets"),
    ("verl", "async_mode=ppo_off_policy epochs.count=2 evaluation.every_n_steps=16", "epochs"),
    ("trl", "epochs.count=2", ""),
    ("verl", "async_mode=ppo_off_policy budget.steps=321", "budget.steps evaluation.every_n_steps"),
    # the ratio
    ("trl", "precision=bf16_head", "correction"),
    ("trl", "precision=bf16_head correction=proximal correction.mode=none", ""),
    ("trl", "precision=bf16_head_trainer correction=proximal correction.mode=none", "precision.fp32_head"),
    ("trl", "correction=proximal", "correction"),
    ("trl", "generator=vllm correction=proximal", ""),
    ("trl", "generator=vllm", "correction"),
    ("trl", "aggregation=sample async_mode=ppo_off_policy correction=proximal", "correction"),
    ("verl", "loss=cispo", ""),
    ("verl", "loss=gspo aggregation=sample", ""),
    ("verl", "loss=cispo correction=proximal", ""),
    ("verl", "correction=proximal correction.min_weight=0.5", "correction"),
    ("verl", "correction=proximal correction.mode=mask correction.min_weight=0.5", ""),
    ("skyrl", "", "correction precision"),
    ("skyrl", "loss=cispo correction=proximal correction.mode=mask", "correction precision"),
    ("verl", "precision=bf16", "precision.fp32_head"),
    # terms
    ("trl", "kl=fixed", ""),
    ("trl", "kl=by_difficulty", "kl"),
    ("trl", "kl=fixed kl.aggregation=sample", "kl.aggregation"),
    ("skyrl", "loss=cispo kl=fixed", "kl.aggregation precision"),
    ("skyrl", "loss=cispo kl=fixed kl.aggregation=sample", "precision"),
    ("trl", "entropy=fixed batch.micro_batch=64", "entropy"),
    ("trl", "entropy=fixed batch.micro_batch=128", ""),
    ("verl", "entropy=fixed", ""),
    # the optimizer
    ("trl", "optimizer.weight_decay=0.01", "optimizer.weight_decay"),
    ("verl", "optimizer.weight_decay=0.01 optimizer.eps=1e-15", ""),
    ("skyrl", "loss=cispo optimizer.eps=1e-15", "optimizer.eps precision"),
    ("trl", "schedule.warmup_steps=5", ""),
    ("trl", "schedule.warmup_steps=5 epochs.count=2", "schedule"),
    ("verl", "schedule.warmup_steps=5", "schedule.warmup_steps"),
    ("trl", "schedule=cosine schedule.total_steps=320 schedule.warmup_steps=0", ""),
    ("trl", "schedule=cosine schedule.total_steps=300 schedule.warmup_steps=0", "schedule"),
    ("trl", "context.too_long=drop", "context.too_long"),
    ("trl", "adapter=lora", "adapter"),
    # distillation: each of them has it elsewhere, with a loss of its own
    ("trl", "kl=distil kl.reference=m", "kl kl.reference"),
    ("verl", "kl=distil kl.reference=m kl.estimate=k3", "kl kl.reference"),
    ("skyrl", "loss=cispo kl=fixed kl.estimate=k2", "kl precision"),
    ("trl", "kl=fixed reward=none filter=none", "reward"),
]


@pytest.mark.parametrize(("to", "changes", "keys"), every(4, REFUSED, pytest.mark.slow))
def test_what_has_no_counterpart_is_named(to: str, changes: str, keys: str) -> None:
    """That alone: a choice that is said is not listed."""
    assert lacking(to, *changes.split()) == set(keys.split()), [each.why for each in said(to, *changes.split()).missing]


def test_another_advantage_never_becomes_that_of_a_group() -> None:
    """It is listed; the settings that are written name the trainer's own GAE, or nothing."""
    names = {"verl": "algorithm.adv_estimator", "skyrl": "trainer.algorithm.advantage_estimator"}
    for to in TRAINERS:
        found = said(to, "advantage=gae", "critic=value_network")
        assert "advantage" in {each.key for each in found.missing} and "grpo" not in found.settings.values(), to
        assert found.settings.get(names.get(to, "")) == ("gae" if to in names else None)


@cache
def every_choice() -> list[DesignChoice]:
    """Each choice that has a file in conf/, on every axis."""
    config = run_of(*PLAIN).config
    return [build({**config, axis: loaded(axis, name)}, axis) for axis in AXES for name in names_in(axis)]


def loaded(axis: str, name: str) -> dict[str, object]:
    """A file of conf/ with its defaults and values filled in."""
    node = OmegaConf.load(conf_dir() / axis / f"{name}.yaml")
    for key, value in OmegaConf.to_container(node).items():
        if value == "???":  # a teacher's name
            node[key] = "m"
    whole = OmegaConf.merge(run_of(*PLAIN).config, {axis: None})
    whole[axis] = {key: value for key, value in node.items_ex(resolve=False) if key != "defaults"}
    content: dict[str, object] = OmegaConf.to_container(whole[axis], resolve=True)
    for base in node.get("defaults", []):
        content = content if base == "_self_" else {**loaded(axis, base), **content}
    return content


def altered(choice: DesignChoice) -> list[DesignChoice]:
    """The same choice with another value of each number and each switch, one at a time."""
    parameters = choice.parameters()
    others = {
        name: not value
        if isinstance(value, bool)
        else (1 - value if name == "ddof" else value + 1 if isinstance(value, int) else value * 0.9 + 1e-3)
        for name, value in parameters.items()
        if isinstance(value, int | float)
    }
    return [type(choice)(**{**parameters, name: value}) for name, value in others.items()]


# Nothing of the run that the choice is put into depends on these: it has no critic, no distance, and a policy in FP32;
# `served_devices` and `timeout_s` are of a teacher, which it has not.
# Of `most_dropped` a note says that the others never give up.
_INERT = {"value", "kl", "advantage", "head_trainer", "head_generator", "most_dropped", "served_devices", "timeout_s"}


@pytest.mark.parametrize("to", TRAINERS)
def test_every_choice_on_every_axis_is_set_or_listed(to: str) -> None:
    """What says a choice says no other one of its axis, and no other value of a parameter."""
    plain = run_of(*PLAIN)
    by_axis: dict[str, list[DesignChoice]] = {axis: [] for axis in AXES}
    for choice in every_choice():
        by_axis[choice.axis] += [choice, *altered(choice)]
    assert all(by_axis.values())
    for axis, choices in by_axis.items():
        texts: dict[str, DesignChoice] = {}
        for choice in choices:
            found = TRAINERS[to](replace(plain, recipe=replace(plain.recipe, choices=plain.choices.having(choice))))
            listed = [vars(each) for each in found.missing if each.key.split(".")[0] == axis]
            assert listed or axis in found.axes, f"{axis}={choice.semantics()}: neither set nor listed"
            said = {name: found.settings.get(name) for name in found.axes.get(axis, [])}
            assert said.keys() <= {*found.settings, "reward_funcs"}
            text = str((said, listed, [note for note in found.notes if note.startswith(axis)]))
            other = texts.setdefault(text, choice)
            differ = {
                name
                for name in {**choice.semantics(), **other.semantics()}
                if choice.semantics().get(name) != other.semantics().get(name)
            }
            assert differ <= _INERT or (differ == {"choice"} and choice.parameters()), (choice.semantics(), text)


def test_a_cap_and_a_clip_are_not_confused() -> None:
    """Of CISPO the absolute cap, by whatever name and origin; of others the distance from 1."""
    cap = ("loss=cispo", "loss.max_ratio=5", "correction=proximal", "correction.mode=none")
    trl, verl, skyrl = (said(to, *cap).settings for to in ("trl", "verl", "skyrl"))
    assert (trl["loss_type"], trl["epsilon_high"]) == ("cispo", 5)
    actor = "actor_rollout_ref.actor"
    assert (verl[f"{actor}.clip_ratio_low"], verl[f"{actor}.clip_ratio_high"]) == (1, 4)
    cispo = "trainer.algorithm.cispo.cispo_eps_clip"
    assert (skyrl[f"{cispo}_low"], skyrl[f"{cispo}_high"]) == (1, 4)
    # Also where its average is none of TRL's: without a `loss_type` another loss would be trained, without a word.
    for average in ("token", "prompt"):
        dapo = said("trl", "loss=dapo", f"aggregation={average}").settings
        assert (dapo["loss_type"], dapo["epsilon"], dapo["epsilon_high"]) == ("dapo", 0.2, 0.26)
    assert said("trl", "loss=cispo", "aggregation=prompt").settings["loss_type"] == "cispo"
    assert said("trl", "kl=fixed", "kl.aggregation=sample").settings["beta"] == 0.05
    assert any("momentum" in note for note in said("trl").notes)
    ppo = said("verl").settings
    assert ppo[f"{actor}.clip_ratio_c"] > math.exp(20), "no ratio reaches the dual clip"
    gspo = said("trl", "loss=gspo", "aggregation=sample").settings
    assert (gspo["loss_type"], gspo["importance_sampling_level"]) == ("grpo", "sequence")
    assert (gspo["epsilon"], gspo["epsilon_high"]) == (3e-3, 5e-3)


def test_the_newer_losses_are_set_by_their_names_there() -> None:
    """A bound, a temperature or a share of ours is the setting that means the same."""
    actor = "actor_rollout_ref.actor"
    whole = ("batch.micro_batch=128", "aggregation=sample")

    def set_by(to: str, *changes: str) -> dict[str, object]:
        found = said(to, *changes)
        return {name: found.settings[name] for name in found.axes["loss"] if name in found.settings}

    trl = set_by("trl", "loss=sapo", "loss.tau_pos=2", "aggregation=sample")
    assert trl["loss_type"] == "sapo" and trl["importance_sampling_level"] == "token"
    assert (trl["sapo_temperature_pos"], trl["sapo_temperature_neg"]) == (2, 1.05)
    assert set_by("verl", "loss=sapo", "loss.tau_neg=3", *whole) == {
        f"{actor}.policy_loss.loss_mode": "sapo",
        f"{actor}.tau_pos": 1.0,
        f"{actor}.tau_neg": 3,
    }
    assert set_by("verl", "loss=dppo", "loss.max_divergence_low=0.1", "loss.max_ratio=7") == {
        f"{actor}.policy_loss.loss_mode": "dppo_tv",
        f"{actor}.clip_ratio_low": 0.1,
        f"{actor}.clip_ratio_high": 0.2,
        f"{actor}.clip_ratio_c": 7,
    }
    assert set_by("verl", "loss=gmpo", "loss.clip_high=0.5", *whole) == {
        f"{actor}.policy_loss.loss_mode": "geo_mean",
        f"{actor}.clip_ratio_low": 0.4,
        f"{actor}.clip_ratio_high": 0.5,
    }
    assert set_by("verl", "loss=kl_cov", "loss.share=0.002", "correction=proximal", *whole) == {
        f"{actor}.policy_loss.loss_mode": "kl_cov",
        f"{actor}.policy_loss.kl_cov_ratio": 0.002,
        f"{actor}.policy_loss.ppo_kl_coef": 1.0,
    }
    assert set_by("verl", "loss=clip_cov", "loss.high=4", "correction=proximal", *whole) == {
        f"{actor}.policy_loss.loss_mode": "clip_cov",
        f"{actor}.policy_loss.clip_cov_ratio": 2e-4,
        f"{actor}.policy_loss.clip_cov_lb": 1.0,
        f"{actor}.policy_loss.clip_cov_ub": 4,
        f"{actor}.clip_ratio_low": 1.0,
        f"{actor}.clip_ratio_high": 1.0,
    }
    assert set_by("skyrl", "loss=sapo", "loss.tau_neg=3") == {
        "trainer.algorithm.policy_loss_type": "sapo",
        "trainer.algorithm.sapo.tau_pos": 1.0,
        "trainer.algorithm.sapo.tau_neg": 3,
    }


def test_fp32_and_the_budget_hold_whatever_the_trainers_defaults_are() -> None:
    """BF16 and 30 passes over the data in verl, one in SkyRL; a reference of verl's has types of its own."""
    verl = said("verl", "kl=fixed")
    for engine in ("actor", "ref"):
        name = f"actor_rollout_ref.{engine}.fsdp_config.mixed_precision"
        assert verl.settings[name]["param_dtype"] == "float32" and f"+{name}={{param_dtype:float32," in verl.text()
    skyrl = said("skyrl", "async_mode=ppo_off_policy", "async_mode.k=4", "budget.steps=8").settings
    assert skyrl["trainer.epochs"] == skyrl["trainer.max_training_steps"] == 2


class Half(PPO):
    """A loss of a user's: half of PPO's."""

    def per_token(self, *tables: torch.Tensor) -> torch.Tensor:
        return super().per_token(*tables) / 2


@pytest.mark.parametrize("to", TRAINERS)
def test_what_is_derived_from_a_choice_of_ours_is_not_taken_for_it(to: str) -> None:
    own = said(to, f"loss._target_={Half.__module__}.Half").missing
    assert [each.why for each in own if each.key == "loss"] == ["a choice of your own"]


def test_batches_are_counted_in_each_trainers_units() -> None:
    """Sixteen prompts of eight, 48 rollouts a pass: the largest divisor; two phases of four steps."""
    changes = ["aggregation=sample", "async_mode=ppo_off_policy", "async_mode.k=4", "budget.steps=8"]
    changes += ["batch.micro_batch=48", "evaluation.every_n_steps=4"]
    trl = said("trl", *changes).settings
    assert [trl[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")] == [32, 4]
    assert [trl[name] for name in ("steps_per_generation", "num_generations", "max_steps")] == [16, 8, 8]
    verl = said("verl", *changes).settings
    assert (verl["data.train_batch_size"], verl["actor_rollout_ref.actor.ppo_mini_batch_size"]) == (64, 16)
    assert (verl["trainer.total_training_steps"], verl["trainer.test_freq"]) == (2, 1)
    twice = said("trl", "epochs.count=2", "budget.steps=8").settings
    assert (twice["num_iterations"], twice["max_steps"], twice["eval_steps"]) == (2, 16, 20)


@pytest.mark.parametrize(
    "schedule",
    [ConstantSchedule(0), ConstantSchedule(5), CosineSchedule(0, 40), CosineSchedule(0, 40, 0.0)],
    ids=["constant", "warm-up", "cosine", "cosine to 0"],
)
def test_the_rate_of_every_step_is_ours(schedule: ConstantSchedule) -> None:
    """As transformers and torch compute it from what TRL and prime-rl are told."""
    from transformers import get_scheduler

    kind = "cosine" if isinstance(schedule, CosineSchedule) else "constant"
    changes = [f"schedule={kind}", f"schedule.warmup_steps={schedule.warmup_steps}", "budget.steps=40"]
    if isinstance(schedule, CosineSchedule):
        changes += [f"schedule.total_steps={schedule.total_steps}", f"schedule.final={schedule.final}"]
    settings = said("trl", *changes).settings
    rate = float(settings["learning_rate"])

    def rates(make: object) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
        scheduler = make(optimizer)  # type: ignore[operator]
        found = []
        for _ in range(40):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    ours = [rate * schedule.factor(step) for step in range(40)]
    theirs = rates(
        lambda optimizer: get_scheduler(
            settings["lr_scheduler_type"],
            optimizer,
            num_warmup_steps=settings.get("warmup_steps", 0),
            num_training_steps=settings["max_steps"],
            scheduler_specific_kwargs=settings.get("lr_scheduler_kwargs"),
        )
    )
    assert theirs == pytest.approx(ours, rel=1e-9)
    if kind == "constant" and schedule.warmup_steps:
        prime = said("prime-rl", *changes).settings
        factor = prime["trainer.scheduler.min_lr"] / prime["trainer.optim.lr"]
        linear = {"start_factor": factor, "end_factor": 1.0, "total_iters": prime["trainer.scheduler.warmup_steps"]}
        assert rates(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, **linear)) == pytest.approx(ours)


def test_a_file_that_is_written_is_told_with_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rl.toml"
    assert main(["translate", "recipe=scalerl", "--to", "prime-rl", "-o", str(file)]) == 0
    told = capsys.readouterr()
    settings = int(file.read_text().split("\n")[0].split(": ")[1].split()[0])
    said = f"{file}: {settings} settings of prime-rl; without a counterpart (see its comments): "
    assert told.out == "" and told.err.startswith(said)
    lacking = told.err.strip().rpartition(": ")[2].split(", ")
    assert lacking == [each.key for each in translate(["recipe=scalerl"], "prime-rl").missing] and len(lacking) > 1


def test_its_json_follows_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "recipe=scalerl", "--to", "prime-rl", "--json"]) == 0
    schemas.validator("translate").validate(json.loads(capsys.readouterr().out))


def test_an_unknown_trainer_and_a_typing_error_are_one_line() -> None:
    with pytest.raises(UserError, match="--to trll: no such trainer; did you mean trl"):
        translate([], "trll")
    with pytest.raises(UserError, match="loss=cispoo"):
        translate(["loss=cispoo"], "trl")


CHECK = """
import json, sys
settings = json.load(sys.stdin)
if sys.argv[1] == "trl":
    from trl import GRPOConfig
    config = GRPOConfig(output_dir=sys.argv[2], use_cpu=True, **settings)
    print(json.dumps({name: getattr(config, name) for name in settings}, default=str))
else:
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from pathlib import Path
    from verl.utils.config import omega_conf_to_dataclass
    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=settings)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    algorithm = omega_conf_to_dataclass(config.algorithm)
    root = Path(verl.trainer.__file__).parents[1]
    source = {name: (root / name).read_text() for name in
              ("trainer/ppo/v1/trainer_base.py", "workers/engine/fsdp/transformer_impl.py")}
    print(json.dumps([
        actor.policy_loss.loss_mode, actor.loss_agg_mode, algorithm.adv_estimator,
        actor.engine.mixed_precision["param_dtype"], config.trainer.total_epochs,
        ["apply_bypass_mode" in source["trainer/ppo/v1/trainer_base.py"],
         "engine_config.dtype" in source["workers/engine/fsdp/transformer_impl.py"]],
    ]))
"""


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize(
    "changes", ["loss=cispo correction=proximal correction.mode=none", "aggregation=constant kl=fixed"]
)
def test_the_installed_packages_take_it(tmp_path: Path, changes: str) -> None:
    """TRL's `GRPOConfig` and verl's configuration classes: names are theirs, values stand as given."""
    python = peers_python()
    run = said("trl", *changes.split())
    done = ask(python, "trl", str(tmp_path), run.settings)
    assert all(done[name] == pytest.approx(value) for name, value in run.settings.items() if isinstance(value, float))
    assert done["loss_type"] == run.settings["loss_type"]
    verl = said("verl", *changes.split())
    lines = [line for line in verl.text().splitlines() if not line.startswith("#")]
    actor = "actor_rollout_ref.actor"
    assert ask(python, "verl", str(tmp_path), lines) == [
        verl.settings[f"{actor}.policy_loss.loss_mode"], verl.settings[f"{actor}.loss_agg_mode"], "grpo",
        # FSDP reads its types there and nowhere else, and its trainer lets another loss than PPO's keep the engine's
        # log-probabilities for its anchor.
        "float32", run_of(*PLAIN).steps, [False, False],
    ]  # fmt: skip


def ask(python: str, *arguments: object) -> dict[str, object]:
    """What an installed package makes of settings."""
    *words, settings = arguments
    done = subprocess.run(
        [python, "-c", CHECK, *map(str, words)],
        input=json.dumps(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def peers_python() -> str:
    """An interpreter with TRL and verl; the test is left out without one, and fails where all is to be there."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    probe = "import importlib.util as u; raise SystemExit(not (u.find_spec('trl') and u.find_spec('verl')))"
    if subprocess.run([python, "-c", probe], check=False).returncode:
        absent = f"{python} has no trl and verl; tests/parity/make_peer_arrays.py says how, PEERS_PYTHON names it"
        if os.environ.get("CI_ALL") == "1":
            pytest.fail(absent)
        pytest.skip(absent)
    return python


if __name__ == "__main__":
    for trainer in TRAINERS:
        (HERE / f"golden_{trainer}.txt").write_text(golden(trainer))


def exists(key: str) -> bool:
    """Whether a key, or a `key=value`, is one of the configuration's."""
    name, _, value = key.partition("=")
    group, _, rest = name.partition(".")
    folder = conf_dir() / group
    if value and not rest:
        return (folder / f"{value}.yaml").is_file()
    files = [*folder.glob("*.yaml")] if rest and folder.is_dir() else [conf_dir() / "train.yaml"]
    plain = [yaml.safe_load(file.read_text()) or {} for file in files]
    return any(rest in each or (name in each) or rest in (each.get(group) or {}) for each in plain)


def test_the_page_from_trl_has_every_field_that_is_translated_and_keys_that_exist() -> None:
    source = ast.parse(Path(str(to_trl.__file__)).read_text())
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    translated_fields = {word.arg for call in calls if call.func.attr == "set" for word in call.keywords}  # type: ignore[attr-defined]
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in (ROOT / "docs" / "guide" / "from_trl.md").read_text().splitlines()
        if line.startswith("| `") and not line.startswith("| `GRPOConfig`")
    ]
    fields = {field for theirs, _, _ in rows for field in re.findall(r"`(\w+)(?:=\w+)?`", theirs)}
    assert fields - {"get_soft_overlong_punishment", "reward_funcs"} == translated_fields
    keys = {key for _, ours, _ in rows for key in re.findall(r"`([^`]+)`", ours)}
    assert [key for key in sorted(keys) if not exists(key)] == []
    assert not exists("loss=nothing") and not exists("loss.nothing") and not exists("nothing")


# Defaults of GRPOConfig and of transformers' TrainingArguments (trl 1.16.0). Its epsilon_high is None, which means
# epsilon. Settings of a scale are left out, and so are those that only matter with a beta.
TRL_DEFAULTS = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "beta": 0.0,
    "scale_rewards": "group", "mask_truncated_completions": False, "num_iterations": 1, "temperature": 1.0,
    "optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "use_vllm": False, "cast_lm_head_to_fp32": False,
}  # fmt: skip


def test_the_command_of_the_page_from_trl_has_trls_defaults() -> None:
    page = (ROOT / "docs" / "guide" / "from_trl.md").read_text()
    (command,) = re.findall(r"^scalerl train (.*?)\n```", page, flags=re.DOTALL | re.MULTILINE)
    found = said("trl", *command.replace("\\\n", " ").split())
    assert found.missing == []
    assert {name: found.settings[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert found.settings["steps_per_generation"] == found.settings["gradient_accumulation_steps"], "on-policy"
