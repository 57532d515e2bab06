"""Tests of placeholders in templates: which braces are filled in, left alone, or refused."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sweeps.command.template import fill, flatten, names_in
from sweeps.errors import UserError


def test_values_are_written_as_in_configuration_files() -> None:
    values = flatten(
        {"loss": "dapo", "lr": 1e-6, "on": True, "none": None, "optim": {"name": "adam", "betas": [0.9, 0.99]}}
    )
    text = "{loss} {lr} {on} {none} {optim.name} {optim.betas} {optim}"
    assert fill(text, values, "x") == 'dapo 1e-06 true null adam [0.9, 0.99] {"name": "adam", "betas": [0.9, 0.99]}'


NUMBERS = st.floats(allow_nan=False)
KEYS = st.text(max_size=50)  # YAML allows 1,024 characters, escapes included


@given(st.one_of(NUMBERS, st.lists(NUMBERS | st.text()), st.dictionaries(KEYS, st.lists(NUMBERS) | NUMBERS)))
def test_numbers_in_yaml_are_read_as_numbers(value: object) -> None:
    """PyYAML, which the parsers of transformers use, reads 1e-05 and Infinity as strings, also inside lists."""
    assert yaml.safe_load(fill("lr: {lr}", {"lr": value}, "x", yaml=True)) == {"lr": value}


def test_nan_in_yaml_is_read_as_nan() -> None:
    assert math.isnan(yaml.safe_load(fill("{lr}", {"lr": math.nan}, "x", yaml=True)))


def test_a_small_learning_rate_gets_a_decimal_point_in_yaml_only() -> None:
    assert fill("{lr} {a}", {"lr": 1e-5, "a": "1e-05"}, "x", yaml=True) == "1.0e-05 1e-05"
    assert fill("{lr}", {"lr": 1e-5}, "x") == "1e-05"


@pytest.mark.parametrize("text", ['{"a": 1}', "{ x = 1 }", "${HOME}", "{}", "{a: b}", "{{ jinja }}", "{1}"])
def test_other_braces_are_left_alone(text: str) -> None:
    assert fill(text, {}, "x") == text and names_in(text) == []


def test_doubled_braces_are_literal() -> None:
    assert fill("{{loss}} {loss}", {"loss": 1}, "x") == "{loss} 1" and names_in("{{a}} {b}") == ["b"]


def test_a_placeholder_without_a_value_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UserError, match=r"^command.line: \{los\} has no value; .* valid: loss, seed$"):
        fill("{los}", {"seed": 1, "loss": 2}, "command.line")
