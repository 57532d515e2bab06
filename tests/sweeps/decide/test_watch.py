"""Tests of `watch`: snapshots, warnings of departures from the forecast, and the file of fits after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.watch import RAMP, RUNS, evaluated, fallen, rings
from sweeps.cli import main as cli
from sweeps.curve import Curve, make_curve
from sweeps.decide import watch as live
from sweeps.decide.watch import Watch
from sweeps.errors import UserError
from sweeps.fit.fit import FitOptions, Interval, fit_curve
from sweeps.fit.history import Check, Snapshot, departure, history
from sweeps.fit.pooling import Pool
from sweeps.fit.predict import predict, predict_mean
from sweeps.run.journal import Journal
from sweeps.source import LoadedStudy, load
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

EXAMPLE = ROOT / "examples" / "curves.csv"
RATE, HOURS = "eval/heldout/pass_rate", "compute/virtual_device_hours"


def until(data: Curve, compute: float) -> Curve:
    keep = data.compute <= compute
    return make_curve(data.recipe, data.compute[keep], data.reward[keep], data.seed[keep])


# --- snapshots ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_snapshot_checks_a_forecast_against_later_evaluations() -> None:
    data = curve(points=33, wander=0.006)
    snapshots = {s.compute_end: s for s in history(data, every=1)}
    assert sorted(snapshots) == [500.0 * k for k in range(6, 33)]
    snapshot_at_9000 = snapshots[9000]
    fit = fit_curve(data, FitOptions(max_compute=9000))
    assert (snapshot_at_9000.verdict, snapshot_at_9000.A, snapshot_at_9000.n) == (fit.verdict, fit.A, 38)
    assert snapshot_at_9000.forecast is not None and snapshot_at_9000.forecast[0] == 13500
    band = predict(fit, [13500], observations=1)
    assert snapshot_at_9000.forecast[1] == Interval(float(band.value[0]), float(band.low[0]), float(band.high[0]))
    assert (
        snapshot_at_9000.check is not None
        and snapshot_at_9000.check.made_at == 6000
        and snapshot_at_9000.check.evaluations == 4
    )
    checked = (data.compute > 9000 / 1.1) & (data.compute <= 9000)
    assert snapshot_at_9000.check.actual == pytest.approx(data.reward[checked].mean())
    # The forecast made at 6000 does not depend on later evaluations.
    value, low, high = predict_mean(fit_curve(until(data, 6000)), data.compute[checked])
    assert (snapshot_at_9000.check.predicted, snapshot_at_9000.check.low, snapshot_at_9000.check.high) == pytest.approx(
        (value, low, high)
    )


@pytest.mark.full
def test_new_evaluations_do_not_move_earlier_snapshots() -> None:
    data = curve(points=25)
    whole = history(data)
    for end in (4000.0, 9000.0):
        part = history(until(data, end))
        shared = [s for s in whole if s.compute_end < part[-1].compute_end]
        assert part[: len(shared)] == shared
        later = history(data, earlier=part)
        assert (
            later
            and later[0].compute_end >= live.GROWTH * part[-1].compute_end
            and later[-1].compute_end == data.compute.max()
        )


@pytest.mark.full
def test_there_are_about_a_dozen_snapshots_including_the_end() -> None:
    for points, most in ((41, 14), (161, 24)):
        ends = [s.compute_end for s in history(curve(points=points, seeds=1, end=points - 1.0, c_mid=6.0))]
        assert most - 4 <= len(ends) <= most and ends[-1] == points - 1
        steps = np.array(ends[1:]) / ends[:-1]
        assert (steps[:-1] >= live.GROWTH).all() and ends == sorted(set(ends))
    with pytest.raises(UserError, match=r"every 0\.5"):
        history(curve(), every=0.5)


@pytest.mark.slow
def test_only_new_evaluations_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    data = curve(points=25)
    known = history(data)
    fitted: list[float | None] = []

    def spy(data: Curve, options: FitOptions, pool: Pool | None) -> object:
        fitted.append(options.max_compute)
        return fit_curve(data, options, pool=pool)

    monkeypatch.setattr("sweeps.fit.history.fit_curve", spy)
    assert history(data, earlier=known) == [] and fitted == []
    history(until(data, 9000), earlier=history(until(data, 8000)))
    del fitted[:]
    history(data, earlier=[s for s in known if s.compute_end < 16000])
    assert len(fitted) == 2 and fitted[0] == 16000


def test_new_points_of_a_lagging_seed_give_a_snapshot() -> None:
    data = curve(points=17, seeds=2)
    lagging = make_curve("scalerl", data.compute[:25], data.reward[:25], data.seed[:25])
    known = history(lagging)
    more = make_curve("scalerl", data.compute[:27], data.reward[:27], data.seed[:27])
    (refitted,) = history(more, earlier=known)
    assert refitted.compute_end == known[-1].compute_end == 16000 and refitted.n == known[-1].n + 2
    assert history(more, earlier=[*known, refitted]) == []


def test_snapshots_stay_in_the_window_of_the_options() -> None:
    data = curve(points=33)
    ends = [s.compute_end for s in history(data, FitOptions(min_compute=2000, max_compute=9000))]
    assert ends[0] == 4500 and ends[-1] == 9000
    assert history(make_curve("x", [0.0], [0.3])) == []
    (first,) = history(make_curve("x", [0.0, 1.0], [0.3, 0.4]))
    assert first.verdict == "too_few_points" and first.check is None and first.forecast is None


def test_sparse_evaluations_are_checked_too() -> None:
    data = curve(points=2, seeds=1)
    compute = np.concatenate([[0.0], 100 * 2.0 ** np.arange(10)])
    data = make_curve("x", compute, np.interp(compute, [0, 1e4], [0.3, 0.6]))
    last = history(data)[-1]
    assert last.check is not None and last.check.made_at == 25600 and last.check.evaluations == 1


def test_a_falling_curve_has_no_forecast() -> None:
    falling = make_curve("x", np.arange(20.0), np.linspace(0.6, 0.3, 20))
    assert all(s.verdict == "decreasing" and s.forecast is None and s.check is None for s in history(falling))


# --- departure ----------------------------------------------------------------------------------------------


def snapshot(compute: float, actual: float | None) -> Snapshot:
    check = None if actual is None else Check(compute / 1.5, 3, actual, 0.6, 0.58, 0.62)
    return Snapshot("x", compute, 10, "identifiable", Interval(0.6, 0.59, 0.61), None, check)


@pytest.mark.parametrize(
    ("actuals", "rings"),
    [
        ([(100, 0.50)], False),
        ([(100, 0.60), (120, 0.50)], False),
        ([(100, 0.50), (120, 0.50)], True),
        ([(100, 0.50), (114, 0.50)], False),  # too close: the snapshots share evaluations
        ([(100, 0.50), (108, 0.50), (116, 0.50)], True),
        ([(100, 0.50), (108, 0.60), (116, 0.50)], False),
        ([(100, 0.50), (100, 0.50)], False),  # the same compute twice, because of a lagging seed
        ([(100, 0.70), (120, 0.50)], False),
        ([(100, 0.70), (120, 0.70)], True),
        ([(100, 0.50), (120, 0.50), (140, 0.60)], False),
        ([(100, 0.581), (120, 0.581)], False),  # inside the interval
        ([(100, 0.579), (120, 0.579)], True),
        ([(100, 0.50), (120, None)], False),
        ([(100, None), (120, 0.50)], False),
        ([], False),
    ],
)
def test_departure_needs_two_snapshots_in_a_row(actuals: list[tuple[float, float | None]], rings: bool) -> None:
    assert (departure([snapshot(*pair) for pair in actuals]) is not None) == rings


def test_departure_names_numbers_and_remedy() -> None:
    below = departure([snapshot(100, 0.60), snapshot(120, 0.50), snapshot(150, 0.51)])
    assert below == (
        "reward has been below its forecast since compute 120: 0.510 at 150, where the fit up to 100 predicted 0.600 "
        "[0.580, 0.620]; look at the run's health (entropy, truncation, KL)"
    )
    above = departure([snapshot(100, 0.70), snapshot(120, 0.70)])
    assert above is not None and "above its forecast" in above and "--min-compute" in above


@pytest.mark.full
def test_good_runs_give_no_warning_and_collapses_do() -> None:
    runs = [evaluated(RUNS[0], 3000 + i) for i in range(4)]
    assert sum(rings(data, live.GROWTH) for data in runs) <= 1
    assert all(rings(fallen(data, 0.0), live.GROWTH) for data in runs[:2])
    assert all(rings(fallen(data, RAMP), live.GROWTH) for data in runs[2:])


@pytest.mark.parametrize(
    "place",
    [pytest.param(number, id=run.name, marks=pytest.mark.full) for number, run in enumerate(RUNS)],
)
def test_false_alarms_and_misses(place: int) -> None:
    """Rates on a few runs of `benchmarks/watch.py` with fewer snapshots. The bounds leave room for chance."""
    runs = [evaluated(RUNS[place], 900 + number) for number in range(12)]
    assert np.mean([rings(run, 1.05) for run in runs]) <= 0.17
    fell = [rings(fallen(run, ramp), 1.05) for run in runs for ramp in (0.0, RAMP)]
    assert np.mean(fell) >= 0.75


# --- watching -----------------------------------------------------------------------------------------------


def open_journal(run_dir: Path, recipe: str = "scalerl", seed: int = 0) -> Journal:
    journal = Journal(run_dir)
    journal.header(run=run_dir.name, curve=recipe, recipe=recipe, seed=seed)
    return journal


def evaluations(data: Curve) -> Iterator[tuple[int, dict[str, float]]]:
    for step, (compute, reward) in enumerate(zip(data.compute, data.reward, strict=True)):
        yield step, {HOURS: float(compute), RATE: float(reward)}


def write(run_dir: Path, data: Curve) -> None:
    journal = open_journal(run_dir, data.recipe)
    for step, metrics in evaluations(data):
        journal.record("eval", step, metrics)
    journal.close()


def watching(source: Path, **settings: object) -> Watch:
    path = live.default_path([source])
    return Watch(partial(load, [source]), [source], path=path, clock=lambda: 0.0, **settings)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    """Return every line of a file without its time. Raises on a damaged line."""
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


def test_snapshots_of_other_bounds_are_not_reused(tmp_path: Path) -> None:
    """The bounds 0 and 1 are also the inferred ones, so they reuse the lines written without bounds."""
    data, path = curve(points=8, seeds=1), tmp_path / "fits.jsonl"

    def lines_after(limits: tuple[float, float] | None) -> int:
        reported = list(Watch(LoadedStudy, [], path=path).follow(replace(data, limits=limits)))
        assert reported
        return len(lines(path))

    first = lines_after(None)
    assert lines_after((0.0, 1.0)) == first < lines_after((-1.0, 2.0)) == lines_after((-1.0, 2.0))


@pytest.mark.slow
def test_a_growing_run_is_followed(tmp_path: Path) -> None:
    """Evaluations arrive one by one. After every poll the file contains each reported snapshot once."""
    sweep = tmp_path / "sweep"
    data = curve(points=20, seeds=1, wander=0.006)
    journal = open_journal(sweep / "run")
    watch = watching(sweep)
    reported: list[Snapshot] = []
    for step, metrics in evaluations(data):
        journal.record("train", step, {"train/loss": 1.0})
        journal.record("eval", step, metrics)
        with (sweep / "run" / "metrics.jsonl").open("a") as torn:
            whole_size = torn.tell()
            torn.write('{"kind": "eval", "step": 99, "metr')
        news = [n.snapshot for n in watch.poll()]
        os.truncate(sweep / "run" / "metrics.jsonl", whole_size)
        assert [s.compute_end for s in news] == ([] if step == 0 else [float(data.compute[step])])
        reported += news
        assert list(watch.poll()) == []
        if step:
            assert lines(sweep / "fits.jsonl")[-1]["n"] == step + 1
    assert [entry["compute"] for entry in lines(sweep / "fits.jsonl")] == data.compute[1:].tolist()
    assert [s for s in reported if s.compute_end >= data.compute[6]] == history(data, every=1)
    # A second watcher reports the same snapshots and writes nothing.
    before = (sweep / "fits.jsonl").read_bytes()
    assert [n.snapshot for n in watching(sweep).poll()] == reported
    assert (sweep / "fits.jsonl").read_bytes() == before


def test_nothing_is_read_or_fitted_without_new_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", curve(points=12, seeds=1))
    loads: list[int] = []

    def counted() -> object:
        loads.append(1)
        return load([tmp_path])

    watch = Watch(counted, [tmp_path])  # type: ignore[arg-type]
    assert len(list(watch.poll())) > 1
    monkeypatch.setattr(live, "iter_snapshots", None)
    assert list(watch.poll()) == [] and loads == [1]
    write(tmp_path / "run", curve(points=12, seeds=1))  # the journal grows, the evaluations are the same
    assert list(watch.poll()) == [] and loads == [1, 1]
    assert not (tmp_path / "fits.jsonl").exists()


@pytest.mark.slow
def test_recipes_and_fit_options_share_a_file(tmp_path: Path) -> None:
    for recipe in ("a", "b"):
        write(tmp_path / recipe, curve(recipe=recipe, points=12, seeds=1))
    first = [n.snapshot for n in watching(tmp_path).poll()]
    with_r0 = [n.snapshot for n in watching(tmp_path, options=FitOptions(r0=0.3)).poll()]
    assert len(first) == len(with_r0) and first != with_r0
    entries = lines(tmp_path / "fits.jsonl")
    assert [entry["options"]["r0"] for entry in entries] == ["first"] * len(first) + [0.3] * len(with_r0)  # type: ignore[index]
    assert [n.snapshot for n in watching(tmp_path).poll()] == first
    assert len(lines(tmp_path / "fits.jsonl")) == len(entries)


@pytest.mark.parametrize("kept", every(4, every(2, [1, 3], pytest.mark.full)))
@pytest.mark.parametrize("torn", [0, 25])
def test_a_watch_stopped_between_or_within_lines_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, torn: int
) -> None:
    for name in ("whole", "stopped"):
        write(tmp_path / name, curve(points=16, seeds=1))
    whole = [n.snapshot for n in watching(tmp_path / "whole").poll()]
    append = live.append_lines

    def append_then_stop(path: Path, entries: list[dict[str, object]]) -> None:
        if path.exists() and len(path.read_bytes().splitlines()) == kept:
            with path.open("a") as handle:
                handle.write(json.dumps(entries[0])[:torn])
            raise KeyboardInterrupt
        append(path, entries)

    monkeypatch.setattr(live, "append_lines", append_then_stop)
    with pytest.raises(KeyboardInterrupt):
        list(watching(tmp_path / "stopped").poll())
    monkeypatch.setattr(live, "append_lines", append)
    assert [n.snapshot for n in watching(tmp_path / "stopped").poll()] == whole
    after = (tmp_path / "stopped" / "fits.jsonl").read_text().splitlines()
    if torn:
        del after[kept]
    assert after == (tmp_path / "whole" / "fits.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.live
def test_a_kill_neither_loses_nor_repeats_a_snapshot(tmp_path: Path) -> None:
    write(tmp_path / "run", curve(points=100, seeds=1, wander=0.006))
    path = tmp_path / "run" / "fits.jsonl"
    command = [sys.executable, "-m", "sweeps.cli.main", "watch", str(tmp_path / "run"), "--once"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    deadline = time.time() + 60
    while time.time() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    interrupted = path.read_bytes().count(b"\n")
    expected = history(make_curve("scalerl", *_arrays(tmp_path / "run")))
    assert 2 <= interrupted < len(expected)
    assert cli.main(["watch", str(tmp_path / "run"), "--once"]) == 0
    read_snapshots = []
    for line in path.read_text().splitlines():
        try:
            read_snapshots.append(Snapshot.from_json(json.loads(line)))
        except ValueError:
            continue
    assert read_snapshots == expected


@pytest.mark.full
@pytest.mark.live
def test_two_watchers_write_each_snapshot_once(tmp_path: Path) -> None:
    write(tmp_path / "run", curve(points=60, seeds=1, wander=0.006))
    command = [sys.executable, "-m", "sweeps.cli.main", "watch", str(tmp_path / "run"), "--once"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=120)[0] for process in both)
    assert first == second and len(first.splitlines()) == len(lines(tmp_path / "run" / "fits.jsonl")) > 10


def _arrays(run_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    (data,) = load([run_dir]).curves
    return data.compute, data.reward


def test_snapshots_are_read_back_and_damaged_lines_skipped(tmp_path: Path) -> None:
    write(tmp_path / "run", curve(points=14, seeds=1))
    reported = [n.snapshot for n in watching(tmp_path / "run").poll()]
    path = tmp_path / "run" / "fits.jsonl"
    assert [Snapshot.from_json(json.loads(line)) for line in path.read_text().splitlines()] == reported
    good = json.loads(path.read_text().splitlines()[0])
    damaged = [b"\0\0\0", b"[1]", b"\xff", b"", json.dumps({**good, "A": None}).encode(), b'{"recipe": "scalerl"']
    path.write_bytes(b"\n".join(damaged) + b"\n" + path.read_bytes())
    before = path.read_bytes()
    assert [n.snapshot for n in watching(tmp_path / "run").poll()] == reported
    assert path.read_bytes() == before


@pytest.mark.slow
def test_warnings_of_departures_are_recorded(tmp_path: Path) -> None:
    write(tmp_path / "run", fallen(curve(points=33, seeds=1, white=0.004), 0.0, 0.15))
    news = list(watching(tmp_path / "run").poll())
    warnings = [n.warning for n in news if n.warning]
    assert warnings and "below its forecast" in warnings[0]
    assert [e["warning"] for e in lines(tmp_path / "run" / "fits.jsonl")] == [n.warning for n in news]
    assert [n.warning for n in watching(tmp_path / "run").poll()] == [n.warning for n in news]


def test_the_default_path_is_in_a_single_source_folder(tmp_path: Path) -> None:
    assert live.default_path([tmp_path]) == tmp_path / "fits.jsonl"
    assert live.default_path([tmp_path / "metrics.jsonl"]) == tmp_path / "fits.jsonl"
    assert live.default_path([EXAMPLE]) is None and live.default_path([tmp_path, tmp_path]) is None
    assert live.default_path(["x" * 5000]) is None and not live.waiting(["x" * 5000])


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_example_of_the_help_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        cli.main(["watch", "--help"])
    (example,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("example: ")]
    monkeypatch.chdir(ROOT)
    assert example == "example: scalerl watch examples/curves.csv --once"
    assert cli.main(example.split()[2:]) == 0
    captured = capsys.readouterr()
    last = [line for line in captured.out.splitlines() if line.startswith("scalerl: compute 1.6e+04, 66 evaluations, ")]
    assert (
        len(last) == 1
        and "identifiable, A 0.6" in last[0]
        and "observed 0." in last[0]
        and "predicted at 1.1e+04: 0." in last[0]
    )
    assert len(captured.out.splitlines()) == 44
    assert not (ROOT / "examples" / "fits.jsonl").exists()


def test_json_is_one_object_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", fallen(curve(points=20, seeds=1, white=0.004), 0.0, 0.2))
    assert cli.main(["watch", str(tmp_path), "--once", "--json", "--out", str(tmp_path / "new" / "x.jsonl")]) == 0
    captured = capsys.readouterr()
    entries = [json.loads(line) for line in captured.out.splitlines()]
    assert {"recipe", "compute", "n", "verdict", "A", "next", "check", "warning"} == set(entries[-1])
    assert len(lines(tmp_path / "new" / "x.jsonl")) == len(entries)
    assert not (tmp_path / "fits.jsonl").exists()
    warned = [entry["warning"] for entry in entries if entry["warning"]]
    assert warned and f"warning: scalerl: {warned[0]}" in captured.err


def test_watch_waits_for_the_first_and_for_more_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"kind": "run", "rec')
    data = curve(points=12, seeds=1)
    all_evaluations = list(evaluations(data))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        """Between polls: header, six evaluations, nothing, journal moved away, journal back, the other six, Ctrl-C."""
        slept.append(seconds)
        turn = len(slept)
        if turn == 1:
            open_journal(run_dir).close()
        elif turn in (2, 6):
            journal = Journal(run_dir)
            for step, metrics in all_evaluations[:6] if turn == 2 else all_evaluations[6:]:
                journal.record("eval", step, metrics)
            journal.close()
        elif turn == 4:
            (run_dir / "metrics.jsonl").rename(run_dir / "away")
        elif turn == 5:
            (run_dir / "away").rename(run_dir / "metrics.jsonl")
        elif turn == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr("sweeps.cli.showing_commands.time.sleep", sleep)
    assert cli.main(["watch", str(tmp_path), "--interval", "7"]) == 0
    captured = capsys.readouterr()
    assert slept == [7.0] * 7
    first_line, *later_lines = captured.out.splitlines()
    assert "6 evaluations, too_few_points" in first_line
    assert "12 evaluations" in later_lines[-1] and len(later_lines) == len(lines(tmp_path / "fits.jsonl")) - 1
    first, second = captured.err.splitlines()
    assert "waiting for the first" in first and "no run in this directory" in second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.csv"], "no such file"),
        (["nowhere.csv", "--once"], "no such file"),
        ([EXAMPLE, "--interval", "0"], "--interval 0: must be positive"),
        ([EXAMPLE, "--x", "gpu_hours"], "no column gpu_hours"),
        ([EXAMPLE, "--once", "--out", "/proc/nowhere/x.jsonl"], "cannot be written"),
        ([EXAMPLE, "--once", "--out", "/"], "cannot be written"),
        ([EXAMPLE, "--min-compute", "5", "--max-compute", "4"], "is not below"),
        (["x" * 5000], "no such file"),
    ],
)
def test_failures_exit_1_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str | Path], words: str
) -> None:
    assert cli.main(["watch", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_warnings_about_sources_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", curve(points=8, seeds=1))
    open_journal(tmp_path / "b").close()
    polls = iter(range(3))

    def sleep(_seconds: float) -> None:
        if next(polls) == 2:
            raise KeyboardInterrupt
        os.utime(tmp_path / "a" / "metrics.jsonl", ns=(0, 0))
        (tmp_path / "b" / "metrics.jsonl").touch()

    monkeypatch.setattr("sweeps.cli.showing_commands.time.sleep", sleep)
    assert cli.main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("no evaluation yet") == 1


def test_without_evaluations_watch_once_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.cli.showing_commands.time.sleep", None)
    open_journal(tmp_path / "run").close()
    assert cli.main(["watch", str(tmp_path / "run"), "--once"]) == 1
    assert "no evaluations to fit" in capsys.readouterr().err
    with (tmp_path / "run" / "metrics.jsonl").open("a") as handle:
        handle.write('{"kind": "nonsense"\n{"kind": "end", "status": "failed"}\n')
    assert cli.main(["watch", str(tmp_path / "run")]) == 1  # the journal is damaged, so watch does not wait for more
    assert "line 2" in capsys.readouterr().err


def test_snapshots_are_json_without_nan() -> None:
    for data in (curve(points=9), make_curve("x", np.arange(9.0), np.full(9, 0.4))):
        for item in history(data):
            text = json.dumps(item.to_json(), allow_nan=False)
            assert Snapshot.from_json(json.loads(text)) == item
    with pytest.raises((KeyError, TypeError, ValueError)):
        Snapshot.from_json({"recipe": "x"})
    assert replace(item, n=1) != item
