"""The user's configuration folders, which Hydra searches besides `conf/`, and a study's own file if it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.errors import UserError


def user_folders(hydra: Any) -> list[str]:
    """Return the user's folders given by `--config-dir` or `hydra.searchpath`, from Hydra's own configuration.

    Raises:
        UserError: one is a Python package, not a folder: its location could not be passed to members.
    """
    folders = []
    for source in hydra.runtime.config_sources:
        is_users = source.provider == "command-line" or "searchpath" in source.provider
        if is_users and source.schema != "file":
            raise UserError(f"hydra.searchpath: {source.schema}://{source.path} is no folder; give file:///path/to/it")
        if source.schema == "file" and source.provider != "main":
            folders.append(str(source.path))
    return folders


# Name of the configuration that our own runs are composed from.
_OURS = "train"


def study_files(hydra: Any) -> list[str]:
    """Return the path of the file that `--config-name` names, in a list; empty if it is that of our own runs."""
    name = str(hydra.job.config_name).removesuffix(".yaml")
    if name == _OURS:
        return []
    places = [Path(source.path) / f"{name}.yaml" for source in hydra.runtime.config_sources if source.schema == "file"]
    # The places are in Hydra's search order: the program's own folder first.
    return [str(path) for path in places if path.is_file()][:1]
