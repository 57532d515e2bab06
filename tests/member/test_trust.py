"""Tests of folders from other users: code that they name runs only with --trust. The user's own studies need none."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.member import trl
from lightning_scalerl.member.command import plan_commands
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.trl import plan_trl
from lightning_scalerl.member.trust import check_run, check_runs
from lightning_scalerl.translate.to_trl import VERSION
from sweeps.cli.main import main
from sweeps.errors import UserError
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.launch.ledger import Ledger
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings
from sweeps.launch.study import Study
from sweeps.launch.trust import check_launch
from sweeps.run.rollouts import write_groups
from sweeps.run.spec import SPEC_FILE, RunSpec
from tests.sweeps.command.toy import write_study
from tests.translate.test_trl import ON_TRL

FOREIGN = """
from dataclasses import replace
from pathlib import Path

def run(*given, **named):
    Path({mark!r}).touch()

run()
"""
MY_MODULE = """
import os

from lightning_scalerl.task.arithmetic import ArithmeticTask

class MyTask(ArithmeticTask):
    pass
"""


def write_study_of_a_run(place: Path, *more: str, folders: Sequence[Path] = ()) -> Path:
    """Write a launched study of one member with stored rollouts; return the folder of the run."""
    words = ["model.batches=1", "model.width=32", "model.layers=1", f"output_dir={place}/study", *more]
    (spec,) = plan_members([words], [str(folder) for folder in folders])
    run_dir = place / "study" / "runs" / spec.run
    spec.write(run_dir)
    write_groups(run_dir, [{"step": 1, "admission": 0, "prompt_id": "none", "prompt": "", "rollouts": []}])
    Ledger(place / "study").append("planned", spec.run, recipe=spec.recipe, seed=spec.seed, curve=spec.curve)
    write_launch(place / "study")
    return run_dir


def write_launch(study: Path, **others: Any) -> None:
    values = {
        "kind": "local", "entry": "lightning_scalerl:run_member", "preload": ("lightning_scalerl.member.run",),
        "max_parallel": 1, "threads": 1, "tracking": None,
        "axis": "compute",
    }  # fmt: skip
    settings = LaunchSettings(**{**values, **others})  # type: ignore[arg-type]
    (study / LAUNCH_FILE).write_text(settings.text())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study_of_a_run(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    """Copy a study from elsewhere to `tmp_path / "study"`; return the folder of its run."""
    shutil.copytree(original.parents[1], tmp_path / "study")
    return tmp_path / "study" / "runs" / original.name


@pytest.fixture
def mark(run_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """Put the module `foreign` into the study's folder; return the path of a file that exists once it has run."""
    (tmp_path / "study" / "theirs").mkdir()
    (tmp_path / "study" / "theirs" / "foreign.py").write_text(FOREIGN.format(mark=str(tmp_path / "mark")))
    path = [*sys.path]
    yield tmp_path / "mark"
    sys.path[:] = path
    sys.modules.pop("foreign", None)


def edit(run_dir: Path, field: str, value: Any) -> None:
    values = json.loads((run_dir / SPEC_FILE).read_text())
    *path, last = field.split(".")
    node = values
    for key in path:
        node = node[key]
    node[last] = value
    (run_dir / SPEC_FILE).write_text(json.dumps(values, indent=1))


THEIRS = "{study}/theirs"
FOREIGN_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "a folder": ({"folders": [THEIRS]}, "folders: '{study}/theirs'"),
    "a relative folder": ({"folders": ["theirs"]}, "folders: 'theirs'"),
    "a module": ({"folders": [THEIRS], "config.task._target_": "foreign.run"}, "folders: '{study}/theirs'"),
    "the system": ({"config.task": {"_target_": "os.mkdir", "path": "{mark}"}}, "config.task._target_: 'os.mkdir'"),
    "the reference": ({"reference.loss._target_": "os.mkdir"}, "reference.loss._target_: 'os.mkdir'"),
    "inside ours": (
        {"config.task.x": {"_target_": "lightning_scalerl.verify.pool.os.mkdir", "path": "{mark}"}},
        "config.task.x._target_: 'lightning_scalerl.verify.pool.os.mkdir'",
    ),
    "another run": (
        {"config.task": {"_target_": "lightning_scalerl.run_member", "run_dir": "{study}"}},
        "config.task._target_: 'lightning_scalerl.run_member'",
    ),
    "a reward's file": (
        {"config.task": {"_target_": "lightning_scalerl.DatasetTask", "rewards": f"{THEIRS}/foreign.py:run"}},
        "config.task.rewards: '{study}/theirs/foreign.py:run'",
    ),
    "a reward among several": (
        {"config.task": {"_target_": "lightning_scalerl.DatasetTask", "rewards": ["math", {"use": "os:system"}]}},
        "config.task.rewards[1].use: 'os:system'",
    ),
    "a verifier by position": (
        {"config.task": {"_target_": "lightning_scalerl.JsonlTask", "_args_": ["a", {}, "os:system"]}},
        "config.task._args_",
    ),
    "another configuration": ({"config.optimizer.lr": 0.5}, "run: '{run}' is not the identity of its configuration"),
}  # fmt: skip


def fill_names(value: Any, **names: Any) -> Any:
    if isinstance(value, dict):
        return {key: fill_names(item, **names) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_names(item, **names) for item in value]
    return value.format(**names) if isinstance(value, str) else value


@pytest.mark.parametrize("name", FOREIGN_SPECS)
def test_code_named_by_a_foreign_run_is_not_run(
    name: str, run_dir: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"study": tmp_path / "study", "mark": mark, "run": run_dir.name}
    edits, message = FOREIGN_SPECS[name]
    for field, value in edits.items():
        edit(run_dir, field, fill_names(value, **names))
    assert main(["rescore", str(run_dir)]) == 1
    error = capsys.readouterr().err
    assert message.format(**names) in error and "--trust" in error and error.count("\n") == 1, error
    assert not mark.exists() and "foreign" not in sys.modules
    with pytest.raises(UserError, match="--trust"):
        check_runs([[str(run_dir), run_dir.name]], [])


def test_every_command_refuses_foreign_code_unless_trusted(
    run_dir: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run_dir, "config.task", {"_target_": "os.mkdir", "path": str(mark)})
    for words in (["export", str(run_dir), str(tmp_path / "model")], ["noise", str(run_dir)]):
        assert main(words) == 1
        assert "config.task._target_: 'os.mkdir'" in capsys.readouterr().err
    assert main(["export", str(run_dir), str(tmp_path / "model"), "--trust"]) == 1
    assert "cannot read the journal" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "study"), "--wait"]) == 1
    assert "config.task._target_: 'os.mkdir'" in capsys.readouterr().err
    assert not mark.exists()
    with pytest.raises(AttributeError, match="grader"):  # the foreign code ran, but its result is not a task
        main(["rescore", str(run_dir), "--trust"])
    assert mark.exists()


def test_code_named_by_a_foreign_launch_is_not_run(run_dir: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"

    def check() -> None:
        check_launch(Study.read(study), LaunchSettings.read(study))

    check()
    for field, value in {"entry": "os:mkdir", "preload": ("antigravity",)}.items():
        write_launch(study, **{field: value})
        with pytest.raises(UserError, match=f"launch.json: {field}: .*--trust"):
            check()
    jobs = SlurmCluster.of({"setup": ["module load cuda"]})
    write_launch(study, kind="slurm", cluster=jobs)
    check()
    (study / "launch.json").chmod(0o666)
    with pytest.raises(UserError, match=r"settings.setup: .*module load cuda.* --trust"):
        check()
    with pytest.raises(UserError, match=r"run: .* as the ledger has it"):
        check_runs([[str(run_dir), "another"]], [])


def test_the_users_own_folder_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = tmp_path / "mine"
    (mine / "task").mkdir(parents=True)
    (mine / "my_trusted_task.py").write_text(MY_MODULE)
    task_config = (Path(__file__).parents[2] / "conf" / "task" / "arithmetic.yaml").read_text()
    (mine / "task" / "mine.yaml").write_text(
        task_config.replace("lightning_scalerl.ArithmeticTask", "my_trusted_task.MyTask")
    )
    run_dir = write_study_of_a_run(tmp_path, "task=mine", folders=[mine])
    check_runs([[str(run_dir), run_dir.name]], [])
    # The user's own module must not give access to names that it imports.
    edit(run_dir, "config.task._target_", "my_trusted_task.os.mkdir")
    with pytest.raises(UserError, match=r"config.task._target_: 'my_trusted_task.os.mkdir'"):
        check_run(run_dir, RunSpec.read(run_dir))
    edit(run_dir, "config.task._target_", "my_trusted_task.MyTask")
    check_run(run_dir, RunSpec.read(run_dir))
    # A folder that anybody may write, or that another user owns, is not trusted.
    mine.chmod(0o777)
    with pytest.raises(UserError, match=r"folders: .*--trust"):
        check_run(run_dir, RunSpec.read(run_dir))
    mine.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"folders: .*--trust"):
        check_run(run_dir, RunSpec.read(run_dir))


def test_changed_or_missing_data_is_not_an_edited_configuration(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"id": str(n), "prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 16)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run_dir = write_study_of_a_run(tmp_path, "task=jsonl", f"task.train={data}", f"task.heldout={{test: {data}}}")
    check_run(run_dir, RunSpec.read(run_dir))
    data.write_text(json.dumps(rows[0]))
    check_run(run_dir, RunSpec.read(run_dir))
    data.unlink()
    check_run(run_dir, RunSpec.read(run_dir))


def test_collect_refuses_a_foreign_launch_before_anything_runs(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign `entry` is named before anything runs."""
    study = tmp_path / "study"
    write_launch(study, entry="os:mkdir")
    before = sorted(study.rglob("*"))
    assert main(["collect", str(study), "--wait"]) == 1
    assert "launch.json: entry: 'os:mkdir'" in capsys.readouterr().err
    assert sorted(study.rglob("*")) == before


def test_a_command_is_run_only_if_the_users_own_file_has_it(tmp_path: Path) -> None:
    """The command is in the user's file outside the study. A different command in the study's folder is not run."""
    file = write_study(tmp_path / "mine")
    (spec,) = plan_commands([["loss=dapo", "seed=1"]], [str(file)])
    study = tmp_path / "mine" / "outputs"
    run_dir = study / "runs" / spec.run
    spec.write(run_dir)
    Ledger(study).append("planned", spec.run, recipe=spec.recipe, seed=spec.seed, curve=spec.curve)
    write_launch(
        study,
        entry="sweeps.command.runner:run_member",
        preload=("sweeps.command.runner",),
    )
    check_launch(Study.read(study), LaunchSettings.read(study))
    check_runs([[str(run_dir), spec.run]], [])
    line = "touch {run_dir} {seed} {loss} {steps}"
    for changed in (
        replace(spec, config={**spec.config, "command": {**spec.config["command"], "line": line}}),
        replace(plan_commands([["loss=dapo", "seed=1", f"command.line='{line}'"]], [str(file)])[0], run=spec.run),
        replace(spec, folders=()),
    ):
        changed.write(run_dir)
        with pytest.raises(UserError, match=r"spec.json: config.command.line: .* of yours .*--trust"):
            check_runs([[str(run_dir), spec.run]], [])
    inside = shutil.copy(file, study / "toy.yaml")
    replace(spec, folders=(str(inside),)).write(run_dir)
    with pytest.raises(UserError, match=r"spec.json: folders: .*--trust"):
        check_runs([[str(run_dir), spec.run]], [])


def trl_study(place: Path, *more: str) -> tuple[Path, RunSpec]:
    """Write a launched study of one member for TRL, with a fake interpreter that prints its version.

    Return the folder of the run and its specification.
    """
    python = place / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {place}/asked\necho {VERSION}\n")
    python.chmod(0o755)
    words = ["trainer=trl", "trainer.python=env/bin/python", *ON_TRL, "model.batches=1", "model.width=32"]
    (spec,) = plan_trl([[*words, "cluster=slurm", f"output_dir={place}/study", *more]])
    (place / "asked").unlink()
    trl._checked_interpreter.cache_clear()
    run_dir = place / "study" / "runs" / spec.run
    spec.write(run_dir)
    Ledger(place / "study").append("planned", spec.run, recipe=spec.recipe, seed=spec.seed, curve=spec.curve)
    write_launch(
        place / "study",
        entry="sweeps.command.runner:run_member",
        preload=("sweeps.command.runner",),
    )
    return run_dir, spec


def test_a_member_of_trl_is_run_if_its_overrides_give_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check works from any folder. The command has no settings of the study or of tracking."""
    monkeypatch.chdir(tmp_path)
    run_dir, spec = trl_study(tmp_path, "mlflow.uri=https://me:hunter2@example.org", "race.mode=live", "seed=1")
    line = spec.config["command"]["line"]
    assert not [word for word in line if word.startswith(("mlflow", "race", "cluster", "output_dir"))]
    assert (
        "loss=cispo" not in line and "batch.prompts=4" in line and line[-2:] == ["seed={seed}", "budget.steps={steps}"]
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_launch(Study.read(tmp_path / "study"), LaunchSettings.read(tmp_path / "study"))
    check_runs([[str(run_dir), spec.run]], [])


FOREIGN_ON_TRL: dict[str, tuple[dict[str, Any], str]] = {
    "a line": ({"config.command.line": ["touch", "{mark}"]}, "config.command.line: \"['touch', "),
    "an environment": ({"config.command.env": {"PYTHONPATH": THEIRS}}, "config.command.line: "),
    "a folder of modules": ({"config.command.folder": THEIRS}, "config.command.folder: '{study}/theirs'"),
    "an interpreter": ({"config.trainer.python": "{study}/theirs/python"}, "config.trainer.python: '{study}/"),
    "a relative one": ({"config.trainer.python": "theirs/python"}, "config.trainer.python: 'theirs/python'"),
    "a name": ({"overrides": ["task._target_=os.mkdir", "+task.path={mark}"]}, "overrides.task._target_: 'os.mkdir'"),
    "a name in a text": (
        {"overrides": ["task.train='${{oc.decode:\"{{_target_: os.mkdir, path: {mark}}}\"}}'"]},
        "overrides.task.train._target_: 'os.mkdir'",
    ),
    "another run": ({"overrides": ["optimizer.lr=0.5"]}, "config.command.line: "),
    "files of Hydra's": ({"overrides": ["hydra.searchpath=[file://{study}/theirs]"]}, "config.command.line: "),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN_ON_TRL)
def test_code_named_by_a_foreign_member_of_trl_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, spec = trl_study(tmp_path)
    study = tmp_path / "study"
    shutil.copytree(tmp_path / "env" / "bin", study / "theirs")
    names = {"study": study, "mark": tmp_path / "mark"}
    edits, message = FOREIGN_ON_TRL[name]
    for field, value in edits.items():
        value = fill_names(value, **names)
        edit(run_dir, field, [*spec.overrides, *value] if field == "overrides" else value)
    with pytest.raises(UserError, match=re.escape(message.format(**names)) + ".*--trust"):
        check_runs([[str(run_dir), spec.run]], [])
    assert not (tmp_path / "mark").exists()


def test_an_interpreter_that_anybody_may_change_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, spec = trl_study(tmp_path)
    (tmp_path / "env" / "bin").chmod(0o777)
    with pytest.raises(UserError, match=r"config.trainer.python: .*an interpreter of yours .*--trust"):
        check_runs([[str(run_dir), spec.run]], [])
    assert not (tmp_path / "asked").exists()
