"""Tests of forms of tables: compression, encodings, delimiters and Excel give the same curves as the plain CSV."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas
import pyarrow
import pytest

from sweeps.errors import UserError
from sweeps.source import LoadedStudy, load
from tests.paths import LOGS, ROOT

ROWS = [
    ["recipe", "seed", "compute", "reward"],
    ["a", "01", "1", "0.25"],
    ["a", "01", "2.5", "0.5"],
    ["b", "2", "3", "1"],
]
PLAIN = "\n".join(map(",".join, ROWS)) + "\n"


def is_plain(study: LoadedStudy) -> bool:
    """Return whether the curves are those of ROWS, with seeds as text."""
    read = [(c.recipe, c.seed.tolist(), c.compute.tolist(), c.reward.tolist()) for c in study.curves]
    return read == [("a", ["01", "01"], [1, 2.5], [0.25, 0.5]), ("b", ["2"], [3], [1])]


def write_compressed(path: Path, raw: bytes) -> Path:
    """Write the bytes, compressed according to the file's extension."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("curves.csv", raw)
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(raw)
    else:
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[path.suffix](raw))
    return path


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst", "zip"])
def test_a_compressed_table_is_read_and_a_damaged_one_refused(tmp_path: Path, ending: str) -> None:
    path = write_compressed(tmp_path / f"curves.csv.{ending}", PLAIN.encode())
    assert is_plain(load([path]))
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match=rf"curves.csv.{ending}: cannot be unpacked \(") as caught:
        load([path])
    assert "\n" not in str(caught.value)


def test_a_compressed_log_gives_the_curve_and_name_of_the_log(tmp_path: Path) -> None:
    for name in ("verl_grpo.log", "verl_dapo.jsonl", "open_instruct_history.csv"):
        (plain,), (curve,) = (
            load([LOGS / name]).curves,
            load([write_compressed(tmp_path / f"{name}.bz2", (LOGS / name).read_bytes())]).curves,
        )
        assert curve.recipe == plain.recipe and curve.reward.tolist() == plain.reward.tolist()


def test_an_archive_with_two_files_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.csv", PLAIN)
        archive.writestr("b.csv", PLAIN)
    with pytest.raises(UserError, match="2 files in it"):
        load([tmp_path / "two.zip"])


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig"]
)
def test_a_table_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith(("le", "be")) else ""
    (tmp_path / "curves.csv").write_bytes((mark + PLAIN).encode(encoding))
    assert is_plain(load([tmp_path / "curves.csv"]))


@pytest.mark.parametrize(("parted", "said"), [(";", "';'"), ("\t", "tabs"), ("|", "'|'"), ("   ", "blanks")])
@pytest.mark.parametrize("comma", [False, True])
def test_delimiters_and_decimal_commas_are_recognized(tmp_path: Path, parted: str, said: str, comma: bool) -> None:
    rows = [[cell.replace(".", ",") if comma else cell for cell in row] for row in ROWS]
    path = tmp_path / "curves.txt"
    path.write_text("\n".join(map(parted.join, rows)))
    study = load([path])
    assert is_plain(study) and f"cells separated by {said}" in study.shown[0]
    assert ("decimal commas in compute, reward" in study.shown[0]) == comma
    path.write_text(path.read_text() + "\n\n" + parted.join(["b", "2", "4", "x"]))
    with pytest.raises(UserError, match=r"first at line 6 \('x'\)"):
        load([path])


def test_spaces_in_column_names_are_not_delimiters(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("my reward\n1\n")
    with pytest.raises(UserError, match="found my reward;"):
        load([tmp_path / "t.csv"])


def write_sheets(path: Path, *frames: pandas.DataFrame, above: int = 0) -> Path:
    with pandas.ExcelWriter(path, engine="openpyxl") as writer:
        for number, frame in enumerate(frames):
            frame.to_excel(writer, sheet_name=f"sheet {number}", index=False, startrow=above)
    return path


def test_the_first_sheet_of_an_excel_file_is_read(tmp_path: Path) -> None:
    frame = pandas.DataFrame(ROWS[1:], columns=ROWS[0]).astype({"compute": float, "reward": float})
    assert is_plain(load([write_sheets(tmp_path / "one.xlsx", frame)]))
    study = load([write_sheets(tmp_path / "two.xlsx", frame, frame.iloc[:1], above=3)])
    assert is_plain(study) and "sheet sheet 0, the first of 2" in study.shown[0]
    frame.loc[1, "compute"] = None
    study = load([write_sheets(tmp_path / "blank.xlsx", frame)])
    assert study.curves[0].compute.tolist() == [1] and "skipped 1 row without compute" in study.warnings[0]
    frame = frame.astype({"compute": object})
    frame.loc[1, "compute"] = "far"
    with pytest.raises(
        UserError, match=r"column compute is not a finite number in 1 of 3 rows, first at row 6 \('far'\)"
    ):
        load([write_sheets(tmp_path / "text.xlsx", frame, above=3)])
    with pytest.raises(UserError, match="the file is empty"):
        load([write_sheets(tmp_path / "empty.xlsx", pandas.DataFrame())])


def test_seeds_of_a_sheet_have_no_decimal_point(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"seed": [0, 1], "compute": [1, 2], "reward": [0.5, 0.25]})
    (curve,) = load([write_sheets(tmp_path / "grpo.xlsx", frame)]).curves
    assert (curve.recipe, curve.seed.tolist()) == ("grpo", ["0", "1"])


def test_without_openpyxl_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    with pytest.raises(UserError, match="openpyxl, which is not installed; pip install openpyxl"):
        load([tmp_path / "t.xlsx"])


@pytest.mark.parametrize(("source", "imported"), [("examples/curves.csv", True), ("examples/study", False)])
def test_pandas_is_imported_for_tables_but_not_for_journals(source: str, imported: bool) -> None:
    code = "import sys; from sweeps.source import load; load(sys.argv[1:]); sys.exit('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, source], cwd=ROOT, check=False)
    assert done.returncode == imported


def test_the_runs_of_a_table_are_listed_by_recipe_then_seed(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("recipe,seed,compute,reward,sd\na,0,1,0.1,0.01\nb,0,1,0.2,\na,1,1,0.3,0.02\na,0,2,0.4,\n")
    runs = load([path]).foreign
    assert [(run.labels["recipe"], run.labels["seed"]) for run in runs] == [("a", "0"), ("a", "1"), ("b", "0")]
    assert runs[0].compute.tolist() == [1, 2] and runs[0].reward.tolist() == [0.1, 0.4]


def test_tables_with_one_name_in_two_folders_are_two_recipes(tmp_path: Path) -> None:
    """Otherwise two recipes would silently be fitted as one recipe with one seed."""

    def recipes(*names: str, text: str = "compute,reward\n1,0.5\n2,0.6\n") -> dict[str, list[str]]:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        study = load([tmp_path / name for name in names])
        return {curve.recipe: sorted(set(curve.seed.tolist())) for curve in study.curves}

    assert list(recipes("s/grpo/curve.csv", "s/dapo/curve.csv")) == ["dapo/curve", "grpo/curve"]
    assert list(recipes("x/grpo/run/c.csv", "x/dapo/run/c.csv", "base.csv")) == ["base", "dapo/run/c", "grpo/run/c"]
    assert recipes("grpo/curve-seed1.csv", "dapo/curve-seed1.csv", "grpo/curve-seed2.csv") == {
        "dapo/curve": ["1"], "grpo/curve": ["1", "2"]
    }  # fmt: skip
    assert recipes("grpo/seed_0/curve.csv", "grpo/seed_1/curve.csv") == {"curve": ["0", "1"]}
    assert list(recipes("curve.csv", "curve.tsv")) == ["curve.csv", "curve.tsv"]
    for name in ("1", "2"):
        (tmp_path / f"link{name}").mkdir()
        (tmp_path / f"link{name}/data.csv").symlink_to(tmp_path / f"s/{'dapo' if name == '1' else 'grpo'}/curve.csv")
    study = load([tmp_path / "link1/data.csv", tmp_path / "link2/data.csv"])
    assert [curve.recipe for curve in study.curves] == ["link1/data", "link2/data"]
    (tmp_path / "link.csv").symlink_to(tmp_path / "base.csv")
    assert list(recipes("base.csv", "link.csv")) == ["base"]
    assert list(recipes("s/grpo/train.log", "s/dapo/train.log", text="{'loss': 1, 'reward': 0.5}\n")) == [
        "dapo/train", "grpo/train"
    ]  # fmt: skip
    with_recipes = recipes("s/a/t.csv", "s/b/t.csv", text="recipe,seed,compute,reward\nr,0,1,0.5\nr,1,2,0.6\n")
    assert with_recipes == {"r": ["0", "1"]}


def test_every_table_without_seeds_is_a_separate_run(tmp_path: Path) -> None:
    paths = [tmp_path / f"part{number}.csv" for number in range(3)]
    for path, text in zip(paths, ("a,,1,0.5\na,b,2,0.6", "a,,1,0.4", "b,,1,0.4"), strict=True):
        path.write_text(f"recipe,baseline,compute,reward\n{text}\n")
    a, b = load(paths).curves
    assert a.seed.tolist() == ["run 0", "run 0", "run 1"] and b.seed.tolist() == ["0"]
    (a,) = load(paths[:2], seed_from=r"-s(\d+)").curves
    assert sorted(set(a.seed.tolist())) == ["run 0", "run 1"]
    (a,) = load(paths[:1]).curves
    assert a.seed.tolist() == ["0", "0"]
    (tmp_path / "seeds.csv").write_text("recipe,seed,compute,reward\na,0,1,0.3\n")
    (a,) = load([tmp_path / "seeds.csv", paths[0]]).curves
    assert a.seed.tolist() == ["0", "run 0", "run 0"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "recipe,seed,compute,reward\na,0,1,0.5\n,0,2,0.6\n,0,3,1\n",
            "recipe is blank in 2 of 3 rows, first at line 3",
        ),
        ("recipe,seed,compute,reward\na,0,1,0.5\na, ,2,0.6\n", "seed is blank in 1 of 2 rows, first at line 3"),
        ("recipe,seed,compute,reward\na,0,1,0.5\n,,2,\n", ""),
        ("run,_step,seed,acc\na,1,0,0.5\n,2,0,0.6\n", "run is blank in 1 of 2 rows, first at line 3"),
        ("recipe,_step,acc\na,1,0.5\n,2,0.6\n", "recipe is blank in 1 of 2 rows, first at line 3"),
        ("run,_step,seed,acc\na,1,0,0.5\na,2,,0.6\nb,1,,0.1\n", "seed is blank in 1 of 3 rows, first at line 3"),
        ("run,_step,seed,acc\na,1,0,0.5\na,,,0.6\nb,1,,0.1\n", ""),
    ],
)
def test_a_blank_recipe_or_seed_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """Merged cells of a spreadsheet are blank except for the first."""
    (tmp_path / "t.csv").write_text(text)
    metric = "acc" if "acc" in text else None
    if not error:
        assert load([tmp_path / "t.csv"], metric=metric).curves
        return
    with pytest.raises(UserError, match=f"t.csv: column {error}; fill them"):
        load([tmp_path / "t.csv"], metric=metric)


def test_a_seed_column_that_is_blank_in_all_rows_is_ignored(tmp_path: Path) -> None:
    """Some exports write the column although they have no seeds."""
    rows = [f"a, ,{at},0.{at}" for at in (1, 2, 3)]
    (tmp_path / "blank.csv").write_text("\n".join(["recipe,seed,compute,reward", *rows]))
    (tmp_path / "without.csv").write_text(
        "\n".join(["recipe,compute,reward", *(row.replace(", ,", ",") for row in rows)])
    )
    (blank,), (without,) = (load([tmp_path / name]).curves for name in ("blank.csv", "without.csv"))
    assert blank.seed.tolist() == without.seed.tolist() and blank.compute.tolist() == without.compute.tolist()


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_commas_that_may_separate_thousands_are_refused(tmp_path: Path, delimiter: str) -> None:
    """With decimal commas, the compute values 347, 1,043 and 2,086 would become 347, 1.043 and 2.086."""

    def read(*compute: str) -> list[float]:
        rows = ["other;recipe;reward;compute", *(f"{cell};a;0,{at}5;{cell}" for at, cell in enumerate(compute))]
        (tmp_path / "t.csv").write_text("\n".join(rows).replace(";", delimiter))
        compute_read: list[float] = load([tmp_path / "t.csv"]).curves[0].compute.tolist()
        return compute_read

    for compute in (("347", "1,043", "2,086"), ("1,043", "", "2,086"), ("1,043", "1,234,567", "2,086")):
        with pytest.raises(UserError, match=r"t.csv: column compute has '1,043', whose comma .*; write 1043 or 1.043$"):
            read(*compute)
    assert read("0,348", "1,043", "2,086") == [0.348, 1.043, 2.086]
    assert read("347,826", "1043,478", "2,086") == [2.086, 347.826, 1043.478]
    assert read("1,5", "1,043", "2,086") == [1.043, 1.5, 2.086]
    assert read("1,043", "2000", "2,086") == [1.043, 2.086, 2000]
    assert read("1,043", "2") == [1.043, 2]
    (tmp_path / "t.csv").write_text("other;recipe;reward;compute\n1,043;a;0,5;1\n2,086;a;0,6;2\n")
    assert load([tmp_path / "t.csv"]).curves[0].compute.tolist() == [1, 2]  # the ambiguous column is not used
