"""Truths about what a controller decides, from states, ends of attempts, wishes and a policy alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.executor.failure import KINDS, NO_RETRIES
from sweeps.executor.failure import retries as retry_policy
from sweeps.launch.decider import Wish
from sweeps.launch.decisions import (
    Action,
    Adopt,
    Ended,
    Finish,
    GiveUp,
    Hold,
    Policy,
    Retry,
    Stop,
    Submit,
    first_actions,
    next_actions,
    wished_actions,
)
from sweeps.launch.ledger import EVENTS, MemberState, state_after
from tests.examples import examples

RETRIES = retry_policy()


def state(run: str = "a", event: str = "started", **more: object) -> MemberState:
    return replace(MemberState(run, "scalerl", 0, event), **more)  # type: ignore[arg-type]


def decided(ended: Ended, policy: Policy, now: MemberState | None = None) -> Action:
    (action,) = next_actions({ended.run: now or state(ended.run)}, [ended], policy)
    return action


# --- first ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "again", "by_decider", "expected"),
    [
        ("planned", False, False, Submit("a")),
        ("retried", False, False, Submit("a")),
        ("finished", False, False, Submit("a")),  # the journal does not bear it out, or the budget has grown
        ("submitting", False, False, Adopt("a")),
        ("started", True, False, Adopt("a")),
        ("failed", True, False, Submit("a")),
        ("failed", False, False, GiveUp("a", state="failed", reason="no")),
        ("failed", False, True, GiveUp("a", state="failed", reason="no")),
        ("stopped", True, False, Submit("a")),
        ("stopped", False, False, GiveUp("a", state="stopped", reason="no")),
        ("stopped", False, True, Submit("a")),  # the decider says whether it goes on
    ],
)
def test_who_is_run_when_a_launch_begins(event: str, again: bool, by_decider: bool, expected: Action) -> None:
    members = [state(event=event, reason="no")]
    assert first_actions(members, {}, Policy(NO_RETRIES, again, by_decider)) == [expected]
    recorded = None if event == "finished" else "finished"
    assert first_actions(members, {"a": None}, Policy(NO_RETRIES, again, by_decider)) == [Finish("a", recorded)]
    early = Finish("a", recorded, {"reason": "dry"}, "dry")
    assert first_actions(members, {"a": "dry"}, Policy(NO_RETRIES, again, by_decider)) == [early]


@pytest.mark.parametrize("kind", ["cancelled", "stopped"])
def test_what_was_cancelled_is_told_as_cancelled(kind: str) -> None:
    (action,) = first_actions([state(event="failed", kind=kind, reason="why")], {}, Policy(NO_RETRIES, again=False))
    assert action == GiveUp("a", state="cancelled", reason="why")


# --- next ----------------------------------------------------------------------------------------------------


def test_done_is_done_and_its_node_is_written_down() -> None:
    assert decided(Ended("a", done=True, node="n1"), Policy(NO_RETRIES)) == Finish("a", "finished", {"node": "n1"})
    early = decided(Ended("a", done=True, reason="dry", node="n1"), Policy(RETRIES))
    assert early == Finish("a", "finished", {"node": "n1", "reason": "dry"}, "dry")


@pytest.mark.parametrize(
    ("ended", "policy", "expected"),
    [
        (("killed", {}), Policy(RETRIES), Retry("a", "retried", {"kind": "killed", "reason": "why"}, "why")),
        (("error", {}), Policy(RETRIES), GiveUp("a", "failed", {"kind": "error", "reason": "why"}, "failed", "why")),
        (("cancelled", {}), Policy(NO_RETRIES), "cancelled"),
        # Over before this command was given, which wants it.
        (
            ("cancelled", {"ended_before": True, "stop_requested": True}),
            Policy(NO_RETRIES),
            "failed, then another chance",
        ),
        (("cancelled", {"ended_before": True, "stop_requested": True}), Policy(NO_RETRIES, again=False), "cancelled"),
        # Stopped by itself, because it was asked to, and although its decider did not ask.
        (("stopped", {}), Policy(NO_RETRIES), "stopped"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES), "stopped, then another chance"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES, again=False), "stopped"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES, has_decider=True), "stopped, for the decider"),
        (("stopped", {}), Policy(NO_RETRIES, has_decider=True), "cancelled"),
    ],
)
def test_what_follows_an_end(ended: tuple[str, Mapping[str, bool]], policy: Policy, expected: Action | str) -> None:
    kind, more = ended
    action = decided(Ended("a", False, kind, "why", **more), policy)  # type: ignore[arg-type]
    failure = {"kind": kind, "reason": "why"}
    named: dict[str, Action] = {
        "cancelled": GiveUp("a", "failed", failure, "cancelled", "why"),
        "stopped": GiveUp("a", "stopped", failure, "stopped", "why"),
        "failed, then another chance": Retry("a", "failed", failure, "why"),
        "stopped, then another chance": Retry("a", "stopped", failure, "why"),
        "stopped, for the decider": Submit("a", "stopped", failure),
    }
    assert action == (named[expected] if isinstance(expected, str) else expected)


kinds = st.sampled_from(list(KINDS))
policies = st.builds(
    Policy,
    st.dictionaries(kinds, st.one_of(st.none(), st.integers(0, 3))).map(lambda given: {**RETRIES, **given}),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=examples(200))
@given(policies, st.lists(kinds, max_size=30))
def test_retries_never_exceed_the_policy(policy: Policy, failures: Sequence[str]) -> None:
    """Whatever a member dies of, in whichever order, until it is given up."""
    now, spent = state(), Counter[str]()
    for kind in failures:
        action = decided(Ended("a", False, kind, "why", "n1"), policy, now)
        assert action.event is not None
        now = state_after(now, action.event, action.entry)
        if action.event != "retried":
            limit = policy.retries[kind]
            assert limit is not None and spent[kind] >= limit, "given up too early"
            return
        spent[kind] += 1
        limit = policy.retries[kind]
        assert limit is None or spent[kind] <= limit


@settings(max_examples=examples(100))
@given(policies, kinds, st.integers(0, 8), st.integers(0, 8))
def test_attempts_that_a_node_has_spoilt_do_not_count(policy: Policy, kind: str, others: int, excused: int) -> None:
    """`excused` counts this attempt as well, which the ledger does not know of yet."""
    limit = policy.retries[kind]
    now = state(retries_used={kind: others + excused})
    action = decided(Ended("a", False, kind, "why", "n1", excused=excused), policy, now)
    assert (action.event == "retried") == (limit is None or (limit > 0 and others < limit))


# --- wished --------------------------------------------------------------------------------------------------


def test_a_wish_is_carried_out_in_the_deciders_order() -> None:
    states = {
        run: state(run, event) for run, event in zip("abcdef", ["stopped"] * 4 + ["failed", "started"], strict=True)
    }
    wish = Wish(
        to_run=["d", "f", "b"],
        to_pause={"a": "paused: wait", "f": "paused: wait"},
        to_end={"c": "stopped at compute 1"},
    )
    actions = wished_actions(states, wish, ["f"], {}, waiting=["a", "b", "e"], held=["c", "d"])
    stopped = {"kind": "stopped", "reason": "stopped at compute 1"}
    assert actions == [
        Stop("f", reason="paused: wait"),
        GiveUp("c", "stopped", stopped, "stopped", "stopped at compute 1"),
        GiveUp("e", state="failed"),
        Submit("d"),
        Submit("b"),
        Hold("a", reason="paused: wait"),
    ]
    # One that failed is held where the decider wants it later; it has not paused.
    assert wished_actions(states, Wish(to_pause={"e": "paused: wait"}), [], {}, ["e"], []) == [Hold("e")]
    # Once more: what was asked is not asked again, and what is held is not told again.
    states["c"] = state_after(states["c"], "stopped", {"run": "c", **stopped})
    again = wished_actions(states, replace(wish, to_run=[]), ["f"], {"f": "paused: wait"}, [], ["a", "c"])
    assert again == [GiveUp("c", state="stopped", reason="stopped at compute 1"), Hold("a")]


RUNS = "abcdef"
runs = st.sampled_from(RUNS)
reasons = st.dictionaries(runs, st.sampled_from(["paused: one", "stopped: two"]))
wishes = st.builds(Wish, st.lists(runs), reasons, reasons)
ends = st.builds(
    Ended,
    run=runs,
    done=st.booleans(),
    kind=kinds,
    reason=st.just("why"),
    stop_requested=st.booleans(),
    ended_before=st.booleans(),
    excused=st.integers(0, 2),
)


@settings(max_examples=examples(300))
@given(
    st.lists(st.sampled_from(EVENTS), min_size=len(RUNS), max_size=len(RUNS)),
    st.sets(runs),
    policies,
    st.lists(st.tuples(st.integers(0, 3), st.lists(ends, max_size=4), wishes), max_size=8),
)
def test_a_member_is_in_one_place_whatever_happens(
    events: Sequence[str],
    done: set[str],
    policy: Policy,
    turns: Sequence[tuple[int, Sequence[Ended], Wish]],
) -> None:
    """Waiting, held, at work, done or given up: never in two of them, never in none; and what is done stays done."""
    states = {run: state(run, event) for run, event in zip(RUNS, events, strict=True)}
    waiting: list[str] = []
    held: list[str] = []
    at_work: list[str] = []
    over: list[str] = []
    finished: list[str] = []

    def carry_out(actions: Sequence[Action]) -> None:
        for action in actions:
            if action.event is not None:
                states[action.run] = state_after(states[action.run], action.event, action.entry)
            match action:
                case Submit(run):
                    waiting.append(run)
                case Adopt(run):
                    at_work.append(run)
                case Hold(run):
                    held.append(run)
                case GiveUp(run):
                    over.append(run)
                case Finish(run):
                    finished.append(run)
        assert sorted([*waiting, *held, *at_work, *over, *finished]) == list(RUNS)

    first = first_actions(list(states.values()), dict.fromkeys(done), policy)
    assert [action.run for action in first] == list(RUNS)
    carry_out(first)
    assert set(finished) == done
    for room, outcomes, wish in turns:
        for _ in range(min(room, len(waiting))):
            run = waiting.pop(0)
            assert run not in finished and run not in over
            at_work.append(run)
            states[run] = state_after(states[run], "started", {"run": run})
        ended = list({each.run: each for each in outcomes if each.run in at_work}.values())
        at_work = [run for run in at_work if run not in {each.run for each in ended}]
        actions = next_actions(states, ended, policy)
        assert [action.run for action in actions] == [each.run for each in ended], "one of each, in their order"
        assert all(isinstance(action, Finish) == each.done for action, each in zip(actions, ended, strict=True))
        carry_out(actions)
        if policy.has_decider:
            asked = {run: "paused: one" for run in at_work[:1]}
            actions = wished_actions(states, wish, at_work, asked, waiting, held)
            assert actions == wished_actions(states, wish, at_work, asked, waiting, held), "of nothing else"
            submitted = [action.run for action in actions if isinstance(action, Submit)]
            assert submitted == [run for run in dict.fromkeys(wish.to_run) if run in submitted]
            stopped = {action.run: action.reason for action in actions if isinstance(action, Stop)}
            unwanted = {**wish.to_pause, **wish.to_end}
            assert stopped == {
                run: unwanted[run] for run in at_work if unwanted.get(run, asked.get(run)) != asked.get(run)
            }
            waiting, held = [], []
            carry_out(actions)
