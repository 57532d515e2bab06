"""Write names_<trainer>.txt: all configuration names of SkyRL or prime-rl, read from their source at a commit.

These trainers cannot be installed next to our tests (Ray, vLLM, GPUs), so their names are pinned in files. REPOSITORY
is a git directory.

    python tests/translate/pin_names.py skyrl REPOSITORY a9564572eb8e91076be43c1bd5e4615e3de17265
    python tests/translate/pin_names.py prime-rl REPOSITORY 559b44772e471d1538537b8805cc77f3824a5e64
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Source files with the configuration classes, and the class of a run's configuration.
SOURCES = {
    "skyrl": (["skyrl/train/config/config.py"], "SkyRLTrainConfig"),
    "prime-rl": (
        [
            f"packages/prime-rl-configs/src/prime_rl/configs/{name}.py"
            for name in ("shared", "algorithm", "inference", "orchestrator", "trainer", "rl")
        ],
        "RLConfig",
    ),
}

# A module's classes and aliases by name. Names are looked up in the module itself first.
Scope = dict[str, ast.ClassDef | ast.expr]


def scope_of(source: str) -> Scope:
    """Return the classes, aliases and assigned values of a module by name."""
    entries: Scope = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            entries[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            entries[node.targets[0].id] = node.value
        elif isinstance(node, ast.TypeAlias if sys.version_info >= (3, 12) else ()):
            entries[node.name.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            entries[node.target.id] = node.value
    return entries


def names(path: str, scopes: list[Scope], home: Scope, label: str, prefix: str, depth: int = 0) -> Iterator[str]:
    """Yield dotted names of a class's fields, including the fields of the classes in its annotations."""
    place = next((scope for scope in (home, *scopes) if label in scope), None)
    if place is None or depth > 9:
        return
    node = place[label]
    if not isinstance(node, ast.ClassDef):
        for inner in words(node):
            yield from names(path, scopes, place, inner, prefix, depth + 1)
        return
    for base in node.bases:
        for inner in words(base):
            if inner != label:
                yield from names(path, scopes, place, inner, prefix, depth + 1)
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            name = f"{prefix}{entry.target.id}"
            yield name
            for inner in words(entry.annotation):
                yield from names(path, scopes, place, inner, f"{name}.", depth + 1)


def words(node: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, including quoted ones."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            yield part.value


def main() -> None:
    """Write the names of one trainer."""
    trainer, repository, commit = sys.argv[1:]
    paths, root = SOURCES[trainer]
    sources = [
        subprocess.check_output(["git", "-C", repository, "show", f"{commit}:{path}"], text=True) for path in paths
    ]
    scopes = [scope_of(source) for source in sources]
    entries = sorted(set(names("", scopes, scopes[-1], root, "")))
    file = Path(__file__).with_name(f"names_{trainer}.txt")
    file.write_text(f"# {trainer} {commit}, {root}\n" + "\n".join(entries) + "\n")
    print(file, len(entries))


if __name__ == "__main__":
    main()
