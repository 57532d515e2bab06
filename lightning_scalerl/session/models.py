"""Models of a run: policy, critic and reference. Every model that a run has is made in this file.

In come the arguments of `ScaleRL` and, once a fit has resolved its choices, the policy that it begins with; out go
modules with FP32 weights.
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
    """Parts that the arguments of `ScaleRL` give, before there is a Trainer.

    `stop_tokens` are the ids that end a completion; `arguments` those of the constructor that a checkpoint can hold, as
    hyper-parameters, for `load_from_checkpoint`.
    `files` hold the weights of a policy that has none yet; if that was asked for in vain, they say why.
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
    """Make recipe, policy and tokenizer from the arguments of `ScaleRL`, where they are described.

    Raises:
        ConfigurationError: one is missing, unknown, cannot be loaded, or does not go with another.
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
    # Else once it has weights to be run with, or is where it can be run.
    if not isinstance(files, WeightFiles) and not computes_in_16_bit_only(model):
        try_out(policy, built)
    if has_adapter(model):
        policy.adapter = arguments["model_adapter"] = described(model)
    if built.choices.adapter.adapts:
        adapt_policy(policy, built.choices.adapter)
    return Made(built, policy, tokenizer, stop_tokens(model, tokenizer), arguments, files)


def adapt_policy(policy: Policy, choice: Adapter) -> None:
    """Put the adapter of axis `adapter` into a policy, once.

    Raises:
        ConfigurationError: it has one of another choice, or came with one of its own.
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
    """Return a copy of the policy's language model on the host, without adapter. All ranks that share it call this."""
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
    """Frozen model from which axis `kl` measures the distance: the one that training began with.

    No `nn.Module`: it is neither trained nor saved, so it must not be among the parameters of `ScaleRL`.

    Args:
        path: of the model that the module was made from; None if it was made from a model object.
        files: that its weights are read from, where the policy begins without any.
    """

    def __init__(self, path: str | None, files: WeightFiles | None = None) -> None:
        self._path = path
        self._files = files
        self._fingerprint: str | None = None
        self.policy: Policy | None = None

    def forget(self) -> None:
        """Let the next fit take the weights that it begins with."""
        self.policy = None

    def begin_with(self, policy: Policy, choices: Choices, device: torch.device) -> None:
        """Take a copy of the policy's weights as they are now, unless there is a reference already."""
        if self.policy is None:
            self._freeze(plain_model(policy), policy, choices, device)

    def restore(self, fingerprint_then: str | None, policy: Policy, choices: Choices, device: torch.device) -> None:
        """Restore the reference that the resumed run began with, whatever weights this module was made with.

        Args:
            fingerprint_then: that model's; None if the run measured no distance, and began with who knows what.
            policy: gives the temperature of the log-probabilities.
            choices: give the precision, and whether a distance is measured at all.
            device: that the reference computes on.

        Raises:
            ConfigurationError: it is neither this module's nor the one that the module names.
        """
        if not choices.kl.where or self.fingerprint() == fingerprint_then:
            return
        if self._path is not None:
            model = load_model(self._path)
            if policy.adapter is not None:  # rounded as the run's own was
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
        """Return the reference's fingerprint; computed once and only for a checkpoint, as it reads all weights."""
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
