"""Tests of rows from files, folders and the hub: errors name the problem and its remedy, and content is identity."""

from __future__ import annotations

import codecs
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.task.rows import RowSource
from tests.examples import examples

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": f"What is {n} and {n}?", "answer": f"{2 * n}"} for n in range(5)]


def jsonl(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS if rows is None else rows), path)
    return path


def as_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def as_csv(path: Path) -> Path:
    path.write_text("question,answer\n" + "".join(f"{row['question']},a{row['answer']}\n" for row in ROWS))
    return path


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the cache of `datasets` into the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", jsonl), ("a.parquet", parquet), ("a.json", as_json), ("a.json", jsonl)]
)
def test_files_are_read_in_order(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = str(write(tmp_path / name))
    assert RowSource.of("f", path).read() == ROWS
    assert RowSource.of("f", {"path": path, "rows": 2}).read() == ROWS[:2]
    assert RowSource.of("f", {"path": path, "rows": 100}).read() == ROWS


def test_csv(tmp_path: Path) -> None:
    rows = RowSource.of("f", str(as_csv(tmp_path / "a.csv"))).read()
    assert rows == [{**row, "answer": f"a{row['answer']}"} for row in ROWS]


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", jsonl), ("a.json", as_json), ("a.csv", as_csv)])
def test_a_byte_order_mark_is_no_part_of_the_text(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = tmp_path / name
    expected = RowSource.of("f", str(write(path))).read()
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert RowSource.of("f", str(path)).read() == expected


def test_cells_of_a_csv_file_stay_texts(tmp_path: Path) -> None:
    """An answer that is converted to a number becomes another answer, for example "007"."""
    cells = ["007", "12345678901234567890123", "true", "2020-01-01", "10:30", "", "1.50", "a\nb", 'say ""hi""', "ä, ö"]
    path = tmp_path / "a.csv"
    path.write_text("\ufeffquestion,answer\r\n" + "".join(f'q{n},"{cell}"\r\n' for n, cell in enumerate(cells)))
    answers = [row["answer"] for row in RowSource.of("f", str(path)).read()]
    assert answers == [cell.replace('""', '"') for cell in cells]


def test_long_cells_of_many_lines(tmp_path: Path) -> None:
    cell = "a line\n" * 100_000
    path = tmp_path / "a.csv"
    path.write_text("question,answer\n" + f'q,"{cell}"\n' * 5)
    assert [row["answer"] for row in RowSource.of("f", str(path)).read()] == [cell] * 5


def test_a_path_in_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "a.jsonl")
    assert RowSource.of("f", "~/a.jsonl").read() == ROWS


TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x85\u2028\u2029"), max_size=20)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.fixed_dictionaries({"q": TEXTS, "n": st.integers(-9, 9)}), min_size=1, max_size=4), st.booleans())
def test_any_text_of_a_row_is_read_unchanged(tmp_path: Path, rows: list[dict[str, Any]], ascii_: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=ascii_) for row in rows), encoding="utf-8")
    assert RowSource.of("f", str(path)).read() == rows


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_only_a_line_feed_ends_a_line(character: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": f"a{character}b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert RowSource.of("f", str(path)).read() == [{"q": f"a{character}b"}]


def test_a_folder_with_a_split(tmp_path: Path, no_cache: None) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:4])
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[4:])
    source = {"path": str(tmp_path / "data"), "split": "train"}
    assert RowSource.of("f", source).read() == ROWS[:4]
    assert RowSource.of("f", {**source, "split": "test"}).read() == ROWS[4:]
    with pytest.raises(
        ConfigurationError, match=r"task\.train: '.*data' has the splits (train, test|test, train); say which: task\.t"
    ):
        RowSource.of("task.train", str(tmp_path / "data")).read()
    with pytest.raises(ConfigurationError, match=r"task\.train: datasets cannot load '.*data' .*Unknown split"):
        RowSource.of("task.train", {**source, "split": "dev"}).read()


def test_an_empty_folder_is_refused(tmp_path: Path, no_cache: None) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.train: datasets cannot load"):
        RowSource.of("task.train", {"path": str(tmp_path), "split": "train"}).read()


def test_the_hub_is_asked_for_the_given_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[Any] = []

    def load_dataset(path: str, name: str | None, split: str | None, revision: str | None) -> Any:
        calls.append((path, name, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = RowSource.of("f", {"path": "ours/sums", "name": "main", "split": "train", "revision": COMMIT, "rows": 3})
    assert source.read() == ROWS[:3]
    assert calls == [("ours/sums", "main", "train", COMMIT)]
    expected = {"path": "ours/sums", "name": "main", "split": "train", "revision": COMMIT, "rows": 3}
    assert source.content() == expected, "the commit identifies the content, so the hub is not asked"
    assert len(calls) == 1


def test_a_folder_needs_the_package_datasets_and_a_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datasets is an optional package: without it, the error for a folder or the hub names it."""
    (tmp_path / "folder").mkdir()
    file = jsonl(tmp_path / "folder" / "a.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert RowSource.of("f", str(file)).read() == ROWS
    with pytest.raises(ConfigurationError, match=r"^task\.train: '.*folder' .* pip install datasets, or give a file"):
        RowSource.of("task.train", str(file.parent)).read()


# --- mistakes ------------------------------------------------------------------------------------------------


def torn(path: Path) -> Path:
    jsonl(path)
    path.write_text(path.read_text()[:-9])
    return path


def listed(path: Path) -> Path:
    path.write_text('{"q": 1}\n\n[1, 2]\n')
    return path


def bare(path: Path) -> Path:
    path.write_text("[1, 2]")
    return path


def half(path: Path) -> Path:
    path.write_text('[{"q": 1}')
    return path


def ragged(path: Path) -> Path:
    path.write_text("question,answer\nwhat,1\nwhat, then,2\n")
    return path


def empty(path: Path) -> Path:
    path.write_text("")
    return path


def latin(path: Path) -> Path:
    path.write_bytes('{"q": "é"}'.encode("latin-1"))
    return path


def no_parquet(path: Path) -> Path:
    path.write_text("PAR1 it is not")
    return path


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.jsonl", lambda path: path, r"cannot read '.*a\.jsonl' \(No such file or directory\); give a file"),
        ("a.parquet", lambda path: path, r"cannot read '.*a\.parquet' \(No such file or directory\); give a file"),
        ("a.jsonl", torn, r"a\.jsonl, line 5: JSONDecodeError"),
        ("a.jsonl", listed, r"a\.jsonl, line 3: no object, but '\[1, 2\]'"),
        ("a.json", bare, r"a\.json' must hold a list of objects"),
        ("a.json", half, r"a\.json' is no JSON \(JSONDecodeError"),
        ("a.jsonl", empty, r"a\.jsonl' holds no rows"),
        ("a.csv", empty, r"a\.csv' holds no rows"),
        ("a.csv", ragged, r"cannot read '.*a\.csv' \(ValueError: line 3: 3 cells, and the first row has 2"),
        ("a.parquet", no_parquet, r"cannot read '.*a\.parquet' \(ArrowInvalid"),
        ("a.jsonl", latin, r"cannot read '.*a\.jsonl' \(UnicodeDecodeError"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    name: str, write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name)
    with pytest.raises(ConfigurationError, match=rf"^task\.train: .*{message}") as error:
        RowSource.of("task.train", str(path)).read()
    assert "\n" not in str(error.value)


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"task\.train: '.*a\.parquet' holds no rows"):
        RowSource.of("task.train", str(tmp_path / "a.parquet")).read()


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:7], COMMIT.upper(), COMMIT + "0"])
def test_only_a_whole_commit_is_a_revision(revision: str | None) -> None:
    source = RowSource.of("task.train", {"path": "ours/sums", "split": "train", "revision": revision})
    for use in (source.content, source.read):
        with pytest.raises(ConfigurationError, match=r"task\.train: 'ours/sums' .* is no commit; give its 40 digits"):
            use()


@pytest.mark.parametrize(
    "location", [None, 5, [], {}, {"split": "train"}, {"path": "a.jsonl", "spilt": "train"}, ["a.jsonl"]]
)
def test_invalid_sources_are_refused(location: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.train: .* must be a file, a hub id, or a mapping of path, sp"):
        RowSource.of("task.train", location)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "all"])
def test_an_invalid_number_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.train\.rows: .* must be a whole number, 1 or more"):
        RowSource.of("task.train", {"path": "a.jsonl", "rows": rows})


# --- identity ------------------------------------------------------------------------------------------------


def test_content_depends_on_bytes_and_not_on_paths(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl")
    other = Path(shutil.copy(first, tmp_path / "elsewhere.jsonl"))
    contents = [RowSource.of("f", str(path)).content() for path in (first, other)]
    assert contents[0] == contents[1] and "/" not in contents[0]
    other.write_bytes(first.read_bytes().replace(b"3 and 3", b"3 and 4"))
    assert RowSource.of("f", str(other)).content() != contents[0]
    few = RowSource.of("f", {"path": str(first), "rows": 2}).content()
    assert few == {"rows": 2, "digest": contents[0]}


def test_content_of_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        parquet(tmp_path / name / "train.parquet", ROWS[:3])
        parquet(tmp_path / name / "more" / "test.parquet", ROWS[3:])

    def content(name: str) -> Any:
        return RowSource.of("f", {"path": str(tmp_path / name), "split": "train"}).content()

    before = content("one")
    assert before == content("two") and before["split"] == "train"
    parquet(tmp_path / "two" / "more" / "test.parquet", ROWS[2:])
    assert content("two") != before
    parquet(tmp_path / "two" / "more" / "test.parquet", ROWS[3:])
    assert content("two") == before
    (tmp_path / "two" / "train.parquet").rename(tmp_path / "two" / "dev.parquet")
    assert content("two") != before, "the names of files decide their splits"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_changed_byte_is_another_content(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    digests = []
    for number, data_bytes in enumerate((content, bytes(changed), content)):
        # Names that no other example uses: the cache knows contents by name, size and time of change.
        path = tmp_path / f"{data.draw(st.uuids())}.{number}.jsonl"
        path.write_bytes(data_bytes)
        digests.append(RowSource.of("f", str(path)).content())
    assert digests[0] == digests[2] != digests[1]


QUICK = ["model.batches=1", "model.width=32", "model.layers=1", "task=gsm8k"]
REWARD = "def reward(completion, answer):\n    return 1.0\n"


def test_identity_depends_on_content_and_not_on_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A moved file leaves the identity the same; one changed byte in any file changes it."""
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))

    def place(name: str, train: str = "", test: str = "", reward: str | None = None) -> list[str]:
        """Write files into a new folder and return overrides; `train` and `test` replace one answer each."""
        folder = tmp_path / name
        folder.mkdir()
        rows = [{**row, "answer": f"#### {row['answer']}"} for row in ROWS]
        rows[0]["answer"] = train or rows[0]["answer"]
        rows[4]["answer"] = test or rows[4]["answer"]
        paths = jsonl(folder / f"{name}.jsonl", rows[:4]), jsonl(folder / f"held {name}.jsonl", rows[4:])
        overrides = [*QUICK, f"task.train='{paths[0]}'", f"task.heldout={{test: '{paths[1]}'}}"]
        if reward is None:
            return overrides
        (folder / f"{name}.py").write_text(reward)
        return [*overrides, f"task.rewards={folder}/{name}.py:reward"]

    plans = [
        place("before"),
        place("moved"),
        place("trained", train="#### 9"),
        place("held", test="#### 9"),
        place("graded", reward=REWARD),
        place("graded_elsewhere", reward=REWARD),
        place("graded_otherwise", reward=REWARD.replace("1.0", "0.0")),
    ]
    before, moved, trained, data_bytes, graded, elsewhere, otherwise = (spec.run for spec in plan_members(plans))
    assert before == moved and graded == elsewhere
    assert len({before, trained, data_bytes, graded, otherwise}) == 5
