"""Truths about the report: self-contained, escaped, readable without the data, and the same every time."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit import fit_curves
from sweeps.journal import Journal
from sweeps.rank import rank
from sweeps.report import write_ranking_csv, write_report
from sweeps.source import load
from tests.sweeps.simulate import curve

VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Collects text and attributes, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "img"}
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(tmp_path: Path, *curves: Curve, **options: object) -> tuple[str, list[Path]]:
    fits = fit_curves(curves)
    written = write_report(tmp_path / "report.html", curves, fits, rank(fits, budget=20000.0), **options)  # type: ignore[arg-type]
    return written[0].read_text(encoding="utf-8"), written


def test_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    text, written = report(
        tmp_path, curve("scalerl", rng=1), curve("scalerl+loss=dapo", b=1.5, rng=2), curve("short", end=1500)
    )
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    # Names of XML vocabularies are the only addresses.
    assert set(re.findall(r"https?://[^\"'\s<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text and "prefers-color-scheme:dark" in text and "@media print" in text
    figures = {f"report_{name}.{kind}" for name in ("curves", "asymptotes") for kind in ("svg", "png")}
    assert {path.name for path in written} == {"report.html", *figures}
    assert "nan" not in re.sub(r"<[^>]*>", "", text).lower().split()
    for path in written[1:]:
        if path.suffix == ".svg":
            drawing = ElementTree.fromstring(path.read_text(encoding="utf-8"))
            assert drawing.tag.endswith("svg")
            assert "NaN" not in path.read_text() and "inf" not in re.findall(r'd="([^"]*)"', path.read_text())
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_outcome_tables_and_refusals_are_on_the_page(tmp_path: Path) -> None:
    text, _ = report(
        tmp_path,
        curve("scalerl", rng=1),
        curve("scalerl+loss=dapo", b=1.5, rng=2),
        curve("short", end=1500),
        title="My study",
    )
    plain = re.sub(r"<[^>]*>", " ", text)
    for words in (
        "My study",
        "Ranking",
        "Leave one out",
        "pre_inflection",
        "P(best A)",
        "R at 2e+04",
        "Fits",
    ):
        assert words in plain


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>&$\\frac{1}{0}$\x07\u202e'
    text, _ = report(tmp_path, curve(evil, rng=1), curve("b$", a=0.5, rng=2), title=evil, warnings=[evil])
    Page(text)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_journals_bring_counters_and_provenance(tmp_path: Path) -> None:
    for recipe in ("scalerl", "scalerl+loss=dapo"):
        data = curve(recipe, seeds=1)
        journal = Journal(tmp_path / recipe)
        journal.header(run=recipe, curve=recipe, recipe=recipe, seed=7, commit="abc<123>", versions={"torch": "2.13"})
        journal.record("train", 1, {"mechanism/loss": 0.0, "mechanism/kl": 0.5, "alarm/truncated": 0.0})
        if recipe == "scalerl":
            journal.record("train", 2, {"mechanism/loss": 0.0, "mechanism/kl": 0.5, "alarm/truncated": 2.0})
        for step, (c, r) in enumerate(zip(data.compute, data.reward, strict=True)):
            journal.record("eval", step, {"eval/heldout/pass_rate": r, "compute/flops": c})
        journal.close()
    study = load([tmp_path])
    text, _ = report(tmp_path / "out", *study.curves, runs=study.runs)
    Page(text)
    assert "scalerl+loss=dapo: this variant changed nothing" in text
    assert "scalerl seed 7: 15% or more of the completions were truncated (first at step 2, in 1 of 2 steps)" in text
    assert "scalerl+loss=dapo seed 7" not in text
    assert "abc&lt;123&gt;" in text and "2.13" in text and "Did the choices act?" in text


def test_page_without_any_ranked_recipe(tmp_path: Path) -> None:
    points = np.arange(3.0)
    few = Curve("few", points, 0.1 * points, np.full(3, "0"))
    only_zero = Curve("zero", np.zeros(2), np.array([0.1, 0.2]), np.full(2, "0"))
    text, written = report(tmp_path, few, only_zero, curve("short", end=1500))
    Page(text)
    assert "undecided" in text and len(written) == 3


def test_same_input_same_bytes(tmp_path: Path) -> None:
    curves = curve("scalerl", rng=1), curve("scalerl+loss=dapo", b=1.5, rng=2)
    _, first = report(tmp_path / "one", *curves)
    _, second = report(tmp_path / "two", *curves)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_ranking_csv(tmp_path: Path) -> None:
    fits = fit_curves([curve("scalerl", rng=1), curve("a,b", end=1500)])
    path = write_ranking_csv(tmp_path / "new" / "ranking.csv", fits, rank(fits))
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["recipe"] for row in rows] == ["scalerl", "a,b"]
    assert {"verdict", "A", "A_low", "A_high", "B", "C_mid", "p_best"} <= set(rows[0])
    assert float(rows[0]["A_low"]) < float(rows[0]["A"]) < float(rows[0]["A_high"])
    assert rows[1]["A_high"] == "" and rows[1]["p_best"] == ""


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fits = fit_curves([curve(points=12)])
    with pytest.raises(UserError, match="cannot be written"):
        write_ranking_csv(tmp_path / "file" / "x.csv", fits, rank(fits))
