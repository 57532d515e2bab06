"""Checkpoint of a sharded model: a folder in which each rank writes its part of the weights and optimizer state.

    step-00000100.ckpt/
        __0_0.distcp  __1_0.distcp  ...     parts of tensors, by torch.distributed.checkpoint: one file per rank
        .metadata                           torch's index of the parts, for torch's own tools
        meta.pt                             from rank 0: our index, and everything else in a checkpoint

In memory, a checkpoint is the same dictionary whether it comes from a folder or from a single file. In the result of
`load_outline`, which reads a folder, sharded tensors are on the meta device, without data. `shard_files.read_into`
reads their data into whole tensors, or into this rank's parts. The number of ranks may differ from that of the saving
run.

Our index repeats the content of torch's index, because torch's index is a pickle without a checksum: reading it could
run code from the file. `shard_files` writes and reads the parts.
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

# File with everything but the shards; Lightning uses the same name.
META = "meta.pt"
# Key of our index in `META`. It maps tensor names to type, shape and the locations of the parts.
INDEX = "scalerl_shards"
# Suffix of a checkpoint that must not be used.
VOID = ".void"
WHOLE_ONE = "give a whole checkpoint, step-N.ckpt (newest_checkpoint finds the newest)"


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint is a folder of shards, not a single file."""
    return Path(path).is_dir()


@contextmanager
def checksums() -> Iterator[None]:
    """Turn on torch's checksums in the `with` block; a script may have turned them off for its own files."""
    previous = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(previous)


def fsync_folder(folder: Path) -> None:
    """Sync a folder to disk; otherwise a new file name in it may not survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by this file system
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a checkpoint (a file or a folder) if it exists."""
    if path.is_dir() and not path.is_symlink():
        # Rename first: an interrupted deletion must not leave a partial folder under a valid name.
        if path.suffix != VOID:
            path = move(path, path.with_suffix(VOID))
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def move(path: Path, target: Path) -> Path:
    """Rename a checkpoint and return the new path; an existing checkpoint of that name is replaced."""
    if target.is_dir() or (target.exists() and path.is_dir()):
        remove(target)
    return path.replace(target)


# --- reading -----------------------------------------------------------------------------------------------------


def load_outline(folder: Path, weights_only: bool = True) -> dict[str, Any]:
    """Read a folder's checkpoint with its sharded tensors on the meta device; `shard_files.read_into` reads their data.

    Raises:
        ConfigurationError: the folder is not a checkpoint, or a part is missing.
    """
    if not (folder / META).is_file():
        raise ConfigurationError(
            f"ckpt_path: {str(folder)!r} is a folder without {META}, so no checkpoint; {WHOLE_ONE}"
        )
    checkpoint: dict[str, Any] = torch.load(folder / META, "cpu", weights_only=weights_only, mmap=True)
    if (problem := problem_of(folder, checkpoint)) is not None:
        raise ConfigurationError(f"ckpt_path: {str(folder)!r} {problem}; {WHOLE_ONE}")
    for name, entry in checkpoint[INDEX].items():
        placeholder = torch.empty(entry["size"], dtype=entry["dtype"], device="meta")
        put(checkpoint, name, placeholder)
    return checkpoint


def problem_of(folder: Path, meta: Mapping[str, Any]) -> str | None:
    """Return a one-line description of a missing or short file that `meta` refers to, or None if all are complete."""
    if INDEX not in meta:
        return "was written by another program: its meta.pt lists no parts"
    ends: dict[str, int] = {}
    for *_, file, offset, length in _chunks(meta):
        ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in sorted(ends.items()):
        if not (folder / file).is_file():
            return f"lacks {file}, a part of its tensors"
        if (folder / file).stat().st_size < end:
            return f"holds only part of {file}"
    return None


def _chunks(meta: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    return (chunk for entry in meta[INDEX].values() for chunk in entry["chunks"])


def put(checkpoint: dict[str, Any], name: str, value: Any) -> None:
    """Set a tensor in a checkpoint by its name in the shards, such as `optimizer_states.0.state.3.exp_avg`."""
    top, _, inner = name.partition(".")
    if top == "state_dict":  # names of weights contain dots themselves
        checkpoint[top][inner] = value
        return
    number, _, parameter, key = inner.split(".", 3)
    checkpoint[top][int(number)]["state"][int(parameter)][key] = value


def find_damaged_part(folder: Path, find_damage: Callable[[BinaryIO], str | None]) -> str | None:
    """Return a one-line description of damage in a folder's parts, or None if all parts are intact.

    Args:
        folder: a checkpoint folder whose `meta.pt` is intact.
        find_damage: takes a stream that `torch.save` has written; returns a description of damage in it, or None.

    Raises:
        OSError: a file cannot be read.
    """
    meta = torch.load(folder / META, "cpu", weights_only=True, mmap=True)
    if (problem := problem_of(folder, meta)) is not None:
        return problem
    for *_, file, offset, length in _chunks(meta):
        with (folder / file).open("rb") as handle:
            if (problem := find_damage(io.BufferedReader(_Part(handle, offset, length)))) is not None:
                return f"{problem}, in {file}"
    return None


class _Part(io.RawIOBase):
    """Section of a file that can be read as if it were a whole file."""

    def __init__(self, handle: BinaryIO, offset: int, length: int) -> None:
        self._handle, self._offset, self._length, self._position = handle, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = max(
            0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        )
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._handle.seek(self._offset + self._position)
        content = self._handle.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def check_weights(path: Any, checkpoint: Mapping[str, Any], model_weights: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint's weights fit a model.

    Args:
        path: path of the checkpoint, for the error.
        checkpoint: the checkpoint.
        model_weights: the model's weights by name.

    Raises:
        ConfigurationError: names or shapes differ.
    """
    saved = checkpoint["state_dict"]
    missing, unexpected = sorted(model_weights.keys() - saved.keys()), sorted(saved.keys() - model_weights.keys())
    other_shape = [name for name in model_weights if name in saved and saved[name].shape != model_weights[name].shape]
    if not (missing or unexpected or other_shape):
        return
    shapes = [f"{name} {tuple(saved[name].shape)}, not {tuple(model_weights[name].shape)}" for name in other_shape[:1]]
    names = [f"without {missing[0]}" for _ in missing[:1]] + [f"with {unexpected[0]}" for _ in unexpected[:1]]
    raise ConfigurationError(
        f"ckpt_path: {path} is of another model ({', '.join(shapes or names)}); go on with a module made from the "
        "model that its run trains"
    )
