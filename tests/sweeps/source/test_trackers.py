"""Tests of trackers' stores as sources: W&B's folders and projects, and Trackio's database."""

from __future__ import annotations

import base64
import gzip
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from sweeps.errors import UserError
from sweeps.source import load, wandb_project
from sweeps.source.collected import LoadedStudy
from sweeps.source.places import Place
from tests.paths import ROOT

TRACKIO = ROOT / "tests" / "data" / "trackio" / "mine.db.gz"


def points(study: LoadedStudy) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return (compute, reward) pairs by recipe and seed."""
    by_recipe_and_seed: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for curve in study.curves:
        for seed, x, y in zip(curve.seed, curve.compute, curve.reward, strict=True):
            by_recipe_and_seed.setdefault((curve.recipe, str(seed)), []).append((float(x), round(float(y), 6)))
    return by_recipe_and_seed


# --- W&B's folders -------------------------------------------------------------------------------------------


def message(kind: str, **values: Any) -> bytes:
    """Return a record of W&B: a run, or a row of its history."""
    record = wandb_internal_pb2.Record()
    if kind == "run":
        record.run.display_name = values.pop("name")
        items = record.run.config.update
    else:
        record.history.step.num = values.pop("step")
        items = record.history.item
    for key, value in values.items():
        items.add(key=key, value_json=json.dumps(value))
    text: bytes = record.SerializeToString()
    return text


def log_of(path: Path, *messages: bytes) -> Path:
    """Write a LevelDB log: records are split into fragments that do not cross the end of a 32 KiB block."""
    raw = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for data in messages:
        first, remainder = True, data
        while first or remainder:
            block_left = 32768 - len(raw) % 32768
            if block_left < 7:
                raw += bytes(block_left)
                continue
            part, remainder = remainder[: block_left - 7], remainder[block_left - 7 :]
            kind = (1 if not remainder else 2) if first else (4 if not remainder else 3)
            raw += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            first = False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def run_log(folder: Path, seed: int, note: str = "") -> Path:
    rows = [
        message("row", step=step, **{"eval/reward": 0.1 * step + seed / 100, "train/num_tokens": 1000 * step})
        for step in range(1, 6)
    ]
    run = message("run", name=f"grpo-{seed}", seed=seed, recipe="grpo", note=note)
    return log_of(folder / f"offline-run-2026_{seed}" / f"run-abc{seed}.wandb", run, *rows)


EXPECTED = [(1000.0 * step, round(0.1 * step, 6)) for step in range(1, 6)]


@pytest.mark.parametrize("note", ["", "n" * 32700, "n" * 100_000], ids=["one block", "at its end", "several"])
def test_a_folder_of_offline_runs_is_read(note: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        run_log(tmp_path / "wandb", seed, note)
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-2026_1")
    points_by_run = points(load([tmp_path / "wandb"]))
    assert set(points_by_run) == {("grpo", "0"), ("grpo", "1")}
    assert points_by_run["grpo", "0"] == EXPECTED
    assert points_by_run["grpo", "1"] == [(x, round(y + 0.01, 6)) for x, y in EXPECTED]
    assert points(load([next(tmp_path.rglob("run-abc0.wandb"))])) == {("grpo", "0"): points_by_run["grpo", "0"]}


def test_our_run_in_a_wandb_folder_has_our_default_axis(tmp_path: Path) -> None:
    """The default is the same as for journals and CSVLogger: virtual device hours if present, else device hours."""
    names = ("compute/flops", "compute/tokens", "compute/device_hours", "compute/virtual_device_hours")
    for count in (3, 4):
        rows = [
            message("row", step=s, **{"eval/math/pass_rate": s / 9}, **{names[i]: i * s for i in range(count)})
            for s in range(1, 6)
        ]
        folder_of_count = tmp_path / str(count)
        log_of(folder_of_count / "offline-run-a" / "run-a.wandb", message("run", name="a"), *rows)
        study = load([folder_of_count])
        assert (
            study.curves[0].axis == names[count - 1]
            and "our default: virtual device hours, else device hours" in study.mapping[0]
        )
        assert load([folder_of_count], x="compute/flops").curves[0].axis == "compute/flops"


@pytest.mark.parametrize("cut", [1, 30, 90])
def test_a_truncated_log_is_read_up_to_its_end(cut: int, tmp_path: Path) -> None:
    path = run_log(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-cut])
    study = load([path])
    assert points(study)["grpo", "0"] == EXPECTED[: len(points(study)["grpo", "0"])]
    assert len(points(study)["grpo", "0"]) < 5
    assert any("cut off or damaged at byte" in warning for curve in study.curves for warning in curve.warnings)


def test_a_damaged_record_ends_the_log(tmp_path: Path) -> None:
    path = run_log(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    assert len(points(load([path]))["grpo", "0"]) == 4


def test_a_log_without_metrics_is_refused(tmp_path: Path) -> None:
    path = log_of(tmp_path / "run-a.wandb", message("run", name="x"))
    with pytest.raises(UserError, match="no metric in 1 log of W&B"):
        load([path])


@pytest.mark.slow
def test_a_log_written_by_wandb_is_read(tmp_path: Path) -> None:
    script = """
import wandb
config = {"seed": 3, "recipe": "mine"}
run = wandb.init(project="mine", name="grpo", config=config, settings=wandb.Settings(console="off"))
for step in range(1, 6):
    run.log({"eval/reward": 0.1 * step, "train/num_tokens": 1000 * step}, step=step)
run.finish()
"""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=environment, capture_output=True)
    assert points(load([tmp_path / "wandb"])) == {("mine", "3"): EXPECTED}


# --- W&B's projects ------------------------------------------------------------------------------------------


class Stand(BaseHTTPRequestHandler):
    """A fake W&B server with one project of three runs, two runs per page. The API key is `secret`."""

    runs: tuple[tuple[str, int], ...] = (("aaa", 0), ("bbb", 1), ("ccc", 2))
    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        login = base64.b64decode(self.headers.get("Authorization", "Basic ").split()[-1] + "==").decode()
        variables = body["variables"]
        type(self).requests.append(variables)
        if login != "api:secret":
            self.send_error(401, "Unauthorized")
            return
        answer = json.dumps({"data": {"project": self._project(variables)}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def _project(self, variables: dict[str, Any]) -> Any:
        if (variables["entity"], variables["project"]) != ("me", "mine"):
            return None
        if "run" in variables:
            seed = dict(self.runs)[variables["run"]]
            rows = [
                {"_step": step, "eval/reward": step / 5000 + seed / 1000, "train/num_tokens": 10 * step}
                for step in range(0, 2500, 50)
            ]
            kept = [row for row in rows if variables["minStep"] <= row["_step"] < variables["maxStep"]]
            return {"run": {"history": [json.dumps(row) for row in kept]}}
        first = int(variables["cursor"] or 0)
        nodes = [
            {
                "name": name, "displayName": f"grpo-seed{seed}", "group": "",
                "state": "crashed" if seed == 2 else "finished",
                "config": json.dumps({"lr": {"value": 1e-4}, "_wandb": {"value": {}}}),
                "historyKeys": {"lastStep": 2450},
            }
            for name, seed in self.runs
        ]  # fmt: skip
        page = nodes[first : first + 2]
        more = {"endCursor": str(first + 2), "hasNextPage": first + 2 < len(nodes)}
        return {"runs": {"edges": [{"node": node} for node in page], "pageInfo": more}}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Stand]]:
    Stand.requests = []
    http = HTTPServer(("127.0.0.1", 0), Stand)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{http.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Stand
    http.shutdown()
    http.server_close()


def test_a_project_is_read_over_several_pages(server: type[Stand]) -> None:
    study = load(["wandb:me/mine"])
    points_by_run = points(study)
    assert set(points_by_run) == {("grpo", "0"), ("grpo", "1"), ("grpo", "2")}
    assert points_by_run["grpo", "0"] == [(10.0 * step, step / 5000) for step in range(0, 2500, 50)], (
        "every row must be read, over three pages"
    )
    assert any("crashed; its points are used" in warning for curve in study.curves for warning in curve.warnings)
    windows = [(request["minStep"], request["maxStep"]) for request in server.requests if request.get("run") == "aaa"]
    assert windows == [(0, 1000), (1000, 2000), (2000, 2451)]
    assert any("W&B project" in line and "compute <- train/num_tokens" in line for line in study.shown)
    assert Place("wandb:me/mine").title == "mine"


def test_one_run_of_a_project_is_read_by_id_or_name(server: type[Stand]) -> None:
    assert set(points(load(["wandb:me/mine/bbb"]))) == {("grpo", "1")}
    assert set(points(load(["wandb:me/mine/grpo-seed2"]))) == {("grpo", "2")}


def test_the_key_stored_by_wandb_login_is_used(
    server: type[Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine 127.0.0.1\n  login user\n  password secret\n")
    assert len(points(load(["wandb:me/mine"]))) == 3


@pytest.mark.parametrize(
    ("source", "key", "said"),
    [
        ("wandb:me/mine", "wrong", "answers 401 Unauthorized; set WANDB_API_KEY, or `wandb login`"),
        ("wandb:me/other", "secret", "no such project on http://127.0.0.1"),
        ("wandb:me/mine/ddd", "secret", "no run with a history"),
        ("wandb:me", "secret", "give wandb:entity/project, or wandb:entity/project/run"),
        ("wandb:me//x", "secret", "give wandb:entity/project"),
    ],
)
def test_missing_projects_and_wrong_keys_are_refused(
    server: type[Stand], monkeypatch: pytest.MonkeyPatch, source: str, key: str, said: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(UserError, match=said) as error:
        load([source])
    assert key not in str(error.value) and "\n" not in str(error.value)


def test_an_unreachable_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_project, "TIMEOUT_S", 2.0)
    with pytest.raises(UserError, match=r"cannot be asked .*; see WANDB_BASE_URL"):
        load(["wandb:me/mine"])


# --- Trackio -------------------------------------------------------------------------------------------------


@pytest.fixture
def trackio(tmp_path: Path) -> Path:
    """A database written by Trackio 0.43: two runs of eight steps, evaluated at every second step."""
    path = tmp_path / "store" / "mine.db"
    path.parent.mkdir()
    path.write_bytes(gzip.decompress(TRACKIO.read_bytes()))
    return path


def test_a_trackio_database_is_read_and_not_changed(trackio: Path) -> None:
    before = trackio.read_bytes()
    study = load([trackio])
    assert points(study) == {
        ("grpo", str(seed)): [(1000.0 * step, round(0.05 * step + 0.01 * seed, 6)) for step in (2, 4, 6, 8)]
        for seed in (0, 1)
    }
    assert points(load([trackio.parent])) == points(study), "its folder must give the same points"
    assert trackio.read_bytes() == before and len(list(trackio.parent.iterdir())) == 1, (
        "the database must not be changed"
    )


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE metrics (key TEXT, value FLOAT)")
    connection.commit()
    connection.close()
    with pytest.raises(UserError, match="none of Trackio's; of MLflow's give mlflow:sqlite"):
        load([tmp_path / "other.db"])
    with pytest.raises(UserError, match="no run in this directory"):
        load([tmp_path])


def test_a_damaged_trackio_database_is_refused(trackio: Path) -> None:
    connection = sqlite3.connect(trackio)
    connection.execute("UPDATE metrics SET metrics = '{' WHERE id = 3")
    connection.commit()
    connection.close()
    with pytest.raises(UserError, match="not a readable file of Trackio"):
        load([trackio])
