"""Tool calls as models write them: valid calls are parsed back, bad ones give a one-line error, none raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.environment.calls import (
    CONVENTIONS,
    HERMES,
    LLAMA,
    PLAIN,
    Convention,
    convention_of,
    description,
)
from lightning_scalerl.environment.protocol import Call
from tests.examples import examples


def schema(name: str, **types: str) -> dict[str, Any]:
    properties = {argument: {"type": kind, "description": "it"} for argument, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*types][:1]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


TOOLS = [schema("add", a="integer", b="integer"), schema("calculate", text="string"), schema("look")]
# Texts may contain the markers of a convention.
texts = st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "</call>", '"', "(", ")"])).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | texts | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
).filter(lambda value: "Infinity" not in json.dumps(value))


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
@settings(max_examples=examples(200))
@given(data=st.data(), around=st.text(alphabet="ab<>{ \n", max_size=5))
def test_a_written_call_is_parsed_back(convention: Convention, data: st.DataObject, around: str) -> None:
    calls = []
    for _ in range(1 if convention is LLAMA else data.draw(st.integers(1, 3))):
        call = data.draw(
            st.builds(lambda a, b: Call("add", {"a": a, "b": b}), values, values)
            | st.builds(lambda text: Call("calculate", {"text": text}), texts)
            | st.just(Call("look", {}))
        )
        calls.append(call)
    tools = {tool["function"]["name"]: tool for tool in TOOLS}
    written = [convention.write(call, tools[call.name]) for call in calls]
    text = written[0] if convention is LLAMA else around + around.join(written)
    assert convention.parse(text, TOOLS) == calls


PIECES = [
    "<tool_call>", "</tool_call>", "<call>", "</call>", "add(", ")", '{"name": ', '"add"', '"arguments": ',
    '"parameters": ', "{", "}", "[", ",", '"', "1e999", "NaN", "\\ud800", "<|python_tag|>", "calculate(3", "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
@settings(max_examples=examples(400))
@given(text=st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_parsed_and_errors_are_one_line(convention: Convention, text: str) -> None:
    for call in convention.parse(text, TOOLS):
        if call.error:
            assert call.error.startswith("error: ") and len(call.error.splitlines()) == 1 and len(call.error) < 400
        else:
            assert call.name in ("add", "calculate", "look")


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_deep_and_long_calls_are_malformed(convention: Convention) -> None:
    deep = "[" * 20000 + "]" * 20000
    body = {
        "hermes": f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}}}}}</tool_call>',
        "llama": f'{{"name": "add", "parameters": {{"a": {deep}}}}}',
        "plain": f"<call>add({deep})</call>",
    }[convention.name]
    (call,) = convention.parse(body, TOOLS)
    assert "nested too deeply" in call.error
    (call,) = convention.parse(body.replace(deep, f'"{"x" * 70000}"'), TOOLS)
    assert "longer than 65536 characters" in call.error


@pytest.mark.parametrize(
    ("convention", "text", "why"),
    [
        (HERMES, '<tool_call>{"name": "add"', "it has no </tool_call>"),
        (HERMES, "<tool_call>{'name': 'add'}</tool_call>", "it is not JSON"),
        (HERMES, '<tool_call>["add"]</tool_call>', "it has no name"),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "its arguments are not an object"),
        (HERMES, '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "no tool 'sub'; there are add, calculate"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "no argument 'c'; it takes a, b"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"b": 1}}</tool_call>', "add needs the argument a"),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"b": 1}}</tool_call>', "it takes no arguments"),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}', "it is not JSON"),
        (LLAMA, '{"name": "add", "parameters": {"a": NaN}}', "too long or not finite"),
        (PLAIN, "<call>add(1, 2)", "it has no </call>"),
        (PLAIN, "<call>add 1 2</call>", "it is not name(arguments)"),
        (PLAIN, "<call>add(1, x)</call>", "its arguments are not values in JSON"),
        (PLAIN, "<call>add(1, 2, 3)</call>", "it has 3 arguments, and add takes 2"),
    ],
)
def test_malformed_calls_have_an_error(convention: Convention, text: str, why: str) -> None:
    (call,) = convention.parse(text, TOOLS)
    assert why in call.error


def test_the_error_about_a_long_name_is_short() -> None:
    (call,) = HERMES.parse(f'<tool_call>{{"name": "{"x" * 10000}"}}</tool_call>', TOOLS)
    assert len(call.error) < 200


def test_answers_are_not_calls() -> None:
    assert HERMES.parse('The sum is {"name": "add"}.', TOOLS) == []
    assert LLAMA.parse('{"answer": 7}', TOOLS) == [] == LLAMA.parse("{7}", TOOLS) == LLAMA.parse("It is 7.", TOOLS)
    assert PLAIN.parse("add(1, 2)", TOOLS) == []


def test_a_text_need_not_be_quoted_if_it_is_the_only_argument() -> None:
    assert PLAIN.parse("<call> calculate((3 + 4) * 2) </call>", TOOLS) == [Call("calculate", {"text": "(3 + 4) * 2"})]


def test_llamas_python_tag_is_accepted() -> None:
    assert LLAMA.parse('<|python_tag|>{"name": "look"}', TOOLS) == [Call("look", {})]


def test_the_convention_is_recognized_from_the_template() -> None:
    assert convention_of("{% if tools %}write <tool_call>{...}</tool_call>{% endif %}") == "hermes"
    assert convention_of('{% if tools %}{"name": .., "parameters": ..} ipython{% endif %}') == "llama"
    assert convention_of("{{ messages }}") == "plain" == convention_of(None)


def test_a_description_shows_each_tool_as_it_is_called() -> None:
    assert description(TOOLS).splitlines()[1] == "<call>add(a, b)</call>: Does it."
