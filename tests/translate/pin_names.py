"""Every configuration name of SkyRL or prime-rl at a commit, read from its source: writes names_<trainer>.txt.

Neither can be installed beside our tests (Ray, vLLM, GPUs), so that names are pinned. REPOSITORY is a git directory.

    python tests/translate/pin_names.py skyrl REPOSITORY a9564572eb8e91076be43c1bd5e4615e3de17265
    python tests/translate/pin_names.py prime-rl REPOSITORY 559b44772e471d1538537b8805cc77f3824a5e64
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Where the classes are, and the one that a run's configuration is.
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

# A module's classes and aliases; of one name the module's own comes first.
Scope = dict[str, ast.ClassDef | ast.expr]


def scope_of(source: str) -> Scope:
    """The classes of a module, and what its names stand for."""
    found: Scope = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.TypeAlias if sys.version_info >= (3, 12) else ()):
            found[node.name.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def names(path: str, scopes: list[Scope], own: Scope, label: str, prefix: str, depth: int = 0) -> Iterator[str]:
    """Dotted names of a class's fields, those of the classes that it names included."""
    place = next((scope for scope in (own, *scopes) if label in scope), None)
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
    """Names within an annotation, those in quotes too."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
            yield each.value


def main() -> None:
    """Write the names."""
    trainer, repository, commit = sys.argv[1:]
    paths, root = SOURCES[trainer]
    shown = [
        subprocess.check_output(["git", "-C", repository, "show", f"{commit}:{path}"], text=True) for path in paths
    ]
    scopes = [scope_of(source) for source in shown]
    found = sorted(set(names("", scopes, scopes[-1], root, "")))
    file = Path(__file__).with_name(f"names_{trainer}.txt")
    file.write_text(f"# {trainer} {commit}, {root}\n" + "\n".join(found) + "\n")
    print(file, len(found))


if __name__ == "__main__":
    main()
