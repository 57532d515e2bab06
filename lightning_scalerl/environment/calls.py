"""Conventions by which models write tool calls, and their parsers.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>    Hermes, Qwen2.5, Qwen3
    llama    {"name": "add", "parameters": {"a": 1, "b": 2}}                          Llama 3.1, as the whole answer
    plain    <call>add(1, 2)</call>                                                   small models without tool training

Model output is untrusted: parsers take any text, never raise, and need time linear in its length. They read the text
after the thinking, without special tokens. The error of a malformed call is a line for the model (`Call.error`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_scalerl.environment.protocol import Call, Schema

# Longest call in characters; a longer one is malformed. Without a limit its JSON could exhaust the trainer's memory.
MAX_CHARACTERS = 65536


@dataclass(frozen=True)
class Convention:
    """Format in which a model writes tool calls and reads their answers.

    Attributes:
        name: "hermes", "llama" or "plain".
        role: role of a message with a tool's answer.
        example: a call, shown to a model that has written a malformed one.
        parse: returns the calls in a text, in order, given the schemas of the tools.
        write: returns the text of a call as the model should write it, given the schema of its tool.
    """

    name: str
    role: str
    example: str
    parse: Callable[[str, Sequence[Schema]], list[Call]]
    write: Callable[[Call, Schema], str]


def convention_of(template: str | None) -> str:
    """Return the name of the convention that a chat template describes to its model; "plain" if it has none."""
    if template is not None and "tools" in template:
        if "<tool_call>" in template:
            return "hermes"
        # Llama 3.1 and 3.2: tool answers are messages with the role `ipython`.
        if '"parameters"' in template and "ipython" in template:
            return "llama"
    return "plain"


def description(tools: Sequence[Schema]) -> str:
    """Describe tools in plain convention, for a prompt whose template does not render them."""
    lines = []
    for tool in tools:
        function = tool["function"]
        names = ", ".join(_parameters(tool))
        lines.append(f"<call>{function['name']}({names})</call>: {' '.join(str(function['description']).split())}")
    return "\n".join(["Tools that you can call:", *lines])


# --- hermes --------------------------------------------------------------------------------------------------------


def _parse_hermes(text: str, tools: Sequence[Schema]) -> list[Call]:
    return [_json_call(body, "arguments", tools, HERMES) for body in _tag_contents(text, "tool_call")]


def _write_hermes(call: Call, tool: Schema) -> str:
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    # Escape "</", because an argument may contain the closing tag.
    return f"<tool_call>\n{body.replace('</', '<' + chr(92) + '/')}\n</tool_call>"


# --- llama ---------------------------------------------------------------------------------------------------------


def _parse_llama(text: str, tools: Sequence[Schema]) -> list[Call]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    value = _parse_json(body)
    if isinstance(value, dict) and "name" not in value:
        return []  # an answer in JSON, not a call
    if isinstance(value, str) and '"name"' not in body[:MAX_CHARACTERS]:
        return []
    return [_json_call(body, "parameters", tools, LLAMA)]


def _write_llama(call: Call, tool: Schema) -> str:
    return json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)


# --- plain ---------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"\s*([A-Za-z_]\w{0,99})\s*\(")


def _parse_plain(text: str, tools: Sequence[Schema]) -> list[Call]:
    return [_plain_call(body, tools) for body in _tag_contents(text, "call")]


def _plain_call(body: str | None, tools: Sequence[Schema]) -> Call:
    if body is None:
        return _malformed_call("", "it has no </call>", PLAIN)
    if len(body) > MAX_CHARACTERS:
        return _malformed_call("", f"it is longer than {MAX_CHARACTERS} characters", PLAIN)
    begin = _NAME.match(body)
    if begin is None or not body.rstrip().endswith(")"):
        return _malformed_call("", "it is not name(arguments)", PLAIN)
    name, arguments_text = begin[1], body.rstrip()[begin.end() : -1].strip()
    tool = _tool(name, tools)
    if tool is None:
        return _unknown_tool_call(name, tools)
    parameters = _parameters(tool)
    # A tool's only argument may be unquoted text, which is easier for small models: calculate(3 + 4).
    if (
        len(parameters) == 1
        and next(iter(parameters.values())).get("type") == "string"
        and not arguments_text.startswith('"')
    ):
        values: Any = [arguments_text] if arguments_text else []
    else:
        values = _parse_json(f"[{arguments_text}]")
    if isinstance(values, str):
        return _malformed_call(name, f"its arguments are not values in JSON ({values})", PLAIN)
    if len(values) > len(parameters):
        return _malformed_call(name, f"it has {len(values)} arguments, and {name} takes {len(parameters)}", PLAIN)
    return _checked_call(name, dict(zip(parameters, values, strict=False)), tool, PLAIN)


def _write_plain(call: Call, tool: Schema) -> str:
    values = ", ".join(json.dumps(call.arguments[name], ensure_ascii=False) for name in _parameters(tool))
    return f"<call>{call.name}({values.replace('</', '<' + chr(92) + '/')})</call>"


# --- shared --------------------------------------------------------------------------------------------------------


def _tag_contents(text: str, tag: str) -> list[str | None]:
    """Return the texts between opening and closing tags; None for the last text if its tag is not closed."""
    begin, end = f"<{tag}>", f"</{tag}>"
    bodies: list[str | None] = []
    position = text.find(begin)
    while position >= 0:
        position += len(begin)
        close = text.find(end, position)
        if close < 0:
            return [*bodies, None]
        bodies.append(text[position:close])
        position = text.find(begin, close)
    return bodies


def _json_call(body: str | None, key: str, tools: Sequence[Schema], convention: Convention) -> Call:
    """Read a call that is a JSON object with a name and, under `key`, its arguments."""
    if body is None:
        return _malformed_call("", "it has no </tool_call>", convention)
    value = _parse_json(body)
    if isinstance(value, str):
        return _malformed_call("", f"it is not JSON ({value})", convention)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _malformed_call("", "it has no name", convention)
    tool = _tool(name, tools)
    if tool is None:
        return _unknown_tool_call(name, tools)
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return _malformed_call(name, f"its {key} are not an object", convention)
    return _checked_call(name, arguments, tool, convention)


def _parse_json(text: str) -> Any:
    """Parse a JSON object or list; for any other text, return the error as a one-line string."""
    if len(text) > MAX_CHARACTERS:
        return f"it is longer than {MAX_CHARACTERS} characters"
    try:
        value = json.loads(text, parse_constant=_refuse_constant, strict=False)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # integers of thousands of digits; deep nesting
        return "nested too deeply" if isinstance(error, RecursionError) else "a number that is too long or not finite"
    return value if isinstance(value, dict | list) else "no object"


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


def _checked_call(name: str, arguments: Mapping[str, Any], tool: Schema, convention: Convention) -> Call:
    """Return a call; it is a malformed one if an argument is unknown to the tool or a required argument is missing."""
    parameters = _parameters(tool)
    if unknown := [argument for argument in arguments if argument not in parameters]:
        names = ", ".join(parameters) or "no arguments"
        return _malformed_call(name, f"{name} has no argument {_excerpt(unknown[0])}; it takes {names}", convention)
    if missing := [
        argument for argument in tool["function"]["parameters"].get("required", ()) if argument not in arguments
    ]:
        return _malformed_call(name, f"{name} needs the argument {missing[0]}", convention)
    return Call(name, dict(arguments))


def _tool(name: str, tools: Sequence[Schema]) -> Schema | None:
    return next((tool for tool in tools if tool["function"]["name"] == name), None)


def _parameters(tool: Schema) -> Mapping[str, Mapping[str, Any]]:
    parameters: Mapping[str, Mapping[str, Any]] = tool["function"]["parameters"]["properties"]
    return parameters


def _unknown_tool_call(name: str, tools: Sequence[Schema]) -> Call:
    names = ", ".join(tool["function"]["name"] for tool in tools)
    return Call(name, error=f"error: there is no tool {_excerpt(name)}; there are {names or 'none'}")


def _malformed_call(name: str, reason: str, convention: Convention) -> Call:
    return Call(name, error=f"error: this call cannot be read, {reason}; write {convention.example}")


def _excerpt(text: str) -> str:
    return repr(text[:60])


HERMES = Convention(
    "hermes",
    "tool",
    '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>',
    _parse_hermes,
    _write_hermes,
)
LLAMA = Convention("llama", "tool", '{"name": "NAME", "parameters": {"ARGUMENT": VALUE}}', _parse_llama, _write_llama)
PLAIN = Convention("plain", "user", "<call>NAME(VALUE, VALUE)</call>", _parse_plain, _write_plain)
CONVENTIONS = {convention.name: convention for convention in (HERMES, LLAMA, PLAIN)}
