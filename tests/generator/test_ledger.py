"""Tests of the fleet's ledger: every rollout is returned once, and the oldest groups are sent first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, WaitingRollout
from lightning_scalerl.generator.fleet.ledger import Ledger
from lightning_scalerl.rollouts.rollout import Rollout
from tests.examples import examples

SLOTS = 4


def request(key: int, completions: int = 3) -> GroupRequest:
    return GroupRequest(key, (1, 2), completions, (0, key))


def finished(name: int, index: int) -> FinishedRollout:
    return FinishedRollout(name, index, Rollout([name, index], [-1.0, -1.0], [0, 0], [False, False], "stop"))


class Engines(RuleBasedStateMachine):
    """Engines start, work, answer twice and are lost in any order. They know only what the ledger sent to them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.up: list[int] = []
        self.next_engine = 0
        self.submitted: dict[int, int] = {}
        self.names: dict[int, int] = {}  # name -> key, for names that were sent to an engine
        self.sent: list[tuple[int, int, int]] = []  # engine, name, completions; also of lost engines
        self.returned: Counter[tuple[int, int]] = Counter()
        self.set_aside: list[tuple[Ledger, dict[int, int], Counter[tuple[int, int]]]] = []

    @rule(completions=st.integers(1, 5))
    def submit(self, completions: int) -> None:
        key = len(self.submitted)
        self.submitted[key] = completions
        self.ledger.submit(request(key, completions))

    @rule()
    def comes_up(self) -> None:
        self.up.append(self.next_engine)
        self.next_engine += 1

    @rule()
    def dispatch(self) -> None:
        waiting = [entry.name for entry in self.ledger._unassigned]
        before = {engine: self.ledger.unfinished(engine) for engine in self.up}
        assigned = self.ledger.assign(dict.fromkeys(self.up, SLOTS))
        assert [item.key for _, item in assigned] == waiting[: len(assigned)], (
            "the oldest groups are sent first, and none is skipped"
        )
        assert waiting == sorted(waiting)
        for engine, sent_request in assigned:
            assert before[engine] < SLOTS and before[engine] == min(before.values()), "the engine with most room"
            entry = self.ledger._open[sent_request.key]
            before[engine] += len(entry.missing)
            assert self.names.setdefault(sent_request.key, entry.request.key) == entry.request.key, (
                "a name belongs to one group"
            )
            self.sent.append((engine, sent_request.key, sent_request.completions))
        assert not self.ledger.unassigned or all(count >= SLOTS for count in before.values()), (
            "no engine idles while groups wait"
        )

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        """A rollout ends on any engine that it was sent to: lost, slow, for a second time, or for work set aside."""
        _, name, completions = data.draw(st.sampled_from(self.sent))
        self.ledger.record_finished(finished(name, data.draw(st.integers(0, completions - 1))))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def one_is_lost(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from(self.up))
        self.up.remove(lost)
        self.ledger.requeue_others(self.up)
        assert not self.ledger.unfinished(lost)

    @rule()
    def collect(self) -> None:
        for item in self.ledger.collect():
            name, index = item.rollout.tokens
            assert self.names[name] == item.key and index == item.index, "each rollout belongs to its group and index"
            self.returned[item.key, item.index] += 1

    @rule()
    def is_saved_and_restored(self) -> None:
        fresh = Ledger(self.ledger.names)
        numbers = {engine: number for number, engine in enumerate(self.up)}
        state = self.ledger.state_dict(numbers.__getitem__)
        fresh.load_state_dict(state)
        for name, _, _, number in state["open"]:
            if number is not None and number % 2:  # engines with an even number lost their states
                fresh.adopt(name, self.up[number])
        assert fresh.in_flight == self.ledger.in_flight
        self.ledger = fresh

    @rule()
    def is_set_aside(self) -> None:
        self.collect()
        self.set_aside.append((self.ledger, self.submitted, self.returned))
        self.ledger, self.submitted, self.returned = Ledger(self.ledger.names), {}, Counter()

    @precondition(lambda self: self.set_aside)
    @rule()
    def comes_back(self) -> None:
        self.finish()
        self.ledger, self.submitted, self.returned = self.set_aside.pop()
        self.ledger.requeue_others(self.up)

    @invariant()
    def nothing_comes_twice_or_is_lost(self) -> None:
        assert not self.returned or max(self.returned.values()) == 1
        assert self.ledger.in_flight + len(self.returned) == sum(self.submitted.values())

    def finish(self) -> None:
        """With one working engine, all rollouts are returned."""
        self.ledger.requeue_others([])
        self.up.append(self.next_engine)
        self.next_engine += 1
        self.ledger.requeue_others(self.up)
        for _ in range(10 * (1 + len(self.submitted))):
            self.dispatch()
            for _, name, completions in list(self.sent):
                for index in range(completions):
                    self.ledger.record_finished(finished(name, index))
            self.collect()
        assert set(self.returned) == {(key, index) for key, most in self.submitted.items() for index in range(most)}
        self.nothing_comes_twice_or_is_lost()

    def teardown(self) -> None:
        while self.set_aside:
            self.comes_back()
        self.finish()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=examples(200), stateful_step_count=40)


def test_rollouts_that_were_not_requested_are_refused() -> None:
    ledger = Ledger()
    ledger.submit(request(7))
    ((_, sent),) = ledger.assign({"a": 4})
    assert not ledger.record_finished(finished(sent.key + 1, 0)) and not ledger.record_finished(finished(sent.key, 3))
    assert ledger.record_finished(finished(sent.key, 2)) and not ledger.record_finished(finished(sent.key, 2))
    assert [(item.key, item.index) for item in ledger.collect()] == [(7, 2)] and ledger.in_flight == 2


def test_a_group_finished_by_an_engine_thought_lost_is_not_sent_again() -> None:
    ledger = Ledger()
    ledger.submit(request(0, 1))
    ((_, sent),) = ledger.assign({"a": 4})
    ledger.requeue_others([])
    assert ledger.unassigned == 1
    assert ledger.record_finished(finished(sent.key, 0))
    assert ledger.unassigned == 0 and not ledger.assign({"b": 4})


@pytest.mark.parametrize("lost", ["a", "b"])
def test_groups_of_a_lost_engine_are_sent_before_later_groups(lost: str) -> None:
    ledger = Ledger()
    for key in range(4):
        ledger.submit(request(key, 2))
    first = ledger.assign({"a": 2, "b": 2})
    assert [(engine, item.random_key[1]) for engine, item in first] == [("a", 0), ("b", 1)]
    ledger.requeue_others([{"a": "b", "b": "a"}[lost]])
    reassigned = ledger.assign({"c": 9})
    assert [item.random_key[1] for _, item in reassigned] == [0 if lost == "a" else 1, 2, 3]


def test_a_restored_ledger_reuses_no_names() -> None:
    """A restored engine may still report a finished group; that must not be taken for another group."""
    ledger = Ledger()
    for key in range(3):
        ledger.submit(request(key))
    old_names = {item.key for _, item in ledger.assign({"a": 99})}
    restored = Ledger()
    restored.load_state_dict({**ledger.state_dict(lambda engine: 0), "open": []})
    restored.submit(request(9))
    assert not old_names & {item.key for _, item in restored.assign({"b": 9})}


def test_waiting_rollouts() -> None:
    """Each waiting rollout is reported once, continued once in its engine, and forgotten if its engine is lost."""
    ledger = Ledger()
    ledger.submit(request(7))
    ((_, sent),) = ledger.assign({"a": SLOTS})
    first, second = (WaitingRollout(sent.key, index, finished(0, index).rollout, 5) for index in (0, 1))
    for item in (first, second, first):
        ledger.record_waiting(item, "a")
    ledger.record_waiting(WaitingRollout(sent.key, 2, first.rollout, 5), "b")
    assert ledger.unfinished("a") == 1 and ledger.in_flight == 3 and ledger.has_report
    assert [(item.key, item.index) for item in ledger.all_waiting()] == [(7, 0), (7, 1)]
    with pytest.raises(ValueError, match="5 tokens do not fit into rollout 0 of group 7, which has room for 5"):
        ledger.resume(7, 0, [1] * 5)
    assert ledger.resume(7, 0, [1] * 4) == ("a", sent.key)
    with pytest.raises(KeyError, match="rollout 0 of group 7 does not wait"):
        ledger.resume(7, 0)
    assert [item.index for item in ledger.collect_waiting()] == [1] and not ledger.collect_waiting()
    ledger.record_finished(finished(sent.key, 1))
    assert not ledger.all_waiting()
    # The engine sampled rollout 1 again, but it was already returned as finished.
    assert not ledger.record_waiting(second, "a") and not ledger.all_waiting()
    assert ledger.record_waiting(first, "a")
    ledger.requeue_others(["b"])
    assert not ledger.all_waiting() and not ledger.collect_waiting() and ledger.unassigned == 2
