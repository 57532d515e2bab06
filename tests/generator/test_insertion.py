"""Tests of inserting an environment's answers between sampled tokens.

Log-probabilities are exact over all turns, other rollouts do not change, and waiting rollouts survive a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings, request_from, request_state
from lightning_scalerl.generator.insertion import NEVER, Insertions, Next
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.rollouts.rollout import Rollout, Source, Span
from lightning_scalerl.stream.credit import assemble
from tests.generator.test_torch_generator import full_forward, generator_of, requests, versions_of
from tests.generator.turns import ANSWERS, largest_gap, three_turns
from tests.helpers import make_group, row

SAMPLED, FORCED, ENVIRONMENT = Source.SAMPLED, Source.FORCED, Source.ENVIRONMENT
KEPT_WHILE_WAITING = ("slot", "cache", "nothing")
LIMIT = 40

Place = tuple[int, int]
Environment = Callable[[Place, int, Rollout], Sequence[int] | None]


def several_turns(count: int = 3, **more: Any) -> list[GroupRequest]:
    """Requests whose turns end after 4 tokens, or earlier at the stop token."""
    return [
        dataclasses.replace(waiting_rollout, waits=True, turn_tokens=4, **more) for waiting_rollout in requests(count)
    ]


def answer(place: Place, turn: int, rollout: Rollout) -> Sequence[int]:
    """A scripted environment, whose answers depend on the sampled tokens and differ in length."""
    return [1 + (sum(rollout.tokens) + 5 * n) % 13 for n in range((place[1] + turn) % 4)]


class Episodes:
    """Steps a generator while a scripted environment answers `delay` steps after the end of a turn.

    A rollout ends after `most` turns, if the environment returns None, or if an answer does not fit.
    """

    def __init__(
        self, generator: TorchGenerator, environment: Environment = answer, delay: int = 0, most: int = 3
    ) -> None:
        self.generator, self.environment, self.delay, self.most = generator, environment, delay, most
        self.finished: dict[Place, Rollout] = {}
        self.answered: dict[Place, int] = {}
        self.due: dict[Place, int] = {}
        self.steps = 0

    def step(self) -> None:
        for waiting_rollout in self.generator.waiting:
            place = waiting_rollout.key, waiting_rollout.index
            if self.due.setdefault(place, self.steps + self.delay) > self.steps:
                continue
            del self.due[place]
            turn = self.answered.get(place, 0) + 1
            tokens = self.environment(place, turn, waiting_rollout.rollout) if turn < self.most else None
            if tokens is None:
                self.generator.end(*place)
            elif len(tokens) >= waiting_rollout.room:
                self.generator.end(*place, truncated=True)
            else:
                self.generator.insert(*place, tokens)
                self.answered[place] = turn
        report = self.generator.step()
        self.steps += 1
        for done in report.finished:
            assert (done.key, done.index) not in self.finished
            self.finished[done.key, done.index] = done.rollout

    def run(self, submitted: Sequence[GroupRequest] = ()) -> dict[Place, Rollout]:
        for request in submitted:
            self.generator.submit(request)
        while self.generator.in_flight:
            self.step()
        return self.finished


def check_exact(model: Any, prompt: tuple[int, ...], rollout: Rollout) -> None:
    """Check that every sampled token's log-probability equals that of one forward pass over all turns."""
    sampled = ~torch.tensor(rollout.inserted)
    gaps = (torch.tensor(rollout.generator_logprobs) - full_forward(model, prompt, rollout.tokens)).abs()
    assert float(gaps[sampled].max()) < 1e-5
    answers = torch.tensor(rollout.sources) == ENVIRONMENT
    assert not torch.tensor(rollout.generator_logprobs)[answers].any()


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
@pytest.mark.parametrize(("slots", "delay"), [(2, 0), (64, 3)])
def test_logprobs_over_several_turns_are_exact(tiny_model: Any, keeps: str, slots: int, delay: int) -> None:
    submitted = several_turns()
    generator = generator_of(tiny_model, slots, max_new_tokens=LIMIT, waiting_keeps=keeps)
    finished = Episodes(generator, delay=delay).run(submitted)
    assert len(finished) == 9
    for (key, index), rollout in finished.items():
        check_exact(tiny_model, submitted[key].prompt_tokens, rollout)
        # Three turns, each at most 4 tokens, with the environment's answers between them.
        answers, at, turn = [], 0, 0
        for span in rollout.spans:
            answers += [span] if span.source == ENVIRONMENT else []
        sampled = rollout.sources.count(SAMPLED)
        assert 3 <= sampled <= 12 and rollout.sources.count(FORCED) == 0
        # The tokens of each answer are the environment's, given all tokens before it.
        at = 0
        for turn in (1, 2):
            end = at
            while end - at < 4 and rollout.sources[end] == SAMPLED and (end == at or rollout.tokens[end - 1] != 14):
                end += 1
            expected = answer((key, index), turn, dataclasses.replace(rollout, tokens=rollout.tokens[:end]))
            at = end + len(expected)
            assert rollout.tokens[end:at] == expected
            assert rollout.sources[end:at] == [ENVIRONMENT] * len(expected)
        assert sum(span.end - span.start for span in answers) == (index + 1) % 4 + (index + 2) % 4


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
def test_the_trainer_agrees_over_three_turns(tiny_model: Any, keeps: str, updated: bool) -> None:
    """The trainer's log-probabilities match, also if new weights are published after the first turn."""
    weights = versions_of(tiny_model, 1)
    models = {version: copy.deepcopy(tiny_model) for version in (0, 1)}
    models[1].load_state_dict(weights[1])
    generator = generator_of(tiny_model, 8, max_new_tokens=LIMIT, waiting_keeps=keeps)

    def update() -> None:
        if updated:
            generator.publish(weights[1], 1, recompute_kv=True)

    submitted = [
        dataclasses.replace(waiting_rollout, waits=True, turn_tokens=4)
        for waiting_rollout in requests(2, completions=4)
    ]
    for waiting_rollout in three_turns(generator, submitted, update):
        prompt = submitted[waiting_rollout.key].prompt_tokens
        assert largest_gap(models, prompt, waiting_rollout.rollout) < 1e-5
        assert {*waiting_rollout.rollout.weight_versions} == {0, int(updated)}
        assert waiting_rollout.rollout.sources.count(ENVIRONMENT) == sum(ANSWERS[waiting_rollout.index])
        assert largest_gap({0: models[1], 1: models[0]}, prompt, waiting_rollout.rollout) > 1e-3


def test_waiting_keeps_does_not_change_the_samples(tiny_model: Any) -> None:
    results = []
    for keeps, slots, delay in (("slot", 64, 0), ("cache", 3, 2), ("nothing", 2, 0), ("slot", 2, 5)):
        generator = generator_of(tiny_model, slots, max_new_tokens=LIMIT, waiting_keeps=keeps)
        results_by_choice = Episodes(generator, delay=delay).run(several_turns())
        results.append({place: (rollout.tokens, rollout.sources) for place, rollout in results_by_choice.items()})
    assert results[0] == results[1] == results[2] == results[3]
    assert len({tuple(tokens) for tokens, _ in results[0].values()}) > 5


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
def test_other_rollouts_are_undisturbed(tiny_model: Any, keeps: str) -> None:
    """The environment's answers change no bit of other rollouts; further rollouts in the batch change only rounding."""
    plain = requests(2, completions=4)
    conversing = [
        dataclasses.replace(waiting_rollout, key=waiting_rollout.key + 10) for waiting_rollout in several_turns(count=2)
    ]

    def rollouts(environment: Environment, submitted: Sequence[GroupRequest]) -> dict[Place, Rollout]:
        generator = generator_of(tiny_model, 64, max_new_tokens=LIMIT, stop_tokens=[], waiting_keeps=keeps)
        return Episodes(generator, environment, delay=1).run(submitted)

    together = [conversing[0], *plain, conversing[1]]
    alone = rollouts(answer, plain)
    among = rollouts(lambda *_: [2, 3, 9], together)
    other = rollouts(lambda *_: [8, 1, 5], together)
    assert {place for place in among if among[place] != other[place]} == among.keys() - alone.keys()
    assert len(among) == 14 and len(alone) == 8
    for place, rollout in alone.items():
        assert among[place].tokens == rollout.tokens
        gaps = torch.tensor(among[place].generator_logprobs) - torch.tensor(rollout.generator_logprobs)
        assert float(gaps.abs().max()) < 2e-6


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
@pytest.mark.parametrize("steps", [5, 6, 10])
@pytest.mark.parametrize("recompute", [False, True], ids=["stale", "recompute"])
def test_waiting_rollouts_resume_bit_for_bit(tiny_model: Any, keeps: str, steps: int, recompute: bool) -> None:
    weights = versions_of(tiny_model, 1)

    def fresh() -> TorchGenerator:
        return generator_of(tiny_model, 4, max_new_tokens=LIMIT, waiting_keeps=keeps, phrase=[3, 5])

    def begin() -> Episodes:
        episodes = Episodes(fresh(), delay=2)
        for request in several_turns(count=4, interrupt_at=(2, 6, 11)):
            episodes.generator.submit(request)
        for number in range(steps):
            if number == steps // 2:
                episodes.generator.publish(weights[1], 1, recompute_kv=recompute)
            episodes.step()
        # Now some rollouts wait, some have an answer and wait for a slot, and one ended while it waited.
        for number, waiting_rollout in enumerate(episodes.generator.waiting):
            if number == 0:
                episodes.generator.end(waiting_rollout.key, waiting_rollout.index)
            elif number % 2:
                episodes.generator.insert(waiting_rollout.key, waiting_rollout.index, [2, 9, 4])
                episodes.due.pop((waiting_rollout.key, waiting_rollout.index), None)
        return episodes

    uninterrupted = begin().run()
    interrupted = begin()
    state = pickle.loads(pickle.dumps(interrupted.generator.state_dict()))
    assert "waiting" in state
    waiting, in_flight = interrupted.generator.waiting, interrupted.generator.in_flight
    interrupted.generator = fresh()
    interrupted.generator.load_state_dict(state)
    assert (interrupted.generator.waiting, interrupted.generator.in_flight) == (waiting, in_flight)
    assert interrupted.run() == uninterrupted
    assert {source for rollout in uninterrupted.values() for source in rollout.sources} == {
        SAMPLED,
        FORCED,
        ENVIRONMENT,
    }


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
def test_weights_change_while_rollouts_wait(tiny_model: Any, keeps: str) -> None:
    """With recomputed caches, every token's log-probability is exact for the weights that sampled it."""
    weights = versions_of(tiny_model, 2)
    submitted = several_turns()
    generator = generator_of(tiny_model, 64, max_new_tokens=LIMIT, stop_tokens=[], waiting_keeps=keeps)
    episodes = Episodes(generator, lambda *_: [2, 3, 9], delay=3, most=2)
    for request in submitted:
        generator.submit(request)
    for number in range(1, 7):
        episodes.step()
        if number in (2, 5):
            generator.publish(weights[number // 2], number // 2, recompute_kv=True)
    finished = episodes.run()
    for (key, _), rollout in finished.items():
        assert rollout.spans == [
            Span(SAMPLED, 0, 0, 2),
            Span(SAMPLED, 1, 2, 4),
            Span(ENVIRONMENT, 2, 4, 7),
            Span(SAMPLED, 2, 7, 11),
        ]
        for version in (0, 1, 2):
            model = tiny_model
            model.load_state_dict(weights[version])
            of_version = torch.tensor(rollout.weight_versions) == version
            of_version &= ~torch.tensor(rollout.inserted)
            expected = full_forward(model, submitted[key].prompt_tokens, rollout.tokens)
            assert torch.allclose(torch.tensor(rollout.generator_logprobs)[of_version], expected[of_version], atol=1e-5)


def test_a_kept_cache_is_stale_and_a_recomputed_one_is_not(tiny_model: Any) -> None:
    weights = versions_of(tiny_model, 1)
    results_by_choice = {}
    for keeps in KEPT_WHILE_WAITING:
        generator = generator_of(tiny_model, 64, max_new_tokens=LIMIT, stop_tokens=[], waiting_keeps=keeps)
        episodes = Episodes(generator, lambda *_: [2, 3], delay=2, most=2)
        generator.submit(several_turns(count=1)[0])
        for _ in range(4):
            episodes.step()
        generator.publish(weights[1], 1)
        results_by_choice[keeps] = [rollout.generator_logprobs[6] for rollout in episodes.run().values()]
    assert results_by_choice["slot"] == results_by_choice["cache"]
    assert max(abs(a - b) for a, b in zip(results_by_choice["slot"], results_by_choice["nothing"], strict=True)) > 1e-3


def test_waiting_rollouts_occupy_slots_only_if_they_keep_them(tiny_model: Any) -> None:
    for keeps, free in (("slot", 0), ("cache", 3), ("nothing", 3)):
        generator = generator_of(tiny_model, 3, max_new_tokens=LIMIT, stop_tokens=[], waiting_keeps=keeps)
        generator.submit(several_turns(count=1)[0])
        reports = [generator.step() for _ in range(4)]
        assert [len(report.waiting) for report in reports] == [0, 0, 0, 3]
        assert generator.in_flight == len(generator.waiting) == 3 and generator.free_slots == free
        assert generator.sampled_in_flight == 12
        # A new group starts only in slots that no waiting rollout keeps.
        generator.submit(requests(2)[1])
        assert generator.step().decoded_tokens == 0
        assert generator.step().decoded_tokens == free


@pytest.mark.parametrize(("keeps", "tokens"), [("slot", 3), ("cache", 3), ("nothing", 8)])
def test_only_new_tokens_are_computed(tiny_model: Any, keeps: str, tokens: int) -> None:
    """The new tokens are the answer and the token before it; without a cache also the prompt and the turn."""
    generator = generator_of(tiny_model, 3, max_new_tokens=LIMIT, stop_tokens=[], waiting_keeps=keeps)
    request = dataclasses.replace(several_turns(count=1)[0], completions=1)
    generator.submit(request)
    for _ in range(4):
        generator.step()
    generator.insert(0, 0, [2, 3])
    report = generator.step()
    assert (report.prefill_tokens, report.prefilled, report.decoded_tokens) == (tokens, 1, 0)
    assert report.prefill_context == sum(range(9 - tokens, 9))
    assert generator.step().decoded_tokens == 1


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
def test_limits_of_an_answer(tiny_model: Any, keeps: str) -> None:
    """An answer must leave room for one sampled token. A rollout at its limit also waits."""
    generator = generator_of(tiny_model, 8, max_new_tokens=8, stop_tokens=[], max_prompt_tokens=8, waiting_keeps=keeps)
    generator.submit(several_turns(count=1)[0])
    for _ in range(4):
        generator.step()
    assert {(waiting_rollout.rollout.finish_reason, waiting_rollout.room) for waiting_rollout in generator.waiting} == {
        ("length", 4)
    }
    with pytest.raises(ValueError, match="4 tokens do not fit into rollout 0 of group 0, which has room for 4"):
        generator.insert(0, 0, [5] * 4)
    generator.insert(0, 1, [5] * 3)
    generator.end(0, 2, truncated=True)
    assert generator.in_flight == 3 and [waiting_rollout.index for waiting_rollout in generator.waiting] == [0]
    (ended,), (full,) = (report := generator.step()).finished, report.waiting
    assert (ended.index, len(ended.rollout.tokens)) == (2, 4)
    assert full.rollout.sources == [SAMPLED] * 4 + [ENVIRONMENT] * 3 + [SAMPLED]
    assert (full.index, full.rollout.finish_reason, full.room) == (1, "length", 0)
    with pytest.raises(ValueError, match="0 tokens do not fit into rollout 1 of group 0, which has room for 0"):
        generator.insert(0, 1, [])
    assert generator.idle and generator.in_flight == 2
    generator.end(0, 0)
    generator.end(0, 1)
    # A step that only reports rollouts as ended computes nothing, so it takes no virtual time.
    report = generator.step()
    assert [waiting_rollout.index for waiting_rollout in report.finished] == [0, 1] and not any(report.computed)
    assert generator.in_flight == 0 and generator.idle


def test_only_sampled_stop_tokens_end_a_turn(tiny_model: Any) -> None:
    """An answer that ends with the stop token does not end the turn after it."""
    request = dataclasses.replace(requests(1, completions=12)[0], waits=True)
    generator = generator_of(tiny_model, 16, max_new_tokens=LIMIT)
    episodes = Episodes(generator, lambda *_: [7, 14], most=2)
    finished = episodes.run([request])
    answered = [finished[place] for place in episodes.answered]
    assert len(answered) >= 4
    for rollout in answered:
        first = rollout.tokens.index(14)
        assert rollout.tokens[first + 1 : first + 3] == [7, 14] and len(rollout.tokens) > first + 3
        assert rollout.sources[first + 1 : first + 3] == [ENVIRONMENT] * 2


def test_an_environment_may_end_a_rollout(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, 16, max_new_tokens=LIMIT, stop_tokens=[])
    finished = Episodes(generator, lambda place, *_: None if place[1] else [3], most=2).run(several_turns(count=1))
    assert [len(finished[0, index].tokens) for index in range(3)] == [9, 4, 4]


def test_thinking_is_measured_without_answers(tiny_model: Any) -> None:
    """The interruption point counts sampled tokens only, and an end marker in an answer does not end thinking."""
    end = 9
    generator = generator_of(
        tiny_model,
        8,
        max_new_tokens=LIMIT,
        stop_tokens=[],
        phrase=[4, end],
        thinking_ended=lambda tokens: end in tokens,
    )
    request = several_turns(count=1, interrupt_at=(6, 6, 6))[0]
    for rollout in Episodes(generator, lambda *_: [end] * 3, most=2).run([request]).values():
        thought = end in rollout.tokens[:4] + rollout.tokens[7:9]
        expected = [*[SAMPLED] * 4, *[ENVIRONMENT] * 3, *[SAMPLED] * 2]
        assert rollout.sources == expected + ([SAMPLED] * 2 if thought else [FORCED] * 2)


def test_a_turn_does_not_end_within_a_phrase(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, 8, max_new_tokens=LIMIT, stop_tokens=[], phrase=[4, 5, 6])
    request = several_turns(count=1, interrupt_at=(3, 3, 3))[0]
    for rollout in Episodes(generator, lambda *_: [8], most=2).run([request]).values():
        assert rollout.sources == [*[SAMPLED] * 3, *[FORCED] * 3, ENVIRONMENT, *[SAMPLED] * 4]


def test_a_full_completion_waits_within_a_phrase(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, 8, max_new_tokens=5, stop_tokens=[], phrase=[4, 5, 6])
    generator.submit(several_turns(count=1, interrupt_at=(3, 3, 3))[0])
    while not generator.idle:
        generator.step()
    for waiting_rollout in generator.waiting:
        assert waiting_rollout.rollout.sources == [*[SAMPLED] * 3, *[FORCED] * 2]
        assert (waiting_rollout.rollout.finish_reason, waiting_rollout.room) == ("length", 0)


@pytest.mark.parametrize("keeps", KEPT_WHILE_WAITING)
@pytest.mark.parametrize("slots", [1, 4])
def test_a_restarted_rollout_samples_the_same_tokens(tiny_model: Any, keeps: str, slots: int) -> None:
    """Also after a checkpoint before its first token, and while other rollouts of the group continue."""

    def fresh() -> Episodes:
        return Episodes(generator_of(tiny_model, slots, max_new_tokens=LIMIT, waiting_keeps=keeps))

    submitted = several_turns(count=2)
    expected = fresh().run(submitted)
    for steps in (0, 1, 3):
        episodes = fresh()
        generator = episodes.generator
        for request in submitted:
            generator.submit(request)
        while not generator.idle:
            generator.step()
        # With "slot", waiting rollouts occupy all slots, so no more than `slots` of them can wait.
        assert len(generator.waiting) == (min(slots, 6) if keeps == "slot" else 6)
        restarted = [(waiting_rollout.key, waiting_rollout.index) for waiting_rollout in generator.waiting][::2]
        for place in restarted:
            generator.restart(*place)
        assert generator.in_flight == 6 and not generator.idle
        assert not {*restarted} & {
            (waiting_rollout.key, waiting_rollout.index) for waiting_rollout in generator.waiting
        }
        for _ in range(steps):
            generator.step()
        state = pickle.loads(pickle.dumps(generator.state_dict()))
        episodes.generator = fresh().generator
        episodes.generator.load_state_dict(state)
        assert episodes.generator.in_flight == 6
        finished = episodes.run()
        for place, rollout in finished.items():
            assert (rollout.tokens, rollout.sources) == (expected[place].tokens, expected[place].sources)
        assert len(finished) == 6


def test_waiting_rollouts_are_paused_by_aside(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, 3, max_new_tokens=LIMIT, stop_tokens=[])
    generator.submit(several_turns(count=1)[0])
    for _ in range(4):
        generator.step()
    waiting = generator.waiting
    with generator.aside():
        assert generator.in_flight == 0 and not generator.waiting
    assert generator.waiting == waiting


def test_answers_to_rollouts_that_do_not_wait_are_refused(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, 3, max_new_tokens=LIMIT, stop_tokens=[])
    generator.submit(several_turns(count=1)[0])
    with pytest.raises(KeyError, match="rollout 0 of group 0 does not wait"):
        generator.insert(0, 0, [1])
    for _ in range(4):
        generator.step()
    with pytest.raises(ValueError, match="token 99 is not in the vocabulary of"):
        generator.insert(0, 0, [1, 99])
    generator.end(0, 0)
    with pytest.raises(KeyError, match="rollout 0 of group 0 does not wait"):
        generator.end(0, 0)
    with pytest.raises(KeyError, match="rollout 0 of group 0 does not wait"):
        generator.restart(0, 0)
    with pytest.raises(ConfigurationError, match="turn_tokens: -1 must be at least 0"):
        generator.submit(dataclasses.replace(requests(1)[0], turn_tokens=-1))
    with pytest.raises(ConfigurationError, match="waiting_keeps: 'all' is unknown; valid: slot, cache, nothing"):
        generator_of(tiny_model, waiting_keeps="all")


def test_states_without_turns_keep_their_format(tiny_model: Any) -> None:
    """Checkpoints of runs without environments keep their format, so older ones can be read."""
    request = requests(1)[0]
    assert set(request_state(request)) == {
        "key",
        "prompt_tokens",
        "completions",
        "random_key",
        "interrupt_at",
        "max_new_tokens",
        "temperature",
    }
    conversing = several_turns()[1]
    assert request_from(request_state(conversing)) == conversing
    generator = generator_of(tiny_model, 4)
    generator.submit(request)
    generator.step()
    state = generator.state_dict()
    assert "waiting" not in state and [len(slot) for slot in state["occupants"]] == [2, 2, 2]


def test_turn_and_phrase_limits_of_one_rollout() -> None:
    sampling = SamplingSettings(max_prompt_tokens=4, max_new_tokens=20, phrase=(7,))
    rules = Insertions(GroupRequest(0, (1,), 1, (0,), (9,), waits=True, turn_tokens=6), 0, sampling)
    assert (rules.limit, rules.turn_limit, rules.interruption_point) == (20, 6, 9)
    assert rules.decide_next(5, stopped=False) is Next.GO_ON
    assert rules.decide_next(5, stopped=True) is rules.decide_next(6, stopped=False) is Next.WAIT
    with pytest.raises(ValueError, match="14 tokens do not fit"):
        rules.record_answer(6, [1] * 14)
    rules.record_answer(6, [1] * 5)
    assert (rules.turn_limit, rules.interruption_point) == (17, 14)
    assert (
        rules.decide_next(12, stopped=True)
        is rules.decide_next(17, stopped=False)
        is rules.decide_next(20, stopped=True)
        is Next.WAIT
    )
    plain = Insertions(GroupRequest(0, (1,), 1, (0,)), 0, sampling)
    assert plain.interruption_point == NEVER and plain.decide_next(19, stopped=False) is Next.GO_ON
    assert plain.decide_next(5, stopped=True) is plain.decide_next(20, stopped=False) is Next.END


def test_an_answer_is_not_trained_on() -> None:
    """In a batch, an environment's tokens are masked and left out of all counts, exactly like forced tokens."""
    batches = []
    for source in (ENVIRONMENT, FORCED):
        group = make_group([1.0, 0.0, 1.0], length=6)
        for number, rollout in enumerate(group.rollouts):
            rollout.sources[number + 1 : number + 3] = [source] * 2
        batches.append(assemble([group], row(), max_new_tokens=8))
        assert [rollout.length for rollout in group.rollouts] == [4 if source == ENVIRONMENT else 6] * 3
    with_answers, forced = batches
    for entry in dataclasses.fields(with_answers):
        left, right = getattr(with_answers, entry.name), getattr(forced, entry.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else entry.name == "groups" or left == right
    assert with_answers.loss_mask.tolist() == [[1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1]]
    assert with_answers.forced_mask.tolist() == (1 - with_answers.loss_mask).bool().tolist()
    assert with_answers.denominators.tokens == 12 and with_answers.sample_tokens.tolist() == [4.0] * 3
    assert with_answers.group_tokens.tolist() == [12.0] * 3
