"""Test that public docstrings begin with a verb or a noun, not with a word such as "What" or "Whether"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NOT_FIRST = {"What", "Of", "Whether", "How", "With", "That", "To", "Who", "Which"}
PACKAGES = ("lightning_scalerl", "sweeps", "hydra_plugins")


def public(tree: ast.Module) -> Iterator[Documented]:
    """Yield the module, its public classes and functions, and public members of its classes."""
    yield tree
    inside: list[ast.Module | ast.ClassDef] = [tree]
    while inside:
        for node in inside.pop().body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                yield node
                if isinstance(node, ast.ClassDef):
                    inside.append(node)


def unclear(source: str) -> list[str]:
    """Return name and first line of each public docstring that begins with a word of NOT_FIRST."""
    wrong_openings = []
    for node in public(ast.parse(source)):
        text = ast.get_docstring(node)
        if text is None:
            continue
        if text.split()[0].strip(",:") in NOT_FIRST:
            wrong_openings.append(f"{getattr(node, 'name', 'module')}: {text.splitlines()[0]}")
    return wrong_openings


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_begin_with_a_verb_or_a_noun(package: str) -> None:
    files = sorted(Path(ROOT / package).rglob("*.py"))
    assert files
    assert {
        str(path.relative_to(ROOT)): wrong_openings for path in files if (wrong_openings := unclear(path.read_text()))
    } == {}


def test_docstrings_with_a_wrong_first_word_are_found() -> None:
    source = '"""Whether this is a module."""\nclass A:\n    """Of all."""\n    def _b(self): "No."\n'
    assert unclear(source) == ["module: Whether this is a module.", "A: Of all."]
