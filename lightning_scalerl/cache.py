"""Location of the disk cache for results that take long to compute."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $SCALERL_CACHE, else a folder in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-scalerl"
    return Path(os.environ.get("SCALERL_CACHE", default))
