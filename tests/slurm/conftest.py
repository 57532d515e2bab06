"""One SLURM cluster for all tests of a worker, on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Lab

FIRST_PORT = 27400


@pytest.fixture(scope="session")
def lab(worker_id: str) -> Iterator[Lab]:
    """Four nodes with two GPUs each, real accounting."""
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster needs root")
    # Not tmp_path: unix sockets need a short name.
    root = Path(tempfile.mkdtemp(prefix="scalerl-lab-"))
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    lab = Lab(root / "lab", port=FIRST_PORT + 100 * number)
    try:
        lab.up()
        yield lab
    finally:
        lab.run("down", "--wipe")
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def whole(lab: Lab) -> Iterator[Lab]:
    """The cluster with all its nodes and daemons and no job, whatever the test before did to it."""
    lab.up()
    lab.empty()
    yield lab
    lab.up()
    lab.empty()
