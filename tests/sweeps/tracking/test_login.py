"""Tests with a tracking server that requires a login, started as documented for machines with several users."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sweeps.port import free_port
from tests import forked
from tests.place import STEPS, Place

pytestmark = pytest.mark.slow
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """A running `mlflow server --app-name basic-auth`."""

    port: int
    password: str
    folder: Path

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def login(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": self.password}

    def status_without_login(self) -> int:
        """Return the HTTP status of a request without a login; 0 without an answer."""
        try:
            with urllib.request.urlopen(
                f"{self.uri}/api/2.0/mlflow/experiments/search?max_results=1", timeout=5
            ) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlflow")
    here = Server(free_port(), secrets.token_urlsafe(24), folder)
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--host", "127.0.0.1"),
        *("--port", str(here.port), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    server_secrets = {
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        "MLFLOW_AUTH_ADMIN_PASSWORD": here.password,
    }
    with (folder / "server.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **server_secrets},
            stdout=log,
            stderr=log,
            umask=0o077,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not here.status_without_login():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.txt").read_text()
            time.sleep(0.2)
        yield here
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launch(place: Place, name: str, uri: str, **login: str) -> subprocess.CompletedProcess[str]:
    arguments = place.study(name, "seed=0", f"mlflow.uri={uri}")
    return forked.run(
        [sys.executable, *arguments], cwd=place.root, env={**place.environment(), **login}, timeout=PATIENCE_S
    )


@pytest.mark.full
def test_a_launch_without_a_login_is_refused_in_one_line_and_creates_nothing(tmp_path: Path, server: Server) -> None:
    assert server.status_without_login() == 401
    for login in ({}, {**server.login, "MLFLOW_TRACKING_PASSWORD": "a-wrong-one"}):
        result = launch(Place(tmp_path, light=True), "refused", server.uri, **login)
        assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert "You are not authenticated" in result.stderr
        assert not (tmp_path / "refused").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "inline", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in variables", "in the address"]
)
def test_a_study_with_a_login_is_tracked_and_stores_no_password(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    from mlflow import MlflowClient

    name = f"study{int(inline)}"
    address = server.uri.replace("//", f"//admin:{server.password}@") if inline else server.uri
    result = launch(Place(tmp_path, light=True), name, address, **({} if inline else server.login))
    assert result.returncode == 0, result.stderr
    (tmp_path / "said.txt").write_text(result.stdout + result.stderr)
    for variable, value in server.login.items():
        monkeypatch.setenv(variable, value)
    client = MlflowClient(server.uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == name]
    runs = client.search_runs([experiment.experiment_id])
    (member,) = [run for run in runs if run.data.tags["kind"] == "member"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    losses = client.get_metric_history(member.info.run_id, "train/loss")
    assert [point.step for point in losses] == list(range(1, STEPS + 1))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if server.password.encode() in path.read_bytes()]


@pytest.mark.full
def test_only_the_owner_can_read_the_servers_files(server: Server) -> None:
    """The documentation starts the server under `umask 077`, because basic_auth.db contains passwords."""
    for name in ("basic_auth.db", "mlflow.db"):
        assert (server.folder / name).stat().st_mode & 0o077 == 0
