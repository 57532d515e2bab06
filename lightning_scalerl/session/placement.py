"""Placement of a run's models: read, adapt and check them, move them to their device, and shard them over ranks."""

from __future__ import annotations

import logging

from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.sharded import NAME, ShardedStrategy, is_sharded, partners_of, shard
from lightning_scalerl.model.adapter import store_linear_layers_in
from lightning_scalerl.model.files import has_no_data
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import can_recompute, on_host, recompute
from lightning_scalerl.model.tensor_parallel import check_tensor_parallel, parallelize
from lightning_scalerl.optim import AdamW
from lightning_scalerl.recipe import BatchSettings
from lightning_scalerl.session.models import Models, adapt_policy
from lightning_scalerl.session.streamed import names_in_files, read_parts, within
from lightning_scalerl.session.trials import check_model

_log = logging.getLogger(__name__)


def read_whole_model(models: Models, strategy: Strategy, choices: Choices) -> None:
    """Load the whole model on each rank if `streamed` was requested but this Trainer cannot stream it."""
    policy = models.policy
    if not has_no_data(policy):
        return
    if not isinstance(strategy, ShardedStrategy):
        models.why_not_streamed = 'only Trainer(strategy="fsdp2") shards it'
    elif choices.adapter.adapts:
        models.why_not_streamed = "it gets an adapter"
    else:
        return
    policy.model = models.load()
    check_model(policy, models.packed)
    policy.model.train(policy.training)


def prepare_adapter(policy: Policy, choices: Choices, fits: bool) -> None:
    """Add the adapter that the choices name, and cast an adapted model's frozen weights to the policy's dtype."""
    # A validate-only Trainer may omit the adapter callback that was used in training.
    if fits or choices.adapter.adapts:
        adapt_policy(policy, choices.adapter)
    if policy.adapter is not None and not is_sharded(policy):
        store_linear_layers_in(policy.model, choices.precision.policy_dtype)


def recompute_activations(models: Models, batch: BatchSettings) -> None:
    """Turn on gradient checkpointing if the recipe enables it; otherwise leave the model's setting as it is.

    Raises:
        ConfigurationError: the recipe enables gradient checkpointing, but the model's class does not support it.
    """
    model: nn.Module = models.policy.model
    if not batch.recomputes(sum(parameter.numel() for parameter in model.parameters())):
        return
    if can_recompute(model):
        recompute(model, on_host if batch.offload else None)
        if batch.offload and models.ranks.leads and models.device.type == "cpu":
            _log.warning("batch.offload: this run already trains on the host; offloading has no benefit")
    elif batch.recompute or batch.offload:
        setting = "offload" if batch.offload else "recompute"
        raise ConfigurationError(
            f"batch.{setting}: {type(model).__name__} has no gradient checkpointing; leave it out, and lower "
            "batch.micro_tokens where memory is short"
        )


def check_sharded(optimizer: AdamW, strategy: Strategy) -> None:
    """Check that the optimizer makes the same step on parts of weights as on whole weights, if the strategy shards.

    Raises:
        ConfigurationError: the steps differ, so that results would depend on the number of devices.
    """
    if isinstance(strategy, ShardedStrategy) and not optimizer.shards:
        raise ConfigurationError(
            f"optimizer: {type(optimizer).__name__} scales its states in blocks of a rank's part of a weight, so a "
            'sharded run would depend on the number of ranks; choose optimizer=adamw, or strategy="ddp"'
        )


def check_partners(policy: Policy, strategy: Strategy, dropout: bool) -> None:
    """Check that the model can be split among the ranks of a tensor-parallel group ("partners").

    Call this before ranks wait for each other, so that every rank raises the error instead of hanging.

    Raises:
        ConfigurationError: an earlier Trainer split the model differently, or the model cannot be split.
    """
    partners = strategy.tensor_parallel if isinstance(strategy, ShardedStrategy) else 1
    if is_sharded(policy) and isinstance(strategy, ShardedStrategy):
        if (before := partners_of(policy)) != partners:
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and an earlier fit has split the layers over {before}; "
                "give that again, or go on from a checkpoint with another module"
            )
    elif partners > 1:
        if policy.adapter is not None:
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and the model has an adapter, which is not split; give 1"
            )
        if dropout:  # partners would drop different parts of the same activations
            raise ConfigurationError(
                f"strategy.tensor_parallel: {partners}, and optimizer.dropout is on; give 1, or optimizer.dropout=false"
            )
        check_tensor_parallel(policy.model, partners)


def place_policy(models: Models) -> None:
    """Move the policy to this rank's device. Lightning would move it after `setup`, but the generator is built before.

    A model that will be sharded stays on the host until each rank moves its own part (`shard_models`).

    Raises:
        ConfigurationError: an earlier Trainer has sharded the policy, and this one does not shard.
    """
    policy, sharded = models.policy, models.ranks.sharded
    if is_sharded(policy) and not sharded:
        raise ConfigurationError(
            "strategy: an earlier fit has sharded this module's model over the ranks of its Trainer; go on under "
            f'strategy="{NAME}", or from a checkpoint with another module'
        )
    if not is_sharded(policy) and not has_no_data(policy):
        policy.to(models.creation_device)
        if not policy.tried and not sharded:
            check_model(policy, models.packed)


def shard_models(models: Models) -> None:
    """Shard policy, critic and reference over the ranks if the strategy shards; skip models already sharded."""
    policy, ranks, files = models.policy, models.ranks, models.files
    if not isinstance(ranks.strategy, ShardedStrategy):
        return
    mesh = ranks.strategy.device_mesh
    models.reference_fingerprint()  # compute it now: later only rank 0 asks for it, and the model is sharded
    blank = policy.model
    for root in (policy, models.critic, models.reference):
        if not isinstance(root, nn.Module) or is_sharded(root):
            continue
        names = names_in_files(root, blank, files) if has_no_data(root) and files is not None else None
        if ranks.tensor_parallel_size > 1:
            parallelize(root, mesh["tensor_parallel"])
        shard(root, mesh["data_parallel"])
        if names is not None and files is not None:
            read_parts(root, names, files, models.device)
        if root is policy and not policy.tried:
            root.to(models.device)
            within(root, lambda: check_model(policy, models.packed))
        if isinstance(root, Policy):
            root.agree = ranks.true_on_all
