"""Tests of batch scripts and job settings; a script must do the same for every name of the study.

The script is run by bash, with `srun`, `squeue`, `scontrol` and `sleep` replaced by programs that record how they were
called. No job is submitted.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sweeps.errors import UserError
from sweeps.executor.base import Launch
from sweeps.executor.failure import KINDS
from sweeps.executor.node import manifest
from sweeps.executor.node.manifest import record_code
from sweeps.executor.slurm.handover import executor_of, submit
from sweeps.executor.slurm.settings import JobSettings
from sweeps.executor.slurm.submission import new_folder, sanitize_name, write_submission
from sweeps.run import provenance
from tests.paths import ROOT

YAML = ROOT / "conf/hydra/launcher/scalerl_slurm.yaml"
NAME = "0123456789ab"

HOSTILE = [
    "a study",
    "it's",
    'so "called"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "&& touch pwned",
    "a|touch pwned",
    "> pwned",
    "$HOME",
    "!!",
    "*?[a-z]{1,2}",
    "#no comment",
    "~",
    "-rf",
    "größe ☃ 学",
    "'\"$(touch pwned)\"'",
]


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "record_code", lambda folder: {"commit": None})


def script_of(
    study: Path, job_settings: Mapping[str, Any] | None = None, members: int = 1, title: str = "study"
) -> Path:
    """Return the batch script that submitit writes for a submission; no sbatch is called."""
    study.mkdir(parents=True, exist_ok=True)
    launches = [Launch(f"run{number}", study / "runs" / f"run{number}") for number in range(members)]
    folder = new_folder(study, NAME)
    request = write_submission(
        folder, launches, JobSettings.of(dict(job_settings or {})), "some.module:entry", 3, title
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        patch.setattr("submitit.core.utils.CommandFunction", lambda command, verbose: lambda: "Submitted batch job 77")
        assert submit(executor_of(request), request.members) == "77"
    return folder / "77_submission.sh"


def options(script: Path) -> dict[str, str]:
    """Return the options of a script for sbatch."""
    lines = [line[len("#SBATCH --") :] for line in script.read_text().splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


STUB = """#!/bin/bash
name=$(/usr/bin/basename "$0")
printf '%s\\0' "$name" "$@" >> "$STUBS/calls"; printf '\\n\\0' >> "$STUBS/calls"
case $name in
srun)
    env -0 > "$STUBS/environment"
    [ -z "$STUB_ASKS" ] || /usr/bin/touch "$SCALERL_REQUEUE_FILE"
    exit "$STUB_CODE" ;;
squeue)
    state=$(/usr/bin/head -n 1 "$STUBS/states"); /usr/bin/sed -i 1d "$STUBS/states"
    [ "$state" != AWAY ] || exit 1
    [ -z "$state" ] || echo "$state" ;;
scontrol)
    [ -z "$STUB_DIES" ] || kill -9 $PPID
    exit "$STUB_SCONTROL" ;;
esac
"""


@dataclass
class Node:
    """A node on which a batch script runs.

    Attributes:
        directory: folder of the stubs and their records.
        variables: environment variables of the script; they override those that SLURM sets.
    """

    directory: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bin = self.directory / "bin"
        self.bin.mkdir(parents=True)
        self.work = self.directory / "work"
        self.work.mkdir()
        for name in ("srun", "squeue", "scontrol", "sleep"):
            (self.bin / name).write_text(STUB)
            (self.bin / name).chmod(0o755)

    def run(
        self,
        script: Path,
        code: int = 0,
        asks_for_requeue: bool = False,
        states: Sequence[str] = ("RUNNING",) * 9,
        scontrol: int = 0,
        dies: bool = False,
    ) -> int:
        """Run a script and return its exit status."""
        (self.directory / "states").write_text("".join(f"{state}\n" for state in states))
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.directory),
            "SLURM_JOB_ID": "77",
            "STUBS": str(self.directory),
            "STUB_CODE": str(code),
            "STUB_ASKS": "yes" if asks_for_requeue else "",
            "STUB_SCONTROL": str(scontrol),
            "STUB_DIES": "yes" if dies else "",
            **self.variables,
        }
        result = subprocess.run(
            ["/bin/bash", str(script)], env=environment, cwd=self.work, capture_output=True, text=True, timeout=60
        )
        self.output = result.stdout + result.stderr
        return result.returncode

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a program."""
        path = self.directory / "calls"
        text = path.read_text() if path.exists() else ""
        all_calls = [call.split("\0")[:-1] for call in text.split("\n\0") if call]
        return [arguments[1:] for arguments in all_calls if arguments[0] == name]

    def environment(self) -> dict[str, str]:
        """Return the environment of the member."""
        entries = (self.directory / "environment").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


# --- commands of the script ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_for_any_study_name_the_script_runs_only_its_member(tmp_path: Path, node: Node, name: str) -> None:
    study = tmp_path / "studies" / name
    script = script_of(study, title=name)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert node.run(script, code=0) == 0, node.output
    (call,) = node.calls("srun")
    folder = str(study.resolve() / "jobs" / NAME)
    assert call[-5:] == [sys.executable, "-u", "-m", "submitit.core._submit", folder]
    assert call[:-5] == ["--unbuffered", "--output", f"{folder}/%j_%t_log.out"]
    assert node.environment()["SCALERL_REQUEUE_FILE"] == f"{folder}/requeue-77-0"
    assert node.output == ""
    assert list(node.work.iterdir()) == [], "the name was run as a command"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("name", HOSTILE)
def test_for_any_study_name_a_requeue_is_requested(tmp_path: Path, node: Node, name: str) -> None:
    script = script_of(tmp_path / "studies" / name)
    node.run(script, code=1, asks_for_requeue=True)
    assert node.calls("scontrol") == [["requeue", "77"]]


@pytest.mark.parametrize("name", ["50%", "%j", "two\nlines", "a\tb", "a\\b"])
def test_names_that_slurm_would_misread_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    study = tmp_path / name
    study.mkdir()
    with pytest.raises(UserError, match="choose another name"):
        new_folder(study, NAME)
    assert list(study.iterdir()) == []


@pytest.mark.parametrize("key", ["comment", "constraint", "account", "mail_user"])
@pytest.mark.parametrize("value", ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "a b"])
def test_values_of_settings_are_not_run_as_commands(tmp_path: Path, node: Node, key: str, value: str) -> None:
    script = script_of(tmp_path / "study", {key: value})
    assert node.run(script) == 0
    assert list(node.work.iterdir()) == []


@pytest.mark.parametrize("key", ["comment", "constraint"])
def test_a_line_break_in_a_setting_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError):
        JobSettings.of({key: "a\ntouch pwned\n"})


def test_an_array_has_one_task_per_member(tmp_path: Path) -> None:
    script = script_of(tmp_path, {"array_parallelism": 4}, members=6)
    assert options(script)["array"] == "0-5%4"
    assert options(script)["output"].strip("'").endswith("%A_%a_0_log.out")
    manifest = json.loads((script.parent / "submission.json").read_text())
    assert manifest["members"] == [f"run{number}" for number in range(6)]
    assert manifest["entry"] == "some.module:entry"
    assert manifest["submission"] == NAME


def test_threads_python_setup_and_teardown(tmp_path: Path, node: Node) -> None:
    job_settings = {
        "python": "apptainer exec 'my image.sif' python3",
        "setup": ["export BEFORE=1", "touch before"],
        "teardown": ["touch after"],
        "srun_args": ["--cpu-bind=none", "--mpi=pmi2"],
    }
    assert node.run(script_of(tmp_path / "study", job_settings), code=3) == 3
    (call,) = node.calls("srun")
    assert call[3:5] == ["--cpu-bind=none", "--mpi=pmi2"]
    assert call[5:11] == ["apptainer", "exec", "my image.sif", "python3", "-u", "-m"]
    environment = node.environment()
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"], environment["BEFORE"]) == ("3", "3", "1")
    assert sorted(path.name for path in node.work.iterdir()) == ["after", "before"]


@pytest.mark.parametrize(
    ("job_settings", "gpus"),
    [
        ({}, False),
        ({"cpus_per_gpu": 2, "mem_per_gpu": "4G"}, False),
        ({"gres": "license:2"}, False),
        ({"gpus_per_node": 2}, True),
        ({"gpus_per_node": "a100:2"}, True),
        ({"gpus_per_task": 1}, True),
        ({"gres": "gpu:a100:1"}, True),
        ({"additional_parameters": {"gpus": 4}}, True),
        ({"additional_parameters": {"tres-per-node": "gres/gpu:1"}}, True),
        ({"additional_parameters": {"reservation": "gpus"}}, False),
        ({"gpus_per_node": 2, "require_gpu": False}, False),
        ({"gpus_per_node": 0}, False),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*cpus_per_gpu.*")
def test_the_manifest_says_whether_a_job_requests_gpus(
    tmp_path: Path, job_settings: dict[str, Any], gpus: bool
) -> None:
    script = script_of(tmp_path, job_settings)
    assert json.loads((script.parent / "submission.json").read_text())["gpus"] is gpus
    assert "require" not in script.read_text()


def test_a_failed_rank_ends_the_other_ranks(tmp_path: Path) -> None:
    text = script_of(tmp_path / "two", {"nodes": 2}).read_text()
    assert "--kill-on-bad-exit=1" in text
    assert "--kill-on-bad-exit" not in script_of(tmp_path / "one").read_text()


def test_settings_become_options_of_sbatch(tmp_path: Path) -> None:
    job_settings = {
        "timeout_min": 90,
        "signal_delay_s": 300,
        "mem_gb": 7.5,
        "cpus_per_task": 4,
        "gpus_per_node": 2,
        "tasks_per_node": 2,
        "partition": "gpu,long",
        "qos": "high",
        "exclude": "n[1-3]",
        "additional_parameters": {"reservation": "mine"},
    }
    sbatch_options = options(script_of(tmp_path, job_settings, title="a title; with $things"))
    assert sbatch_options["time"] == "90"
    assert sbatch_options["signal"] == "USR2@300"
    assert sbatch_options["mem"] == "7680MB"
    assert sbatch_options["cpus-per-task"] == "4"
    assert sbatch_options["gpus-per-node"] == "2"
    assert sbatch_options["ntasks-per-node"] == "2"
    assert sbatch_options["partition"].strip("'") == "gpu,long"
    assert sbatch_options["exclude"].strip("'") == "n[1-3]"
    assert sbatch_options["reservation"] == "mine"
    assert sbatch_options["job-name"] == f"a_title_with_things-{NAME}"
    assert {"requeue", "open-mode"} <= sbatch_options.keys()
    assert "wckey" not in sbatch_options
    # Options in sbatch's own syntax are passed on unchanged.
    assert options(script_of(tmp_path / "other", {"additional_parameters": {"mem": 9000}}))["mem"] == "9000"


@pytest.mark.parametrize("name", ["", "...", "☃☃", "x" * 300, "a/b c", "-rf", "$(x)"])
def test_a_jobs_name_is_harmless_and_never_empty(name: str) -> None:
    job_name = sanitize_name(name)
    assert 0 < len(job_name) <= 60
    assert all(character.isascii() and (character.isalnum() or character in "_.+=-") for character in job_name)
    assert not job_name.startswith("-")


# --- after the member has ended ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3, 137])
def test_the_script_has_the_members_exit_status(tmp_path: Path, node: Node, code: int) -> None:
    assert node.run(script_of(tmp_path / "study", {"teardown": ["true", "false"]}), code=code) == code
    assert node.calls("scontrol") == node.calls("squeue") == []


def test_a_requested_requeue_is_made_once(tmp_path: Path, node: Node) -> None:
    assert node.run(script_of(tmp_path / "study"), code=1, asks_for_requeue=True) == 1
    assert node.calls("scontrol") == [["requeue", "77"]]
    assert node.calls("squeue") == [["-h", "-j", "77", "-o", "%T"]]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PENDING", "TIMEOUT", ""])
def test_a_job_that_no_longer_runs_is_not_requeued(tmp_path: Path, node: Node, state: str) -> None:
    assert node.run(script_of(tmp_path / "study"), code=1, asks_for_requeue=True, states=[state] * 9) == 1
    assert node.calls("scontrol") == []
    assert len(node.calls("squeue")) == 1


def test_a_requeue_waits_for_an_unavailable_scheduler(tmp_path: Path, node: Node) -> None:
    states = ["AWAY", "AWAY", "RUNNING"]
    assert node.run(script_of(tmp_path / "study"), code=1, asks_for_requeue=True, states=states) == 1
    assert node.calls("sleep")[:2] == [["1"], ["2"]]
    assert node.calls("scontrol") == [["requeue", "77"]]


def test_a_requeue_that_never_succeeds_ends_after_a_while(tmp_path: Path, node: Node) -> None:
    assert node.run(script_of(tmp_path / "study"), code=1, asks_for_requeue=True, scontrol=1) == 1
    assert len(node.calls("scontrol")) == 6
    assert sum(int(call[0]) for call in node.calls("sleep")) < 120


def test_the_request_of_an_earlier_start_is_ignored(tmp_path: Path, node: Node) -> None:
    script = script_of(tmp_path / "study")
    node.run(script, code=1, asks_for_requeue=True)
    assert len(node.calls("scontrol")) == 1
    node.variables["SLURM_RESTART_COUNT"] = "1"
    node.run(script, code=1)
    assert len(node.calls("scontrol")) == 1
    assert node.environment()["SCALERL_REQUEUE_FILE"].endswith("requeue-77-1")


@pytest.mark.parametrize("job_id", ["12", "15"])
def test_a_task_of_an_array_requeues_only_itself(tmp_path: Path, node: Node, job_id: str) -> None:
    """One task of each array has the array's id as job id, which `squeue` and `scontrol` take for all its tasks."""
    node.variables |= {"SLURM_JOB_ID": job_id, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    node.run(script_of(tmp_path / "study", members=4), code=1, asks_for_requeue=True)
    assert node.calls("squeue") == [["-h", "-j", "12_3", "-o", "%T"]]
    assert node.calls("scontrol") == [["requeue", "12_3"]]


@pytest.mark.parametrize(
    "setup",
    [
        "set -e",
        "set -u",
        "set -o pipefail",
        "set -eE; trap 'exit 9' ERR",
    ],
)
def test_strict_shell_options_do_not_prevent_a_requeue(tmp_path: Path, node: Node, setup: str) -> None:
    script = script_of(tmp_path / "study", {"setup": [setup]})
    assert node.run(script, code=1, asks_for_requeue=True) == 1
    assert node.calls("scontrol") == [["requeue", "77"]]


def test_teardown_commands_run_before_a_requeue_kills_the_script(tmp_path: Path, node: Node) -> None:
    script = script_of(tmp_path / "study", {"teardown": ["touch after"]})
    node.run(script, code=1, asks_for_requeue=True, dies=True)
    assert [path.name for path in node.work.iterdir()] == ["after"]


# --- settings ------------------------------------------------------------------------------------------------

# Keys that the launcher reads itself, and does not pass to the job settings.
LAUNCHER_KEYS = {"_target_", "planner", "entry", "preload", "detach", "retries"}


def defaults() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(YAML.read_text())
    return values


def test_the_launchers_default_configuration_is_valid(tmp_path: Path) -> None:
    job_settings = {key: value for key, value in defaults().items() if key not in LAUNCHER_KEYS}
    settings = JobSettings.of(job_settings)
    assert JobSettings.of(settings.to_mapping()) == settings
    assert settings.timeout_min == 60
    assert settings.signal_delay_s == 120
    script_of(tmp_path, job_settings)


SENSIBLE: dict[str, Any] = {
    "timeout_min": 30,
    "signal_delay_s": 60,
    "nodes": 2,
    "tasks_per_node": 2,
    "cpus_per_task": 3,
    "gpus_per_node": 1,
    "mem_gb": 3,
    "cpus_per_gpu": 2,
    "gpus_per_task": 1,
    "mem_per_gpu": "4G",
    "mem_per_cpu": "2G",
    "dependency": "afterok:3",
    "exclusive": True,
    "stderr_to_stdout": False,
    "array_parallelism": 3,
    "additional_parameters": {"reservation": "r"},
    "srun_args": ["-v"],
    "setup": ["true"],
    "teardown": ["true"],
    "python": "python3",
    "require_gpu": False,
    "max_num_timeout": 2,
    "array_size": 5,
    "poll_s": 3,
    "lost_after_s": 60,
}


@pytest.mark.parametrize("key", sorted(defaults().keys() - LAUNCHER_KEYS))
@pytest.mark.filterwarnings("ignore:.*cpus_per_gpu.*")
def test_every_key_of_the_launchers_configuration_can_be_set(tmp_path: Path, node: Node, key: str) -> None:
    job_settings = {key: SENSIBLE.get(key, "some")}
    settings = JobSettings.of(job_settings)
    assert JobSettings.of(json.loads(json.dumps(settings.to_mapping()))) == settings
    assert node.run(script_of(tmp_path / "study", job_settings)) == 0


def test_retries_in_the_configuration_are_the_codes_defaults() -> None:
    assert defaults()["retries"] == {kind: limit for kind, (_, limit) in KINDS.items()}


def test_an_unknown_key_is_refused_with_the_valid_keys() -> None:
    with pytest.raises(UserError) as refusal:
        JobSettings.of({"partitoin": "gpu"})
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith("cluster: partitoin is no setting of a job; valid: ")
    valid = set(message.split("valid: ")[1].split(", "))
    assert defaults().keys() - LAUNCHER_KEYS - {"submitit_folder"} <= valid


@pytest.mark.parametrize(
    "job_settings",
    [
        {"timeout_min": 0},
        {"timeout_min": True},
        {"timeout_min": "60"},
        {"nodes": 0},
        {"nodes": 1.5},
        {"tasks_per_node": -1},
        {"array_size": 0},
        {"array_size": 1.5},
        {"poll_s": "soon"},
        {"lost_after_s": []},
        {"setup": 3},
    ],
)
def test_values_that_cannot_work_are_refused_by_name(job_settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(job_settings))):
        JobSettings.of(job_settings)


@pytest.mark.parametrize(
    "job_settings",
    [
        {"signal_delay_s": "soon"},
        {"poll_s": 0},
        {"poll_s": -5},
        {"poll_s": float("nan")},
        {"lost_after_s": -1},
        {"setup": "module load cuda"},
        {"teardown": "rm -r scratch"},
        {"max_num_timeout": "often"},
        {"max_num_timeout": -1},
        {"array_size": True},
        {"require_gpu": "yes"},
        {"array_parallelism": 0},
        {"additional_parameters": "reservation=r"},
        {"srun_args": "--mpi=pmi2"},
        {"mem_gb": "8"},
    ],
    ids=str,
)
def test_more_values_that_cannot_work_are_refused_by_name(job_settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(job_settings))):
        JobSettings.of(job_settings)


@pytest.mark.parametrize(
    ("delay_s", "minutes", "works"),
    [
        (120, 60, True),
        (120, 4, True),
        (120, 3, False),
        (30, 1, True),
        (31, 1, False),
        (1800, 60, True),
        (1801, 60, False),
    ],
)
def test_signal_delay_is_at_most_half_of_the_jobs_time(delay_s: int, minutes: int, works: bool) -> None:
    job_settings = {"signal_delay_s": delay_s, "timeout_min": minutes}
    if works:
        assert JobSettings.of(job_settings).signal_delay_s == delay_s
        return
    with pytest.raises(UserError, match=f"signal_delay_s={delay_s}.*timeout_min={minutes}"):
        JobSettings.of(job_settings)


def test_null_means_the_default() -> None:
    assert JobSettings.of(dict.fromkeys(SENSIBLE)) == JobSettings()


# --- file permissions and secrets ----------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_only_the_owner_can_read_folders_and_scripts(tmp_path: Path, umask: int) -> None:
    old_umask = os.umask(umask)
    try:
        script = script_of(tmp_path / "study")
    finally:
        os.umask(old_umask)
    assert mode(script) == 0o600
    assert mode(script.parent) == 0o700
    assert mode(script.parents[1]) == 0o700


def test_a_submissions_name_is_used_once(tmp_path: Path) -> None:
    new_folder(tmp_path, NAME)
    with pytest.raises(FileExistsError):
        new_folder(tmp_path, NAME)


LOGIN = "https://me:hunter2hunter2@mlflow.example:5000"
TOKEN = "hf_" + "a1" * 15


def test_the_manifest_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", f"mlflow.uri={LOGIN}", f"token={TOKEN}", "key=from-the-environment"])
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    job_settings = {"comment": f"see {LOGIN}", "additional_parameters": {"api_key": "plain-but-secret"}}
    script = script_of(tmp_path, job_settings)
    text = (script.parent / "submission.json").read_text()
    for secret in ("hunter2hunter2", TOKEN, "from-the-environment", "plain-but-secret"):
        assert secret not in text
    assert json.loads(text)["command"] == [
        "train",
        "mlflow.uri=https://***@mlflow.example:5000",
        "token=***",
        "key=***",
    ]


def test_the_commit_and_changes_of_the_code_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit and uncommitted changes of the code are recorded, with secrets masked."""
    repository = tmp_path / "repository"
    (repository / "sweeps/executor").mkdir(parents=True)
    source = repository / "sweeps/executor/submission.py"
    source.write_text("one\n")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        done = subprocess.run(["git", "-C", str(repository), *identity, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(provenance, "ROOT", repository)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert record_code(folder) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    assert list(folder.iterdir()) == []
    source.write_text(f"two {TOKEN}\n")
    assert record_code(folder) == {"commit": git("rev-parse", "HEAD"), "changed": True}
    diff = (folder / "code.diff").read_text()
    assert "+two ***" in diff
    shutil.rmtree(repository / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert record_code(folder) == {"commit": None}


# --- configurations for hydra-submitit-launcher --------------------------------------------------------------

# Keys of its SlurmQueueConf, with values that a user's configuration may have.
STOCK = {
    "submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
    "timeout_min": 90,
    "cpus_per_task": 4,
    "gpus_per_node": 1,
    "tasks_per_node": 1,
    "mem_gb": 8,
    "nodes": 1,
    "name": "mine",
    "stderr_to_stdout": False,
    "partition": "gpu",
    "qos": "high",
    "comment": "before the deadline",
    "constraint": "a100",
    "exclude": "n[1-3]",
    "gres": "gpu:1",
    "cpus_per_gpu": 2,
    "gpus_per_task": 1,
    "mem_per_gpu": "4G",
    "mem_per_cpu": "2G",
    "account": "lab",
    "signal_delay_s": 300,
    "max_num_timeout": 2,
    "additional_parameters": {"reservation": "mine"},
    "array_parallelism": 8,
    "setup": ["module load cuda"],
}


@pytest.mark.filterwarnings("ignore:.*cpus_per_gpu.*")
def test_a_configuration_for_the_stock_launcher_works_unchanged(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    lines = ["# @package _global_", "defaults:", "  - override /hydra/launcher: submitit_slurm", "hydra:"]
    launcher_lines = yaml.safe_dump({"launcher": STOCK}).splitlines()
    (tmp_path / "cluster" / "theirs.yaml").write_text("\n".join([*lines, *(f"  {line}" for line in launcher_lines)]))
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        search = [f"hydra.searchpath=[{tmp_path}]", "cluster=theirs"]
        launcher = compose("train", search, return_hydra_config=True).hydra.launcher
    assert launcher._target_ == defaults()["_target_"]
    job_settings = {key: launcher[key] for key in defaults() if key not in LAUNCHER_KEYS}
    settings = JobSettings.of(OmegaConf.to_container(OmegaConf.create(job_settings | {"submitit_folder": None})))
    sbatch_options = options(script_of(tmp_path / "study", settings.to_mapping()))
    assert sbatch_options["time"] == "90" and sbatch_options["mem"] == "8GB" and sbatch_options["signal"] == "USR2@300"
    assert (
        sbatch_options["gres"] == "gpu:1"
        and sbatch_options["account"] == "lab"
        and sbatch_options["reservation"] == "mine"
    )
    assert sbatch_options["error"].endswith(".err") and settings.max_num_timeout == 2
    assert settings.setup == ("module load cuda",) and settings.resources["array_parallelism"] == 8
