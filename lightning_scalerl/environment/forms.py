"""Adapters from the user's environments to our protocol, for TRL's form and for text form.

An environment of either form may have these attributes: `replayable = False` if the same seed and turns may give other
answers, and `seconds`, the time of one call on virtual clocks.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.environment.protocol import Declared, Environment, Observation, Schema, Turn

Factory = Callable[[], Any]
# Methods of TRL's form that are not tools.
_NOT_TOOLS = {"reset", "get_reward"}
# Limits on `info`: number of entries, and characters of an entry's text.
_MAX_INFO, _INFO_CHARACTERS = 32, 200


class AnswerError(Exception):
    """Raised for an unusable answer of an environment; the message is one line."""


class ToolEnvironment:
    """Environment in TRL's form (`environment_factory` of TRL 1.16).

    `reset(**row)` returns a text, messages or None, public methods are tools, and `get_reward()` is optional. A turn
    without calls ends the conversation. A tool that raises is answered with its error, as in TRL.

    Args:
        user: the user's instance.
    """

    def __init__(self, user: Any) -> None:
        self._user = user
        self._tools = dict(tools_of(user))

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Pass the row to `reset`; TRL's form has no seed (the worker seeds `random` and numpy)."""
        start = _await_result(self._user.reset(**row))
        if start is None:
            return Observation()
        if isinstance(start, str):
            return Observation(texts=(start,))
        if isinstance(start, list) and all(map(_is_message, start)):
            return Observation(
                messages=tuple({"role": message["role"], "content": message["content"]} for message in start)
            )
        raise AnswerError(
            f"reset returned {_excerpt(start)}; it must be a text, a list of messages with texts, or None"
        )

    def step(self, turn: Turn) -> Observation:
        """Call the turn's tools in their order."""
        if not turn.calls:
            return self.finish()
        texts, malformed, raised = [], 0, 0
        for call in turn.calls:
            if call.error or call.name not in self._tools:
                malformed += 1
                texts.append(call.error or f"error: there is no tool {call.name!r}")
                continue
            try:
                texts.append(str(_await_result(self._tools[call.name](**call.arguments))))
            except MemoryError:  # the whole process ran out of memory; its state is unknown
                raise
            except Exception as error:
                raised += 1
                texts.append(f"error: {error_line(error)}")
        return Observation(texts=tuple(texts), malformed=malformed, raised=raised)

    def finish(self) -> Observation:
        """Return the reward of `get_reward()`; None without that method, because reward functions then grade."""
        reward = None
        if hasattr(self._user, "get_reward"):
            reward = _checked_reward("get_reward", _await_result(self._user.get_reward()))
        return Observation(reward=reward, terminated=True)


class TextEnvironment:
    """Environment in text form: `reset(seed)`, and `step(text) -> (text, reward, terminated, truncated, info)`.

    `reset` returns a text, None, or a text with `info`, as Gymnasium and GEM do.

    Args:
        user: the user's instance.
    """

    def __init__(self, user: Any) -> None:
        self._user = user

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Pass the seed to `reset`; the text form has no row."""
        start = _await_result(self._user.reset(seed=seed))
        text, info = start if isinstance(start, tuple) and len(start) == 2 else (start, {})
        if text is not None and not isinstance(text, str):
            raise AnswerError(f"reset returned {_excerpt(text)}; it must be a text")
        return Observation(texts=() if text is None else (text,), info=_filter_info(info))

    def step(self, turn: Turn) -> Observation:
        """Pass the turn's text to `step`."""
        answer = _await_result(self._user.step(turn.text))
        if not isinstance(answer, tuple) or len(answer) != 5 or not isinstance(answer[0], str):
            raise AnswerError(
                f"step returned {_excerpt(answer)}; it must be (text, reward, terminated, truncated, info)"
            )
        text, reward, terminated, truncated, info = answer
        return Observation(
            texts=(text,),
            reward=_checked_reward("step", reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=_filter_info(info),
        )

    def finish(self) -> Observation:
        """Return no further reward, because every step has returned one."""
        return Observation(truncated=True)


def wrap(user: Any) -> Environment:
    """Wrap a user's instance in an adapter to our protocol.

    Raises:
        ConfigurationError: it has neither form.
    """
    return ToolEnvironment(user) if form_of(user) == "tools" else TextEnvironment(user)


def form_of(user: Any) -> Literal["tools", "text"]:
    """Return the form of a user's instance.

    The form is "text" if the instance has a method `step` and its `reset` takes `seed` but no arbitrary columns. Any
    other instance has the form "tools".

    Raises:
        ConfigurationError: it has neither form.
    """
    name = type(user).__name__
    if not callable(getattr(user, "reset", None)):
        raise ConfigurationError(f"environment: {name} has no method reset")
    any_column = _any_column(user)
    has_step = callable(getattr(user, "step", None))
    if has_step and "seed" in inspect.signature(user.reset).parameters and not any_column:
        return "text"
    if not any_column and not dict(tools_of(user)):
        raise ConfigurationError(
            f"environment: {name} has neither TRL's form (reset(**row), public methods as tools) nor text form "
            "(reset(seed), step(text))"
        )
    return "tools"


def _any_column(user: Any) -> str:
    """Return the parameter of `reset` for arbitrary columns, such as `**row`; empty if it has none."""
    parameters = inspect.signature(user.reset).parameters.values()
    return next((f"**{parameter.name}" for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")


def tools_of(user: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield name and method of each tool: the public methods, found as TRL finds them."""
    # Inspect the class: on the instance, properties would be evaluated.
    for name, _ in inspect.getmembers(type(user), predicate=inspect.isfunction):
        if name not in _NOT_TOOLS and not name.startswith("_"):
            yield name, getattr(user, name)


def properties_of(user: Any) -> Declared:
    """Return the properties of a user's instance that are known before a conversation.

    Raises:
        ConfigurationError: it has neither form, or a tool lacks a type hint or docstring.
    """
    form = form_of(user)
    replayable, seconds = getattr(user, "replayable", True), getattr(user, "seconds", 0.0)
    if not isinstance(replayable, bool):
        raise ConfigurationError(f"environment: replayable of {type(user).__name__} is {replayable!r}, not a bool")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigurationError(f"environment: seconds of {type(user).__name__} is {seconds!r}, not a number from 0")
    return Declared(
        form=form,
        tools=tuple(_schema(name, method, user) for name, method in tools_of(user)) if form == "tools" else (),
        owns_reward=form == "text" or hasattr(user, "get_reward"),
        replayable=replayable,
        seconds=float(seconds),
    )


def _schema(name: str, method: Callable[..., Any], user: Any) -> Schema:
    """Return the schema of a tool of `user`. Its method needs type hints and a docstring in Google's form.

    Raises:
        ConfigurationError: it has no schema, or has arguments that a call by name cannot give.
    """
    from transformers.utils import get_json_schema

    text_form = ""
    if name == "step":  # it may be meant as the method of the text form
        without = f" without {any_column}" if (any_column := _any_column(user)) else ""
        text_form = f"for an environment in text form write reset(self, seed){without}; for a tool "
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            argument = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
            by_position = " by position only" if parameter.kind is parameter.POSITIONAL_ONLY else ""
            raise ConfigurationError(
                f"environment: tool {name!r} takes {argument}{by_position}, and a "
                f"call gives each argument by its name; {text_form}give it arguments with names, or put _ before the "
                "name of a method that is not a tool"
            )
    try:
        schema: Schema = get_json_schema(method)
    except Exception as error:
        raise ConfigurationError(
            f"environment: tool {name!r} has no schema ({error_line(error)}); {text_form}give each argument a type "
            "hint and a line in the docstring's Args, or put _ before the name of a method that is not a tool"
        ) from error
    return schema


def _await_result(value: Any) -> Any:
    """Return a value, or the result of a coroutine."""
    return _loop().run_until_complete(_result(value)) if inspect.isawaitable(value) else value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return one event loop for all calls, because an environment may keep objects that are tied to a loop."""
    return asyncio.new_event_loop()


async def _result(value: Any) -> Any:
    return await value


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _checked_reward(method: str, value: Any) -> float | None:
    """Return a reward as a float. Scalars of numpy and torch are accepted.

    Raises:
        AnswerError: it is neither a finite number nor None.
    """
    if value is None:
        return None
    number = _number(value)
    if number is None:
        raise AnswerError(f"{method} returned the reward {_excerpt(value)}; it must be a finite number, or None")
    return number


def _number(value: Any) -> float | None:
    """Return a finite number, or an array with one element, as a float; None for anything else."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # an array of several elements, or an integer that is too large
        return None
    return number if math.isfinite(number) else None


def _filter_info(info: Any) -> dict[str, float | str]:
    """Keep the numbers and short texts of `info`."""
    if not isinstance(info, Mapping):
        return {}
    entries: dict[str, float | str] = {}
    for name, value in list(info.items())[:_MAX_INFO]:
        if isinstance(value, str):
            entries[str(name)[:_INFO_CHARACTERS]] = value[:_INFO_CHARACTERS]
        elif (number := _number(value)) is not None:
            entries[str(name)[:_INFO_CHARACTERS]] = number
    return entries


def _excerpt(value: object) -> str:
    return " ".join(repr(value)[:80].split())
