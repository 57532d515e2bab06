"""Find the user's configuration folders, which Hydra searches in addition to `conf/`, and the user's main file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.errors import UserError


def user_folders(hydra: Any) -> list[str]:
    """Return the user's folders, given by `--config-dir` or `hydra.searchpath`, from Hydra's own configuration.

    Raises:
        UserError: an entry is a Python package, not a folder, and could not be passed to members.
    """
    folders = []
    for source in hydra.runtime.config_sources:
        is_from_user = source.provider == "command-line" or "searchpath" in source.provider
        if is_from_user and source.schema != "file":
            raise UserError(f"hydra.searchpath: {source.schema}://{source.path} is no folder; give file:///path/to/it")
        if source.schema == "file" and source.provider != "main":
            folders.append(str(source.path))
    return folders


# Name of the main configuration file of this package.
_DEFAULT_CONFIG = "train"


def study_files(hydra: Any) -> list[str]:
    """Return the path of the file that `--config-name` names, in a list; empty for this package's own file."""
    name = str(hydra.job.config_name).removesuffix(".yaml")
    if name == _DEFAULT_CONFIG:
        return []
    paths = [Path(source.path) / f"{name}.yaml" for source in hydra.runtime.config_sources if source.schema == "file"]
    # The paths are in Hydra's search order: the program's own folder first.
    return [str(path) for path in paths if path.is_file()][:1]
