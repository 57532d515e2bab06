"""Parts of tensors in a checkpoint folder, written and read by torch.distributed.checkpoint.

Import this module only where a sharded checkpoint is written or read: importing torch's package takes 40 ms, which
every command would pay at its start. `checkpoint_folder` describes the folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_scalerl.distributed.checkpoint_folder import INDEX, checksums, load_outline, put
from sweeps.run.activity import activity


class _SavePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        activity.note("checkpoint")
        return super().resolve_data(write_item)


def write_shards(checkpoint: Mapping[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """Write this rank's part of every sharded tensor into a folder, and wait until all ranks have done so.

    All ranks call it. An error on one rank is raised on all ranks.

    Args:
        checkpoint: from Lightning; its sharded tensors are in `state_dict` and `optimizer_states`.
        folder: created if it does not exist.
        group: gloo process group of all ranks.

    Returns:
        On rank 0, the content of `meta.pt`: the checkpoint without the sharded tensors, and their index.

    Raises:
        OSError: a rank could not write.
    """
    sharded: dict[str, Tensor] = {}

    def without_sharded(value: Any, *path: Any) -> Any:
        """Move the sharded tensors in a value into `sharded`, and leave None in their place."""
        if isinstance(value, Mapping):
            return {key: without_sharded(entry, *path, key) for key, entry in value.items()}
        if isinstance(value, list):
            return [without_sharded(entry, *path, number) for number, entry in enumerate(value)]
        if isinstance(value, DTensor):
            sharded[_name(*path)] = value.detach()
            return None
        return value

    may_be_sharded = ("state_dict", "optimizer_states")
    meta = {key: without_sharded(value, key) if key in may_be_sharded else value for key, value in checkpoint.items()}
    writer = FileSystemWriter(folder)
    try:
        with checksums():
            saved_metadata = save(sharded, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error
    if group is None or dist.get_rank() == 0:
        meta[INDEX] = _index(saved_metadata)
    return meta


def _name(*path: Any) -> str:
    """Return the name of a tensor in the shards; torch's own tools split it at the dots."""
    return ".".join(map(str, path))


def _index(saved_metadata: Metadata) -> dict[str, Any]:
    """Return torch's index as plain values, which can be loaded without running code."""
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for tensor_index, info in saved_metadata.storage_data.items():
        parts.setdefault(tensor_index.fqn, []).append(
            (tuple(tensor_index.offset or ()), str(info.relative_path), int(info.offset), int(info.length))
        )
    index = {}
    for name, metadata in saved_metadata.state_dict_metadata.items():
        assert isinstance(metadata, TensorStorageMetadata)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in metadata.chunks}
        chunks = [(offsets, sizes[offsets], *location) for offsets, *location in parts[name]]
        index[name] = {"dtype": metadata.properties.dtype, "size": tuple(metadata.size), "chunks": chunks}
    return index


class _Reader(FileSystemReader):
    """Reader that uses our index instead of torch's, which is a pickle."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in self._index.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in entry["chunks"]
            ]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=entry["dtype"]), torch.Size(entry["size"]), chunks
            )
            for number, (offsets, _, file, offset, length) in enumerate(entry["chunks"]):
                storage[MetadataIndex(name, torch.Size(offsets), number)] = _StorageInfo(file, offset, length)
        return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))


class _LoadPlanner(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Tensor:
        activity.note("checkpoint")
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor


@torch.no_grad()
def read_into(folder: Path, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Read tensors from a checkpoint folder in place; for a sharded tensor, read only this rank's part.

    Each rank reads by itself. At most one part of one tensor, as a rank saved it, is in memory at a time.

    Args:
        folder: the checkpoint's folder.
        checkpoint: the result of `load_outline` for it.
        tensors: the tensors to fill, by name in the shards, such as `state_dict.policy.model.lm_head.weight`. Each has
            the shape of the saved tensor.
    """
    if not tensors:
        return
    with warnings.catch_warnings():
        # torch warns about loading without process groups, which is intended here: each rank knows which parts it
        # needs.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        index = {name: checkpoint[INDEX][name] for name in tensors}
        load(dict(tensors), storage_reader=_Reader(folder, index), planner=_LoadPlanner(), no_dist=True)


def read_whole(folder: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return a folder's checkpoint with all tensors whole on the host, as in a checkpoint of one file."""
    checkpoint = load_outline(folder, weights_only)
    tensors = {name: torch.empty(entry["size"], dtype=entry["dtype"]) for name, entry in checkpoint[INDEX].items()}
    read_into(folder, checkpoint, tensors)
    for name, tensor in tensors.items():
        put(checkpoint, name, tensor)
    return checkpoint
