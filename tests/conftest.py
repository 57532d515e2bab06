"""Shared fixtures: tiny models with random weights, and a task whose rewards vary.

Nothing here imports torch before a test asks for a model: tests of `sweeps` run without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from lightning_scalerl.compat.torchao import hide_torchao
from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand
from tests import schemas
from tests.place import PATIENCE_S, Deterministic, Place, deterministic, made_once

pytest_plugins = ["tests.account"]

# Before any test imports Lightning, as our commands do: each process starts two seconds sooner.
torchmetrics_on_demand()
hide_torchao()

# A busy machine may keep any example waiting: by default hypothesis fails one that takes 0.2 seconds.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

# Tests below these share what only one worker at a time may use (a cluster, with its ports and its clocks), or what one
# worker makes once for all of them.
GROUPS = {
    "tests/slurm/test_lab.py": "lab",
    "tests/slurm/": "slurm",
    "tests/member/test_identity.py": "identity",
    "tests/sweeps/report/test_report.py": "report",
    "tests/test_imports.py": "imports",
    "tests/translate/test_translate.py": "translate",
    "tests/test_docs_site.py": "docs",
}


TORCH_IMPORTED = pytest.StashKey[bool]()


class Grouped(LoadScopeScheduling):  # type: ignore[misc]
    """One by one to whichever worker is free, but a group as a whole. By path: marks do not survive every pytest."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Grouped | None:
    return Grouped(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note for tests/sweeps/test_workers.py whether the modules of the study's tests, by themselves, imported torch."""
    of_the_study = all(item.nodeid.startswith("tests/sweeps/") for item in session.items)
    session.config.stash[TORCH_IMPORTED] = of_the_study and "torch" in sys.modules


@pytest.fixture(scope="session", autouse=True)
def json_follows_its_schema() -> Iterator[None]:
    """Every command that a test calls prints the JSON that its schema describes."""
    with schemas.checked():
        yield


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of the arithmetic task, saved as a user's model would be."""
    import torch

    from lightning_scalerl.task.arithmetic_base import new_model, tokenizer

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("models") / "tiny"
    new_model(width=32, layers=2, seed=3).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def tiny_model(tiny_model_path: str) -> Any:
    from lightning_scalerl.model.load import load_model

    return load_model(tiny_model_path)


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all workers together."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def schema(shared_tmp: Path) -> Path:
    """An MLflow database with its tables, made once: migrations take seconds of CPU."""
    from sweeps.tracking import Tracker

    path = shared_tmp / "schema.db"
    made_once(path, lambda: Tracker(f"sqlite:///{path}", "unused").prepare())
    return path


@pytest.fixture(scope="session")
def studies(shared_tmp: Path) -> Place:
    """Where real studies run; they share the model, and the journals that they are compared with."""
    root = shared_tmp / "studies"
    made_once(root, lambda: _found(root))
    return Place(root)


@pytest.fixture(scope="session")
def light_studies(shared_tmp: Path) -> Place:
    """Where studies run whose members do not train."""
    root = shared_tmp / "light"
    made_once(root, lambda: _found(root))
    return Place(root, light=True)


def _found(root: Path) -> None:
    """Make a place that no other worker sees half made."""
    root.mkdir()
    Place(root)


def _undisturbed(place: Place) -> dict[str, Deterministic]:
    """The journals, by run identity, of two variants that nobody killed, both at a time on this machine."""
    output = place.root / "undisturbed"

    def make() -> None:
        study = place.study(output.name, "variant=none,loss_dapo", "seed=0", "launch.max_parallel=2")
        with place.command(study) as process:
            assert process.wait(PATIENCE_S) == 0, place.said()

    made_once(output, make)
    return deterministic(output)


@pytest.fixture(scope="session")
def undisturbed(studies: Place) -> dict[str, Deterministic]:
    """What the two members of a study learn, by run identity."""
    return _undisturbed(studies)


@pytest.fixture(scope="session")
def light_undisturbed(light_studies: Place) -> dict[str, Deterministic]:
    """The same of members that do not train."""
    return _undisturbed(light_studies)
