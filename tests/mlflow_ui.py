"""MLflow's own interface in a browser: the printed command started, a page opened, its charts and its list read."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Every chart: the title of its x axis, and of each line or band its group, metric, colours and points.
CHARTS = """
return JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map(plot => ({
  x: (plot.querySelector('.xtitle') || {}).textContent || '',
  traces: (plot.data || []).map(t => ({
    group: t.uuid || '', metric: t.metricKey || '', mode: t.mode || '', fill: t.fill || '', type: t.type || '',
    dash: (t.line || {}).dash || '',
    color: (t.marker || {}).color || t.fillcolor || '', x: Array.from(t.x || []), y: Array.from(t.y || []),
  })),
})));
"""
# The table of runs: heads and rows by column, in the order in which they are seen, with where a head ends.
TABLE = """
const seen = node => node.getBoundingClientRect();
const heads = [...document.querySelectorAll('.ag-header-cell')].sort((a, b) => seen(a).left - seen(b).left);
const rows = {};
for (const cell of document.querySelectorAll('.ag-row .ag-cell')) {
  const row = rows[cell.closest('.ag-row').getAttribute('row-index')] ||= {};
  row[cell.getAttribute('col-id')] = cell.innerText.trim();
}
return JSON.stringify({
  heads: heads.map(head => [head.getAttribute('col-id'), seen(head).right]),
  rows: Object.keys(rows).sort((a, b) => a - b).map(index => rows[index]),
});
"""
# What MLflow 3.17 itself writes there: it asks whether it has logins, and resizes a chart within a resize.
ITS_OWN = ("ajax-api/2.0/mlflow/users/current", "ResizeObserver loop")


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


def show(browser: Any, url: str, width: int = 1400, height: int = 1350, dark: bool = False) -> None:
    """Open a page afresh, with the panel of MLflow's assistant closed, in one of its two themes."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    stored = {
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        "_mlflow_dark_mode_toggle_enabled": str(dark).lower(),
    }
    source = f"if (location.protocol === 'http:') Object.assign(localStorage, {json.dumps(stored)})"
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.get("about:blank")  # a change of the fragment alone does not load a page again
    browser.get(url)


def charts(browser: Any) -> list[dict[str, Any]]:
    """The charts of the page, top to bottom."""
    found: list[dict[str, Any]] = json.loads(browser.execute_script(CHARTS))
    return found


def table(browser: Any) -> dict[str, Any]:
    """The list of runs on the page."""
    found: dict[str, Any] = json.loads(browser.execute_script(TABLE))
    return found


def console_errors(browser: Any) -> list[str]:
    """Errors since it was last asked, without those that MLflow's pages always write."""
    entries = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in entries if not any(known in message for known in ITS_OWN)]
