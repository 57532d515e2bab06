"""Checkpoint files. They are written without a second copy in memory, and checked completely before they are used.

The checkpoint of a sharded run is a folder of such files (`distributed.checkpoint_folder`).
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

from lightning_scalerl.distributed.checkpoint_folder import META, checksums, find_damaged_part, is_folder
from lightning_scalerl.distributed.sharded import ShardedStrategy
from sweeps.run.activity import activity

# Key in a checkpoint, besides Lightning's keys, with the identity of its run.
IDENTITY = "scalerl_run"
# Number of bytes to write before they are synced to the disk, and number of bytes to read at a time.
SYNC_BYTES = 1 << 30
READ_BYTES = 1 << 22


class DirectCheckpointIO(TorchCheckpointIO):
    """Writer of a checkpoint directly into its file. It returns when the file is on the disk.

    Lightning's own class first builds the whole file in memory, and then in the node's temporary folder. For a model of
    8B parameters with its optimizer, each of these copies takes 100 GB, which a node may not have.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint to `path`, which must not exist yet, and wait until it is on the disk.

        Raises:
            OSError: the file could not be written; the incomplete file stays.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with checksums(), target.open("xb") as handle:
            # torch passes views of the tensors' memory to the file, so there is no second copy. Tensors on a GPU are
            # copied to the host one at a time.
            file = _File(handle)
            torch.save(checkpoint, cast("BinaryIO", file))
            if file.failure is not None:
                raise file.failure
            file.to_disk()


class _File:
    """File for torch's writer. It keeps the first error, because torch would raise another that hides a full disk.

    Data are synced to the disk after every `SYNC_BYTES` bytes. One sync at the end would fill the node's page cache,
    and on a slow file server would take so long that the run seems to hang.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._unsynced_bytes = 0  # bytes that may still be only in the node's memory
        self.failure: OSError | None = None

    def write(self, content: memoryview) -> int:
        """Write like a file. After the first error, discard everything."""
        if self.failure is None:
            try:
                self._handle.write(content)
                self._unsynced_bytes += content.nbytes
                activity.note("checkpoint")
                if self._unsynced_bytes >= SYNC_BYTES:
                    self.to_disk()
            except OSError as failure:
                self.failure = failure
        return content.nbytes

    def flush(self) -> None:
        """Do nothing. `to_disk` runs after every `SYNC_BYTES` bytes instead."""

    def to_disk(self) -> None:
        """Wait until everything written is on the disk."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._unsynced_bytes = 0
        activity.note("checkpoint")


@contextmanager
def written_directly(trainer: Trainer) -> Iterator[None]:
    """Make the Trainer save with `DirectCheckpointIO` in the `with` block."""
    strategy = trainer.strategy
    own_io = strategy.checkpoint_io
    strategy.checkpoint_io = DirectCheckpointIO()
    try:
        yield
    finally:
        strategy.checkpoint_io = own_io


class EitherCheckpointIO(CheckpointIO):
    """Reader of checkpoint files and of folders of shards. It writes with the Trainer's own `CheckpointIO`.

    Args:
        own_io: the Trainer's own `CheckpointIO`.
    """

    def __init__(self, own_io: CheckpointIO) -> None:
        self._own_io = own_io

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write with the Trainer's own `CheckpointIO`."""
        self._own_io.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint file or folder. The tensors of a folder are put together on the host."""
        if is_folder(path):
            from lightning_scalerl.distributed.shard_files import read_whole

            return read_whole(Path(path), weights_only is not False)
        options = {} if map_location is None else {"map_location": map_location}
        return self._own_io.load_checkpoint(path, weights_only=weights_only, **options)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint with the Trainer's own `CheckpointIO`."""
        self._own_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Tear down the Trainer's own `CheckpointIO`."""
        self._own_io.teardown()


def read_either(trainer: Trainer) -> None:
    """Let a Trainer whose strategy reads only files also resume from a folder of shards. Called for every fit."""
    strategy = trainer.strategy
    if not isinstance(strategy, ShardedStrategy) and not isinstance(strategy.checkpoint_io, EitherCheckpointIO):
        strategy.checkpoint_io = EitherCheckpointIO(strategy.checkpoint_io)


def damage(path: Path) -> str | None:
    """Describe the damage to a checkpoint in one line; None if every record matches its checksum.

    torch stores a checksum for each tensor, but does not check it on loading. This reads the whole checkpoint once.

    Raises:
        OSError: the file cannot be read.
    """
    if is_folder(path):
        if not (path / META).is_file():
            return f"a folder without {META}"
        return damage(path / META) or find_damaged_part(path, _damage)
    # A FIFO must not be opened, because that would wait for a writer for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        return "no regular file"
    return _damage(path)


def _damage(file: Path | BinaryIO) -> str | None:
    """Describe the damage to one file in torch's zip format in one line, or return None."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            bad_record = next((record.filename for record in records if not _is_sound(archive, record)), None)
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds of errors for a corrupt directory
        return f"damaged: not a complete torch file ({error})"
    if bad_record is not None:
        return f"damaged: the checksum of {bad_record} does not match"
    # The zip directory has no checksum. But its entries differ only in name, offset, size and checksum, so a flipped
    # bit in any other field shows as a further difference. Without this check, a bit that marks an entry as a folder
    # would make torch read nothing, without an error.
    if any(record.file_size != record.compress_size for record in records) or len({*map(_header_facts, records)}) > 1:
        return "damaged: the entries of its directory do not match"
    return None


def _is_sound(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """Check the checksum of one record like `ZipFile.testzip`, but record activity, since it may take minutes."""
    try:
        with archive.open(record) as content:
            while content.read(READ_BYTES):
                activity.note("checkpoint")
    except zipfile.BadZipFile:
        return False
    return True


def _header_facts(record: zipfile.ZipInfo) -> tuple[Any, ...]:
    """Return the fields of a directory entry that are equal in all entries of a file written by torch."""
    versions = (record.create_system, record.create_version, record.extract_version, record.reserved, record.date_time)
    flags = record.flag_bits | 8  # ignore bit 3 (sizes after the data), which only empty tensors leave unset
    return (*versions, flags, record.compress_type, record.internal_attr, record.external_attr, record.volume)
