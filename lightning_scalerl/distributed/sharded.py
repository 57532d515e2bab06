"""Lightning strategy that shards the model over the ranks of a run (FSDP2): no device holds all of it.

Each rank keeps a part of every weight, of its gradient and of the optimizer's state; the whole of one layer exists on a
device only while that layer computes. The gradients of all ranks are summed, not averaged: the denominators of a batch
are global (`rollout.Denominators`).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.distributed.checkpoint_folder import (
    META,
    fsync_folder,
    is_folder,
    move,
    outline,
    remove,
)

NAME = "fsdp2"
# Forms of a checkpoint: a folder to which each rank writes its own part, or one file that rank 0 gathers and writes.
CHECKPOINTS = ("shards", "whole")
# Timeout of ranks that wait for the slowest to write its part.
_PATIENCE = timedelta(hours=24)
# Name of a folder that becomes a checkpoint once it is whole.
_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}\.part")


class ShardedStrategy(ModelParallelStrategy):
    """`Trainer(strategy="fsdp2")`: weights, gradients and optimizer states sharded over all ranks, by FSDP2.

    A checkpoint is a folder in which each rank has written its own part (`checkpoint_folder`), so that no host holds
    all of it. A run goes on from it, and from a file that one device or DDP has written, under any strategy and on any
    number of devices.

    Args:
        timeout: of collective operations on the devices.
        checkpoint: "shards" for such a folder; "whole" for one file of whole tensors, as one device and DDP write it,
            gathered tensor by tensor on the first rank's host.
        tensor_parallel: how many neighbouring ranks split each layer between them, and train on the same rows; it
            divides the number of devices. The parts are sharded over the others.

    Raises:
        ConfigurationError: a form of checkpoints that there is not, or no number of ranks.
    """

    def __init__(
        self,
        timeout: timedelta | None = default_pg_timeout,
        checkpoint: str = "shards",
        tensor_parallel: int = 1,
    ) -> None:
        self.tensor_parallel = whole_number("strategy.tensor_parallel", tensor_parallel, 1)
        super().__init__("auto", tensor_parallel, save_distributed_checkpoint=False, timeout=timeout)
        if checkpoint not in CHECKPOINTS:
            raise ConfigurationError(f"strategy.checkpoint: {checkpoint!r} is unknown; valid: {', '.join(CHECKPOINTS)}")
        self.writes_shards = checkpoint == "shards"
        self._hosts: dist.ProcessGroup | None = None
        self._folder: Path | None = None  # that the checkpoint comes from which is being loaded

    def setup_environment(self) -> None:
        """Set the mesh to data-parallel groups of tensor-parallel partners, and make its process groups."""
        self._data_parallel_size = self.num_nodes * self.num_processes // self.tensor_parallel
        super().setup_environment()
        if self.tensor_parallel > 1:
            self.device_mesh._flatten()  # what is summed over all ranks, such as norms, is summed at once

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load a checkpoint when other strategies do: the model is sharded by then (`configure_model`)."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return True: the optimizer's state is loaded by `load_optimizer_state_dict`."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint in the form that was chosen. All ranks call it, and fail together.

        A folder is written beside its place, and renamed once all ranks' parts are on the disk; a path that ends in
        `.part` is the caller's to rename. What a killed save has left of an earlier try goes first.

        Raises:
            OSError: a rank could not write; nothing is in the checkpoint's place.
        """
        if not self.writes_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._hosts is None:  # on the hosts: the devices' group has their time limit
            self._hosts = dist.new_group(backend="gloo", timeout=_PATIENCE)
        from lightning_scalerl.distributed.shard_files import write_shards

        target = Path(self._from_first(str(filepath)))
        unfinished = target
        if target.suffix != ".part":
            if self.is_global_zero:
                _remove_parts(target)
            unfinished = target.with_name(self._from_first(f"{target.name}.{uuid.uuid4().hex[:8]}.part"))
        try:
            rest = write_shards(checkpoint, unfinished, self._hosts)
        except Exception:
            if self.is_global_zero:
                remove(unfinished)
            raise
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                usual = self.checkpoint_io
                # What is written in the background is not there yet when the folder takes its place.
                at_once = TorchCheckpointIO() if isinstance(usual, AsyncCheckpointIO) else usual
                at_once.save_checkpoint(rest, unfinished / META)
                self._put_in_place(unfinished, target)
            except Exception as error:
                failure = error
        said = self._from_first(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            with suppress(OSError):
                remove(unfinished)
            raise failure
        if said is not None:
            raise RuntimeError(f"checkpoint: rank 0 could not write it, {said}")

    @staticmethod
    def _put_in_place(unfinished: Path, target: Path) -> None:
        with (unfinished / META).open("rb") as handle:
            os.fsync(handle.fileno())
        fsync_folder(unfinished)
        if unfinished != target:
            move(unfinished, target)
        fsync_folder(target.parent)

    def _from_first(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._hosts)
        return values[0]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds, its tensors not read yet: each rank reads its own part of each.

        Those of a file are mapped, those of a folder are on the meta device.
        """
        self._folder = None
        if is_folder(checkpoint_path):
            self._folder = Path(checkpoint_path)
            return outline(self._folder, weights_only is not False)
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
        both = own.keys() & given.keys()
        for name in both:
            if not given[name].is_meta:
                own[name].copy_(part_like(given[name], own[name]))
        if self._folder is not None:
            from lightning_scalerl.distributed.shard_files import fill

            parts = {f"state_dict.{name}": own[name] for name in own if name in both and given[name].is_meta}
            fill(self._folder, checkpoint, parts)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's state."""
        for place, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            to_read: dict[str, Tensor] = {}
            parts: dict[int, dict[str, Any]] = {}
            for number, of_one in state["state"].items():
                parts[number] = {}
                for name, value in of_one.items():
                    if isinstance(value, Tensor) and value.is_meta:
                        key = f"optimizer_states.{place}.state.{number}.{name}"
                        parts[number][name] = to_read[key] = _blank(value, parameters[number])
                    else:
                        parts[number][name] = part_like(value, parameters[number])
            if self._folder is not None:
                from lightning_scalerl.distributed.shard_files import fill

                fill(self._folder, checkpoint, to_read)
            optimizer.load_state_dict({**state, "state": parts})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint: this rank's parts, or whole on rank 0's host. All ranks call it."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return state if self.writes_shards else gathered(state, self.global_rank == 0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as `lightning_module_state_dict` returns the weights. All ranks call it."""
        state = (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        if self.writes_shards:
            return state
        leads = self.global_rank == 0
        return {**state, "state": {number: gathered(of_one, leads) for number, of_one in state["state"].items()}}


def _remove_parts(target: Path) -> None:
    """Delete what killed saves have left beside a checkpoint's place: of the same name, or untouched for a day.

    A younger one of another name may be in the making, by another run that saves into this folder.
    """
    for path in target.parent.glob("*.part"):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir():
            touched = max((each.stat().st_mtime for each in path.iterdir()), default=path.stat().st_mtime)
            same = path.name.startswith(f"{target.name}.")
            if same or time.time() - touched > _PATIENCE.total_seconds():
                remove(path)


StrategyRegistry.register(
    NAME, ShardedStrategy, description="FSDP2 for ScaleRL: summed gradients, checkpoints in parts"
)


def check_divides(tensor_parallel: int, ranks: int) -> None:
    """Check that a run's ranks are divided by the number that splits each layer.

    Raises:
        ConfigurationError: they are not, or it is no number.
    """
    if ranks % whole_number("strategy.tensor_parallel", tensor_parallel, 1):
        raise ConfigurationError(
            f"strategy.tensor_parallel: {tensor_parallel} does not divide the {ranks} device(s) of the run; give a "
            "number that does, 1 for none, or more devices"
        )


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


def partners_of(module: nn.Module) -> int:
    """Return over how many tensor-parallel ranks each layer of a sharded module is split."""
    mesh = next(parameter for parameter in module.parameters() if isinstance(parameter, DTensor)).device_mesh
    return mesh.size(1) if mesh.ndim > 1 else 1


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor as one device would have it: of a sharded one all parts. All ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:
        # One dimension after the other, inner parts first: torch does so as well, but warns of it.
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


def part_like(value: Any, sample: Tensor) -> Any:
    """Return this rank's part of a whole tensor, laid out as `sample` is; other values as they are."""
    if not isinstance(sample, DTensor) or not isinstance(value, Tensor) or value.shape != sample.shape:
        return value
    # Every rank has the whole and keeps its own part of it; nothing is sent.
    _, place = own_part(sample)
    return DTensor.from_local(
        value[place].to(sample.device, copy=True),
        sample.device_mesh,
        sample.placements,
        run_check=False,
        shape=sample.shape,
        stride=sample.stride(),
    )


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...] | None]:
    """Return the part of a tensor that this rank keeps, and where it lies in the whole; None if that is what it is."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return tensor.to_local(), place


def _blank(value: Tensor, sample: Tensor) -> Tensor:
    """Return an empty tensor for one without data, laid out as `sample` is if the shapes are the same, else whole."""
    if isinstance(sample, DTensor) and value.shape == sample.shape:
        return torch.empty_like(sample, dtype=value.dtype)
    return torch.empty_like(value, device="cpu")


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
