"""Tests of charts exported from W&B: the x axis, columns of runs, several metrics, and averaged groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeps.cli import main as cli
from sweeps.errors import UserError
from sweeps.source import load

VALUES = (0.1, 0.2, 0.3)
NO_STEPS = (
    "no column of steps: the first column, 'grpo - eval/accuracy', is a run; export the chart with its Step column, "
)


def csv_of(path: Path, columns: Mapping[str, Sequence[object]]) -> Path:
    rows = [columns, *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def with_ranges(columns: Mapping[str, Sequence[float]], width: float = 0.0) -> dict[str, Sequence[object]]:
    """Return the columns of a chart's runs, each followed by its __MIN and __MAX columns."""
    with_min_and_max: dict[str, Sequence[object]] = {}
    for name, values in columns.items():
        with_min_and_max[name] = values
        with_min_and_max[f"{name}__MIN"] = [value - width for value in values]
        with_min_and_max[f"{name}__MAX"] = [value + width for value in values]
    return with_min_and_max


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("runs", [("grpo", "dapo"), ("grpo", "dapo", "cispo")])
def test_a_chart_without_its_steps_is_refused_or_numbered(tmp_path: Path, ranges: bool, runs: Sequence[str]) -> None:
    columns = {f"{run} - eval/accuracy": VALUES for run in runs}
    path = csv_of(tmp_path / "chart.csv", with_ranges(columns) if ranges else columns)
    for x in (None, "Step"):
        with pytest.raises(UserError, match=NO_STEPS + "or give --x order$") as caught:
            load([path], x=x)
        assert "\n" not in str(caught.value)
    study = load([path], x="order")
    assert [curve.recipe for curve in study.curves] == sorted(runs)
    assert all(curve.axis == "order" and curve.compute.tolist() == [1, 2, 3] for curve in study.curves)


def test_a_chart_of_one_run_without_its_steps_is_refused(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "chart.csv", with_ranges({"grpo - eval/accuracy": VALUES}))
    with pytest.raises(UserError, match=NO_STEPS):
        load([path])


def test_row_numbers_are_not_steps(tmp_path: Path) -> None:
    runs = with_ranges({"grpo - acc": VALUES, "dapo - acc": VALUES})
    path = csv_of(tmp_path / "chart.csv", {"": range(3), "Step": (10, 20, 30), **runs})
    assert [curve.compute.tolist() for curve in load([path]).curves] == [[10, 20, 30]] * 2
    with pytest.raises(UserError, match="no column of steps: the first column, '', numbers the rows; export"):
        load([csv_of(path, {"": range(3), **runs})])


@pytest.mark.parametrize("axis", ["Step", "train - tokens"])
@pytest.mark.parametrize("first", [True, False])
def test_the_axis_is_the_column_that_is_not_a_run(tmp_path: Path, axis: str, first: bool) -> None:
    runs = with_ranges({"grpo - acc": VALUES, "dapo - acc": VALUES})
    steps = {axis: (10, 20, 30)}
    path = csv_of(tmp_path / "chart.csv", {**steps, **runs} if first else {**runs, **steps})
    for x in (None, axis):
        assert [(curve.axis, curve.compute.tolist()) for curve in load([path], x=x).curves] == [
            (axis, [10, 20, 30])
        ] * 2


def test_means_over_a_group_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = with_ranges({"grpo - acc": VALUES}, width=0.1)
    path = csv_of(tmp_path / "chart.csv", {"Step": (10, 20, 30), **means, **with_ranges({"dapo - acc": VALUES})})
    dapo, grpo = load([path]).curves
    warning = (
        "grpo: points whose __MIN and __MAX differ are means over steps or over the runs of a group; ungroup the chart "
        "to keep the seeds"
    )
    assert warning in grpo.warnings and not any("means over" in note for note in dapo.warnings)
    assert cli.main(["fit", str(path)]) == 0
    printed = capsys.readouterr().err
    assert warning in printed and "runs whose points are means (their __MIN and __MAX differ): 1" in printed


@pytest.mark.parametrize("ranges", [True, False])
def test_one_of_several_metrics_is_chosen(tmp_path: Path, ranges: bool) -> None:
    columns = {f"{run} - {metric}": VALUES for run in ("grpo", "dapo") for metric in ("eval/accuracy", "train/loss")}
    steps = {"Step": (10, 20, 30)}
    path = csv_of(tmp_path / "chart.csv", {**steps, **(with_ranges(columns) if ranges else columns)})
    for study in (load([path], metric="eval/accuracy"), load([path], y="eval/accuracy")):
        curves = study.curves
        assert [(curve.recipe, curve.metric) for curve in curves] == [
            ("dapo", "eval/accuracy"),
            ("grpo", "eval/accuracy"),
        ]
    with pytest.raises(UserError, match="found Step, eval/accuracy, train/loss; choose with --metric"):
        load([path])


def test_a_metric_without_a_slash_is_chosen(tmp_path: Path) -> None:
    columns = {f"{run} - {metric}": VALUES for run in ("grpo", "dapo") for metric in ("acc - mean", "loss")}
    path = csv_of(tmp_path / "chart.csv", {"Step": (10, 20, 30), **columns})
    assert [curve.recipe for curve in load([path], metric="acc - mean").curves] == ["dapo", "grpo"]


def test_parts_of_a_runs_name_are_not_metrics(tmp_path: Path) -> None:
    columns = {f"{recipe} - {size}": VALUES for recipe in ("grpo", "dapo") for size in ("small", "large")}
    path = csv_of(tmp_path / "runs.csv", {"compute": (10, 20, 30), **columns})
    assert {curve.recipe for curve in load([path]).curves} == set(columns)


def test_a_run_without_a_value_is_left_out_by_name(tmp_path: Path) -> None:
    columns = {"grpo - acc": VALUES, "crashed - acc": ("", "", ""), "NaN only - acc": ("NaN",) * 3}
    path = csv_of(tmp_path / "chart.csv", {"Step": (10, 20, 30), **columns})
    study = load([path])
    assert study.warnings == [f"{path}: 2 of 3 runs left out for lack of a value of acc: crashed, NaN only"]
    assert "runs left out: 2" in study.mapping[0]


def test_runs_that_are_treated_as_separate_recipes_are_noted(tmp_path: Path) -> None:
    """The note is for charts and tables with a column per run. It is omitted if names have seeds, or for two runs."""
    hint = "each of the 3 runs is treated as a separate recipe; if some are seeds of one recipe, give --seed-from REGEX"
    for end, x in ((" - acc", "Step"), ("", "compute")):
        path = csv_of(tmp_path / "runs.csv", {x: (10, 20, 30), **{f"{run}{end}": VALUES for run in ("a1", "b2", "b3")}})
        shown = load([path]).shown
        assert sum(line.startswith(hint) for line in shown) == 1
        assert not any("of its own" in line for line in load([path], seed_from=r"b(\d)").shown)
        for runs in (("a", "b"), ("a-seed1", "b-seed1", "c-seed1")):
            path = csv_of(tmp_path / "runs.csv", {x: (10, 20, 30), **{f"{run}{end}": VALUES for run in runs}})
            assert not any("of its own" in line for line in load([path]).shown)


def test_evaluation_sets_of_a_run_are_not_separate_recipes(tmp_path: Path) -> None:
    sets = {f"eval/{name}/avg@4": VALUES for name in ("math", "code", "chat")}
    rows = {"_step": (1, 2, 3) * 2, "run_name": ("a",) * 3 + ("b",) * 3, "progress/total_tokens": (10, 20, 30) * 2}
    path = csv_of(tmp_path / "history.csv", {**rows, **{name: [*values, *values] for name, values in sets.items()}})
    study = load([path], metric="all")
    assert len(study.curves) == 6 and not any("of its own" in line for line in study.shown)


@pytest.mark.parametrize(
    ("header", "asked", "message"),
    [
        ("a,reward", {}, r"no column compute; found a, reward; name it with --x \(--x order numbers the rows\)$"),
        ("step,a", {}, "no column reward; found step, a; name it with --y$"),
        ("compute,reward", {"by": "algo"}, "no column algo; found compute, reward; name it with --by$"),
        ("compute,reward", {"factors": ("size",)}, "no column size; found compute, reward; name it with --group$"),
        ("a,b", {"y": "b", "x": "c"}, r"no column c; found a, b; name it with --x \(--x order numbers the rows\)$"),
        ("a,b", {}, r"no column compute, reward; found a, b; name them with --x, --y \(--x order numbers the rows\)"),
    ],
)
def test_a_table_names_what_is_missing(tmp_path: Path, header: str, asked: dict[str, Any], message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n1,0.5\n2,0.6\n")
    with pytest.raises(UserError, match=message):
        load([path], **asked)
