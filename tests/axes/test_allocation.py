"""Axis `allocation`: harder prompts get more rollouts, and the total stays the same."""

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


def allocate(choice: Allocation, average: int, histories: Sequence[Sequence[float]]) -> list[int]:
    """Completions of one prompt after another. The surplus is passed on as in the stream."""
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
    """Holds after every prompt, for any history and any factors. Every prompt gets at least `least`."""
    least = min(least, average)
    counts = allocate(AllocationByDifficulty(hard, easy, least), average, histories)
    for number in range(1, len(counts) + 1):
        assert abs(sum(counts[:number]) - number * average) <= average
    assert all(count >= least for count in counts)


@settings(max_examples=examples(50))
@given(average=st.integers(1, 16), histories=HISTORIES)
def test_fixed_is_the_average(average: int, histories: list[list[float]]) -> None:
    assert allocate(FixedAllocation(), average, histories) == [average] * len(histories)


@pytest.mark.parametrize(
    ("history", "expected"),
    [((), 8), ((0.0,), 12), ((1.0,), 4), ((0.5,), 8), ((0.25,), 10), ((1.0, 1.0, 0.0), 12), ((0.0, 0.0, 1.0), 4)],
)
def test_completions_by_hand(history: tuple[float, ...], expected: int) -> None:
    """8 on average. The last group decides; a new prompt gets the average."""
    assert AllocationByDifficulty(hard=1.5, easy=0.5).completions(8, history) == expected


def test_swapped_factors_favour_easy_prompts() -> None:
    choice = AllocationByDifficulty(hard=0.5, easy=1.5)
    assert [choice.completions(8, [rate]) for rate in (0.0, 0.5, 1.0)] == [4, 8, 12]


def test_the_surplus_is_paid_back() -> None:
    """Once the surplus is one average, hard prompts get only the average until easy prompts have paid back."""
    choice = AllocationByDifficulty(hard=1.5, easy=0.5)
    assert allocate(choice, 8, [[0.0]] * 5) == [12, 12, 8, 8, 8]
    assert allocate(choice, 8, [[1.0]] * 5) == [4, 4, 8, 8, 8]
    assert allocate(choice, 8, [[0.0], [0.0], [1.0], [0.0]]) == [12, 12, 4, 12]
    assert allocate(choice, 8, [[]] * 3) == [8] * 3


def test_least_is_a_lower_bound() -> None:
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
    """Two of three prompts are always solved, the third never."""

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
    """Admit and finish one group after another. Returns the prompt and the size of each."""
    seen = []
    for _ in range(groups):
        request = stream.admit(0)
        assert len(request.interrupt_at) == request.completions
        seen.append((stream._open[request.key].prompt.prompt_id, request.completions))
        for index in range(request.completions):
            rollout = Rollout([1], [-1.0], [0], [False], "stop")
            grade(stream, FinishedRollout(request.key, index, rollout))
    return seen


def test_group_sizes_follow_the_prompts_histories() -> None:
    stream = stream_of(AllocationByDifficulty(hard=1.5, easy=0.5))
    first, *later = [admit_and_finish(stream, 9) for _ in range(6)]
    assert [size for _, size in first] == [4] * 9, "no prompt has a history yet"
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for prompt_id, size in [pair for epoch in later for pair in epoch]:
        sizes[int(prompt_id[1:]) % 3 == 0].append(size)
    # In the long run the hard prompts get the completions that the easy ones do not.
    assert max(sizes[False]) <= 4 < max(sizes[True]) and sum(sizes[True]) > 4 * len(sizes[True])
    assert abs(stream.surplus) <= 4
    assert sum(size for epoch in [first, *later] for _, size in epoch) == 4 * 54 + stream.surplus
    batch = stream.take()
    assert batch.denominators.scored_samples == sum(len(group.rollouts) for group in batch.groups)


def test_the_surplus_survives_a_resume() -> None:
    def fresh() -> RolloutStream:
        return stream_of(AllocationByDifficulty(hard=1.9, easy=0.5))

    # Stop while the surplus is not zero. A resume that loses a surplus of zero would not show.
    whole = fresh()
    admit_and_finish(whole, 9)
    for _ in range(9):
        if not whole.surplus:
            admit_and_finish(whole, 1)
    assert whole.surplus
    state = pickle.dumps([whole.prompts.state_dict(), whole.state_dict()])
    resumed = fresh()
    prompts_state, stream_state = pickle.loads(state)
    resumed.prompts.load_state_dict(prompts_state)
    resumed.load_state_dict(stream_state)
    assert resumed.surplus == whole.surplus
    assert admit_and_finish(resumed, 20) == admit_and_finish(whole, 20)
