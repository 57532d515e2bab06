"""Test that pages of the guide show the words that the commands print, in the same order.

Numbers are not compared: their last digits depend on the processor.
"""

from __future__ import annotations

import re
import shlex

import pytest

from sweeps.cli.main import main
from tests.paths import ROOT

BLOCK = re.compile(r"```\n\$ scalerl (\S.*)\n([^`]*)\n```")


def blocks(page: str) -> list[tuple[str, str]]:
    """Return each command of a page that reads example files, with the output shown below it."""
    pairs = BLOCK.findall((ROOT / "docs" / "guide" / page).read_text(encoding="utf-8"))
    return [(command, output) for command, output in pairs if "examples/" in command]


def words(output: str) -> list[str]:
    """Return the lines of an output, with numbers masked and runs of spaces collapsed."""
    lines = (re.sub(r" +", " ", re.sub(r"[-+]?\d[\d.e+]*", "#", line)).strip() for line in output.splitlines())
    return [line for line in lines if line and not line.startswith("next: ")]


@pytest.mark.parametrize(
    ("command", "output"),
    [pytest.param(command, output, id=command) for page in ("plan.md", "race.md") for command, output in blocks(page)],
)
def test_a_page_shows_the_output_of_its_command(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert words(capsys.readouterr().out) == words(output)
