"""Test that every command with `--json` has a schema in the package, and that its output follows the schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from sweeps.cli.design import show_design
from sweeps.cli.main import main
from sweeps.launch.price import Launch, Price
from tests import schemas
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/reference/json.md"
# Commands that no other test of sweeps calls with --json in the process of pytest. tests/schemas.py checks every such
# call.
RUNS = {
    "status": (EXAMPLES / "study",),
    "adopt": ("NEW", "--from", EXAMPLES / "curves.csv", "--by", "recipe,seed"),
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


def test_an_unknown_or_missing_field_violates_the_schema() -> None:
    """Our schemas are closed, so a command whose fields change fails its tests until its schema is changed too."""
    status = {"study": "x", "counts": {"finished": 1}, "members": []}
    schemas.validator("status").validate(status)
    for wrong in (status | {"more": 1}, {"study": "x", "counts": {}}, status | {"counts": {"unheard": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            schemas.validator("status").validate(wrong)


@pytest.mark.parametrize("command", RUNS)
def test_the_output_of_a_command_follows_its_schema(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "new") if word == "NEW" else str(word) for word in RUNS[command]]
    assert main([command, *words, "--json"]) == 0
    schemas.validator(command).validate(json.loads(capsys.readouterr().out))


def test_a_design_follows_the_schema_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    launch = Launch(members=4, recipes=2, seeds=2, steps=40, left=40, price=Price(1.5, "x", 2, ("model",)), money=None)
    show_design(launch, "json", None, None)
    schemas.validator("plan").validate(json.loads(capsys.readouterr().out))
