"""The printed link opens a finished chart: points, curve and band, in Chromium, with no click.

Debian: `apt-get install --no-install-recommends chromium chromium-driver`; selenium is a dev dependency.
Skipped without them, unless CI_ALL=1.
"""

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.run.journal import Journal
from sweeps.tracking import FitSummary, Member, Published, Shipper, TrackedSweep, Tracker, publish, ui_command
from tests.chromium import chromium, need_chromium, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

Y, X = "eval/heldout/pass_rate", "eval/heldout/log10_compute"
RECIPES = {"scalerl": (0.61, 1.8, 2e9), "scalerl+loss=dapo": (0.55, 1.5, 3e9)}
# A plot's name, dash, fill and the ends of its x for every trace of the first chart.
TRACES = """
const plot = document.querySelector('.js-plotly-plot');
return JSON.stringify((plot && plot.data || []).map(t => ({
  name: t.name || '', metric: t.metricKey || '', mode: t.mode || '', fill: t.fill || '',
  color: t.fillcolor || '', x: Array.from(t.x || []), y: Array.from(t.y || []),
})));
"""


def sigmoid(C: Any, A: float, B: float, C_mid: float) -> Any:
    return 0.2 + (A - 0.2) / (1 + (C_mid / C) ** B)


def study(root: Path) -> tuple[Tracker, TrackedSweep, Published]:
    """Two recipes with two seeds, three published fits (one refused): what a finished sweep leaves."""
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
    tracker = Tracker(f"sqlite:///{root}/mlflow.db", "browser study")
    sweep = tracker.open_sweep(root / "sweep", members)
    assert Shipper(tracker, sweep).run_once()
    C = np.logspace(math.log10(2e8), math.log10(2e11), 75)
    fits = [
        FitSummary(
            recipe, "identifiable", "compute/flops", (1e9, 3e10), None, A, A - 0.01, A + 0.02, B, C_mid,
            0.2, 0.008, 0.5, C, *(sigmoid(C, A, B, C_mid) + shift for shift in (0.0, -0.02, 0.03)),
        )
        for recipe, (A, B, C_mid) in RECIPES.items()
    ]  # fmt: skip
    fits.append(FitSummary("scalerl+kl=fixed", "pre_inflection", "compute/flops", reason="no bend seen"))
    return tracker, sweep, publish(fits, tracker, sweep)


@contextlib.contextmanager
def interface(command: str, url: str, cwd: Path) -> Iterator[None]:
    """Run the printed command until it answers; ended by its own process group."""
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with (cwd / "ui.log").open("w") as log:
        process = subprocess.Popen(
            shlex.split(command), cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 180
            while True:
                assert process.poll() is None, (cwd / "ui.log").read_text()[-2000:]
                assert time.monotonic() < deadline, (cwd / "ui.log").read_text()[-2000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.5)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def test_the_link_opens_points_curve_and_band(tmp_path: Path) -> None:
    need_chromium()
    tracker, _, published = study(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ui = ui_command(tracker.uri, published.link, port=port)
    ranking = ui_command(tracker.uri, published.ranking_link, port=port).url
    assert ui.command is not None
    with (
        interface(ui.command, f"http://127.0.0.1:{port}", tmp_path),
        chromium(tmp_path / "profile") as browser,
    ):

        def traces() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(browser.execute_script(TRACES))
            return found if {len(t["x"]) for t in found if t["metric"] == Y} == {30, 75} else []

        browser.get(ui.url)
        drawn = wait_for(traces)
        time.sleep(2)  # the last repaint
        browser.save_screenshot(str(tmp_path / "scaling.png"))
        assert drawn, f"no chart; see {tmp_path}/scaling.png"

        # Four member lines along the logged log10 compute, each its own group.
        points = [t for t in drawn if t["metric"] == Y and len(t["x"]) == 30 and "markers" in t["mode"]]
        log10_C = [math.log10(1e9 * (i + 1)) for i in range(30)]
        assert len(points) == 4
        for line in points:
            assert sorted(line["x"]) == pytest.approx(log10_C)
        # Two fitted curves: the group's mean of the three runs, and the exact curve.
        curves = [t for t in drawn if t["metric"] == Y and len(t["x"]) == 75]
        exact = [t for t in drawn if t["metric"] == "curve/fit" and len(t["x"]) == 75]
        assert curves and exact
        tops = {round(max(t["y"]), 3) for t in exact}
        assert tops == {round(float(sigmoid(2e11, *planted)), 3) for planted in RECIPES.values()}
        # A filled band each, as wide at its end as logged (0.05); those of curve/fit have no width.
        widths = []
        for band in (t for t in drawn if t["fill"] and len(t["x"]) == 151):
            outline = [(x, y) for x, y in zip(band["x"], band["y"], strict=True) if x is not None]
            end = [y for x, y in outline if x == max(x for x, _ in outline)]
            widths.append(max(end) - min(end))
        assert sum(width == pytest.approx(0.05, abs=1e-6) for width in widths) == len(RECIPES)

        browser.get("about:blank")  # a change of the fragment alone does not load the page again
        browser.get(ranking)

        def text() -> str:
            body = str(browser.execute_script("return document.body.innerText"))
            wanted = ("3 matching runs", "Parallel Coordinates", "fit/log10_C_mid", "fit/B", "fit/A")
            return body if all(words in body for words in wanted) else ""

        page = wait_for(text)
        time.sleep(2)
        browser.save_screenshot(str(tmp_path / "ranking.png"))
        assert page, f"no ranking; see {tmp_path}/ranking.png"
        assert page.index("scalerl fit") < page.index("scalerl+loss=dapo fit") < page.index("scalerl+kl=fixed fit")
    print(f"screenshots: {tmp_path}/scaling.png, {tmp_path}/ranking.png")
