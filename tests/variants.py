"""Variants and recipes of `conf/` as their files state them, or would: many variants need no file of their own."""

from __future__ import annotations

import re

from lightning_scalerl.composition import conf_dir, names_in, plain_variants

# No recipe that they are tried on departs from these.
OF_EVERY_RECIPE = ("adapter_none", "allocation_fixed", "correction_behaviour", "credit_outcome", "optimizer_adamw")
VARIANTS = [name for name in names_in("variant") if name not in OF_EVERY_RECIPE]


def variant_text(variant: str) -> str:
    """What stands in a variant's file, or would."""
    path = conf_dir() / "variant" / f"{variant}.yaml"
    if path.is_file():
        return path.read_text()
    axis, file = plain_variants()[variant]
    return f"# @package _global_\ndefaults:\n  - override /{axis}: {file}\nlabel: {axis}={file}\n"


def recipe_text(recipe: str) -> str:
    """A recipe's file, behind that of the recipe which it begins with."""
    text = (conf_dir() / "recipe" / f"{recipe}.yaml").read_text()
    bases = [name for name in re.findall(r"^  - (\w+)$", text, re.MULTILINE) if name != "_self_"]
    return "".join(map(recipe_text, bases)) + text
