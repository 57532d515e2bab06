"""Where tests find what is not theirs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "tests" / "data" / "curves"
LOGS = ROOT / "tests" / "data" / "logs"
