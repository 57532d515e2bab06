"""Printed and stored semantics of a run: its choices with all their settings."""

from __future__ import annotations

import pytest

from lightning_scalerl import CISPO, DAPO, LoRA
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import build_recipe, compose, load_recipe
from lightning_scalerl.measure.mechanism import choice_differences
from lightning_scalerl.measure.semantics import describe_choices, resolved_choices

# Axes that a ScaleRL run prints on their own line. All others are neutral.
SPELLED_OUT = {
    *("resampling", "async_mode", "length_control", "truncated", "filter"),
    *("advantage", "normalization", "precision", "correction", "loss", "aggregation"),
}


def lines_of(*overrides: str) -> str:
    recipe = build_recipe(compose(overrides), "x")
    return "\n".join(describe_choices(recipe, recipe.choices))


def test_a_run_prints_what_its_choices_mean() -> None:
    printed = lines_of("recipe=scalerl")
    for expected in (
        "loss: CISPO (max_ratio=5.0, ratio_interval=[0.0, 5.0]",
        "aggregation: PromptAggregation (divisor=credited prompts * credited tokens of the group)",
        "normalization: BatchNormalization (ddof=1, eps=1e-06, centre=False)",
        "kv_cache_on_update=stale in flight",
        "order: reward -> length control -> filter -> advantage -> normalization -> truncated",
        "reward -1 to 1",
        "anchor=the generator, at sampling time",
        f"neutral: {', '.join(sorted(set(AXES) - SPELLED_OUT))}",
    ):
        assert expected in printed, expected


def test_the_new_choices_say_what_they_do() -> None:
    printed = lines_of("recipe=ppo", "reward=plus_minus_one", "correction=proximal", "precision=fp16")
    for expected in (
        "ratio_interval=[0.8, 1.2]",
        "estimate=k3",
        "anchor=the trainer, before the first pass over the batch",
        "reward=on the last sampled token",
        "value=fp32",
        "loss_scaling=dynamic",
        "reward -1 to 1",
        "epochs: Epochs (count=4)",
    ):
        assert expected in printed, expected


@pytest.mark.parametrize("recipe", ["scalerl", "ppo"])
def test_terms_and_their_aggregations_are_stored(recipe: str) -> None:
    built_recipe = build_recipe(
        compose([f"recipe={recipe}", *(["kl.aggregation=sample"] if recipe == "ppo" else [])]), recipe
    )
    terms = resolved_choices(built_recipe, built_recipe.choices)["terms"]
    expected = [("policy", "PromptAggregation")]
    if recipe == "ppo":
        token = "TokenAggregation"
        expected = [("policy", token), ("value", token), ("kl", "SampleAggregation"), ("entropy", token)]
    assert [(term["name"], term["aggregation"]) for term in terms] == expected


@pytest.mark.parametrize(
    ("choice", "other", "changes"),
    [
        (DAPO(), CISPO(), ["DAPO"]),
        (DAPO(clip_high=0.5), CISPO(), ["DAPO", "clip_high=0.5"]),
        (DAPO(clip_low=0.2, clip_high=0.5), DAPO(clip_low=0.2, clip_high=0.28), ["clip_high=0.5"]),
        (CISPO(max_ratio=4.0), CISPO(), ["max_ratio=4"]),
        (LoRA(targets=["q", "v"]), LoRA(), ["targets=[q,v]"]),
    ],
)
def test_a_label_lists_what_a_choice_changes(choice: DesignChoice, other: DesignChoice, changes: list[str]) -> None:
    assert choice.changes_from(other) == changes


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["loss=dapo", "scale=tiny"], {"loss": ["DAPO"]}),
        (["loss=gspo", "loss.clip_high=0.5"], {"loss": ["GSPO", "clip_high=0.5"]}),
        (["variant=loss_dapo"], {"loss": ["DAPO"]}),
        (["filter=zero_variance"], {}),
    ],
)
def test_overrides_of_an_axis_depart_from_the_recipe(overrides: list[str], changes: dict[str, list[str]]) -> None:
    recipe = load_recipe("scalerl", overrides)
    assert recipe.named is not None
    pairs = choice_differences(recipe.choices, recipe.named)
    assert {ours.axis: ours.changes_from(theirs) for ours, theirs in pairs} == changes


def test_overrides_of_settings_do_not_depart_from_the_recipe() -> None:
    assert load_recipe("scalerl", ["scale=tiny", "optimizer.lr=1e-3"]).named is None
