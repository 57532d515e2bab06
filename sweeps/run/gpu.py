"""Check for a visible GPU by device files and environment, without importing a library for seconds."""

from __future__ import annotations

import os
from pathlib import Path

# Set in a job that asks for GPUs, for whoever trains in it.
REQUIRED = "SCALERL_REQUIRE_GPU"
_DEVICES = Path("/dev")
# What SLURM writes if it has counted GPUs that have no files, and what hides all of them.
_NONE = frozenset({"", "-1", "NoDevFiles"})
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class NoGpuError(RuntimeError):
    """This process is to train on a GPU and sees none; one line."""


def check_gpu() -> None:
    """Raise if no GPU device file exists or all are hidden from this process; whether GPUs work only torch can tell.

    Raises:
        NoGpuError: none; what hides them, and what to do.
    """
    for name in _VISIBLE:
        if os.environ.get(name, "0").strip() in _NONE:
            raise NoGpuError(f"the job asks for GPUs and sees none: {name}={os.environ[name]!r}; {REMEDY}")
    if not any(any(_DEVICES.glob(files)) for files in ("nvidia[0-9]*", "kfd", "dxg")):
        raise NoGpuError(f"the job asks for GPUs and sees none: no /dev/nvidia* and no /dev/kfd; {REMEDY}")


REMEDY = (
    "the node may have lost them (`nvidia-smi` there), a container needs --nv; where GPUs are only counted, "
    "hydra.launcher.require_gpu=false"
)
