"""Lightning strategy that shards the model over the ranks of a run (FSDP2), so that no device holds all of it.

Each rank keeps a part of every weight, gradient and optimizer state. A layer is whole on a device only while it
computes. Gradients are summed over ranks, not averaged, because the denominators of a batch are global
(`rollout.Denominators`).
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
    load_outline,
    move,
    remove,
)

NAME = "fsdp2"
# Forms of a checkpoint: a folder to which each rank writes its part, or a single file that rank 0 gathers and writes.
CHECKPOINTS = ("shards", "whole")
# Timeout of ranks that wait for the slowest rank to write its part.
_WAIT_TIMEOUT = timedelta(hours=24)
# Name of a folder that is renamed to a checkpoint once it is complete.
_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}\.part")


class ShardedStrategy(ModelParallelStrategy):
    """`Trainer(strategy="fsdp2")`: weights, gradients and optimizer states are sharded over all ranks by FSDP2.

    By default a checkpoint is a folder in which each rank writes its part (`checkpoint_folder`), so that no host needs
    memory for the whole. A run can resume from such a folder, or from the file of a single device or DDP, with any
    strategy and any number of devices.

    Args:
        timeout: timeout of collective operations on the devices.
        checkpoint: "shards" for such a folder; "whole" for one file of whole tensors, as a single device or DDP writes
            it. The tensors are gathered one by one on the host of rank 0.
        tensor_parallel: number of neighbouring ranks that split each layer between them and train on the same rows. It
            must divide the number of devices. The resulting parts are then sharded over the data-parallel ranks.

    Raises:
        ConfigurationError: `checkpoint` or `tensor_parallel` is invalid.
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
        self._folder: Path | None = None  # folder of the checkpoint that is being loaded; None for a single file

    def setup_environment(self) -> None:
        """Set up the device mesh, data-parallel x tensor-parallel, and its process groups."""
        self._data_parallel_size = self.num_nodes * self.num_processes // self.tensor_parallel
        super().setup_environment()
        if self.tensor_parallel > 1:
            self.device_mesh._flatten()  # so that sums over all ranks, such as norms, need one reduction

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always False: checkpoints load at the usual time, because `configure_model` has sharded the model by then."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Always True, so that Lightning calls `load_optimizer_state_dict`."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint in the chosen form. All ranks call it; an error on one rank is raised on all.

        A folder is written under a temporary name next to its final path, and renamed once all parts are on disk. If
        the path ends in `.part`, it is left to the caller to rename it. Remains of earlier saves that were killed are
        deleted first.

        Raises:
            OSError: a rank could not write; the final path was not created.
        """
        if not self.writes_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._hosts is None:  # a group with a long timeout: ranks wait here for the slowest disk
            self._hosts = dist.new_group(backend="gloo", timeout=_WAIT_TIMEOUT)
        from lightning_scalerl.distributed.shard_files import write_shards

        # All ranks write into the folder of rank 0.
        target = Path(self._from_rank_0(str(filepath)))
        unfinished = target
        if target.suffix != ".part":
            if self.is_global_zero:
                _remove_parts(target)
            unfinished = target.with_name(self._from_rank_0(f"{target.name}.{uuid.uuid4().hex[:8]}.part"))
        try:
            meta = write_shards(checkpoint, unfinished, self._hosts)
        except Exception:
            if self.is_global_zero:
                remove(unfinished)
            raise
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                configured_io = self.checkpoint_io
                # A file that is written in the background would not exist yet when the folder is renamed.
                synchronous_io = TorchCheckpointIO() if isinstance(configured_io, AsyncCheckpointIO) else configured_io
                synchronous_io.save_checkpoint(meta, unfinished / META)
                self._publish(unfinished, target)
            except Exception as error:
                failure = error
        message = self._from_rank_0(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            with suppress(OSError):
                remove(unfinished)
            raise failure
        if message is not None:
            raise RuntimeError(f"checkpoint: rank 0 could not write it, {message}")

    @staticmethod
    def _publish(unfinished: Path, target: Path) -> None:
        with (unfinished / META).open("rb") as handle:
            os.fsync(handle.fileno())
        fsync_folder(unfinished)
        if unfinished != target:
            move(unfinished, target)
        fsync_folder(target.parent)

    def _from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._hosts)
        return values[0]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint whose tensors are not read yet, so that each rank reads only its part of each.

        Tensors of a file are memory-mapped. Sharded tensors of a folder are on the meta device.
        """
        self._folder = None
        if is_folder(checkpoint_path):
            self._folder = Path(checkpoint_path)
            return load_outline(self._folder, weights_only is not False)
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
        weights = self.lightning_module.state_dict()
        saved = checkpoint["state_dict"]
        if strict and saved.keys() != weights.keys():
            missing, unexpected = sorted(weights.keys() - saved.keys()), sorted(saved.keys() - weights.keys())
            raise RuntimeError(f"checkpoint: weights {missing[:5]} are missing, {unexpected[:5]} belong to no module")
        common_names = weights.keys() & saved.keys()
        for name in common_names:
            if not saved[name].is_meta:
                weights[name].copy_(shard_like(saved[name], weights[name]))
        if self._folder is not None:
            from lightning_scalerl.distributed.shard_files import read_into

            parts = {
                f"state_dict.{name}": weights[name] for name in weights if name in common_names and saved[name].is_meta
            }
            read_into(self._folder, checkpoint, parts)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's state; do nothing if the checkpoint has none (a fresh optimizer)."""
        if not checkpoint["optimizer_states"]:
            return
        for index, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            to_read: dict[str, Tensor] = {}
            parts: dict[int, dict[str, Any]] = {}
            for number, parameter_state in state["state"].items():
                parts[number] = {}
                for name, value in parameter_state.items():
                    if isinstance(value, Tensor) and value.is_meta:
                        key = f"optimizer_states.{index}.state.{number}.{name}"
                        parts[number][name] = to_read[key] = _blank(value, parameters[number])
                    else:
                        parts[number][name] = shard_like(value, parameters[number])
            if self._folder is not None:
                from lightning_scalerl.distributed.shard_files import read_into

                read_into(self._folder, checkpoint, to_read)
            optimizer.load_state_dict({**state, "state": parts})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint: this rank's parts, or whole tensors on rank 0. All ranks call it."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return state if self.writes_shards else gather_state(state, self.global_rank == 0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state in the form of `lightning_module_state_dict`. All ranks call it."""
        state = (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        if self.writes_shards:
            return state
        keep = self.global_rank == 0
        return {**state, "state": {number: gather_state(tensors, keep) for number, tensors in state["state"].items()}}


def _remove_parts(target: Path) -> None:
    """Delete folders of interrupted saves next to a checkpoint, if they have its name or are older than a day.

    A newer folder with another name may belong to another run that is saving into the same folder.
    """
    for path in target.parent.glob("*.part"):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir():
            last_modified = max((file.stat().st_mtime for file in path.iterdir()), default=path.stat().st_mtime)
            same_name = path.name.startswith(f"{target.name}.")
            if same_name or time.time() - last_modified > _WAIT_TIMEOUT.total_seconds():
                remove(path)


StrategyRegistry.register(
    NAME, ShardedStrategy, description="FSDP2 for ScaleRL: summed gradients, checkpoints in parts"
)


def check_divides(tensor_parallel: int, ranks: int) -> None:
    """Check that `tensor_parallel` divides the number of ranks.

    Raises:
        ConfigurationError: `tensor_parallel` does not divide it, or is not a whole number of 1 or more.
    """
    if ranks % whole_number("strategy.tensor_parallel", tensor_parallel, 1):
        raise ConfigurationError(
            f"strategy.tensor_parallel: {tensor_parallel} does not divide the {ranks} device(s) of the run; give a "
            "number that does, 1 for none, or more devices"
        )


def shard(root: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module over a one-dimensional mesh: each repeated block separately, the remaining weights with the root.

    Forward passes must call the root itself, because the root's own weights (embedding, head) are only gathered while
    its `forward` runs.

    Args:
        root: `Policy` or `ValueModel`, with weights on the host.
        mesh: the ranks that share it.
    """
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    # Reshard the root too. If it stayed whole after a pass without a backward pass, the next pass would use stale
    # weights.
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients instead of averaging them: no division by FSDP2, and none in the reduction operation.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the members of its outermost `ModuleList`s.

    A list inside a block, such as the experts of a layer, is part of that block.
    """
    members: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                members.extend(child)
            else:
                collect(child)

    collect(root)
    return members


def is_sharded(module: nn.Module) -> bool:
    """Return whether `shard` was applied to the module."""
    return isinstance(module, FSDPModule)


def partners_of(module: nn.Module) -> int:
    """Return the number of tensor-parallel ranks that split each layer of a sharded module."""
    mesh = next(parameter for parameter in module.parameters() if isinstance(parameter, DTensor)).device_mesh
    return mesh.size(1) if mesh.ndim > 1 else 1


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its parts gathered; other tensors are unchanged. All ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:
        # Gather one dimension at a time, the inner one first. torch does the same, but with a warning.
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


def shard_like(value: Any, sample: Tensor) -> Any:
    """Return this rank's part of a whole tensor, in the layout of `sample`; other values are unchanged."""
    if not isinstance(sample, DTensor) or not isinstance(value, Tensor) or value.shape != sample.shape:
        return value
    # Every rank has the whole tensor and takes its own part, so nothing is sent.
    _, slices = local_shard(sample)
    return DTensor.from_local(
        value[slices].to(sample.device, copy=True),
        sample.device_mesh,
        sample.placements,
        run_check=False,
        shape=sample.shape,
        stride=sample.stride(),
    )


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...] | None]:
    """Return this rank's part of a tensor and its slices in the whole; the slices are None for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return tensor.to_local(), slices


def _blank(value: Tensor, sample: Tensor) -> Tensor:
    """Return an empty tensor for a meta tensor: in the layout of `sample` if the shapes agree, else a whole tensor."""
    if isinstance(sample, DTensor) and value.shape == sample.shape:
        return torch.empty_like(sample, dtype=value.dtype)
    return torch.empty_like(value, device="cpu")


@torch.no_grad()
def gather_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the tensors of a state dict on the host, one after the other. All ranks call it.

    Args:
        state: tensors by name, with the same names in the same order on all ranks.
        keep: whether this rank returns the tensors; the other ranks only take part and return an empty dict.
    """
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        whole = whole_tensor(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
        if keep:
            tensors[name] = whole
    return tensors
