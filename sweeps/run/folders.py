"""Folders of the user's that stand beside `conf/`."""

from __future__ import annotations

from typing import Any


def user_folders(hydra: Any) -> list[str]:
    """Those that Hydra was told of by `--config-dir` or `hydra.searchpath`, from its own configuration."""
    sources = hydra.runtime.config_sources
    return [str(source.path) for source in sources if source.schema == "file" and source.provider != "main"]
