"""Tests of adoption: each foreign run becomes a member once, with all its points, and existing files do not change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wandb.proto import wandb_internal_pb2

from sweeps.cli import main as cli
from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.launch import adoption
from sweeps.launch.adopted import agree, hold_study_lease
from sweeps.launch.adoption import Adoption, adopt, columns_of
from sweeps.launch.ledger import Ledger
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import Journal, JournalView, read_journal
from sweeps.run.spec import RunSpec
from sweeps.search.race import LiveRace
from sweeps.search.settings import RaceSettings
from sweeps.source import load
from sweeps.source.foreign_runs import Points
from tests.examples import every, examples
from tests.paths import ROOT
from tests.sweeps.search.runners import AXIS, METRIC, Runners, evaluation, member
from tests.sweeps.source.test_trackers import Stand, log_of, message, server  # noqa: F401  # a fixture

CURVES = ROOT / "examples" / "curves.csv"


def points_by_run(directory: Path) -> dict[tuple[str, int], list[tuple[int, float, float]]]:
    """Return step, compute and reward of each evaluation in a study's journals, by label and seed."""
    all_points = {}
    for path in sorted((directory / "runs").iterdir()):
        view = read_journal(path)
        (metric,) = {name for record in view.records for name in record.metrics if name.endswith("/pass_rate")}
        key = str(view.header["recipe"]), int(view.header["seed"])
        assert key not in all_points, "two members for one run"
        all_points[key] = [(r.step, r.metrics[view.header["axis"]], r.metrics[metric]) for r in view.of_kind("eval")]
    return all_points


def file_contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of a study's files, without its lease."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".controller")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def points(curve: Curve) -> list[tuple[str, float, float]]:
    return list(zip(curve.seed.tolist(), curve.compute.tolist(), curve.reward.tolist(), strict=True))


def results_of(done: Adoption) -> list[str]:
    return [each.what for each in done.runs]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_rows(loss: str, seed: int, until: int, top: float = 0.6, **more: Any) -> list[dict[str, Any]]:
    return [
        {"loss": loss, "seed": seed, "tokens": 1000.0 * n, "reward": 0.1 + top * n / (n + 4) + seed / 1000, **more}
        for n in range(until)
    ]


# --- adopted members in commands and races ---------------------------------------------------------------------


def test_adopted_runs_have_the_curves_of_their_source(tmp_path: Path) -> None:
    done = adopt(tmp_path / "study", [str(CURVES)], ["recipe,seed"])
    assert results_of(done) == ["adopted"] * 8
    mine, theirs = load([tmp_path / "study"]).curves, load([CURVES]).curves
    assert [(each.recipe, points(each)) for each in mine] == [(each.recipe, points(each)) for each in theirs]
    assert {view.state for view in overview(tmp_path / "study")} == {"finished"}
    study = Study.read(tmp_path / "study")
    assert len(study.specs) == 8, "the frozen specifications agree with the ledger"
    header = read_journal(study.run_dir(study.specs[0])).header
    assert (
        header["adopted"].keys() == {"source", "run", "key", "by_step", "axis", "metric", "digest"}
        and header["time"] > 1e9
    )
    assert header["adopted"]["source"] == str(CURVES)


@pytest.mark.parametrize("command", every(4, ["compare", "rank", "race --budget 16000", "plan --target 0.6"]))
def test_commands_print_the_same_for_a_study_and_its_source(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "few.csv"
    lines = CURVES.read_text().splitlines()
    source.write_text("\n".join(line for n, line in enumerate(lines) if n % 3 == 0 and "aggregation" not in line))
    name, *options = command.split()
    adopt(tmp_path / "study", [str(source)], ["recipe,seed"])
    outputs = []
    for each in (source, tmp_path / "study"):
        assert cli.main([name, str(each), *options, "--json"]) == 0
        outputs.append(
            json.loads(
                capsys.readouterr()
                .out.replace("compute/compute", "compute")
                .replace("eval/heldout/pass_rate", "reward")
            )
        )
    ignored = {"command", "paired"}
    assert drop_keys(outputs[0], ignored) == drop_keys(outputs[1], ignored)


def drop_keys(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: drop_keys(each, names) for key, each in value.items() if key not in names}
    return [drop_keys(each, names) for each in value] if isinstance(value, list) else value


def test_an_adopted_member_is_never_started_and_counts_as_finished(tmp_path: Path) -> None:
    adopt(tmp_path / "study", [str(CURVES)], ["recipe,seed"])
    log = log_of(tmp_path / "run-x.wandb", message("run", name="a", recipe="late", seed=0), *wandb_rows(4))
    adopt(tmp_path / "study", [str(log)], ["recipe,seed"], x="compute", metric="reward", running=True)
    study, runners = Study.read(tmp_path / "study"), Runners()
    states = study.run(runners)
    assert runners.started == [] and {state.state for state in states.values()} == {"finished"} and len(states) == 8
    assert [view.state for view in overview(tmp_path / "study")].count("stopped") == 1, (
        "the run that has not ended in its source"
    )


def test_a_live_race_counts_an_adopted_member(tmp_path: Path) -> None:
    rows = [(evaluation(member(0.7), step), step) for step in range(0, 41, 2)]
    lines = [{"recipe": "theirs", "seed": 0, "hours": row[AXIS], "reward": row[METRIC]} for row, _ in rows]
    source = write_table(tmp_path / "a.jsonl", lines)
    (taken,) = adopt(
        tmp_path / "study", [str(source)], ["recipe,seed"], x="hours", unit="virtual_device_hours",
        evaluation_set="held_out",
    ).runs  # fmt: skip
    study = Study.read(tmp_path / "study")
    study = Study(tmp_path / "study", [*study.specs, member(0.4)])
    runners = Runners()
    race = LiveRace(study, RaceSettings(mode="live", budget=1.0, p_ahead=0.05, growth=1.8))
    states = study.run(runners, decider=race)
    assert taken.run not in runners.started and {run: state.state for run, state in states.items()} == {
        taken.run: "finished",
        member(0.4).run: "stopped",
    }  # fmt: skip
    assert "of ending ahead of theirs" in str(states[member(0.4).run].reason)


def wandb_rows(until: int) -> list[bytes]:
    return [message("row", step=n, **{"reward": 0.1 * n, "compute": 10.0 * n}) for n in range(until)]


# --- each run counts once --------------------------------------------------------------------------------------


def test_adopting_twice_changes_nothing(tmp_path: Path) -> None:
    adopt(tmp_path / "study", [str(CURVES)], ["recipe,seed"])
    before = file_contents(tmp_path / "study")
    assert results_of(adopt(tmp_path / "study", [str(CURVES)], ["recipe,seed"])) == ["unchanged"] * 8
    assert file_contents(tmp_path / "study") == before
    shutil.copy(CURVES, tmp_path / "copy.csv")
    assert results_of(adopt(tmp_path / "study", [str(tmp_path / "copy.csv")], ["recipe,seed"])) == ["unchanged"] * 8, (
        "a copy of the source has the same runs"
    )
    assert file_contents(tmp_path / "study") == before


runs_of = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(4, 9)),
    min_size=1, max_size=4, unique_by=lambda run: run[:2],
)  # fmt: skip


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=runs_of, cuts=st.lists(st.integers(1, 9), max_size=2), order=st.randoms(), twice=st.booleans())
def test_repeated_adoption_of_growing_runs_gives_the_same_members(
    runs: list[tuple[str, int, int]], cuts: list[int], order: Any, twice: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs grow between adoptions, rows are in any order, some rows occur twice, and adoption is repeated."""
    folder = tmp_path_factory.mktemp("grown")
    source = folder / "log.jsonl"
    for cut in [*sorted(cuts), 9]:
        rows = [
            row for loss, seed, until in runs for row in make_rows(loss, seed, min(until, cut), 0.3 + ord(loss) / 400)
        ]
        rows += rows[: len(rows) // 2] if twice else []
        order.shuffle(rows)
        write_table(source, rows)
        done = adopt(folder / "grown", [str(source)], ["loss,seed"])
        assert "skipped" not in results_of(done)
    rows = [row for loss, seed, until in runs for row in make_rows(loss, seed, until, 0.3 + ord(loss) / 400)]
    write_table(source, rows)
    adopt(folder / "once", [str(source)], ["loss,seed"])
    assert points_by_run(folder / "grown") == points_by_run(folder / "once")
    assert {path.name for path in (folder / "grown/runs").iterdir()} == {
        path.name for path in (folder / "once/runs").iterdir()
    }
    for study in (Study.read(folder / "grown"), Study.read(folder / "once")):
        assert all(
            study.run_dir(spec).exists()
            and spec.steps == len(points_by_run(study.directory)[spec.recipe, spec.seed]) - 1
            for spec in study.specs
        )
        assert {view.state for view in overview(study.directory)} == {"finished"}


def test_a_rewound_run_replaces_its_points_from_where_it_differs(tmp_path: Path) -> None:
    source = log_of(tmp_path / "run-x.wandb", message("run", name="a", seed=0), *wandb_rows(6))
    adopt(tmp_path / "study", [str(source)], x="compute", metric="reward", running=True)
    rewound = [
        *wandb_rows(4),
        *(message("row", step=n, **{"reward": 0.05 * n, "compute": 10.0 * n}) for n in range(4, 9)),
    ]
    log_of(source, message("run", name="a", seed=0), *rewound)
    (taken,) = adopt(tmp_path / "study", [str(source)], x="compute", metric="reward", running=True).runs
    assert taken.what == "grown" and str(taken.reason).startswith("still running")
    (rows,) = points_by_run(tmp_path / "study").values()
    assert [reward for _, _, reward in rows] == [pytest.approx((0.1 if n < 4 else 0.05) * n) for n in range(9)]
    shorter = log_of(source, message("run", name="a", seed=0), *rewound[:5])
    (taken,) = adopt(tmp_path / "study", [str(shorter)], x="compute", metric="reward", running=True).runs
    assert taken.what == "unchanged" and len(next(iter(points_by_run(tmp_path / "study").values()))) == 9


def test_an_adoption_killed_before_the_ledger_entry_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 6))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("_record_in_ledger", "write_atomically"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(adoption, name, killed)
            adopt(tmp_path / "study", [str(source)], ["loss,seed"])
        assert not Ledger(tmp_path / "study").fold()
    (journal,) = (tmp_path / "study/runs").glob("*/metrics.jsonl")
    journal.write_bytes(journal.read_bytes()[:-150])  # a torn end, as after a power cut
    assert results_of(adopt(tmp_path / "study", [str(source)], ["loss,seed"])) == ["adopted"]
    assert len(points_by_run(tmp_path / "study")["loss=a", 0]) == 6 and [
        v.state for v in overview(tmp_path / "study")
    ] == ["finished"]


@pytest.mark.parametrize("at", ["end", "_record_in_ledger"])
def test_an_adoption_killed_while_a_run_grows_continues(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 6))
    adopt(tmp_path / "study", [str(source)], ["loss,seed"])
    write_table(source, make_rows("a", 0, 9))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal if at == "end" else adoption, at, killed)
        adopt(tmp_path / "study", [str(source)], ["loss,seed"])
    assert results_of(adopt(tmp_path / "study", [str(source)], ["loss,seed"])) == ["grown"]
    assert [(v.state, v.step, v.steps) for v in overview(tmp_path / "study")] == [("finished", 8, 8)]
    assert len(points_by_run(tmp_path / "study")["loss=a", 0]) == 9
    assert results_of(adopt(tmp_path / "study", [str(source)], ["loss,seed"])) == ["unchanged"]


def test_an_adopted_run_may_continue_after_its_end(tmp_path: Path) -> None:
    """The run ends, continues and ends again. Each change is reported, and no point is written twice."""
    source, study, results = tmp_path / "run-x.wandb", tmp_path / "study", []
    for rows, has_ended in ((4, True), (4, False), (7, False), (7, False), (7, True), (7, True)):
        end = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        end.exit.exit_code = 0
        log_of(
            source, message("run", name="a", seed=0), *wandb_rows(rows), *([end.SerializeToString()][: int(has_ended)])
        )
        (taken,) = adopt(study, [str(source)], x="compute", metric="reward", running=True).runs
        (view,) = overview(study)
        results.append((taken.what, view.state, view.step))
    assert results == [
        ("adopted", "finished", 3), ("grown", "stopped", 3), ("grown", "stopped", 6), ("unchanged", "stopped", 6),
        ("grown", "finished", 6), ("unchanged", "finished", 6),
    ]  # fmt: skip
    assert len(points_by_run(study)["a", 0]) == 7


@pytest.mark.live
def test_several_processes_adopt_into_one_study(tmp_path: Path) -> None:
    for n in range(2):
        write_table(
            tmp_path / f"{n}.jsonl", [row for seed in range(4) for row in make_rows(f"l{n}", seed, 8, 0.3 + n / 10)]
        )
    command = [sys.executable, "-m", "sweeps.cli.main", "adopt", str(tmp_path / "study"), "--by", "loss,seed", "--from"]
    commands = {n: [*command, str(tmp_path / f"{n}.jsonl")] for n in range(2)}
    begin = time.monotonic()
    while commands and time.monotonic() - begin < 120:
        started = {n: subprocess.Popen(each, cwd=ROOT, stdout=-3, stderr=-1, text=True) for n, each in commands.items()}
        for n, process in started.items():
            _, stderr = process.communicate(timeout=60)
            if process.returncode == 0:
                del commands[n]
            else:
                assert "is being run by another process" in stderr, (
                    "a process must finish, or report that another one holds the study"
                )
    assert len(points_by_run(tmp_path / "study")) == 8 and len(Study.read(tmp_path / "study").specs) == 8


def test_a_folder_with_only_a_lease_is_a_study(tmp_path: Path) -> None:
    """A folder with only a lease is a study: a process that is killed before it adopts its first run leaves this."""
    source, study = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 8, 0.3)), tmp_path / "study"
    with hold_study_lease(study):
        assert list(study.iterdir())
        with pytest.raises(UserError, match="is being run by another process"):
            adopt(study, [str(source)], ["loss,seed"])
    assert results_of(adopt(study, [str(source)], ["loss,seed"])) == ["adopted"]
    other = tmp_path / "other"
    other.mkdir()
    (other / ".controller.json").touch()
    (other / "mine.txt").touch()
    with pytest.raises(UserError, match="no study"):
        adopt(other, [str(source)], ["loss,seed"])


# --- identity: columns, labels and seeds -----------------------------------------------------------------------


def test_values_may_have_other_names_in_the_source(tmp_path: Path) -> None:
    for n, loss in enumerate(("grpo", "dapo")):
        about = {"loss": {"type": loss}, "lr": 1e-5, "random": n}
        log_of(tmp_path / "wandb" / f"run-{loss}.wandb", message("run", name=f"x{n}", **about), *wandb_rows(5))
    by = ["loss=config.loss.type,lr", "seed=random"]
    done = adopt(tmp_path / "study", [str(tmp_path / "wandb")], by, x="compute", metric="reward", running=True)
    assert {(each.recipe, each.seed) for each in done.runs} == {("loss=grpo+lr=1e-05", 0), ("loss=dapo+lr=1e-05", 1)}
    assert {each.factors["lr"] for each in load([tmp_path / "study"], factors=["lr"]).curves} == {"1e-05"}
    with pytest.raises(UserError, match=r"nothing named momentum describes run x[01]; found .*choose with --by"):
        adopt(
            tmp_path / "study",
            [str(tmp_path / "wandb")],
            ["loss=config.loss.type,momentum"],
            x="compute",
            metric="reward",
        )


def test_a_run_counts_once_under_any_label(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 6, lr="1"))
    adopt(tmp_path / "study", [str(source)], ["loss,seed"])
    (taken,) = adopt(tmp_path / "study", [str(source)], ["loss,lr,seed"]).runs
    assert taken.what == "skipped" and "a run counts once" in str(taken.reason)
    (taken,) = adopt(tmp_path / "study", [str(source)], ["loss,seed"]).runs
    assert taken.what == "unchanged" and len(points_by_run(tmp_path / "study")) == 1


def test_seeds_are_read_from_names_or_set_to_0(tmp_path: Path) -> None:
    for name in ("grpo-seed3", "grpo-seed7", "other"):
        rows = [{"step": n, "reward": len(name) / 100 + n / 10 + int(name[-1] == "7") / 50} for n in range(5)]
        write_table(tmp_path / "logs" / f"{name}.jsonl", rows)
    done = adopt(tmp_path / "study", [str(tmp_path / "logs")])
    assert {(each.recipe, each.seed) for each in done.runs} == {("grpo", 3), ("grpo", 7), ("other", 0)}
    assert [each.reason for each in done.runs if each.recipe == "other"] == ["no seed found; it gets seed 0"]
    before = file_contents(tmp_path / "study")
    assert (
        results_of(adopt(tmp_path / "study", [str(tmp_path / "logs")])) == ["unchanged"] * 3
        and file_contents(tmp_path / "study") == before
    )


def test_by_may_name_only_the_seed(tmp_path: Path) -> None:
    log_of(tmp_path / "run-a.wandb", message("run", name="mine", random=4), *wandb_rows(5))
    source = str(tmp_path / "run-a.wandb")
    (taken,) = adopt(tmp_path / "study", [source], ["seed=random"], x="compute", metric="reward", running=True).runs
    assert (taken.recipe, taken.seed) == ("mine", 4)


@pytest.mark.parametrize("text", ["loss,loss", "loss,", "loss="])
def test_invalid_column_names_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--by"):
        columns_of([text])
    assert columns_of(["loss=config.loss", "seed"]) == {"loss": "config.loss", "seed": "seed"}


def test_numbers_are_compared_as_numbers() -> None:
    cell = {"loss": "grpo", "lr": "0.00001", "norm": "true"}
    assert agree({"lr": "1e-5"}, cell) and agree({"lr": "1e-05", "norm": "True"}, cell)
    assert not agree({"lr": "1e-6"}, cell) and not agree({"beta": "0"}, cell) and not agree({}, cell)


# --- sources ---------------------------------------------------------------------------------------------------


def write_trainer_state(folder: Path, checkpoint: int, max_steps: int) -> None:
    """Write the state that transformers' Trainer saves with a checkpoint."""
    offset = int(folder.name[-1]) / 50
    history = [
        {"step": n, "eval_reward": 0.1 + n / 200 + offset, "num_tokens": 500.0 * n} for n in range(0, checkpoint + 1, 5)
    ]
    path = folder / f"checkpoint-{checkpoint}" / "trainer_state.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"global_step": checkpoint, "max_steps": max_steps, "log_history": history}))


def test_folders_of_checkpoints_are_identified_by_their_names(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        for checkpoint in (20, 100):
            write_trainer_state(runs / f"loss=grpo,seed={seed}", checkpoint, 100 + 50 * seed)
    done = adopt(tmp_path / "study", [str(runs)], ["loss,seed"])
    assert results_of(done) == ["adopted", "skipped"] and "still running" in str(done.runs[1].reason)
    assert done.axis == "compute/tokens" and len(points_by_run(tmp_path / "study")["loss=grpo", 0]) == 21
    write_trainer_state(runs / "loss=grpo,seed=1", 150, 150)
    done = adopt(tmp_path / "study", [str(runs)], ["loss,seed"])
    assert results_of(done) == ["unchanged", "adopted"] and len(points_by_run(tmp_path / "study")["loss=grpo", 1]) == 31


def test_a_wandb_project_can_be_adopted(server: type[Stand], tmp_path: Path) -> None:  # noqa: F811
    done = adopt(tmp_path / "study", ["wandb:me/mine"], ["lr"])
    assert [(each.recipe, each.seed, each.what) for each in done.runs] == [
        ("lr=0.0001", n, "adopted") for n in range(3)
    ]
    assert [each.reason for each in done.runs if each.seed == 2] == ["failed in its source"]
    assert sorted(view.state for view in overview(tmp_path / "study")) == [
        "failed",
        "finished",
        "finished",
    ]
    assert results_of(adopt(tmp_path / "study", ["wandb:me/mine"], ["lr"])) == ["unchanged"] * 3


def test_a_copy_within_one_tracker_is_recognised(
    server: type[Stand],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stand, "runs", (("aaa", 0), ("bbb", 1), ("copy", 1)))
    done = adopt(tmp_path / "study", ["wandb:me/mine"], ["lr"])
    assert [(each.seed, each.what) for each in done.runs] == [(0, "adopted"), (1, "adopted"), (1, "unchanged")]
    assert done.runs[2].run == done.runs[1].run and len(points_by_run(tmp_path / "study")) == 2
    again = adopt(tmp_path / "study", ["wandb:me/mine/copy"], ["lr"])
    assert [(each.run, each.what, each.reason) for each in again.runs] == [(done.runs[2].run, "unchanged", None)]


def test_a_run_of_a_tracker_that_begins_like_another_is_not_its_copy(tmp_path: Path) -> None:
    points = Points((0, 1, 2, 3, 4, 5), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    folder = adoption._StudyMembers(tmp_path / "study", "compute/tokens", None, "here")
    for key in ("wandb:me/mine/a", "wandb:me/mine/b"):
        spec = RunSpec(
            run=key[-1], curve="c", recipe="r", baseline="", departures={}, settings={}, seed=0, steps=5,
            config={"adopted": {"key": key}, "values": {}}, reference={},
        )  # fmt: skip
        folder.members[key[-1]] = adoption._Member(spec, JournalView(tmp_path, {}), points)
    begins = replace(points, steps=points.steps[:5], compute=points.compute[:5], reward=points.reward[:5])
    assert folder.member_with_points(begins, "wandb:me/mine/c", {}) is None
    assert folder.member_with_points(points, "wandb:me/mine/c", {}) == "a"
    assert folder.member_with_points(points, "wandb:me/mine/b", {}) == "b", "its own member comes first"
    assert folder.member_with_points(begins, "table.csv", {}) == "a"
    assert folder.member_with_points(points, "wandb:me/mine/c", {"lr": "1"}) is None, "another recipe, without effect"


@pytest.mark.full
def test_an_mlflow_experiment_can_be_adopted(schema: Path, tmp_path: Path) -> None:
    database = Path(shutil.copy(schema, tmp_path / "mlflow.db"))
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    experiment = client.create_experiment("theirs")
    for loss, status in (("grpo", "FINISHED"), ("dapo", "RUNNING")):
        run = client.create_run(experiment, run_name=loss).info.run_id
        client.log_param(run, "loss", loss)
        client.log_param(run, "seed", 1)
        for n in range(5):
            client.log_metric(run, "eval/reward", 0.1 * n + len(loss), step=n)
            client.log_metric(run, "train/num_tokens", 100.0 * n, step=n)
        if status != "RUNNING":
            client.set_terminated(run, status)
    source = f"mlflow:sqlite:///{database}#theirs"
    done = adopt(tmp_path / "study", [source], ["loss,seed"])
    assert [(each.recipe, each.what) for each in done.runs] == [("loss=grpo", "adopted"), ("", "skipped")]
    assert results_of(adopt(tmp_path / "study", [source], ["loss,seed"], running=True)) == ["unchanged", "adopted"]


def test_files_that_are_not_logs_are_left_out(tmp_path: Path) -> None:
    write_table(tmp_path / "logs/a/log.jsonl", make_rows("a", 0, 5))
    (tmp_path / "logs/notes.csv").write_text("who,when\nme,today\n")
    done = adopt(tmp_path / "study", [str(tmp_path / "logs")], ["loss,seed"])
    assert results_of(done) == ["adopted"] and any("left out" in note and "notes.csv" in note for note in done.notes)


# --- studies that have members already -------------------------------------------------------------------------


@pytest.fixture
def own_study(tmp_path: Path) -> Path:
    """Run a study of our own with one finished member."""
    study = Study(tmp_path / "ours", [member(0.5)])
    study.run(Runners())
    return tmp_path / "ours"


def test_another_unit_of_compute_is_refused_by_name(own_study: Path, tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 6))
    before = file_contents(own_study)
    with pytest.raises(UserError, match=f"compared by {AXIS}, and .*a.jsonl counts compute/tokens; choose a column"):
        adopt(own_study, [str(source)], ["loss,seed"])
    assert file_contents(own_study) == before
    assert results_of(adopt(own_study, [str(source)], ["loss,seed"], unit="virtual_device_hours")) == ["adopted"]
    after = file_contents(own_study)
    assert {name: after[name] for name in before if name != "ledger.jsonl"} == {
        n: v for n, v in before.items() if n != "ledger.jsonl"
    }
    assert after["ledger.jsonl"].startswith(before["ledger.jsonl"])
    curves = load([own_study]).curves
    assert {curve.recipe for curve in curves} == {"scalerl+a=0.5", "loss=a"} and len({c.axis for c in curves}) == 1


def test_a_label_of_another_recipe_is_refused(own_study: Path, tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.jsonl", [{**row, "recipe": "scalerl+a=0.5"} for row in make_rows("a", 0, 6)])
    before = file_contents(own_study)
    (taken,) = adopt(own_study, [str(source)], ["recipe,seed"], x="tokens", unit="virtual_device_hours").runs
    assert (
        taken.what == "skipped"
        and "already stands for other runs" in str(taken.reason)
        and file_contents(own_study) == before
    )


def test_a_member_that_was_also_tracked_elsewhere_is_not_adopted(own_study: Path, tmp_path: Path) -> None:
    spec = member(0.5)
    rows = [
        {"recipe": "x", "hours": v[AXIS], "reward": v["eval/held_out/pass_rate"]}
        for v in (evaluation(spec, n) for n in range(0, 41, 2))
    ]
    source = write_table(tmp_path / "a.jsonl", rows)
    (taken,) = adopt(own_study, [str(source)], ["recipe"], x="hours", unit="virtual_device_hours").runs
    assert (taken.what, taken.run) == ("unchanged", spec.run) and "already a member of this study" in str(taken.reason)


def test_an_adopted_run_read_by_another_column_is_refused(tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.jsonl", make_rows("a", 0, 6, other=0.5))
    adopt(tmp_path / "study", [str(source)], ["loss,seed"])
    (taken,) = adopt(tmp_path / "study", [str(source)], ["loss,seed"], y="other").runs
    assert taken.what == "skipped" and "was adopted by 'reward', and is now read by 'other'" in str(taken.reason)


def test_decreasing_compute_is_refused(tmp_path: Path) -> None:
    rows = [message("row", step=n, **{"reward": 0.1 * n, "compute": 10.0 * (n % 4)}) for n in range(6)]
    source = log_of(tmp_path / "run-x.wandb", message("run", name="a"), *rows)
    (taken,) = adopt(tmp_path / "study", [str(source)], x="compute", metric="reward", running=True).runs
    assert taken.what == "skipped" and "compute falls from 30 to 0 at step 4" in str(taken.reason)


def test_a_folder_that_is_not_a_study_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    with pytest.raises(UserError, match="no study"):
        adopt(tmp_path / "home", [str(CURVES)], ["recipe,seed"])
    adopt(tmp_path / "study", [str(CURVES)], ["recipe,seed"])
    with pytest.raises(UserError, match="members already"):
        adopt(tmp_path / "study", [str(tmp_path / "study")])
    with pytest.raises(UserError):
        adopt(tmp_path / "new", [str(tmp_path / "nothing.csv")])
    assert not (tmp_path / "new").exists() and len(list((tmp_path / "home").iterdir())) == 1


def test_runs_of_another_study_can_be_adopted(own_study: Path, tmp_path: Path) -> None:
    running = Journal(own_study / "runs" / "another")
    running.header(run="another", recipe="b", seed=4)
    running.record("eval", 0, {"eval/held_out/pass_rate": 0.1, AXIS: 0.0, "compute/flops": 0.0})
    running.close()
    done = adopt(tmp_path / "study", [str(own_study)], x=AXIS)
    assert [(each.recipe, each.what) for each in done.runs] == [("scalerl+a=0.5", "adopted"), ("", "skipped")] or [
        (each.recipe, each.what) for each in done.runs
    ] == [("", "skipped"), ("scalerl+a=0.5", "adopted")]
    assert points(load([tmp_path / "study"]).curves[0])[-1][1] == 1.0


def test_the_adopt_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["adopt", str(tmp_path / "study"), "--from", str(CURVES), "--by", "recipe", "--by", "seed"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "8 adopted; compute is compute/compute" in out and out.count("\n") == 11
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"][0]["what"] == "unchanged" and result["runs"][0]["points"] == 33


def test_duplicated_rows_are_counted_in_a_warning(tmp_path: Path) -> None:
    """The warning's number of points is the sum of the table; without a duplicated row there is no warning."""
    source = tmp_path / "table.csv"
    rows = "recipe,seed,tokens,reward\na,0,200,0.3\na,0,100,0.1\na,0,200,0.3\nb,0,100,0.2\nb,0,200,\nb,0,300,0.3\n"
    source.write_text(rows)
    done = adopt(tmp_path / "study", [str(source)], ["recipe,seed"])
    assert [run.points for run in done.runs] == [2, 2]
    assert "6 rows: 5 points" in done.notes[0]
    assert done.notes[-1] == f"warning: {source}: 1 duplicated row left out; 4 points remain"
    source.write_text(rows + "b,0,300,0.3\nb,0,300,0.3\n")
    again = adopt(tmp_path / "again", [str(source)], ["recipe,seed"])
    assert again.notes[-1] == f"warning: {source}: 3 duplicated rows left out; 4 points remain"
    source.write_text(rows.replace("a,0,200,0.3\n", "", 1))
    assert not any("duplicated row" in note for note in adopt(tmp_path / "new", [str(source)], ["recipe,seed"]).notes)


def test_a_second_run_with_a_members_recipe_and_seed_gives_a_warning(tmp_path: Path) -> None:
    """A corrected table under another name is a second run; under the old name it replaces the points."""
    rows = "recipe,seed,tokens,reward\na,0,100,0.1\na,0,200,0.3\nb,0,100,0.2\n"
    first, second, study = tmp_path / "first.csv", tmp_path / "second.csv", tmp_path / "study"
    first.write_text(rows)
    done = adopt(study, [str(first)], ["recipe,seed"])
    assert not any("several members" in note for note in done.notes)
    (original,) = (run.run for run in done.runs if run.recipe == "a")
    second.write_text(rows.replace("0.3", "0.4").replace("b,0", "b,1"))
    done = adopt(study, [str(second)], ["recipe,seed"])
    (corrected,) = (run.run for run in done.runs if run.recipe == "a")
    assert done.notes[-1] == (
        "warning: several members have one recipe and seed, and all of them count: "
        f"a seed 0 ({corrected}, and {original} from {first}); if one corrects the other, adopt only the corrected "
        "data, into a new study; if both are runs of their own, give them seeds"
    )
    adopt(tmp_path / "other", [str(first)], ["recipe,seed"])
    first.write_text(rows.replace("0.3", "0.5"))
    replaced = adopt(tmp_path / "other", [str(first)], ["recipe,seed"])
    assert results_of(replaced)[0] == "grown" and not any("several members" in note for note in replaced.notes)


def test_values_come_from_the_file_name_if_a_table_lacks_the_column(tmp_path: Path) -> None:
    """The values are read from the file's name, as for a log, whose columns have a framework's names."""
    (tmp_path / "runs").mkdir()
    for loss, seed in (("grpo", 3), ("dapo", 4)):
        rows = "".join(f"{step},{100 * step},{0.01 * step + seed}\n" for step in range(1, 7))
        (tmp_path / "runs" / f"loss={loss},seed={seed}.csv").write_text(f"step,tokens,reward\n{rows}")
    adoption = adopt(tmp_path / "study", [str(tmp_path / "runs")], ["loss,seed"], x="tokens", y="reward")
    assert sorted((run.recipe, run.seed, run.what) for run in adoption.runs) == [
        ("loss=dapo", 4, "adopted"),
        ("loss=grpo", 3, "adopted"),
    ]
    with pytest.raises(UserError, match="no column width; found step, tokens, reward"):
        adopt(tmp_path / "other", [str(tmp_path / "runs")], ["width"], x="tokens", y="reward")
