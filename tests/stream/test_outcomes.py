"""Tests of completions without a score: in a group, in a batch, in virtual time, across a checkpoint."""

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
from lightning_scalerl.rollouts.rollout import Group, Rollout, packed, unpack_rollouts
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


def make_rollout(length: int = 2) -> Rollout:
    return Rollout([3] * length, [-0.5] * length, [0] * length, [False] * length, "stop")


def grade_group(stream: RolloutStream, *outcomes: Outcome) -> int:
    """Admit a group whose completions have these outcomes; return its admission number."""
    request = stream.admit(0)
    for index, outcome in enumerate(outcomes):
        stream.ended(FinishedRollout(request.key, index, make_rollout()))
        stream.graded((request.key, index), outcome)
    return request.key


def test_only_scores_enter_a_group() -> None:
    stream = stream_of()
    grade_group(stream, SCORE[1], ABSTAIN, SCORE[0])
    grade_group(stream, SCORE[1], SCORE[0], ERROR)
    batch = stream.take()
    assert [group.rewards.tolist() for group in batch.groups] == [[1.0, 0.0], [1.0, 0.0]]
    assert [group.pass_rate for group in batch.groups] == [0.5, 0.5]
    assert batch.rollouts == 4 and batch.denominators.samples == 4 and batch.denominators.scored_samples == 4
    left_out = [rollout for group in batch.groups for rollout in group.ungraded]
    assert [rollout.outcome for rollout in left_out] == ["abstain", "error"]
    assert [rollout.extra["why"] for rollout in left_out] == ["no idea", "raised KeyError: x"]


@pytest.mark.parametrize("filter", [NoFilter(), ZeroVariance()])
def test_a_group_with_one_score_left_carries_no_signal(filter: Filter) -> None:
    stream = stream_of(filter=filter)
    grade_group(stream, SCORE[1], ABSTAIN, ERROR)
    grade_group(stream, SCORE[1], SCORE[0], SCORE[0])
    batch = stream.take()
    assert batch.rollouts == 3 and batch.denominators.prompts == 1


def test_a_group_without_scores_keeps_its_place_and_has_no_history() -> None:
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


def test_an_error_can_count_as_zero_or_end_the_run() -> None:
    zero = stream_of(verification=Verification(on_error="zero"))
    grade_group(zero, SCORE[1], ERROR, SCORE[1])
    assert zero._ready[0].rewards.tolist() == [1.0, 0.0, 1.0] and not zero._ready[0].rollouts[1].correct
    stop = stream_of(verification=Verification(on_error="stop"))
    with pytest.raises(RewardError, match="KeyError: x"):
        grade_group(stop, SCORE[1], ERROR)


def test_a_batch_ends_the_run_if_all_its_completions_are_ungraded_and_one_is_an_error() -> None:
    stream = stream_of()
    for _ in range(2):
        grade_group(stream, SCORE[1], SCORE[0], ERROR)
    stream.take()
    stream.step_completed()
    for _ in range(2):
        grade_group(stream, ABSTAIN, ABSTAIN, ABSTAIN)
    assert stream.take().rollouts == 0, "an error in an earlier batch does not count"
    stream.step_completed()
    for _ in range(2):
        grade_group(stream, ABSTAIN, ABSTAIN, ERROR)
    with pytest.raises(RewardError, match="of the batch of step 2 no completion was graded"):
        stream.take()


def test_the_graders_verdict_overrides_the_tasks() -> None:
    """CountingTask passes a reward of 0.1 or more. Here the grader fails 0.5 and passes 0.0."""
    stream = stream_of()
    grade_group(stream, Outcome("score", 0.5, correct=False), Outcome("score", 0.0, correct=True), SCORE[1])
    assert [rollout.correct for rollout in stream._ready[0].rollouts] == [False, True, True]


def test_rollouts_keep_outcome_parts_and_texts_in_a_checkpoint() -> None:
    ended = [make_rollout(), make_rollout(3)]
    ended[0].outcome, ended[0].parts, ended[1].extra = "abstain", {"length": 2.0}, {"why": "so"}
    assert unpack_rollouts(packed(ended)) == ended
    old = {key: value for key, value in packed(ended).items() if key not in ("outcome", "parts", "extra")}
    assert [rollout.outcome for rollout in unpack_rollouts(old)] == ["score", "score"]


def test_ungraded_rollouts_do_not_change_credit() -> None:
    choices = row(ZeroVariance())

    def batch(*ungraded: Rollout) -> Any:
        group = CountingTask().pool[0]
        ends = [make_rollout(), make_rollout(4), make_rollout(3)]
        for rollout, reward in zip(ends, (1.0, 0.0, 0.0), strict=True):
            rollout.reward = reward
        return assemble([Group(0, group, [1, 2], ends, (), list(ungraded))], choices, 10)

    one, two = batch(), batch(make_rollout(7), make_rollout(1))
    assert torch.equal(one.advantages, two.advantages) and torch.equal(one.loss_mask, two.loss_mask)
    assert one.denominators == two.denominators


# --- in virtual time ---------------------------------------------------------------------------------------------


def driver_of(
    stream: RolloutStream, grade_s: float, lengths: dict[tuple[int, int], int] | None = None
) -> VirtualDriver:
    generator = ScriptedGenerator(script_of(lengths), 5)
    return VirtualDriver(stream, generator, dict, rates(grade_s=grade_s), inline(stream))


def run(driver: VirtualDriver, steps: int) -> list[tuple[float, list[int], list[float]]]:
    results = []
    for _ in range(steps):
        batch = driver.next_batch()
        assert batch is not None
        groups = sorted(batch.groups, key=lambda group: group.admission)
        rewards = [float(reward) for group in groups for reward in group.rewards]
        results.append((driver.clock.now_s, [group.admission for group in groups], rewards))
        driver.stream.step_completed()
    return results


def test_grading_delays_a_batch_by_its_time_and_nothing_else() -> None:
    at_once, later = (run(driver_of(stream_of(), grade_s), 1) for grade_s in (0.0, 40.0))
    assert later[0][0] == at_once[0][0] + 40.0 and later[0][1:] == at_once[0][1:]


def test_generation_goes_on_while_others_are_graded() -> None:
    """On a pipeline far ahead of the trainer, grading that is faster than a training step delays the run only once."""
    times = [run(driver_of(stream_of(Pipeline(4, "stale")), grade_s), 12)[-1][0] for grade_s in (0.0, 1.0)]
    assert times[1] - times[0] < 12 * 1.0
    slow = run(driver_of(stream_of(Pipeline(4, "stale")), 500.0), 12)[-1][0]
    # The groups of 4 steps ahead are graded in parallel.
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
    """Grader that rewards a completion by its index in the group, and records the size of each call."""

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
    """Rollouts wait until their whole group has finished. After a checkpoint at any event, none is graded twice."""

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
    while True:  # until that many events have passed
        batch = first.next_batch(lambda: next(asked) >= events)
        if batch is None:
            break
        done.append(batch)
        first.stream.step_completed()
    parts = ("prompts", "stream", "driver", "generator")
    saved = pickle.loads(pickle.dumps({name: _part(first, name).state_dict() for name in parts}))
    second_grader = ByGroup()
    second = new(second_grader)
    for name, state in saved.items():
        _part(second, name).load_state_dict(state)
    assert run(second, 14 - len(done)) == straight[len(done) :]
    assert set(second_grader.calls) == {3}


def _part(driver: VirtualDriver, name: str) -> Any:
    parts_by_name = {
        "driver": driver,
        "stream": driver.stream,
        "prompts": driver.stream.prompts,
        "generator": driver.generator,
    }
    return parts_by_name[name]


def test_all_rollouts_that_end_together_are_submitted_before_any_grade_is_awaited() -> None:
    """Otherwise only one worker of the pool would grade at a time."""
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
