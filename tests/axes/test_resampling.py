"""Axis `resampling` and the prompt source: retired prompts, epochs and resume."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.resampling import NoPositiveResampling, Resampling, UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Prompt
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from tests.examples import examples
from tests.helpers import make_group


def source_of(size: int, resampling: Resampling | None = None, key: int = 0) -> PromptSource:
    pool = [Prompt(f"p{number}", f"{number}+{number}=", "1") for number in range(size)]
    return PromptSource(pool, (key, 2), resampling or NoPositiveResampling(0.9))


def take(source: PromptSource, count: int) -> list[str]:
    return [source.next().prompt_id for _ in range(count)]


@pytest.mark.parametrize(
    ("correct", "completions", "retires"),
    [(9, 10, True), (18, 20, True), (27, 30, True), (8, 10, False), (14, 16, False), (15, 16, True), (16, 16, True)],
)
def test_retired_at_the_threshold(correct: int, completions: int, retires: bool) -> None:
    """A pass rate of exactly 0.9 retires a prompt, also when a group computes it in floating point."""
    rate = make_group([1.0] * correct + [0.0] * (completions - correct)).pass_rate
    rule = NoPositiveResampling(0.9)
    assert rule.retires([rate]) is retires
    assert rule.retires([0.0, rate, 0.5]) is retires
    source = source_of(3)
    source.resolved("p1", rate)
    assert source.retired == retires
    assert ("p1" in take(source, 6)) is not retires


def test_rates_are_not_pooled_over_groups() -> None:
    rule = NoPositiveResampling(0.9)
    assert not rule.retires([])
    assert not rule.retires([0.89] * 20)
    assert rule.retires([0.0] * 20 + [0.95])


def test_copies_are_retired_together_as_one_prompt() -> None:
    pool = [Prompt("a", "1", "1"), Prompt("b", "2", "1")]
    pool += [replace(pool[0], prompt_id=f"a#{copy}", copy_of="a") for copy in (1, 2)]
    source = PromptSource(pool, (0, 2), NoPositiveResampling(0.9))
    source.resolved("a#2", 1.0)
    assert set(take(source, 8)) == {"b"} and source.retired == 1 and not source.exhausted
    assert list(source.histories()) == [source.history("a")] == [source.history("a#1")] == [[1.0]]
    source.resolved("b", 1.0)
    assert source.retired == 2 and source.exhausted
    state = {**source.state_dict(), "history": {"a": [0.5], "a#2": [1.0]}, "retired": ["a#1", "a#2"]}
    source.load_state_dict(state)  # by a version that retired each copy
    assert source.retired == 1 and source.history("a") == [0.5, 1.0] and set(take(source, 8)) == {"b"}


class LastGroup(Resampling):
    """A rule that looks at the last group only, so its answer can change back."""

    def retires(self, pass_rates: Sequence[float]) -> bool:
        return pass_rates[-1] >= 0.9


@pytest.mark.parametrize("rule", [NoPositiveResampling(0.9), LastGroup()])
def test_a_retired_prompt_stays_retired(rule: Resampling) -> None:
    """Later failures of groups that were in flight do not bring a prompt back, even if the rule then says so."""
    source = source_of(4, rule)
    source.resolved("p2", 1.0)
    for _ in range(5):
        source.resolved("p2", 0.0)
        assert sorted(take(source, 3)) == ["p0", "p1", "p3"]
    assert source.retired == 1
    assert source.history("p2") == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert list(source.histories()) == [source.history("p2")]
    assert not source.history("p0")


def test_uniform_never_retires() -> None:
    source = source_of(3, UniformResampling())
    assert not UniformResampling().retires([1.0] * 9)
    for _ in range(4):
        assert sorted(take(source, 3)) == ["p0", "p1", "p2"]
        for prompt_id in ("p0", "p1", "p2"):
            source.resolved(prompt_id, 1.0)
    assert source.retired == 0
    assert [list(rates) for rates in source.histories()] == [[1.0] * 4] * 3


# An event: draw the next prompt (None), or complete a group in flight (its index, its pass rate).
EVENTS = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 50), st.sampled_from([0.0, 0.5, 0.89, 0.9, 1.0]))))


@settings(max_examples=examples(200))
@given(size=st.integers(1, 7), key=st.integers(0, 9), events=EVENTS)
def test_an_epoch_draws_each_active_prompt_once(size: int, key: int, events: list[Any]) -> None:
    """Groups resolve late and in any order: one prompt may have several in flight, from several epochs."""
    source = source_of(size, key=key)
    active = {f"p{number}" for number in range(size)}
    drawn: set[str] = set()
    in_flight: list[str] = []
    epoch = 0
    for event in [*events, *[None] * (2 * size)]:
        if event is not None and in_flight:
            place, rate = event
            prompt_id = in_flight.pop(place % len(in_flight))
            source.resolved(prompt_id, rate)
            active -= {prompt_id} if rate >= 0.9 else set()
            assert source.retired == size - len(active)
        elif event is None and not active:
            with pytest.raises(PoolExhaustedError):
                source.next()
        elif event is None:
            if active <= drawn:
                drawn, epoch = set(), epoch + 1
            prompt = source.next()
            assert prompt.prompt_id in active - drawn
            assert prompt == source.by_id(prompt.prompt_id)
            assert epoch < source.epoch <= epoch + 1
            drawn.add(prompt.prompt_id)
            in_flight.append(prompt.prompt_id)


@settings(max_examples=examples(100))
@given(size=st.integers(1, 7), events=EVENTS, stop=st.integers(0, 30))
def test_a_resume_in_the_middle_of_an_epoch(size: int, events: list[Any], stop: int) -> None:
    def follow(source: PromptSource, in_flight: list[str], events: list[Any]) -> list[Any]:
        """Return everything visible from outside after each event."""
        outcome: list[Any] = []
        for event in events:
            if event is None:
                try:
                    in_flight.append(source.next().prompt_id)
                except PoolExhaustedError as error:
                    outcome.append(str(error))
            elif in_flight:
                source.resolved(in_flight.pop(event[0] % len(in_flight)), event[1])
            histories = [list(source.history(f"p{number}")) for number in range(size)]
            seen = sorted(list(rates) for rates in source.histories())
            outcome.append((list(in_flight), source.epoch, source.retired, histories, seen))
        return outcome

    events = [*events, *[None] * (2 * size)]
    whole, in_flight = source_of(size), []
    follow(whole, in_flight, events[:stop])
    state, waiting = whole.state_dict(), list(in_flight)
    snapshot = copy.deepcopy(state)
    expected = follow(whole, in_flight, events[stop:])
    # The checkpoint is a copy: the running source does not change it.
    assert state == snapshot
    resumed = source_of(size)
    take(resumed, 1)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert resumed.state_dict() == snapshot
    assert follow(resumed, waiting, events[stop:]) == expected


def test_an_exhausted_pool_raises_a_one_line_error() -> None:
    source = source_of(2)
    source.resolved("p0", 0.9)
    assert take(source, 3) == ["p1"] * 3
    source.resolved("p1", 0.95)
    resumed = source_of(2)
    resumed.load_state_dict(source.state_dict())
    for exhausted in (source, resumed):
        with pytest.raises(
            PoolExhaustedError, match=r"all 2 prompts of the pool are retired.*resampling=uniform"
        ) as caught:
            exhausted.next()
        assert "\n" not in str(caught.value)


def test_key_and_epoch_determine_the_order() -> None:
    orders = [tuple(take(source_of(9, key=key), 9)) for key in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    source = source_of(9, UniformResampling())
    assert len({tuple(take(source, 9)) for _ in range(5)}) == 5


def test_empty_pools_and_duplicate_ids_are_refused() -> None:
    prompt = Prompt("twice", "1+1=", "2")
    with pytest.raises(ConfigurationError, match="its pool of training prompts is empty"):
        PromptSource([], (0,), UniformResampling())
    with pytest.raises(ConfigurationError, match="prompt id 'twice' occurs twice"):
        PromptSource([Prompt("once", "", ""), prompt, prompt], (0,), UniformResampling())


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, 1.01, 90, True, float("nan"), float("inf"), "0.9", None])
def test_bad_pass_rates(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"resampling\.pass_rate: .* must be above 0 and at most 1") as error:
        NoPositiveResampling(bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("good", [0.01, 1, 1.0])
def test_pass_rates_that_are_just_valid(good: float) -> None:
    assert NoPositiveResampling(good).retires([good])
    assert not NoPositiveResampling(good).retires([good - 0.005])
