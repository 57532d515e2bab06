"""Paths of the project and of recorded test data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "tests" / "data" / "curves"
LOGS = ROOT / "tests" / "data" / "logs"
