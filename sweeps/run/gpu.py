"""Check from device files and the environment whether a GPU is visible, without a slow import."""

from __future__ import annotations

import os
from pathlib import Path

# Environment variable that is set in a job that requests GPUs. The training process in the job reads it.
REQUIRED = "SCALERL_REQUIRE_GPU"
_DEVICES = Path("/dev")
# Values of the variables in `_VISIBLE` that hide all GPUs. SLURM sets NoDevFiles if it only counts GPUs.
_NONE = frozenset({"", "-1", "NoDevFiles"})
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class NoGpuError(RuntimeError):
    """Error: this process should train on a GPU but sees none. The message is one line."""


def check_gpu() -> None:
    """Check that a GPU's device file exists and is not hidden from this process. Whether the GPU works is not checked.

    Raises:
        NoGpuError: no GPU is visible. The message has the cause and the remedy.
    """
    for name in _VISIBLE:
        if os.environ.get(name, "0").strip() in _NONE:
            raise NoGpuError(f"the job asks for GPUs and sees none: {name}={os.environ[name]!r}; {REMEDY}")
    if not any(any(_DEVICES.glob(files)) for files in ("nvidia[0-9]*", "kfd", "dxg")):
        raise NoGpuError(f"the job asks for GPUs and sees none: no /dev/nvidia* and no /dev/kfd; {REMEDY}")


REMEDY = (
    "check `nvidia-smi` on the node; a container needs --nv; if the cluster only counts GPUs, set "
    "hydra.launcher.require_gpu=false"
)
