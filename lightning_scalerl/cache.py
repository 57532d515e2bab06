"""Where things that take long to make are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$SCALERL_CACHE, else a folder in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-scalerl"
    return Path(os.environ.get("SCALERL_CACHE", default))
