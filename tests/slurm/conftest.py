"""One SLURM cluster for all tests of a worker, on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.place import Deterministic, Place, views
from tests.slurm.cluster import Lab

# Each cluster takes a hundred; other checkouts may be at work on this machine.
PORTS = range(27400, 29400, 100)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Four nodes with two GPUs each, real accounting."""
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster needs root")
    # Not tmp_path: unix sockets need a short name.
    root = Path(tempfile.mkdtemp(prefix="scalerl-lab-"))
    lab = Lab(root / "lab", port=next(port for port in PORTS if is_free(port)))
    try:
        lab.up()
        yield lab
    finally:
        lab.run("down", "--wipe")
        shutil.rmtree(root, ignore_errors=True)


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def whole(lab: Lab) -> Iterator[Lab]:
    """The cluster with all its nodes and daemons and no job, whatever the test before did to it."""
    lab.up()
    lab.empty()
    yield lab
    lab.up()
    lab.empty()


@pytest.fixture(scope="session")
def undisturbed_recipe(studies: Place, undisturbed: dict[str, Deterministic]) -> dict[str, Deterministic]:
    """What one member of the recipe learns when nothing happens to it, by its run identity."""
    return _of_recipe(studies, undisturbed)


@pytest.fixture(scope="session")
def light_undisturbed_recipe(
    light_studies: Place, light_undisturbed: dict[str, Deterministic]
) -> dict[str, Deterministic]:
    """The same of a member that does not train."""
    return _of_recipe(light_studies, light_undisturbed)


def _of_recipe(place: Place, journals: dict[str, Deterministic]) -> dict[str, Deterministic]:
    labels = {run: str(view.header["recipe"]) for run, view in views(place.root / "undisturbed").items()}
    (recipe,) = [run for run, label in labels.items() if "loss=dapo" not in label]
    return {recipe: journals[recipe]}
