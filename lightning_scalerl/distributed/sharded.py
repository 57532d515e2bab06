"""Lightning strategy that shards the model over the ranks of a run (FSDP2): no device holds all of it.

Each rank keeps a part of every weight, of its gradient and of the optimizer's state; the whole of one layer exists on a
device only while that layer computes. The gradients of all ranks are summed, not averaged: the denominators of a batch
are global (`rollout.Denominators`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

NAME = "fsdp2"


class ShardedStrategy(ModelParallelStrategy):
    """`Trainer(strategy="fsdp2")`: weights, gradients and optimizer states sharded over all ranks, by FSDP2.

    A checkpoint is one file of whole tensors, as one device and DDP write it, so that a run goes on under any strategy
    and on any number of devices. It is gathered tensor by tensor on the first rank's host.

    Args:
        timeout: of collective operations on the devices.
    """

    def __init__(self, timeout: timedelta | None = default_pg_timeout) -> None:
        # Lightning's mesh has a tensor-parallel dimension; of size one it is not seen.
        super().__init__("auto", 1, save_distributed_checkpoint=False, timeout=timeout)

    def setup_environment(self) -> None:
        """Set the mesh to one data-parallel group of all ranks, and make its process group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load a checkpoint when other strategies do: the model is sharded by then (`configure_model`)."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return True: the optimizer's state is loaded by `load_optimizer_state_dict`."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what the file holds, mapped and not read: each rank reads its own part of each tensor."""
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, "cpu", weights_only=weights_only is not False, mmap=True
        )
        return checkpoint

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of each weight.

        Raises:
            RuntimeError: names or shapes differ from the model's.
        """
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        given = checkpoint["state_dict"]
        if strict and given.keys() != own.keys():
            missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            raise RuntimeError(f"checkpoint: weights {missing[:5]} are missing, {unexpected[:5]} belong to no module")
        for name in own.keys() & given.keys():
            own[name].copy_(part_like(given[name], own[name]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts = {
                number: {name: part_like(value, parameters[number]) for name, value in of_one.items()}
                for number, of_one in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return all weights, whole and on the host, on rank 0; nothing on the others. All ranks call it."""
        assert self.lightning_module is not None
        return gathered(self.lightning_module.state_dict(), self.global_rank == 0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, whole and on the host, on rank 0. All ranks call it."""
        state = (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        leads = self.global_rank == 0
        return {**state, "state": {number: gathered(of_one, leads) for number, of_one in state["state"].items()}}


StrategyRegistry.register(NAME, ShardedStrategy, description="FSDP2 for ScaleRL: summed gradients, whole checkpoints")


def shard(root: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module over a mesh of one dimension: each repeated block by itself, then the rest with the root.

    The root must be what is called: its own weights (embedding, head) are whole while its `forward` runs.

    Args:
        root: `Policy` or `ValueModel`; its weights are on the host.
        mesh: of the ranks that share it.
    """
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    # Also the root: left whole after a pass without a backward pass, it would be used again as it was then, stale.
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # A sum in place of the mean: divided by nothing, and by a reduction that does not divide by itself.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the members of its lists of modules.

    A list inside of a member (the experts of a layer) belongs to that member.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                look(child)

    look(root)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether the module has been through `shard`."""
    return isinstance(module, FSDPModule)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor as one device would have it: of a sharded one all parts. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(value: Any, sample: Tensor) -> Any:
    """Return this rank's part of a whole tensor, laid out as `sample` is; other values as they are."""
    if not isinstance(sample, DTensor) or not isinstance(value, Tensor) or value.shape != sample.shape:
        return value
    # None: every rank has the whole and keeps its own part of it; nothing is sent.
    return distribute_tensor(value.to(sample.device), sample.device_mesh, sample.placements, src_data_rank=None)


@torch.no_grad()
def gathered(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return a state dict's tensors whole and on the host, one after the other. All ranks call it.

    Args:
        state: names and tensors, the same names in the same order on all ranks.
        keep: whether this rank wants them; the others only take part.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        one = whole_tensor(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
        if keep:
            found[name] = one
    return found
