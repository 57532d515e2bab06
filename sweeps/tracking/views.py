"""Make saved views of MLflow's interface. A link to a view opens a configured chart or table.

A view is an experiment tag `mlflow.sharedViewState.<id>` with the state of MLflow's run page. This state is internal to
MLflow's interface and not an API. tests/sweeps/tracking/test_browser.py checks it with the pinned version.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.tracking.colours import LINE_TAG, group_id
from sweeps.tracking.common import ChartKeys, resolve_uri, without_credentials
from sweeps.tracking.store import SWEEP_TAG

VIEW_TAG = "mlflow.sharedViewState."
RANK_KEY = "rank/place"
# Metric of the fit run and both band runs. Their mean is the fitted curve, and their range the band.
BAND_KEY = "Fitted pass rate"


@dataclass(frozen=True)
class ChartRange:
    """Axis limits of a chart. x is compute or its logarithm, y the pass rate."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    @staticmethod
    def around(x: Sequence[float], y: Sequence[float]) -> ChartRange:
        """Return the range of the data with a margin. y is limited to -0.02 to 1.02."""
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


def _section(uuid: str, name: str) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "name": name,
        "display": True,
        "isReordered": False,
        "deleted": False,
        "isGenerated": False,
        "columns": 1,
        "cardHeight": 400,
    }


def _chart(section_uuid: str, **fields: Any) -> dict[str, Any]:
    common = {"uuid": f"chart-{section_uuid}", "metricSectionId": section_uuid, "deleted": False, "isGenerated": False}
    return common | {"runsCountToCompare": 100} | fields


def _line_chart(section_uuid: str, y_key: str, x_key: str, shown: ChartRange) -> dict[str, Any]:
    """Return a chart of fits and bands, and of the evaluations `y_key`, over the metric `x_key`.

    MLflow draws a run's first metric solid and its second one dashed, with markers if there are fewer than 60 points.
    So the fits are the first metric. The evaluations are the second: dashed lines with markers, because MLflow cannot
    draw points without lines.
    """
    return _chart(
        section_uuid,
        type="LINE",
        metricKey=BAND_KEY,
        selectedMetricKeys=[BAND_KEY, y_key],
        xAxisKey="metric",
        selectedXAxisMetricKey=x_key,
        useGlobalXaxisKey=False,
        useGlobalLineSmoothing=False,
        lineSmoothness=0,
        xAxisScaleType="linear",
        scaleType="linear",
        range={"xMin": shown.x_min, "xMax": shown.x_max, "yMin": shown.y_min, "yMax": shown.y_max},
        yAxisKey="metric",
        yAxisExpressions=[],
        ignoreOutliers=False,
    )


def scaling_state(
    sweep_key: str, keys: ChartKeys, logarithmic: ChartRange, linear: ChartRange, lines: Sequence[str]
) -> dict[str, Any]:
    """Make the state of a view with points, curves and bands of one study, over log10 of compute and over compute.

    Runs are grouped by the tag `line`, with the values `lines`. The groups are collapsed, so that the list next to the
    chart has one row per line and hides the runs that store the bands. MLflow draws only the first hundred runs, so
    runs are sorted by rank.
    """
    return _state(
        # Runs without the metric (the parent, and recipes without a fitted curve) would only crowd the legend.
        searchFilter=f"tags.`{SWEEP_TAG}` = '{sweep_key}' AND metrics.`{keys.log10}` > -1000",
        orderByKey=f"metrics.`{RANK_KEY}`",
        orderByAsc=True,
        groupBy={"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": LINE_TAG}]},
        groupsExpanded={group_id(value): False for value in lines},
        compareRunSections=[
            # MLflow cuts titles at about 35 characters. The charts' axes show their unit.
            _section("log", "Pass rate over log10 of compute"),
            _section("linear", "Pass rate over compute, from 0"),
        ],
        compareRunCharts=[
            _line_chart("log", keys.rate, keys.log10, logarithmic),
            _line_chart("linear", keys.whole, keys.compute, linear),
        ],
    )


def ranking_state(sweep_key: str, charted: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Make the state of a view with a study's members, sorted by rank: a table and parallel coordinates.

    Args:
        sweep_key: value of the tag `scalerl.sweep`.
        charted: metrics of the parallel coordinates; the last determines the colour. A run that lacks one is not drawn.
        columns: columns of the table, by MLflow's names; their widths fit a page of 1400 pixels.
    """
    widths = {"attributes.`Run Name`": 240, "runDateAndNestInfo": 140}
    order = [*widths, *columns]
    widths |= {column: 80 if column.startswith("metrics.`fit/") else 105 for column in columns}
    widths[columns[-1]] = 130
    return _state(
        searchFilter=f"tags.`{SWEEP_TAG}` = '{sweep_key}' AND tags.kind = 'member'",
        orderByKey=f"metrics.`{RANK_KEY}`",
        orderByAsc=True,
        selectedColumns=list(columns),
        columnOrder=order,
        columnWidths=widths,
        compareRunSections=[_section("ranking", "Ranking")],
        compareRunCharts=[_chart("ranking", type="PARALLEL", selectedParams=[], selectedMetrics=list(charted))],
    )


def recipes_state(sweep_key: str, charted: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Make the state of a view with a study's recipes, sorted by rank: a table of their fits, see `ranking_state`."""
    return ranking_state(sweep_key, charted, columns) | {
        "searchFilter": f"tags.`{SWEEP_TAG}` = '{sweep_key}' AND tags.kind = 'fit'",
        "compareRunSections": [_section("ranking", "Recipes")],
    }


def encode_view(name: str, state: dict[str, Any], created_ms: int) -> str:
    """Encode a view as the value of its tag.

    It is compressed: tags have at most 20,000 characters, on old servers 5,000.
    """
    packed = base64.b64encode(zlib.compress(json.dumps(state, allow_nan=False).encode())).decode()
    return json.dumps({"name": name, "createdAt": created_ms, "state": f"deflate;{packed}"})


def link(experiment_id: str, view_id: str, mode: str = "CHART") -> str:
    """Return the URL fragment that opens a view, as charts (mode CHART) or as a table of runs (mode TABLE)."""
    return (
        f"#/experiments/{experiment_id}/runs?viewStateShareKey={view_id}"
        f"&compareRunsMode={mode}&workflowType=machine_learning"
    )


@dataclass(frozen=True)
class UiCommand:
    """Shell command that starts MLflow's interface (None if the store is a server), and the full address of a view."""

    command: str | None
    url: str


def ui_command(uri: str, link: str, port: int = 5000) -> UiCommand:
    """Return the command that starts MLflow's interface for a store, on loopback only, and the full address of a link.

    Raises:
        UserError: MLflow cannot open the URI.
    """
    uri = resolve_uri(uri)
    if uri.startswith(("http://", "https://")):
        return UiCommand(None, f"{without_credentials(uri)}/{link}")
    store = shlex.quote(without_credentials(uri))
    return UiCommand(
        f"mlflow ui --backend-store-uri {store} --host 127.0.0.1 --port {port} --workers 1",
        f"http://127.0.0.1:{port}/{link}",
    )
