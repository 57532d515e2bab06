"""Configuration folders of the user, searched by Hydra besides `conf/`, and a study's file where it has one."""

from __future__ import annotations

from pathlib import Path
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


# What a run of ours is composed from.
_OURS = "train"


def study_files(hydra: Any) -> list[str]:
    """Return the path of the file that `--config-name` names, in a list; empty where it is the one of runs of ours."""
    name = str(hydra.job.config_name).removesuffix(".yaml")
    if name == _OURS:
        return []
    places = [Path(source.path) / f"{name}.yaml" for source in hydra.runtime.config_sources if source.schema == "file"]
    # As Hydra looks: the program's own folder first.
    return [str(path) for path in places if path.is_file()][:1]
