"""Tests of seed, budget, study and output folder: an invalid value is refused with the name of its field."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.identify import plan_members
from tests import forked

LONG = "n" * 300


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=", r"^seed: '' must be a whole number, 0 or more; give seed=0"),
        ("seed=null", r"^seed: None must be a whole number"),
        ("seed=0.5", r"^seed: 0\.5 must be a whole number"),
        ("seed=true", r"^seed: True must be a whole number"),
        ("seed=first", r"^seed: 'first' must be a whole number"),
        ("seed=[0]", r"^seed: \[0\] must be a whole number"),
        ("budget.steps=", r"^budget\.steps: '' must be a whole number"),
        ("budget.steps=null", r"^budget\.steps: None must be a whole number"),
        ("study=", r"^study: '' is not the name of one folder; choose a plain name"),
        ("study=nan", r"""^study: nan is read as a number; choose another name, or write study="'nan'"$"""),
        ("study=null", r"^study: 'None' is not the name of one folder"),
        (f"study={LONG}", r"^study: 'n+\.\.\.' is a name of 300 bytes; file systems take 255"),
        ("output_dir=", r"^output_dir: '' names no folder"),
        ("output_dir='  '", r"^output_dir: '  ' names no folder"),
        ("output_dir=null", r"^output_dir: None names no folder"),
        (f"output_dir=a/{LONG}/b", r"^output_dir: 'a/n+\.\.\.' has a name of 300 bytes in it"),
    ],
)
def test_an_invalid_value_is_refused_with_its_field(override: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refusal:
        plan_members([[override]])
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_the_longest_name_of_a_file_system_is_accepted() -> None:
    assert plan_members([[f"study={'n' * 255}"]])[0].config["output_dir"] == f"outputs/{'n' * 255}"


def test_an_output_folder_below_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = forked.run(
        [sys.executable, "-m", "lightning_scalerl.train", "output_dir=file/x", "budget.steps=1", "model.batches=2"],
        cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    last = result.stderr.strip().splitlines()[-1]  # lines before it may report that the base model was made
    assert last.startswith("scalerl train: output_dir: file/x/runs/") and "in the way" in last
    assert (tmp_path / "file").read_text() == "mine"


def test_two_classes_of_one_name_are_refused_because_names_tell_runs_apart(tmp_path: Path) -> None:
    """Without the refusal both are one member, and only one of them runs."""
    (tmp_path / "conf" / "filter").mkdir(parents=True)
    for number in (1, 2):
        (tmp_path / "conf" / f"namesake{number}.py").write_text(
            "from lightning_scalerl import NoFilter\nclass Mine(NoFilter):\n    pass\n"
        )
        (tmp_path / "conf" / "filter" / f"mine{number}.yaml").write_text(f"_target_: namesake{number}.Mine\n")
    (tmp_path / "conf" / "namesake3.py").write_text("from namesake1 import Mine\n")
    (tmp_path / "conf" / "filter" / "broken.yaml").write_text("_target_: nowhere.Mine\n")
    (tmp_path / "conf" / "filter" / "text.yaml").write_text("a: b: c")
    words = ["scale=tiny", "recipe=dr_grpo", "model.batches=2", f"output_dir={tmp_path}/study"]
    message = r"^filter: namesake1\.Mine and namesake2\.Mine have the same name, .*; rename one$"
    for members in ([1, 2], [1]):
        with pytest.raises(ConfigurationError, match=message):
            plan_members([[*words, f"filter=mine{number}"] for number in members], [str(tmp_path / "conf")])
    # Two names of one class are one choice.
    (tmp_path / "conf" / "filter" / "mine2.yaml").write_text("_target_: namesake3.Mine\n")
    first, second = plan_members([[*words, f"filter=mine{number}"] for number in (1, 2)], [str(tmp_path / "conf")])
    assert first.run == second.run
