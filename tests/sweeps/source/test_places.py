"""Tests of Place, which recognizes the kind of a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.source.places import Kind, Place
from tests.paths import ROOT

STUDY = ROOT / "examples" / "study"


@pytest.mark.parametrize(
    ("source", "kind", "title"),
    [
        ("mlflow:sqlite:///nowhere.db#mine", Kind.EXPERIMENT, "mine"),
        ("mlflow:mlruns#mine", Kind.EXPERIMENT, "mine"),
        (STUDY, Kind.FOLDER, "study"),
        (STUDY / "runs" / "scalerl-0" / "metrics.jsonl", Kind.JOURNAL, "metrics"),
        (ROOT / "examples" / "curves.csv", Kind.FILE, "curves"),
        ("nowhere.csv", Kind.MISSING, "nowhere"),
    ],
)
def test_the_kind_of_a_source_is_recognized(source: str | Path, kind: Kind, title: str) -> None:
    place = Place(source)
    assert place.kind is kind and place.title == title


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_an_impossible_file_name_is_missing(name: str) -> None:
    place = Place(name)
    assert place.kind is Kind.MISSING and place.folder is None and not place.runs
    with pytest.raises(UserError, match="no such file or directory"):
        place.check()


def test_a_folder_separates_our_runs_from_other_logs_named_metrics(tmp_path: Path) -> None:
    for run, line in (("ours", '{"kind": "header"}\n'), ("theirs", '{"step": 1, "reward": 0.5}\n')):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text(line)
    place = Place(tmp_path)
    assert place.runs == [tmp_path / "ours"] and place.files == [tmp_path / "theirs" / "metrics.jsonl"]
    assert place.run_folders == [tmp_path / "ours", tmp_path / "theirs"] and place.event_files == []


def test_the_folder_of_a_run_is_found_from_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "metrics.jsonl"
    journal.touch()
    assert Place(journal).folder == tmp_path == Place(tmp_path).folder
    assert Place(journal).runs == [tmp_path]
    assert Place(tmp_path / "table.csv").folder is None


def test_a_directory_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in this directory"):
        Place(tmp_path).check()
