"""What the README prints is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert 0.1 < float(re.findall(r"tensor\(([\d.]+)", done.stdout)[-1]) < 0.9
    assert (tmp_path / "outputs" / "my_run" / "metrics.jsonl").exists()


def test_the_tree_names_what_exists() -> None:
    """Every module of the packages stands in the README's tree, and the tree names nothing else."""
    for package in ("lightning_scalerl", "sweeps"):
        for path in sorted((ROOT / package).iterdir()):
            if path.name.startswith("_") or path.name in ("py.typed", "conf", "errors.py"):
                continue
            assert path.name in README, f"{package}/{path.name} is not in the README's tree"


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
