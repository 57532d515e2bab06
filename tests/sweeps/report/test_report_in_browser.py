"""Tests of the report in a browser: widths, light and dark, figure, tables and buttons, print, and without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.decide.rank import rank
from sweeps.fit.fit import fit_curves
from sweeps.report.write import write_report
from sweeps.run.journal import Journal
from sweeps.run.rollouts import write_groups
from sweeps.source import load
from tests.chromium import chromium, need_chromium, wait_for
from tests.examples import every
from tests.sweeps.fit.simulate import curve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

# A label that is wider than a telephone's screen.
LONG = "context.max_new_tokens=12+thinking.interrupt_from=5+thinking.interrupt_to=7"
RECIPES = ("scalerl", "scalerl+loss=dapo", f"scalerl+{LONG}")
# Relative luminance and contrast by WCAG 2. The background is the nearest ancestor's that is not transparent.
CONTRAST = """
const parse = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const worst = [];
const texts = "h1,h2,h3,p,a,th,td,button,label,legend,figcaption,dt,dd,code,select,.range,.soft,svg text";
for (const node of document.querySelectorAll(texts)) {
  if (!node.textContent.trim() || !node.getClientRects().length) continue;
  const style = getComputedStyle(node);
  const ink = parse(node instanceof SVGElement ? style.fill : style.color);
  let at = node, back;
  do { back = parse(getComputedStyle(at).backgroundColor); at = at.parentElement; } while (at && back[3] === 0);
  const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
  worst.push([(high + .05) / (low + .05), node.tagName, node.textContent.trim().slice(0, 40)]);
}
return worst.sort((a, b) => a[0] - b[0])[0];
"""
# Elements wider than the window, except elements that scroll in their own box.
TOO_WIDE = """
const wide = [...document.querySelectorAll("body *")].filter(node => !node.closest(".wide, figure:not(.table)")
  && node.getBoundingClientRect().right > innerWidth + 1);
const names = wide.slice(0, 5).map(node => `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`);
return document.documentElement.scrollWidth > innerWidth ? ["the page", ...names] : names;
"""

# Layout: lines of the headline, tables cut at the right, number of cut names in the legend, and visible panels.
LAID_OUT = """
const all = query => [...document.querySelectorAll(query)], box = node => node.getBoundingClientRect();
const lines = node => Math.round(box(node).height / parseFloat(getComputedStyle(node).lineHeight));
return {headline: lines(document.querySelector(".outcome")),
  wide: all(".wide").filter(node => node.scrollWidth > node.clientWidth + 1).map(node => node.textContent.slice(0, 40)),
  cut: all(".recipes label").filter(node => node.scrollWidth > node.clientWidth + 1).length,
  panels: all(".panels svg").map(box).filter(({width}) => width).map(({left, width}) => [left, width]),
  whole: box(document.querySelector("figure:not(.static figure) .whole")).width};
"""

UNCOVERED = """
const paths = document.querySelectorAll("#chart-curves .mark-symbol path");
return arguments[0].find(at => {
  const {left, top, width, height} = paths[at].getBoundingClientRect();
  return document.elementFromPoint(left + width / 2, top + height / 2) === paths[at];
});
"""


def write_page(folder: Path) -> Path:
    """Write a study of three recipes, two seeds each, with journals and rollouts. Returns its page."""
    for recipe in RECIPES:
        data = curve(recipe, b=1.5 if "dapo" in recipe else 2.0, seeds=2, points=20, rng=RECIPES.index(recipe))
        for seed in (0, 1):
            of_seed = data.take(data.seed == np.unique(data.seed)[seed])
            run = folder / "study" / "runs" / f"{RECIPES.index(recipe)}{seed}"
            journal = Journal(run)
            journal.header(run=run.name, curve=recipe, recipe=recipe, seed=seed, baseline="scalerl", departures={})
            for step, (c, r) in enumerate(zip(of_seed.compute, of_seed.reward, strict=True)):
                if step:
                    journal.record("train", step, {"train/credited_tokens": 100.0})
                spent = {"compute/flops": float(c) * 1e9, "compute/virtual_device_hours": float(c)}
                journal.record("eval", step, {"eval/heldout/pass_rate": float(r), **spent})
            journal.end(step, "failed" if recipe == RECIPES[2] and seed else "finished", "CUDA out of memory")
            journal.close()
            rollout = {"completion": "4", "reward": 1.0, "outcome": "score", "tokens": 1, "finish_reason": "stop"}
            lost = rollout | {"completion": "5", "reward": 0.0}
            group = {"prompt_id": "p", "prompt": "2 + 2?", "answer": "4", "rollouts": [rollout, lost]}
            write_groups(run, [{"step": stored_step, **group} for stored_step in range(1, step + 1)])
    study = load([folder / "study"], x="compute/virtual_device_hours")
    fits = fit_curves(study.curves)
    return write_report(folder / "page.html", study.curves, fits, rank(fits), study.runs, title="Three recipes")[0]


@cache
def cached_page(folder: Path) -> Path:
    return write_page(folder)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_page(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need_chromium()
    with chromium(tmp_path_factory.mktemp("chromium") / "profile", logs=True) as driver:
        yield driver


def open_page(browser: Any, page: Path, width: int = 1400, dark: bool = False, media: str = "screen") -> None:
    """Open the page again and wait until its figure is drawn."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    assert wait_for(lambda: browser.execute_script("return document.documentElement.dataset.drawn"), 60)


def screenshot(browser: Any, path: Path) -> None:
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return innerWidth")
    metrics = {"width": width, "height": min(height, 6000), "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.save_screenshot(str(path))


@pytest.mark.parametrize(
    ("width", "dark"), every(2, [(1400, False), (1400, True), (390, True), (390, False)], pytest.mark.full)
)
def test_the_page_fits_is_legible_and_requests_nothing(
    browser: Any, page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.get_log("performance")
    open_page(browser, page, width, dark)
    assert browser.execute_script(TOO_WIDE) == []
    laid_out = browser.execute_script(LAID_OUT)
    assert laid_out["cut"] == 0
    if width == 1400:
        assert laid_out["headline"] == 1 and laid_out["wide"] == [] and laid_out["panels"] == []
        assert laid_out["whole"] > 600
    else:  # panels are stacked and as wide as the page
        assert len(laid_out["panels"]) >= len(RECIPES) and laid_out["whole"] == 0
        assert all(left < 20 and across > 340 for left, across in laid_out["panels"])
    contrast, *where = browser.execute_script(CONTRAST)
    assert contrast >= 4.5, where
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert page.as_uri() in requested
    assert {url for url in requested if not url.startswith(("data:", "blob:"))} == {page.as_uri()}
    screenshot(browser, tmp_path / "page.png")


def test_recipes_axes_and_scales_can_be_switched_by_keyboard(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    open_page(browser, page)
    points = "#chart-curves .mark-symbol path"

    def count() -> int:
        return len(browser.find_elements(By.CSS_SELECTOR, points))

    every = count()
    labels = browser.find_elements(By.CSS_SELECTOR, ".recipes label")
    assert {label.text.strip() for label in labels} == {"scalerl", "loss=dapo", LONG}
    assert browser.execute_script("return document.querySelector('.static').hidden") is True
    labels[0].find_element(By.TAG_NAME, "input").send_keys(Keys.SPACE)
    assert wait_for(lambda: 0 < count() < every, 20)
    labels[0].find_element(By.TAG_NAME, "input").send_keys(Keys.SPACE)
    assert wait_for(lambda: count() == every, 20)
    browser.find_element(By.ID, "log").send_keys(Keys.SPACE)
    # The points at compute 0 (6 runs) cannot be on a logarithmic axis.
    assert wait_for(lambda: count() == every - 6, 20)
    axis = Select(browser.find_element(By.ID, "axis"))
    assert [option.text for option in axis.options] == [
        *("virtual device hours", "optimizer steps", "tokens trained on", "FLOPs"),
    ]
    axis.select_by_value("tokens")
    assert wait_for(lambda: "tokens trained on" in browser.find_element(By.CSS_SELECTOR, "#chart-curves svg").text, 20)
    bands_before = len(browser.find_elements(By.CSS_SELECTOR, "#chart-curves .mark-area path"))
    browser.find_element(By.ID, "bands").send_keys(Keys.SPACE)
    assert bands_before == 0
    assert wait_for(lambda: browser.find_elements(By.CSS_SELECTOR, "#chart-curves .mark-area path"), 20)


def test_a_point_has_a_tooltip_and_a_link_to_its_rollouts(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    open_page(browser, page)
    data = browser.execute_script("return JSON.parse(document.getElementById('study').textContent)")
    run, shown = data["shown"][0]
    number = next(number for number, (folder, _) in enumerate(data["runs"]) if Path(folder).name == run)
    # An evaluation of that run that is not covered by a curve or another evaluation.
    points = [at for at, of in enumerate(data["points"]["run"]) if of == number and data["points"]["step"][at]]
    browser.execute_script("document.getElementById('chart-curves').scrollIntoView({block: 'center'})")
    at = browser.execute_script(UNCOVERED, points)
    step = data["points"]["step"][at]
    point = browser.find_elements(By.CSS_SELECTOR, "#chart-curves .mark-symbol path")[at]
    ActionChains(browser).move_to_element(point).perform()
    tooltip = wait_for(lambda: browser.find_element(By.ID, "vg-tooltip-element").text, 20)
    for word in ("recipe", "seed", "step", "virtual device hours", "eval/heldout/pass_rate", "FLOPs"):
        assert word in tooltip
    ActionChains(browser).click(point).perform()
    picked = browser.find_element(By.ID, "picked")
    assert wait_for(lambda: "scalerl rollouts" in picked.text, 20)
    assert f"study/runs/{run} --step {step}" in picked.text
    link = picked.find_element(By.TAG_NAME, "a")
    assert link.get_attribute("href").endswith(f"#rollouts-{run}-{shown}")
    link.click()
    target = f"rollouts-{run}-{shown}"
    place = "return document.getElementById(arguments[0]).getBoundingClientRect().top"
    assert wait_for(lambda: -1 <= browser.execute_script(place, target) < 900, 20)  # scrolling rounds to whole pixels


def test_tables_can_be_sorted_and_copied(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.by import By

    open_page(browser, page)
    browser.execute_script("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); }")
    head = next(
        th for th in browser.find_elements(By.CSS_SELECTOR, "figure.table th") if th.text.startswith("P(best A)")
    )
    table = head.find_element(By.XPATH, "ancestor::figure")
    column = len(head.find_elements(By.XPATH, "preceding-sibling::th")) + 1

    def cells() -> list[str]:
        return [td.text for td in table.find_elements(By.CSS_SELECTOR, f"tbody td:nth-child({column})")]

    def numbers() -> list[float]:
        return [float(text) for text in cells() if text != "–"]

    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "ascending" and numbers() == sorted(numbers())
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "descending" and numbers() == sorted(numbers(), reverse=True)
    assert len(numbers()) > 1
    for button in table.find_elements(By.CSS_SELECTOR, ".tools button"):
        button.click()
    csv, latex, markdown = browser.execute_script("return copied")
    # Copied tables have the full labels.
    assert "scalerl+loss=dapo" in csv and csv.splitlines()[0].startswith(",Recipe,P(best A),A")
    assert latex.startswith("\\begin{tabular}{llrrrr") and "\\bottomrule" in latex and "90\\%" in latex
    assert markdown.splitlines()[1].startswith("|---|---|--:|")


def test_without_scripts_the_static_figure_and_tables_are_shown(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.by import By

    open_page(browser, page)  # sets the width, which an earlier test may have changed
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        static = browser.find_element(By.CSS_SELECTOR, ".static svg")
        assert static.is_displayed() and static.size["height"] > 200
        assert not browser.find_elements(By.ID, "interactive") and not browser.find_elements(By.TAG_NAME, "button")
        assert "How to read this page" in browser.find_element(By.TAG_NAME, "body").text
        assert "CUDA out of memory" in browser.find_element(By.TAG_NAME, "body").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_the_printed_page_has_figures_but_no_buttons(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.by import By

    open_page(browser, page, width=800, media="print")
    assert browser.find_element(By.CSS_SELECTOR, "#chart-curves svg").is_displayed()
    assert not any(button.is_displayed() for button in browser.find_elements(By.TAG_NAME, "button"))
