"""Engines that listen: started on this node, or in a network of their own, as on another one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.paths import ROOT

TOKEN = "7e57" * 8
START_S = 120.0
_numbers = count()


@dataclass
class Listening:
    """A process of `generator.server --listen`, and how to hurt it."""

    host: str
    log: Path
    prefix: Sequence[str] = ()
    port: int = 0
    announce: Path | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        environment = {**os.environ, "SCALERL_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*self.prefix, sys.executable, "-u", "-m", "lightning_scalerl.generator.server"]
        if self.announce is not None:  # each start at another port, with another token
            self.port = 0
            command += ["--announce", str(self.announce)]
            del environment["SCALERL_ENGINE_TOKEN"]
        self.log.write_text("")
        with self.log.open("ab") as said:
            self.process = subprocess.Popen(
                [*command, "--listen", f"{self.host}:{self.port}", "--device", "cpu"],
                env=environment,
                stdout=said,
                stderr=said,
            )
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"engine: listening on \S+:(\d+) ", self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.port = int(found[1])

    @property
    def address(self) -> str:
        return f"file:{self.announce}" if self.announce else f"tcp://{self.host}:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def listening(
    folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = (), announce: Path | None = None
) -> Iterator[Listening]:
    """An engine that listens, ended by its pid."""
    engine = Listening(host, folder / f"engine-{next(_numbers)}.log", prefix, announce=announce)
    engine.start()
    try:
        yield engine
    finally:
        engine.end()


class Network:
    """A network namespace behind one link, as another node is."""

    def __init__(self) -> None:
        number = 1 + (os.getpid() + next(_numbers)) % 16000
        self.name = f"scalerl-{os.getpid()}-{number}"
        self.inside, self.outside = f"se{number}i", f"se{number}o"
        third, fourth = divmod(4 * number, 256)
        self.there, self.here = f"10.231.{third}.{fourth + 1}", f"10.231.{third}.{fourth + 2}"

    def up(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.outside, "type", "veth", "peer", "name", self.inside, "netns", self.name)
        _ip("addr", "add", f"{self.here}/30", "dev", self.outside)
        _ip("link", "set", self.outside, "up")
        for words in (
            ("addr", "add", f"{self.there}/30", "dev", self.inside),
            ("link", "set", self.inside, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.name, *words)

    def cut(self) -> None:
        """From now on no packet passes, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.inside, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self.inside, "up")

    def down(self) -> None:
        subprocess.run(["ip", "link", "del", self.outside], capture_output=True)
        _ip("netns", "del", self.name)

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def far_away() -> Iterator[Network]:
    """Another node, as far as the network goes."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2")
    network = Network()
    try:
        network.up()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here ({error.stderr.decode().strip()})")
    try:
        yield network
    finally:
        network.down()
