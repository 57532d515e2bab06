"""Takes the screenshots of docs/guide: `python -m docs.site screenshots`. Needs Chromium, as the browser tests do.

They show `examples/study`: its report, and in MLflow's interface both views that `scalerl publish` prints.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.site.source import ROOT

WIDTH = 1400


def take(folder: Path) -> list[Path]:
    """Write all screenshots below `folder` and return their paths."""
    from sweeps.cli.main import main
    from tests.chromium import chromium, wait_for
    from tests.mlflow_ui import charts, free_port, interface, show, table

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
        command, chart, runs = (line.replace("5000", str(port)) for line in said.getvalue().splitlines()[-3:])

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
                # Until every line stands there twice: MLflow loads them one by one.
                seen: list[int] = []

                def drawn() -> bool:
                    seen.append(sum(len(trace["x"]) for own in charts(browser) for trace in own["traces"]))
                    return len(charts(browser)) > 1 and seen[-1] > 0 and seen[-3:].count(seen[-1]) == 3

                wait_for(drawn)
                written.append(_small(browser.get_screenshot_as_png(), folder / "mlflow_chart.png"))
                show(browser, runs.split(": ")[1].strip(), WIDTH, 700)
                wait_for(lambda: len(table(browser)["rows"]) > 1)
                written.append(_small(browser.get_screenshot_as_png(), folder / "mlflow_runs.png"))
    return written


def _small(png: bytes, path: Path) -> Path:
    """Write a screenshot with 256 colours, which halves it; small areas keep theirs."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return path
