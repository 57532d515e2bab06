"""Tests of translating a recipe into another trainer's configuration.

Settings must use names that the trainer knows; choices without a counterpart must be listed. Names and classes of TRL
and verl come from the installed packages (marker `peers`). Names of SkyRL and prime-rl come from names_*.txt, pinned
at the commit in the first line of each file.
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
# A recipe that all four trainers can express, except for the loss; each case below changes it in one thing.
PLAIN = (
    *("recipe=scalerl_core", "async_mode=on_policy", "filter=none", "normalization=none", "loss=ppo"),
    *("aggregation=token", "schedule.warmup_steps=0", "optimizer.weight_decay=0", "optimizer.eps=1e-8"),
)
# Recipes in the golden files. They cover averages per prompt, sample and constant, a pipeline, masks, no deviation.
GOLDEN_RECIPES = ("scalerl", "dapo", "grpo_deepseek", "dr_grpo")


@cache
def run_of(*overrides: str) -> Run:
    """Compose a run; each combination is composed once."""
    return Run.of(list(overrides), [])


def translated(to: str, *overrides: str) -> Translation:
    """Translate the plain run with these overrides."""
    return TRAINERS[to](run_of(*PLAIN, *overrides))


def missing_keys(to: str, *overrides: str) -> set[str]:
    """Return the keys without a counterpart."""
    return {entry.key for entry in translated(to, *overrides).missing}


@pytest.mark.parametrize("to", TRAINERS)
def test_translations_match_the_golden_files(to: str) -> None:
    """The whole text of some recipes, at the settings of the arithmetic task.

    `python -m tests.translate.test_translate` writes the golden files.
    """
    assert golden(to) == (HERE / f"golden_{to}.txt").read_text()


def golden(to: str) -> str:
    """Return the translations of all golden recipes."""
    return "\n".join(f"=== recipe={name}\n{TRAINERS[to](run_of(f'recipe={name}')).text()}" for name in GOLDEN_RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", every(4, names_in("recipe"), pytest.mark.full))
def test_every_recipe_translates_into_valid_settings(name: str) -> None:
    """The text can be parsed in the trainer's format and uses only names that the trainer knows."""
    run = run_of(f"recipe={name}")
    for to, translate_run in TRAINERS.items():
        result = translate_run(run)
        assert read_back(result) == result.settings
        if (pinned := HERE / f"names_{to}.txt").exists():
            assert result.settings.keys() <= set(pinned.read_text().split()), to
            assert result.version in pinned.read_text().splitlines()[0]
        for entry in result.missing:
            assert entry.key.split(".")[0] in run.config and entry.value and entry.why


def read_back(result: Translation) -> dict[str, object]:
    """Parse a text with YAML, TOML or OmegaConf; return the settings with dotted names."""
    text = result.text()
    if result.form == "yaml":
        content: dict[str, object] = yaml.safe_load(text)
        return content
    if result.form == "toml":
        return flat(tomllib.loads(text))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not any(set(line) & set(" '\"$") for line in lines), "each override must be one shell word"
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return {entry.key_or_group: entry.value() for entry in OverridesParser.create().parse_overrides(lines)}


def flat(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested table with dotted names."""
    result: dict[str, object] = {}
    for name, value in table.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


# Trainer, overrides, and the keys that then have no counterpart.
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
    # SkyRL tests the variance of a group over unmasked rollouts only.
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
    ("verl", "loss=gmpo aggregation=sample batch.micro_batch=128 strategy.devices=2", "loss"),
    ("verl", "loss=kl_cov batch.micro_batch=128 correction=proximal strategy.devices=2", "loss"),
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
    # sampling and its timing
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
    # the importance ratio
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
    # loss terms
    ("trl", "kl=fixed", ""),
    ("trl", "kl=by_difficulty", "kl"),
    ("trl", "kl=fixed kl.aggregation=sample", "kl.aggregation"),
    ("skyrl", "loss=cispo kl=fixed", "kl.aggregation precision"),
    ("skyrl", "loss=cispo kl=fixed kl.aggregation=sample", "precision"),
    ("trl", "entropy=fixed batch.micro_batch=64", "entropy"),
    ("trl", "entropy=fixed batch.micro_batch=128", ""),
    ("trl", "entropy=fixed batch.micro_batch=128 strategy.devices=2", "entropy"),
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
    # distillation: the others have it in another place, with a loss of its own
    ("trl", "kl=distil kl.reference=m", "kl kl.reference"),
    ("verl", "kl=distil kl.reference=m kl.estimate=k3", "kl kl.reference"),
    ("skyrl", "loss=cispo kl=fixed kl.estimate=k2", "kl precision"),
    ("trl", "kl=fixed reward=none filter=none", "reward"),
]


@pytest.mark.parametrize(("to", "changes", "keys"), every(8, every(4, REFUSED, pytest.mark.full)))
def test_choices_without_a_counterpart_are_listed(to: str, changes: str, keys: str) -> None:
    """Exactly these choices are listed; choices with a counterpart are not."""
    assert missing_keys(to, *changes.split()) == set(keys.split()), [
        entry.why for entry in translated(to, *changes.split()).missing
    ]


@pytest.mark.parametrize(
    ("to", "changes", "why"),
    [
        ("trl", "normalization=maxrl", "mean reward of a group"),
        ("trl", "normalization=running", "over earlier batches"),
        ("trl", "normalization=batch", "(normalization=batch_reward_std), not of advantages"),
        ("trl", "normalization=batch_centred", "subtracts the mean of a batch's advantages"),
        ("trl", "recipe=ppo", "subtracts the mean of a batch's advantages"),
        ("skyrl", "normalization=maxrl normalization.eps=1e-4", "maxrl divides by the mean reward above 0 plus 1e-06"),
        ("skyrl", "normalization=maxrl reward=plus_minus_one", "maxrl divides by the mean reward above 0 plus 1e-06"),
        ("skyrl", "normalization=running", "over earlier batches"),
        ("skyrl", "normalization=batch_reward_std", "of a group's rewards, not of a batch's"),
        ("skyrl", "normalization=batch", "once per token of its rollout"),
        ("skyrl", "recipe=ppo", "with gae, SkyRL always subtracts the mean"),
        ("verl", "normalization=none advantage=gae critic=value_network", "with gae, verl always subtracts the mean"),
    ],
)
def test_each_normalization_has_its_own_reason(to: str, changes: str, why: str) -> None:
    run = changes.split() if changes.startswith("recipe") else [*PLAIN, *changes.split()]
    (reason,) = [entry.why for entry in TRAINERS[to](run_of(*run)).missing if entry.key == "normalization"]
    assert why in reason


def test_maxrl_is_skyrls_estimator_if_incorrect_completions_have_no_reward() -> None:
    result = translated("skyrl", "normalization=maxrl", "reward=zero_one")
    assert result.settings["trainer.algorithm.advantage_estimator"] == "maxrl"
    assert "trainer.algorithm.advantage_estimator" in result.axes["normalization"]
    assert "trainer.algorithm.grpo_norm_by_std" not in result.settings


# Settings besides the axes that change a run, and the keys that are listed for every trainer.
LISTED = [
    ("environment=calculator", {"environment", "context.max_turns"}),
    (
        "environment=calculator context.max_turn_tokens=8",
        {"environment", "context.max_turns", "context.max_turn_tokens"},
    ),
    ("chat.system=hello", {"chat.system"}),
    ("chat.template=none", {"chat.template"}),
    ("chat.thinking=false", {"chat.thinking"}),
    ("chat.stop=[x]", {"chat.stop"}),
    ("chat.end_of_thinking=x", {"chat.end_of_thinking"}),
    ("health=stop", {"health.stop"}),
    ("branch.run=outputs/a/runs/b", {"branch.run"}),
    ("thinking.interrupt_from=5 thinking.penalty_buffer=2", set()),  # the plain run has no length control
]


@pytest.mark.parametrize(("changes", "keys"), LISTED)
def test_settings_besides_the_axes_are_listed(changes: str, keys: set[str]) -> None:
    for to in TRAINERS:
        assert missing_keys(to, *changes.split()) - missing_keys(to) == keys, to


def test_the_page_says_of_each_group_how_it_is_translated() -> None:
    """A new group must be decided: it is translated, or listed, or has no effect on what a run learns."""
    page = (ROOT / "docs" / "guide" / "other_trainers.md").read_text()
    table = [line for line in page.split("| group | in a translation |")[1].split("\n\n")[0].splitlines()]
    named = {name.split(".")[0] for line in table for name in re.findall(r"`([a-z_.]+)`", line)}
    # `model`, `task` and `verify` are named in the sentence above the table. The others are paths, or a check.
    decided = named | {"model", "task", "verify", *AXES, "output_dir", "scaled_for", "label", "hydra", "trainer"}
    assert set(run_of(*PLAIN).config) <= decided


def test_gae_is_never_translated_into_group_advantages() -> None:
    """GAE is listed as missing. The settings contain the trainer's own GAE, or no estimator."""
    names = {"verl": "algorithm.adv_estimator", "skyrl": "trainer.algorithm.advantage_estimator"}
    for to in TRAINERS:
        result = translated(to, "advantage=gae", "critic=value_network")
        assert "advantage" in {entry.key for entry in result.missing} and "grpo" not in result.settings.values(), to
        assert result.settings.get(names.get(to, "")) == ("gae" if to in names else None)


@cache
def every_choice() -> list[DesignChoice]:
    """Build every choice that has a file in conf/, on all axes."""
    config = run_of(*PLAIN).config
    return [build({**config, axis: load_choice(axis, name)}, axis) for axis in AXES for name in names_in(axis)]


def load_choice(axis: str, name: str) -> dict[str, object]:
    """Return a file of conf/ with its defaults and interpolated values filled in."""
    node = OmegaConf.load(conf_dir() / axis / f"{name}.yaml")
    for key, value in OmegaConf.to_container(node).items():
        if value == "???":  # a required value: the teacher's name
            node[key] = "m"
    merged = OmegaConf.merge(run_of(*PLAIN).config, {axis: None})
    merged[axis] = {key: value for key, value in node.items_ex(resolve=False) if key != "defaults"}
    content: dict[str, object] = OmegaConf.to_container(merged[axis], resolve=True)
    for base in node.get("defaults", []):
        content = content if base == "_self_" else {**load_choice(axis, base), **content}
    return content


def altered(choice: DesignChoice) -> list[DesignChoice]:
    """Return copies of a choice; each has another value of one number or one switch."""
    parameters = choice.parameters()
    others = {
        name: not value
        if isinstance(value, bool)
        else (1 - value if name == "ddof" else value + 1 if isinstance(value, int) else value * 0.9 + 1e-3)
        for name, value in parameters.items()
        if isinstance(value, int | float)
    }
    return [type(choice)(**{**parameters, name: value}) for name, value in others.items()]


# Parameters without effect in the plain run: it has no critic, no KL distance, an FP32 policy, and no teacher
# (`served_devices`, `timeout_s`). `most_dropped` is covered by a note: the other trainers never give up.
_INERT = {"value", "kl", "advantage", "head_trainer", "head_generator", "most_dropped", "served_devices", "timeout_s"}


@pytest.mark.parametrize("to", TRAINERS)
def test_every_choice_on_every_axis_is_set_or_listed(to: str) -> None:
    """Two choices or parameter values may give the same settings only if they differ in parameters without effect."""
    plain = run_of(*PLAIN)
    by_axis: dict[str, list[DesignChoice]] = {axis: [] for axis in AXES}
    for choice in every_choice():
        by_axis[choice.axis] += [choice, *altered(choice)]
    assert all(by_axis.values())
    for axis, choices in by_axis.items():
        texts: dict[str, DesignChoice] = {}
        for choice in choices:
            result = TRAINERS[to](replace(plain, recipe=replace(plain.recipe, choices=plain.choices.replacing(choice))))
            listed = [vars(entry) for entry in result.missing if entry.key.split(".")[0] == axis]
            assert listed or axis in result.axes, f"{axis}={choice.semantics()}: neither set nor listed"
            axis_settings = {name: result.settings.get(name) for name in result.axes.get(axis, [])}
            assert axis_settings.keys() <= {*result.settings, "reward_funcs"}
            text = str((axis_settings, listed, [note for note in result.notes if note.startswith(axis)]))
            other = texts.setdefault(text, choice)
            differ = {
                name
                for name in {**choice.semantics(), **other.semantics()}
                if choice.semantics().get(name) != other.semantics().get(name)
            }
            assert differ <= _INERT or (differ == {"choice"} and choice.parameters()), (choice.semantics(), text)


def test_ratio_caps_and_clip_ranges_are_not_confused() -> None:
    """CISPO has an absolute cap of the ratio, in other trainers under other names; other losses clip around 1."""
    cap = ("loss=cispo", "loss.max_ratio=5", "correction=proximal", "correction.mode=none")
    trl, verl, skyrl = (translated(to, *cap).settings for to in ("trl", "verl", "skyrl"))
    assert (trl["loss_type"], trl["epsilon_high"]) == ("cispo", 5)
    actor = "actor_rollout_ref.actor"
    assert (verl[f"{actor}.clip_ratio_low"], verl[f"{actor}.clip_ratio_high"]) == (1, 4)
    cispo = "trainer.algorithm.cispo.cispo_eps_clip"
    assert (skyrl[f"{cispo}_low"], skyrl[f"{cispo}_high"]) == (1, 4)
    # Without a `loss_type`, TRL would silently train its default loss, so it is set even if the average is missing.
    for average in ("token", "prompt"):
        dapo = translated("trl", "loss=dapo", f"aggregation={average}").settings
        assert (dapo["loss_type"], dapo["epsilon"], dapo["epsilon_high"]) == ("dapo", 0.2, 0.26)
    assert translated("trl", "loss=cispo", "aggregation=prompt").settings["loss_type"] == "cispo"
    assert translated("trl", "kl=fixed", "kl.aggregation=sample").settings["beta"] == 0.05
    assert any("momentum" in note for note in translated("trl").notes)
    ppo = translated("verl").settings
    assert ppo[f"{actor}.clip_ratio_c"] > math.exp(20), "the dual clip must have no effect"
    gspo = translated("trl", "loss=gspo", "aggregation=sample").settings
    assert (gspo["loss_type"], gspo["importance_sampling_level"]) == ("grpo", "sequence")
    assert (gspo["epsilon"], gspo["epsilon_high"]) == (3e-3, 5e-3)


def test_newer_losses_use_each_trainers_names() -> None:
    """Bounds, temperatures and shares are translated into the settings with the same meaning."""
    actor = "actor_rollout_ref.actor"
    merged = ("batch.micro_batch=128", "aggregation=sample")

    def loss_settings(to: str, *changes: str) -> dict[str, object]:
        result = translated(to, *changes)
        return {name: result.settings[name] for name in result.axes["loss"] if name in result.settings}

    trl = loss_settings("trl", "loss=sapo", "loss.tau_pos=2", "aggregation=sample")
    assert trl["loss_type"] == "sapo" and trl["importance_sampling_level"] == "token"
    assert (trl["sapo_temperature_pos"], trl["sapo_temperature_neg"]) == (2, 1.05)
    assert loss_settings("verl", "loss=sapo", "loss.tau_neg=3", *merged) == {
        f"{actor}.policy_loss.loss_mode": "sapo",
        f"{actor}.tau_pos": 1.0,
        f"{actor}.tau_neg": 3,
    }
    assert loss_settings("verl", "loss=dppo", "loss.max_divergence_low=0.1", "loss.max_ratio=7") == {
        f"{actor}.policy_loss.loss_mode": "dppo_tv",
        f"{actor}.clip_ratio_low": 0.1,
        f"{actor}.clip_ratio_high": 0.2,
        f"{actor}.clip_ratio_c": 7,
    }
    assert loss_settings("verl", "loss=gmpo", "loss.clip_high=0.5", *merged) == {
        f"{actor}.policy_loss.loss_mode": "geo_mean",
        f"{actor}.clip_ratio_low": 0.4,
        f"{actor}.clip_ratio_high": 0.5,
    }
    assert loss_settings("verl", "loss=kl_cov", "loss.share=0.002", "correction=proximal", *merged) == {
        f"{actor}.policy_loss.loss_mode": "kl_cov",
        f"{actor}.policy_loss.kl_cov_ratio": 0.002,
        f"{actor}.policy_loss.ppo_kl_coef": 1.0,
    }
    assert loss_settings("verl", "loss=clip_cov", "loss.high=4", "correction=proximal", *merged) == {
        f"{actor}.policy_loss.loss_mode": "clip_cov",
        f"{actor}.policy_loss.clip_cov_ratio": 2e-4,
        f"{actor}.policy_loss.clip_cov_lb": 1.0,
        f"{actor}.policy_loss.clip_cov_ub": 4,
        f"{actor}.clip_ratio_low": 1.0,
        f"{actor}.clip_ratio_high": 1.0,
    }
    assert loss_settings("skyrl", "loss=sapo", "loss.tau_neg=3") == {
        "trainer.algorithm.policy_loss_type": "sapo",
        "trainer.algorithm.sapo.tau_pos": 1.0,
        "trainer.algorithm.sapo.tau_neg": 3,
    }


def test_precision_and_budget_do_not_depend_on_the_trainers_defaults() -> None:
    """Defaults are BF16 and 30 epochs in verl, and one epoch in SkyRL; verl's reference has dtypes of its own."""
    verl = translated("verl", "kl=fixed")
    for engine in ("actor", "ref"):
        name = f"actor_rollout_ref.{engine}.fsdp_config.mixed_precision"
        assert verl.settings[name]["param_dtype"] == "float32" and f"+{name}={{param_dtype:float32," in verl.text()
    skyrl = translated("skyrl", "async_mode=ppo_off_policy", "async_mode.k=4", "budget.steps=8").settings
    assert skyrl["trainer.epochs"] == skyrl["trainer.max_training_steps"] == 2


class Half(PPO):
    """A user's loss: half of PPO's."""

    def per_token(self, *tables: torch.Tensor) -> torch.Tensor:
        return super().per_token(*tables) / 2


@pytest.mark.parametrize("to", TRAINERS)
def test_a_subclass_of_our_choice_is_not_translated_as_our_choice(to: str) -> None:
    listed_choices = translated(to, f"loss._target_={Half.__module__}.Half").missing
    assert [entry.why for entry in listed_choices if entry.key == "loss"] == ["a choice of your own"]


def test_batches_are_counted_in_each_trainers_units() -> None:
    """16 prompts of 8, at most 48 rollouts per pass (TRL: the largest divisor), and two phases of four steps."""
    changes = ["aggregation=sample", "async_mode=ppo_off_policy", "async_mode.k=4", "budget.steps=8"]
    changes += ["batch.micro_batch=48", "evaluation.every_n_steps=4"]
    trl = translated("trl", *changes).settings
    assert [trl[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")] == [32, 4]
    assert [trl[name] for name in ("steps_per_generation", "num_generations", "max_steps")] == [16, 8, 8]
    verl = translated("verl", *changes).settings
    assert (verl["data.train_batch_size"], verl["actor_rollout_ref.actor.ppo_mini_batch_size"]) == (64, 16)
    assert (verl["trainer.total_training_steps"], verl["trainer.test_freq"]) == (2, 1)
    twice = translated("trl", "epochs.count=2", "budget.steps=8").settings
    assert (twice["num_iterations"], twice["max_steps"], twice["eval_steps"]) == (2, 16, 20)


@pytest.mark.parametrize(
    ("layout", "batches", "number"),
    [
        ("", [64, 2], "1 process;"),
        ("strategy.devices=1", [64, 2], "1 process;"),
        ("strategy.devices=8", [16, 1], "8 processes;"),
        ("strategy=fsdp2 strategy.devices=2 strategy.nodes=2 batch.micro_batch=16", [16, 2], "4 processes;"),
        ("strategy.devices=3", [64, 2], "1 process;"),
    ],
)
def test_the_batch_of_all_processes_is_that_of_a_step(layout: str, batches: list[int], number: str) -> None:
    """128 rollouts per step. TRL's batch size is for one process; 3 processes cannot divide a step."""
    result = translated("trl", *layout.split())
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    assert [result.settings[name] for name in names] == batches
    assert result.settings["steps_per_generation"] == batches[1]
    assert [note for note in result.notes if note.startswith("batch: ") and number in note]
    assert [entry.key for entry in result.missing] == (["strategy.devices"] if layout.endswith("=3") else [])


def test_a_number_of_devices_that_is_none_is_an_error_of_one_line() -> None:
    for layout, message in (("strategy.devices=0", "strategy.devices: 0"), ("strategy.nodes=2", "strategy.nodes: 2")):
        with pytest.raises(UserError, match=message):
            translate([layout], "trl")


@pytest.mark.parametrize(
    "schedule",
    [ConstantSchedule(0), ConstantSchedule(5), CosineSchedule(0, 40), CosineSchedule(0, 40, 0.0)],
    ids=["constant", "warm-up", "cosine", "cosine to 0"],
)
def test_learning_rates_of_all_steps_are_ours(schedule: ConstantSchedule) -> None:
    """Rates are computed by transformers and torch from the settings for TRL and prime-rl."""
    from transformers import get_scheduler

    kind = "cosine" if isinstance(schedule, CosineSchedule) else "constant"
    changes = [f"schedule={kind}", f"schedule.warmup_steps={schedule.warmup_steps}", "budget.steps=40"]
    if isinstance(schedule, CosineSchedule):
        changes += [f"schedule.total_steps={schedule.total_steps}", f"schedule.final={schedule.final}"]
    settings = translated("trl", *changes).settings
    rate = float(settings["learning_rate"])

    def rates(make: object) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
        scheduler = make(optimizer)  # type: ignore[operator]
        result = []
        for _ in range(40):
            result.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return result

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
        prime = translated("prime-rl", *changes).settings
        factor = prime["trainer.scheduler.min_lr"] / prime["trainer.optim.lr"]
        linear = {"start_factor": factor, "end_factor": 1.0, "total_iters": prime["trainer.scheduler.warmup_steps"]}
        assert rates(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, **linear)) == pytest.approx(ours)


def test_the_page_names_the_trainers_without_the_warm_up() -> None:
    page = (ROOT / "docs" / "guide" / "other_trainers.md").read_text()
    (line,) = [" ".join(entry.split()) for entry in page.split("\n- ") if entry.startswith("**Schedules.**")]
    lacking = [to for to in TRAINERS if "schedule.warmup_steps" in missing_keys(to, "schedule.warmup_steps=5")]
    assert lacking == ["verl", "skyrl"]
    assert "The warm-up of verl and SkyRL begins at 0, so it is listed as missing for them." in line
    assert "For TRL and prime-rl, a schedule with this project's rates is written." in line
    first = translated("prime-rl", "schedule.warmup_steps=5", "optimizer.lr=6e-4").settings
    assert first["trainer.scheduler.min_lr"] == pytest.approx(1e-4)
    assert "`lr` / (`warmup_steps` + 1)" in line


@pytest.mark.parametrize("to", TRAINERS)
def test_a_choice_in_the_users_folder_is_listed_as_missing(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "translated_losses", raising=False)
    (tmp_path / "translated_losses.py").write_text(
        "from lightning_scalerl.axes.loss import PPO\n\n\nclass Mine(PPO):\n    pass\n"
    )
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("_target_: translated_losses.Mine\nclip: 0.2\n")
    missing = translate(["loss=mine"], to, [str(tmp_path)]).missing
    assert ("loss", "Mine(clip=0.2)", "a choice of your own") in [
        (entry.key, entry.value, entry.why) for entry in missing
    ]


def test_writing_a_file_reports_the_missing_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rl.toml"
    assert main(["translate", "recipe=scalerl", "--to", "prime-rl", "-o", str(file)]) == 0
    printed = capsys.readouterr()
    settings = int(file.read_text().split("\n")[0].split(": ")[1].split()[0])
    summary = f"{file}: {settings} settings of prime-rl; without a counterpart (see its comments): "
    assert printed.out == "" and printed.err.startswith(summary)
    listed_keys = printed.err.strip().rpartition(": ")[2].split(", ")
    assert (
        listed_keys == [entry.key for entry in translate(["recipe=scalerl"], "prime-rl").missing]
        and len(listed_keys) > 1
    )


def test_the_json_follows_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "recipe=scalerl", "--to", "prime-rl", "--json"]) == 0
    schemas.validator("translate").validate(json.loads(capsys.readouterr().out))


def test_an_unknown_trainer_and_a_typo_are_errors_of_one_line() -> None:
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
    "changes",
    [
        "loss=cispo correction=proximal correction.mode=none",
        pytest.param("aggregation=constant kl=fixed", marks=pytest.mark.full),
    ],
)
def test_the_installed_packages_accept_the_settings(tmp_path: Path, changes: str) -> None:
    """TRL's `GRPOConfig` and verl's configuration classes know the names and keep the values."""
    python = peers_python()
    run = translated("trl", *changes.split())
    done = ask(python, "trl", str(tmp_path), run.settings)
    assert all(done[name] == pytest.approx(value) for name, value in run.settings.items() if isinstance(value, float))
    assert done["loss_type"] == run.settings["loss_type"]
    verl = translated("verl", *changes.split())
    lines = [line for line in verl.text().splitlines() if not line.startswith("#")]
    actor = "actor_rollout_ref.actor"
    assert ask(python, "verl", str(tmp_path), lines) == [
        verl.settings[f"{actor}.policy_loss.loss_mode"], verl.settings[f"{actor}.loss_agg_mode"], "grpo",
        # FSDP reads its dtypes only from this setting. In verl's trainer, a loss other than PPO may use the engine's
        # log-probabilities as its anchor.
        "float32", run_of(*PLAIN).steps, [False, False],
    ]  # fmt: skip


def ask(python: str, *arguments: object) -> dict[str, object]:
    """Let an installed package read the settings; return the values that it got."""
    *words, settings = arguments
    done = subprocess.run(
        [python, "-c", CHECK, *map(str, words)],
        input=json.dumps(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def peers_python() -> str:
    """Return an interpreter with TRL and verl. Without one, skip the test, or fail where CI_ALL demands everything."""
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
    """Return whether a key, or a `key=value`, exists in our configuration."""
    name, _, value = key.partition("=")
    group, _, name_in_group = name.partition(".")
    folder = conf_dir() / group
    if value and not name_in_group:
        return (folder / f"{value}.yaml").is_file()
    files = [*folder.glob("*.yaml")] if name_in_group and folder.is_dir() else [conf_dir() / "train.yaml"]
    plain = [yaml.safe_load(file.read_text()) or {} for file in files]
    return any(
        name_in_group in entry or (name in entry) or name_in_group in (entry.get(group) or {}) for entry in plain
    )


def test_the_page_from_trl_lists_all_translated_fields_and_only_existing_keys() -> None:
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


# Defaults of GRPOConfig and of transformers' TrainingArguments (trl 1.16.0). The default of epsilon_high is None, which
# means epsilon. Settings of the run's size are left out, and so are settings that only matter with beta > 0.
TRL_DEFAULTS = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "beta": 0.0,
    "scale_rewards": "group", "mask_truncated_completions": False, "num_iterations": 1, "temperature": 1.0,
    "optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "use_vllm": False, "cast_lm_head_to_fp32": False,
}  # fmt: skip


def test_the_command_on_the_page_from_trl_has_trls_defaults() -> None:
    page = (ROOT / "docs" / "guide" / "from_trl.md").read_text()
    (command,) = re.findall(r"^scalerl train (.*?)\n```", page, flags=re.DOTALL | re.MULTILINE)
    result = translated("trl", *command.replace("\\\n", " ").split())
    assert result.missing == []
    assert {name: result.settings[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert result.settings["steps_per_generation"] == result.settings["gradient_accumulation_steps"], "on-policy"
