"""Configuration folders of the user, searched by Hydra besides `conf/`."""

from __future__ import annotations

from typing import Any

from sweeps.errors import UserError


def user_folders(hydra: Any) -> list[str]:
    """Return the user's folders given by `--config-dir` or `hydra.searchpath`, from Hydra's own configuration.

    Raises:
        UserError: one is no folder but a Python package: members could not be told where it lies.
    """
    found = []
    for source in hydra.runtime.config_sources:
        theirs = source.provider == "command-line" or "searchpath" in source.provider
        if theirs and source.schema != "file":
            raise UserError(f"hydra.searchpath: {source.schema}://{source.path} is no folder; give file:///path/to/it")
        if source.schema == "file" and source.provider != "main":
            found.append(str(source.path))
    return found
