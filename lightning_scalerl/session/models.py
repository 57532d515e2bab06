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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_scalerl.axes.adapter import Adapter
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.composer import load_recipe
from lightning_scalerl.distributed.sharded import NAME, ShardedStrategy, gathered, is_sharded, partners_of, shard
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
from lightning_scalerl.model.recompute import can_recompute, on_host, recompute
from lightning_scalerl.model.tensor_parallel import check_tensor_parallel, parallelize
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.streamed import blank_or_whole, names_in_files, read_parts, within
from lightning_scalerl.session.trials import try_out
from lightning_scalerl.task.arithmetic_base import is_arithmetic_base

if TYPE_CHECKING:
    from lightning_scalerl.session.parts import Parts

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


def prepare_adapter(module: Parts) -> None:
    """Put the adapter in that a callback chooses, and the frozen weights beside one into the type of the policy."""
    policy, choices = module.policy, module.choices
    # What validates a checkpoint may leave out the callback by which it was trained.
    if module.trainer.state.fn == "fit" or choices.adapter.adapts:
        adapt_policy(policy, choices.adapter)
    if policy.adapter is not None and not is_sharded(policy):
        keep_in(policy.model, choices.precision.policy_dtype)


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


def recompute_activations(module: Parts) -> None:
    """Turn gradient checkpointing on where the recipe asks for it; a model that has it already keeps it.

    Raises:
        ConfigurationError: it is asked for, and the model's class has none.
    """
    model: nn.Module = module.policy.model
    batch = module.recipe.batch
    if not batch.recomputes(sum(parameter.numel() for parameter in model.parameters())):
        return
    if can_recompute(model):
        recompute(model, on_host if batch.offload else None)
        if batch.offload and module.ranks.leads and module.trainer.strategy.root_device.type == "cpu":
            _log.warning("batch.offload: this run trains on the host already; nothing is gained by it here")
    elif batch.recompute or batch.offload:
        setting = "offload" if batch.offload else "recompute"
        raise ConfigurationError(
            f"batch.{setting}: {type(model).__name__} has no gradient checkpointing; leave it out, and lower "
            "batch.micro_tokens where memory is short"
        )


def made_on(module: Parts) -> torch.device:
    """Return the device on which a model of the run is made whole: the host where it is to be sharded."""
    return torch.device("cpu") if module.ranks.sharded else module.trainer.strategy.root_device


def check_partners(module: Parts) -> None:
    """Check that tensor-parallel partners can split the model; before ranks wait for each other, so that each says so.

    Raises:
        ConfigurationError: an earlier Trainer had other partners, or the model cannot be split between these.
    """
    strategy = module.trainer.strategy
    partners = strategy.tensor_parallel if isinstance(strategy, ShardedStrategy) else 1
    if is_sharded(module.policy) and isinstance(strategy, ShardedStrategy):
        if (before := partners_of(module.policy)) != partners:
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and an earlier fit has split the layers over {before}; "
                "give that again, or go on from a checkpoint with another module"
            )
    elif partners > 1:
        if module.policy.adapter is not None:
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and the model has an adapter, which is not split; give 1"
            )
        if module.recipe.optimizer.dropout:  # partners would drop unlike parts of what they all have
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and optimizer.dropout is on; give 1, or optimizer.dropout=false"
            )
        check_tensor_parallel(module.policy.model, partners)


def place(module: Parts) -> None:
    """Move the policy to this rank's device: Lightning does so after `setup`, and the generator copies it before.

    A model that is to be sharded stays on the host: each rank moves its own part (`shard_models`).

    Raises:
        ConfigurationError: an earlier Trainer has sharded the policy, and this one does not.
    """
    if is_sharded(module.policy) and not module.ranks.sharded:
        raise ConfigurationError(
            "strategy: an earlier fit has sharded this module's model over the ranks of its Trainer; go on under "
            f'strategy="{NAME}", or from a checkpoint with another module'
        )
    if not is_sharded(module.policy) and not is_blank(module.policy):
        module.policy.to(made_on(module))
        if not module.policy.tried and not module.ranks.sharded:
            try_out(module.policy, module.recipe)


def shard_models(module: Parts) -> None:
    """Shard policy, critic and reference over the ranks, those that are not yet, where the strategy does that."""
    if not module.ranks.sharded:
        return
    mesh = module.device_mesh["data_parallel"]
    if module.reference is not None:
        module.reference_model.fingerprint()  # while it is whole: a checkpoint asks for it on rank 0 alone
    blank = module.policy.model
    for root in (module.policy, module.critic, module.reference):
        if root is None or is_sharded(root):
            continue
        names = names_in_files(root, blank, module.files) if is_blank(root) and module.files is not None else None
        if module.ranks.partners > 1:
            parallelize(root, module.device_mesh["tensor_parallel"])
        shard(root, mesh)
        if names is not None and module.files is not None:
            read_parts(root, names, module.files, module.trainer.strategy.root_device)
        if root is module.policy and not module.policy.tried:
            root.to(module.trainer.strategy.root_device)
            within(root, lambda: try_out(module.policy, module.recipe))
        if isinstance(root, Policy):
            root.agree = module.ranks.all_would
