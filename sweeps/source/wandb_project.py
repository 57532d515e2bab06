"""Read `wandb:entity/project`: the runs of a W&B project, with their whole history, through the GraphQL API.

`wandb:entity/project/run` is one run. The server is `WANDB_BASE_URL`, or else W&B's public server. The key is
`WANDB_API_KEY`, or else the one that `wandb login` stored in `~/.netrc`. Only the standard library is needed, and
nothing is written.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from sweeps.errors import UserError
from sweeps.source.collected import FAILED, FINISHED, RUNNING, Collected
from sweeps.source.log import add_logs
from sweeps.source.text import parse_json_text, short
from sweeps.source.wandb_local import of_run

NAME = "W&B project"
PREFIX = "wandb:"
SERVER = "https://api.wandb.ai"
RUNS_PAGE, ROWS_PAGE, TIMEOUT_S = 50, 1000, 60.0
_STATES = {
    "running": RUNNING,
    "pending": RUNNING,
    "finished": FINISHED,
    **dict.fromkeys(("failed", "crashed", "killed"), FAILED),
}

_RUNS = """
query Runs($project: String!, $entity: String!, $cursor: String, $perPage: Int, $order: String) {
  project(name: $project, entityName: $entity) {
    runs(after: $cursor, first: $perPage, order: $order) {
      edges { node { name displayName state group config historyKeys } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
"""
_HISTORY = """
query HistoryPage($entity: String!, $project: String!, $run: String!, $minStep: Int64!, $maxStep: Int64!, $pageSize: Int!) {
  project(name: $project, entityName: $entity) {
    run(name: $run) { history(minStep: $minStep, maxStep: $maxStep, samples: $pageSize) }
  }
}
"""  # noqa: E501


def matches_text(source: str) -> bool:
    """Return whether a source is a W&B project (`wandb:...`) instead of a path."""
    return source.startswith(PREFIX)


def read_project(source: str, into: Collected) -> None:
    """Add the runs of a project, or the single run that the source names.

    Raises:
        UserError: the project or run does not exist, the server does not answer or needs a key, or there is no metric.
    """
    parts = source.removeprefix(PREFIX).strip("/").split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UserError(f"{short(source)}: give wandb:entity/project, or wandb:entity/project/run")
    entity, project, only_run = parts[0], parts[1], parts[2] if len(parts) == 3 else None
    where = f"{PREFIX}{'/'.join(parts)}"
    server = _Server(where)
    logs = []
    for run in server.runs(entity, project):
        if only_run in (None, run["name"], run["displayName"]):
            config = {key: _plain(value) for key, value in parse_json_text(run["config"] or "{}").items()}
            if run["group"]:
                config.setdefault("group", run["group"])
            last = int((run["historyKeys"] or {}).get("lastStep", -1))
            rows = list(server.history(entity, project, run["name"], last))
            name = run["displayName"] or run["name"]
            warnings = [f"{run['state']}; its points are used"] if run["state"] in ("failed", "crashed") else []
            if rows:
                state = _STATES.get(run["state"], "")
                logs.append(of_run(name, config, rows, warnings, f"wandb:{run['name']}", state))
    if not logs:
        raise UserError(f"{where}: no run with a history; give a project with runs, as its address has it")
    add_logs(logs, NAME, where, into, None, "the run's name", "_step")


def _plain(value: Any) -> Any:
    """Return a configuration's value, which W&B may wrap in a mapping."""
    return value["value"] if isinstance(value, dict) and "value" in value else value


class _Server:
    """GraphQL endpoint of a W&B server."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._base = os.environ.get("WANDB_BASE_URL", SERVER).rstrip("/")
        key = os.environ.get("WANDB_API_KEY") or self._stored_key()
        login = base64.b64encode(f"api:{key}".encode()).decode() if key else None
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Basic {login}"} if login else {})}

    def _stored_key(self) -> str | None:
        path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        try:
            login = netrc.netrc(path).authenticators(urlsplit(self._base).hostname or "")
        except (OSError, netrc.NetrcParseError):
            return None
        return login[2] if login is not None else None

    def runs(self, entity: str, project: str) -> Iterator[dict[str, Any]]:
        """Yield the runs of a project, the oldest first.

        Raises:
            UserError: the project does not exist.
        """
        cursor = None
        while True:
            paging = {"cursor": cursor, "perPage": RUNS_PAGE, "order": "+created_at"}
            result = self._query(_RUNS, {"entity": entity, "project": project, **paging})["project"]
            if result is None:
                raise UserError(f"{self._where}: no such project on {self._base}, or none that this key may read")
            yield from (edge["node"] for edge in result["runs"]["edges"])
            page = result["runs"]["pageInfo"]
            if not page["hasNextPage"]:
                return
            cursor = page["endCursor"]

    def history(self, entity: str, project: str, run: str, last: int) -> Iterator[dict[str, Any]]:
        """Yield all rows of a run up to its last step, without sampling."""
        for first in range(0, last + 1, ROWS_PAGE):
            # W&B does not sample if no more rows are requested than there are steps.
            window = {"minStep": first, "maxStep": min(first + ROWS_PAGE, last + 1), "pageSize": ROWS_PAGE}
            page = self._query(_HISTORY, {"entity": entity, "project": project, "run": run, **window})
            yield from (parse_json_text(line) for line in page["project"]["run"]["history"] or ())

    def _query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Send a query and return the data of the answer.

        Raises:
            UserError: the server does not answer, refuses, or does not answer with JSON.
        """
        body = json.dumps({"query": query, "variables": variables}).encode()
        try:
            with urlopen(Request(f"{self._base}/graphql", body, self._headers), timeout=TIMEOUT_S) as answer:
                reply = json.load(answer)
        except HTTPError as error:
            remedy = "set WANDB_API_KEY, or `wandb login`" if error.code in (401, 403) else "try again later"
            raise UserError(f"{self._where}: {self._base} answers {error.code} {error.reason}; {remedy}") from error
        except (URLError, OSError, ValueError) as error:
            reason = short(str(getattr(error, "reason", error)))
            raise UserError(f"{self._where}: {self._base} cannot be asked ({reason}); see WANDB_BASE_URL") from error
        if reply.get("errors"):
            raise UserError(f"{self._where}: {self._base} says: {short(str(reply['errors'][0].get('message')))}")
        data: dict[str, Any] = reply["data"]
        return data
