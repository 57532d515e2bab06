"""A checkpoint's file: written without a second copy in memory, checked to the last bit before it is trusted."""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from torch.serialization import get_crc32_options, set_crc32_options

from sweeps.run.activity import activity

# In a checkpoint, beside Lightning's own entries: whose it is.
IDENTITY = "scalerl_run"
AT_ONCE = 1 << 30  # bytes
READ_AT_ONCE = 1 << 22


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint straight into its file, and returns once it is on the disk.

    Lightning's own makes the whole file in memory first and then in the node's temporary folder: for a model of 8B
    parameters with its optimizer that is 100 GB twice, where a node may have neither.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """`path` must not exist yet.

        Raises:
            OSError: it could not be written; what there is of it stays.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _checksums(), target.open("xb") as handle:
            # torch hands over views of the tensors' own memory, one tensor of a GPU at a time.
            file = _File(handle)
            torch.save(checkpoint, cast("BinaryIO", file))
            if file.failure is not None:
                raise file.failure
            file.to_disk()


class _File:
    """A file that keeps its first failure to itself: torch's writer ends with an error of its own, which says nothing
    of a full disk. What is written goes to the disk by and by, not all at the end: the node's memory would be full of
    it, and nobody could tell a slow file server from one that hangs."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._waiting = 0  # bytes that may be in the node's memory only
        self.failure: OSError | None = None

    def write(self, content: memoryview) -> int:
        """As a file's; after a failure nothing is written any more."""
        if self.failure is None:
            try:
                self._handle.write(content)
                self._waiting += content.nbytes
                activity.note("checkpoint")
                if self._waiting >= AT_ONCE:
                    self.to_disk()
            except OSError as failure:
                self.failure = failure
        return content.nbytes

    def flush(self) -> None:
        """Not when torch asks for it."""

    def to_disk(self) -> None:
        """Wait until all that was written is on the disk."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._waiting = 0
        activity.note("checkpoint")


@contextmanager
def written_directly(trainer: Trainer) -> Iterator[None]:
    """What is saved in here is written by `DirectCheckpointIO`, whatever the Trainer uses elsewhere."""
    strategy = trainer.strategy
    usual = strategy.checkpoint_io
    strategy.checkpoint_io = DirectCheckpointIO()
    try:
        yield
    finally:
        strategy.checkpoint_io = usual


@contextmanager
def _checksums() -> Iterator[None]:
    """A script may have turned torch's checksums off for other files of its own."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def fsync_folder(folder: Path) -> None:
    """A new name in a folder survives a power failure only once the folder itself is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's bytes; None if each record of it has the checksum that it was written with.

    torch keeps one for each tensor and never looks at it again. Reads the whole file once, some MiB at a time.

    Raises:
        OSError: it cannot be read.
    """
    # Opening a FIFO waits for a writer that never comes.
    if not stat.S_ISREG(path.stat().st_mode):
        return "no regular file"
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            bad = next((record.filename for record in records if not _is_sound(archive, record)), None)
    except OSError:
        raise
    except Exception as error:  # what a flipped bit makes of a zip file's directory has many names
        return f"damaged: no whole file of torch's ({error})"
    if bad is not None:
        return f"damaged: the checksum of {bad} does not match"
    # The directory itself has no checksum. torch writes the same into each entry but for name, place, size, checksum;
    # of one that a flipped bit calls a folder it would read nothing, and say nothing.
    if any(record.file_size != record.compress_size for record in records) or len({*map(_alike, records)}) > 1:
        return "damaged: the entries of its directory do not match"
    return None


def _is_sound(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """As `ZipFile.testzip`, with signs of life: a large one takes longer than anything else that a run does."""
    try:
        with archive.open(record) as content:
            while content.read(READ_AT_ONCE):
                activity.note("checkpoint")
    except zipfile.BadZipFile:
        return False
    return True


def _alike(record: zipfile.ZipInfo) -> tuple[Any, ...]:
    made = (record.create_system, record.create_version, record.extract_version, record.reserved, record.date_time)
    flags = record.flag_bits | 8  # whether sizes follow the data, which nobody reads: not so for empty tensors
    return (*made, flags, record.compress_type, record.internal_attr, record.external_attr, record.volume)
