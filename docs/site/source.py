"""Reads docstrings and YAML files as text, so that nothing is run and nothing that needs torch is imported."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import lightning_scalerl
from lightning_scalerl.composition import plain_variants

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
HOME_OF: dict[str, str] = lightning_scalerl._HOME_OF


@dataclass(frozen=True)
class Documented:
    """A class or function: its docstring, its arguments, and the sources that it and its helpers name."""

    docstring: str
    arguments: dict[str, str]
    sources: tuple[str, ...]

    @property
    def summary(self) -> str:
        """First paragraph of the docstring on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())


@cache
def module_of(dotted: str) -> tuple[ast.Module, Path] | None:
    """Return the parsed module of a dotted name within this repository; None for another package."""
    base = ROOT.joinpath(*dotted.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text()), path
    return None


def find(target: str) -> Documented | None:
    """Return the documentation of a `_target_`; None if it is not in this repository."""
    home, _, name = target.rpartition(".")
    if home == "lightning_scalerl":
        home = f"lightning_scalerl.{HOME_OF[name]}"
    found = module_of(home)
    return None if found is None else _documented(found[0], name)


def _documented(module: ast.Module, name: str) -> Documented | None:
    nodes = {
        node.name: node
        for node in module.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    node = nodes.get(name)
    if node is None:
        return None
    docstring = ast.get_docstring(node) or ""
    arguments: dict[str, str] = {}
    bases = [each.id for each in node.bases if isinstance(each, ast.Name)] if isinstance(node, ast.ClassDef) else []
    for base in [each for each in bases if each in nodes]:
        inherited = _documented(module, base)
        arguments |= {} if inherited is None else inherited.arguments
    for line in module.body:
        if isinstance(line, ast.ImportFrom) and line.module:
            for imported in [alias.name for alias in line.names if alias.name in bases]:
                inherited = find(f"{line.module}.{imported}")
                arguments |= {} if inherited is None else inherited.arguments
    arguments |= _arguments(docstring)
    # The pure function of a choice is in the module of its class, and its docstring names the equation's source.
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    helpers = [each for key, each in nodes.items() if key in names and isinstance(each, ast.FunctionDef)]
    methods = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    texts = [docstring, *(ast.get_docstring(each) or "" for each in [*methods, *helpers])]
    sources = dict.fromkeys(source for text in texts for source in _sources(text))
    return Documented(docstring, arguments, tuple(sources))


def _sources(docstring: str) -> Iterator[str]:
    for found in re.findall(r"Sources?: (.+?)(?:\n\n|\Z)", docstring, flags=re.DOTALL):
        yield " ".join(found.split()).rstrip(".")


def _arguments(docstring: str) -> dict[str, str]:
    """Return the entries of the sections Args and Attributes, each on one line."""
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:(?: +.*)?\n?)*)", docstring, flags=re.MULTILINE):
        for entry in re.split(r"\n(?=\S)", inspect.cleandoc(section)):
            names, separator, text = entry.partition(":")
            if separator:
                found |= {name.strip(): " ".join(text.split()) for name in re.split(r",|/", names)}
    return found


@dataclass(frozen=True)
class Key:
    """A key of a configuration file: its dotted name, its value as written, and its comment."""

    name: str
    value: str
    comment: str


@dataclass(frozen=True)
class Choice:
    """A file of `conf/`: its keys, its target, and its first comment.

    Its defaults may begin with a file outside of its group (`base`) or with another file of its group (`sibling`).
    """

    group: str
    name: str
    about: str
    keys: tuple[Key, ...]
    overrides: tuple[tuple[str, str, str], ...]
    base: str = ""
    sibling: str = ""

    @property
    def target(self) -> str:
        """Class or function that the file, or the file that it begins with, names; "" for none."""
        named = next((key.value for key in self.keys if key.name.split(".")[-1] == "_target_"), "")
        begun_with = f"{self.group}/{self.sibling}" if self.sibling else self.base
        return named or (read(CONF / f"{begun_with}.yaml").target if begun_with else "")


def choices(group: str) -> list[Choice]:
    """Return the files of a group of the configuration, by name, including variants without a file."""
    found = {path.stem: read(path) for path in (CONF / group).glob("*.yaml")}
    if group == "variant":
        plain = {
            name: Choice(group, name, "", (), ((axis, file, ""),)) for name, (axis, file) in plain_variants().items()
        }
        found = plain | found
    return [found[name] for name in sorted(found)]


def groups() -> list[str]:
    """Return the names of all groups, Hydra's own last."""
    folders = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
    return [*folders, *sorted(f"hydra/{path.name}" for path in (CONF / "hydra").iterdir())]


def read(path: Path) -> Choice:
    """Return a configuration file with the comments that YAML's parser drops."""
    text = path.read_text()
    lines = text.splitlines()
    head = [line for line in _leading(lines) if not line.startswith("# @package")]
    about = " ".join(line.lstrip("# ") for line in head)
    package = "" if any(line.startswith("# @package _global_") for line in lines) else _package(path)
    node = yaml.compose(text)
    keys = tuple(_keys(node, package, lines)) if isinstance(node, yaml.MappingNode) else ()
    group = path.parent.relative_to(CONF).as_posix()
    base = re.search(r"^defaults: \[/(\w+)@_here_", text, flags=re.MULTILINE)
    first = (yaml.safe_load(text) or {}).get("defaults", [""])[0]
    sibling = (
        first if isinstance(first, str) and first != "_self_" and (path.parent / f"{first}.yaml").is_file() else ""
    )
    return Choice(group, path.stem, about, keys, tuple(_overrides(lines)), base[1] if base else "", sibling)


def _leading(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def _package(path: Path) -> str:
    return ".".join(path.parent.relative_to(CONF).parts)


def _overrides(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield group, choice and comment of each override in a file's list of defaults."""
    for line in lines:
        if made := re.fullmatch(r"  - override /([\w/]+): ([\w.]+)(?: +# (.*))?", line):
            yield made[1], made[2], made[3] or ""


def _keys(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Key]:
    for key, value in node.value:
        if key.value == "defaults" and key.start_mark.column == 0:
            continue
        name = f"{prefix}.{key.value}" if prefix else str(key.value)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _keys(value, name, lines)
        else:
            yield Key(name, _written(value, lines), _comment(value, key, lines))


def _written(node: yaml.Node, lines: list[str]) -> str:
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return "(a text)"
    start, end = node.start_mark, node.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return " ".join(str(yaml.safe_load(yaml.serialize(node))).split())


def _comment(value: yaml.Node, key: yaml.Node, lines: list[str]) -> str:
    """Return the comment after a value, or the comment lines directly above its key."""
    end = value.end_mark
    if end.line < len(lines) and (behind := re.fullmatch(r"\s*# (.*)", lines[end.line][end.column :])):
        return behind[1]
    # The comment of a list on several lines follows the key.
    begun = key.end_mark
    if value.start_mark.line > begun.line and (said := re.fullmatch(r":\s*# (.*)", lines[begun.line][begun.column :])):
        return said[1]
    above: list[str] = []
    number = key.start_mark.line - 1
    while number >= 0 and re.match(r"\s+# ", lines[number]):
        above.insert(0, lines[number].strip().lstrip("# "))
        number -= 1
    return " ".join(above)


def loaded(path: Path) -> Any:
    """Return a YAML file as plain Python objects."""
    return yaml.safe_load(path.read_text())
