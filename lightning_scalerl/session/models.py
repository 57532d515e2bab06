"""Models of a run: policy, critic and reference. All of them are created in this file.

The policy is created from the arguments of `ScaleRL`; critic and reference from the policy, once a fit has resolved its
choices. All have FP32 weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scalerl.axes.adapter import Adapter
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.distributed.sharded import gathered, is_sharded
from lightning_scalerl.model.adapter import adapt, described, has_adapter, keep_in, merge, plain_copy, unwrapped
from lightning_scalerl.model.files import WeightFiles, is_blank
from lightning_scalerl.model.head import computes_in_16_bit_only
from lightning_scalerl.model.load import (
    check_attention,
    check_weights,
    fingerprint,
    load_model,
    load_tokenizer,
    stop_tokens,
)
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.streamed import blank_or_whole
from lightning_scalerl.session.trials import try_out
from lightning_scalerl.task.arithmetic_base import is_arithmetic_base

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """Parts created from the arguments of `ScaleRL`, before there is a Trainer.

    Attributes:
        recipe, policy, tokenizer: as `ScaleRL` uses them.
        stop_tokens: token ids that end a completion.
        arguments: constructor arguments that a checkpoint can store as hyper-parameters, for `load_from_checkpoint`.
        files: with `streamed`, the files of the policy's weights, which are not read yet; a string is the reason why
            streaming was not possible. None without `streamed`.
    """

    recipe: Recipe
    policy: Policy
    tokenizer: Any
    stop_tokens: list[int]
    arguments: dict[str, Any]
    files: WeightFiles | str | None = None


def make(
    model: str | nn.Module | None,
    recipe: str | Recipe | None,
    overrides: Sequence[str],
    tokenizer: Any,
    config_dir: str | Path | None,
    streamed: bool = False,
) -> Made:
    """Make recipe, policy and tokenizer from the arguments of `ScaleRL`, which documents them.

    Raises:
        ConfigurationError: an argument is missing or unknown, cannot be loaded, or conflicts with another.
    """
    if recipe is None:
        raise ConfigurationError(
            "recipe: not given; the checkpoint of a run that was given a built recipe does not hold it: "
            "ScaleRL.load_from_checkpoint(path, recipe=...)"
        )
    if model is None:
        raise ConfigurationError(
            "model: not given; a folder, a hub id, or a model with its tokenizer. The checkpoint of a run that was "
            "given a model object holds weights only: ScaleRL.load_from_checkpoint(path, model=..., tokenizer=...)"
        )
    folders = () if config_dir is None else (config_dir,)
    built = load_recipe(recipe, overrides, folders) if isinstance(recipe, str) else recipe
    arguments: dict[str, Any] = {
        **({"model": model} if isinstance(model, str) else {}),
        "recipe": recipe if isinstance(recipe, str) else None,
        "recipe_name": built.name,
        "overrides": list(overrides),
        "config_dir": None if config_dir is None else str(config_dir),
    }
    if isinstance(model, str):
        tokenizer = tokenizer or load_tokenizer(model)
    elif tokenizer is None:
        raise ConfigurationError("tokenizer: a model object comes without one; pass tokenizer=")
    if not any(override.startswith("scale=") for override in overrides):
        built.check_scale(is_arithmetic_base(model))
    files: WeightFiles | str | None = None
    if isinstance(model, str) and streamed:
        model, files = blank_or_whole(model, built.choices.adapter)
    else:
        model = load_model(model) if isinstance(model, str) else unwrapped(model)
    check_weights(model)
    check_attention(model)
    policy = Policy(model, built.choices.precision, built.context.temperature)
    # Other models are tried later: once their weights are read, or on the device that can run them.
    if not isinstance(files, WeightFiles) and not computes_in_16_bit_only(model):
        try_out(policy, built)
    if has_adapter(model):
        policy.adapter = arguments["model_adapter"] = described(model)
    if built.choices.adapter.adapts:
        adapt_policy(policy, built.choices.adapter)
    return Made(built, policy, tokenizer, stop_tokens(model, tokenizer), arguments, files)


def adapt_policy(policy: Policy, choice: Adapter) -> None:
    """Add the adapter of axis `adapter` to a policy, once.

    Raises:
        ConfigurationError: the policy already has an adapter of another choice, or its model came with one.
    """
    wanted = choice.semantics()
    if policy.adapter is None and choice.adapts:
        adapt(policy.model, choice)
        policy.adapter = wanted
    elif policy.adapter is not None and policy.adapter != wanted:
        given = "choice" not in policy.adapter
        if given and not choice.adapts:
            return
        raise ConfigurationError(
            f"adapter: the model that was handed in has a LoRA adapter already ({_line(policy.adapter)}); choose "
            "adapter=none to train that one, or merge it first: model.merge_and_unload()"
            if given
            else f"adapter: this module's model has the adapter {_line(policy.adapter)}, and {_line(wanted)} is asked "
            "for now; give the choice that it has, or begin with another module"
        )


def _line(semantics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in semantics.items())


def plain_model(policy: Policy) -> nn.Module:
    """Return a copy of the policy's language model on the host, without adapter. If sharded, all ranks call this."""
    if policy.adapter is None:
        return copy.deepcopy(policy.model)
    state = policy.model.state_dict()
    return plain_copy(policy.model, merge(gathered(state, keep=True) if is_sharded(policy) else state, policy.model))


def make_critic(policy: Policy, choices: Choices, device: torch.device) -> ValueModel:
    """Make the critic of axis `critic` from the policy's body, on the device that trains it."""
    model = policy.model if policy.adapter is None else plain_model(policy)
    critic = ValueModel(model, choices.precision)
    return critic if is_blank(critic) else critic.to(device)


class Reference:
    """Frozen model to which axis `kl` measures the distance: the model that training started from.

    It is not an `nn.Module`: it is neither trained nor saved, so it must not be among the parameters of `ScaleRL`.

    Args:
        path: path of the model that the module was made from; None if it was made from a model object.
        files: files of its weights, if the policy starts without weights (`streamed`).
    """

    def __init__(self, path: str | None, files: WeightFiles | None = None) -> None:
        self._path = path
        self._files = files
        self._fingerprint: str | None = None
        self.policy: Policy | None = None

    def forget(self) -> None:
        """Drop the reference, so that the next fit copies the weights that it starts with."""
        self.policy = None

    def begin_with(self, policy: Policy, choices: Choices, device: torch.device) -> None:
        """Copy the policy's current weights, unless there already is a reference."""
        if self.policy is None:
            self._freeze(plain_model(policy), policy, choices, device)

    def restore(self, fingerprint_then: str | None, policy: Policy, choices: Choices, device: torch.device) -> None:
        """Restore the reference of a resumed run, even if this module was made with other weights.

        Args:
            fingerprint_then: fingerprint of the run's reference; None if the run measured no distance, so that its
                initial model is unknown.
            policy: gives the temperature of the log-probabilities.
            choices: give the precision, and whether a distance is measured at all.
            device: device that the reference computes on.

        Raises:
            ConfigurationError: the fingerprint matches neither this module's model nor the one at `path`.
        """
        if not choices.kl.where or self.fingerprint() == fingerprint_then:
            return
        if self._path is not None:
            model = load_model(self._path)
            if policy.adapter is not None:  # round it as the run's reference was rounded
                keep_in(model, choices.precision.policy_dtype)
                model.float()
            self._freeze(model, policy, choices, device)
            if fingerprint_then in (None, self.fingerprint()):
                return
        raise ConfigurationError(
            "kl: the reference is the model that training began with, and this module was made with other weights than "
            "the run of this checkpoint; go on with a module made as that run's was: ScaleRL(model=...), or "
            "ScaleRL.load_from_checkpoint(path) of the checkpoint whose weights it began with"
        )

    def fingerprint(self) -> str:
        """Return the reference's fingerprint; computed once, for the first checkpoint, because it reads all weights."""
        assert self.policy is not None
        if self._fingerprint is None:
            read = self._files.read if self._files is not None and is_blank(self.policy) else None
            self._fingerprint = fingerprint(self.policy.model, read)
        return self._fingerprint

    def _freeze(self, model: nn.Module, policy: Policy, choices: Choices, device: torch.device) -> None:
        self._fingerprint = None
        frozen = Policy(model, choices.precision, policy.temperature)
        self.policy = frozen.requires_grad_(False).eval()
        if not is_blank(frozen):
            self.policy.to(device)
