"""The text of variants and recipes of `conf/`. Many variants have no file; their text is generated here."""

from __future__ import annotations

import re

from lightning_scalerl.composition import conf_dir, names_in, plain_variants

# Variants that change none of the recipes under test.
OF_EVERY_RECIPE = ("adapter_none", "allocation_fixed", "correction_behaviour", "credit_outcome", "optimizer_adamw")
VARIANTS = [name for name in names_in("variant") if name not in OF_EVERY_RECIPE]


def variant_text(variant: str) -> str:
    """Return the text of a variant's file. If it has none, make the text that the file would have."""
    path = conf_dir() / "variant" / f"{variant}.yaml"
    if path.is_file():
        return path.read_text()
    axis, file = plain_variants()[variant]
    return f"# @package _global_\ndefaults:\n  - override /{axis}: {file}\nlabel: {axis}={file}\n"


def recipe_text(recipe: str) -> str:
    """Return the text of a recipe's file, after the text of the recipe it is based on."""
    text = (conf_dir() / "recipe" / f"{recipe}.yaml").read_text()
    bases = [name for name in re.findall(r"^  - (\w+)$", text, re.MULTILINE) if name != "_self_"]
    return "".join(map(recipe_text, bases)) + text
