"""Decisions about a study's members, as pure functions without files, clock, executor or observers.

    first_actions    when a launch begins: which members are done, given up, to be found again, or to be submitted
    next_actions     when attempts have ended: which members are done, retried, or given up
    wished_actions   after a decider's wish: which members stop, are given up, wait, or are submitted

The controller (`launch.controller`) gathers their inputs and carries out the actions that they return: it first writes
an action's ledger entry, then acts, and notifies the observers last.
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
    """Rules of a launch for running members again.

    Attributes:
        retries: attempts after the first, by kind of failure; None for no limit.
        again: whether members that were given up get another chance. If so, members whose job had ended before this
            process looked are also run again, regardless of `retries`.
        decided: whether a decider decides which members run.
    """

    retries: Mapping[str, int | None]
    again: bool = True
    decided: bool = False


@dataclass(frozen=True)
class Ended:
    """End of a member's attempt, according to its executor, its journal, and the history of the nodes.

    Attributes:
        run: identity of the member.
        done: whether its journal shows its whole budget, or a final end.
        kind: kind of the failure; "" if it is done.
        reason: the failure in words, or why it is done before its budget; "" if its budget is spent.
        node: node that may be at fault, or on which it was done; None if unknown or irrelevant.
        asked: whether it was asked to stop, or had ended before this process looked.
        earlier: whether it had ended before this process looked.
        excused: number of its failures of this kind that are blamed on nodes, including this one.
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
    """Action on one member, with the ledger entry that is written before anything else happens.

    Attributes:
        run: identity of the member.
        event: event of the entry; None if there is nothing to write.
        fields: fields of the entry besides the run.
    """

    run: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry's fields, including the run."""
        return {"run": self.run, **self.fields}


@dataclass(frozen=True)
class Submit(Action):
    """Queue the member for submission, in the order of the actions; a decider may override this."""


@dataclass(frozen=True)
class Retry(Submit):
    """Submit the member again after a failed attempt, and report why that failed."""

    reason: str = ""


@dataclass(frozen=True)
class Adopt(Action):
    """Find the member's process or job again; submit the member if there is none."""


@dataclass(frozen=True)
class Finish(Action):
    """Count the member as done: its journal shows its whole budget or, with a reason, a final end before it."""

    reason: str | None = None


@dataclass(frozen=True)
class GiveUp(Action):
    """Count the member as ended without being done: `failed`, `cancelled`, or `stopped` for good."""

    state: str = "failed"
    reason: str | None = None


@dataclass(frozen=True)
class Stop(Action):
    """Ask a running member to save and end."""

    reason: str = ""


@dataclass(frozen=True)
class Hold(Action):
    """Hold back a member that is not running until the decider wants it; a reason is reported."""

    reason: str | None = None


def first_actions(members: Sequence[MemberState], done: Mapping[str, str | None], policy: Policy) -> list[Action]:
    """Decide about every member when a launch begins, in the study's order.

    Args:
        members: states by the ledger; for a new member, the state it will have once planned.
        done: members whose journals show that they are done, regardless of the ledger, each with the reason if it is
            done before its budget.
        policy: rules of the launch.
    """
    return [_first(member, done, policy) for member in members]


def _first(member: MemberState, done: Mapping[str, str | None], policy: Policy) -> Action:
    if member.adopted:
        return Finish(member.run)
    if member.run in done:
        return _finish(member.run, {}, done[member.run], known=member.state == "finished")
    # A decider may want a member again that it stopped.
    over = member.state == "failed" or (member.state == "stopped" and not policy.decided)
    if over and not policy.again:
        return _repeated_give_up(member)
    if member.state in ("submitting", "started"):
        return Adopt(member.run)
    return Submit(member.run)


def next_actions(states: Mapping[str, MemberState], outcomes: Sequence[Ended], policy: Policy) -> list[Action]:
    """Decide about members whose attempts have ended, in the order in which they ended.

    Args:
        states: states by the ledger, before these ends are recorded.
        outcomes: ends of attempts, one per member.
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
    # With a decider, a member that stops without its request failed to continue.
    event = "stopped" if stopped or (ended.kind == "stopped" and not policy.decided) else "failed"
    if stopped and policy.decided:
        return Submit(run, event, failure)  # saved; the decider may resume it later
    # The member ended, or was asked to stop, before this command began: the command runs it again.
    if policy.again and (ended.earlier or stopped):
        return Retry(run, event, failure, ended.reason)
    return GiveUp(run, event, failure, _reported_end(event, ended.kind), ended.reason)


def _finish(run: str, fields: Mapping[str, Any], reason: str | None, known: bool = False) -> Finish:
    """Return the end of a finished member. If the ledger knows it already, it is reported but not written again."""
    fields = {**fields, **({"reason": reason} if reason else {})}
    return Finish(run, None if known else "finished", fields, reason)


def _reported_end(state: str, kind: str | None) -> str:
    """Return the end of a member that was given up, as reported to observers."""
    return "cancelled" if state == "failed" and kind in ("cancelled", "stopped") else state


def wished_actions(
    states: Mapping[str, MemberState],
    wish: Wish,
    at_work: Collection[str],
    stop_reasons: Mapping[str, str],
    waiting: Sequence[str],
    held: Sequence[str],
) -> list[Action]:
    """Decide about the members that a decider wants to run, wait or stop.

    Args:
        states: states by the ledger.
        wish: the decider's decision.
        at_work: members whose processes or jobs have not ended.
        stop_reasons: by running member, the reason for which it was already asked to stop.
        waiting, held: members that do not run: those queued for submission, and those held back by an earlier wish.

    Returns:
        Actions to stop members, to give members up, to submit members in the decider's order, and to hold members
        back. Each member in `waiting` or `held` gets one of the last three.
    """
    unwanted = {**wish.later, **wish.over}
    stop = [
        Stop(run, reason=unwanted[run]) for run in at_work if run in unwanted and stop_reasons.get(run) != unwanted[run]
    ]
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
        elif state.state == "failed" and run not in wish.later:  # the decider does not want it again
            dropped.append(_repeated_give_up(state))
        else:
            new = run not in kept and state.state == "stopped"
            hold.append(Hold(run, reason=wish.later.get(run) if new else None))
    return [*stop, *over, *dropped, *submit, *hold]


def _over(member: MemberState, reason: str) -> GiveUp:
    # Reasons in the ledger are redacted, so redact before comparing.
    if member.state == "stopped" and member.reason == redact(reason):
        return _repeated_give_up(member)
    return GiveUp(member.run, "stopped", {"kind": "stopped", "reason": reason}, "stopped", reason)


def _repeated_give_up(member: MemberState) -> GiveUp:
    return GiveUp(member.run, state=_reported_end(member.state, member.kind), reason=member.reason)
