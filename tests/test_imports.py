"""Tests of imports: rooms import only rooms of lower floors, there are no cycles, and heavy imports come late.

A room is a module or subpackage of `sweeps` or `lightning_scalerl` (see CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import ROOT

# Floors from the lowest up. A room may import rooms of lower floors, but not of its own or a higher floor.
FLOORS = {
    "sweeps": [
        {"threads"},
        {"errors", "redact", "parallel", "port", "process", "as_json", "terminal"},
        {"curve", "run"},
        {"executor", "tracking", "fit"},
        {"source"},
        {"command", "decide", "launch"},
        {"search"},
        {"report"},
        {"cli"},
        {"__main__", "api", "stopping"},
    ],
    "lightning_scalerl": [
        {"checks", "cache", "compat", "rollouts"},
        {"axes", "distributed", "sandbox", "state", "user_code"},
        {"choices", "environment", "model", "verify"},
        {"generator", "task", "update"},
        {"optim", "stream"},
        {"recipe"},
        {"composition", "measure"},
        {"callbacks", "translate"},
        {"data", "session"},
        {"module"},
        {"member"},
        {"train"},
    ],
}
FLOOR = {package: {room: n for n, rooms in enumerate(floors) for room in rooms} for package, floors in FLOORS.items()}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module or package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    """Whether a dotted name is one of our modules."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return dotted names that a file imports, including in functions and for type checking only."""
    imported_names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package.room import module` imports the module, not only the room.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported_names |= {name if is_module(name) else node.module for name in names}
    return frozenset(imported_names)


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_lower_floors(package: str) -> None:
    floor = FLOOR[package]
    for path in files(package):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in floor, f"{path} is not on any floor: add its room to FLOORS"
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1 and parts[1] in floor and parts[1] != room:
                assert floor[parts[1]] < floor[room], f"{path} imports {name}, which is not below it"


@pytest.mark.parametrize("package", FLOORS)
def test_there_is_no_import_cycle(package: str) -> None:
    known = {name_of(path) for path in files(package)}
    graph = {name_of(path): imports_of(path) & known for path in files(package)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")


SHARED_BY_AXES = ("choice", "results")  # modules in axes/ that are no axis


def test_axes_never_import_each_other() -> None:
    folder = ROOT / "lightning_scalerl" / "axes"
    for path in sorted(folder.rglob("*.py")):
        axis = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["lightning_scalerl", "axes"] and len(parts) > 2:
                assert parts[2] in (axis, *SHARED_BY_AXES), f"{path} imports {name}: axes must not import each other"


def test_the_sandbox_imports_only_checks_of_ours() -> None:
    """Modules that run inside the jail import only the standard library and each other; the others also `checks`."""
    from lightning_scalerl.sandbox.launch import _INSIDE

    room = "lightning_scalerl.sandbox"
    for path in files("lightning_scalerl/sandbox"):
        inside = {f"{room}.{name}" for name in _INSIDE}
        allowed = (
            inside if path.stem in _INSIDE else inside | {name_of(each) for each in files("lightning_scalerl/sandbox")}
        )
        for name in imports_of(path):
            ground = name == "lightning_scalerl.checks" and path.stem not in _INSIDE
            assert name in allowed or ground or name.split(".")[0] in sys.stdlib_module_names, (path, name)


def test_sweeps_does_not_import_training() -> None:
    for path in files("sweeps"):
        for name in imports_of(path):
            assert name.split(".")[0] not in {"lightning_scalerl", "torch", "lightning", "transformers"}, (path, name)


def test_fitting_does_not_import_files_or_tracking() -> None:
    for path in files("sweeps/fit"):
        for name in imports_of(path):
            parts = name.split(".")
            assert parts[0] not in {"json", "pathlib", "hydra", "mlflow"}, (path, name)
            assert parts[0] != "sweeps" or parts[1] in {"fit", "curve", "errors", "parallel", "as_json"}, (path, name)


def test_training_imports_only_run_and_basics_of_sweeps() -> None:
    """Exceptions: the race callback, which reads the study, members that run a command, and the version."""
    exceptions = {ROOT / "lightning_scalerl" / name for name in ("callbacks/race.py", "member/command.py")}
    for path in files("lightning_scalerl"):
        if path in exceptions:
            continue
        for name in imports_of(path):
            parts = name.split(".")
            assert parts[0] != "sweeps" or {*parts[1:2]} <= {
                "run",
                "errors",
                "redact",
                "terminal",
                "port",
                "process",
            }, (
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


def private_names(path: Path) -> set[str]:
    """Return names with one leading underscore that a file reads as attributes, passes to `getattr`, or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_members_of_libraries_are_used_only_in_compat() -> None:
    room = ROOT / "lightning_scalerl/compat"
    wrapped = set().union(*(private_names(path) for path in files("lightning_scalerl/compat")))
    assert {"_init_weights", "_locate", "_logger_connector"} <= wrapped
    for path in [*files("lightning_scalerl"), *files("sweeps")]:
        # `_actions` is allowed: argparse's parsers have an attribute of the same name.
        used = private_names(path) & wrapped - {"_actions"}
        assert path.is_relative_to(room) or not used, f"{path} uses {used}: call the function of {room} instead"


def test_vllm_is_not_imported_at_module_level() -> None:
    """vLLM is imported in functions that start an engine, not at module level. worker.py, which vLLM loads, may."""
    for path in files("lightning_scalerl"):
        if "vllm" not in path.read_text():
            continue
        assert not any(name.startswith("lightning_scalerl.generator.vllm.worker") for name in imports_of(path)), path
        if path.name != "worker.py":
            at_top = [ast.unparse(node).split() for node in ast.parse(path.read_text()).body]
            assert not any(words[0] in ("import", "from") and words[1].split(".")[0] == "vllm" for words in at_top), (
                path
            )


@pytest.mark.slow
def test_importing_the_library_changes_no_other_library() -> None:
    """Rooms that only our commands import are not checked."""
    commands = {"member", "translate", "train"}
    names = [name_of(path) for path in files("lightning_scalerl") if path.name != "worker.py"]
    names = [name for name in names if "sandbox" not in name and not commands & {*name.split(".")[1:2]}]
    code = f"""
import sys
from importlib import import_module
import lightning.pytorch, pytorch_lightning, torch, torchmetrics, transformers

def functions_and_methods():
    found = {{}}
    for place, module in [*sys.modules.items()]:
        if place.startswith(("lightning.", "pytorch_lightning", "torchmetrics")):
            for name, value in [*vars(module).items()]:
                methods = vars(value) if isinstance(value, type) else {{}}
                found |= {{(module, name): value, **{{(value, each): methods[each] for each in methods}}}}
    return {{place: value for place, value in found.items() if callable(value)}}

before = functions_and_methods()
import lightning_scalerl.compat.imports
lightning_scalerl.compat.imports.skip_unneeded_imports = None  # nothing calls it
for name in {names}:
    import_module(name)
after = functions_and_methods()
print(len(before) > 1000, [place for place, value in before.items() if after.get(place) is not value])
"""
    assert run_python(code).splitlines()[-1] == "True []"


@pytest.mark.slow
def test_commands_import_no_slow_package_before_use() -> None:
    code = """
import sys
sys.modules["vllm"] = None
import lightning_scalerl.train, lightning_scalerl.module
from lightning.pytorch import LightningModule
assert "torchmetrics" in sys.modules and not {"sklearn", "scipy.signal", "torchmetrics.text"} & sys.modules.keys()
assert "torch.distributed.checkpoint" not in sys.modules  # 40 ms, for sharded checkpoints alone
import gc
import transformers.models.llama.modeling_llama
names = {name for name in sys.modules if sys.modules[name]}
unused = {"aiohttp", "matplotlib", "pandas", "scipy", "sklearn", "torchao"} & names
assert not unused and gc.get_threshold()[0] == 10_000, unused
from transformers.utils import import_utils, is_scipy_available, is_sklearn_available
assert is_scipy_available() and is_sklearn_available()
assert transformers.loss.loss_utils.__loader__.get_source("transformers.loss.loss_utils")
from importlib.metadata import packages_distributions
known = import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert known.get("torch") == ["torch"] and known.get("flash_attn", []) == packages_distributions().get("flash_attn", [])
assert known.get("yaml") == packages_distributions()["yaml"]
import torch, torchmetrics
assert torchmetrics.MetricCollection({"a": torchmetrics.Accuracy("binary")})(torch.ones(2), torch.ones(2)) == {"a": 1}
assert issubclass(torchmetrics.Accuracy, torchmetrics.Metric) and torchmetrics.__version__
assert torchmetrics.MeanMetric().plot(torch.ones(3))[0].axes  # matplotlib is found after all
try:
    torchmetrics.Acuracy
except AttributeError as error:
    print(error)
"""
    assert "has no attribute 'Acuracy'" in run_python(code)


def test_only_slurm_job_reads_slurm_variables() -> None:
    """Only slurm_job.py reads SLURM's environment variables. The executor may name them in batch scripts."""
    for package in ("sweeps", "lightning_scalerl"):
        for path in files(package):
            if path == ROOT / "sweeps/run/slurm_job.py" or path.is_relative_to(ROOT / "sweeps/executor/slurm"):
                continue
            text = path.read_text()
            if "SLURM" not in text:
                continue
            words = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
            slurm_variables = [
                word for word in words if isinstance(word, str) and word.startswith(("SLURM_", "SLURMD_"))
            ]
            assert not slurm_variables, (path, slurm_variables)
