"""Axis `curriculum`: which prompts may be drawn, how long completions may be, staged rewards, and resume."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.curriculum import (
    Curriculum,
    ExponentialCurriculum,
    LinearCurriculum,
    NoCurriculum,
    StagedLength,
    StagedRewards,
    difficulty,
    staged_factors,
    weighted_sum,
)
from lightning_scalerl.axes.length_control import Interruption, Penalty
from lightning_scalerl.axes.resampling import NoPositiveResampling, Resampling, UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout
from lightning_scalerl.rollouts.grade import Grade, Grader, Sample
from lightning_scalerl.rollouts.rollout import Prompt, Rollout, packed, unpack_rollouts
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import RewardScale, Task, check_curriculum
from lightning_scalerl.verify.rewards import RewardSum, Weighted
from tests.examples import examples
from tests.helpers import CountingTask, grade, row, sampler

KEY = (7, 2)


def pool_of(levels: Sequence[float]) -> list[Prompt]:
    return [Prompt(f"p{number}", "1+1=", "2", f"Level {level}") for number, level in enumerate(levels)]


def source_of(levels: Sequence[float], curriculum: Curriculum, resampling: Resampling | None = None) -> PromptSource:
    return PromptSource(pool_of(levels), KEY, resampling or UniformResampling(), curriculum)


def draw(source: PromptSource, count: int, step: int = 0) -> list[int]:
    """Draw the next prompts and return their numbers."""
    return [int(source.next(step).prompt_id[1:]) for _ in range(count)]


# --- shares and lengths per step -----------------------------------------------------------------------------


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
    assert staged.max_new_tokens(1, 0) == 1, "at least one token"
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


# --- rewards -------------------------------------------------------------------------------------------------

TWO = [["math", "format"]]
MIXED = [["a/math", "a/format"], ["b/code"], ["c/math", "c/short"]]


@pytest.mark.parametrize(
    ("progress", "sums", "factors"),
    [
        (0.0, TWO, {"math": 0.0}),
        (0.299, TWO, {"math": 0.0}),
        (0.3, TWO, {"math": 0.5}),
        (0.6, TWO, {}),
        (1.0, TWO, {}),
        (7.0, TWO, {}),
        (0.5, MIXED, {"a/math": 0.5, "b/code": 0.5, "c/math": 0.5}),
        (0.5, [], {}),
    ],
)
def test_factors_by_hand(progress: float, sums: Any, factors: dict[str, float]) -> None:
    stages: list[dict[str, float]] = [{"first": 0.0}, {"first": 0.5}, {}]
    assert staged_factors(progress, [0.0, 0.3, 0.6], stages, sums) == factors
    assert StagedRewards(total_steps=1000).reward_factors(sums, round(1000 * progress)) == factors


def test_a_factor_by_name_overrides_first() -> None:
    staged = StagedRewards([{"first": 0.0, "math": 0.25, "format": 2.0}, {}], [0.0, 0.5], 10)
    assert [staged.reward_factors(TWO, step) for step in (4, 5)] == [{"math": 0.25, "format": 2.0}, {}]


def test_a_weighted_sum_by_hand_and_unchanged_without_factors() -> None:
    terms = {"math": 1.0, "format": 0.2}
    assert weighted_sum(1.2, terms, {"math": 0.5}) == pytest.approx(0.7)
    assert weighted_sum(1.2, {"format": 0.2}, {"math": 0.0}) == 1.2, "math has abstained, so the sum is unchanged"
    assert weighted_sum(0.0, {"a": 0.7, "b": 0.2, "c": 0.2}, {"c": 0.5}) == 1.0, "not 0.9999999999999999"
    assert weighted_sum(0.1 + 0.2, {"a": 0.1, "b": 0.2}, {"a": 1.0}) == 0.1 + 0.2
    for choice in (NoCurriculum(), LinearCurriculum(), StagedLength()):
        assert choice.reward_factors(TWO, 0) == {} and choice.check_rewards([]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": []}, r"curriculum\.begins: .* each of the 0 curriculum\.stages"),
        ({"stages": [{}, {}]}, r"curriculum\.begins: .* each of the 2 curriculum\.stages"),
        ({"stages": ["math", {}, {}]}, r"curriculum\.stages: 'math' must give factors by the rewards' names"),
        ({"stages": [{"math": -1}, {}, {}]}, r"curriculum\.stages\.math: -1 must be a number, 0 or more"),
        ({"stages": [{"math": True}, {}, {}]}, r"curriculum\.stages\.math: True must be"),
        ({"begins": [0.1, 0.3, 0.6]}, r"curriculum\.begins: .* must rise from 0 to below 1"),
        ({"begins": [0.0, 0.3, 0.3]}, r"curriculum\.begins: .* must rise"),
        ({"begins": [0.0, 0.3, 1.0]}, r"curriculum\.begins: .* must rise"),
        ({"begins": []}, r"curriculum\.begins: .* must rise"),
        ({"begins": [0.0, "half", 0.6]}, r"curriculum\.begins: 'half' must be a number"),
        ({"total_steps": 0}, r"curriculum\.total_steps: 0 must be a whole number"),
    ],
)
def test_bad_stages_of_rewards(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        StagedRewards(**given)
    assert "\n" not in str(error.value)


class TwoRewards(CountingTask):
    """Reward the share of the digit 1 plus half the share of the digit 2. The digit 1 alone decides a pass."""

    def grader(self) -> Grader:
        return RewardSum((Weighted("ones", ShareOf("1")), Weighted("twos", ShareOf("2"), 0.5)))

    def reward_sums(self) -> Sequence[Sequence[str]]:
        return [["ones", "twos"]]


class ShareOf:
    """Grade the share of a digit in the completion. The grader of 2 abstains if the completion has a 3."""

    def __init__(self, digit: str) -> None:
        self.digit = digit

    def grade(self, sample: Sample) -> Grade:
        if self.digit == "2" and "3" in sample.completion:
            return Grade(None)
        share = sample.completion.count(self.digit) / max(1, len(sample.completion))
        return Grade(share, correct=share >= 0.5)


@pytest.mark.parametrize(
    ("task", "choice", "message"),
    [
        (CountingTask(), StagedRewards(), r"^curriculum: StagedRewards .* this task has one; give task\.rewards two"),
        (TwoRewards(), StagedRewards([{"one": 0.5}], [0.0]), r"^curriculum\.stages: stage 0 names 'one', .*ones, twos"),
        (TwoRewards(), StagedRewards([{"first": 0.0, "twos": 0.0}, {}], [0.0, 0.5]), r"stage 0 leaves nothing of ones"),
    ],
)
def test_a_task_whose_rewards_do_not_fit_the_stages_is_refused(task: Task, choice: Curriculum, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        check_curriculum(task, choice)
    assert "\n" not in str(error.value)
    check_curriculum(TwoRewards(), StagedRewards())
    check_curriculum(task, NoCurriculum())


# --- difficulty ----------------------------------------------------------------------------------------------


def test_difficulty_is_the_first_number_of_the_label() -> None:
    for label, expected in (("Level 3", 3.0), ("10", 10.0), ("2.5 digits of 4", 2.5), ("grade-07", 7.0)):
        assert difficulty(Prompt("p", "", "", label)) == expected


def test_difficulties_sort_as_numbers_and_ties_keep_pool_order() -> None:
    places = LinearCurriculum().places(pool_of([10, 9, 2, 9, 2.5]))
    assert places == [4, 2, 0, 3, 1]


@pytest.mark.parametrize("kind", [LinearCurriculum, ExponentialCurriculum])
@pytest.mark.parametrize("label", ["", "hard"])
def test_a_prompt_without_a_number_is_refused_by_name(kind: Any, label: str) -> None:
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
def test_harder_prompts_are_admitted_step_by_step(kind: Any) -> None:
    choice = kind(start=0.2, over_steps=5)
    source = source_of(LEVELS, choice)
    allowed = [math.ceil(round(10 * choice.share(step), 9)) for step in range(8)]
    assert allowed[0] == 2 and allowed[5:] == [10, 10, 10] and allowed == sorted(allowed)
    for step, count in enumerate(allowed):
        # 3 * count draws span at least two whole epochs, so every allowed prompt is drawn, and no other.
        assert set(draw(source, 3 * count, step)) == easiest(count)


def test_an_epoch_draws_each_allowed_prompt_once() -> None:
    source = source_of(LEVELS, LinearCurriculum(0.3, 100))
    for epoch in range(4):
        assert sorted(draw(source, 3)) == sorted(easiest(3))
        assert epoch < source.epoch <= epoch + 1


def test_newly_allowed_prompts_join_the_current_epoch() -> None:
    """No prompt is drawn twice before every prompt allowed by then has been drawn."""
    source = source_of(LEVELS, LinearCurriculum(0.3, 2))  # 3, then 7, then all
    seen = draw(source, 2, 0)
    assert set(seen) < easiest(3)
    seen += draw(source, 5, 1)
    assert sorted(seen) == sorted(easiest(7)), "the last of the first three, and the four new ones"
    seen += draw(source, 3, 2)
    assert sorted(seen) == list(range(10)) and source.epoch == 1
    assert sorted(draw(source, 10, 2)) == list(range(10)) and source.epoch == 2


def test_without_a_curriculum_draws_are_unchanged() -> None:
    """Order, epoch and state equal those of a source without a curriculum."""
    plain = PromptSource(pool_of(LEVELS), KEY, UniformResampling())
    for choice in (NoCurriculum(), LinearCurriculum(1.0, 5), StagedLength()):
        source = source_of(LEVELS, choice)
        assert draw(source, 25) == draw(PromptSource(pool_of(LEVELS), KEY, UniformResampling()), 25)
    draw(plain, 13)
    assert (plain.epoch, plain.state_dict()["epoch"], plain.state_dict()["position"]) == (1.3, 1, 3)
    old = {key: value for key, value in plain.state_dict().items() if key != "taken"}
    resumed = PromptSource(pool_of(LEVELS), KEY, UniformResampling())
    resumed.load_state_dict(old)  # a checkpoint written before curricula existed
    assert draw(resumed, 9) == draw(plain, 9)


def test_if_all_allowed_prompts_are_retired_the_next_easiest_is_drawn() -> None:
    source = source_of(LEVELS, LinearCurriculum(0.2, 100), NoPositiveResampling(0.9))
    one, two = sorted(easiest(2), key=lambda number: LEVELS[number])
    source.resolved(f"p{one}", 1.0)
    assert draw(source, 4) == [two] * 4
    source.resolved(f"p{two}", 1.0)
    (third,) = easiest(3) - easiest(2)
    assert draw(source, 4) == [third] * 4
    for number in easiest(9):
        source.resolved(f"p{number}", 1.0)
    assert draw(source, 2) == [LEVELS.index(10)] * 2
    source.resolved(f"p{LEVELS.index(10)}", 1.0)
    with pytest.raises(PoolExhaustedError, match="all 10 prompts of the pool are retired"):
        source.next(0)


# --- against a slow reference --------------------------------------------------------------------------------


class Reference:
    """The prompt source written with plain sets: the order of an epoch, the prompts drawn, the prompts allowed."""

    def __init__(self, levels: Sequence[float], choice: Curriculum) -> None:
        self.levels, self.choice = levels, choice
        self.ranked = sorted(range(len(levels)), key=lambda number: (levels[number], number))
        self.retired: set[int] = set()
        self.epoch = 0
        self.seen: set[int] = set()
        # The order of each epoch, taken from a source without a curriculum.
        everything = source_of(levels, NoCurriculum())
        self.orders = [draw(everything, len(levels)) for _ in range(60)]

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


# An event: draw a prompt (None), complete a step, or complete a group (its prompt's number, solved or not).
EVENTS = st.lists(st.one_of(st.none(), st.just("step"), st.tuples(st.integers(0, 9), st.booleans())), max_size=40)
CURRICULA = st.one_of(
    st.builds(LinearCurriculum, st.sampled_from([0.1, 0.34, 0.5, 1.0]), st.integers(1, 6)),
    st.builds(ExponentialCurriculum, st.sampled_from([0.1, 0.5]), st.integers(1, 6)),
    st.just(NoCurriculum()),
)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=9)


@settings(max_examples=examples(150))
@given(levels=SIZES, choice=CURRICULA, events=EVENTS)
def test_prompts_are_drawn_as_by_the_reference(levels: list[int], choice: Curriculum, events: list[Any]) -> None:
    source, reference = source_of(levels, choice, NoPositiveResampling(0.9)), Reference(levels, choice)
    step, previous_epoch = 0, 0.0
    for event in [*events, *[None] * 5]:
        if event == "step":
            step += 1
        elif isinstance(event, tuple):
            number = event[0] % len(levels)
            source.resolved(f"p{number}", float(event[1]))
            reference.retired |= {number} if event[1] else set()
        elif len(reference.retired) == len(levels):
            with pytest.raises(PoolExhaustedError):
                source.next(step)
        else:
            assert draw(source, 1, step) == [reference.next(step)]
            assert reference.epoch < source.epoch <= reference.epoch + 1
            assert source.epoch >= previous_epoch
            previous_epoch = source.epoch


@settings(max_examples=examples(100))
@given(levels=SIZES, choice=CURRICULA, events=EVENTS, stop=st.integers(0, 30))
def test_a_resume_changes_no_draw(levels: list[int], choice: Curriculum, events: list[Any], stop: int) -> None:
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
    snapshot = copy.deepcopy(state)
    resumed = source_of(levels, choice, NoPositiveResampling(0.9))
    draw(resumed, 1)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert resumed.state_dict() == snapshot
    assert follow(resumed, events[stop:], step) == follow(whole, events[stop:], step)
    assert state == snapshot, "the running source must not change a checkpoint"


# --- in the stream -------------------------------------------------------------------------------------------


def stream_of(choice: Curriculum, *more: DesignChoice, task: Task | None = None) -> RolloutStream:
    task = task or CountingTask(prompts=23)
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), KEY, UniformResampling(), choice),
        task=task,
        encode=lambda prompt: [1, 2],
        sample=sampler(lambda tokens: "".join(map(str, tokens))),
        choices=row(choice, *more),
        groups_per_step=2,
        completions=2,
        max_new_tokens=9,
        seed=0,
        phrase_tokens=2,
    )


def test_the_stage_limits_the_length_of_requests() -> None:
    stream = stream_of(StagedLength(shares=[0.25, 0.5, 1.0], steps=2))
    limits = []
    for stream.completed_steps in range(6):
        limits.append(stream.admit(0).limit(9))
    assert limits == [3, 3, 5, 5, 9, 9]
    plain = stream_of(NoCurriculum()).admit(0)
    assert plain.limit(9) == 9


def test_a_stage_interrupts_at_the_same_share_of_its_limit() -> None:
    """Points of 5 of 9 tokens become 3 of 6. Otherwise the shorter limit would cut thinking off before they apply."""
    stream = stream_of(StagedLength(shares=[2 / 3, 1.0], steps=2), Interruption(5, 5, "#", "#"))
    stream.phrase_tokens = 1
    assert stream.admit(0).interrupt_at == (3, 3)
    stream.completed_steps = 2
    assert stream.admit(0).interrupt_at == (5, 5)


@pytest.mark.parametrize(("phrase", "point"), [("#", 3), ("12#", 2), ("12345678#", 1)])
def test_a_stage_leaves_room_for_an_answer_after_the_phrase(phrase: str, point: int) -> None:
    """A point of 5 of 9 becomes 3 of 6. A phrase of 3 and one token of answer leave only 2. The minimum is 1."""
    stream = stream_of(StagedLength(shares=[2 / 3, 1.0], steps=2), Interruption(5, 5, "#", phrase))
    stream.phrase_tokens = len(phrase)
    assert stream.admit(0).interrupt_at == (point, point)


def test_decimal_shares_are_not_rounded_up() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, but must give 7 tokens, not 8."""
    assert StagedLength(shares=[0.07, 1.0], steps=2).max_new_tokens(100, 0) == 7


def test_a_difficulty_may_be_negative_and_a_hyphen_is_not_a_minus() -> None:
    labels = {"-2": -2.0, "level -1.5": -1.5, "Level-3": 3.0, "grade 4": 4.0}
    assert {label: difficulty(Prompt("p", "", "", label)) for label in labels} == labels


def test_groups_use_only_prompts_that_the_step_allows() -> None:
    """Difficulties alternate between 0 and 1, so half of the pool is easy."""
    stream = stream_of(LinearCurriculum(0.5, 3))
    for _ in range(20):
        stream.admit(0)
    assert {group.prompt.difficulty for group in stream._open.values()} == {"0"}
    stream.completed_steps = 3
    for _ in range(20):
        stream.admit(0)
    assert {group.prompt.difficulty for group in stream._open.values()} == {"0", "1"}


SAMPLED = {"1122": (0.5, 0.25), "1111": (1.0, 0.0), "2222": (0.0, 0.5), "1123": (0.5, None)}


def finished(key: int, index: int, digits: str) -> FinishedRollout:
    count = len(digits)
    return FinishedRollout(
        key, index, Rollout([*map(int, digits)], [0.0] * count, [0] * count, [False] * count, "stop")
    )


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_group_keeps_the_reward_stage_of_its_admission_across_a_resume(step: int) -> None:
    """Factors apply to terms that did not abstain, before reward scale and length penalty, and not to passes."""
    factor = {0: 0.0, 3: 0.5, 6: 1.0}[step]
    stream, resumed = (stream_of(StagedRewards(total_steps=10), Penalty(9, 5), task=TwoRewards()) for _ in range(2))
    for either in (stream, resumed):
        either.reward, either.completions = RewardScale(1.0, -1.0), len(SAMPLED)
    stream.completed_steps = step
    key = stream.admit(0).key
    texts = list(SAMPLED)
    grade(stream, finished(key, 0, texts[0]))
    resumed.load_state_dict(pickle.loads(pickle.dumps(stream.state_dict())))
    resumed.completed_steps = 9  # in the last stage, which does not apply to a group that was admitted earlier
    for index, text in enumerate(texts[1:], 1):
        grade(resumed, finished(key, index, text))
    (group,) = resumed._ready
    for rollout, (ones, twos) in zip(group.rollouts, SAMPLED.values(), strict=True):
        assert rollout.reward == pytest.approx(-1 + 2 * (factor * ones + (twos or 0.0)))
        assert rollout.grade == ones + (twos or 0.0) and rollout.correct is (ones >= 0.5)
        assert rollout.staged is (factor < 1 and ones > 0)
    assert group.pass_rate == 0.75
    assert unpack_rollouts(packed(group.rollouts)) == group.rollouts


def test_a_checkpoint_of_an_earlier_version_resumes_without_stages() -> None:
    stream, resumed = (stream_of(StagedRewards(total_steps=10), task=TwoRewards()) for _ in range(2))
    grade(stream, finished(stream.admit(0).key, 0, "1122"))
    state = stream.state_dict()
    for name in ("terms", "staged"):
        del state["rollouts"][name], state["ungraded"][name]
    for entry in state["open"].values():
        del entry["admitted_at"]
    resumed.load_state_dict(state)
    (group,) = resumed._open.values()
    assert group.admitted_at == 0 and group.rollouts[0] is not None and group.rollouts[0].terms == {}
