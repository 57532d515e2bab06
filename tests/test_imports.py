"""Imports point one way, and the heavy ones stay out of the light packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_scalerl.choice import AXES

ROOT = Path(__file__).resolve().parent.parent
# Later layers may import earlier ones, never the other way round.
LAYERS = [
    {"rollout", "clock", "flops"},
    {"choice", "state"},
    set(AXES),
    {"task", "policy", "optim", "prompts", "truncation_alarm"},
    {"generator", "credit", "step_metrics"},
    {"cost_model", "distributed"},
    {"rollout_stream", "recipe"},
    {"compute_meter", "mechanism", "semantics", "data"},
    {"callbacks"},
    {"module"},
    {"plan", "member"},
    {"train"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Dotted names a file imports, type-checking-only ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def modules() -> list[tuple[str, Path]]:
    """Every module of the plugin with the unit (top-level module or folder) it belongs to."""
    package = ROOT / "lightning_scalerl"
    found = []
    for path in sorted(package.rglob("*.py")):
        unit = path.relative_to(package).parts[0].removesuffix(".py")
        if unit != "__init__":
            found.append((unit, path))
    return found


@pytest.mark.parametrize(("unit", "path"), modules(), ids=lambda value: str(value).rsplit("/", 1)[-1])
def test_imports_point_one_way(unit: str, path: Path) -> None:
    assert unit in RANK, f"{path} belongs to no layer: give it its place in LAYERS"
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lightning_scalerl" and len(parts) > 1 and parts[1] != unit:
            assert RANK[parts[1]] <= RANK[unit], f"{path} imports {name}, which stands above it"
            assert not (unit in AXES and parts[1] in AXES), f"{path}: axes never import each other ({name})"


def test_sweeps_knows_nothing_of_training() -> None:
    for path in sorted((ROOT / "sweeps").rglob("*.py")):
        for name in imports_of(path):
            assert name.split(".")[0] not in {"lightning_scalerl", "torch", "lightning", "transformers"}, (
                path,
                name,
            )


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sweeps_runs_without_torch() -> None:
    code = """
import sys, pkgutil, importlib
for heavy in ("torch", "lightning", "transformers", "lightning_scalerl"):
    sys.modules[heavy] = None
import sweeps
for module in pkgutil.walk_packages(sweeps.__path__, "sweeps."):
    if not module.name.startswith("sweeps.tracking"):
        importlib.import_module(module.name)
print("fine")
"""
    assert "fine" in run_python(code)


def test_plugin_needs_no_vllm() -> None:
    modules = "lightning_scalerl.module, lightning_scalerl.train"
    code = f"import sys; sys.modules['vllm'] = None; import {modules}; print('fine')"
    assert "fine" in run_python(code)
