"""Fixtures of several test files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.tracking import Tracker


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, made once: migrations take seconds."""
    path = tmp_path_factory.mktemp("schema") / "mlflow.db"
    Tracker(f"sqlite:///{path}", "unused").prepare()
    return path
