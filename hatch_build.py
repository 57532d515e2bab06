"""Build backend of lightning-scalerl: hatchling, and an editable install of a checkout that is whole by itself.

A wheel of lightning-scalerl depends on scalerl-curves (sweeps/pyproject.toml) of the same version, which holds `sweeps`
and the command `scalerl`. An editable install has the checkout on its path, `sweeps` with it; a copy of sweeps in
site-packages would come first and hide the checkout's. So it takes what scalerl-curves needs, and its command, for its
own: `pip install -e .` is all, with pip and with uv, whether anything is published or not.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling import build
from hatchling.build import *  # noqa: F403  # what a frontend asks a backend for, as far as hatchling has it
from hatchling.metadata.plugin.interface import MetadataHookInterface

CURVES = "scalerl-curves"
# Hatchling does not tell a metadata hook what is being built, and loads this file anew for it.
EDITABLE = "SCALERL_BUILDS_EDITABLE"


def build_editable(*arguments: Any, **named: Any) -> str:
    """Build an editable wheel, see PEP 660."""
    os.environ[EDITABLE] = "1"
    return build.build_editable(*arguments, **named)


# Not under pip, which reads the metadata of the wheel itself.
if "prepare_metadata_for_build_editable" in build.__all__:

    def prepare_metadata_for_build_editable(*arguments: Any, **named: Any) -> str:
        """Write the metadata of an editable wheel, see PEP 660."""
        os.environ[EDITABLE] = "1"
        return build.prepare_metadata_for_build_editable(*arguments, **named)


class Dependencies(MetadataHookInterface):
    """Fill in `dependencies` and `scripts` of `[project]`; a source distribution has them written down already."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add to the dependencies of `[tool.hatch.metadata.hooks.custom]` what stands for `sweeps`."""
        if "dependencies" in metadata:
            return
        needed = list(self.config["dependencies"])
        if os.environ.get(EDITABLE):
            file = Path(self.root) / "sweeps" / "pyproject.toml"
            curves = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            metadata["scripts"] = curves["scripts"]
            named = {re.split(r"[^\w-]", each)[0] for each in needed}
            needed += [each for each in curves["dependencies"] if re.split(r"[^\w-]", each)[0] not in named]
        else:
            needed.insert(0, f"{CURVES}=={metadata['version']}")
        metadata["dependencies"] = needed
