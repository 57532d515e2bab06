"""Tests of the report page's parts: short labels, colours, small SVG, data for tooltips, and facts at the top."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from sweeps.curve import Curve
from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curves
from sweeps.report import page as report_page
from sweeps.report.drawing import COLOURS, DASHES, colours, inline_svg, styles, svg
from sweeps.report.facts import Facts
from sweeps.report.interactive import library, study_data
from sweeps.report.labels import cut, shorten_labels
from sweeps.report.overlay import overlay_figure
from sweeps.report.thinning import MANY_POINTS, MAX_HOVERED, even_indices, points_as_dots
from sweeps.report.write import write_report
from sweeps.run.files import write_json
from sweeps.run.journal import Journal, read_journal
from sweeps.run.rollouts import stored_steps, write_groups


@pytest.mark.parametrize(
    ("labels", "short"),
    [
        (["scalerl", "scalerl+loss=dapo"], ["scalerl", "loss=dapo"]),
        (["a+x=1+y=2", "a+x=1+z=3"], ["y=2", "z=3"]),
        (["a+x=1", "b+x=1"], ["a+x=1", "b+x=1"]),
        (["a+x=1"], ["a+x=1"]),
        # Different labels stay different.
        (["a", "a+a"], ["a", "a+a"]),
        (["a+x=1", "a+x=1+y=2"], ["a", "y=2"]),
    ],
)
def test_labels_leave_out_their_common_part(labels: list[str], short: list[str]) -> None:
    assert list(shorten_labels(labels).values()) == short


def test_cut_labels_stay_different() -> None:
    assert cut(["scalerl", "loss=dapo"], 18) == {"scalerl": "scalerl", "loss=dapo": "loss=dapo"}
    # Labels that differ at the end, and labels that differ only in the middle.
    ends = cut([f"kl=fixed+kl.coefficient={value}" for value in ("0.2", "0.35")], 18)
    assert list(ends.values()) == ["kl=fixed+…ient=0.2", "kl=fixed+…ent=0.35"]
    middle = [f"{'a' * 30}+x={value}+{'b' * 30}" for value in range(12)]
    assert all(f"+x={value}+" in shown for value, shown in enumerate(cut(middle, 18).values()))
    # A label that begins with another, labels that look alike when printed, and a limit that leaves little room.
    hard = ["a" * 20, "a" * 30, "a" * 40, "b\n", "b?", "b\t", *middle]
    for limit in (8, 18, 34):
        shown = cut(hard, limit)
        assert len(set(shown.values())) == len(hard)
        assert all(len(text) <= limit and text.isprintable() for text in shown.values())


def test_styles_do_not_depend_on_rank_and_the_baseline_has_its_own_colour() -> None:
    recipes = ["scalerl", *(f"scalerl+x={x:02}" for x in range(21))]
    drawn = styles(recipes, "scalerl+x=07")
    assert drawn == styles(recipes[::-1], "scalerl+x=07")
    assert [recipe for recipe, style in drawn.items() if style.colour == COLOURS[0]] == ["scalerl+x=07"]
    assert len(set(drawn.values())) == 1 + 5 * len(DASHES)
    assert styles(recipes, None)["scalerl"].colour == COLOURS[0]
    x = np.arange(1.0, 9.0)
    planted = {"a": 0.5, "b": 0.7, "c": 0.6}
    curves = [Curve(name, x, top * x / (x + 1), np.full(8, "0"), baseline="c") for name, top in planted.items()]
    fits = fit_curves(curves)
    ranking = rank(fits)
    expected = {"c": COLOURS[0], "a": COLOURS[1], "b": COLOURS[2]}
    assert colours(ranking) == expected
    data = study_data(curves, fits, ranking, [], {name: name for name in planted}, [])
    assert {recipe["label"]: recipe["colour"] for recipe in data["recipes"]} == expected
    left, right = overlay_figure(curves, fits, ranking).axes
    order = [entry.recipe for entry in ranking.ranking]
    points = [line for line in left.lines if line.get_marker() == "o"]
    assert [line.get_color() for line in points] == [expected[recipe] for recipe in order]
    rows = {int(line.get_ydata()[0]): line.get_color() for line in right.lines if line.get_marker() == "o"}
    assert [rows[row] for row in range(3)] == [expected[recipe] for recipe in order]


def test_many_points_are_drawn_as_dots() -> None:
    figure = Figure()
    panel = figure.subplots()
    x = np.arange(MANY_POINTS + 1.0)
    panel.plot(x, np.sin(x), "o", markersize=3)
    panel.plot(x[:3], x[:3] / 3, "s")  # too few to replace: they keep their markers
    panel.plot(x, np.cos(x), label="a curve")
    size_with_markers = len(inline_svg(svg(figure), "p", ""))
    assert points_as_dots(figure) == len(x)
    element = inline_svg(svg(figure), "p", "")
    assert element.count("h0") == len(x) and len(element) < size_with_markers / 2
    assert len(panel.lines[2].get_xdata()) == len(x)
    drawing = ElementTree.fromstring(svg(figure))
    assert drawing.tag.endswith("svg")
    few = Figure()
    few.subplots().plot(x[:-1], x[:-1], "o")
    assert points_as_dots(few) == 0


def test_only_coordinates_of_an_svg_are_shortened() -> None:
    figure = Figure()
    panel = figure.subplots()
    panel.plot([0.0, 1.0], [0.0, 1.0])
    panel.text(0.5, 0.5, "0.0001234 L 5")
    element = inline_svg(svg(figure), "p", "")
    assert "0.0001234 L 5" in element and "font-family" not in element
    assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<|viewBox=\"[^\"]*\"", "", element))
    names = set(re.findall(r'\bid="([^"]*)"', element))
    assert names == set(re.findall(r'(?:url\(#|href="#)([^)"]+)', element)) and names


def test_even_indices_are_evenly_spaced() -> None:
    assert list(even_indices(5, 1.0)) == [0, 1, 2, 3, 4]
    picked = even_indices(101, 0.11)
    assert picked[0] == 0 and picked[-1] == 100 and len(picked) == 11 and set(np.diff(picked)) == {10}


def test_the_library_is_one_compressed_script() -> None:
    packed = library()
    assert packed is not None
    script = gzip.decompress(base64.b64decode(packed)).decode()
    assert "window.vegaEmbed=" in script and len(packed) < 500_000


def run(folder: Path, recipe: str, seed: int, reward: float, config: dict[str, object] | None = None) -> None:
    journal = Journal(folder)
    journal.header(run=folder.name, curve=recipe, recipe=recipe, seed=seed, baseline="a", departures={})
    for step in range(4):
        if step:
            journal.record("train", step, {"train/credited_tokens": 10.0})
        spent = {"compute/flops": 100.0 * step, "compute/device_hours": 0.5 * step}
        journal.record("eval", step, {"eval/heldout/pass_rate": reward + 0.01 * step, **spent})
    journal.end(3, "failed" if seed else "finished", "out of memory" if seed else None)
    journal.close()
    if config is not None:
        write_json(folder / "spec.json", {"config": config})


def test_points_are_matched_to_their_journals(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / "runs" / f"r{seed}", "a", seed, 0.1 + seed)
    write_groups(tmp_path / "runs" / "r1", [{"step": 2, "rollouts": []}, {"step": 1, "rollouts": []}])
    views = [read_journal(tmp_path / "runs" / f"r{seed}") for seed in (0, 1)]
    c = np.array([0.0, 100.0, 200.0, 300.0] * 2)
    y = np.array([0.1 + seed + 0.01 * step for seed in (0, 1) for step in range(4)])
    # The last point is in no journal.
    y[-1] = 0.5
    data = Curve("a", c, y, np.repeat(["0", "1"], 4), axis="compute/flops", metric="eval/heldout/pass_rate")
    fits = fit_curves([data])
    page_data = study_data([data], fits, rank(fits), views, {"a": "a"}, [], rate=3.0)
    assert page_data["axes"] == [
        *(["c", "FLOPs"], ["step", "optimizer steps"], ["tokens", "tokens trained on"]),
        *(["compute/device_hours", "device hours"], ["cost", "cost"]),
    ]
    points = page_data["points"]
    assert points["run"] == [0, 0, 0, 0, 1, 1, 1, None] and points["step"] == [0, 1, 2, 3, 0, 1, 2, None]
    assert points["tokens"] == [0, 10, 20, 30, 0, 10, 20, None] and points["cost"][:3] == [0, 1.5, 3]
    assert "compute/flops" not in points and page_data["thinned"] is None
    loss = replace(data, reward=-data.reward, metric=f"-{data.metric}", lower_is_better=True)
    negated = study_data([loss], fits, rank(fits), views, {"a": "a"}, [], rate=3.0)["points"]
    assert negated["run"] == points["run"] and negated["y"] == [-value for value in points["y"]]
    assert (
        [stored for _, stored in page_data["runs"]]
        == [[], [1, 2]]
        == [stored_steps(view.path.parent) for view in views]
    )
    json.dumps(page_data, allow_nan=False)


def test_many_points_are_thinned_and_counted() -> None:
    c = np.arange(MAX_HOVERED + 500.0)
    data = Curve("a", c, 0.1 + 0.0 * c, np.full(len(c), "0"))
    fits = fit_curves([data])
    page_data = study_data([data], fits, rank(fits), [], {"a": "a"}, [])
    count, total = page_data["thinned"]
    assert total == len(c) and count == len(page_data["points"]["c"]) <= MAX_HOVERED
    assert page_data["points"]["c"][0] == 0 and page_data["axes"] == [["c", "compute"]]


def test_facts_at_the_top_of_the_page(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "model": {"_target_": "lightning_scalerl.model_path", "path": "mine/model"},
        "task": {"_target_": "lightning_scalerl.ArithmeticTask", "train": [1, 2]},
        "launch": {"rate": 2.0},
    }
    for seed in (0, 1):
        run(tmp_path / "runs" / f"r{seed}", "a", seed, 0.1, config)
    (tmp_path / "multirun.yaml").write_text("hydra: {overrides: {task: [seed=0, 'x=a b']}}")
    facts = Facts([read_journal(tmp_path / "runs" / f"r{seed}") for seed in (0, 1)])
    lines = dict(facts.lines)
    assert lines["Model"] == "model_path (mine/model)" and lines["Task"] == "ArithmeticTask"
    assert lines["Cost"].startswith("6.00 at 2 per device hour, 3 device hours") and re.match(r"\d{4}-", lines["Date"])
    assert facts.commands == ["scalerl train --multirun seed=0 'x=a b'"]
    (crash,) = facts.crashes
    assert (crash.path.parent.name, crash.header["seed"], crash.reason) == ("r1", 1, "out of memory")
    journal = tmp_path / "runs" / "r0" / "metrics.jsonl"
    # A simulation's journal: times start at 0, and no line has a checksum.
    simulated = re.sub(r',"crc":"\w+"', "", re.sub(r'"time":[\d.e+]+', '"time":3.0', journal.read_text()))
    journal.write_text(simulated)
    undated = dict(Facts([read_journal(journal.parent)]).lines)
    assert "Date" not in undated and "Model" in undated
    no_facts = Facts([])
    assert not no_facts.lines and not no_facts.commands and not no_facts.crashes and no_facts.rate is None


@pytest.mark.slow
def test_without_the_library_the_page_is_static_and_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "library", lambda: None)
    curves = [Curve(name, np.arange(3.0), np.array([0.1, 0.2, 0.3]), np.full(3, "0")) for name in ("a", "b")]
    fits = fit_curves(curves)
    text = write_report(tmp_path / "x.html", curves, fits, rank(fits))[0].read_text(encoding="utf-8")
    assert "pip install vl-convert-python" in text and 'class="static"' in text
    assert 'id="study"' not in text and 'id="library"' not in text and text.count("<script>") == 1


@pytest.mark.full
def test_two_studies_are_shown_side_by_side(tmp_path: Path) -> None:
    def curves(*names: str) -> list[Curve]:
        return [Curve(name, np.arange(3.0), np.array([0.1, 0.2, 0.3]), np.full(3, "0")) for name in names]

    our_curves, their_curves = curves("a", "b"), curves("b", "<c>")
    fits, their_fits = fit_curves(our_curves), fit_curves(their_curves)
    beside = report_page.OtherStudy("their <study>", their_curves, their_fits, rank(their_fits))
    written = write_report(tmp_path / "x.html", our_curves, fits, rank(fits), title="mine", beside=beside)
    text = written[0].read_text(encoding="utf-8")
    assert "How does it compare with their &lt;study&gt;?" in text and tmp_path / "x_beside.pdf" in written
    table = text.split("A, their &lt;study&gt;")[1].split("</table>")[0]
    cells = re.findall(r"<tr><td>(.*?)</td>", table)
    assert cells == ["a", "b", "&lt;c&gt;"]
    assert re.findall(r'class="soft">([^<]*)<', table)[0].endswith(", –")
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
