"""LightningCLI with the script and the YAML of docs/guide/training.md, on a small model and a few rows."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from sweeps.run.journal import read_journal
from tests import forked
from tests.helpers import SMALL
from tests.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "training.md"
REWARDS = """
def accuracy(completions, answer, **kwargs):
    return [len(text) / 10 for text in completions]
"""


def write_page_files(folder: Path, model: str) -> None:
    """Write the page's files and the files that they name."""
    for name, text in re.findall(r"\*\*`(main\.py|run\.yaml)`\*\*\n\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(text.replace("my_model", model).replace("scale=0.6b", ", ".join(SMALL)))
    for name in ("train", "test"):
        rows = [{"prompt": f"{n}+{n}=", "answer": name} for n in range(9 if name == "train" else 12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-9:]))
    (folder / "my_rewards.py").write_text(REWARDS)


@pytest.mark.slow
def test_the_pages_files_train_and_validate(tiny_model_path: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    write_page_files(tmp_path, tiny_model_path)
    assert (tmp_path / "main.py").is_file() and (tmp_path / "run.yaml").is_file()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for arguments in (["fit", "--trainer.max_steps", "2"], ["validate"]):
        options = ["--config", "run.yaml", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
        command = [sys.executable, "main.py", arguments[0], *options, *arguments[1:]]
        done = forked.run(command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
    assert "eval/test/pass_rate" in done.stdout
    view = read_journal(tmp_path / "outputs" / "cli")
    assert view.status == "finished" and [record.step for record in view.of_kind("eval")] == [0, 2]
