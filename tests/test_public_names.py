"""Tests of the registry of public names: it is complete, correct and documented, and reading it imports nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import lightning_scalerl
from lightning_scalerl import DesignChoice, axes, axis_names, public_names
from tests.paths import ROOT


def rows_of_the_page() -> dict[str, list[str]]:
    """Return the names that the documentation lists, by the first column of its table."""
    page = (ROOT / "docs" / "reference" / "design_space.md").read_text()
    section = page.partition("## Public names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {heading: re.findall(r"`(\w+)`", names) for heading, names in rows}


def test_the_page_lists_all_public_names() -> None:
    listed = rows_of_the_page()
    names = [name for row in listed.values() for name in row]
    assert sorted(names) == sorted(public_names())
    assert {name for heading, row in listed.items() if heading.startswith("axis ") for name in row} == axis_names()


def test_a_star_imports_every_public_name() -> None:
    assert sorted(lightning_scalerl.__all__) == sorted(public_names())


def test_every_name_is_defined_where_the_registry_says() -> None:
    for name in public_names():
        target = getattr(lightning_scalerl, name)
        assert target.__name__ == name and target.__module__ == f"lightning_scalerl.{lightning_scalerl._HOME_OF[name]}"


def descendants(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*(descendants(below) for below in kind.__subclasses__()))


def test_every_design_choice_is_registered() -> None:
    for module in walk_packages(axes.__path__, f"{axes.__name__}."):
        import_module(module.name)
    ours = {
        kind.__name__
        for kind in descendants(DesignChoice) - {DesignChoice}
        if kind.__module__.startswith(f"{axes.__name__}.")
    }
    assert {name for name in ours if not name.startswith("_")} <= axis_names()


def test_importing_the_package_imports_no_submodule() -> None:
    code = """
import sys, lightning_scalerl
lightning_scalerl.public_names(), dir(lightning_scalerl)
print(*sorted(name for name in sys.modules if "lightning" in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["lightning_scalerl"]
