"""Axis `allocation`: more rollouts for what is hard, the same total for everybody."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.axes.allocation import Allocation, AllocationByDifficulty, FixedAllocation
from lightning_scalerl.axes.length_control import Interruption
from lightning_scalerl.axes.resampling import UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from tests.examples import examples
from tests.helpers import CountingTask, grade, row, sampler


def given_out(choice: Allocation, average: int, histories: Sequence[Sequence[float]]) -> list[int]:
    """Rollouts of one prompt after the other, what was too much handed on as the stream does."""
    surplus, counts = 0, []
    for history in histories:
        counts.append(choice.completions(average, history, surplus))
        surplus += counts[-1] - average
    return counts


HISTORIES = st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=40)


@settings(max_examples=examples(200))
@given(
    average=st.integers(1, 16),
    hard=st.floats(0.01, 20),
    easy=st.floats(0.01, 20),
    least=st.integers(1, 16),
    histories=HISTORIES,
)
def test_the_total_stays_within_one_average(
    average: int, hard: float, easy: float, least: int, histories: list[list[float]]
) -> None:
    """For any history and any factors, after every single prompt; and every prompt gets the least that it was told."""
    least = min(least, average)
    counts = given_out(AllocationByDifficulty(hard, easy, least), average, histories)
    for number in range(1, len(counts) + 1):
        assert abs(sum(counts[:number]) - number * average) <= average
    assert all(count >= least for count in counts)


@settings(max_examples=examples(50))
@given(average=st.integers(1, 16), histories=HISTORIES)
def test_fixed_is_the_average(average: int, histories: list[list[float]]) -> None:
    assert given_out(FixedAllocation(), average, histories) == [average] * len(histories)


@pytest.mark.parametrize(
    ("history", "expected"),
    [((), 8), ((0.0,), 12), ((1.0,), 4), ((0.5,), 8), ((0.25,), 10), ((1.0, 1.0, 0.0), 12), ((0.0, 0.0, 1.0), 4)],
)
def test_by_hand(history: tuple[float, ...], expected: int) -> None:
    """8 on average; the last group decides, and who is new gets the average."""
    assert AllocationByDifficulty(hard=1.5, easy=0.5).completions(8, history) == expected


def test_turned_round_it_favours_what_is_easy() -> None:
    choice = AllocationByDifficulty(hard=0.5, easy=1.5)
    assert [choice.completions(8, [rate]) for rate in (0.0, 0.5, 1.0)] == [4, 8, 12]


def test_what_was_given_is_paid_back() -> None:
    """Nothing but hard prompts: beyond one average nobody gets more than it; then easy ones give it back."""
    choice = AllocationByDifficulty(hard=1.5, easy=0.5)
    assert given_out(choice, 8, [[0.0]] * 5) == [12, 12, 8, 8, 8]
    assert given_out(choice, 8, [[1.0]] * 5) == [4, 4, 8, 8, 8]
    assert given_out(choice, 8, [[0.0], [0.0], [1.0], [0.0]]) == [12, 12, 4, 12]
    assert given_out(choice, 8, [[]] * 3) == [8] * 3


def test_the_least_holds_where_the_factor_would_give_fewer() -> None:
    assert AllocationByDifficulty(easy=0.01, least=3).completions(8, [1.0]) == 3
    assert AllocationByDifficulty(easy=0.01, least=1).completions(8, [1.0]) == 1


@pytest.mark.parametrize("bad", [0, -1.0, True, "1", float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["hard", "easy"])
def test_bad_factors(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"allocation\.{field}: .* must be a number above 0"):
        AllocationByDifficulty(**{field: bad})


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_bad_least(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"allocation\.least: .* whole number"):
        AllocationByDifficulty(least=bad)


# --- in the stream -------------------------------------------------------------------------------------------


class Known(CountingTask):
    """Two prompts of three are solved always, the third never."""

    def reward(self, prompt: Any, completion: str) -> float:
        return float(int(prompt.prompt_id[1:]) % 3 != 0)


def stream_of(choice: Allocation) -> RolloutStream:
    task = Known(prompts=12)
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), (3,), UniformResampling()),
        task=task,
        encode=lambda text: [1, 2],
        sample=sampler(lambda tokens: "1"),
        choices=row(choice, Interruption(low=2, high=3)),
        groups_per_step=3,
        completions=4,
        max_new_tokens=9,
        seed=0,
    )


def admit_and_finish(stream: RolloutStream, groups: int) -> list[tuple[str, int]]:
    """Prompts and sizes of so many groups, one complete before the next is admitted."""
    seen = []
    for _ in range(groups):
        request = stream.admit(0)
        assert len(request.interrupt_at) == request.completions
        seen.append((stream._open[request.key].prompt.prompt_id, request.completions))
        for index in range(request.completions):
            rollout = Rollout([1], [-1.0], [0], [False], "stop")
            grade(stream, FinishedRollout(request.key, index, rollout))
    return seen


def test_groups_are_as_large_as_their_prompts_history_says() -> None:
    stream = stream_of(AllocationByDifficulty(hard=1.5, easy=0.5))
    first, *later = [admit_and_finish(stream, 9) for _ in range(6)]
    assert [size for _, size in first] == [4] * 9, "nothing is known of any prompt yet"
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for prompt_id, size in [pair for epoch in later for pair in epoch]:
        sizes[int(prompt_id[1:]) % 3 == 0].append(size)
    # In the long run what the easy ones do not get is what the hard ones get beyond the average.
    assert max(sizes[False]) <= 4 < max(sizes[True]) and sum(sizes[True]) > 4 * len(sizes[True])
    assert abs(stream.surplus) <= 4
    assert sum(size for epoch in [first, *later] for _, size in epoch) == 4 * 54 + stream.surplus
    batch = stream.take()
    assert batch.denominators.sampled == sum(len(group.rollouts) for group in batch.groups)


def test_the_account_survives_a_stop() -> None:
    def fresh() -> RolloutStream:
        return stream_of(AllocationByDifficulty(hard=1.9, easy=0.5))

    # A stop where the account is not even, or nothing is shown.
    whole = fresh()
    admit_and_finish(whole, 9)
    for _ in range(9):
        if not whole.surplus:
            admit_and_finish(whole, 1)
    assert whole.surplus
    state = pickle.dumps([whole.prompts.state_dict(), whole.state_dict()])
    resumed = fresh()
    of_prompts, of_stream = pickle.loads(state)
    resumed.prompts.load_state_dict(of_prompts)
    resumed.load_state_dict(of_stream)
    assert resumed.surplus == whole.surplus
    assert admit_and_finish(resumed, 20) == admit_and_finish(whole, 20)
