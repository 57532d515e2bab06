"""Takes the screenshots of docs/guide: `python -m docs.site screenshots`. Needs Chromium, as the browser tests do.

They show `examples/study`: its report, and in MLflow's interface the views that `scalerl publish` prints; and, where
`python -m docs.site build` was called before, this site on a screen and on a phone, light and dark.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.site.source import ROOT

WIDTH = 1400
# A page of the site with a figure and a table, and each screen it is shown on: width, height, colour scheme.
SITE_PAGE = "reference/concepts.html"
SCREENS = ((WIDTH, 844, "light"), (390, 844, "dark"))


def take(folder: Path) -> list[Path]:
    """Write all screenshots below `folder` and return their paths."""
    from sweeps.cli.main import main
    from sweeps.port import free_port
    from tests.chromium import chromium, wait_for
    from tests.mlflow_ui import charts, interface, show, table

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(ROOT / "examples" / "study", place / "study")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main(["report", str(place / "study"), "-o", str(place / "report.html"), "--title", "Leave one out"])
            main(["publish", str(place / "study"), "--mlflow", f"sqlite:///{place}/mlflow.db"])
        port = free_port()
        command, chart, *tables = (line.replace("5000", str(port)) for line in said.getvalue().splitlines()[-4:])

        with chromium(place / "profile", logs=True) as browser:
            metrics = {"width": WIDTH, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get((place / "report.html").as_uri())
            wait_for(lambda: browser.execute_script("return document.documentElement.dataset.drawn"))
            browser.execute_script(
                "document.getElementById('bands').click(); document.querySelector('h2').scrollIntoView()"
            )
            wait_for(lambda: browser.execute_script("return document.querySelector('#chart-curves .mark-area path')"))
            written.append(_small(browser.get_screenshot_as_png(), folder / "report.png"))
            with interface(command, f"http://127.0.0.1:{port}", place):
                show(browser, chart.split(": ")[1], WIDTH, 1280)
                # Wait until every line appears twice: MLflow loads them one by one.
                seen: list[int] = []

                def drawn() -> bool:
                    seen.append(sum(len(trace["x"]) for own in charts(browser) for trace in own["traces"]))
                    return len(charts(browser)) > 1 and seen[-1] > 0 and seen[-3:].count(seen[-1]) == 3

                wait_for(drawn)
                written.append(_small(browser.get_screenshot_as_png(), folder / "mlflow_chart.png"))
                for line, picture in zip(tables, ("mlflow_recipes.png", "mlflow_runs.png"), strict=True):
                    show(browser, line.split(": ")[1].strip(), WIDTH, 700)
                    wait_for(lambda: len(table(browser)["rows"]) > 1)
                    written.append(_small(browser.get_screenshot_as_png(), folder / picture))
    return written


def take_site(site: Path, path: Path, screens: Sequence[tuple[int, int, str]] = SCREENS) -> Path:
    """Write one picture of the built site below `site`, its screens side by side, and return its path."""
    from PIL import Image

    from tests.chromium import chromium

    shots = []
    with TemporaryDirectory() as name, chromium(Path(name)) as browser:
        for width, height, scheme in screens:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.get((site / SITE_PAGE).as_uri())
            browser.execute_script("localStorage.clear()")  # it keeps the scheme of the first page that was opened
            browser.refresh()
            shots.append(Image.open(io.BytesIO(browser.get_screenshot_as_png())))
    gap = 10
    wide = sum(shot.width + gap for shot in shots) - gap
    beside = Image.new("RGB", (wide, max(shot.height for shot in shots)), "white")
    left = 0
    for shot in shots:
        beside.paste(shot, (left, 0))
        left += shot.width + gap
    png = io.BytesIO()
    beside.save(png, "png")
    return _small(png.getvalue(), path)


def _small(png: bytes, path: Path) -> Path:
    """Write a screenshot with 256 colours, which halves it; small areas keep theirs."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return path
