"""Helpers for MLflow's web interface: start it with the printed command, open a page, read its charts and run list."""

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

# JavaScript that returns, per chart, the title of the x axis and each trace's group, metric, colours and points.
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
# JavaScript that returns the run table: column heads from left to right with their right edges, and the rows.
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
# Errors that MLflow 3.17 itself logs: it queries whether it has logins, and resizes a chart while resizing.
ITS_OWN = ("ajax-api/2.0/mlflow/users/current", "ResizeObserver loop")


@contextlib.contextmanager
def interface(command: str, url: str, cwd: Path) -> Iterator[None]:
    """Run the printed command, wait until it answers, and kill its process group at the end."""
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
    """Load a page in the light or dark theme, with the panel of MLflow's assistant closed."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    stored = {
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        "_mlflow_dark_mode_toggle_enabled": str(dark).lower(),
    }
    source = f"if (location.protocol === 'http:') Object.assign(localStorage, {json.dumps(stored)})"
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.get("about:blank")  # a change of the fragment alone does not reload a page
    browser.get(url)


def charts(browser: Any) -> list[dict[str, Any]]:
    """Return the charts of the page, top to bottom."""
    parsed: list[dict[str, Any]] = json.loads(browser.execute_script(CHARTS))
    return parsed


def table(browser: Any) -> dict[str, Any]:
    """Return the table of runs on the page."""
    parsed: dict[str, Any] = json.loads(browser.execute_script(TABLE))
    return parsed


def console_errors(browser: Any) -> list[str]:
    """Return the console errors since the last call, without the errors that MLflow's pages always write."""
    entries = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in entries if not any(known in message for known in ITS_OWN)]
