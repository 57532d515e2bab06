"""Truths about sources: what can be read becomes a curve, anything else one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.curve import make_curve
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.run.health import idle_variants, mechanism_counters
from sweeps.run.journal import Journal
from sweeps.source import load


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
    """A run directory with an evaluation every step."""
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
    """Keys in any order, a column that some rows lack, whole numbers and text as they come."""
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
        ("x.jsonl", b'{"step": 1, "score": 2}\n', "no column compute, reward; found step, score"),
        ("x.jsonl", b'{"compute": 1, "reward": 0.1}\n{"compute": 2}\n', "reward is not a finite number in 1 of 2 rows"),
        ("x.jsonl", b'{"compute": 1, "reward": NaN}\n', "first row 1"),
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
    assert any("2 repeated rows" in note for note in curve.warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("recipe,seed,compute,reward\n", "a header and no rows"),
        ("recipe,seed,flops,score\na,0,1,2\n", "no column compute, reward; found recipe, seed, flops, score"),
        (
            "recipe,compute,reward\na,1,x\na,2,0.5\na,3,nan\n",
            r"reward is not a finite number in 2 of 3 rows, first row 1",
        ),
        (
            "recipe,compute,reward\na,1,0.1\na,inf,0.5\n",
            "compute is not a finite number in 1 of 2 rows, first row 2",
        ),
        ("recipe,compute,reward\na,1,\n", "first row 1"),
        ("recipe,compute,reward\na,1,0.1\na,-2,0.5\n", "compute is negative in 1 rows, first row 2"),
        ("recipe,compute,reward\na,1\n", "too few cells, first row 1"),
        ("recipe,compute,reward,reward\na,1,2,3\n", "occurs more than once"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file"),
        (b"recipe,compute\0,reward\n", "NUL"),
        ('recipe,compute,reward\n"a,1,2\n', "not a CSV file"),
    ],
)
def test_unusable_tables_say_why(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load([csv_file(tmp_path, text)])
    assert "\n" not in str(caught.value) and "curves.csv" in str(caught.value)


def test_missing_sources_say_so(tmp_path: Path) -> None:
    for source, message in ((tmp_path / "no", "no such file"), (tmp_path, "no run in this directory")):
        with pytest.raises(UserError, match=message):
            load([source])


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_junk_never_gives_a_traceback(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
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


def test_every_set_of_a_run_is_a_curve_of_its_own(tmp_path: Path) -> None:
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


def test_the_mapping_says_what_became_of_the_columns(tmp_path: Path) -> None:
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


def test_two_runs_of_one_seed_and_two_configurations_under_one_label(tmp_path: Path) -> None:
    run(tmp_path, "one")
    journal = Journal(run(tmp_path, "two", steps=2))
    journal.header(run="two", curve="another", recipe="scalerl", seed=0)
    journal.close()
    (curve,) = load([tmp_path]).curves
    assert set(curve.seed.tolist()) == {"0", "0#2"}
    assert any("2 different configurations" in note for note in curve.warnings)
    # The same run given twice is one run.
    assert len(load([tmp_path / "one", tmp_path]).runs) == 2


def test_counters_name_variants_that_did_nothing(tmp_path: Path) -> None:
    run(tmp_path, "r")
    run(tmp_path, "v", recipe="another loss", departures={"loss": "dapo"})
    run(tmp_path, "w", recipe="another kl", departures={"kl": "fixed"})
    run(tmp_path, "old", recipe="scalerl+loss=gspo", departs_on=["loss"])
    runs = load([tmp_path]).runs
    assert mechanism_counters(runs)["scalerl"] == {"loss": 0.0, "kl": 0.75}
    one, other = idle_variants(runs)
    assert one.startswith("another loss: this variant changed nothing (mechanism/loss")
    assert other.startswith("scalerl+loss=gspo: this variant changed nothing")


def test_a_curve_knows_what_it_departs_from_by_the_header_and_not_by_its_label(tmp_path: Path) -> None:
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
def test_seeds_hidden_in_names(tmp_path: Path, pattern: str, name: str, label: str, seed: str) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("recipe,compute,reward\n" + "".join(f"{name},{c},0.{c}\n" for c in range(1, 5)))
    (curve,) = load([table], seed_from=pattern).curves
    assert (curve.recipe, set(curve.seed.tolist())) == (label, {seed})


@pytest.mark.parametrize("pattern", ["(", "seed", r"(a)(\d)"])
def test_a_pattern_for_seeds_has_one_group(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "runs.csv").write_text("recipe,compute,reward\na,1,0.5\n")
    with pytest.raises(UserError, match="--seed-from"):
        load([tmp_path / "runs.csv"], seed_from=pattern)


def test_arrays_are_checked() -> None:
    for arrays in (([], []), ([1, 2], [1]), ([1, np.nan], [1, 1]), ([-1, 1], [1, 1])):
        with pytest.raises(UserError):
            make_curve("x", *arrays)
    with pytest.raises(UserError, match="standard error"):
        make_curve("x", [1.0], [0.5], sd=[-1.0])
