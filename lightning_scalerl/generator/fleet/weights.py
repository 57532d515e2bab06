"""Published weights: one file per version, in the generators' dtypes, written in buckets of a fixed size.

The file is in safetensors format, in shared memory if there is room. Engines map the file, also engines that start
later, and checkpoints read it. Besides the file, the sender holds at most one bucket in host memory. A digest covers
all bytes of the file, and each reader reports the digest that it computed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model.head import output_head

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20
# File that marks a folder of weights as in use.
LOCK = "lock"
# Names of dtypes in the header of a safetensors file.
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Published:
    """Weights that were published once: their file on the sender's node, with its digest.

    `number` is different for every publication, even if weights or version are the same.
    """

    number: int
    version: int
    digest: str
    path: Path

    def read(self) -> dict[str, Tensor]:
        """Return the tensors, memory-mapped. Works only on the node that has the file."""
        from safetensors.torch import load_file

        return dict(load_file(self.path))

    def digest_of_file(self) -> str:
        """Return the digest of the file's current content."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class PublishedTypes:
    """Dtypes in which tensors are published: those to which the generator would cast them.

    Args:
        model: the trainer's model.
        precision: the run's precision. None if the generator has no precision; dtypes then stay unchanged.
    """

    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        self._policy = None if precision is None else precision.policy_dtype
        self._head: torch.dtype | None = None
        self._of_head: set[str] = set()
        if precision is not None and precision.head_dtype(precision.fp32_head_generator) != precision.policy_dtype:
            # An FP32 head needs all bits of the master weights, and so does an embedding that is tied to it.
            self._head = precision.head_dtype(precision.fp32_head_generator)
            head = output_head(model)
            head_pointers = {tensor.data_ptr() for tensor in (head.weight, head.bias) if tensor is not None}
            self._of_head = {name for name, tensor in model.state_dict().items() if tensor.data_ptr() in head_pointers}

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor of the trainer's model is published."""
        if self._policy is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._head if self._head is not None and name in self._of_head else self._policy


class WeightStore:
    """Published weights on this node; each version is kept as long as an engine may read it.

    Args:
        model: the trainer's model.
        precision: dtypes of the generators' weights; None to keep the trainer's.
        bucket_mib: size in MiB of the pieces in which weights are copied, cast and sent.
    """

    def __init__(self, model: nn.Module, precision: Precision | None, bucket_mib: float) -> None:
        self._types = PublishedTypes(model, precision)
        self._bucket = max(8, int(bucket_mib * MIB) // 8 * 8)
        sizes = _file_order(dict(model.state_dict()), self._types)
        needed = sum(tensor.numel() * dtype.itemsize for _, tensor, dtype in sizes)
        _remove_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix=f"scalerl-{os.getpid()}-", dir=_folder_for(needed)))
        self._lock = _lock_folder(self.folder)
        self._outdated: list[Published] = []
        # Digests of all published weights by number: an engine may still report the digest of old ones.
        self.digests: dict[int, str] = {}
        self.current = self._write(dict(model.state_dict()), 0)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> Published:
        """Write weights to a new file and make it the current one."""
        self._outdated.append(self.current)
        self.current = self._write(weights, version)
        return self.current

    def make_current(self, published: Published) -> None:
        """Make weights that were published earlier the current ones again."""
        self._outdated.append(self.current)
        self.current = published

    def forget_outdated(self) -> None:
        """Remove the files of all weights but the current ones. The caller ensures that no engine still reads them."""
        for path in {published.path for published in self._outdated} - {self.current.path}:
            path.unlink(missing_ok=True)
        self._outdated.clear()

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _write(self, weights: Mapping[str, Tensor], version: int) -> Published:
        """Write a file under a temporary name, then rename it, so that no reader sees a partial file."""
        number = len(self.digests) + 1
        path = self.folder / f"weights-{number}.safetensors"
        partial = path.with_suffix(".partial")
        entries = _file_order(weights, self._types)
        digest = xxhash.xxh3_128()
        with partial.open("wb") as file:
            for part in _file_parts(entries, self._bucket):
                digest.update(part)
                file.write(part)
        partial.rename(path)
        self.digests[number] = digest.hexdigest()
        return Published(number, version, self.digests[number], path)


Entry = tuple[str, Tensor, torch.dtype]


def _file_order(weights: Mapping[str, Tensor], types: PublishedTypes) -> list[Entry]:
    """Return the tensors in file order: tied tensors once, and wider dtypes first, which aligns every tensor."""
    once: dict[tuple[int, tuple[int, ...]], Entry] = {}
    for name, tensor in weights.items():
        once.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor, types.dtype_of(name, tensor)))
    return sorted(once.values(), key=lambda entry: -entry[2].itemsize)


def _file_parts(entries: list[Entry], bucket: int) -> Iterator[Any]:
    """Yield a file's bytes: its header, then all tensors cast to their dtypes, one bucket at a time."""
    yield _header(entries)
    staging = torch.empty(bucket, dtype=torch.uint8)
    filled = 0
    for _, tensor, dtype in entries:
        flat = tensor.detach().reshape(-1)
        start = 0
        while start < flat.numel():
            number = min(flat.numel() - start, (bucket - filled) // dtype.itemsize)
            end = filled + number * dtype.itemsize
            # A single copy both casts and moves the numbers to the host.
            staging[filled:end].view(dtype).copy_(flat[start : start + number])
            start, filled = start + number, end
            if bucket - filled < 8:
                yield staging[:filled].numpy()
                filled = 0
    if filled:
        yield staging[:filled].numpy()


def _header(entries: list[Entry]) -> bytes:
    tensors, end = {}, 0
    for name, tensor, dtype in entries:
        start, end = end, end + tensor.numel() * dtype.itemsize
        tensors[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    return safetensors_header(tensors)


def safetensors_header(tensors: Mapping[str, Any]) -> bytes:
    """Return the bytes before the tensors in a safetensors file.

    Args:
        tensors: for each tensor's name, its dtype, shape and data offsets.
    """
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _lock_folder(folder: Path) -> IO[bytes]:
    """Lock a folder as in use, until the returned file is closed or this process ends."""
    lock = (folder / "lock.partial").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.partial").rename(folder / LOCK)  # renamed after locking, so that it never exists unlocked
    return lock


def _remove_orphans() -> None:
    """Remove weight folders that killed trainers left in shared memory.

    A child process removes the folder when its trainer is gone, unless the child was killed as well.
    """
    for path in SHARED_MEMORY.glob(f"scalerl-*/{LOCK}"):
        with suppress(OSError), path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _folder_for(size: int) -> Path | None:
    """Return the shared-memory folder if three copies of the weights fit there; None for a folder on disk.

    The three copies are the current weights, the next ones, and those that an evaluation returns to.
    """
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return None
    needed = 3.5 * size
    if shutil.disk_usage(SHARED_MEMORY).free < needed:
        _log.warning(
            "driver: %s has less than %.1f GiB free for weights; they are sent through files",
            SHARED_MEMORY,
            needed / 2**30,
        )
        return None
    return SHARED_MEMORY
