"""Fixtures: one SLURM cluster on this machine for all tests of a worker."""

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

# Each cluster needs 100 ports; tests of other checkouts may run on this machine.
PORTS = range(27400, 29400, 100)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Start a cluster of four nodes with two GPUs each, and real accounting."""
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster needs root")
    # Not tmp_path, because unix sockets need a short path.
    root = Path(tempfile.mkdtemp(prefix="scalerl-lab-"))
    lab = Lab(root / "lab", port=next(port for port in PORTS if is_free(port)))
    try:
        lab.up()
        yield lab
    finally:
        lab.run("down", "--wipe")
        shutil.rmtree(root, ignore_errors=True)


def is_free(port: int) -> bool:
    """Return whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def ready_lab(lab: Lab) -> Iterator[Lab]:
    """Provide the cluster with all nodes and daemons up and no jobs. The previous test may have changed that."""
    lab.up()
    lab.empty()
    yield lab
    lab.up()
    lab.empty()


@pytest.fixture(scope="session")
def undisturbed_recipe(studies: Place, undisturbed: dict[str, Deterministic]) -> dict[str, Deterministic]:
    """Return the journal of an undisturbed member of the unchanged recipe, by run identity."""
    return _of_recipe(studies, undisturbed)


@pytest.fixture(scope="session")
def light_undisturbed_recipe(
    light_studies: Place, light_undisturbed: dict[str, Deterministic]
) -> dict[str, Deterministic]:
    """Return the same for a member that does not train."""
    return _of_recipe(light_studies, light_undisturbed)


def _of_recipe(place: Place, journals: dict[str, Deterministic]) -> dict[str, Deterministic]:
    labels = {run: str(view.header["recipe"]) for run, view in views(place.root / "undisturbed").items()}
    (recipe,) = [run for run, label in labels.items() if "loss=dapo" not in label]
    return {recipe: journals[recipe]}
