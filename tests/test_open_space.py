"""Tests that write the files of docs/guide/extend.md to disk and run them.

They are a user's loss, normalization, axis, task, generator, variants, recipe and experiment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.run.journal import find_runs, read_journal
from tests import forked
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "extend.md").read_text()
FILES = dict(re.findall(r"\*\*`(myconf/[^`]+)`\*\*\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))
SMALL = (
    "model.batches=2",
    "model.width=32",
    "model.layers=1",
    "batch.prompts=2",
    "batch.completions=4",
    "budget.steps=6",
    "evaluation.every_n_steps=1",
    "evaluation.samples=1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout with the page's files."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SCALERL_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return forked.run(command, cwd=place, env=environment)


def test_the_page_has_a_file_of_each_kind() -> None:
    kinds = {Path(name).parent.name for name in FILES}
    assert kinds == {"myconf", "loss", "normalization", "decay", "variant", "task", "generator", "recipe", "experiment"}


@pytest.mark.slow
def test_a_users_files_train_and_rank_from_the_command_line(place: Path) -> None:
    train = (sys.executable, "-m", "lightning_scalerl.train", "--config-dir", "myconf", "--multirun", "experiment=mine")
    done = run(place, *train, "seed=0", *SMALL)
    assert done.returncode == 0, done.stderr
    views = {view.header["recipe"]: view for view in map(read_journal, find_runs(place / "outputs" / "mine"))}
    assert set(views) == {"mine", "mine+loss=root", "mine+normalization=peak", "mine+decay=geometric"}
    assert {view.header["baseline"] for view in views.values()} == {"mine"}
    assert views["mine+decay=geometric"].header["departures"] == {"decay": "geometric"}
    for label, axis in (("loss=root", "loss"), ("normalization=peak", "normalization"), ("decay=geometric", "decay")):
        (*_, last) = views[f"mine+{label}"].of_kind("train")
        assert last.metrics[f"mechanism/{axis}"] > 0, label
    # The neutral choice on the user's axis does not change the run's identity, so the run is found to be done.
    repeated = run(place, *train[:-2], "recipe=mine", "+decay=none", "study=mine", "seed=0", *SMALL)
    assert "done already" in repeated.stdout, repeated.stderr
    ranked = run(place, sys.executable, "-m", "sweeps", "rank", "outputs/mine", "--json")
    assert ranked.returncode == 0, ranked.stderr
    printed_ranking = json.loads(ranked.stdout)
    assert printed_ranking["baseline"] == "mine" and len(printed_ranking["ranking"]) == 4


@pytest.mark.slow
def test_a_users_files_train_from_a_script(place: Path) -> None:
    done = run(place, sys.executable, "myconf/script.py")
    assert done.returncode == 0, done.stderr
    (run_dir,) = find_runs(place / "outputs" / "script")
    view = read_journal(run_dir)
    assert view.header["departures"] == {"loss": "RootLoss, power=0.5", "decay": "GeometricDecay, factor=0.9"}
    assert view.header["recipe"] == "mine+loss=RootLoss+loss.power=0.5+decay=GeometricDecay+decay.factor=0.9"
    assert len(view.of_kind("train")) == 4
    semantics = json.loads((run_dir / "semantics.json").read_text())
    assert semantics["choices"]["decay"] == {"choice": "GeometricDecay", "factor": 0.9}


@pytest.mark.full
def test_what_is_wrong_with_a_users_file_is_named(place: Path) -> None:
    peak, geometric = "_target_: my_choices.PeakNormalization", "_target_: my_axis.GeometricDecay"
    wrong = {
        "loss/gone.yaml": ("_target_: my_choices.Gone", "loss=gone", "my_choices"),
        "loss/other.yaml": (peak, "loss=other", "loss: my_choices.PeakNormalization"),
        "task/gone.yaml": ("_target_: my_task.Gone", "task=gone", "task: "),
        "decay/open.yaml": (f"{geometric}\nfactor: ???", "+decay=open", "decay.factor: needs a value"),
    }
    for name, (text, override, message) in wrong.items():
        (place / "myconf" / name).write_text(text)
        train = (sys.executable, "-m", "lightning_scalerl.train", "--config-dir", "myconf", "recipe=mine", override)
        done = run(place, *train)
        (place / "myconf" / name).unlink()
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = run(place, sys.executable, "-m", "lightning_scalerl.train", "--config-dir", "nowhere", "recipe=mine")
    assert done.returncode == 1 and "nowhere" in done.stderr
