"""Names of a run's checkpoints: `checkpoints/step-00000120.ckpt` is a file, or a folder of shards."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS_DIR = "checkpoints"
CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def checkpoints(directory: Path) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, newest first."""
    return sorted((path for path in directory.glob("step-*.ckpt") if CHECKPOINT.fullmatch(path.name)), reverse=True)
