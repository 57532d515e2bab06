"""Fixtures of several test files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.tracking import Tracker
from tests.place import made_once


@pytest.fixture(scope="session")
def schema(shared_tmp: Path) -> Path:
    """A database with its tables, made once: migrations take seconds."""
    path = shared_tmp / "schema.db"
    made_once(path, lambda: Tracker(f"sqlite:///{path}", "unused").prepare())
    return path
