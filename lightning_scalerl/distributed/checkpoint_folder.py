"""Checkpoint of a sharded model: a folder in which each rank has written its own part of weights and optimizer state.

    step-00000100.ckpt/
        __0_0.distcp  __1_0.distcp  ...     parts of tensors, by torch.distributed.checkpoint: one file a rank
        .metadata                           torch's own index of them, for torch's own tools
        meta.pt                             rank 0's: all else that a checkpoint of one file holds, and our index

In memory a checkpoint is the same dictionary in both forms. Where it comes from a folder (`outline`), tensors that lie
in parts stand in it without data, on the meta device, and `shard_files.fill` reads them into tensors of any layout:
whole, or this rank's part by another number of ranks. Our index repeats torch's, since that one is a pickle: reading it
would run what a file says, and nothing tells whether a bit of it has flipped. `shard_files` writes and reads the parts.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_scalerl.checks import ConfigurationError

# Lightning's name for what a sharded checkpoint holds beside its shards.
META = "meta.pt"
# Key in it of our index: by name of a tensor its type, its shape, and where its parts lie.
INDEX = "scalerl_shards"
# Suffix of a checkpoint that is not to be used.
VOID = ".void"
WHOLE_ONE = "give a whole checkpoint, step-N.ckpt (newest_checkpoint finds the newest)"


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint is a folder of shards and not a file."""
    return Path(path).is_dir()


@contextmanager
def checksums() -> Iterator[None]:
    """Turn on torch's checksums in the `with` block: a script may have turned them off for its own files."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def fsync_folder(folder: Path) -> None:
    """Sync a folder to disk: only then does a new name in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a checkpoint of either form, if it is there; never a part of a folder under a whole one's name."""
    if path.is_dir() and not path.is_symlink():
        if path.suffix != VOID:
            path = move(path, path.with_suffix(VOID))
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def move(path: Path, target: Path) -> Path:
    """Rename a checkpoint of either form, in place of another that has the name; return the new path."""
    if target.is_dir() or (target.exists() and path.is_dir()):
        remove(target)
    return path.replace(target)


# --- reading -----------------------------------------------------------------------------------------------------


def outline(folder: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint of a folder with its sharded tensors on the meta device: `shard_files.fill` reads them.

    Raises:
        ConfigurationError: the folder is no checkpoint, or lacks a part of one.
    """
    if not (folder / META).is_file():
        raise ConfigurationError(
            f"ckpt_path: {str(folder)!r} is a folder without {META}, so no checkpoint; {WHOLE_ONE}"
        )
    rest: dict[str, Any] = torch.load(folder / META, "cpu", weights_only=weights_only, mmap=True)
    if (why := lacks(folder, rest)) is not None:
        raise ConfigurationError(f"ckpt_path: {str(folder)!r} {why}; {WHOLE_ONE}")
    for name, about in rest[INDEX].items():
        blank = torch.empty(about["size"], dtype=about["dtype"], device="meta")
        put(rest, name, blank)
    return rest


def lacks(folder: Path, rest: Mapping[str, Any]) -> str | None:
    """Return what a folder lacks of the files that its `meta.pt` names; None if all are there and long enough."""
    if INDEX not in rest:
        return "is of another program: its meta.pt says nothing of parts"
    ends: dict[str, int] = {}
    for *_, file, offset, length in _chunks(rest):
        ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in sorted(ends.items()):
        if not (folder / file).is_file():
            return f"lacks {file}, a part of its tensors"
        if (folder / file).stat().st_size < end:
            return f"holds a part of {file} only"
    return None


def _chunks(rest: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    return (chunk for about in rest[INDEX].values() for chunk in about["chunks"])


def put(rest: dict[str, Any], name: str, value: Any) -> None:
    """Set a tensor in a checkpoint by its name in the shards: names of weights have dots of their own."""
    top, _, inner = name.partition(".")
    if top == "state_dict":
        rest[top][inner] = value
        return
    number, _, parameter, key = inner.split(".", 3)
    rest[top][int(number)]["state"][int(parameter)][key] = value


def damaged(folder: Path, sound: Callable[[BinaryIO], str | None]) -> str | None:
    """Return a line on the damage to the bytes of a folder's parts; None if there is none.

    Args:
        folder: whose `meta.pt` is sound.
        sound: returns the damage to what `torch.save` has written.

    Raises:
        OSError: it cannot be read.
    """
    rest = torch.load(folder / META, "cpu", weights_only=True, mmap=True)
    if (why := lacks(folder, rest)) is not None:
        return why
    for *_, file, offset, length in _chunks(rest):
        with (folder / file).open("rb") as handle:
            if (why := sound(io.BufferedReader(_Part(handle, offset, length)))) is not None:
                return f"{why}, in {file}"
    return None


class _Part(io.RawIOBase):
    """Part of a file, read as if it were one."""

    def __init__(self, handle: BinaryIO, offset: int, length: int) -> None:
        self._handle, self._offset, self._length, self._at = handle, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._handle.seek(self._offset + self._at)
        content = self._handle.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def check_weights(path: Any, checkpoint: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Check that a folder's weights go into a model.

    Args:
        path: of the checkpoint, for the line.
        checkpoint: of that folder.
        own: the model's weights by name.

    Raises:
        ConfigurationError: names or shapes differ.
    """
    given = checkpoint["state_dict"]
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    other = [name for name in own if name in given and given[name].shape != own[name].shape]
    if not (missing or unexpected or other):
        return
    shapes = [f"{name} {tuple(given[name].shape)}, not {tuple(own[name].shape)}" for name in other[:1]]
    names = [f"without {missing[0]}" for _ in missing[:1]] + [f"with {unexpected[0]}" for _ in unexpected[:1]]
    raise ConfigurationError(
        f"ckpt_path: {path} is of another model ({', '.join(shapes or names)}); go on with a module made from the "
        "model that its run trains"
    )
