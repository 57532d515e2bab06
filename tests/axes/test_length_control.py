"""Axis `length_control`: where thinking is interrupted, what length costs, and which rollouts were affected."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.axes.length_control import (
    Interruption,
    LengthControl,
    NoLengthControl,
    Penalty,
    interruption_points,
    overlong_penalty,
)
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Rollout

INTERRUPTION: dict[str, Any] = {"low": 10, "high": 12, "end_of_thinking": "</t>", "phrase": "time is up </t>"}
# The paper's values in tokens: a limit of 14k and a buffer of 2k.
LIMIT, BUFFER = 14336, 2048


def rollout(tokens: int = 3, correct: bool = False, forced: tuple[int, ...] = ()) -> Rollout:
    marks = [int(place in forced) for place in range(tokens)]
    return Rollout([1] * tokens, [0.0] * tokens, [0] * tokens, marks, "stop", float(correct), correct)


def decode(tokens: list[int]) -> str:
    return "".join("</t>" if token == 2 else "x" for token in tokens)


def control(name: str) -> LengthControl:
    return {"interruption": Interruption(**INTERRUPTION), "penalty": Penalty(20, 5), "none": NoLengthControl()}[name]


@pytest.mark.parametrize("over", ["rollouts", "groups"])
def test_interruption_points_are_uniform_and_include_both_ends(over: str) -> None:
    """Holds within a group, and across groups whose keys differ only in the last number."""
    if over == "rollouts":
        points = interruption_points(3, 7, 20_000, (0, 3, 5))
    else:
        points = tuple(interruption_points(3, 7, 1, (0, 3, key))[0] for key in range(5_000))
    shares = {point: number / len(points) for point, number in Counter(points).items()}
    # Five standard errors.
    assert shares == {point: pytest.approx(0.2, abs=5 * (0.16 / len(points)) ** 0.5) for point in range(3, 8)}


def test_the_key_determines_the_points() -> None:
    keys = [(0, 3, 5), (0, 3, 6), (1, 3, 5), (0, 2, 5)]
    points = [interruption_points(10_000, 12_000, 16, key) for key in keys]
    assert points == [Interruption(10_000, 12_000, "t", "t").interrupt_at(16, key) for key in keys]
    assert len(set(points)) == len(keys)
    assert min(len(set(row)) for row in points) > 12


@given(low=st.integers(1, 30), width=st.integers(0, 30), completions=st.integers(1, 40), key=st.integers(0, 99))
def test_every_rollout_has_a_point_within_the_bounds(low: int, width: int, completions: int, key: int) -> None:
    points = interruption_points(low, low + width, completions, (key,))
    assert len(points) == completions
    assert all(type(point) is int and low <= point <= low + width for point in points)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (1, 0.0),
        (LIMIT - BUFFER, 0.0),
        (LIMIT - BUFFER + 1, -1 / BUFFER),
        (LIMIT - BUFFER // 2, -0.5),
        (LIMIT - 1, -(BUFFER - 1) / BUFFER),
        (LIMIT, -1.0),
        (LIMIT + 1, -1.0),
        (10 * LIMIT, -1.0),
    ],
)
def test_penalty_at_its_corners(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, LIMIT, BUFFER) == penalty
    choice = Penalty(LIMIT, BUFFER)
    assert choice.reward(1.0, True, tokens) == 1.0 + penalty
    assert choice.reward(-1.0, False, tokens) == -1.0
    assert choice.acts_on(rollout(tokens, correct=True), decode) is (penalty < 0)
    assert not choice.acts_on(rollout(tokens, correct=False), decode)
    for_all = Penalty(LIMIT, BUFFER, only_correct=False)
    for correct, reward in ((True, 1.0), (False, -1.0)):
        assert for_all.reward(reward, correct, tokens) == reward + penalty
        assert for_all.acts_on(rollout(tokens, correct=correct), decode) is (penalty < 0)


@given(tokens=st.integers(1, 300), limit=st.integers(1, 200), part=st.floats(0.01, 1))
def test_penalty_is_the_papers_formula(tokens: int, limit: int, part: float) -> None:
    buffer = max(1, int(part * limit))
    formula = float(np.clip((limit - tokens) / buffer - 1, -1, 0))
    assert overlong_penalty(tokens, limit, buffer) == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("name", ["interruption", "none"])
def test_only_the_penalty_changes_rewards_and_only_interruption_interrupts(name: str) -> None:
    assert [control(name).reward(reward, True, 10**6) for reward in (-1.0, 0.3, 1.0)] == [-1.0, 0.3, 1.0]
    assert Penalty(20, 5).interrupt_at(4, (0,)) == NoLengthControl().interrupt_at(4, (0,)) == ()
    assert len(control("interruption").interrupt_at(4, (0,))) == 4


@pytest.mark.parametrize(
    ("name", "sampled", "end_at", "acted"),
    [
        ("interruption", rollout(30), 11, False),  # thinking ends with the twelfth token, in time for every point
        ("interruption", rollout(30), 12, True),
        ("interruption", rollout(30), None, True),
        ("interruption", rollout(12), None, False),  # the rollout stopped by itself
        ("interruption", rollout(30, correct=True), 5, False),
        ("interruption", rollout(30, forced=(29,)), 5, True),
        ("interruption", rollout(9, forced=(8,)), 8, True),
        ("penalty", rollout(15, correct=True), None, False),
        ("penalty", rollout(16, correct=True), 0, True),
        ("penalty", rollout(99, forced=(3,)), None, False),
        ("none", rollout(10**3, correct=True, forced=(1,)), None, False),
    ],
)
def test_which_rollouts_a_control_acted_on(name: str, sampled: Rollout, end_at: int | None, acted: bool) -> None:
    sampled = dataclasses.replace(sampled, tokens=[2 if t == end_at else 1 for t in range(len(sampled.tokens))])
    assert control(name).acts_on(sampled, decode) is acted


@pytest.mark.parametrize(
    ("tokens", "end_at", "could"), [(10, None, False), (11, None, True), (11, 9, False), (11, 10, True)]
)
def test_interruption_could_act_on_a_rollout_that_passes_its_earliest_point(
    tokens: int, end_at: int | None, could: bool
) -> None:
    """The drawn point lies between `low` and `high`, so a counter of 0 may only mean that no rollout reached `low`."""
    sampled = dataclasses.replace(rollout(tokens), tokens=[2 if t == end_at else 1 for t in range(tokens)])
    assert control("interruption").could_act_on(sampled, decode) is could


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"low": 0}, r"length_control\.low: 0 must be a whole number"),
        ({"low": 10.0}, r"length_control\.low: 10\.0 must be"),
        ({"high": True}, r"length_control\.high: True must be"),
        ({"high": "12"}, r"length_control\.high: '12' must be"),
        ({"high": 9}, r"length_control\.high: 9 is below length_control\.low, 10"),
        ({"phrase": "time is up"}, r"length_control\.phrase: 'time is up' must end with .*'</t>'"),
        ({"phrase": ""}, r"length_control\.phrase: '' must end with"),
        ({"phrase": "</t> time is up"}, r"length_control\.phrase: "),
        ({"phrase": None}, r"length_control\.phrase: None must end with"),
        ({"phrase": "7", "end_of_thinking": 7}, r"length_control\.phrase: '7' must end with .*, 7"),
        ({"end_of_thinking": ""}, r"length_control\.phrase: .* must end with length_control\.end_of_thinking, ''"),
    ],
)
def test_bad_interruptions(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        Interruption(**{**INTERRUPTION, **changed})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("limit", "buffer", "message"),
    [
        (0, 1, r"length_control\.limit: 0 must be a whole number"),
        (20, 0, r"length_control\.buffer: 0 must be"),
        (20, 2.5, r"length_control\.buffer: 2\.5 must be"),
        (20, 21, r"length_control\.buffer: 21 exceeds length_control\.limit, 20"),
    ],
)
def test_bad_penalties(limit: Any, buffer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        Penalty(limit, buffer)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigurationError, match=r"length_control\.only_correct: 'no' must be true or false"):
        Penalty(20, 5, only_correct="no")  # type: ignore[arg-type]


def test_bounds_that_are_just_valid() -> None:
    assert Interruption(**{**INTERRUPTION, "high": 10, "phrase": "</t>"}).interrupt_at(3, (0,)) == (10, 10, 10)
    assert Penalty(20, 20).reward(1.0, True, 10) == 0.5


@pytest.mark.parametrize(("max_new_tokens", "fits"), [(12, False), (13, False), (14, True), (10**6, True)])
def test_an_interruption_leaves_room_for_an_answer(max_new_tokens: int, fits: bool) -> None:
    problem = control("interruption").check_limit(max_new_tokens)
    assert problem == (
        None
        if fits
        else f"length_control.high: 12 and a phrase of 1 tokens must leave room for an answer in "
        f"context.max_new_tokens, {max_new_tokens}"
    )
    assert control("penalty").check_limit(max_new_tokens) is control("none").check_limit(max_new_tokens) is None
