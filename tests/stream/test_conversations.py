"""Conversations between a generator and environments, with a pool that answers when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

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
SAID = Observation(("said",), reward=0.25)


class Pool:
    """Notes requests, and answers them in order with what it is given."""

    def __init__(self) -> None:
        self.asked: list[Any] = []  # pairs of a request and its argument
        self.answers: dict[int, Answer] = {}
        self.opened = 0

    def open(self, row: Any, seed: int, history: History) -> int:
        self.opened += 1
        self.asked.append(("open", history))
        return self.opened

    def act(self, number: int, turn: Turn) -> None:
        self.asked.append(("step", turn))

    def finish(self, number: int) -> None:
        self.asked.append(("finish", number))

    def close(self, number: int) -> None:
        self.asked.append(("close", number))

    def done(self) -> Sequence[tuple[int, Answer]]:
        answered = list(self.answers.items())
        self.answers.clear()
        return answered

    def wait(self, number: int) -> Answer:
        return self.answers.pop(number)


class Speaker:
    """Dialogue whose turns are their tokens in words, and whose observations are one token."""

    def __init__(self, **declared: Any) -> None:
        self.settings = EnvironmentSettings(processes=1)
        self._declared = Declared("tools", **declared)

    def declared_of(self, prompt: Prompt) -> Declared:
        return self._declared

    def name_of(self, prompt: Prompt) -> str:
        return ""

    def turn(self, prompt: Prompt, sampled: Sequence[int]) -> Turn:
        text = " ".join(map(str, sampled))
        return Turn(text, (Call("tool"),))

    def insertions(self, prompts: Any, replies: Any, turns: Any, sampled: Any) -> list[list[int]]:
        return [[99] for _ in prompts]


def conversations(pool: Pool, turns: int, **declared: Any) -> Conversations:
    dialogue = cast(Dialogue, Speaker(**declared))
    return Conversations(dialogue, cast(EnvironmentPool, pool), Limits(turns, None), lambda key: PROMPT)


def rollout(*tokens: int, reason: str = "stop") -> Rollout:
    sources = [2 if token == 99 else 0 for token in tokens]
    return Rollout(list(tokens), [-1.0] * len(tokens), [0] * len(tokens), sources, reason)


def waiting(*tokens: int, index: int = 0, room: int = 20) -> WaitingRollout:
    return WaitingRollout(0, index, rollout(*tokens), room, tokens.count(99))


def test_a_turn_that_a_limit_ends_is_sent_once_more_after_a_resume_and_recorded_once() -> None:
    """The environment has answered the last turn, and has not yet been asked for its reward: then a checkpoint."""
    pool = Pool()
    ours = conversations(pool, turns=1)
    ours.start(waiting(1, 2))
    for answer in (START, SAID):
        pool.answers = {1: answer}
        assert ours.ready() == {}
    assert [kind for kind, _ in pool.asked] == ["open", "step", "finish"]
    state = ours.state_dict()

    again = Pool()
    resumed = conversations(again, turns=1)
    resumed.load_state_dict(state)
    resumed.start(waiting(1, 2))
    for answer in (START, SAID):
        again.answers = {1: answer}
        assert resumed.ready() == {}
    assert again.asked[0] == ("open", History(START, ()))
    again.answers = {1: Observation(reward=1.0, terminated=True)}
    assert resumed.ready() == {(0, 0): Reply("end", truncated=True)}
    finished = FinishedRollout(0, 0, rollout(1, 2))
    resumed.conclude(finished)
    record = finished.rollout.conversation
    assert record is not None and (record.rewards, record.calls, record.starts) == ((1.25,), 1, (0,))


def test_earlier_turns_are_replayed_after_a_resume() -> None:
    pool = Pool()
    ours = conversations(pool, turns=3)
    ours.start(waiting(1, 2))
    for answer in (START, SAID):
        pool.answers = {1: answer}
        replies = ours.ready()
    assert replies == {(0, 0): Reply("insert", (99,))}
    again = Pool()
    resumed = conversations(again, turns=3)
    resumed.load_state_dict(ours.state_dict())
    resumed.start(waiting(1, 2, 99, 3))
    kind, history = again.asked[0]
    assert kind == "open" and history.exchanges == ((Turn("1 2", (Call("tool"),)), SAID),)
    again.answers = {1: SAID}
    resumed.ready()
    kind, turn = again.asked[1]
    assert kind == "step" and turn == Turn("3", (Call("tool"),))


def test_a_rollout_that_a_lost_engine_samples_again_begins_a_new_conversation() -> None:
    pool = Pool()
    ours = conversations(pool, turns=3)
    ours.start(waiting(1, 2))
    for answer in (START, SAID):
        pool.answers = {1: answer}
        ours.ready()
    ours.start(waiting(5, 6))
    assert ("close", 1) in pool.asked and pool.asked[-1] == ("open", History(START, ()))
    # An answer to the forgotten conversation means nothing.
    pool.answers = {1: SAID, 2: START}
    assert ours.ready() == {}
    _, turn = pool.asked[-1]
    assert turn == Turn("5 6", (Call("tool"),))
    ours.start(waiting(5, 6))
    assert pool.asked[-1][0] == "step", "it is known to wait"


@pytest.mark.parametrize(("replayable", "kind"), [(True, "end"), (False, "restart")])
def test_a_conversation_that_cannot_be_replayed(replayable: bool, kind: str) -> None:
    pool = Pool()
    ours = conversations(pool, turns=3, replayable=replayable)
    ours.start(waiting(1, 2))
    pool.answers = {1: Failure("replay", "it differs")}
    assert [reply.kind for reply in ours.ready().values()] == [kind]


def test_an_observation_without_room_is_not_inserted() -> None:
    pool = Pool()
    ours = conversations(pool, turns=3, owns_reward=False)
    ours.start(waiting(1, 2, room=1))
    for answer in (START, SAID):
        pool.answers = {1: answer}
        replies = ours.ready()
    assert replies == {(0, 0): Reply("end", truncated=True)}


def test_conversations_take_turns_with_the_processes() -> None:
    """One process, two conversations: the first is replayed at its next turn, because its process was given away."""
    pool = Pool()
    ours = conversations(pool, turns=3)
    ours.start(waiting(1, 2))
    for answer in (START, SAID):
        pool.answers = {1: answer}
        ours.ready()
    ours.start(waiting(7, index=1))
    assert pool.asked[-2:] == [("close", 1), ("open", History(START, ()))]
    ours.start(waiting(1, 2, 99, 3))
    assert pool.opened == 2, "it waits for the process"
    for answer in (START, SAID):
        pool.answers = {2: answer}
        replies = ours.ready()
    assert replies == {(0, 1): Reply("insert", (99,))}
    ours.ready()
    assert pool.opened == 3 and len(pool.asked[-1][1].exchanges) == 1
