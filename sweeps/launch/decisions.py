"""Decisions on a study's members, as pure functions: they touch no file, no clock, no executor and no observer.

    first_actions    when a launch begins: who is done, given up, to be found again, or to be submitted
    next_actions     when attempts have ended: who is done, tried again, or given up
    wished_actions   when a decider has said who is to be at work: who stops, is given up, waits, or is submitted

The controller (`launch.controller`) reads what these need to know, and carries out what they return: it writes each
action's ledger entry first, acts then, and tells the observers last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.executor.failure import may_retry
from sweeps.launch.decider import Wish
from sweeps.launch.ledger import MemberState
from sweeps.redact import redact


@dataclass(frozen=True)
class Policy:
    """Rules of a launch on who is run again.

    Attributes:
        retries: attempts after the first, by kind of failure; None is no limit.
        again: whether members that were given up get another chance; so does one whose job was over before this
            process looked, whatever the retries say.
        decided: whether a decider says who is at work.
    """

    retries: Mapping[str, int | None]
    again: bool = True
    decided: bool = False


@dataclass(frozen=True)
class Ended:
    """End of a member's attempt, by its executor, its journal, and what is known of the nodes.

    Attributes:
        run: identity of the member.
        done: whether its journal shows its whole budget, or an end that is final.
        kind: kind of the failure; "" if it is done.
        reason: the failure in words, or why it is done before its budget; "" if its budget is spent.
        node: node that may be to blame, or on which it was done; None if that says nothing.
        asked: whether it was asked to stop, or had ended before this process looked.
        earlier: whether it had ended before this process looked.
        excused: number of its attempts that failed in this way through the fault of a node, this one included.
    """

    run: str
    done: bool = False
    kind: str = ""
    reason: str = ""
    node: str | None = None
    asked: bool = False
    earlier: bool = False
    excused: int = 0


@dataclass(frozen=True)
class Action:
    """Action on one member, with the ledger entry that is written before anything is done or told.

    Attributes:
        run: identity of the member.
        event: event of the entry; None if there is nothing to write.
        fields: fields of the entry apart from the run.
    """

    run: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry's fields, the run among them."""
        return {"run": self.run, **self.fields}


@dataclass(frozen=True)
class Submit(Action):
    """Let the member wait to be submitted, in the order of the actions; a decider has the last word on it."""


@dataclass(frozen=True)
class Retry(Submit):
    """Submit the member again after a failed attempt, and say why that one failed."""

    reason: str = ""


@dataclass(frozen=True)
class Adopt(Action):
    """Find the member's process or job again; submit the member if there is none."""


@dataclass(frozen=True)
class Finish(Action):
    """Count the member as done: its journal shows its whole budget, or for a reason an end before it that is final."""

    reason: str | None = None


@dataclass(frozen=True)
class GiveUp(Action):
    """Count the member as ended without being done: `failed`, `cancelled`, or `stopped` for good."""

    state: str = "failed"
    reason: str | None = None


@dataclass(frozen=True)
class Stop(Action):
    """Ask a member at work to save and end."""

    reason: str = ""


@dataclass(frozen=True)
class Hold(Action):
    """Keep a member that is not at work until the decider wants it; a reason is told."""

    reason: str | None = None


def first_actions(members: Sequence[MemberState], done: Mapping[str, str | None], policy: Policy) -> list[Action]:
    """Decide on every member when a launch begins, in the study's order.

    Args:
        members: states by the ledger; of one that is new, as it will be once it is planned.
        done: those whose journals show that they are done, whatever the ledger says, each with the reason if it is
            done before its budget.
        policy: rules of the launch.
    """
    return [_first(member, done, policy) for member in members]


def _first(member: MemberState, done: Mapping[str, str | None], policy: Policy) -> Action:
    if member.adopted:
        return Finish(member.run)
    if member.run in done:
        return _finish(member.run, {}, done[member.run], known=member.state == "finished")
    # One that a decider has stopped may be wanted again by it.
    over = member.state == "failed" or (member.state == "stopped" and not policy.decided)
    if over and not policy.again:
        return _given_up_before(member)
    if member.state in ("submitting", "started"):
        return Adopt(member.run)
    return Submit(member.run)


def next_actions(states: Mapping[str, MemberState], outcomes: Sequence[Ended], policy: Policy) -> list[Action]:
    """Decide on members whose attempts have ended, in the order in which they ended.

    Args:
        states: states by the ledger, which does not know of these ends yet.
        outcomes: ends of attempts, one of a member.
        policy: rules of the launch.
    """
    return [_next(states[outcome.run], outcome, policy) for outcome in outcomes]


def _next(state: MemberState, ended: Ended, policy: Policy) -> Action:
    run, node = ended.run, {"node": ended.node} if ended.node else {}
    if ended.done:
        return _finish(run, node, ended.reason or None)
    failure = {"kind": ended.kind, "reason": ended.reason, **node}
    if may_retry(policy.retries, ended.kind, state.spent, ended.excused):
        return Retry(run, "retried", failure, ended.reason)
    stopped = ended.kind == "stopped" and ended.asked
    # Under a decider who did not ask for it a member that stops is one that will not come.
    event = "stopped" if stopped or (ended.kind == "stopped" and not policy.decided) else "failed"
    if stopped and policy.decided:
        return Submit(run, event, failure)  # saved; the decider says whether it goes on one day
    # It was over, or asked to be, when this command was given, and the command wants it.
    if policy.again and (ended.earlier or stopped):
        return Retry(run, event, failure, ended.reason)
    return GiveUp(run, event, failure, _told(event, ended.kind), ended.reason)


def _finish(run: str, fields: Mapping[str, Any], reason: str | None, known: bool = False) -> Finish:
    """Return the end of a member that is done; `known` to the ledger already, it is told and not written again."""
    fields = {**fields, **({"reason": reason} if reason else {})}
    return Finish(run, None if known else "finished", fields, reason)


def _told(state: str, kind: str | None) -> str:
    """Return the end of a member that was given up, as observers are told it."""
    return "cancelled" if state == "failed" and kind in ("cancelled", "stopped") else state


def wished_actions(
    states: Mapping[str, MemberState],
    wish: Wish,
    at_work: Collection[str],
    asked: Mapping[str, str],
    waiting: Sequence[str],
    held: Sequence[str],
) -> list[Action]:
    """Decide on the members that a decider wants at work, waiting or stopped.

    Args:
        states: states by the ledger.
        wish: the decider's decision.
        at_work: members whose processes or jobs have not ended.
        asked: reasons for which members at work were asked to stop already.
        waiting, held: members that are not at work: those that were to be submitted, and those kept by an earlier wish.

    Returns:
        The members to stop, those given up, those to submit in the decider's order, and those to hold; each member that
        waits or is held is in one of the last three.
    """
    unwanted = {**wish.later, **wish.over}
    stop = [Stop(run, reason=unwanted[run]) for run in at_work if run in unwanted and asked.get(run) != unwanted[run]]
    idle = dict.fromkeys([*held, *waiting])
    submit = [Submit(run) for run in dict.fromkeys(wish.go_on) if run in idle and run not in wish.over]
    wanted, kept = {action.run for action in submit}, set(held)
    over, dropped, hold = [], [], []
    for run in idle:
        state = states[run]
        if run in wish.over:
            over.append(_over(state, wish.over[run]))
        elif run in wanted:
            continue
        elif state.state == "failed" and run not in wish.later:  # nobody wants it again
            dropped.append(_given_up_before(state))
        else:
            new = run not in kept and state.state == "stopped"
            hold.append(Hold(run, reason=wish.later.get(run) if new else None))
    return [*stop, *over, *dropped, *submit, *hold]


def _over(member: MemberState, reason: str) -> GiveUp:
    # In the ledger reasons are without secrets.
    if member.state == "stopped" and member.reason == redact(reason):
        return _given_up_before(member)
    return GiveUp(member.run, "stopped", {"kind": "stopped", "reason": reason}, "stopped", reason)


def _given_up_before(member: MemberState) -> GiveUp:
    return GiveUp(member.run, state=_told(member.state, member.kind), reason=member.reason)
