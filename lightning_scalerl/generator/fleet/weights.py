"""Published weights: one file per version, in the generators' types, written in buckets of a stated size.

The file (safetensors, in shared memory where that has room) is mapped by the engines and read by checkpoints and by
engines that start later. In addition to it the sender never holds more than one bucket on the host. Its digest covers
all its bytes, and each reader reports the digest that it found.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
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
# safetensors' names of types, in a file's header.
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
    """Weights that were published: where they lie on the sender's node, and what is sent of them elsewhere.

    `number` tells publishes apart; two of the same weights, or of the same version, have one each.
    """

    number: int
    version: int
    digest: str
    size: int
    path: Path
    bucket: int

    def buckets(self) -> Iterator[memoryview]:
        """Yield the file's bytes in order, without a copy."""
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
        ):
            for start in range(0, self.size, self.bucket):
                with whole[start : start + self.bucket] as part:
                    yield part

    def read(self) -> dict[str, Tensor]:
        """Return the tensors, mapped into memory on the node where the file lies."""
        from safetensors.torch import load_file

        return dict(load_file(self.path))

    def digest_of_file(self) -> str:
        """Return the digest of what the file holds now."""
        found = xxhash.xxh3_128()
        for part in self.buckets():
            found.update(part)
        return found.hexdigest()


class Types:
    """Type that each tensor is published in: as the generator itself would cast it.

    Args:
        model: the trainer's model.
        precision: of the run; None where the generator knows none, and everything stays as it is.
    """

    def __init__(self, model: nn.Module, precision: Precision | None) -> None:
        self._policy = None if precision is None else precision.policy_dtype
        self._head: torch.dtype | None = None
        self._of_head: set[str] = set()
        if precision is not None and precision.head_dtype(precision.fp32_head_generator) != precision.policy_dtype:
            # A head that computes in FP32 has the master weights' bits, and so has an embedding that is tied to it.
            self._head = precision.head_dtype(precision.fp32_head_generator)
            head = output_head(model)
            own = {tensor.data_ptr() for tensor in (head.weight, head.bias) if tensor is not None}
            self._of_head = {name for name, tensor in model.state_dict().items() if tensor.data_ptr() in own}

    def of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the type in which a tensor of the trainer's model is published."""
        if self._policy is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._head if self._head is not None and name in self._of_head else self._policy


class WeightStore:
    """The published versions on this node, each for as long as an engine may read it.

    Args:
        model: the trainer's model.
        precision: types of the generators' weights; None to leave all as they are.
        bucket_mib: size in MiB of what is copied, cast and sent at a time.
    """

    def __init__(self, model: nn.Module, precision: Precision | None, bucket_mib: float) -> None:
        self._types = Types(model, precision)
        self._bucket = max(8, int(bucket_mib * MIB) // 8 * 8)
        sizes = _laid_out(dict(model.state_dict()), self._types)
        needed = sum(tensor.numel() * dtype.itemsize for _, tensor, dtype in sizes)
        _remove_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix=f"scalerl-{os.getpid()}-", dir=_place_for(needed)))
        self._lock = _locked(self.folder)
        self._outdated: list[Published] = []
        # Of all that was ever published, by number: an engine may still say that it holds an old one.
        self.digests: dict[int, str] = {}
        self.current = self._write(dict(model.state_dict()), 0)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> Published:
        """Write weights to a file of their own, which engines are told to read from now on."""
        self._outdated.append(self.current)
        self.current = self._write(weights, version)
        return self.current

    def return_to(self, published: Published) -> None:
        """Make an earlier version the one that engines read."""
        self._outdated.append(self.current)
        self.current = published

    def forget_outdated(self) -> None:
        """Remove the files of all other versions; no engine may be reading one."""
        for path in {each.path for each in self._outdated} - {self.current.path}:
            path.unlink(missing_ok=True)
        self._outdated.clear()

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _write(self, weights: Mapping[str, Tensor], version: int) -> Published:
        """Write a file under a name that no reader has, then rename it, so that none sees half of it."""
        number = len(self.digests) + 1
        path = self.folder / f"weights-{number}.safetensors"
        partial = path.with_suffix(".partial")
        entries = _laid_out(weights, self._types)
        digest, size = xxhash.xxh3_128(), 0
        with partial.open("wb") as file:
            for part in _bytes(entries, self._bucket):
                digest.update(part)
                size += file.write(part)
        partial.rename(path)
        self.digests[number] = digest.hexdigest()
        return Published(number, version, self.digests[number], size, path, self._bucket)


Entry = tuple[str, Tensor, torch.dtype]


def _laid_out(weights: Mapping[str, Tensor], types: Types) -> list[Entry]:
    """Return the tensors in the order of the file: tied ones once, larger numbers first, so all are aligned."""
    once: dict[tuple[int, tuple[int, ...]], Entry] = {}
    for name, tensor in weights.items():
        once.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor, types.of(name, tensor)))
    return sorted(once.values(), key=lambda entry: -entry[2].itemsize)


def _bytes(entries: list[Entry], bucket: int) -> Iterator[Any]:
    """Yield a file's bytes: its header, then all tensors cast to their types, a bucket at a time."""
    yield _header(entries)
    staging = torch.empty(bucket, dtype=torch.uint8)
    filled = 0
    for _, tensor, dtype in entries:
        flat = tensor.detach().reshape(-1)
        start = 0
        while start < flat.numel():
            number = min(flat.numel() - start, (bucket - filled) // dtype.itemsize)
            end = filled + number * dtype.itemsize
            # One copy casts, and brings the numbers to the host where they are elsewhere.
            staging[filled:end].view(dtype).copy_(flat[start : start + number])
            start, filled = start + number, end
            if bucket - filled < 8:
                yield staging[:filled].numpy()
                filled = 0
    if filled:
        yield staging[:filled].numpy()


def _header(entries: list[Entry]) -> bytes:
    """Return the start of a file in the format of safetensors: where which tensor lies."""
    places, end = {}, 0
    for name, tensor, dtype in entries:
        start, end = end, end + tensor.numel() * dtype.itemsize
        places[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    return start_of_file(places)


def start_of_file(places: Mapping[str, Any]) -> bytes:
    """Return the bytes before the tensors of a file of safetensors: type, shape and place of each by name."""
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _locked(folder: Path) -> IO[bytes]:
    """Mark a folder as in use, for as long as this process lives and the file is open."""
    lock = (folder / "lock.partial").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.partial").rename(folder / LOCK)  # never seen without its lock
    return lock


def _remove_orphans() -> None:
    """Remove what killed trainers have left in shared memory: with engines elsewhere no child of theirs does it."""
    for path in SHARED_MEMORY.glob(f"scalerl-*/{LOCK}"):
        with suppress(OSError), path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _place_for(size: int) -> Path | None:
    """Return the folder of shared memory if three copies of the weights fit there; None for a folder on a disk.

    Three: those in use, the next ones, and those that an evaluation returns to.
    """
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return None
    needed = 3.5 * size
    if shutil.disk_usage(SHARED_MEMORY).free < needed:
        _log.warning("driver: %s has no %.1f GiB for weights; they go through files", SHARED_MEMORY, needed / 2**30)
        return None
    return SHARED_MEMORY
