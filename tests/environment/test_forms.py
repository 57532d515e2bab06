"""TRL's form and the text form of environments, wrapped for our protocol, in this process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.environment.forms import AnswerError, form_of, properties_of, wrap
from lightning_scalerl.environment.protocol import Call, Observation, Turn
from lightning_scalerl.environment.worker import Worker
from tests.environment.environments_for_tests import Calculator, Obedient


class Walk:
    """TRL's form, with a tool `step` and a column `seed`, names that the text form also uses."""

    start: Any = None
    reward: Any = None

    def reset(self, seed: int, **kwargs: Any) -> Any:
        return self.start

    def step(self, text: str) -> str:
        raise MemoryError

    def get_reward(self) -> Any:
        return self.reward


def test_forms_are_recognized_by_their_signatures() -> None:
    assert form_of(Calculator()) == "tools" == form_of(Walk()) and form_of(Obedient()) == "text"
    with pytest.raises(ConfigurationError, match="int has no method reset"):
        wrap(3)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, Observation()),
        ("Go.", Observation(("Go.",))),
        (
            [{"role": "system", "content": "Be brief.", "name": "x"}],
            Observation(messages=({"role": "system", "content": "Be brief."},)),
        ),
        (3, None),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
    ],
)
def test_what_reset_may_return(monkeypatch: pytest.MonkeyPatch, start: Any, expected: Observation | None) -> None:
    monkeypatch.setattr(Walk, "start", start)
    environment = wrap(Walk())
    if expected is not None:
        assert environment.reset({"seed": 1, "prompt": "?"}, 0) == expected
        return
    with pytest.raises(AnswerError, match="it must be a text, a list of messages with texts, or None"):
        environment.reset({"seed": 1}, 0)


@pytest.mark.parametrize(
    ("reward", "fine"),
    [
        (None, True),
        (1, True),
        (True, True),
        (float("inf"), False),
        ("1", False),
        (np.ones(2), False),
        (torch.ones(2), False),
        pytest.param(10**400, False, id="huge"),
    ],
)
def test_which_rewards_are_valid(monkeypatch: pytest.MonkeyPatch, reward: Any, fine: bool) -> None:
    monkeypatch.setattr(Walk, "reward", reward)
    if fine:
        assert wrap(Walk()).finish() == Observation(reward=reward, terminated=True)
        return
    with pytest.raises(AnswerError, match="must be a finite number, or None"):
        wrap(Walk()).finish()


def test_info_keeps_numbers_and_texts() -> None:
    """Arrays with several elements, as observations of Gymnasium, are left out."""

    class Text:
        def reset(self, seed: int) -> None: ...

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            info = {
                "n": 1,
                "flag": True,
                "why": "x",
                "np": np.float32(3),
                "zero_d": np.array(4.0),
                "one": torch.ones(1),
            }
            left_out = {"obs": np.ones(2), "mask": np.ones((2, 2)), "tensor": torch.ones(2), "empty": np.ones(0)}
            return "on", 0.0, False, False, {**left_out, "nan": math.nan, "none": None, "huge": 10**400, **info}

    info = wrap(Text()).step(Turn("")).info
    assert info == {"n": 1.0, "flag": 1.0, "why": "x", "np": 3.0, "zero_d": 4.0, "one": 1.0}


def test_a_tool_that_runs_out_of_memory_raises() -> None:
    with pytest.raises(MemoryError):
        wrap(Walk()).step(Turn("", [Call("step", {"text": ""})]))


def test_private_and_protocol_methods_are_not_tools() -> None:
    observation = wrap(Calculator()).step(Turn("", [Call("_not_a_tool"), Call("get_reward"), Call("reset")]))
    assert (
        observation.malformed == 3
        and observation.raised == 0
        and observation.texts[0] == "error: there is no tool '_not_a_tool'"
    )


class Words:
    def reset(self, **row: Any) -> None: ...

    def say(self, *words: str) -> None:
        """Say.

        Args:
            words: what.
        """


class Options(Words):
    def say(self, first: str, **options: str) -> None:  # type: ignore[override]
        """Say.

        Args:
            first: what.
            options: how.
        """


class Position(Words):
    def say(self, word: str, /) -> None:  # type: ignore[override]
        """Say.

        Args:
            word: what.
        """


class Keyword(Words):
    def say(self, *, word: str) -> None:  # type: ignore[override]
        """Say.

        Args:
            word: what.
        """


class Columns:
    def reset(self, seed: int, **row: Any) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return text, 1.0, True, False, {}


class Seedless(Columns):
    def reset(self) -> None: ...  # type: ignore[override]


class Gymnasium(Columns):
    def reset(self, *, seed: int | None = None, options: Any = None) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("factory", "remedy"), [(Columns, r"reset\(self, seed\) without \*\*row;"), (Seedless, r"reset\(self, seed\);")]
)
def test_a_step_that_is_taken_for_a_tool_is_refused_with_the_text_forms_signature(factory: type, remedy: str) -> None:
    message = rf"^environment: tool 'step' has no schema .*; for an environment in text form write {remedy} for a tool"
    with pytest.raises(ConfigurationError, match=message):
        properties_of(factory())
    assert properties_of(Gymnasium()).form == "text"


@pytest.mark.parametrize(
    ("factory", "argument"),
    [(Words, r"\*words"), (Options, r"\*\*options"), (Position, "word by position only")],
)
def test_a_tool_whose_arguments_have_no_names_is_refused(factory: type, argument: str) -> None:
    """Each call of such a tool would fail, because calls give arguments by name."""
    with pytest.raises(ConfigurationError, match=f"^environment: tool 'say' takes {argument}, and a call gives"):
        properties_of(factory())
    assert len(properties_of(Keyword()).tools) == 1


def test_the_character_limit_covers_all_texts_of_a_turn() -> None:
    worker = Worker({"": Calculator}, most_characters=5)
    worker.open("", {"answer": 1}, 0, None)
    observation = worker.step(Turn("", [Call("later", {"text": "abcd"}), Call("later", {"text": "efgh"})]))
    assert observation.texts == ("abcd", "e [3 characters cut]") and observation.cut == 3


@pytest.mark.parametrize(("name", "value"), [("replayable", "no"), ("seconds", -1.0), ("seconds", True)])
def test_declared_values_are_checked(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(Obedient, name, value, raising=False)
    with pytest.raises(ConfigurationError, match=f"environment: {name} of Obedient is {value!r}"):
        properties_of(Obedient())
