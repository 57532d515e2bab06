"""Tests of a run whose vLLM servers are on another node and fail; the node is a network namespace of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest

from lightning_scalerl import TrainBatch
from lightning_scalerl.axes.async_mode import Pipeline
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.vllm.serve import Server, prepare
from lightning_scalerl.measure.probe import P99
from lightning_scalerl.model.load import load_model
from tests.generator.test_vllm_http import plugin  # noqa: F401
from tests.helpers import fit
from tests.test_module import Keep

pytestmark = [pytest.mark.vllm, pytest.mark.full]

TOKEN = "secret"
SPACE, LINK, HERE, THERE = "scalerl-node", "scalerl0", "10.213.77.1", "10.213.77.2"
SILENCE_S = 6.0
OUTAGE_S = 60.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def node() -> Iterator[None]:
    """Create a network namespace with one link to it: the other node."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command ip")
    try:
        ip("netns", "add", SPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        for words in ("link set lo up", f"addr add {THERE}/24 dev eth0", "link set eth0 up"):
            ip("-n", SPACE, *words.split())
        yield
    finally:
        subprocess.run(["ip", "link", "del", LINK], capture_output=True)
        ip("netns", "del", SPACE)


@pytest.fixture
def servers(node: None, plugin: None, tiny_model_path: str) -> Iterator[list[Server]]:  # noqa: F811
    model, running = load_model(tiny_model_path), list[Server]()
    try:
        for port in (8101, 8102):
            server = prepare(
                model,
                Precision("fp32"),
                slots=16,
                capacity=64,
                cache_gib=0.125,
                host=THERE,
                port=port,
                token=TOKEN,
            )
            server.command = ["ip", "netns", "exec", SPACE, *server.command]
            server.start()
            running.append(server)
        for server in running:
            server.wait(300)
        yield running
    finally:
        for server in running:
            server.close()


class Trained(lightning.Callback):
    """Records the admissions of trained groups, and starts a fault at some steps."""

    def __init__(self, faults: dict[int, Any]) -> None:
        self.faults, self.groups = faults, list[int]()
        self.threads = list[threading.Thread]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if isinstance(batch, TrainBatch):
            self.groups += [group.admission for group in batch.groups]
        if (fault := self.faults.pop(trainer.global_step, None)) is not None:
            self.threads.append(threading.Thread(target=fault))
            self.threads[-1].start()


def test_a_run_survives_a_killed_server_a_hanging_server_and_a_cut_link(
    servers: list[Server], tiny_model_path: str, tmp_path: Path
) -> None:
    one, other = servers

    def kill() -> None:
        assert one.process is not None
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.start()

    def hang() -> None:
        assert other.process is not None
        os.killpg(other.process.pid, signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        os.killpg(other.process.pid, signal.SIGCONT)

    def cut() -> None:
        # Cut the servers' end: at this end the route would vanish, and a gateway could answer in the servers' place.
        ip("-n", SPACE, "link", "set", "eth0", "down")
        time.sleep(OUTAGE_S)
        ip("-n", SPACE, "link", "set", "eth0", "up")

    keep, trained = Keep(), Trained({8: kill, 20: hang, 30: cut})
    module = fit(
        tiny_model_path,
        steps=40,
        callbacks=[Pipeline(8), Precision("fp32"), keep, trained],
        recipe="scalerl",
        overrides=[
            "filter=none",
            "resampling=uniform",
            "generator=vllm",
            "generator._target_=tests.generator.nodes.Claimed",
            f"+generator.addresses={json.dumps([server.address for server in servers])}",
            f"+generator.folder={tmp_path}",
            f"+generator.token={TOKEN}",
            f"+generator.silence_s={SILENCE_S}",
            "generator.slots=12",
            "driver=live",
            "driver.generators=2",
            "driver.probe_every=1",
        ],
    )
    for thread in trained.threads:
        thread.join()
    assert not trained.faults and module.driver.generator.lost >= 3  # type: ignore[union-attr]
    # A step without a running server has no probe; the next one compares instead.
    gaps = [metrics[P99] for kind, _, metrics in keep.records if kind == "train" and P99 in metrics]
    assert len(gaps) > 20 and max(gaps) < 1e-4, "the servers sample with the trainer's published weights"
    assert max(keep.of("train/staleness_max")) <= 8
    stream = module.stream
    admissions = [*trained.groups, *(group.admission for group in stream._ready), *stream._open]
    assert sorted(admissions) == list(range(stream.admitted)), (
        "every admitted group is exactly one of trained, ready or open"
    )
