"""All settings of a run with defaults filled in, versions, commit and seed, stored in `semantics.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_scalerl.choices import Choices
from lightning_scalerl.measure.mechanism import choice_differences
from lightning_scalerl.model.adapter import is_adapter_weight
from lightning_scalerl.optim import AdamW
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.task.base import NoReward, RewardScale
from lightning_scalerl.update.terms import terms
from sweeps.run import provenance
from sweeps.run.journal import SEMANTICS_FILE
from sweeps.run.spec import digest

# Order of the steps from rewards to advantages. The ScaleRL paper leaves open whether its filter comes before its
# normalization.
ORDER = ["reward", "length control", "filter", "advantage", "normalization", "truncated"]
PACKAGES = ("lightning-scalerl", "torch", "lightning", "transformers", "numpy", "hydra-core")


def resolved_semantics(module: Any) -> dict[str, Any]:
    """Return all settings of a run, with defaults filled in, as plain values for `semantics.json`."""
    return {
        **resolved_choices(module.recipe, module.choices),
        "departs_from_recipe_on": list(_changes_by_axis(module)),
        "context": {
            **asdict(module.recipe.context),
            "top_p": 1.0,
            "top_k": None,
            "stop_tokens": module.stop_tokens,
        },
        "seed": module.seed,
        "task": _task_of(module),
        "model": _model_of(module),
        "parameters": parameter_count(module),
        **adapter_entries(module),
        **({"teacher": module.models.teacher} if module.models.teacher else {}),
        "versions": versions(),
        "commit": commit(),
    }


def adapter_entries(module: Any) -> dict[str, Any]:
    """Return the number of trained parameters of a policy with an adapter; empty without one.

    An adapter that was loaded with the model, rather than chosen by the recipe, is described as `model_adapter`.
    """
    policy = module.policy
    if policy.adapter is None:
        return {}
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    loaded = {} if module.choices.adapter.adapts else {"model_adapter": dict(policy.adapter)}
    return {"trained_parameters": trained, **loaded}


def resolved_choices(recipe: Recipe, choices: Choices) -> dict[str, Any]:
    """Return choices and settings with every default resolved; loggers get these as hyperparameters."""
    return {
        "recipe": recipe.name,
        "choices": {axis: choice.semantics() for axis, choice in choices.items()},
        "optimizer": {
            "name": type(recipe.optimizer).__name__,
            **asdict(recipe.optimizer),
            "clip": "none" if recipe.optimizer.clip_norm is None else "global norm",
            **recipe.optimizer.types(),
        },
        "schedule": {"name": type(recipe.schedule).__name__, **asdict(recipe.schedule)},
        "batch": asdict(recipe.batch),
        "context": asdict(recipe.context),
        "cost_model": recipe.cost_model.semantics(),
        "driver": {"name": type(recipe.driver).__name__, **asdict(recipe.driver)},
        "reward": reward_of(recipe.reward),
        "health": asdict(recipe.health),
        "chat": asdict(recipe.chat),
        "verify": asdict(recipe.verify),
        **({} if recipe.compute.judge is None else {"compute": asdict(recipe.compute)}),
        **({"environment": recipe.environment.semantics()} if recipe.environment.acts else {}),
        "order": ORDER,
        "epochs_per_batch": choices.epochs.count,
        "terms": [{"name": term.name, "aggregation": type(term.aggregation).__name__} for term in terms(choices)],
    }


def describe_choices(recipe: Recipe, choices: Choices) -> list[str]:
    """Return lines that describe the resolved choices and settings; printed at the start of a run."""
    meaning = {axis: choice.semantics() for axis, choice in choices.items()}
    neutral = {axis for axis, choice in choices.items() if choice.neutral == meaning[axis]}
    lines = [f"{axis}: {_choice_line(values)}" for axis, values in meaning.items() if axis not in neutral]
    settings = (
        f"reward {_reward_line(recipe.reward)}",
        f"batch {recipe.batch.prompts} x {recipe.batch.completions} (prompts x completions)",
        f"at most {recipe.context.max_new_tokens} new tokens at temperature {recipe.context.temperature:g}",
        f"learning rate {recipe.optimizer.lr:g}, {type(recipe.schedule).__name__}",
        *(() if type(recipe.optimizer) is AdamW else (f"optimizer {type(recipe.optimizer).__name__}",)),
    )
    return [
        *lines,
        f"neutral: {', '.join(sorted(neutral)) or 'none'}",
        f"order: {' -> '.join(ORDER)}",
        f"settings: {'; '.join(settings)}",
    ]


def reward_of(reward: RewardScale) -> dict[str, Any]:
    """Return the scale of the training reward."""
    if isinstance(reward, NoReward):
        return {"choice": "NoReward", "of": "0 for every completion; before length control"}
    return {**asdict(reward), "of": "the verifier's 0 to 1; before length control"}


def _reward_line(reward: RewardScale) -> str:
    return "none" if isinstance(reward, NoReward) else f"{reward.incorrect:g} to {reward.correct:g}"


def _choice_line(values: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{name}={value}" for name, value in values.items() if name != "choice")
    return f"{values['choice']} ({parameters})" if parameters else str(values["choice"])


def write_semantics(run_dir: Path, module: Any) -> None:
    """Write `semantics.json` into the run's directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / SEMANTICS_FILE).write_text(json.dumps(resolved_semantics(module), indent=1, sort_keys=True))


def header_fields(module: Any, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the journal's header, which identifies the run.

    Fields of `identity`, which a study gives to its members, override the defaults for a run outside of a study.
    """
    local = {
        "run": "local",
        "curve": "local",
        "recipe": default_label(module),
        "seed": module.seed,
        "baseline": module.recipe.name,
        "departures": {axis: ", ".join(changes) for axis, changes in _changes_by_axis(module).items()},
        "settings": {},
        "parameters": parameter_count(module),
        "device": module.device.type,
        "ranks": module.ranks.count,
        "commit": commit(),
        "versions": versions(),
    }
    return {**local, **identity}


def default_label(module: Any) -> str:
    """Return the default label of a run: the recipe's name and the changes to the recipe, as in the labels of a study.

    Examples: `scalerl+loss=DAPO+loss.clip_high=0.5`, `scalerl+loss.max_ratio=4`.
    """
    parts = [
        f"{axis}.{part}" if "=" in part else f"{axis}={part}"
        for axis, changes in _changes_by_axis(module).items()
        for part in changes
    ]
    return "+".join([module.recipe.name, *parts])


def _changes_by_axis(module: Any) -> dict[str, list[str]]:
    """Return the changes that a run makes to its recipe, through callbacks or overrides, by axis."""
    reference_choices = module.recipe.named or module.recipe.choices
    return {
        ours.axis: ours.changes_from(theirs) for ours, theirs in choice_differences(module.choices, reference_choices)
    }


def _task_of(module: Any) -> dict[str, Any]:
    name, prompts, identity = module.continuation.run_settings["task"]
    return {"name": name, "prompts": len(prompts), "digest": digest(repr((prompts, identity)))}


def _model_of(module: Any) -> str | None:
    """Return the model's folder or hub id; None for a model that was given as an object."""
    path = module.models.path
    return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path


def parameter_count(module: Any) -> int:
    """Return the number of the policy's parameters without those of an adapter: the size of the model itself."""
    named_parameters = module.policy.named_parameters()
    return sum(parameter.numel() for name, parameter in named_parameters if not is_adapter_weight(name))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    return provenance.versions(PACKAGES)


def commit() -> str:
    """Return the code's commit, with `+changes` if the working tree is dirty; "unknown" outside a checkout."""
    checkout = provenance.checkout()
    return "unknown" if checkout is None else checkout.commit[:12] + ("+changes" if checkout.diff else "")
