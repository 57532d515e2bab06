"""Shared fixtures: tiny models with random weights, and a task whose rewards vary.

Nothing here imports torch until a test requests a model: tests of `sweeps` run without torch.
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

from lightning_scalerl.compat.imports import skip_unneeded_imports
from tests import schemas
from tests.place import PATIENCE_S, Deterministic, Place, deterministic, made_once

pytest_plugins = ["tests.account"]

# As in our commands: it saves four seconds at each process start.
skip_unneeded_imports()

# Hypothesis fails an example that takes 0.2 seconds, which any example can do on a busy machine.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

# Tests under one of these paths run in the same worker. They share something that only one worker may use at a time (a
# cluster with its ports and clocks), or something expensive that one worker builds for all of them.
GROUPS = {
    "tests/slurm/test_lab.py": "lab",
    "tests/slurm/": "slurm",
    "tests/member/test_identity.py": "identity",
    "tests/sweeps/report/test_report": "report",
    "tests/sweeps/tracking/test_browser.py": "browser",
    "tests/test_imports.py": "imports",
    "tests/translate/test_translate.py": "translate",
    "tests/test_docs_site.py": "docs",
}


TORCH_IMPORTED = pytest.StashKey[bool]()


class Grouped(LoadScopeScheduling):  # type: ignore[misc]
    """Send single tests to any free worker, but a group to one. Grouped by path: marks do not survive every pytest."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Grouped | None:
    return Grouped(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record for tests/sweeps/test_workers.py whether collecting only tests/sweeps has imported torch."""
    only_sweeps = all(item.nodeid.startswith("tests/sweeps/") for item in session.items)
    session.config.stash[TORCH_IMPORTED] = only_sweeps and "torch" in sys.modules


@pytest.fixture(scope="session", autouse=True)
def json_follows_its_schema() -> Iterator[None]:
    """Check the JSON output of every command that a test calls against the command's schema."""
    with schemas.checked():
        yield


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama for the arithmetic task, saved as a user would save a model."""
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
    """A directory that all xdist workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def schema(shared_tmp: Path) -> Path:
    """An empty MLflow database with its tables, created once because migrations take seconds of CPU."""
    from sweeps.tracking import Tracker

    path = shared_tmp / "schema.db"
    made_once(path, lambda: Tracker(f"sqlite:///{path}", "unused").prepare())
    return path


@pytest.fixture(scope="session")
def studies(shared_tmp: Path) -> Place:
    """The place where real studies run; they share the model and the reference journals."""
    root = shared_tmp / "studies"
    made_once(root, lambda: _create_place(root))
    return Place(root)


@pytest.fixture(scope="session")
def light_studies(shared_tmp: Path) -> Place:
    """The place where studies of light members run, which do not train."""
    root = shared_tmp / "light"
    made_once(root, lambda: _create_place(root))
    return Place(root, light=True)


def _create_place(root: Path) -> None:
    """Create the folder of a place with its task files."""
    root.mkdir()
    Place(root)


def _undisturbed(place: Place) -> dict[str, Deterministic]:
    """The journals, by run identity, of two variants that run in parallel and are never killed."""
    output = place.root / "undisturbed"

    def make() -> None:
        study = place.study(output.name, "variant=none,loss_dapo", "seed=0", "launch.max_parallel=2")
        with place.command(study) as process:
            assert process.wait(PATIENCE_S) == 0, place.said()

    made_once(output, make)
    return deterministic(output)


@pytest.fixture(scope="session")
def undisturbed(studies: Place) -> dict[str, Deterministic]:
    """Reference journals of a study's two members, by run identity."""
    return _undisturbed(studies)


@pytest.fixture(scope="session")
def light_undisturbed(light_studies: Place) -> dict[str, Deterministic]:
    """Reference journals of two light members, by run identity."""
    return _undisturbed(light_studies)
