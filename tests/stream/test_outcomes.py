"""What becomes of completions without a score: in a group, in a batch, in virtual time, across a checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline
from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.axes.filter import DynamicSampling, Filter, NoFilter, ZeroVariance
from lightning_scalerl.axes.resampling import NoPositiveResampling
from lightning_scalerl.generator.base import FinishedRollout
from lightning_scalerl.rollouts.grade import Grade, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, Rollout, packed, unpacked
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import VirtualDriver
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.verification import RewardError, Verification
from tests.helpers import CountingTask, inline, row, sampler
from tests.scripted import ScriptedGenerator
from tests.stream.test_rollout_stream import rates, script_of

SCORE = {1: Outcome("score", 1.0), 0: Outcome("score", 0.0)}
ABSTAIN, ERROR = Outcome("abstain", why="no idea"), Outcome("error", why="raised KeyError: x")


def stream_of(
    mode: AsyncMode | None = None, verification: Verification | None = None, size: int = 3, filter: Filter | None = None
) -> RolloutStream:
    task, resampling = CountingTask(prompts=99), NoPositiveResampling(0.9)
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), (0,), resampling),
        task=task,
        encode=lambda prompt: [1, 2],
        sample=sampler(lambda tokens: "1" * (len(tokens) % 2) + "0" * 3),
        choices=row(resampling, mode or OnPolicy(), filter or NoFilter()),
        groups_per_step=2,
        completions=size,
        max_new_tokens=1000,
        seed=0,
        verification=verification or Verification(),
    )


def rollout(length: int = 2) -> Rollout:
    return Rollout([3] * length, [-0.5] * length, [0] * length, [False] * length, "stop")


def grade_group(stream: RolloutStream, *outcomes: Outcome) -> int:
    """A group with these outcomes; returns its admission."""
    request = stream.admit(0)
    for index, outcome in enumerate(outcomes):
        stream.ended(FinishedRollout(request.key, index, rollout()))
        stream.graded((request.key, index), outcome)
    return request.key


def test_only_scores_enter_a_group() -> None:
    stream = stream_of()
    grade_group(stream, SCORE[1], ABSTAIN, SCORE[0])
    grade_group(stream, SCORE[1], SCORE[0], ERROR)
    batch = stream.take()
    assert [group.rewards.tolist() for group in batch.groups] == [[1.0, 0.0], [1.0, 0.0]]
    assert [group.pass_rate for group in batch.groups] == [0.5, 0.5]
    assert batch.rollouts == 4 and batch.denominators.samples == 4 and batch.denominators.sampled == 4
    left_out = [each for group in batch.groups for each in group.ungraded]
    assert [each.outcome for each in left_out] == ["abstain", "error"]
    assert [each.extra["why"] for each in left_out] == ["no idea", "raised KeyError: x"]


@pytest.mark.parametrize("filter", [NoFilter(), ZeroVariance()])
def test_a_group_of_one_that_was_more_carries_nothing(filter: Filter) -> None:
    stream = stream_of(filter=filter)
    grade_group(stream, SCORE[1], ABSTAIN, ERROR)
    grade_group(stream, SCORE[1], SCORE[0], SCORE[0])
    batch = stream.take()
    assert batch.rollouts == 3 and batch.denominators.prompts == 1


def test_a_group_of_nothing_keeps_its_place_and_has_no_history() -> None:
    stream = stream_of()
    key = grade_group(stream, ABSTAIN, ABSTAIN, ERROR)
    empty = stream._ready[0]
    assert (empty.admission, empty.rollouts, empty.oldest_version, empty.pass_rate) == (key, [], 0, 0.0)
    assert not stream.prompts.history(empty.prompt.prompt_id) and not list(stream.prompts.histories())
    grade_group(stream, SCORE[1], SCORE[0], SCORE[0])
    batch = stream.take()
    assert batch.rollouts == 3 and len(batch.groups) == 2


def test_a_prompt_is_retired_by_its_scores_alone() -> None:
    stream = stream_of()
    grade_group(stream, SCORE[1], SCORE[1], ABSTAIN)
    assert stream.prompts.retired == 1


def test_dynamic_sampling_replaces_a_group_without_scores() -> None:
    stream = stream_of(filter=DynamicSampling())
    grade_group(stream, SCORE[1], ABSTAIN, ABSTAIN)
    assert (stream.dropped, len(stream._ready)) == (1, 0)


def test_an_error_may_be_a_zero_or_the_end() -> None:
    zero = stream_of(verification=Verification(on_error="zero"))
    grade_group(zero, SCORE[1], ERROR, SCORE[1])
    assert zero._ready[0].rewards.tolist() == [1.0, 0.0, 1.0] and not zero._ready[0].rollouts[1].correct
    stop = stream_of(verification=Verification(on_error="stop"))
    with pytest.raises(RewardError, match="KeyError: x"):
        grade_group(stop, SCORE[1], ERROR)


def test_a_batch_of_errors_alone_ends_the_run_and_one_of_abstentions_does_not() -> None:
    stream = stream_of()
    for _ in range(2):
        grade_group(stream, SCORE[1], SCORE[0], ERROR)
    stream.take()
    stream.step_completed()
    for _ in range(2):
        grade_group(stream, ABSTAIN, ABSTAIN, ABSTAIN)
    assert stream.take().rollouts == 0, "an error of before has no say"
    stream.step_completed()
    for _ in range(2):
        grade_group(stream, ABSTAIN, ABSTAIN, ERROR)
    with pytest.raises(RewardError, match="of the batch of step 2 no completion was graded"):
        stream.take()


def test_a_graders_own_verdict_goes_before_the_tasks() -> None:
    """CountingTask passes a reward of 0.1; the grader says otherwise, and the other way round."""
    stream = stream_of()
    grade_group(stream, Outcome("score", 0.5, correct=False), Outcome("score", 0.0, correct=True), SCORE[1])
    assert [each.correct for each in stream._ready[0].rollouts] == [False, True, True]


def test_rollouts_keep_outcome_parts_and_texts_in_a_checkpoint() -> None:
    ended = [rollout(), rollout(3)]
    ended[0].outcome, ended[0].parts, ended[1].extra = "abstain", {"length": 2.0}, {"why": "so"}
    assert unpacked(packed(ended)) == ended
    old = {key: value for key, value in packed(ended).items() if key not in ("outcome", "parts", "extra")}
    assert [each.outcome for each in unpacked(old)] == ["score", "score"]


def test_credit_is_what_it_would_be_had_they_not_been_sampled() -> None:
    choices = row(ZeroVariance())

    def batch(*ungraded: Rollout) -> Any:
        group = CountingTask().pool[0]
        ends = [rollout(), rollout(4), rollout(3)]
        for each, reward in zip(ends, (1.0, 0.0, 0.0), strict=True):
            each.reward = reward
        return assemble([Group(0, group, [1, 2], ends, (), list(ungraded))], choices, 10)

    one, two = batch(), batch(rollout(7), rollout(1))
    assert torch.equal(one.advantages, two.advantages) and torch.equal(one.loss_mask, two.loss_mask)
    assert one.denominators == two.denominators


# --- in virtual time ---------------------------------------------------------------------------------------------


def driver_of(
    stream: RolloutStream, grade_s: float, lengths: dict[tuple[int, int], int] | None = None
) -> VirtualDriver:
    generator = ScriptedGenerator(script_of(lengths), 5)
    return VirtualDriver(stream, generator, dict, rates(grade_s=grade_s), inline(stream))


def run(driver: VirtualDriver, steps: int) -> list[tuple[float, list[int], list[float]]]:
    found = []
    for _ in range(steps):
        batch = driver.next_batch()
        assert batch is not None
        groups = sorted(batch.groups, key=lambda group: group.admission)
        rewards = [float(reward) for group in groups for reward in group.rewards]
        found.append((driver.clock.now_s, [group.admission for group in groups], rewards))
        driver.stream.step_completed()
    return found


def test_grading_delays_a_batch_by_its_time_and_nothing_else() -> None:
    at_once, later = (run(driver_of(stream_of(), grade_s), 1) for grade_s in (0.0, 40.0))
    assert later[0][0] == at_once[0][0] + 40.0 and later[0][1:] == at_once[0][1:]


def test_generation_goes_on_while_others_are_graded() -> None:
    """On a pipeline that is far ahead, grading that takes less than the trainer's step costs nothing in the end."""
    times = [run(driver_of(stream_of(Pipeline(4, "stale")), grade_s), 12)[-1][0] for grade_s in (0.0, 1.0)]
    assert times[1] - times[0] < 12 * 1.0
    slow = run(driver_of(stream_of(Pipeline(4, "stale")), 500.0), 12)[-1][0]
    # Of 4 steps ahead all are graded side by side.
    assert slow < 12 * 500.0


@pytest.mark.parametrize("taken", [1, 3, 5])
def test_what_is_being_graded_is_in_a_checkpoint(taken: int) -> None:
    def new() -> VirtualDriver:
        return driver_of(stream_of(Pipeline(3, "stale")), 7.0)

    straight = run(new(), taken + 4)
    first = new()
    assert run(first, taken) == straight[:taken]
    assert first.next_batch(lambda: bool(first._grading)) is None
    parts = ("prompts", "stream", "driver", "generator")
    saved = pickle.loads(pickle.dumps({name: _part(first, name).state_dict() for name in parts}))
    second = new()
    for name, state in saved.items():
        _part(second, name).load_state_dict(state)
    assert run(second, 4) == straight[taken:]


class ByGroup:
    """Rewards a completion by its place among those of its group; notes how many it is called with."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def needs_group(self, prompt: Prompt) -> bool:
        return True

    def grade(self, sample: Sample) -> Grade:
        raise AssertionError("called with one completion")

    def grade_group(self, samples: Sequence[Sample]) -> list[Grade]:
        self.calls.append(len(samples))
        return [Grade(float(number)) for number in range(len(samples))]


@pytest.mark.parametrize("grade_s", [0.0, 7.0])
@pytest.mark.parametrize("events", [3, 17, 31, 40, 52])
def test_a_group_is_graded_whole_also_across_a_checkpoint(grade_s: float, events: int) -> None:
    """Wherever it is taken: rollouts that have ended wait for the others, and none is graded twice or without them."""

    def new(grader: ByGroup) -> VirtualDriver:
        stream = stream_of(Pipeline(3, "stale"))
        stream._grader = grader
        driver = driver_of(stream, grade_s)
        driver.verifiers = InlineVerifiers(grader)
        return driver

    whole = ByGroup()
    straight = run(new(whole), 14)
    assert set(whole.calls) == {3} and all(rewards[:3] == [0.0, 1.0, 2.0] for _, _, rewards in straight)
    first, asked = new(ByGroup()), iter(range(1000))
    done: list[Any] = []
    while True:  # up to so many events
        batch = first.next_batch(lambda: next(asked) >= events)
        if batch is None:
            break
        done.append(batch)
        first.stream.step_completed()
    parts = ("prompts", "stream", "driver", "generator")
    saved = pickle.loads(pickle.dumps({name: _part(first, name).state_dict() for name in parts}))
    again = ByGroup()
    second = new(again)
    for name, state in saved.items():
        _part(second, name).load_state_dict(state)
    assert run(second, 14 - len(done)) == straight[len(done) :]
    assert set(again.calls) == {3}


def _part(driver: VirtualDriver, name: str) -> Any:
    of = {"driver": driver, "stream": driver.stream, "prompts": driver.stream.prompts, "generator": driver.generator}
    return of[name]


def test_all_that_end_together_are_submitted_before_the_first_is_waited_for() -> None:
    """So that as many are graded side by side as there are workers."""
    order: list[str] = []

    class Noting(InlineVerifiers):
        def submit(self, sample: Sample) -> int:
            order.append("submit")
            return super().submit(sample)

        def wait(self, ticket: int) -> Outcome:
            order.append("wait")
            return super().wait(ticket)

    class Good:
        def grade(self, sample: Sample) -> Grade:
            return Grade(1.0)

    stream = stream_of()
    driver = driver_of(stream, 0.0, {(group, index): 4 for group in range(9) for index in range(3)})
    driver.verifiers = Noting(Good())
    driver.next_batch()
    assert order[:10] == ["submit"] * 5 + ["wait"] * 5
