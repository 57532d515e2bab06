"""Tests of the data sent to MLflow, with a SQLite store: every durable record once, correct runs, one set of fits."""

import base64
import json
import logging
import math
import shutil
import subprocess
import sys
import time
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.errors import UserError
from sweeps.run import tail
from sweeps.run.journal import Journal
from sweeps.source import load
from sweeps.tracking import FitSummary, Member, Shipper, TrackedSweep, Tracker, publish, ship, ui_command
from sweeps.tracking.colours import BASELINE_COLOUR, COLOURS, group_colour, line_value, recipe_colours
from sweeps.tracking.common import ChartKeys, resolve_uri
from sweeps.tracking.fits import MAX_LINES
from sweeps.tracking.ship import CURSOR_FILE, flatten, points
from sweeps.tracking.store import IDS_FILE, SWEEP_TAG
from sweeps.tracking.views import BAND_KEY, VIEW_TAG, ChartRange, encode_view, scaling_state
from tests.paths import ROOT

Y, X = "eval/heldout/pass_rate", "eval/heldout/log10_compute"


@pytest.fixture
def tracker(schema: Path, tmp_path: Path) -> Tracker:
    shutil.copy(schema, tmp_path / "mlflow.db")
    return Tracker(f"sqlite:///{tmp_path}/mlflow.db", "study")


def write_run(
    run_dir: Path, steps: range, *, checkpoint: int | None, offset: float = 0.0, start: float = 1e9
) -> Journal:
    """Write a journal with a train record per step, an evaluation every second step, and one at compute 0."""
    ticks = count()
    journal = Journal(run_dir, clock=lambda: start + next(ticks))
    if steps.start == 0:
        journal.header(run=run_dir.name, recipe="scalerl", seed=0)
    for step in steps:
        flops = 1e6 * step
        if step:
            journal.record("train", step, {"train/loss": step + offset, "compute/flops": flops})
        if step % 2 == 0:
            rate = 0.2 + step / 100 + offset
            journal.record("eval", step, {Y: rate, "eval/heldout/pass_rate_se": 0.01, "compute/flops": flops})
    if checkpoint is not None:
        journal.checkpoint(checkpoint)
    return journal


def members(root: Path, *runs: tuple[str, int]) -> list[Member]:
    return [Member(f"{recipe}-{seed}", recipe, seed, root / f"{recipe}-{seed}") for recipe, seed in runs]


def one_run(tracker: Tracker, tmp_path: Path) -> tuple[TrackedSweep, Path, str]:
    [member] = members(tmp_path / "sweep", ("scalerl", 0))
    sweep = tracker.open_sweep(tmp_path / "sweep", [member])
    return sweep, member.run_dir, sweep.members[member.run].mlflow_run_id


def history(tracker: Tracker, run_id: str, key: str) -> list[tuple[int, float, int]]:
    """Return (step, value, timestamp) of each point of a metric."""
    metric_points = tracker.client.get_metric_history(run_id, key)
    return sorted((m.step, m.value, m.timestamp) for m in metric_points)


def test_importing_tracking_imports_neither_mlflow_nor_torch() -> None:
    code = "import sys, sweeps, sweeps.tracking; sys.exit('mlflow' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_uris_that_mlflow_refuses_are_named_with_the_remedy(tmp_path: Path) -> None:
    for uri in ("file:./mlruns", "file:///tmp/mlruns", "./mlruns", "sqlite:///"):
        with pytest.raises(UserError, match="sqlite:////absolute/path"):
            Tracker(uri, "study")
    assert resolve_uri(f"sqlite:///{tmp_path}/x/../m.db") == f"sqlite:///{tmp_path}/m.db"


@pytest.mark.slow
def test_a_store_that_cannot_be_opened_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database at all, but long enough to be looked at as one" * 20)
    with pytest.raises(UserError, match="publish later") as error:
        Tracker(f"sqlite:///{tmp_path}/mlflow.db", "study").prepare()
    assert "\n" not in str(error.value)


def test_runs_are_created_once_and_found_again(tracker: Tracker, tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    wanted = members(root, ("scalerl", 0), ("scalerl", 1), ("scalerl+loss=dapo", 0))
    first = tracker.open_sweep(root, wanted[:2])
    again = Tracker(tracker.uri, "study").open_sweep(root, wanted)
    assert again.parent_id == first.parent_id
    assert {k: again.members[k] for k in first.members} == first.members
    remembered = json.loads((root / IDS_FILE).read_text())["stores"]
    [entry] = remembered.values()
    assert entry["members"] == {k: m.mlflow_run_id for k, m in again.members.items()}

    # A controller was killed before it wrote the ids of its runs: they are found by their tags.
    entry.pop("members"), entry.pop("parent")
    (root / IDS_FILE).write_text(json.dumps({"stores": remembered}))
    assert tracker.open_sweep(root, wanted).members == again.members
    assert len(tracker.sweep_runs(again)) == 4

    # A run that was deleted by hand is replaced by a new one.
    tracker.client.delete_run(first.members["scalerl-0"].mlflow_run_id)
    assert tracker.open_sweep(root, wanted).members["scalerl-0"] != first.members["scalerl-0"]

    run = tracker.client.get_run(again.members["scalerl+loss=dapo-0"].mlflow_run_id)
    assert run.info.status == "SCHEDULED"
    assert run.data.tags["mlflow.parentRunId"] == again.parent_id
    assert run.data.tags["series"] == run.data.tags["mlflow.runName"] == "scalerl+loss=dapo seed 0"
    assert (run.data.tags["kind"], run.data.tags["seed"]) == ("member", "0")
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


@pytest.mark.slow
def test_series_is_unique_even_for_one_recipe_and_seed(tracker: Tracker, tmp_path: Path) -> None:
    twins = [Member(run, "scalerl", 0, tmp_path / run) for run in ("aaaaaaaaaa", "bbbbbbbbbb")]
    sweep = tracker.open_sweep(tmp_path / "sweep", twins)
    series = {r.data.tags["series"] for r in tracker.sweep_runs(sweep) if "series" in r.data.tags}
    assert series == {"scalerl seed 0", "scalerl seed 0 (bbbbbbbb)"}


@pytest.mark.full
def test_two_controllers_may_create_the_store_at_the_same_time(tmp_path: Path) -> None:
    code = (
        "import sys; from sweeps.tracking import Tracker\n"
        "print(Tracker(sys.argv[1], 'study').open_sweep(sys.argv[2], []).experiment_id)"
    )
    uri = f"sqlite:///{tmp_path}/cold.db"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri, str(tmp_path / name)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert answers[0][0] == answers[1][0]


def test_an_experiment_created_by_another_process_meanwhile_is_used(tracker: Tracker) -> None:
    class Late:
        """A client that sees the experiment only after its own attempt to create it."""

        asked = False

        def get_experiment_by_name(self, name: str) -> Any:
            self.asked, first = True, not self.asked
            return None if first else client.get_experiment_by_name(name)

        def create_experiment(self, name: str, artifact_location: str | None) -> str:
            client.create_experiment(name, artifact_location)
            return str(client.create_experiment(name, artifact_location))  # raises, because it exists now

    client = tracker.client
    tracker._client = Late()
    assert tracker.prepare() == client.get_experiment_by_name("study").experiment_id


@pytest.mark.slow
def test_a_deleted_experiment_is_refused_with_the_command_to_restore_it(tracker: Tracker) -> None:
    tracker.client.delete_experiment(tracker.prepare())
    with pytest.raises(UserError, match="mlflow experiments restore"):
        tracker.prepare()


def test_valid_statuses_are_set_and_others_refused(tracker: Tracker, tmp_path: Path) -> None:
    _, _, run_id = one_run(tracker, tmp_path)
    for status in ("RUNNING", "KILLED", "RUNNING", "FAILED", "FINISHED"):
        tracker.set_status(run_id, status)
        assert tracker.client.get_run(run_id).info.status == status
    with pytest.raises(UserError, match="FINISHED, FAILED, KILLED"):
        tracker.set_status(run_id, "done")


def test_only_records_covered_by_a_checkpoint_are_sent(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 11), checkpoint=None).close()
    assert ship(run_dir, tracker.client, run_id) == 0
    write_run(run_dir, range(11, 12), checkpoint=6).close()
    ship(run_dir, tracker.client, run_id)
    assert [step for step, _, _ in history(tracker, run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, _ in history(tracker, run_id, Y)] == [2, 4, 6]


def test_x_is_logged_at_exactly_the_steps_of_y(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 11), checkpoint=10).close()
    ship(run_dir, tracker.client, run_id)
    x, y = history(tracker, run_id, X), history(tracker, run_id, Y)
    assert [(s, t) for s, _, t in x] == [(s, t) for s, _, t in y]
    assert [v for _, v, _ in x] == pytest.approx([math.log10(1e6 * step) for step in (2, 4, 6, 8, 10)])
    assert [(s, v) for s, v, _ in history(tracker, run_id, "eval/heldout/initial_pass_rate")] == [(0, 0.2)]
    # Timestamps are those of the journal, in ms, and no metric comes from two kinds of record.
    assert y[0][2] % 1000 == 0 and 1e12 <= y[0][2] < 1e12 + 1e6
    assert [step for step, _, _ in history(tracker, run_id, "compute/flops")] == list(range(1, 11))


def test_nothing_is_sent_twice(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 11), checkpoint=10).close()
    assert ship(run_dir, tracker.client, run_id) == 43
    before = {key: history(tracker, run_id, key) for key in (X, Y, "train/loss")}
    assert ship(run_dir, tracker.client, run_id) == 0
    (run_dir / CURSOR_FILE).unlink()
    assert ship(run_dir, tracker.client, run_id) == 0
    assert {key: history(tracker, run_id, key) for key in before} == before


@pytest.mark.slow
def test_a_kill_after_sending_does_not_send_steps_twice(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 11), checkpoint=10).close()
    real = tracker.client

    class Killed:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def log_batch(self, *args: Any, **kwargs: Any) -> None:
            real.log_batch(*args, **kwargs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ship(run_dir, Killed(), run_id)
    before = history(tracker, run_id, "train/loss")
    # Before the next start, the run went back and repeated its steps with other times and values.
    journal = Journal(run_dir, clock=lambda: 2e9)
    journal.resume(-1)
    journal.close()
    write_run(run_dir, range(1, 13), checkpoint=12, offset=0.25, start=2e9).close()
    ship(run_dir, real, run_id)
    after = history(tracker, run_id, "train/loss")
    assert len(before) == 10 and after[:10] == before
    assert [step for step, _, _ in after] == list(range(1, 13))


def test_mlflow_stores_an_identical_point_once(tracker: Tracker, tmp_path: Path) -> None:
    """Sending again relies on this: key, value, timestamp and step together identify a point."""
    from mlflow.entities import Metric

    _, _, run_id = one_run(tracker, tmp_path)
    same = [Metric("train/loss", 0.1, 1000, step) for step in range(5)]
    tracker.client.log_batch(run_id, metrics=same)
    tracker.client.log_batch(run_id, metrics=[*same, Metric("train/loss", 0.2, 1000, 9)])
    assert [step for step, _, _ in history(tracker, run_id, "train/loss")] == [0, 1, 2, 3, 4, 9]


def test_replaced_steps_are_never_sent(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 11), checkpoint=5).close()
    ship(run_dir, tracker.client, run_id)
    journal = Journal(run_dir)
    journal.resume(5)
    journal.close()
    write_run(run_dir, range(6, 11), checkpoint=10, offset=0.5).close()
    ship(run_dir, tracker.client, run_id)
    values = [value for _, value, _ in history(tracker, run_id, "train/loss")]
    assert values == [1, 2, 3, 4, 5, 6.5, 7.5, 8.5, 9.5, 10.5]


@pytest.mark.slow
def test_records_are_cut_to_mlflows_limits(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    journal = Journal(run_dir)
    journal.header(run="r")
    values = {f"mechanism/loss=a{i}": float(i) for i in range(2500)}
    journal.record("train", 1, values | {"train/bad": math.nan, "train/worse": math.inf})
    journal.checkpoint(1)
    journal.close()
    (run_dir / "config.yaml").write_text(
        json.dumps({"loss": {"max_ratio": 5, "name": "ü" * 9000}, "empty": {}, "sets": [1, 2], "none": None}
                   | {f"p{i}": i for i in range(150)})
    )  # fmt: skip
    (run_dir / "semantics.json").write_text('{"ddof": 1}')
    assert ship(run_dir, tracker.client, run_id) == 2500
    run = tracker.client.get_run(run_id)
    assert run.data.metrics["mechanism/loss_a2499"] == 2499
    assert all(math.isfinite(value) for value in run.data.metrics.values())
    assert run.data.params["loss.max_ratio"] == "5" and len(run.data.params["loss.name"]) == 6000
    assert run.data.params["empty"] == "{}" and run.data.params["sets"] == "[1, 2]" and len(run.data.params) == 155
    assert {f.path for f in tracker.client.list_artifacts(run_id)} == {"config.yaml", "semantics.json"}

    # A larger budget continues the run. MLflow's parameters cannot change, so the new value becomes a tag.
    (run_dir / "config.yaml").write_text("p0: 7\nnew: x\n")
    ship(run_dir, tracker.client, run_id)
    run = tracker.client.get_run(run_id)
    assert (run.data.params["p0"], run.data.tags["config.p0"], run.data.params["new"]) == ("0", "7", "x")


def test_an_unknown_or_changed_axis_is_named(tracker: Tracker, tmp_path: Path) -> None:
    _, run_dir, run_id = one_run(tracker, tmp_path)
    write_run(run_dir, range(0, 5), checkpoint=4).close()
    with pytest.raises(UserError, match=r"'compute/hours'.*recorded there: compute/flops"):
        ship(run_dir, tracker.client, run_id, axis="compute/hours")
    ship(run_dir, tracker.client, run_id)
    with pytest.raises(UserError, match="keep the axis"):
        ship(run_dir, tracker.client, run_id, axis="compute/hours")


def test_flatten_and_points() -> None:
    assert flatten({"a": {"b": [1, "x"], "c=d": True}, "e": ""}) == {
        "a.b": '[1, "x"]',
        "a.c_d": "true",
        "e": "",
    }
    from sweeps.run.journal import Record

    cost = {"eval_cost/flops": 7.0, "time/evaluate_s": 1.0}  # no training step records these
    rates = {"eval/a/pass_rate": 0.5, "eval/b/pass_rate": 0.4}
    record = Record("eval", 3, 0.0, {**rates, "compute/flops": 100.0, **cost})
    assert set(points(record, "compute/flops")) == {
        *(f"eval/{s}/{k}" for s in "ab" for k in ("pass_rate", "log10_compute")),
        *("Pass rate/a", "Pass rate/b"),
        *cost,
    }


class Flaky:
    """A client whose store does not answer while `down` is true."""

    def __init__(self, client: Any) -> None:
        self.client, self.down, self.calls = client, False, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        if self.down:
            raise ConnectionError("connection refused")
        return getattr(self.client, name)


def test_an_outage_is_logged_once_and_its_records_are_sent_later(
    tracker: Tracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep, run_dir, run_id = one_run(tracker, tmp_path)
    flaky = Flaky(tracker.client)
    tracker._client = flaky
    shipper = Shipper(tracker, sweep, interval_s=0.05, max_pause_s=0.1)
    assert shipper.run_once()  # nothing written yet
    flaky.down = True
    write_run(run_dir, range(0, 11), checkpoint=6).close()
    with caplog.at_level(logging.WARNING):
        shipper.start()
        shipper.set_status("scalerl-0", "FINISHED")
        while flaky.calls < 6:
            time.sleep(0.01)
        assert shipper.outage is not None
        assert len(caplog.records) == 1 and "does not answer" in caplog.text
    assert not shipper.stop()
    shipper.start()
    flaky.down = False
    journal = Journal(run_dir)
    journal.checkpoint(10)
    journal.close()
    assert shipper.stop(final=True)
    tracker._client = flaky.client
    assert [step for step, _, _ in history(tracker, run_id, "train/loss")] == list(range(1, 11))
    assert tracker.client.get_run(run_id).info.status == "FINISHED"


def test_a_pass_reads_only_lines_appended_since_the_last_one(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, run_dir, run_id = one_run(tracker, tmp_path)
    parsed: list[bytes] = []
    parse = tail.parse_line
    monkeypatch.setattr(tail, "parse_line", lambda line: parsed.append(line) or parse(line))
    write_run(run_dir, range(0, 101), checkpoint=100).close()
    shipper = Shipper(tracker, sweep)
    assert shipper.run_once() and len(parsed) > 100
    for step in (101, 102):
        journal = Journal(run_dir)
        journal.record("train", step, {"train/loss": 0.5})
        journal.checkpoint(step)
        journal.close()
        parsed.clear()
        assert shipper.run_once() and len(parsed) == 2
    assert [point[0] for point in history(tracker, run_id, "train/loss")] == list(range(1, 103))
    # Another controller skips the records that were sent.
    parsed.clear()
    assert Shipper(tracker, sweep).run_once() and len(parsed) < 10


def test_a_problem_with_one_run_does_not_affect_the_others(
    tracker: Tracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "sweep"
    sweep = tracker.open_sweep(root, members(root, ("a", 0), ("b", 0), ("c", 0)))
    for name in ("a-0", "b-0"):
        write_run(root / name, range(0, 5), checkpoint=4).close()
    (root / "c-0").mkdir()
    (root / "c-0" / "metrics.jsonl").write_text("{}\n[]\n{}\n")
    tracker.client.delete_run(sweep.members["a-0"].mlflow_run_id)
    shipper = Shipper(tracker, sweep)
    assert not shipper.run_once() and not shipper.run_once()
    assert shipper.outage is None and set(shipper.run_problems) == {"a-0", "c-0"}
    assert len(caplog.records) == 2
    assert len(history(tracker, sweep.members["b-0"].mlflow_run_id, "train/loss")) == 4
    with pytest.raises(UserError, match="not in sweep"):
        shipper.set_status("typo", "FINISHED")


def summary(recipe: str, A: float, **changes: Any) -> FitSummary:
    x = np.logspace(5, 8, 75)
    y = 0.2 + (A - 0.2) / (1 + (1e6 / x) ** 1.5)
    values: dict[str, Any] = {
        "A": A, "A_low": A - 0.02, "A_high": A + 0.02, "B": 1.5, "C_mid": 1e6, "R0": 0.2, "rmse": 0.01,
        "p_best": 0.5, "window": (2e6, 1e7), "curve_x": x, "curve_y": y,
        "band_low": y - 0.02, "band_high": y + 0.03,
    }  # fmt: skip
    return FitSummary(recipe, "identifiable", "compute/flops", **(values | changes))


def runs_of_kind(tracker: Tracker, sweep: TrackedSweep, kind: str) -> list[Any]:
    return [run for run in tracker.sweep_runs(sweep) if run.data.tags.get("kind") == kind]


def test_publishing_again_replaces_the_fits(tracker: Tracker, tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    sweep = tracker.open_sweep(root, members(root, ("a", 0), ("a", 1), ("b", 0)))
    for tracked in sweep.members.values():
        write_run(tracked.member.run_dir, range(0, 11), checkpoint=10).close()
        ship(tracked.member.run_dir, tracker.client, tracked.mlflow_run_id)
    refused = FitSummary("b", "pre_inflection", "compute/flops", reason="ends before the bend", A=math.nan)
    page = tmp_path / "report.html"
    page.write_text("<h1>report</h1>")
    ranking = [{"recipe": "a", "rank": 1, "A": 0.6}, {"recipe": "b", "rank": None, "A": math.nan}]
    note = "My own words."
    tracker.client.set_experiment_tag(sweep.experiment_id, "mlflow.note.content", note)

    publish([summary("a", 0.6), refused], tracker, sweep, ranking=ranking, artifacts=[page])
    done = publish([summary("a", 0.61, A_high=None), refused], tracker, sweep, ranking=ranking, artifacts=[page])

    [fit_b, fit_a] = sorted(runs_of_kind(tracker, sweep, "fit"), key=lambda run: run.data.tags["recipe"], reverse=True)
    bands = runs_of_kind(tracker, sweep, "band")
    assert done.fit_runs == {"a": fit_a.info.run_id, "b": fit_b.info.run_id}
    assert len(bands) == 2 and {run.data.tags["series"] for run in [fit_a, *bands]} == {"a fit"}
    assert {run.info.status for run in [fit_a, fit_b, *bands]} == {"FINISHED"}
    columns = [
        (
            [s for s, _, _ in history(tracker, r.info.run_id, BAND_KEY)],
            [v for _, v, _ in history(tracker, r.info.run_id, X)],
        )
        for r in [fit_a, *bands]
    ]
    assert columns[0][0] == list(range(75)) and columns[0] == columns[1] == columns[2]
    assert fit_a.data.metrics["fit/A"] == 0.61 and fit_a.data.metrics["fit/log10_C_mid"] == 6
    assert "fit/A_high" not in fit_a.data.metrics and fit_a.data.tags["fit.A_high"] == "open"
    assert {"curve/fit", "curve/low", "curve/high"} <= set(fit_a.data.metrics) and Y not in fit_a.data.metrics
    # The chart draws a group's mean and range. They must equal the fit and its band, which is wider above than below.
    drawn = np.array([[v for _, v, _ in history(tracker, r.info.run_id, BAND_KEY)] for r in (fit_a, *bands)])
    fitted, low, high = (
        [v for _, v, _ in history(tracker, fit_a.info.run_id, f"curve/{end}")] for end in ("fit", "low", "high")
    )
    np.testing.assert_allclose(drawn.mean(0), fitted)
    np.testing.assert_allclose([drawn.min(0), drawn.max(0)], [low, high])
    assert fit_b.data.metrics == {} and fit_b.data.tags["fit.verdict"] == "pre_inflection"

    member = tracker.client.get_run(sweep.members["a-1"].mlflow_run_id).data
    assert (member.metrics["fit/A"], member.tags["fit.verdict"]) == (0.61, "identifiable")
    assert member.tags["fit.stale"] == "fit/A_high"
    assert history(tracker, sweep.members["a-1"].mlflow_run_id, "fit/B")[0][:2] == (1, 1.5)

    table = json.loads(tracker.client.download_artifacts(sweep.parent_id, "ranking.json", str(tmp_path)) and
                       (tmp_path / "ranking.json").read_text())  # fmt: skip
    assert table == {"columns": ["recipe", "rank", "A"], "data": [["a", 1, 0.6], ["b", None, None]]}
    assert {f.path for f in tracker.client.list_artifacts(sweep.parent_id)} == {"ranking.json", "report.html"}

    tags = tracker.client.get_experiment(sweep.experiment_id).tags
    assert done.link in tags["mlflow.note.content"].splitlines()[0]
    assert tags["mlflow.note.content"].endswith(note) and tags["mlflow.note.content"].count("Scaling curves") == 1
    state = decode_view(tags[f"{VIEW_TAG}scaling-{sweep.key}"])
    [chart, linear] = state["compareRunCharts"]
    named = "eval/heldout/log10 compute in FLOPs", "eval/heldout/compute in FLOPs"
    # Fits and bands are the first metric; evaluations are the second one, which MLflow draws dashed.
    assert (chart["selectedMetricKeys"], chart["selectedXAxisMetricKey"]) == ([BAND_KEY, Y], named[0])
    evaluations = [BAND_KEY, "Pass rate/heldout"]
    assert (linear["selectedMetricKeys"], linear["selectedXAxisMetricKey"]) == (evaluations, named[1])
    assert chart["range"]["xMin"] < 5 < 8 < chart["range"]["xMax"] and sweep.key in state["searchFilter"]
    assert linear["range"]["xMin"] < 0 and linear["range"]["xMax"] > 1e8
    ranking_view = decode_view(tags[f"{VIEW_TAG}ranking-{sweep.key}"])
    recipes_view = decode_view(tags[f"{VIEW_TAG}recipes-{sweep.key}"])
    assert "tags.kind = 'fit'" in recipes_view["searchFilter"] and recipes_view["orderByKey"] == "metrics.`rank/place`"
    assert done.recipes_link in tags["mlflow.note.content"].splitlines()[0]
    assert "rank/place" in ranking_view["orderByKey"] and "tags.kind = 'member'" in ranking_view["searchFilter"]
    assert ranking_view["selectedColumns"][1:4] == ["metrics.`rank/p_best`", "tags.`fit.verdict`", "metrics.`fit/A`"]


def test_all_runs_of_a_recipe_have_one_colour_also_in_the_chart(tracker: Tracker, tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    sweep = tracker.open_sweep(root, members(root, ("a", 0), ("b", 0)))
    tracker.add_members(sweep, members(root, ("a", 1), ("c", 0)))  # added later, as by a search
    coloured_by_hand = sweep.members["c-0"].mlflow_run_id
    tracker.client.set_tag(coloured_by_hand, "mlflow.runColor", "#123456")
    publish([summary("a", 0.6, label="short"), summary("b", 0.5), summary("c", 0.4)], tracker, sweep)
    run_tags = [run.data.tags for run in tracker.sweep_runs(sweep) if run.data.tags["kind"] != "sweep"]
    colours = {recipe: {tags["mlflow.runColor"] for tags in run_tags if tags["recipe"] == recipe} for recipe in "abc"}
    assert colours["a"] == {COLOURS[1]} and colours["b"] == {COLOURS[2]}, (
        "the first colour is reserved for the baseline"
    )
    assert colours["c"] == {"#123456", COLOURS[3]}  # a colour that the user chose stays
    for tags in run_tags:
        assert group_colour(tags["line"]) == COLOURS[1 + "abc".index(tags["recipe"])]
    lines = [tags["line"].rstrip() for tags in run_tags if tags["recipe"] == "a"]
    assert sorted(lines) == ["short fit", "short fit", "short fit", "short seed 0", "short seed 1"]


@pytest.mark.parametrize("label", ["scalerl seed 0", "s", "rezept+größe=7 seed 12", "scalerl+" + "loss=dapo+" * 30])
def test_every_colour_can_be_reached_by_adding_blanks(label: str) -> None:
    assert len(set(COLOURS)) == len(COLOURS)
    for colour in COLOURS:
        value = line_value(label, colour)
        assert group_colour(value) == colour and value.rstrip() == label


def test_a_view_of_a_large_study_fits_an_older_servers_tag() -> None:
    recipes = [f"context.max_new_tokens={at}+optimizer.lr={1 / (at + 3):.6f}+loss=dapo" for at in range(MAX_LINES // 4)]
    lines = [line_value(f"{recipe} seed {seed}", COLOURS[seed]) for recipe in recipes for seed in range(4)]
    shown = ChartRange.around([1.0, 2.0], [0.1, 0.2])
    state = scaling_state("0123456789ab", ChartKeys("heldout", "virtual device hours"), shown, shown, lines)
    assert len(lines) == MAX_LINES and len(encode_view("Scaling curves", state, 10**12)) < 5000


def test_with_more_recipes_than_colours_colours_repeat() -> None:
    colours = recipe_colours([str(number) for number in range(40)], {"5": COLOURS[3], "6": "#123456"}, baseline="7")
    assert colours["5"] == COLOURS[3] and colours["0"] == COLOURS[1] and colours["2"] == COLOURS[4]
    assert len(colours) == 40 and set(colours.values()) == set(COLOURS)
    # Only the baseline has its colour, whether it comes first or last.
    assert [recipe for recipe, colour in colours.items() if colour == BASELINE_COLOUR] == ["7"]
    assert recipe_colours(["a"], {}, "b") | recipe_colours(["b"], {}, "b") == {"a": COLOURS[1], "b": BASELINE_COLOUR}


def test_metrics_stored_by_an_earlier_version_are_kept_and_completed(tracker: Tracker, tmp_path: Path) -> None:
    from mlflow.entities import Metric

    sweep, _, run_id = one_run(tracker, tmp_path)
    tracker.client.delete_tag(run_id, "mlflow.runColor")
    steps = range(2, 12, 2)
    old = [Metric("eval/heldout/initial_pass_rate", 0.2, 900, 0)]
    old += [Metric(Y, 0.2 + step / 100, 1000 + step, step) for step in steps]
    old += [Metric(X, math.log10(1e6 * step), 1000 + step, step) for step in steps]
    tracker.client.log_batch(run_id, metrics=old)
    before = {key: history(tracker, run_id, key) for key in (X, Y, "eval/heldout/initial_pass_rate")}
    read = load([f"mlflow:{tracker.uri}#study"]).curves[0]
    fit = summary("scalerl", 0.6, rank=1)
    for _ in range(2):  # the second call finds everything there
        publish([fit], tracker, sweep)
        assert {key: history(tracker, run_id, key) for key in before} == before
        pass_rates = history(tracker, run_id, "Pass rate/heldout")
        assert [(step, at) for step, _, at in pass_rates] == [(0, 900), *((step, 1000 + step) for step in steps)]
        assert [value for _, value, _ in pass_rates] == pytest.approx([0.2 + step / 100 for step in (0, *steps)])
        compute = history(tracker, run_id, "eval/heldout/compute in FLOPs")
        assert [step for step, _, _ in compute] == [step for step, _, _ in pass_rates]
        assert [value for _, value, _ in compute] == pytest.approx([1e6 * step for step in (0, *steps)])
        assert history(tracker, run_id, "eval/heldout/log10 compute in FLOPs") == before[X]
    again = load([f"mlflow:{tracker.uri}#study"]).curves[0]
    assert np.array_equal(again.compute, read.compute) and np.array_equal(again.reward, read.reward)
    assert tracker.client.get_run(run_id).data.tags["mlflow.runColor"] == COLOURS[1]

    # A recipe without a fit now has no rank: the table must not sort it by its earlier rank.
    publish([FitSummary("scalerl", "pre_inflection", "compute/flops", reason="no bend")], tracker, sweep)
    member = tracker.client.get_run(run_id).data
    assert math.isnan(member.metrics["rank/place"]) and "rank/place" in member.tags["fit.stale"]
    assert history(tracker, run_id, "rank/place")[0][1] == 1


def test_a_publish_that_fails_keeps_the_old_chart(tracker: Tracker, tmp_path: Path) -> None:
    sweep, _, _ = one_run(tracker, tmp_path)
    publish([summary("a", 0.6)], tracker, sweep)
    before = {run.info.run_id for run in tracker.sweep_runs(sweep)}
    real = tracker.client

    class Dying(Flaky):
        def log_batch(self, *args: Any, **kwargs: Any) -> None:
            raise ConnectionError("gone")

    tracker._client = Dying(real)
    with pytest.raises(UserError, match="publishing fits failed"):
        publish([summary("a", 0.7)], tracker, sweep)
    tracker._client = real
    assert {run.info.run_id for run in tracker.sweep_runs(sweep)} == before
    with pytest.raises(UserError, match="nothing was published"):
        publish([], tracker, sweep, artifacts=[tmp_path / "missing.png"])


def test_another_sweep_of_the_experiment_keeps_its_fits(tracker: Tracker, tmp_path: Path) -> None:
    sweeps = [tracker.open_sweep(tmp_path / name, []) for name in ("one", "two")]
    for sweep in sweeps:
        publish([summary("a", 0.6)], tracker, sweep)
    assert [len(runs_of_kind(tracker, sweep, "fit")) for sweep in sweeps] == [1, 1]
    assert sweeps[0].key != sweeps[1].key
    assert {run.data.tags[SWEEP_TAG] for run in tracker.sweep_runs(sweeps[0])} == {sweeps[0].key}


def test_non_finite_points_are_dropped_from_curve_and_band() -> None:
    base = summary("a", 0.6)
    assert base.curve_x is not None and base.band_high is not None
    high = base.band_high.copy()
    high[3] = np.inf
    x = base.curve_x.copy()
    x[0] = 0.0
    curve = summary("a", 0.6, band_high=high, curve_x=x).curve()
    assert curve is not None and {len(column) for column in curve.values()} == {73}


def decode_view(value: str) -> dict[str, Any]:
    """Decode the state in a view's tag, as MLflow's interface does."""
    state = json.loads(value)["state"].removeprefix("deflate;")
    view: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(state)))
    return view


def test_an_encoded_view_can_be_decoded() -> None:
    state = {"searchFilter": "tags.`a` = 'b'", "n": [1, 2.5, None]}
    value = encode_view("Scaling curves", state, 1)
    assert decode_view(value) == state and json.loads(value)["name"] == "Scaling curves"


def test_ui_command_for_a_local_store_and_for_a_server(tmp_path: Path) -> None:
    local = ui_command(f"sqlite:///{tmp_path}/my db.db", "#/experiments/1/runs?x=1", port=5001)
    assert local.command is not None and "--host 127.0.0.1 --port 5001" in local.command
    assert f"'sqlite:///{tmp_path}/my db.db'" in local.command
    assert local.url == "http://127.0.0.1:5001/#/experiments/1/runs?x=1"
    server = ui_command("https://me:secret@host:1/", "#/x")
    assert server.command is None and server.url == "https://host:1/#/x"
