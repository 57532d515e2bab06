"""Pages of the guide show what the commands print: the same words in the same order, and nearly the same numbers.

The last digits of a number depend on the processor, so numbers are left out here.
"""

from __future__ import annotations

import re
import shlex

import pytest

from sweeps.cli.main import main
from tests.paths import ROOT

BLOCK = re.compile(r"```\n\$ scalerl (\S.*)\n([^`]*)\n```")


def blocks(page: str) -> list[tuple[str, str]]:
    """Each command of a page on the example files, with its output on the page."""
    found = BLOCK.findall((ROOT / "docs" / "guide" / page).read_text(encoding="utf-8"))
    return [(command, output) for command, output in found if "examples/" in command]


def words(output: str) -> list[str]:
    """The lines of an output without numbers and widths of columns."""
    lines = (re.sub(r" +", " ", re.sub(r"[-+]?\d[\d.e+]*", "#", line)).strip() for line in output.splitlines())
    return [line for line in lines if line and not line.startswith("next: ")]


@pytest.mark.parametrize(
    ("command", "output"),
    [pytest.param(command, output, id=command) for page in ("plan.md", "race.md") for command, output in blocks(page)],
)
def test_a_page_shows_what_its_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert words(capsys.readouterr().out) == words(output)
