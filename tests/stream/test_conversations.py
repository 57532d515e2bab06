"""Tests of conversations between a generator and environments, with a pool whose answers the test controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest

from lightning_scalerl.environment.pool import Answer, EnvironmentPool
from lightning_scalerl.environment.protocol import Call, Declared, Failure, History, Observation, Turn
from lightning_scalerl.environment.settings import EnvironmentSettings
from lightning_scalerl.generator.base import FinishedRollout, WaitingRollout
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.conversations import Conversations, Dialogue, Limits, Reply

START = Observation(("begin",))
PROMPT = Prompt("p", "question", "", opening=({}, 7, START))
ANSWER = Observation(("said",), reward=0.25)


class Pool:
    """Records requests, and returns the answers that the test sets."""

    def __init__(self) -> None:
        self.requests: list[Any] = []  # pairs of a request's name and its argument
        self.answers: dict[int, Answer] = {}
        self.opened = 0

    def open(self, row: Any, seed: int, history: History) -> int:
        self.opened += 1
        self.requests.append(("open", history))
        return self.opened

    def act(self, number: int, turn: Turn) -> None:
        self.requests.append(("step", turn))

    def finish(self, number: int) -> None:
        self.requests.append(("finish", number))

    def close(self, number: int) -> None:
        self.requests.append(("close", number))

    def done(self) -> Sequence[tuple[int, Answer]]:
        answered = list(self.answers.items())
        self.answers.clear()
        return answered

    def wait(self, number: int) -> Answer:
        return self.answers.pop(number)


class FakeDialogue:
    """Dialogue whose text of a turn is its token numbers, and whose observations are one token (99)."""

    def __init__(self, form: Literal["tools", "text"] = "tools", **declared: Any) -> None:
        self.settings = EnvironmentSettings(processes=1)
        self._declared = Declared(form, **declared)

    def declared_of(self, prompt: Prompt) -> Declared:
        return self._declared

    def name_of(self, prompt: Prompt) -> str:
        return ""

    def turn(self, prompt: Prompt, sampled: Sequence[int]) -> Turn:
        text = " ".join(map(str, sampled))
        return Turn(text, (Call("tool"),))

    def insertions(self, prompts: Any, replies: Any, turns: Any, sampled: Any) -> list[list[int]]:
        return [[99] for _ in prompts]


def make_conversations(pool: Pool, turns: int, **declared: Any) -> Conversations:
    dialogue = cast(Dialogue, FakeDialogue(**declared))
    return Conversations(dialogue, cast(EnvironmentPool, pool), Limits(turns, None), lambda key: PROMPT)


def rollout(*tokens: int, reason: str = "stop") -> Rollout:
    sources = [2 if token == 99 else 0 for token in tokens]
    return Rollout(list(tokens), [-1.0] * len(tokens), [0] * len(tokens), sources, reason)


def waiting(*tokens: int, index: int = 0, room: int = 20) -> WaitingRollout:
    return WaitingRollout(0, index, rollout(*tokens), room, tokens.count(99))


def test_a_turn_ended_by_a_limit_is_sent_again_after_a_resume_and_recorded_once() -> None:
    """Save a checkpoint after the environment answered the last turn and before it returned its reward."""
    pool = Pool()
    conversations = make_conversations(pool, turns=1)
    conversations.start(waiting(1, 2))
    for answer in (START, ANSWER):
        pool.answers = {1: answer}
        assert conversations.ready() == {}
    assert [kind for kind, _ in pool.requests] == ["open", "step", "finish"]
    state = conversations.state_dict()

    new_pool = Pool()
    resumed = make_conversations(new_pool, turns=1)
    resumed.load_state_dict(state)
    resumed.start(waiting(1, 2))
    for answer in (START, ANSWER):
        new_pool.answers = {1: answer}
        assert resumed.ready() == {}
    assert new_pool.requests[0] == ("open", History(START, ()))
    new_pool.answers = {1: Observation(reward=1.0, terminated=True)}
    assert resumed.ready() == {(0, 0): Reply("end", truncated=True)}
    finished = FinishedRollout(0, 0, rollout(1, 2))
    resumed.store_record(finished)
    record = finished.rollout.conversation
    assert record is not None and (record.rewards, record.calls, record.starts) == ((1.25,), 1, (0,))


@pytest.mark.parametrize(
    ("answers", "turns", "rewarded"),
    [
        ([], 3, True),  # the first turn was cut off
        ([Observation(("said",))], 1, True),  # no reward before the limit on turns
        ([Observation(terminated=True)], 3, False),
        ([Observation(truncated=True)], 3, False),
        ([Failure("timeout", "no answer")], 3, False),
    ],
)
def test_a_limit_before_the_first_reward_is_a_reward_of_0(answers: list[Any], turns: int, rewarded: bool) -> None:
    """In text form. A failure, or an environment that ends the conversation without a reward, gives none."""
    pool = Pool()
    conversations = make_conversations(pool, turns=turns, form="text")
    unfinished = rollout(1, 2, reason="length")
    conversations.start(waiting(1, 2) if answers else WaitingRollout(0, 0, unfinished, 0, 0))
    replies = conversations.ready()
    for answer in (START, *answers) if answers else ():
        pool.answers = {1: answer}
        replies = conversations.ready()
    assert replies[0, 0].kind == "end"
    resumed = make_conversations(pool, turns=turns, form="text")
    resumed.load_state_dict(conversations.state_dict())
    for one in (conversations, resumed):
        one.store_record(finished := FinishedRollout(0, 0, rollout(1, 2, reason="length")))
        record = finished.rollout.conversation
        assert record is not None and record.rewarded is rewarded and record.rewards == (0.0,)


def test_earlier_turns_are_replayed_after_a_resume() -> None:
    pool = Pool()
    conversations = make_conversations(pool, turns=3)
    conversations.start(waiting(1, 2))
    for answer in (START, ANSWER):
        pool.answers = {1: answer}
        replies = conversations.ready()
    assert replies == {(0, 0): Reply("insert", (99,))}
    new_pool = Pool()
    resumed = make_conversations(new_pool, turns=3)
    resumed.load_state_dict(conversations.state_dict())
    resumed.start(waiting(1, 2, 99, 3))
    kind, history = new_pool.requests[0]
    assert kind == "open" and history.exchanges == ((Turn("1 2", (Call("tool"),)), ANSWER),)
    new_pool.answers = {1: ANSWER}
    resumed.ready()
    kind, turn = new_pool.requests[1]
    assert kind == "step" and turn == Turn("3", (Call("tool"),))


def test_a_rollout_sampled_again_begins_a_new_conversation() -> None:
    pool = Pool()
    conversations = make_conversations(pool, turns=3)
    conversations.start(waiting(1, 2))
    for answer in (START, ANSWER):
        pool.answers = {1: answer}
        conversations.ready()
    conversations.start(waiting(5, 6))
    assert ("close", 1) in pool.requests and pool.requests[-1] == ("open", History(START, ()))
    # An answer to the closed conversation is ignored.
    pool.answers = {1: ANSWER, 2: START}
    assert conversations.ready() == {}
    _, turn = pool.requests[-1]
    assert turn == Turn("5 6", (Call("tool"),))
    count = len(pool.requests)
    conversations.start(waiting(5, 6))
    assert len(pool.requests) == count, "start() does nothing for a turn that waits for its answer"


@pytest.mark.parametrize(("replayable", "kind"), [(True, "end"), (False, "restart")])
def test_a_failed_replay_ends_the_conversation_or_restarts_it(replayable: bool, kind: str) -> None:
    pool = Pool()
    conversations = make_conversations(pool, turns=3, replayable=replayable)
    conversations.start(waiting(1, 2))
    pool.answers = {1: Failure("replay", "it differs")}
    assert [reply.kind for reply in conversations.ready().values()] == [kind]


def test_an_observation_without_room_is_not_inserted() -> None:
    pool = Pool()
    conversations = make_conversations(pool, turns=3, owns_reward=False)
    conversations.start(waiting(1, 2, room=1))
    for answer in (START, ANSWER):
        pool.answers = {1: answer}
        replies = conversations.ready()
    assert replies == {(0, 0): Reply("end", truncated=True)}


def test_conversations_share_processes() -> None:
    """With one process and two conversations, the first loses its process and is replayed at its next turn."""
    pool = Pool()
    conversations = make_conversations(pool, turns=3)
    conversations.start(waiting(1, 2))
    for answer in (START, ANSWER):
        pool.answers = {1: answer}
        conversations.ready()
    conversations.start(waiting(7, index=1))
    assert pool.requests[-2:] == [("close", 1), ("open", History(START, ()))]
    conversations.start(waiting(1, 2, 99, 3))
    assert pool.opened == 2, "it waits until the process is free"
    for answer in (START, ANSWER):
        pool.answers = {2: answer}
        replies = conversations.ready()
    assert replies == {(0, 1): Reply("insert", (99,))}
    conversations.ready()
    assert pool.opened == 3 and len(pool.requests[-1][1].exchanges) == 1
