"""Tests of a controller's decisions, which follow only from states, ends of attempts, wishes and the policy."""

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
    AttemptEnd,
    Finish,
    GiveUp,
    Hold,
    Policy,
    Reattach,
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


def action_after(ended: AttemptEnd, policy: Policy, now: MemberState | None = None) -> Action:
    (action,) = next_actions({ended.run: now or state(ended.run)}, [ended], policy)
    return action


# --- first actions of a launch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "again", "by_decider", "expected"),
    [
        ("planned", False, False, Submit("a")),
        ("retried", False, False, Submit("a")),
        ("finished", False, False, Submit("a")),  # not finished by the journal, or the budget was raised
        ("submitting", False, False, Reattach("a")),
        ("started", True, False, Reattach("a")),
        ("failed", True, False, Submit("a")),
        ("failed", False, False, GiveUp("a", state="failed", reason="no")),
        ("failed", False, True, GiveUp("a", state="failed", reason="no")),
        ("stopped", True, False, Submit("a")),
        ("stopped", False, False, GiveUp("a", state="stopped", reason="no")),
        ("stopped", False, True, Submit("a")),  # the decider says whether it continues
    ],
)
def test_first_action_per_state(event: str, again: bool, by_decider: bool, expected: Action) -> None:
    members = [state(event=event, reason="no")]
    assert first_actions(members, {}, Policy(NO_RETRIES, again, by_decider)) == [expected]
    recorded = None if event == "finished" else "finished"
    assert first_actions(members, {"a": None}, Policy(NO_RETRIES, again, by_decider)) == [Finish("a", recorded)]
    early = Finish("a", recorded, {"reason": "dry"}, "dry")
    assert first_actions(members, {"a": "dry"}, Policy(NO_RETRIES, again, by_decider)) == [early]


@pytest.mark.parametrize("kind", ["cancelled", "stopped"])
def test_a_cancelled_member_stays_cancelled(kind: str) -> None:
    (action,) = first_actions([state(event="failed", kind=kind, reason="why")], {}, Policy(NO_RETRIES, again=False))
    assert action == GiveUp("a", state="cancelled", reason="why")


# --- actions after an attempt has ended ----------------------------------------------------------------------


def test_a_finished_member_is_recorded_with_its_node() -> None:
    assert action_after(AttemptEnd("a", done=True, node="n1"), Policy(NO_RETRIES)) == Finish(
        "a", "finished", {"node": "n1"}
    )
    early = action_after(AttemptEnd("a", done=True, reason="dry", node="n1"), Policy(RETRIES))
    assert early == Finish("a", "finished", {"node": "n1", "reason": "dry"}, "dry")


@pytest.mark.parametrize(
    ("ended", "policy", "expected"),
    [
        (("killed", {}), Policy(RETRIES), Retry("a", "retried", {"kind": "killed", "reason": "why"}, "why")),
        (("error", {}), Policy(RETRIES), GiveUp("a", "failed", {"kind": "error", "reason": "why"}, "failed", "why")),
        (("cancelled", {}), Policy(NO_RETRIES), "cancelled"),
        # The attempt had ended before this launch, which asks for the member again.
        (
            ("cancelled", {"ended_before": True, "stop_requested": True}),
            Policy(NO_RETRIES),
            "failed, then another chance",
        ),
        (("cancelled", {"ended_before": True, "stop_requested": True}), Policy(NO_RETRIES, again=False), "cancelled"),
        # Stopped without a request of this launch, with a request, and with a decider that did or did not ask.
        (("stopped", {}), Policy(NO_RETRIES), "stopped"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES), "stopped, then another chance"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES, again=False), "stopped"),
        (("stopped", {"stop_requested": True}), Policy(NO_RETRIES, has_decider=True), "stopped, for the decider"),
        (("stopped", {}), Policy(NO_RETRIES, has_decider=True), "cancelled"),
    ],
)
def test_action_after_an_attempt_has_ended(
    ended: tuple[str, Mapping[str, bool]], policy: Policy, expected: Action | str
) -> None:
    kind, options = ended
    action = action_after(AttemptEnd("a", False, kind, "why", **options), policy)  # type: ignore[arg-type]
    failure = {"kind": kind, "reason": "why"}
    named_actions: dict[str, Action] = {
        "cancelled": GiveUp("a", "failed", failure, "cancelled", "why"),
        "stopped": GiveUp("a", "stopped", failure, "stopped", "why"),
        "failed, then another chance": Retry("a", "failed", failure, "why"),
        "stopped, then another chance": Retry("a", "stopped", failure, "why"),
        "stopped, for the decider": Submit("a", "stopped", failure),
    }
    assert action == (named_actions[expected] if isinstance(expected, str) else expected)


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
    """A member has failures of any kind in any order, until it is given up."""
    member, spent = state(), Counter[str]()
    for kind in failures:
        action = action_after(AttemptEnd("a", False, kind, "why", "n1"), policy, member)
        assert action.event is not None
        member = state_after(member, action.event, action.entry)
        if action.event != "retried":
            limit = policy.retries[kind]
            assert limit is not None and spent[kind] >= limit, "given up too early"
            return
        spent[kind] += 1
        limit = policy.retries[kind]
        assert limit is None or spent[kind] <= limit


@settings(max_examples=examples(100))
@given(policies, kinds, st.integers(0, 8), st.integers(0, 8))
def test_excused_attempts_do_not_count(policy: Policy, kind: str, others: int, excused: int) -> None:
    """`excused` includes this attempt, which is not in the ledger yet."""
    limit = policy.retries[kind]
    now = state(retries_used={kind: others + excused})
    action = action_after(AttemptEnd("a", False, kind, "why", "n1", excused=excused), policy, now)
    assert (action.event == "retried") == (limit is None or (limit > 0 and others < limit))


# --- actions that a decider wishes ---------------------------------------------------------------------------


def test_wishes_are_carried_out_in_the_deciders_order() -> None:
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
    # A failed member that the decider wants later is held, without a reason, because it has not paused.
    assert wished_actions(states, Wish(to_pause={"e": "paused: wait"}), [], {}, ["e"], []) == [Hold("e")]
    # A second time, requests and reports are not repeated.
    states["c"] = state_after(states["c"], "stopped", {"run": "c", **stopped})
    again = wished_actions(states, replace(wish, to_run=[]), ["f"], {"f": "paused: wait"}, [], ["a", "c"])
    assert again == [GiveUp("c", state="stopped", reason="stopped at compute 1"), Hold("a")]


RUNS = "abcdef"
runs = st.sampled_from(RUNS)
reasons = st.dictionaries(runs, st.sampled_from(["paused: one", "stopped: two"]))
wishes = st.builds(Wish, st.lists(runs), reasons, reasons)
ends = st.builds(
    AttemptEnd,
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
def test_a_member_is_always_in_exactly_one_state(
    events: Sequence[str],
    done: set[str],
    policy: Policy,
    turns: Sequence[tuple[int, Sequence[AttemptEnd], Wish]],
) -> None:
    """Each member is either waiting, held, running, finished or given up. Finished members stay finished."""
    states = {run: state(run, event) for run, event in zip(RUNS, events, strict=True)}
    waiting: list[str] = []
    held: list[str] = []
    running: list[str] = []
    given_up: list[str] = []
    finished: list[str] = []

    def carry_out(actions: Sequence[Action]) -> None:
        for action in actions:
            if action.event is not None:
                states[action.run] = state_after(states[action.run], action.event, action.entry)
            match action:
                case Submit(run):
                    waiting.append(run)
                case Reattach(run):
                    running.append(run)
                case Hold(run):
                    held.append(run)
                case GiveUp(run):
                    given_up.append(run)
                case Finish(run):
                    finished.append(run)
        assert sorted([*waiting, *held, *running, *given_up, *finished]) == list(RUNS)

    first = first_actions(list(states.values()), dict.fromkeys(done), policy)
    assert [action.run for action in first] == list(RUNS)
    carry_out(first)
    assert set(finished) == done
    for room, outcomes, wish in turns:
        for _ in range(min(room, len(waiting))):
            run = waiting.pop(0)
            assert run not in finished and run not in given_up
            running.append(run)
            states[run] = state_after(states[run], "started", {"run": run})
        ended = list({end.run: end for end in outcomes if end.run in running}.values())
        running = [run for run in running if run not in {end.run for end in ended}]
        actions = next_actions(states, ended, policy)
        assert [action.run for action in actions] == [end.run for end in ended], "one action per end, in the same order"
        assert all(isinstance(action, Finish) == end.done for action, end in zip(actions, ended, strict=True))
        carry_out(actions)
        if policy.has_decider:
            requested = {run: "paused: one" for run in running[:1]}
            actions = wished_actions(states, wish, running, requested, waiting, held)
            assert actions == wished_actions(states, wish, running, requested, waiting, held), (
                "the actions depend on nothing else"
            )
            submitted = [action.run for action in actions if isinstance(action, Submit)]
            assert submitted == [run for run in dict.fromkeys(wish.to_run) if run in submitted]
            stopped = {action.run: action.reason for action in actions if isinstance(action, Stop)}
            unwanted = {**wish.to_pause, **wish.to_end}
            assert stopped == {
                run: unwanted[run] for run in running if unwanted.get(run, requested.get(run)) != requested.get(run)
            }
            waiting, held = [], []
            carry_out(actions)
