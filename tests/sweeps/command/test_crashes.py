"""Test that killed, powered-off and damaged studies lose nothing silently: a short run of `benchmarks/crashes.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.full
def test_nothing_is_lost_silently(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/crashes.py", "--kills", "9", "--damage", "3", "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "page.md")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | |" in (tmp_path / "page.md").read_text()
