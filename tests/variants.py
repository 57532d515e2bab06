"""Variants of `conf/`: those with a file, and those that take one file of an axis as it is and need none."""

from __future__ import annotations

from lightning_scalerl.composition import conf_dir, names_in, plain_variants

# No recipe that they are tried on departs from these.
OF_EVERY_RECIPE = ("adapter_none", "allocation_fixed", "correction_behaviour")
VARIANTS = [name for name in names_in("variant") if name not in OF_EVERY_RECIPE]


def variant_text(variant: str) -> str:
    """What stands in a variant's file, or would."""
    path = conf_dir() / "variant" / f"{variant}.yaml"
    if path.is_file():
        return path.read_text()
    axis, file = plain_variants()[variant]
    return f"# @package _global_\ndefaults:\n  - override /{axis}: {file}\nlabel: {axis}={file}\n"
