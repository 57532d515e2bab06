"""Every `--json` has a schema that ships with the package, and what examples print follows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sweeps.cli.design import show_design
from sweeps.cli.main import main
from sweeps.launch.price import Launch, Price
from tests import schemas
from tests.examples import every
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/reference/json.md"
COMPARED = ("a1b2c3d", "b2c3d4e", "--from", EXAMPLES / "results.tsv", "--lower-is-better")
# Commands whose data are quickly made. Those that need a trained model are checked where tests train one.
RUNS: dict[str, tuple[Any, ...]] = {
    "fit": (EXAMPLES / "study",),
    "rank": (EXAMPLES / "study",),
    "plan": (EXAMPLES / "study",),
    "compare": (EXAMPLES / "study",),
    "decide": COMPARED,
    "race": (EXAMPLES / "study", "--budget", "1e9"),
    "watch": (EXAMPLES / "curves.csv", "--once", "--max-compute", "3000"),
    "adopt": ("NEW", "--from", EXAMPLES / "curves.csv", "--by", "recipe,seed"),
    "status": (EXAMPLES / "study",),
}


def test_every_command_with_json_has_a_schema_that_the_page_lists() -> None:
    commands = schemas.with_json()
    assert {"fit", "rank", "status", "decide"} <= set(commands)
    assert sorted(path.stem for path in schemas.FOLDER.glob("*.json")) == sorted(commands)
    page = PAGE.read_text()
    for command in commands:
        assert f"| [{command}.json](../../sweeps/schemas/{command}.json) |" in page
        described = schemas.validator(command).schema
        assert described["title"] == f"scalerl {command} --json"


def test_a_field_without_a_description_of_its_form_is_refused() -> None:
    """All objects of ours are closed: a new field, or one that is missing, fails the tests of its command."""
    status = {"study": "x", "counts": {"finished": 1}, "members": []}
    schemas.validator("status").validate(status)
    for wrong in (status | {"more": 1}, {"study": "x", "counts": {}}, status | {"counts": {"unheard": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            schemas.validator("status").validate(wrong)


@pytest.mark.parametrize("command", every(3, list(RUNS), pytest.mark.full))
def test_what_a_command_prints_follows_its_schema(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "new") if word == "NEW" else str(word) for word in RUNS[command]]
    if command == "watch":  # which writes beside its source
        words[0] = shutil.copy(words[0], tmp_path / "curves.csv")
    assert main([command, *words, "--json"]) == 0
    out = capsys.readouterr().out
    for text in out.splitlines() if command == "watch" else [out]:
        schemas.validator(command).validate(json.loads(text))


def test_a_design_follows_the_schema_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    launch = Launch(members=4, recipes=2, seeds=2, steps=40, left=40, price=Price(1.5, "x", 2, ("model",)), money=None)
    show_design(launch, "json", None, None)
    schemas.validator("plan").validate(json.loads(capsys.readouterr().out))
