"""Checkpoint files: written without a second copy in memory, checked to the last bit before they are trusted.

That of a sharded run is a folder (`distributed.checkpoint_folder`), whose parts are files like these.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer

from lightning_scalerl.distributed.checkpoint_folder import META, checksums, damaged, is_folder
from lightning_scalerl.distributed.sharded import ShardedStrategy
from sweeps.run.activity import activity

# Key in a checkpoint, beside Lightning's own, for the identity of its run.
IDENTITY = "scalerl_run"
AT_ONCE = 1 << 30  # bytes
READ_AT_ONCE = 1 << 22


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint straight into its file, and returns once it is on the disk.

    Lightning's own makes the whole file in memory first and then in the node's temporary folder: for a model of 8B
    parameters with its optimizer that is 100 GB twice, where a node may have neither.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint to `path`, which must not exist yet, and wait until it is on the disk.

        Raises:
            OSError: it could not be written; what there is of it stays.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with checksums(), target.open("xb") as handle:
            # torch hands over views of the tensors' own memory, one tensor of a GPU at a time.
            file = _File(handle)
            torch.save(checkpoint, cast("BinaryIO", file))
            if file.failure is not None:
                raise file.failure
            file.to_disk()


class _File:
    """File for torch's writer that keeps its first failure: torch raises an error of its own, which hides a full disk.

    Data goes to the disk in pieces of `AT_ONCE`, not all at the end: the node's page cache would fill up with it, and
    a slow file server could not be told from one that hangs.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._waiting = 0  # bytes that may be in the node's memory only
        self.failure: OSError | None = None

    def write(self, content: memoryview) -> int:
        """Write as a file does; after the first failure, discard everything."""
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
        """Do nothing when torch flushes; `to_disk` does it at a fixed number of bytes."""

    def to_disk(self) -> None:
        """Wait until everything written is on the disk."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._waiting = 0
        activity.note("checkpoint")


@contextmanager
def written_directly(trainer: Trainer) -> Iterator[None]:
    """Have `DirectCheckpointIO` write what is saved in the `with` block, whatever the Trainer uses elsewhere."""
    strategy = trainer.strategy
    usual = strategy.checkpoint_io
    strategy.checkpoint_io = DirectCheckpointIO()
    try:
        yield
    finally:
        strategy.checkpoint_io = usual


class EitherCheckpointIO(CheckpointIO):
    """Reads checkpoints of both forms, folders of shards whole; writes files as the Trainer did before.

    Args:
        usual: the Trainer's own.
    """

    def __init__(self, usual: CheckpointIO) -> None:
        self._usual = usual

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Write as the Trainer did before."""
        self._usual.save_checkpoint(*given, **named)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either form; a folder's tensors are whole, and on the host."""
        if is_folder(path):
            from lightning_scalerl.distributed.shard_files import read_whole

            return read_whole(Path(path), weights_only is not False)
        named = {} if map_location is None else {"map_location": map_location}
        return self._usual.load_checkpoint(path, weights_only=weights_only, **named)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint as the Trainer did before."""
        self._usual.remove_checkpoint(path)

    def teardown(self) -> None:
        """End what the Trainer's own has under way."""
        self._usual.teardown()


def read_either(trainer: Trainer) -> None:
    """Let a Trainer go on from folders of shards, under a strategy that knows files alone. Done for every fit."""
    strategy = trainer.strategy
    if not isinstance(strategy, ShardedStrategy) and not isinstance(strategy.checkpoint_io, EitherCheckpointIO):
        strategy.checkpoint_io = EitherCheckpointIO(strategy.checkpoint_io)


def damage(path: Path) -> str | None:
    """Return a line on the damage to a checkpoint's bytes; None if each record matches its stored checksum.

    torch stores one for each tensor and never checks it on loading. Reads the whole file once, some MiB at a time.

    Raises:
        OSError: it cannot be read.
    """
    if is_folder(path):
        if not (path / META).is_file():
            return f"a folder without {META}"
        return damage(path / META) or damaged(path, _damage)
    # Opening a FIFO waits for a writer that never comes.
    if not stat.S_ISREG(path.stat().st_mode):
        return "no regular file"
    return _damage(path)


def _damage(file: Path | BinaryIO) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            bad = next((record.filename for record in records if not _is_sound(archive, record)), None)
    except OSError:
        raise
    except Exception as error:  # zipfile raises many types for a corrupt directory
        return f"damaged: no whole file of torch's ({error})"
    if bad is not None:
        return f"damaged: the checksum of {bad} does not match"
    # The zip directory itself has no checksum, but torch writes the same into each entry except name, offset, size and
    # checksum. Compared, since torch would silently read nothing of an entry that a flipped bit marks as a folder.
    if any(record.file_size != record.compress_size for record in records) or len({*map(_alike, records)}) > 1:
        return "damaged: the entries of its directory do not match"
    return None


def _is_sound(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """Check one record's checksum as `ZipFile.testzip` does, with heartbeats: no other step of a run takes as long."""
    try:
        with archive.open(record) as content:
            while content.read(READ_AT_ONCE):
                activity.note("checkpoint")
    except zipfile.BadZipFile:
        return False
    return True


def _alike(record: zipfile.ZipInfo) -> tuple[Any, ...]:
    made = (record.create_system, record.create_version, record.extract_version, record.reserved, record.date_time)
    flags = record.flag_bits | 8  # bit 3, sizes after the data, is unset for empty tensors only; ignored
    return (*made, flags, record.compress_type, record.internal_attr, record.external_attr, record.volume)
