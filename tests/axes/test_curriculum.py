"""Axis `curriculum`: which prompts may be drawn when, how long completions may be, and that a stop changes neither."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.curriculum import (
    Curriculum,
    ExponentialCurriculum,
    LinearCurriculum,
    NoCurriculum,
    StagedLength,
    difficulty,
)
from lightning_scalerl.axes.length_control import Interruption
from lightning_scalerl.axes.resampling import NoPositiveResampling, Resampling, UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import Prompt
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from tests.helpers import CountingTask, row, sampler

KEY = (7, 2)


def pool_of(levels: Sequence[float]) -> list[Prompt]:
    return [Prompt(f"p{number}", "1+1=", "2", f"Level {level}") for number, level in enumerate(levels)]


def source_of(levels: Sequence[float], curriculum: Curriculum, resampling: Resampling | None = None) -> PromptSource:
    return PromptSource(pool_of(levels), KEY, resampling or UniformResampling(), curriculum)


def drawn(source: PromptSource, count: int, step: int = 0) -> list[int]:
    """Numbers of the next prompts."""
    return [int(source.next(step).prompt_id[1:]) for _ in range(count)]


# --- what a step allows --------------------------------------------------------------------------------------


def test_shares_by_hand() -> None:
    linear = LinearCurriculum(start=0.2, over_steps=4)
    assert [linear.share(step) for step in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])
    exponential = ExponentialCurriculum(start=1 / 16, over_steps=4)
    assert [exponential.share(step) for step in range(7)] == pytest.approx([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 1, 1])
    for choice in (NoCurriculum(), StagedLength(), LinearCurriculum(1.0, 5), ExponentialCurriculum(1.0, 5)):
        assert [choice.share(step) for step in range(9)] == [1.0] * 9


def test_lengths_by_hand() -> None:
    staged = StagedLength(shares=[0.25, 0.5, 1.0], steps=2)
    assert [staged.max_new_tokens(9, step) for step in range(7)] == [3, 3, 5, 5, 9, 9, 9]
    assert staged.max_new_tokens(1, 0) == 1, "never none at all"
    assert [LinearCurriculum().max_new_tokens(9, step) for step in (0, 999)] == [9, 9]


@pytest.mark.parametrize("kind", [LinearCurriculum, ExponentialCurriculum])
@pytest.mark.parametrize("bad", [0, -0.1, 1.1, True, "0.2", None, float("nan")])
def test_bad_starts(kind: Any, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"curriculum\.start: .* must be above 0 and at most 1"):
        kind(bad, 10)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_bad_steps(bad: Any) -> None:
    for build in (lambda: LinearCurriculum(0.2, bad), lambda: ExponentialCurriculum(0.2, bad)):
        with pytest.raises(ConfigurationError, match=r"curriculum\.over_steps: .* whole number"):
            build()
    with pytest.raises(ConfigurationError, match=r"curriculum\.steps: .* whole number"):
        StagedLength(steps=bad)


@pytest.mark.parametrize("bad", [[], [0.5], [0.0, 1.0], [0.5, 0.5, 1.0], [1.0, 0.5], [0.5, 1.0, 2.0], [-1.0, 1.0]])
def test_bad_stages(bad: list[float]) -> None:
    with pytest.raises(ConfigurationError, match=r"curriculum\.shares: .* must rise from above 0 to 1"):
        StagedLength(shares=bad)


# --- difficulty ----------------------------------------------------------------------------------------------


def test_difficulty_is_the_first_number() -> None:
    for label, expected in (("Level 3", 3.0), ("10", 10.0), ("2.5 digits of 4", 2.5), ("grade-07", 7.0)):
        assert difficulty(Prompt("p", "", "", label)) == expected


def test_numbers_are_compared_as_numbers_and_ties_keep_the_order_of_the_pool() -> None:
    places = LinearCurriculum().places(pool_of([10, 9, 2, 9, 2.5]))
    assert places == [4, 2, 0, 3, 1]


@pytest.mark.parametrize("kind", [LinearCurriculum, ExponentialCurriculum])
@pytest.mark.parametrize("label", ["", "hard"])
def test_a_pool_without_numbers_is_refused_by_name(kind: Any, label: str) -> None:
    pool = [*pool_of([1, 2]), Prompt("unlabelled", "1+1=", "2", label)]
    with pytest.raises(ConfigurationError, match=r"'unlabelled' has no number in its difficulty") as caught:
        PromptSource(pool, KEY, UniformResampling(), kind())
    assert repr(label) in str(caught.value) and "curriculum=none" in str(caught.value)
    assert "\n" not in str(caught.value)
    for choice in (NoCurriculum(), StagedLength()):
        assert PromptSource(pool, KEY, UniformResampling(), choice).next() in pool


# --- which prompts are drawn ---------------------------------------------------------------------------------

LEVELS = [5, 3, 9, 1, 7, 2, 8, 4, 10, 6]


def easiest(count: int) -> set[int]:
    return {number for number, level in enumerate(LEVELS) if level <= count}


@pytest.mark.parametrize("kind", [LinearCurriculum, ExponentialCurriculum])
def test_the_easy_end_opens_step_by_step(kind: Any) -> None:
    choice = kind(start=0.2, over_steps=5)
    source = source_of(LEVELS, choice)
    allowed = [math.ceil(round(10 * choice.share(step), 9)) for step in range(8)]
    assert allowed[0] == 2 and allowed[5:] == [10, 10, 10] and allowed == sorted(allowed)
    for step, count in enumerate(allowed):
        # Two whole epochs at least: everything that is allowed comes, and nothing else.
        assert set(drawn(source, 3 * count, step)) == easiest(count)


def test_an_epoch_is_a_pass_over_what_is_allowed() -> None:
    source = source_of(LEVELS, LinearCurriculum(0.3, 100))
    for epoch in range(4):
        assert sorted(drawn(source, 3)) == sorted(easiest(3))
        assert epoch < source.epoch <= epoch + 1


def test_who_is_let_in_takes_its_turn_in_the_epoch_under_way() -> None:
    """With none drawn twice before all that are allowed by then have been drawn."""
    source = source_of(LEVELS, LinearCurriculum(0.3, 2))  # 3, then 7, then all
    seen = drawn(source, 2, 0)
    assert set(seen) < easiest(3)
    seen += drawn(source, 5, 1)
    assert sorted(seen) == sorted(easiest(7)), "the third of the first three, and the four that were let in"
    seen += drawn(source, 3, 2)
    assert sorted(seen) == list(range(10)) and source.epoch == 1
    assert sorted(drawn(source, 10, 2)) == list(range(10)) and source.epoch == 2


def test_without_a_curriculum_nothing_is_another() -> None:
    """Orders, epochs and state as they have always been."""
    plain = PromptSource(pool_of(LEVELS), KEY, UniformResampling())
    for choice in (NoCurriculum(), LinearCurriculum(1.0, 5), StagedLength()):
        source = source_of(LEVELS, choice)
        assert drawn(source, 25) == drawn(PromptSource(pool_of(LEVELS), KEY, UniformResampling()), 25)
    drawn(plain, 13)
    assert (plain.epoch, plain.state_dict()["epoch"], plain.state_dict()["position"]) == (1.3, 1, 3)
    old = {key: value for key, value in plain.state_dict().items() if key != "taken"}
    resumed = PromptSource(pool_of(LEVELS), KEY, UniformResampling())
    resumed.load_state_dict(old)  # of a checkpoint that was written before there were curricula
    assert drawn(resumed, 9) == drawn(plain, 9)


def test_retired_prompts_never_come_and_the_next_easiest_is_let_in_before_its_time() -> None:
    source = source_of(LEVELS, LinearCurriculum(0.2, 100), NoPositiveResampling(0.9))
    one, two = sorted(easiest(2), key=lambda number: LEVELS[number])
    source.resolved(f"p{one}", 1.0)
    assert drawn(source, 4) == [two] * 4
    source.resolved(f"p{two}", 1.0)
    (third,) = easiest(3) - easiest(2)
    assert drawn(source, 4) == [third] * 4
    for number in easiest(9):
        source.resolved(f"p{number}", 1.0)
    assert drawn(source, 2) == [LEVELS.index(10)] * 2
    source.resolved(f"p{LEVELS.index(10)}", 1.0)
    with pytest.raises(PoolExhaustedError, match="all 10 prompts of the pool are retired"):
        source.next(0)


# --- against a model that is slow and plain ------------------------------------------------------------------


class Plain:
    """The same in sets: an epoch's order, what of it has been drawn, and what may be."""

    def __init__(self, levels: Sequence[float], choice: Curriculum) -> None:
        self.levels, self.choice = levels, choice
        self.ranked = sorted(range(len(levels)), key=lambda number: (levels[number], number))
        self.retired: set[int] = set()
        self.epoch = 0
        self.seen: set[int] = set()
        # An epoch without a curriculum draws everything in its order.
        everything = source_of(levels, NoCurriculum())
        self.orders = [drawn(everything, len(levels)) for _ in range(60)]

    def next(self, step: int) -> int:
        count = math.ceil(self.choice.share(step) * len(self.levels))
        allowed = set(self.ranked[:count]) - self.retired
        if not allowed:
            allowed = {next(number for number in self.ranked if number not in self.retired)}
        if allowed <= self.seen:
            self.epoch, self.seen = self.epoch + 1, set()
        number = next(n for n in self.orders[self.epoch] if n in allowed - self.seen)
        self.seen.add(number)
        return number


# What happens: a prompt is drawn (None), a step goes by, or a group of a prompt is complete and solved or not.
EVENTS = st.lists(st.one_of(st.none(), st.just("step"), st.tuples(st.integers(0, 9), st.booleans())), max_size=40)
CURRICULA = st.one_of(
    st.builds(LinearCurriculum, st.sampled_from([0.1, 0.34, 0.5, 1.0]), st.integers(1, 6)),
    st.builds(ExponentialCurriculum, st.sampled_from([0.1, 0.5]), st.integers(1, 6)),
    st.just(NoCurriculum()),
)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(levels=SIZES, choice=CURRICULA, events=EVENTS)
def test_prompts_come_as_in_the_plain_model(levels: list[int], choice: Curriculum, events: list[Any]) -> None:
    source, plain = source_of(levels, choice, NoPositiveResampling(0.9)), Plain(levels, choice)
    step, before = 0, 0.0
    for event in [*events, *[None] * 5]:
        if event == "step":
            step += 1
        elif isinstance(event, tuple):
            number = event[0] % len(levels)
            source.resolved(f"p{number}", float(event[1]))
            plain.retired |= {number} if event[1] else set()
        elif len(plain.retired) == len(levels):
            with pytest.raises(PoolExhaustedError):
                source.next(step)
        else:
            assert drawn(source, 1, step) == [plain.next(step)]
            assert plain.epoch < source.epoch <= plain.epoch + 1
            assert source.epoch >= before
            before = source.epoch


@settings(max_examples=100, deadline=None)
@given(levels=SIZES, choice=CURRICULA, events=EVENTS, stop=st.integers(0, 30))
def test_a_stop_in_the_middle_changes_no_draw(
    levels: list[int], choice: Curriculum, events: list[Any], stop: int
) -> None:
    def follow(source: PromptSource, events: Sequence[Any], step: int) -> tuple[list[Any], int]:
        seen: list[Any] = []
        for event in events:
            if event == "step":
                step += 1
            elif isinstance(event, tuple):
                source.resolved(f"p{event[0] % len(levels)}", float(event[1]))
            elif not source.exhausted:
                seen.append((source.next(step).prompt_id, source.epoch, source.retired))
        return seen, step

    events = [*events, *[None] * (2 * len(levels))]
    whole = source_of(levels, choice, NoPositiveResampling(0.9))
    _, step = follow(whole, events[:stop], 0)
    state = whole.state_dict()
    kept = copy.deepcopy(state)
    resumed = source_of(levels, choice, NoPositiveResampling(0.9))
    drawn(resumed, 1)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert resumed.state_dict() == kept
    assert follow(resumed, events[stop:], step) == follow(whole, events[stop:], step)
    assert state == kept, "a checkpoint is not a window on what goes on running"


# --- in the stream -------------------------------------------------------------------------------------------


def stream_of(choice: Curriculum, *more: DesignChoice) -> RolloutStream:
    task = CountingTask(prompts=23)
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), KEY, UniformResampling(), choice),
        task=task,
        encode=lambda prompt: [1, 2],
        sample=sampler(lambda tokens: "1"),
        choices=row(choice, *more),
        groups_per_step=2,
        completions=2,
        max_new_tokens=9,
        seed=0,
        phrase_tokens=2,
    )


def test_requests_of_a_step_are_as_long_as_it_allows() -> None:
    stream = stream_of(StagedLength(shares=[0.25, 0.5, 1.0], steps=2))
    limits = []
    for stream.completed_steps in range(6):
        limits.append(stream.admit(0).limit(9))
    assert limits == [3, 3, 5, 5, 9, 9]
    plain = stream_of(NoCurriculum()).admit(0)
    assert plain.limit(9) == 9


def test_a_stage_interrupts_at_the_same_share_of_its_limit() -> None:
    """Points of 5 of 9 tokens are points of 3 of 6, or thinking would be cut off where it is to be ended."""
    stream = stream_of(StagedLength(shares=[2 / 3, 1.0], steps=2), Interruption(5, 5, "#", "#"))
    stream.phrase_tokens = 1
    assert stream.admit(0).interrupt_at == (3, 3)
    stream.completed_steps = 2
    assert stream.admit(0).interrupt_at == (5, 5)


@pytest.mark.parametrize(("phrase", "point"), [("#", 3), ("12#", 2), ("12345678#", 1)])
def test_after_the_phrase_of_a_stage_an_answer_fits(phrase: str, point: int) -> None:
    """Of a limit of 6, as far as it goes: 4 of 8 tokens would be 3, and a phrase of 3 leaves 2."""
    stream = stream_of(StagedLength(shares=[2 / 3, 1.0], steps=2), Interruption(5, 5, "#", phrase))
    stream.phrase_tokens = len(phrase)
    assert stream.admit(0).interrupt_at == (point, point)


def test_shares_in_decimals_mean_whole_numbers() -> None:
    """0.07 * 100 is 7.000000000000001 in binary: that is 7 of 100."""
    assert StagedLength(shares=[0.07, 1.0], steps=2).max_new_tokens(100, 0) == 7


def test_a_difficulty_may_be_negative_and_a_hyphen_is_no_minus() -> None:
    labels = {"-2": -2.0, "level -1.5": -1.5, "Level-3": 3.0, "grade 4": 4.0}
    assert {label: difficulty(Prompt("p", "", "", label)) for label in labels} == labels


def test_a_group_is_of_a_prompt_that_the_step_allows() -> None:
    """Difficulties 0 and 1 by turns: half of the pool is easy."""
    stream = stream_of(LinearCurriculum(0.5, 3))
    for _ in range(20):
        stream.admit(0)
    assert {group.prompt.difficulty for group in stream._open.values()} == {"0"}
    stream.completed_steps = 3
    for _ in range(20):
        stream.admit(0)
    assert {group.prompt.difficulty for group in stream._open.values()} == {"0", "1"}
