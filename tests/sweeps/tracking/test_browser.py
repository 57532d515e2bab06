"""Tests of MLflow's own interface at the printed links, in Chromium, without a click.

The chart has points, curve and band, with one colour per recipe. The list has the members by rank.
Debian: `apt-get install --no-install-recommends chromium chromium-driver`; selenium is a dev dependency.
These tests are skipped without both, unless CI_ALL=1.
"""

import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.port import free_port
from sweeps.run.journal import Journal
from sweeps.tracking import FitSummary, Member, Published, Shipper, TrackedSweep, Tracker, publish, ui_command
from sweeps.tracking.views import BAND_KEY
from tests.chromium import chromium, need_chromium, wait_for
from tests.mlflow_ui import charts, console_errors, interface, show, table

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

Y, X = "eval/heldout/pass_rate", "eval/heldout/log10 compute in FLOPs"
WHOLE, COMPUTE = "Pass rate/heldout", "eval/heldout/compute in FLOPs"
RECIPES = {"scalerl": (0.61, 1.8, 2e9), "scalerl+loss=dapo": (0.55, 1.5, 3e9)}
RANKED, REFUSED = ((1, "scalerl", 0.9), (2, "loss=dapo", 0.1)), "scalerl+kl=fixed"
LABELS = [label for _, label, _ in RANKED]


def sigmoid(C: Any, A: float, B: float, C_mid: float) -> Any:
    return 0.2 + (A - 0.2) / (1 + (C_mid / C) ** B)


def study(root: Path) -> tuple[Tracker, TrackedSweep, Published]:
    """Write a finished sweep: two recipes with two seeds, and three published fits, one of them refused."""
    noise = np.random.default_rng(0)
    members = []
    for recipe, planted in RECIPES.items():
        for seed in (0, 1):
            member = Member(f"{recipe}-{seed}", recipe, seed, root / "sweep" / f"{recipe}-{seed}")
            journal = Journal(member.run_dir)
            journal.header(run=member.run, recipe=recipe, seed=seed)
            for step in range(0, 151, 5):
                C = 2e8 * step
                rate = (sigmoid(C, *planted) if C else 0.2) + float(noise.normal()) * 0.008
                journal.record("train", step, {"train/loss": 1.0, "compute/flops": C})
                journal.record("eval", step, {Y: rate, "compute/flops": C})
            journal.end(150, "finished")
            journal.close()
            members.append(member)
    members.append(Member("refused", REFUSED, 0, root / "sweep" / "refused"))  # has not evaluated yet
    tracker = Tracker(f"sqlite:///{root}/mlflow.db", "browser study")
    sweep = tracker.open_sweep(root / "sweep", members)
    assert Shipper(tracker, sweep).run_once()
    C = np.logspace(math.log10(2e8), math.log10(2e11), 75)
    fits = [
        FitSummary(
            recipe, "identifiable", "compute/flops", (1e9, 3e10), None, A, A - 0.01, A + 0.02, B, C_mid,
            0.2, 0.008, p_best, C, *(sigmoid(C, A, B, C_mid) + shift for shift in (0.0, -0.02, 0.03)),
            rank, label, ratio=float(rank),
        )
        for (recipe, (A, B, C_mid)), (rank, label, p_best) in zip(RECIPES.items(), RANKED, strict=True)
    ]  # fmt: skip
    fits.append(FitSummary(REFUSED, "pre_inflection", "compute/flops", reason="no bend seen", label="kl=fixed"))
    return tracker, sweep, publish(fits, tracker, sweep)


@dataclass(frozen=True)
class Pages:
    """A browser, the addresses of the views and of a member's charts, and the folder for screenshots."""

    browser: Any
    chart: str
    recipes: str
    runs: str
    member: str
    folder: Path

    def wait_for_charts(self, expected: int) -> list[dict[str, Any]]:
        """Return the page's first charts once their lines no longer change; take a screenshot in any case."""
        earlier_sizes: list[list[int]] = []

        def still() -> list[dict[str, Any]]:
            stable_charts = charts(self.browser)[:expected]
            earlier_sizes.append([len(trace["x"]) for chart in stable_charts for trace in chart["traces"]])
            done = len(stable_charts) == expected and all(chart["traces"] and chart["x"] for chart in stable_charts)
            return stable_charts if done and earlier_sizes[-1:] == earlier_sizes[-2:-1] else []

        stable_charts = wait_for(still)
        self.browser.save_screenshot(str(self.folder / "charts.png"))
        assert stable_charts, f"no chart; see {self.folder}/charts.png"
        return list(stable_charts)

    def wait_for_list(self, rows: int) -> dict[str, Any]:
        """Return the list of runs once it has `rows` rows; take a screenshot in any case."""
        runs_table = wait_for(lambda: current if len((current := table(self.browser))["rows"]) == rows else None)
        self.browser.save_screenshot(str(self.folder / "runs.png"))
        assert runs_table, f"no list of {rows} runs; see {self.folder}/runs.png"
        return dict(runs_table)


@pytest.fixture(scope="module")
def pages(schema: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    need_chromium()
    root = tmp_path_factory.mktemp("mlflow")
    shutil.copy(schema, root / "mlflow.db")
    tracker, sweep, published = study(root)
    ui = ui_command(tracker.uri, published.link, port=free_port())
    assert ui.command is not None
    base = ui.url.partition("/#")[0]
    run = sweep.members["scalerl-0"].mlflow_run_id
    with interface(ui.command, base, root), chromium(root / "profile", logs=True) as browser:
        member = f"{base}/#/experiments/{sweep.experiment_id}/runs/{run}/model-metrics"
        links = (f"{base}/{link}" for link in (published.recipes_link, published.ranking_link))
        yield Pages(browser, ui.url, *links, member, root)


def lines_of_group(chart: dict[str, Any], name: str, metric: str) -> list[dict[str, Any]]:
    """Return the lines of a metric in the named group: the drawn line, then its pale copy."""
    group = f"tag.line.{name}"
    return [t for t in chart["traces"] if t["group"].rstrip() == group and t["metric"] == metric]


def test_the_first_link_shows_points_curve_and_band_in_one_colour_per_recipe(pages: Pages) -> None:
    show(pages.browser, pages.chart)
    first, linear = pages.wait_for_charts(2)
    assert (first["x"], linear["x"]) == (X, COMPUTE)
    drawn = first["traces"]

    # Four lines of members over the logged log10 compute, each in its own group.
    points = [t for t in drawn if t["metric"] == Y and len(t["x"]) == 30 and "markers" in t["mode"]]
    log10_C = [math.log10(1e9 * (i + 1)) for i in range(30)]
    assert len(points) == 4
    for line in points:
        assert sorted(line["x"]) == pytest.approx(log10_C)
    # Evaluations are dashed with markers; fits are solid, and come first in the legend.
    assert {t["dash"] for t in points} == {"dash"}
    curves = [t for t in drawn if t["metric"] == BAND_KEY and len(t["x"]) == 75]
    assert curves and {t["dash"] for t in curves} == {"solid"}
    assert next(t["metric"] for t in drawn if t["metric"]) == BAND_KEY
    # The curves are exact, although the band is wider above than below.
    tops = {round(max(t["y"]), 3) for t in curves}
    assert tops == {round(float(sigmoid(2e11, *planted)), 3) for planted in RECIPES.values()}
    # Each recipe has a filled band, as wide at its end as logged (0.05).
    bands = []
    for band in (t for t in drawn if t["fill"] and len(t["x"]) == 151):
        outline = [(x, y) for x, y in zip(band["x"], band["y"], strict=True) if x is not None]
        end = [y for x, y in outline if x == max(x for x, _ in outline)]
        if max(end) - min(end) == pytest.approx(0.05, abs=1e-6):
            bands.append((round(min(end), 3), band["color"]))
    assert len(bands) == len(RECIPES)

    # Each recipe has one colour for its seeds, fit and band in both charts, and the two colours differ.
    colours = {}
    for label, planted in zip(LABELS, RECIPES.values(), strict=True):
        names = (f"{label} seed 0", f"{label} seed 1")
        lines = [lines_of_group(first, name, Y)[0] for name in names] + [
            lines_of_group(linear, name, WHOLE)[0] for name in names
        ]
        lines += [lines_of_group(chart, f"{label} fit", BAND_KEY)[0] for chart in (first, linear)]
        colours[label] = {line["color"] for line in lines}
        low = round(float(sigmoid(2e11, *planted)) - 0.02, 3)
        colours[label] |= {color[:7] for end, color in bands if end == low}
    assert [len(colours_of_recipe) for colours_of_recipe in colours.values()] == [1, 1] and len(
        set.union(*colours.values())
    ) == 2

    # The evaluation before training is at compute 0 of the linear chart.
    for label in LABELS:
        line = lines_of_group(linear, f"{label} seed 0", WHOLE)[0]
        assert len(line["x"]) == 31 and line["x"][0] == 0 and line["y"][0] == pytest.approx(0.2, abs=0.03)

    # The list next to the chart has closed groups of seeds and fits, and no run of a band.
    rows = [" ".join(row.values()) for row in pages.wait_for_list(6)["rows"]]
    assert all("Group: " in row for row in rows) and not any(word in "".join(rows) for word in (" low", " high"))
    assert [row.count(next(iter(colours[label]))) for label, row in zip(np.repeat(LABELS, 3), rows, strict=True)] == [
        1
    ] * 6
    assert console_errors(pages.browser) == []


def test_the_second_link_has_one_row_per_recipe(pages: Pages) -> None:
    show(pages.browser, pages.recipes, height=900)
    shown = pages.wait_for_list(3)
    keys = ("rank/place", "fit/A", "fit/A_low", "fit/A_high", "rank/times_compute", "rank/p_best")
    wanted = [*(f"metrics.`{key}`" for key in keys), "tags.`fit.verdict`"]
    heads = dict(shown["heads"])
    assert [head for head in heads if head in wanted] == wanted and heads[wanted[-1]] <= 1400
    assert [row["attributes.`Run Name`"].splitlines()[-1] for row in shown["rows"]] == [
        *(f"{recipe} fit" for recipe in RECIPES),
        f"{REFUSED} fit",
    ]
    numbers = [[row[column] for column in wanted] for row in shown["rows"]]
    assert numbers[0] == ["1", "0.61", "0.6", "0.63", "1", "0.9", "identifiable"]
    assert numbers[2] == [*"------", "pre_inflection"]
    assert console_errors(pages.browser) == []


def test_the_third_link_lists_members_by_rank(pages: Pages) -> None:
    show(pages.browser, pages.runs, height=900)
    shown = pages.wait_for_list(5)
    columns = [f"metrics.`{key}`" for key in ("fit/A", "fit/A_low", "fit/A_high", WHOLE)]
    wanted = ["metrics.`rank/place`", "metrics.`rank/p_best`", "tags.`fit.verdict`", *columns]
    heads = dict(shown["heads"])
    assert [head for head in heads if head in wanted] == wanted and heads[wanted[-1]] <= 1400
    rows = shown["rows"]
    names = [row["attributes.`Run Name`"].splitlines()[-1] for row in rows]
    assert [name.rpartition(" seed ")[0] for name in names] == [*np.repeat(list(RECIPES), 2), REFUSED]
    assert [row["metrics.`rank/place`"] for row in rows] == ["1", "1", "2", "2", "-"]
    assert [row["metrics.`rank/p_best`"] for row in rows] == ["0.9", "0.9", "0.1", "0.1", "-"]
    assert [row["tags.`fit.verdict`"] for row in rows] == ["identifiable"] * 4 + ["pre_inflection"]
    assert len({row["attributes.`Run Name`"].splitlines()[0] for row in rows}) == 3  # one colour per recipe
    assert console_errors(pages.browser) == []


def test_pass_rate_comes_first_on_a_members_page(pages: Pages) -> None:
    show(pages.browser, pages.member, height=900)
    [first] = pages.wait_for_charts(1)
    text = pages.browser.execute_script("return document.body.innerText")
    sections = re.findall(r"^(Pass rate|compute|eval/heldout|fit|train)\s*\(\d+\)", text, re.MULTILINE)
    assert sections[:2] == ["Pass rate", "compute"] and sections.count("Pass rate") == 1
    line = next(t for t in first["traces"] if t["metric"] == WHOLE)
    assert line["x"] == list(range(0, 151, 5)) and first["x"] == "Step"
    assert console_errors(pages.browser) == []


def test_the_printed_command_listens_only_on_loopback(pages: Pages) -> None:
    port = f"{int(pages.runs.split('/')[2].rpartition(':')[2]):04X}"
    sockets = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    listening = {fields[1] for fields in sockets if fields[3] == "0A" and fields[1].endswith(f":{port}")}
    assert listening == {f"0100007F:{port}"}


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_both_views_work_in_light_and_dark_mode_and_on_a_phone(pages: Pages, width: int, dark: bool) -> None:
    """On a phone, MLflow's layout puts the chart outside the screen, so only the lists are checked there."""
    show(pages.browser, pages.chart, width, dark=dark)
    groups = [" ".join(row.values()) for row in pages.wait_for_list(6)["rows"]]
    assert len({row[row.index("#") :][:7] for row in groups}) == 2
    if width == 1400:
        lines = pages.wait_for_charts(2)[0]["traces"]
        assert len({line["color"] for line in lines if line["metric"] == Y and len(line["color"]) == 7}) == 2
    body = "return getComputedStyle(document.body).colorScheme"
    assert (pages.browser.execute_script(body) == "dark") is dark
    assert console_errors(pages.browser) == []
    show(pages.browser, pages.runs, width, dark=dark)
    rows = pages.wait_for_list(5)["rows"]
    assert not any(word in str(rows) for word in (" low", " high", " fit"))
    assert console_errors(pages.browser) == []


@pytest.mark.full
def test_the_chart_of_the_list_has_parallel_coordinates(pages: Pages) -> None:
    show(pages.browser, pages.runs.replace("=TABLE", "=CHART"))
    wanted = ("5 matching runs", "Parallel Coordinates", "fit/log10_C_mid", "fit/B", "fit/A")

    def text() -> str:
        body = str(pages.browser.execute_script("return document.body.innerText"))
        return body if all(words in body for words in wanted) else ""

    assert wait_for(text)
    time.sleep(2)
    pages.browser.save_screenshot(str(pages.folder / "parallel.png"))
    assert console_errors(pages.browser) == []
