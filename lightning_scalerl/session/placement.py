"""Placement of a run's models: reads, adapts and checks them, moves them to their device, shards them over ranks."""

from __future__ import annotations

import logging

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.distributed.sharded import NAME, ShardedStrategy, is_sharded, partners_of, shard
from lightning_scalerl.model.adapter import keep_in
from lightning_scalerl.model.files import is_blank
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import can_recompute, on_host, recompute
from lightning_scalerl.model.tensor_parallel import check_tensor_parallel, parallelize
from lightning_scalerl.session.models import adapt_policy
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.session.streamed import names_in_files, read_parts, within
from lightning_scalerl.session.trials import try_out

_log = logging.getLogger(__name__)


def read_whole_model(module: Parts) -> None:
    """Load the whole model on each rank if `streamed` was requested but this Trainer cannot stream it."""
    if not is_blank(module.policy):
        return
    if not isinstance(module.trainer.strategy, ShardedStrategy):
        module.read_whole = 'Trainer(strategy="fsdp2") alone shards it'
    elif module.choices.adapter.adapts:
        module.read_whole = "an adapter is put into it"
    else:
        return
    module.policy.model = load_model(module.arguments["model"])
    try_out(module.policy, module.recipe)
    module.policy.model.train(module.policy.training)


def prepare_adapter(module: Parts) -> None:
    """Add the adapter that a callback chooses, and cast an adapted model's frozen weights to the policy's dtype."""
    policy, choices = module.policy, module.choices
    # A validate-only Trainer may omit the adapter callback that was used in training.
    if module.trainer.state.fn == "fit" or choices.adapter.adapts:
        adapt_policy(policy, choices.adapter)
    if policy.adapter is not None and not is_sharded(policy):
        keep_in(policy.model, choices.precision.policy_dtype)


def recompute_activations(module: Parts) -> None:
    """Turn on gradient checkpointing if the recipe enables it; a model that already uses it keeps it.

    Raises:
        ConfigurationError: the recipe enables it, but the model's class does not support it.
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
    """Return the device on which a whole model is created: the host if it will be sharded, else the rank's device."""
    return torch.device("cpu") if module.ranks.sharded else module.trainer.strategy.root_device


def check_partners(module: Parts) -> None:
    """Check that tensor-parallel partners can split the model.

    Call this before ranks wait for each other, so that every rank raises the error instead of hanging.

    Raises:
        ConfigurationError: an earlier Trainer had other partners, or the model cannot be split among the current ones.
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
        if module.recipe.optimizer.dropout:  # partners would drop different parts of activations that they share
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and optimizer.dropout is on; give 1, or optimizer.dropout=false"
            )
        check_tensor_parallel(module.policy.model, partners)


def place(module: Parts) -> None:
    """Move the policy to this rank's device. Lightning does so only after `setup`, and the generator copies it before.

    A model that will be sharded stays on the host until each rank moves its own part (`shard_models`).

    Raises:
        ConfigurationError: an earlier Trainer has sharded the policy, and this one does not shard.
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
    """Shard policy, critic and reference over the ranks if the strategy shards; skip models that already are."""
    if not module.ranks.sharded:
        return
    mesh = module.device_mesh["data_parallel"]
    if module.reference is not None:
        module.reference_model.fingerprint()  # compute it while the model is whole: later only rank 0 asks for it
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
