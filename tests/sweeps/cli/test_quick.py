"""Test that help, refusals and errors are quick. The number of imported modules is tested, not the time.

Unlike the time, that number does not depend on the load of the machine. The limits leave room for a few more modules;
a package such as SciPy adds several hundred.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.run.spec import RunSpec
from tests.examples import every
from tests.paths import ROOT

HEAVY = frozenset({"numpy", "scipy", "pandas", "pyarrow", "matplotlib", "mlflow", "hydra", "torch", "lightning"})
# Prints the imported packages at exit. `train` runs in this process instead of replacing it, so that it is counted too.
PROBE = """
import atexit, os, runpy, sys
def print_imported():
    loaded = {name.partition(".")[0] for name in sys.modules}
    print("IMPORTED", len(sys.modules), *sorted(loaded), file=sys.stderr)
atexit.register(print_imported)
def execv(path, arguments):
    sys.argv = ["train", *arguments[3:]]
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
os.execv = execv
from sweeps.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def answer(where: Path, *arguments: str) -> tuple[int, str, int, set[str]]:
    """Run `scalerl`. Returns its exit code, its output, the number of imported modules and their packages."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    errors, _, imported = done.stderr.rpartition("IMPORTED ")
    count, *packages = imported.split()
    return done.returncode, done.stdout + errors, int(count), set(packages)


TRAINING = frozenset({"torch", "lightning", "transformers"})


def plan_with_torch(lists: Sequence[Sequence[str]], folders: Sequence[str] = ()) -> list[RunSpec]:
    """Plan members with torch imported, as the real planner and many users' callbacks do."""
    import torch

    from tests import light

    assert torch.ones(1).item() == 1
    return light.plan(lists, folders)


# A task with readable rows. It is built before torch is imported.
DATA = [
    "task=dataset",
    "task.format=columns",
    "task.train=rows.jsonl",
    "task.heldout={test: test.jsonl}",
    "task.fields={prompt: q, answer: a}",
    "task.rewards=exact_match",
]
# Arguments, exit code, expected words, heavy packages that may be imported, limit on the number of modules.
CASES: list[tuple[list[str], int, str, set[str], int]] = [
    ([], 0, "commands:", set(), 150),
    (["--help"], 0, "commands:", set(), 150),
    (["--version"], 0, "scalerl ", set(), 220),
    (["rank", "--help"], 0, "example:", set(), 150),
    (["fit", "--r0", "much", "x.csv"], 2, "neither a number", set(), 150),
    (["completion", "bash"], 0, "complete", set(), 220),
    (["status", "nowhere"], 1, "no study here", set(), 300),
    (["collect", "nowhere"], 1, "no study here", set(), 300),
    (["fit", "nothing.csv"], 1, "no such file", {"numpy"}, 350),
    (["rank", "wrong.txt"], 1, "no column compute", {"numpy"}, 350),
    (["plan", "nothing.csv", "--target", "1"], 1, "no such file", {"numpy"}, 350),
    (["race", "nothing.csv", "--budget", "1"], 1, "no such file", {"numpy"}, 350),
    (["race", "nothing.csv", "--budget", "0"], 1, "--budget 0: give a positive compute", {"numpy"}, 350),
    (["decide", "a", "b", "--from", "nothing.tsv"], 1, "nothing.tsv: cannot be read", {"numpy"}, 380),
    (["report", "nothing.csv"], 1, "no such file", {"numpy"}, 365),
    (["train", "--help"], 0, "configuration groups", {"hydra"}, 500),
    (["train", "optimiser.lr=3"], 1, "did you mean optimizer?", {"hydra"}, 500),
    (["train", "loss=dapoo"], 1, "dapo", {"hydra"}, 500),
    (["train", *DATA, "task.train=/nothing"], 1, "task.train: cannot read '/nothing'", {"hydra"}, 550),
    (["train", *DATA, "task.fields={prompt: question, answer: a}"], 1, "no column question", {"hydra"}, 550),
    (["train", *DATA, "model=path", "model.path=/nothing", "scale=8b"], 1, "holds no config.json", {"hydra"}, 550),
    (["train", *DATA, "model=path", "model.path=/nothing"], 1, "scale: the settings", {"hydra"}, 550),
    (["train", "--multirun", "optimiser.lr=3", "seed=0,1"], 1, "did you mean optimizer?", {"hydra"}, 500),
    (["train", "--multirun", "optimiser.lr=3,4"], 1, "did you mean optimizer?", {"hydra"}, 500),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words", "allowed", "most"),
    every(6, every(3, CASES, pytest.mark.full)),
    ids=[" ".join(case[0]) or "bare" for case in CASES],
)
def test_quick_commands_import_few_modules(
    tmp_path: Path, arguments: list[str], code: int, words: str, allowed: set[str], most: int
) -> None:
    (tmp_path / "wrong.txt").write_text("hello\n")
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    (tmp_path / "test.jsonl").write_text('{"q": "1+2=", "a": "3"}\n')
    exit_code, output, count, packages = answer(tmp_path, *arguments)
    assert exit_code == code and words in output, output
    assert packages & HEAVY <= allowed
    print("MODULES", count)
    assert count < most


@pytest.mark.parametrize("given", [None, "2"])
def test_fits_use_one_blas_thread_unless_the_environment_sets_more(tmp_path: Path, given: str | None) -> None:
    source = tmp_path / "curve.csv"
    source.write_text("recipe,compute,reward\n" + "".join(f"a,{x},{x / (x + 5)}\n" for x in range(20)))
    threads = {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | threads
    program = (
        "import sys; from sweeps.cli.main import main; assert 'numpy' not in sys.modules\n"
        f"main(['fit', {str(source)!r}]); import os; print('THREADS', os.environ['OPENBLAS_NUM_THREADS'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert f"THREADS {given or 1}" in done.stdout, done.stderr


def test_the_help_of_training_is_quick_and_lists_the_users_choices(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/mine.yaml").write_text("")
    help_program = "from lightning_scalerl.train import main; main()"
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", help_program, "--help", "--config-dir", str(tmp_path)], capture_output=True, text=True
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (
        "loss: cispo, clip_cov, dapo, dapo_28, dppo, gmpo, gspo, kl_cov, mine, ppo" in done.stdout
        and "command/base: command" in done.stdout
    ), done.stderr
    assert "hydra/" not in done.stdout.partition("configuration groups and")[2]
    assert ended.ru_utime - began.ru_utime < 2.5  # Hydra's own help takes 5 seconds, ours 0.4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--multirun", "cluster=slurm"], "scalerl train: cluster: slurm needs sbatch"),
        (
            ["--multirun", "hydra/launcher=submitit_slurm"],
            "hydra/launcher=submitit_slurm is treated as cluster=slurm: cluster: slurm needs sbatch",
        ),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher=submitit_slurm: a single run runs in this process; add"),
    ],
)
def test_a_missing_slurm_is_reported_before_configurations_are_composed(
    tmp_path: Path, asked: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without SLURM, wherever this runs
    never = "hydra.launcher.planner=tests.sweeps.cli.test_quick:never"
    planner_options = [never, "++hydra.launcher.preload=[]"] if "--multirun" in asked else []
    exit_code, output, _, _ = answer(tmp_path, "train", *asked, *SMALL[2:], "study=x", "seed=0", *planner_options)
    (line,) = [line for line in output.splitlines() if line.startswith("scalerl")]
    assert exit_code == 1 and words in line


def never(override_lists: object, folders: object) -> None:
    """A planner that must not be called."""
    raise AssertionError("composed")


SMALL = ["study=x", "seed=0,1", "budget.steps=2", "model.batches=1", "model.width=32", "model.layers=1"]
REAL = "lightning_scalerl:plan_members"


@pytest.mark.slow
@pytest.mark.parametrize(
    "planner", [f"{__name__}:plan_with_torch", pytest.param(REAL, marks=pytest.mark.full)], ids=["light", "real"]
)
@pytest.mark.parametrize(
    ("cluster", "code", "words"),
    [("local", 0, "finished  scalerl seed 1"), ("slurm", 1, "slurm needs sbatch")],
    ids=["local", "slurm"],
)
def test_a_controller_never_imports_torch(
    tmp_path: Path, planner: str, cluster: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without SLURM, wherever this runs
    entry = "hydra.launcher.entry=tests.sweeps.cli.test_refused:train"
    options = [f"hydra.launcher.planner={planner}", entry, "++hydra.launcher.preload=[]", f"cluster={cluster}"]
    exit_code, output, _, packages = answer(tmp_path, "train", "--multirun", *SMALL, *options)
    assert exit_code == code and words in output, output
    assert "hydra" in packages and not packages & TRAINING
