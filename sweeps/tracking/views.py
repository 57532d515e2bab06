"""Saved views of MLflow's interface: a finished chart behind one link, without clicks.

A view is an experiment tag `mlflow.sharedViewState.<id>` holding the state of MLflow's run page. That state
is internal to MLflow's interface, not an API; tests/sweeps/tracking/test_browser.py tries it with the pinned
version.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.run.files import parse_json
from sweeps.tracking.common import resolve_uri, without_credentials
from sweeps.tracking.store import SWEEP_TAG

VIEW_TAG = "mlflow.sharedViewState."
_DEFLATE = "deflate;"


@dataclass(frozen=True)
class ChartRange:
    """Axis limits of a chart: log10 compute in x, pass rate in y."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    @staticmethod
    def around(x: Sequence[float], y: Sequence[float]) -> ChartRange:
        """Return the range of the data with a margin, y limited to -0.02 to 1.02."""
        x, y = list(x) or [0.0, 1.0], list(y) or [0.0, 1.0]
        x_pad = 0.04 * (max(x) - min(x)) or 0.5
        y_pad = 0.06 * (max(y) - min(y)) or 0.05
        bounds = (min(x) - x_pad, max(x) + x_pad, max(min(y) - y_pad, -0.02), min(max(y) + y_pad, 1.02))
        return ChartRange(*(round(bound, 4) for bound in bounds))


def _state(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [],
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOW_ALL",
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "groupsExpanded": {},
        "autoRefreshEnabled": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "compareRunSections": [],
        "compareRunCharts": [],
    }
    return base | changes


def _section(name: str) -> dict[str, Any]:
    return {
        "uuid": "s",
        "name": name,
        "display": True,
        "isReordered": False,
        "deleted": False,
        "isGenerated": False,
        "columns": 1,
        "cardHeight": 440,
    }


_CHART = {
    "uuid": "c1",
    "metricSectionId": "s",
    "deleted": False,
    "isGenerated": False,
    "runsCountToCompare": 100,
}


def scaling_state(sweep_key: str, y_key: str, x_key: str, shown: ChartRange) -> dict[str, Any]:
    """Make the view state with points, curve and band of one sweep: grouped by `series`, x the logged log10 compute.

    `curve/fit` is drawn too (dashed): in a band that is not symmetric the group's line is the mean of three.
    """
    chart = _CHART | {
        "type": "LINE",
        "metricKey": y_key,
        "selectedMetricKeys": [y_key, "curve/fit"],
        "xAxisKey": "metric",
        "selectedXAxisMetricKey": x_key,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": False,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {"xMin": shown.x_min, "xMax": shown.x_max, "yMin": shown.y_min, "yMax": shown.y_max},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
    }
    return _state(
        # Runs without the metric (the parent, a recipe whose fit was refused) would only crowd the legend.
        searchFilter=f"tags.`{SWEEP_TAG}` = '{sweep_key}' AND metrics.`{y_key}` >= 0",
        groupBy={"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "series"}]},
        compareRunSections=[_section("Scaling")],
        compareRunCharts=[chart],
    )


def ranking_state(sweep_key: str, charted: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Make the view state of a sweep's fit runs, best A first: parallel coordinates of `charted`, table of `columns`.

    A run that lacks a charted metric is not drawn; the last one gives the colour.
    """
    chart = _CHART | {"type": "PARALLEL", "selectedParams": ["recipe"], "selectedMetrics": list(charted)}
    return _state(
        searchFilter=f"tags.`{SWEEP_TAG}` = '{sweep_key}' AND tags.kind = 'fit'",
        orderByKey="metrics.`fit/A`",
        selectedColumns=[*(f"metrics.`{key}`" for key in columns), "tags.`fit.verdict`"],
        compareRunSections=[_section("Ranking")],
        compareRunCharts=[chart],
    )


def encode_view(name: str, state: dict[str, Any], created_ms: int) -> str:
    """Encode a view as the value of its tag, compressed (a tag may hold 20,000 characters, older servers 5,000)."""
    packed = base64.b64encode(zlib.compress(json.dumps(state, allow_nan=False).encode())).decode()
    return json.dumps({"name": name, "createdAt": created_ms, "state": _DEFLATE + packed})


def decode_view(value: str) -> dict[str, Any]:
    """Decode the state inside a view's tag, compressed or plain.

    Raises:
        ValueError: not a view.
    """
    state = parse_json(value)["state"]
    if state.startswith(_DEFLATE):
        state = zlib.decompress(base64.b64decode(state[len(_DEFLATE) :])).decode()
    decoded = parse_json(state)
    if not isinstance(decoded, dict):
        raise ValueError("the view's state is no object")
    return decoded


def link(experiment_id: str, view_id: str) -> str:
    """Return the URL fragment after the host that opens a view as charts."""
    return (
        f"#/experiments/{experiment_id}/runs?viewStateShareKey={view_id}"
        "&compareRunsMode=CHART&workflowType=machine_learning"
    )


@dataclass(frozen=True)
class UiCommand:
    """Shell command that opens a store's interface (None where a server already runs), and the full address."""

    command: str | None
    url: str

    def __str__(self) -> str:
        return self.url if self.command is None else f"{self.command}\n{self.url}"


def ui_command(uri: str, link: str, port: int = 5000) -> UiCommand:
    """Return the command that opens MLflow's interface on this store, on loopback only, and the link's full address.

    Raises:
        UserError: a URI that MLflow does not open.
    """
    uri = resolve_uri(uri)
    if uri.startswith(("http://", "https://")):
        return UiCommand(None, f"{without_credentials(uri)}/{link}")
    store = shlex.quote(without_credentials(uri))
    return UiCommand(
        f"mlflow ui --backend-store-uri {store} --host 127.0.0.1 --port {port} --workers 1",
        f"http://127.0.0.1:{port}/{link}",
    )
