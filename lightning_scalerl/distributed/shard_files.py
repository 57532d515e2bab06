"""Parts of tensors in the folder of a checkpoint, written and read by torch.distributed.checkpoint.

Imported where a sharded checkpoint is written or read, and not before: importing torch's package takes 40 ms, which
every command would pay at its start. What the folder holds is said in `checkpoint_folder`.
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

from lightning_scalerl.distributed.checkpoint_folder import INDEX, checksums, outline, put
from sweeps.run.activity import activity


class _SavePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        activity.note("checkpoint")
        return super().resolve_data(write_item)


def write_shards(checkpoint: Mapping[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """Write this rank's part of every sharded tensor into a folder, and wait until all ranks' are on the disk.

    All ranks call it. Raised on all of them is what any of them has raised.

    Args:
        checkpoint: as Lightning makes it; its sharded tensors are those of `state_dict` and `optimizer_states`.
        folder: made if it is not there.
        group: process group of the ranks on their hosts.

    Returns:
        The checkpoint without what has been written, with the index of that: what `meta.pt` is to hold; on rank 0.

    Raises:
        OSError: a rank could not write.
    """
    sharded: dict[str, Tensor] = {}

    def without(value: Any, *path: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: without(each, *path, key) for key, each in value.items()}
        if isinstance(value, list):
            return [without(each, *path, number) for number, each in enumerate(value)]
        if isinstance(value, DTensor):
            sharded[_name(*path)] = value.detach()
            return None
        return value

    parted = ("state_dict", "optimizer_states")
    rest = {key: without(value, key) if key in parted else value for key, value in checkpoint.items()}
    writer = FileSystemWriter(folder)
    try:
        with checksums():
            written = save(sharded, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error
    if group is None or dist.get_rank() == 0:
        rest[INDEX] = _index(written)
    return rest


def _name(*path: Any) -> str:
    """Return the name of a tensor in the shards, which torch's own tools take apart at the dots."""
    return ".".join(map(str, path))


def _index(written: Metadata) -> dict[str, Any]:
    """Return torch's index as plain values, which are read without running anything."""
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for place, info in written.storage_data.items():
        parts.setdefault(place.fqn, []).append(
            (tuple(place.offset or ()), str(info.relative_path), int(info.offset), int(info.length))
        )
    index = {}
    for name, about in written.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in about.chunks}
        chunks = [(offsets, sizes[offsets], *where) for offsets, *where in parts[name]]
        index[name] = {"dtype": about.properties.dtype, "size": tuple(about.size), "chunks": chunks}
    return index


class _Reader(FileSystemReader):
    """Reader by our index in place of torch's pickle."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, about in self._index.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in about["chunks"]
            ]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=about["dtype"]), torch.Size(about["size"]), chunks
            )
            for number, (offsets, _, file, offset, length) in enumerate(about["chunks"]):
                places[MetadataIndex(name, torch.Size(offsets), number)] = _StorageInfo(file, offset, length)
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))


class _LoadPlanner(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Tensor:
        activity.note("checkpoint")
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor


@torch.no_grad()
def fill(folder: Path, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a folder in place, each rank by itself; of a sharded one this rank's part.

    Read at once is one part of one tensor, as the rank that saved it had it.

    Args:
        folder: of the checkpoint.
        checkpoint: what `outline` returned of it.
        tensors: to be filled, by their names in the shards, such as `state_dict.policy.model.lm_head.weight`; of the
            shapes of those.
    """
    if not tensors:
        return
    with warnings.catch_warnings():
        # That it loads in a single process: each does, since each knows what it needs.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        index = {name: checkpoint[INDEX][name] for name in tensors}
        load(dict(tensors), storage_reader=_Reader(folder, index), planner=_LoadPlanner(), no_dist=True)


def read_whole(folder: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint of a folder with all of its tensors whole on the host, as one file would hold it."""
    checkpoint = outline(folder, weights_only)
    tensors = {name: torch.empty(about["size"], dtype=about["dtype"]) for name, about in checkpoint[INDEX].items()}
    fill(folder, checkpoint, tensors)
    for name, tensor in tensors.items():
        put(checkpoint, name, tensor)
    return checkpoint
