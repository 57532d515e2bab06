"""Tests of MLflow as a source: runs sent by our tracker equal their journals, and nothing is written to the store."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from sweeps.cli import main as cli
from sweeps.errors import UserError
from sweeps.run.journal import Journal
from sweeps.source import load
from sweeps.source.mlflow_runs import parts_of
from sweeps.source.places import Place
from sweeps.tracking import Member, Tracker, ship
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.source.event_log import TRL_SCALARS, events

FLOPS = "compute/flops"


@pytest.fixture
def database(schema: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(schema, tmp_path / "mlflow.db"))


def journal(run_dir: Path, recipe: str, seed: int, top: float, sets: tuple[str, ...] = ("math", "code")) -> Path:
    """Write a finished run with a train record per step, and an evaluation at step 0 and at every second step."""
    log = Journal(run_dir, clock=lambda: 1e9)
    log.header(run=run_dir.name, recipe=recipe, seed=seed, device="cpu")
    for step in range(7):
        if step:
            log.record("train", step, {"train/loss": 1.0, FLOPS: 1e6 * step})
        if step % 2 == 0:
            rates = {f"eval/{name}/pass_rate": 0.1 + top * step / 10 / (i + 1) for i, name in enumerate(sets)}
            log.record("eval", step, {**rates, f"eval/{sets[0]}/pass_rate_se": 0.01, FLOPS: 1e6 * step})
    log.end(6, "finished")
    log.close()
    return run_dir


@pytest.mark.slow
def test_runs_from_our_tracker_equal_their_journals(database: Path, tmp_path: Path) -> None:
    tracker = Tracker(f"sqlite:///{database}", "study", axis=FLOPS)
    members = [
        Member(f"{recipe}-{seed}", recipe, seed, journal(tmp_path / "sweep" / f"{recipe}-{seed}", recipe, seed, top))
        for recipe, seed, top in (("scalerl", 0, 0.5), ("scalerl", 1, 0.6), ("scalerl+loss=dapo", 0, 0.3))
    ]
    sweep = tracker.open_sweep(tmp_path / "sweep", members)
    for member in members:
        ship(member.run_dir, tracker.client, sweep.members[member.run].mlflow_run_id, FLOPS)
    source = f"mlflow:sqlite:///{database}#study"
    before = database.read_bytes()
    with pytest.raises(UserError, match=r"2 rewards could be meant \(eval/"):
        load([source])
    for name in ("eval/math/pass_rate", "eval/code/pass_rate"):
        study, from_journals = load([source], metric=name), load([tmp_path / "sweep"], metric=name, x=FLOPS)
        assert [curve.recipe for curve in study.curves] == ["scalerl", "scalerl+loss=dapo"]
        for mlflow_curve, journal_curve in zip(study.curves, from_journals.curves, strict=True):
            assert mlflow_curve.axis == journal_curve.axis == FLOPS
            assert mlflow_curve.compute.tolist() == pytest.approx(journal_curve.compute.tolist(), rel=1e-12)
            assert (
                mlflow_curve.reward.tolist() == journal_curve.reward.tolist()
                and mlflow_curve.seed.tolist() == journal_curve.seed.tolist()
            )
            assert (mlflow_curve.sd is None) == (journal_curve.sd is None)
            assert (
                mlflow_curve.sd is None
                or journal_curve.sd is None
                or mlflow_curve.sd.tolist() == journal_curve.sd.tolist()
            )
    assert "MLflow" in study.shown[0] and "runs of other kinds (sweeps, fits): 1" in study.shown[0]
    assert [curve.factors for curve in load([source], metric="all").curves][:2] == [{"set": "code"}, {"set": "math"}]
    (joined,) = load([source], metric="eval/math/pass_rate", x="train/loss").curves[:1]
    assert joined.axis == "train/loss"
    assert database.read_bytes() == before


@pytest.mark.parametrize("axis", ["compute/tokens", "compute/steps", "compute/kwh"])
def test_a_study_is_read_back_with_its_own_axis(axis: str, database: Path, tmp_path: Path) -> None:
    """A step of one recipe costs four times that of the other, so over steps the ranking would change."""
    tracker = Tracker(f"sqlite:///{database}", "study", axis=axis)
    members = []
    for recipe, cost in (("a", 4000.0), ("b", 1000.0)):
        log = Journal(tmp_path / "sweep" / recipe, clock=lambda: 1e9)
        log.header(run=recipe, recipe=recipe, seed=0, device="cpu")
        for step in range(5):
            log.record("eval", step, {"eval/math/pass_rate": 0.1 * step, axis: cost * step})
        log.end(4, "finished")
        log.close()
        members.append(Member(recipe, recipe, 0, tmp_path / "sweep" / recipe))
    sweep = tracker.open_sweep(tmp_path / "sweep", members)
    for member in members:
        ship(member.run_dir, tracker.client, sweep.members[member.run].mlflow_run_id, axis)
    study = load([f"mlflow:sqlite:///{database}#study"])
    assert [curve.axis for curve in study.curves] == [axis, axis] and not study.warnings
    assert [curve.compute.max() for curve in study.curves] == pytest.approx([16000, 4000])


def test_names_of_experiments_and_stores_may_contain_a_hash(database: Path, tmp_path: Path) -> None:
    store = tmp_path / "a#b" / "ml#flow.db"
    store.parent.mkdir()
    shutil.copy(database, store)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    run = client.create_run(client.create_experiment("grpo #2"))
    for step in range(1, 9):
        client.log_metric(run.info.run_id, "reward", step / 10, step=step)
        client.log_metric(run.info.run_id, "stepless", step / 10)
    source = f"mlflow:sqlite:///{store}#grpo #2"
    assert load([source], metric="reward").curves[0].reward.tolist() == [step / 10 for step in range(1, 9)]
    assert Place(source).title == "grpo #2"
    with pytest.raises(UserError, match=r"all 8 values of stepless are at step 0, .* give --x order"):
        load([source], metric="stepless")
    curve = load([source], metric="stepless", x="order").curves[0]
    assert curve.compute.tolist() == list(range(1, 9)) and curve.reward[-1] == 0.8


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("mlflow:http://host:5000#a#b", ("http://host:5000", "a#b")),
        ("mlflow:databricks#a", ("databricks", "a")),
        ("mlflow:#a#", ("", "a#")),
        ("mlflow:sqlite:///nowhere.db#a#b", ("sqlite:///nowhere.db", "a#b")),
        ("mlflow:sqlite:///nowhere.db", ("sqlite:///nowhere.db", "")),
    ],
)
def test_addresses_are_split_into_store_and_experiment(source: str, parts: tuple[str, str]) -> None:
    assert parts_of(source) == parts


@pytest.mark.full
def test_every_documented_command_runs(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "reference" / "sources.md").read_text()
    commands = re.findall(r"^scalerl (.+)$", page, flags=re.MULTILINE)
    assert commands
    for folder in ("examples", "tests/data/logs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for run in ("a", "b"):
        events(tmp_path / "tensorboard_runs" / run, TRL_SCALARS)
    tracker = Tracker(f"sqlite:///{database}", "study", axis=FLOPS)
    member = Member("r", "scalerl", 0, journal(tmp_path / "sweep" / "r", "scalerl", 0, 0.5, sets=("code",)))
    sweep = tracker.open_sweep(tmp_path / "sweep", [member])
    ship(member.run_dir, tracker.client, sweep.members["r"].mlflow_run_id, FLOPS)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert cli.main(shlex.split(command)) == 0, (command, capsys.readouterr().err)
        out, err = capsys.readouterr()
        assert out and ("source: " in err) == ("examples/" not in command), command


def log_foreign_runs(database: Path) -> None:
    """Log runs like another framework: metrics by step, parameters and tags."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    experiment = client.create_experiment("theirs")
    for name, params, top in (
        ("run-a", {"algo": "grpo", "seed": "3", "model": "7b"}, 0.5),
        ("run-b", {"algo": "grpo", "seed": "4", "model": "7b"}, 0.6),
        ("run-c", {"algo": "cispo", "seed": "3", "model": "1b"}, 0.7),
    ):
        run = client.create_run(experiment, run_name=name, tags={"team": "x"}).info.run_id
        for key, value in params.items():
            client.log_param(run, key, value)
        for step in range(1, 7):
            client.log_metric(run, "tokens", 1000.0 * step, step=step)
            if step % 2 == 0:
                client.log_metric(run, "acc", top * step / 10, step=step)
        client.log_metric(run, "acc", 0.9, step=6)
        client.set_terminated(run, "FAILED" if name == "run-c" else "FINISHED")
    client.create_run(experiment, run_name="empty")


@pytest.mark.slow
def test_infinite_values_are_left_out_and_counted(database: Path) -> None:
    """A database cannot hold infinity: MLflow stores the largest float in its place."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    run = client.create_run(client.create_experiment("infinite"), run_name="a").info.run_id
    for step in range(1, 9):
        client.log_metric(run, "acc", math.inf if step == 4 else -math.inf if step == 6 else step / 10, step=step)
    study = load([f"mlflow:sqlite:///{database}#infinite"], metric="acc")
    assert study.curves[0].reward.tolist() == [0.1, 0.2, 0.3, 0.5, 0.7, 0.8]
    assert study.mapping[0].endswith("6 points, values not finite: 2")
    assert any(
        "2 values of acc left out: not finite numbers (first step 4: inf)" in note for note in study.curves[0].notes
    )


@pytest.mark.slow
def test_foreign_runs_are_read_by_metric_tag_and_parameter(database: Path) -> None:
    log_foreign_runs(database)
    source = f"mlflow:sqlite:///{database}#theirs"
    curves = load([source], metric="acc", x="tokens").curves
    assert [curve.recipe for curve in curves] == ["run-a", "run-b", "run-c"]
    assert curves[0].compute.tolist() == [2000, 4000, 6000] and curves[0].reward.tolist() == [0.1, 0.2, 0.9]
    assert any("replaced by a later value at the same step" in note for note in curves[0].warnings)
    assert any("failed; its points are used" in note for note in curves[2].warnings)
    cispo, grpo = load([source], y="acc", x="tokens", by="algo", factors=("model", "team")).curves
    assert grpo.recipe == "grpo model=7b team=x" and sorted(set(grpo.seed.tolist())) == ["3", "4"]
    assert cispo.factors == {"model": "1b", "team": "x"}
    for options, message in (
        ({"metric": "nope"}, r"no metric nope; found acc, tokens"),
        ({}, "no name of a reward that a reader knows; found acc, tokens"),
        ({"metric": "acc", "by": "nope"}, r"nothing named nope describes run run-a; found algo"),
        ({"metric": "acc", "x": "nope"}, "no metric nope"),
    ):
        with pytest.raises(UserError, match=message):
            load([source], **options)


@pytest.mark.parametrize(
    ("source", "message"),
    every(
        14,
        every(
            2,
            [
                ("mlflow:sqlite:///{0}/missing.db#study", "no such database"),
                ("mlflow:sqlite:///{0}/text.db#study", "not an MLflow database"),
                ("mlflow:sqlite:///{0}/other.db#study", "not an MLflow database"),
                ("mlflow:sqlite:///{0}/mlflow.db#nope", "no experiment 'nope'; found Default, theirs, unused"),
                ("mlflow:sqlite:///{0}/mlflow.db#", "no experiment is named; found Default, theirs, unused"),
                ("mlflow:sqlite:///{0}/mlflow.db", "no experiment is named; found Default, theirs, unused"),
                ("mlflow:sqlite:///{0}/mlflow.db#Default", "no run with metrics"),
                ("mlflow:sqlite:///{0}/old.db#theirs", "written by another version of MLflow"),
                ("mlflow:{0}/mlruns#study", "is a file store"),
                ("mlflow:", "is a file store"),
                ("mlflow:#", "is a file store"),
                ("mlflow:sqlite://#", "names no database file"),
                ("mlflow:nonsense://x#y", "cannot be read"),
                ("mlflow:http://127.0.0.1:9#y", "cannot be read"),
            ],
            pytest.mark.full,
        ),
    ),
)
def test_unreadable_stores_are_refused_and_not_changed(
    database: Path, tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log_foreign_runs(database)
    shutil.copy(database, tmp_path / "old.db")
    execute(tmp_path / "old.db", "UPDATE alembic_version SET version_num = 'x'")
    execute(tmp_path / "other.db", "CREATE TABLE runs (a)")
    (tmp_path / "text.db").write_text("no database at all, only a line of text that is longer than a header" * 3)
    before: dict[Path, Any] = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=message) as caught:
        load([source.format(tmp_path)], metric="acc")
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
