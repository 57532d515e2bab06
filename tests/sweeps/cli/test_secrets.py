"""Test that secrets of the environment and the configuration are not written to a study's files.

Exceptions are the batch script and `launch.json`. Settings such as `setup` are commands of the jobs, so both files need
them unchanged; later submissions read `launch.json`. Only the owner may read these two files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydra_plugins.scalerl_sweeper import without_secrets
from tests.sweeps.cli.test_refused import commands, launch

# The names mark these variables as secret. Their values must be masked.
ENVIRONMENT = {
    "PGPASSWORD": "correct horse battery",
    "SSHPASS": "open-sesame-1",
    "DB_PASS": "melon-melon",
    "OPENAI_KEY": "k3y-of-ours-1234",
}
IN_COMMANDS = ["of-w-and-b-0001", "of-a-pull-0002", "of-srun-0003", "of-a-comment-0004", "github_pat_" + 40 * "a1"]
LAUNCHER = (
    f"hydra.launcher.setup=['export WANDB_API_KEY={IN_COMMANDS[0]}','echo {IN_COMMANDS[4]}']",
    f"hydra.launcher.teardown=['curl -H \"Authorization: Bearer {IN_COMMANDS[1]}\" h']",
    f"hydra.launcher.srun_args=['--export=ALL,HF_TOKEN={IN_COMMANDS[2]}']",
    f"+hydra.launcher.additional_parameters={{comment:'PASSWORD={IN_COMMANDS[3]}'}}",
    "++hydra.job.env_set.DEEPL_KEY=of-hydra-0005",
)

# An sbatch that accepts an array of two jobs, and a squeue that shows them as pending.
TAKES = """#!/bin/sh
for script; do :; done
sed -n 's/^#SBATCH --job-name=//p' "$script" >"$0.name"
echo Submitted batch job 7
"""
SHOWS = """#!/bin/sh
name=$(cat "${0%squeue}sbatch.name")
printf '%s\\n' "7_0|PENDING||Priority|$name" "7_1|PENDING||Priority|$name"
"""


def explodes(run_dir: Path, **_: object) -> None:
    """A member that fails with an error whose message contains passwords."""
    login = "postgresql://me:" + "hunter2hunter2" + "@db/runs"
    raise RuntimeError(f"cannot log in at {login} with {' or '.join(os.environ[name] for name in ENVIRONMENT)}")


@pytest.fixture(autouse=True)
def umask_0() -> Iterator[None]:
    """Set umask 0, so that a file is private only if the product makes it private."""
    old_umask = os.umask(0)
    yield
    os.umask(old_umask)


def files_with(folder: Path, secrets: list[str]) -> set[str]:
    """Return the names of the files that contain any of the secrets."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)}


def modes(folder: Path, *names: str) -> dict[str, int]:
    return {name: stat.S_IMODE(path.stat().st_mode) for name in names for path in folder.rglob(name)}


def test_a_local_study_writes_no_secret(tmp_path: Path) -> None:
    words = ["cluster=local", f"hydra.launcher.entry={__name__}:explodes", "seed=0"]
    done = launch(tmp_path, "study=x", *words, **ENVIRONMENT)
    assert done.returncode == 1 and "1 of 1 members failed" in done.stderr, done.stderr
    (log,) = tmp_path.rglob("log.txt")
    assert "cannot log in at postgresql://***@db/runs with *** or ***" in log.read_text()
    (tmp_path / "said.txt").write_text(done.stdout + done.stderr)
    assert {"multirun.yaml", "launch.json", "ledger.jsonl", "log.txt"} <= {path.name for path in tmp_path.rglob("*")}
    assert files_with(tmp_path, [*ENVIRONMENT.values(), "hunter2"]) == set()
    private = modes(tmp_path, "multirun.yaml", "launch.json", "log.txt")
    assert private == {"multirun.yaml": 0o600, "launch.json": 0o600, "log.txt": 0o600}


@pytest.mark.slow
def test_a_study_on_a_cluster_writes_secrets_only_for_its_jobs(tmp_path: Path) -> None:
    path = commands(tmp_path / "bin")
    (tmp_path / "bin" / "sbatch").write_text(TAKES)
    (tmp_path / "bin" / "squeue").write_text(SHOWS)
    study = ("study=x", "cluster=slurm", "seed=0,1", "hydra.launcher.detach=true", *LAUNCHER)
    done = launch(tmp_path, *study, PATH=path, **ENVIRONMENT)
    assert done.returncode == 0 and "The jobs continue without this process" in done.stderr, done.stderr
    (tmp_path / "said.txt").write_text(done.stdout + done.stderr)
    assert files_with(tmp_path, [*ENVIRONMENT.values(), "of-hydra"]) == set()
    assert files_with(tmp_path, IN_COMMANDS) == {"launch.json", "7_submission.sh"}
    (script,) = tmp_path.rglob("7_submission.sh")
    assert all(secret in script.read_text() for secret in IN_COMMANDS), "the batch script keeps the commands unchanged"
    names = ("multirun.yaml", "launch.json", "7_submission.sh", "submission.json")
    assert modes(tmp_path, *names) == dict.fromkeys(names, 0o600)
    folders = {
        directory.name: stat.S_IMODE(directory.stat().st_mode) for directory in (script.parent, script.parents[1])
    }
    assert set(folders.values()) == {0o700}
    # The rest of the configuration is kept.
    kept = next(tmp_path.rglob("multirun.yaml")).read_text()
    assert "export WANDB_API_KEY=***" in kept and "seed=0,1" in kept


def test_secrets_are_masked_in_hydras_configuration_but_not_in_its_folder() -> None:
    words = ["mlflow.uri=http://me:hunter2@host:5000", "+wandb.token=abc", "seed=0"]
    config = OmegaConf.create(
        {
            "mlflow": {"uri": "http://me:hunter2@host:5000"},
            "wandb": {"token": "abc"},
            "output_dir": "outputs/PASSWORD=my_study",
            "hydra": {
                "sweep": {"dir": "${output_dir}"},
                "job": {"override_dirname": ",".join(words), "name": "???"},
                "overrides": {"task": words, "hydra": ["hydra.launcher.setup=[export A_TOKEN=def]"]},
                "sweeper": {"params": {"a.password": "ghi", "seed": "0,1"}, "rows": [["+wandb.token=abc", "seed=0"]]},
            },
        }
    )
    safe = without_secrets(config)
    written = OmegaConf.to_yaml(safe)
    assert not [word for word in ("hunter2", "abc", "def", "ghi") if word in written], written
    assert safe.mlflow.uri == "http://***@host:5000" and safe.hydra.sweeper.params.seed == "0,1"
    assert safe.hydra.job.override_dirname == "mlflow.uri=http://***@host:5000,+wandb.token=***,seed=0"
    assert safe.hydra.sweep.dir == config.hydra.sweep.dir == "outputs/PASSWORD=my_study"
    assert config.wandb.token == "abc", "the launcher's configuration is not changed"
