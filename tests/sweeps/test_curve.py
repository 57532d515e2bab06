"""Tests of sources: readable tables and journals become curves; others raise a one-line error with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.curve import make_curve, with_shared_scale
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.run.health import idle_variants, mechanism_counters
from sweeps.run.journal import Journal
from sweeps.source import load
from tests.examples import examples


def csv_file(tmp_path: Path, text: str | bytes, name: str = "curves.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def run(
    root: Path,
    name: str,
    recipe: str = "scalerl",
    seed: int = 0,
    steps: int = 4,
    device: str = "cpu",
    **more: object,
) -> Path:
    """Write a run directory with an evaluation at every step, and return it."""
    journal = Journal(root / name, clock=lambda: 0.0)
    journal.header(run=name, curve=f"curve-{recipe}", recipe=recipe, seed=seed, device=device, **more)
    for step in range(steps):
        compute = {"compute/flops": 1e9 * step, "compute/device_hours": 0.5 * step}
        if "no_virtual" not in more:
            compute["compute/virtual_device_hours"] = 2.0 * step
        journal.record("train", step, {"train/loss": 1.0, "mechanism/loss": 0.0, "mechanism/kl": 0.25 * step})
        journal.record(
            "eval",
            step,
            {
                "eval/heldout/pass_rate": 0.1 * step,
                "eval/heldout/pass_rate_se": 0.01,
                "eval/down/pass_rate": 0.2 * step,
                **compute,
            },
        )
    journal.end(steps, str(more.get("status", "finished")), "out of memory" if "status" in more else None)
    journal.close()
    return root / name


def test_csv_with_default_columns(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "\ufeffrecipe,seed,compute,reward\nb,0,2,0.5\na,1,1,0.2\na,0,1,0.3\na,0,0,0.1\n\n")
    a, b = load([path]).curves
    assert (a.recipe, b.recipe) == ("a", "b")
    assert a.compute.tolist() == [0, 1, 1] and a.reward.tolist() == [0.1, 0.3, 0.2]
    assert a.seed.tolist() == ["0", "0", "1"] and a.sd is None


def test_csv_with_named_columns_and_the_file_as_recipe(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "step,train,blank\n1,0.5,\n2,0.6,\n", "my_run.csv")
    (curve,) = load([path], x="step", y="train").curves
    assert (curve.recipe, curve.axis, curve.metric) == ("my_run", "step", "train")


@pytest.mark.parametrize("form", ["csv", "jsonl", "ndjson", "parquet"])
def test_every_table_format_gives_the_same_curves(tmp_path: Path, form: str) -> None:
    """JSON keys are in another order, one row has an additional column, and values are integers, floats and text."""
    rows: list[dict[str, object]] = [
        {"recipe": "a", "seed": seed, "compute": step * 1.5e9, "reward": 0.1 + 0.07 * step + 0.01 * seed}
        for seed in range(2)
        for step in range(4)
    ]
    rows[3]["note"] = "only here,\u2028 and in one string"
    path = tmp_path / f"logs.{form}"
    frame = pandas.DataFrame(rows)
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "parquet":
        frame.to_parquet(path)
    else:
        shuffled = [dict(reversed(row.items())) for row in rows]
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in shuffled) + "\n")
    (curve,) = load([path]).curves
    assert curve.recipe == "a" and curve.seed.tolist() == ["0"] * 4 + ["1"] * 4
    assert curve.compute.tolist() == [row["compute"] for row in rows]
    assert curve.reward.tolist() == [row["reward"] for row in rows]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", "is empty"),
        ("x.jsonl", b'{"compute": 1, "reward": 0.1}\n{"compute": 2', "line 2 is not JSON"),
        ("x.jsonl", b"[1, 2]\n", "line 1 is not a JSON object"),
        ("x.jsonl", b'{"step": 1, "score": 2}\n', "no column reward; found step, score; name it with --y"),
        (
            "x.jsonl",
            b'{"compute": 1, "reward": 0.1}\n\n{"compute": 2, "reward": "abc"}\n',
            r"in 1 of 2 .*line 3 \('abc'\)",
        ),
        ("x.jsonl", b'{"compute": 1, "reward": NaN}\n', "column reward is blank in all 1 rows"),
        ("x.jsonl", b'{"compute": true, "reward": [1]}\n', "compute is not a finite number"),
        ("x.jsonl", b"\xff\xfe", "not a text file"),
        ("x.parquet", b"PAR1 and then nothing", "not a readable Parquet file"),
        ("x.parquet", b"", "not a readable Parquet file"),
    ],
)
def test_unusable_jsonl_and_parquet_say_why(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load([path])
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = "a,0,1,0.5\n" * 3 + "a,1,1,0.5\n"
    (curve,) = load([csv_file(tmp_path, "recipe,seed,compute,reward\n" + rows)]).curves
    assert len(curve.reward) == 2
    assert any("dropped 2 repeated rows" in note for note in curve.warnings)


def test_two_rewards_at_one_compute_are_kept_with_a_warning() -> None:
    curve = make_curve("x", [0, 1200, 1200, 2400, 2400, 2400], [0.1, 0.47, 0.41, 0.5, 0.6, 0.6])
    assert curve.reward.tolist() == [0.1, 0.41, 0.47, 0.5, 0.6]
    (note,) = [note for note in curve.warnings if "different rewards" in note]
    assert note.startswith("seed 0: 2 compute values have two different rewards (first at 1200: 0.41 and 0.47)")
    assert "do two runs share one name? give them seeds, or use --by" in note
    assert not make_curve("x", [1, 1, 2], [0.1, 0.2, 0.1], ["a", "b", "a"]).warnings  # rewards of two seeds may differ
    (one,) = make_curve("x", [1, 1, 1], [0.1, 0.2, 0.3], ["run 0"] * 3).warnings
    assert one.startswith("run 0: 1 compute value has up to 3 different rewards")


def test_warnings_name_only_a_few_of_many_seeds() -> None:
    seeds = [str(seed) for seed in range(9) for _ in range(2)]
    notes = make_curve("x", [1.0] * 18, np.linspace(0, 1, 18), seeds).warnings
    assert len(notes) == 4 and notes[0].startswith("seed 0:") and notes[-1] == "6 more seeds have such values"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("recipe,seed,compute,reward\n", "a header and no rows"),
        ("recipe,seed,flops,score\na,0,1,2\n", "no column reward; found recipe, seed, flops, score"),
        (
            "recipe,compute,reward\na,1,x\na,2,0.5\na,3,nan\n",
            r"reward is not a finite number in 1 of 3 rows, first at line 2 \('x'\); correct them",
        ),
        (
            "recipe,compute,reward\na,1,0.1\na,inf,0.5\n",
            "compute is not a finite number in 1 of 2 rows, first at line 3",
        ),
        ("recipe,compute,reward\na,1,\n", "column reward is blank in all 1 rows; give another with --y"),
        ("recipe,compute,reward\na,1,0.1\na,-2,0.5\n", "compute is negative in 1 row, first at line 3"),
        ("recipe,compute,reward\na,1\n", "too few cells in 1 row, first at line 2"),
        ("recipe,compute,reward,reward\na,1,2,3\n", "occurs more than once"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file"),
        (b"recipe,compute\0,reward\n", r"is empty.* \(dropped 1 NUL byte left by a crash, and 1 line cut off there\)"),
        (b"\0" * 9, r"is empty.* \(dropped 9 NUL bytes left by a crash\)"),
        ('recipe,compute,reward\n"a,1,2\n', "not a CSV file"),
    ],
)
def test_unusable_tables_say_why(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load([csv_file(tmp_path, text)])
    assert "\n" not in str(caught.value) and "curves.csv" in str(caught.value)


@pytest.mark.parametrize("missing_value", ["", " ", "nan", "NaN", "NA", "N/A", "null", "None", "-", "#N/A"])
def test_rows_without_a_value_are_skipped_and_counted_once(tmp_path: Path, missing_value: str) -> None:
    rows = [
        "a,0,1,0.1",
        f"a,0,2,{missing_value}",
        f"a,0,{missing_value},{missing_value}",
        f"a,0,{missing_value},0.3",
        f"b,0,1,{missing_value}",
        "a,0,4,0.4",
    ]
    text = "\n".join(["recipe,seed,compute,reward", *rows])
    study = load([csv_file(tmp_path, text)])
    (curve,) = study.curves
    assert curve.compute.tolist() == [1, 4] and curve.reward.tolist() == [0.1, 0.4] and not curve.warnings
    expected_warning = "skipped 3 rows without a reward and 1 row without compute; no row is left of b"
    assert study.warnings == [f"{tmp_path / 'curves.csv'}: {expected_warning}"]
    assert "6 rows: 2 points" in study.mapping[0]


def test_a_table_without_a_complete_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row has both compute and reward"):
        load([csv_file(tmp_path, "compute,reward\n1,\n,0.5\n")])


def test_a_blank_standard_error_makes_all_of_the_curve_unknown(tmp_path: Path) -> None:
    text = "recipe,compute,reward,sd\na,1,0.1,0.01\na,2,0.2,\nb,1,0.1,0.02\n"
    a, b = load([csv_file(tmp_path, text)]).curves
    assert a.sd is None and b.sd is not None and b.sd.tolist() == [0.02]


def test_headers_are_matched_in_any_case_unless_ambiguous(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "\ufeff Recipe ,SEED, Compute ,REWARD,Size\na,3,1,0.5,7b\n")
    (curve,) = load([path], factors=("size",)).curves
    assert (curve.recipe, curve.seed.tolist(), curve.axis, curve.metric) == ("a size=7b", ["3"], "compute", "reward")
    assert load([path], y="reward", x="COMPUTE", by="recipe").curves[0].recipe == "a"
    path = csv_file(tmp_path, "recipe,compute,Reward,reward\na,1,0.5,0.7\n")
    with pytest.raises(UserError, match=r"columns Reward and reward differ only in case.*--y"):
        load([path])
    assert load([path], y="Reward").curves[0].reward.tolist() == [0.5]


def test_steps_replace_missing_compute_with_a_warning(tmp_path: Path) -> None:
    study = load([csv_file(tmp_path, "Step,REWARD\n1,0.5\n2,0.6\n", "run.csv")])
    (curve,) = study.curves
    assert curve.axis == "step" and any("Step counts steps, not compute" in note for note in curve.warnings)
    assert "compute <- Step (there is no column compute)" in study.shown[0]
    tokens = load([csv_file(tmp_path, "step,num_tokens,reward\n1,10,0.5\n2,20,0.6\n", "run.csv")])
    assert tokens.curves[0].compute.tolist() == [10, 20] and not tokens.curves[0].warnings
    with pytest.raises(UserError, match=r"2 compute axes could be meant \(num_tokens, progress/total_tokens\).*--x"):
        load([csv_file(tmp_path, "num_tokens,progress/total_tokens,reward\n1,10,0.5\n", "run.csv")])


def test_percent(tmp_path: Path) -> None:
    curve = load([csv_file(tmp_path, "compute,reward\n0,0.5\n1,21%\n2, 35.5 %\n3,1\n")]).curves[0]
    assert curve.reward.tolist() == pytest.approx([0.5, 0.21, 0.355, 1])
    with pytest.raises(
        UserError, match="column reward has '21%' at line 3 and, without a percent sign, '35' at line 5"
    ):
        load([csv_file(tmp_path, "compute,reward\n0,0.5\n1,21%\n\n2,35\n")])


def test_tables_as_a_german_spreadsheet_writes_them(tmp_path: Path) -> None:
    text = "\ufeffRecipe;Seed;Compute;Reward\r\na;0;0;0,1\r\na;0;1,5;1\r\n\r\na;0;2;\r\na;0;3;4,5E-1\r\n;;;\r\n"
    study = load([csv_file(tmp_path, text)])
    (curve,) = study.curves
    assert curve.compute.tolist() == [0, 1.5, 3] and curve.reward.tolist() == [0.1, 1, 0.45]
    assert "cells separated by ';', decimal commas in Compute, Reward" in study.shown[0]
    with_separator_line = csv_file(tmp_path, 'sep=;\r\nrecipe;compute;reward\r\na;1;"21,5%"\r\n')
    assert load([with_separator_line]).curves[0].reward.tolist() == pytest.approx([0.215])
    for cell, line in (("abc", 4), ("1.234,5", 3), ("0.5", 3)):  # a column with a decimal point has no decimal commas
        with pytest.raises(UserError, match=rf"column reward is not a finite number .*first at line {line} "):
            load(
                [
                    csv_file(
                        tmp_path, f"recipe;compute;reward\na;1;1\na;2;{'0,2' if line == 4 else '0,25'}\na;3;{cell}\n"
                    )
                ]
            )
    text = "recipe\tcompute\treward\r\na\t1\t0,5\r\n"
    for encoding in ("utf-16", "utf-16-be", "utf-8-sig"):
        raw = ("\ufeff" if encoding.endswith("be") else "").encode(encoding) + text.encode(encoding)
        assert load([csv_file(tmp_path, raw, "unicode.txt")]).curves[0].reward.tolist() == [0.5]
    with pytest.raises(UserError, match="not a text file in UTF-8; save it as UTF-8"):
        load([csv_file(tmp_path, "Läufe;compute;reward\na;1;1\n".encode("cp1252"))])
    with pytest.raises(UserError, match=r"'0,5'.*decimal commas are read if"):
        load([csv_file(tmp_path, 'recipe,compute,reward\na,1,"0,5"\n')])


def test_a_table_with_a_column_a_run(tmp_path: Path) -> None:
    """Columns have different lengths, one is the index that pandas writes, and names contain seeds."""
    text = ",Step,grpo-seed1,grpo-seed2,dapo,note\n0,0,0.1,0.2,0.1,x\n1,10,0.3,0.4,,y\n2,,0.3,0.4,0.5,\n3,30,50%,,,\n"
    study = load([csv_file(tmp_path, text, "runs.csv")])
    dapo, grpo = study.curves
    assert (dapo.recipe, dapo.compute.tolist(), dapo.axis) == ("dapo", [0], "step")
    assert grpo.recipe == "grpo" and grpo.seed.tolist() == ["1"] * 3 + ["2"] * 2
    assert grpo.compute.tolist() == [0, 10, 30, 0, 10] and grpo.reward.tolist() == [0.1, 0.3, 0.5, 0.2, 0.4]
    assert any("not compute" in note for note in grpo.warnings)
    assert study.warnings == [f"{tmp_path / 'runs.csv'}: skipped 1 row without compute"]
    line, seeds = study.shown
    assert "table with one column per run; compute <- Step (there is no column compute)" in line
    assert "the cells of 3 columns (grpo-seed1, grpo-seed2, dapo); recipe <- the name of the column" in line
    assert "4 rows: 6 points, cells without a reward: 3, columns left out: , note" in line
    assert "grpo <- grpo-seed1 (seed 1), grpo-seed2 (seed 2)" in seeds


def test_a_wide_table_says_what_is_wrong_with_a_cell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"column b is not a finite number in 1 of 3 rows, first at line 4 \('abc'\)"):
        load([csv_file(tmp_path, "compute,a,b\n0,0.1,0.1\n1,0.2,0.2\n2,0.3,abc\n")])
    with pytest.raises(UserError, match="column a occurs more than once"):
        load([csv_file(tmp_path, "compute,a,a,b\n0,0.1,0.1,0.2\n")])
    with pytest.raises(UserError, match="column compute is negative"):
        load([csv_file(tmp_path, "compute,a,b\n-1,0.1,0.1\n")])


@pytest.mark.parametrize(
    "header", ["step,loss,lr", "step,eval_math_reward,eval_code_reward", "Wall time,Step,Value", "step,a,loss"]
)
def test_metrics_side_by_side_are_no_runs_unless_it_is_said(tmp_path: Path, header: str) -> None:
    path = csv_file(tmp_path, header + "\n1,0.5,0.1\n2,0.4,0.1\n")
    with pytest.raises(UserError, match="no column reward; found"):
        load([path])
    if not header.startswith("Wall"):
        with pytest.raises(UserError, match="if every column is a run, give --y all"):
            load([path])
        assert len(load([path], y="all").curves) == 2
    with pytest.raises(UserError, match="if the others are runs, --x alone names the column of compute"):
        load([csv_file(tmp_path, "Schritt,a,b\n1,0.5,0.6\n", "unnamed.csv")])
    other = csv_file(tmp_path, "step,a,b\n1,0.5,1e-6\n2,0.4,300\n", "scales.csv")
    with pytest.raises(UserError, match="--y all"):
        load([other])


def test_a_wide_table_of_grouped_runs(tmp_path: Path) -> None:
    text = 'Tokens;"algo: a, seed: 3";"algo: a, seed: 4";"algo: b, seed: 3"\n1;0,1;0,2;0,3\n'
    a, b = load([csv_file(tmp_path, text, "t.csv")], by="algo").curves
    assert (a.recipe, a.seed.tolist(), b.reward.tolist(), a.axis) == ("a", ["3", "4"], [0.3], "tokens")
    bare = load([csv_file(tmp_path, "step,seed 1,seed 2\n1,0.1,0.2\n", "grpo.csv")]).curves
    assert [(curve.recipe, curve.seed.tolist()) for curve in bare] == [("grpo", ["1", "2"])]


def test_a_wandb_chart_export_without_min_and_max_columns(tmp_path: Path) -> None:
    study = load([csv_file(tmp_path, "Step,a-seed0 - eval/reward,a-seed1 - eval/reward\n1,0.1,0.2\n2,0.2,\n")])
    (curve,) = study.curves
    assert curve.recipe == "a" and curve.seed.tolist() == ["0", "0", "1"] and curve.metric == "eval/reward"
    assert "W&B chart export" in study.shown[0]


@settings(max_examples=examples(40))
@given(
    columns=st.dictionaries(
        st.sampled_from(["grpo-seed1", "grpo_s1", "dapo", "no kl", "x y"]),
        st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=5, max_size=5).filter(any),
        min_size=2,
    ),
    delimiter=st.sampled_from([",", ";", "\t"]),
)
def test_a_wide_table_gives_the_same_curves_as_a_long_one(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[float | None]], delimiter: str
) -> None:
    folder = tmp_path_factory.mktemp("wide")
    wide = [["Compute", *columns]]
    wide += [[str(c), *("" if y[c] is None else repr(y[c]) for y in columns.values())] for c in range(5)]
    long = [f"{name},{c},{'' if y is None else y}" for name, column in columns.items() for c, y in enumerate(column)]
    one = load([csv_file(folder, "\n".join(["recipe,compute,reward", *long]))]).curves
    two = load([csv_file(folder, "\n".join(map(delimiter.join, wide)), "wide.txt")]).curves
    assert [curve.recipe for curve in one] == [curve.recipe for curve in two]
    for a, b in zip(one, two, strict=True):
        assert a.compute.tolist() == b.compute.tolist() and a.reward.tolist() == b.reward.tolist()


def _cased(name: str, case: str) -> str:
    return {"upper": name.upper(), "title": f" {name.title()} ", "lower": name}[case]


@settings(max_examples=examples(60))
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["a", "b c"]),
            st.integers(0, 3),
            st.integers(0, 10**6),
            st.floats(0, 1, allow_subnormal=False),
        ),
        min_size=1,
        max_size=12,
    ),
    blanks=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "nan", "NA", "-"])), max_size=3),
    delimiter=st.sampled_from([",", ";", "\t"]),
    case=st.sampled_from(["upper", "title", "lower"]),
    commas=st.booleans(),
    order=st.permutations(range(4)),
)
def test_curves_do_not_depend_on_how_a_table_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, int, int, float]],
    blanks: list[tuple[int, str]],
    delimiter: str,
    case: str,
    commas: bool,
    order: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("written")
    lines = [["recipe", "seed", "compute", "reward"], *([r, str(s), str(c), repr(y)] for r, s, c, y in rows)]
    plain = load([csv_file(folder, "\n".join(",".join(line) for line in lines))]).curves
    written = [[_cased(name, case) for name in lines[0]], *lines[1:]]
    if commas and delimiter != ",":
        written[1:] = [[*line[:3], line[3].replace(".", ",")] for line in written[1:]]
    for insert_position, none in blanks:
        written.insert(1 + insert_position % len(written), ["a", "0", "5", none])
    text = "\r\n".join(delimiter.join(line[i] for i in order) for line in written)
    rewritten = load([csv_file(folder, text, "other.tsv")]).curves
    assert [curve.recipe for curve in rewritten] == [curve.recipe for curve in plain]
    for one, two in zip(plain, rewritten, strict=True):
        assert one.compute.tolist() == two.compute.tolist() and one.reward.tolist() == two.reward.tolist()
        assert one.seed.tolist() == two.seed.tolist() and one.warnings == two.warnings


def test_missing_sources_are_errors(tmp_path: Path) -> None:
    for source, message in ((tmp_path / "no", "no such file"), (tmp_path, "no run in this directory")):
        with pytest.raises(UserError, match=message):
            load([source])


@settings(max_examples=examples(80))
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_junk_raises_only_user_errors(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    for content in (
        junk,
        b"recipe,seed,compute,reward\n" + junk,
        b"recipe,seed,compute,reward\na,0,1,2\n" + junk,
    ):
        path = csv_file(tmp_path_factory.mktemp("junk"), content)
        for form in ("csv", "jsonl"):
            try:
                fit_curves(load([path.replace(path.with_suffix(f".{form}"))]).curves)
            except UserError as error:
                assert str(error)
            path = path.with_suffix(f".{form}")


def test_journals_become_curves(tmp_path: Path) -> None:
    run(tmp_path, "r0", seed=0)
    run(tmp_path, "r1", seed=1)
    run(tmp_path, "v0", recipe="scalerl+loss=dapo")
    study = load([tmp_path])
    base, variant = study.curves
    assert (base.recipe, variant.recipe) == ("scalerl", "scalerl+loss=dapo")
    assert base.axis == "compute/virtual_device_hours" and base.metric == "eval/heldout/pass_rate"
    assert base.unit == "virtual device hours"
    assert base.seed.tolist() == ["0"] * 4 + ["1"] * 4
    assert base.sd is not None and base.sd.tolist() == [0.01] * 8
    assert base.compute.tolist() == [0, 2, 4, 6] * 2
    assert len(study.runs) == 3


def test_a_journal_with_a_hole_is_named(tmp_path: Path) -> None:
    journal = Journal(run(tmp_path, "r0", steps=3))
    journal.resume(5)
    journal.record("train", 6, {"train/loss": 1.0})
    journal.close()
    run(tmp_path, "r1", seed=1)
    (curve,) = load([tmp_path]).curves
    (warning_text,) = [warning for warning in curve.warnings if "no records" in warning]
    text = (
        "run r0 (seed 0) has no records of steps 3 to 5: it continued from a checkpoint that is newer than its journal"
    )
    assert warning_text == text
    assert warning_text in fit_curves([curve])[0].warnings


def test_axis_follows_the_device(tmp_path: Path) -> None:
    run(tmp_path / "gpu", "r", device="cuda")
    run(tmp_path / "old", "r", no_virtual=True)
    assert load([tmp_path / "gpu"]).curves[0].axis == "compute/device_hours"
    assert load([tmp_path / "old"]).curves[0].axis == "compute/flops"
    assert load([tmp_path / "gpu"], x="compute/flops").curves[0].axis == "compute/flops"
    assert load([tmp_path / "gpu"], metric="eval/down/pass_rate").curves[0].reward[-1] == pytest.approx(0.6)
    with pytest.raises(UserError, match=r"compute/fl0ps is missing.*compute/flops"):
        load([tmp_path / "gpu"], x="compute/fl0ps")
    with pytest.raises(UserError, match=r"eval/x is missing.*eval/heldout/pass_rate"):
        load([tmp_path / "gpu"], metric="eval/x")


def test_every_evaluation_set_of_a_run_is_a_separate_curve(tmp_path: Path) -> None:
    run(tmp_path, "r0", seed=0)
    run(tmp_path, "r1", seed=1)
    down, heldout = load([tmp_path], metric="all").curves
    assert (down.recipe, heldout.recipe) == ("scalerl set=down", "scalerl set=heldout")
    assert down.factors == {"set": "down"} and down.metric == "eval/down/pass_rate"
    assert down.reward.tolist() == pytest.approx([0, 0.2, 0.4, 0.6] * 2) and down.sd is None
    assert heldout.reward.tolist() == load([tmp_path]).curves[0].reward.tolist() and heldout.sd is not None


def test_a_set_that_some_evaluations_lack_is_counted(tmp_path: Path) -> None:
    journal = Journal(run(tmp_path, "r"))
    journal.record("eval", 9, {"eval/heldout/pass_rate": 0.5, "compute/virtual_device_hours": 9, "compute/flops": 9e9})
    journal.close()
    study = load([tmp_path], metric="all")
    assert [len(curve.reward) for curve in study.curves] == [4, 5]
    assert any("1 of 5 evaluations have no eval/down/pass_rate" in note for note in study.warnings)


def test_factors_of_journals_are_header_fields_or_configuration_keys(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-6), ("b", 3e-6)):
        path = run(tmp_path, name, parameters=7)
        (path / "config.yaml").write_text(f"optimizer:\n  lr: {lr}\nbatch: {{groups: 4}}\n")
    a, b = load([tmp_path], factors=("parameters", "optimizer.lr", "parameters")).curves
    assert a.recipe == "scalerl parameters=7 optimizer.lr=1e-06"
    assert b.factors == {"parameters": "7", "optimizer.lr": "3e-06"}
    for wrong in ("optimizer", "nope", "optimizer.lr.x"):
        with pytest.raises(UserError, match=rf"no field {wrong} in the header.*found .*recipe.*optimizer.lr"):
            load([tmp_path], factors=(wrong,))


def test_factors_of_tables_are_columns(tmp_path: Path) -> None:
    text = "recipe,size,compute,reward\na,1b,1,0.1\na,7b,1,0.2\na,7b,2,0.3\nb,1b,1,0.4\n"
    study = load([csv_file(tmp_path, text)], factors=("size",))
    assert [curve.recipe for curve in study.curves] == ["a size=1b", "a size=7b", "b size=1b"]
    assert study.curves[1].factors == {"size": "7b"} and study.curves[1].reward.tolist() == [0.2, 0.3]
    with pytest.raises(UserError, match="no column width; found recipe, size"):
        load([csv_file(tmp_path, text)], factors=("width",))


def test_the_mapping_shows_how_columns_were_used(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "recipe,seed,compute,reward\na,0,1,0.5\n")
    study = load([path])
    assert study.shown == [] and "compute <- compute (default); reward <- reward (default)" in study.mapping[0]
    unnamed = load([csv_file(tmp_path, "step,train\n1,0.5\n", "my_run.csv")], x="step", y="train")
    assert "compute <- step (given by --x)" in unnamed.shown[0] and "recipe <- the file's name" in unnamed.shown[0]
    journals = load([run(tmp_path, "r")])
    assert journals.shown == [] and "first set of the task" in journals.mapping[0]


def test_metric_names_the_reward_of_a_table_unless_there_are_journals(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "recipe,compute/flops,reward,score\na,1,0.5,0.7\n")
    assert load([path], x="compute/flops", metric="score").curves[0].metric == "score"
    mixed = load([path, run(tmp_path, "r")], x="compute/flops", metric="eval/down/pass_rate")
    assert [curve.metric for curve in mixed.curves] == ["reward", "eval/down/pass_rate"]
    with pytest.raises(UserError, match="is for runs and logs"):
        load([path], x="compute/flops", metric="all")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "is empty"),
        (b"[1]", "entry 1 of the list is not a JSON object"),
        (b'[{"compute": 1, "reward": 0.1}', "not JSON, or cut off"),
        (b'{"a": {"b": 1}}', "a JSON object with a; give TRL's trainer state"),
        (b"nonsense", "line 1 is not JSON"),
    ],
)
def test_unusable_json_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load([csv_file(tmp_path, content, "x.json")])


def test_a_json_list_is_a_table(tmp_path: Path) -> None:
    rows = [{"recipe": "a", "compute": step, "reward": 0.1 * step} for step in range(3)]
    (curve,) = load([csv_file(tmp_path, json.dumps(rows, indent=1), "x.json")]).curves
    assert curve.compute.tolist() == [0, 1, 2]


def test_failed_runs_are_used_with_a_warning(tmp_path: Path) -> None:
    run(tmp_path, "r", status="failed")
    (curve,) = load([tmp_path / "r"]).curves
    assert len(curve.reward) == 4
    assert any("failed: out of memory" in note for note in curve.warnings)


def test_one_unusable_run_does_not_hide_the_others(tmp_path: Path) -> None:
    run(tmp_path, "good")
    run(tmp_path, "young", steps=0)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text("")
    study = load([tmp_path])
    assert len(study.curves) == 1 and len(study.warnings) == 2
    with pytest.raises(UserError, match="no evaluations to fit"):
        load([tmp_path / "young"])
    with pytest.raises(UserError, match="no header"):
        load([tmp_path / "torn"])


def test_two_runs_of_one_seed_under_one_label(tmp_path: Path) -> None:
    run(tmp_path, "one")
    run(tmp_path, "two", steps=2)
    (curve,) = load([tmp_path]).curves
    assert set(curve.seed.tolist()) == {"0", "0#2"}
    # A run that is given twice counts once.
    assert len(load([tmp_path / "one", tmp_path]).runs) == 2


def test_counters_name_variants_that_did_nothing(tmp_path: Path) -> None:
    run(tmp_path, "r")
    run(tmp_path, "v", recipe="another loss", departures={"loss": "dapo"})
    run(tmp_path, "w", recipe="another kl", departures={"kl": "fixed"})
    run(tmp_path, "old", recipe="scalerl+loss=gspo", departs_on=["loss"])
    runs = load([tmp_path]).runs
    assert mechanism_counters(runs)["scalerl"] == {"loss": 0.0, "kl": 0.75}
    one, other = idle_variants(runs)
    assert one.startswith("another loss: no step showed an effect of this variant (mechanism/loss")
    assert other.startswith("scalerl+loss=gspo: no step showed an effect of this variant")


def test_baselines_come_from_the_header_not_from_the_label(tmp_path: Path) -> None:
    run(tmp_path, "base", recipe="ours", baseline="ours")
    run(tmp_path, "variant", recipe="hotter", baseline="ours", departures={"optimizer": "hot"})
    run(tmp_path, "else", recipe="ours+looks=like")
    assert {curve.recipe: curve.baseline for curve in load([tmp_path]).curves} == {
        "ours": "ours",
        "hotter": "ours",
        "ours+looks=like": None,
    }


@pytest.mark.parametrize(
    ("pattern", "name", "label", "seed"),
    [
        (r"-s(\d+)", "ppo-s12", "ppo", "12"),
        (r"seed(\d+)_", "seed3_grpo", "grpo", "3"),
        (r"ppo-s(\d+)", "ppo-s1", "ppo-s", "1"),
        (r"-s(\d+)", "other", "other", "0"),
    ],
)
def test_seed_from_extracts_seeds_from_names(tmp_path: Path, pattern: str, name: str, label: str, seed: str) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("recipe,compute,reward\n" + "".join(f"{name},{c},0.{c}\n" for c in range(1, 5)))
    (curve,) = load([table], seed_from=pattern).curves
    assert (curve.recipe, set(curve.seed.tolist())) == (label, {seed})


@pytest.mark.parametrize(
    ("name", "recipe", "seed"),
    [
        ("qwen-grpo-seed1", "qwen-grpo", "1"),
        ("grpo-seed=3", "grpo", "3"),
        ("run/seed_4", "run", "4"),
        ("grpo (seed 5)", "grpo", "5"),
        ("Seed 12, lr 1e-6", "lr 1e-6", "12"),
        ("grpo-seed07-lr2", "grpo-lr2", "07"),
        ("seedling2", "seedling2", "0"),
        ("reseed2", "reseed2", "0"),
        ("seeds=2", "seeds=2", "0"),
        ("seed1-to-seed2", "seed1-to-seed2", "0"),
        ("grpo_s2", "grpo_s2", "0"),
        ("seed3", "seed3", "0"),
    ],
)
def test_seeds_written_out_in_names_are_found(tmp_path: Path, name: str, recipe: str, seed: str) -> None:
    study = load([csv_file(tmp_path, f'recipe,compute,reward\n"{name}",1,0.5\n"{name}",2,0.5\n')])
    (curve,) = study.curves
    assert (curve.recipe, curve.seed.tolist()) == (recipe, [seed] * 2)
    expected_note = [f"seeds from the runs' names: {recipe} <- {name} (seed {seed})"] if name != recipe else []
    assert study.shown == expected_note


def test_an_s_suffix_is_a_seed_if_two_runs_differ_only_in_it(tmp_path: Path) -> None:
    def table(*names: str, seed: str = "") -> Path:
        header = f"recipe,compute,reward{',seed' if seed else ''}\n"
        return csv_file(tmp_path, header + "".join(f"{name},1,0.5{seed and ',' + seed}\n" for name in names))

    study = load([table("grpo_s1", "grpo_s2", "dapo-s1", "base")])
    assert [curve.recipe for curve in study.curves] == ["base", "dapo-s1", "grpo"]
    assert study.curves[2].seed.tolist() == ["1", "2"]
    assert study.shown == ["seeds from the runs' names: grpo <- grpo_s1 (seed 1), grpo_s2 (seed 2)"]
    for table_path in (table("grpo_s1", "grpo_s2", "a-seed3", seed="7"), table("grpo_s1", "grpo_s1")):
        study = load([table_path])
        assert not study.shown and "grpo_s1" in [curve.recipe for curve in study.curves]
    assert [curve.recipe for curve in load([table("a-seed1-b2")], seed_from=r"b(\d)").curves] == ["a-seed1"]


def test_seeds_in_the_names_of_files_and_folders(tmp_path: Path) -> None:
    """Folders named after recipes may contain only files named after seeds. A repeated seed gets another label."""
    paths = [tmp_path / name for name in ("grpo_s0.csv", "grpo_s1.csv", "dapo/seed0.csv", "dapo/seed1.csv")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("compute,reward\n0,0.1\n1,0.5\n")
    dapo, grpo = load(paths).curves
    assert (dapo.recipe, grpo.recipe) == ("dapo", "grpo")
    assert dapo.seed.tolist() == grpo.seed.tolist() == ["0", "0", "1", "1"]
    (tmp_path / "more").mkdir()
    again = csv_file(tmp_path / "more", "recipe,compute,reward,baseline\ngrpo-seed1,2,0.6,grpo-seed1\n")
    grpo = load([*paths[:2], again]).curves[0]
    assert set(grpo.seed.tolist()) == {"0", "1", "1#2"} and grpo.baseline == "grpo"


def test_a_seed_pattern_that_matches_no_name_gives_a_warning(tmp_path: Path) -> None:
    """It also turns off the search for seeds in names, so `grpo-seed1` and `grpo-seed2` stay two recipes."""
    long = csv_file(tmp_path, "recipe,compute,reward\ngrpo-seed1,1,0.5\ngrpo-seed2,1,0.5\n", "long.csv")
    wide = csv_file(tmp_path, "compute,grpo-seed1,grpo-seed2\n1,0.5,0.5\n2,0.6,0.6\n", "wide.csv")
    log = csv_file(tmp_path, "run,_step,reward\ngrpo-seed1,1,0.5\ngrpo-seed2,1,0.5\n", "log.csv")
    for source in (long, wide, log):
        study = load([source], metric="reward" if source == log else None, seed_from=r"-s(\d+)")
        assert len(study.curves) == 2 and study.warnings == [
            r"--seed-from '-s(\\d+)' matches none of 2 names, such as 'grpo-seed1'; correct it, or leave it out to "
            "find seeds such as grpo-seed1"
        ]
        study = load([source], metric="reward" if source == log else None, seed_from=r"-seed(\d+)")
        assert len(study.curves) == 1 and not study.warnings


@pytest.mark.parametrize("pattern", ["(", "seed", r"(a)(\d)"])
def test_a_seed_pattern_needs_exactly_one_group(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "runs.csv").write_text("recipe,compute,reward\na,1,0.5\n")
    with pytest.raises(UserError, match="--seed-from"):
        load([tmp_path / "runs.csv"], seed_from=pattern)


def test_arrays_are_checked() -> None:
    for arrays in (([], []), ([1, 2], [1]), ([1, np.nan], [1, 1]), ([-1, 1], [1, 1])):
        with pytest.raises(UserError):
            make_curve("x", *arrays)
    with pytest.raises(UserError, match="standard error"):
        make_curve("x", [1.0], [0.5], sd=[-1.0])


def losses(tmp_path: Path) -> Path:
    return csv_file(tmp_path, "recipe,compute,loss\na,0,3.2\na,1,2.5\nb,0,3.0\nb,1,0\n")


def test_given_bounds_are_used_and_must_hold_all_rewards(tmp_path: Path) -> None:
    path = losses(tmp_path)
    assert [curve.range for curve in load([path], y="loss").curves] == [(0, 100), (0, 100)]
    for curve in load([path], y="loss", bounds=(0, 8)).curves:
        assert curve.range == curve.bounds == (0, 8) and curve.scale == 8 and not curve.notes
        assert curve.take(curve.compute > 0).range == (0, 8)
    with pytest.raises(UserError, match=r"--bounds 0 3: recipe 'a' has loss 3.2 at compute 0, .* 1 of 2 points\)"):
        load([path], y="loss", bounds=(0, 3))
    for wrong in ((1, 0), (0, 0), (0, float("nan")), (0,)):
        with pytest.raises(UserError, match=r"--bounds .*: must be two numbers, the lowest possible reward before"):
            load([path], y="loss", bounds=wrong)  # type: ignore[arg-type]


def test_the_scale_is_inferred_once_for_all_recipes_of_a_study(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "recipe,compute,reward\nlow,0,0.1\nlow,1,0.9\nhigh,0,0.2\nhigh,1,2\n")
    high, low = load([path]).curves
    assert low.range is None and high.range is None
    assert (
        low.notes
        == high.notes
        == ("rewards range from 0.1 to 2, outside [0, 1], so A has no bounds; set them with --bounds",)
    )
    assert low.take(low.compute < 1).range is None
    # Another metric has its own scale.
    other = with_shared_scale([low, replace(high, metric="score")])
    assert [curve.range for curve in other] == [(0, 1), None]


def test_a_loss_becomes_a_reward_with_the_opposite_sign(tmp_path: Path) -> None:
    study = load([losses(tmp_path)], y="loss", lower_is_better=True)
    a, b = study.curves
    assert a.metric == "-loss" and a.column == "loss" and a.reward.tolist() == [-3.2, -2.5]
    assert a.values.tolist() == [3.2, 2.5] and str(b.reward[-1]) == "0.0"
    assert a.range is None and "(-loss)" in study.shown[-1] and "give --bounds 0 1" in study.shown[-1]
    study = load([losses(tmp_path)], y="loss", lower_is_better=True, bounds=(0, 4))
    assert [curve.range for curve in study.curves] == [(-4, 0), (-4, 0)] and "--bounds" not in study.shown[-1]


def test_pass_rates_of_our_own_runs_keep_their_bounds(tmp_path: Path) -> None:
    """In journals of other trainers, a metric named pass_rate may be any reward."""
    ours, theirs = run(tmp_path / "a", "ours"), run(tmp_path / "b", "theirs", axis="compute/flops")
    study = load([ours], bounds=(-1, 1))
    assert study.curves[0].range == (0, 1)
    assert study.warnings == ["--bounds -1 1: eval/heldout/pass_rate is a pass rate and keeps its own bounds, 0 to 1"]
    assert load([theirs], bounds=(-1, 1)).curves[0].range == (-1, 1)
    with pytest.raises(UserError, match=r"--lower-is-better: eval/heldout/pass_rate is a pass rate, higher is better"):
        load([ours], lower_is_better=True)
    assert load([theirs], lower_is_better=True).curves[0].reward.max() == 0
