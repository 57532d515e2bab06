"""Location of the disk cache for slow computations."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $SCALERL_CACHE if it is set, else `lightning-scalerl` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-scalerl"
    return Path(os.environ.get("SCALERL_CACHE", default))
