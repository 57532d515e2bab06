"""Truths about placeholders: what is filled in, what is left alone, and what is an error."""

from __future__ import annotations

import pytest

from sweeps.command.template import filled, flat, names_in
from sweeps.errors import UserError


def test_values_stand_as_configuration_files_and_command_lines_have_them() -> None:
    values = flat(
        {"loss": "dapo", "lr": 1e-6, "on": True, "none": None, "optim": {"name": "adam", "betas": [0.9, 0.99]}}
    )
    text = "{loss} {lr} {on} {none} {optim.name} {optim.betas} {optim}"
    assert filled(text, values, "x") == 'dapo 1e-06 true null adam [0.9, 0.99] {"name": "adam", "betas": [0.9, 0.99]}'


@pytest.mark.parametrize("text", ['{"a": 1}', "{ x = 1 }", "${HOME}", "{}", "{a: b}", "{{ jinja }}", "{1}"])
def test_other_braces_are_left_alone(text: str) -> None:
    assert filled(text, {}, "x") == text and names_in(text) == []


def test_doubled_braces_are_text() -> None:
    assert filled("{{loss}} {loss}", {"loss": 1}, "x") == "{loss} 1" and names_in("{{a}} {b}") == ["b"]


def test_a_placeholder_without_a_value_is_named_with_those_that_have_one() -> None:
    with pytest.raises(UserError, match=r"^command.line: \{los\} has no value; .* valid: loss, seed$"):
        filled("{los}", {"seed": 1, "loss": 2}, "command.line")
