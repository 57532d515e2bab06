"""Decisions about a study's members, as pure functions: no files, no clock, no calls of executor or observers.

    first_actions    when a launch begins: which members are done, given up, reattached, or submitted
    next_actions     when attempts have ended: which members are done, retried, or given up
    wished_actions   after a decider's wish: which members stop, are given up, wait, or are submitted

The controller (`launch.controller`) collects the inputs and carries out the returned actions. For each action it first
writes the ledger entry, then acts, then notifies the observers.
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
    """Rules of a launch for retrying members and for running ended ones again.

    Attributes:
        retries: number of attempts after the first, by kind of failure; None for no limit.
        again: whether to run members again that were given up or stopped before this launch. They include members whose
            job ended while no controller was running; `retries` does not limit these.
        has_decider: whether a decider decides which members run.
    """

    retries: Mapping[str, int | None]
    again: bool = True
    has_decider: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """End of a member's attempt, according to the executor, the member's journal and the history of the nodes.

    Attributes:
        run: identity of the member.
        done: whether the member's journal reaches its budget, or has an earlier end after which it cannot be continued.
        kind: kind of the failure; "" if the member is done.
        reason: why the attempt failed, or why the member is done before its budget; "" if it reached its budget.
        node: node that may have caused the failure, or on which the member finished; None if unknown or irrelevant.
        stop_requested: whether the member was asked to stop; always True with `ended_before`.
        ended_before: whether the attempt had ended before this process began to follow it.
        excused: number of the member's failures of this kind, including this one, that are blamed on nodes. They do not
            count against its retries.
    """

    run: str
    done: bool = False
    kind: str = ""
    reason: str = ""
    node: str | None = None
    stop_requested: bool = False
    ended_before: bool = False
    excused: int = 0


@dataclass(frozen=True)
class Action:
    """Action on one member, with the ledger entry to write before the action is carried out.

    Attributes:
        run: identity of the member.
        event: event of the ledger entry; None if there is nothing to write.
        fields: further fields of the ledger entry, without the run.
    """

    run: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """Fields of the ledger entry, including the run."""
        return {"run": self.run, **self.fields}


@dataclass(frozen=True)
class Submit(Action):
    """Queue the member for submission, in the order of the actions. A decider may reorder it or hold it back."""


@dataclass(frozen=True)
class Retry(Submit):
    """Submit the member again after a failed attempt, and report the reason of the failure."""

    reason: str = ""


@dataclass(frozen=True)
class Reattach(Action):
    """Reattach to the process or job that an earlier launch started for the member; if there is none, submit it."""


@dataclass(frozen=True)
class Finish(Action):
    """Count the member as done. `reason` says why it ended before its budget, and is None if it reached its budget."""

    reason: str | None = None


@dataclass(frozen=True)
class GiveUp(Action):
    """Count the member as ended but not done, with the state `failed`, `cancelled`, or `stopped`."""

    state: str = "failed"
    reason: str | None = None


@dataclass(frozen=True)
class Stop(Action):
    """Ask a running member to save and end."""

    reason: str = ""


@dataclass(frozen=True)
class Hold(Action):
    """Keep a member from being submitted until the decider wants it to run. A given reason is reported to observers."""

    reason: str | None = None


def first_actions(members: Sequence[MemberState], done: Mapping[str, str | None], policy: Policy) -> list[Action]:
    """Decide about every member when a launch begins, in the study's order.

    Args:
        members: states from the ledger; `planned` for a new member.
        done: members whose journals show that they are done, whatever the ledger says. The value says why the member
            ended before its budget; None if it reached its budget.
        policy: rules of the launch.
    """
    return [_first_action(member, done, policy) for member in members]


def _first_action(member: MemberState, done: Mapping[str, str | None], policy: Policy) -> Action:
    if member.adopted:
        return Finish(member.run)
    if member.run in done:
        return _finish(member.run, {}, done[member.run], already_recorded=member.state == "finished")
    # A decider may resume a member that it stopped.
    has_ended = member.state == "failed" or (member.state == "stopped" and not policy.has_decider)
    if has_ended and not policy.again:
        return _repeated_give_up(member)
    if member.state in ("submitting", "started"):
        return Reattach(member.run)
    return Submit(member.run)


def next_actions(states: Mapping[str, MemberState], outcomes: Sequence[AttemptEnd], policy: Policy) -> list[Action]:
    """Decide about members whose attempts have ended, in the order in which they ended.

    Args:
        states: states from the ledger, before the ends in `outcomes` are recorded.
        outcomes: ends of attempts, one per member.
        policy: rules of the launch.
    """
    return [_next_action(states[outcome.run], outcome, policy) for outcome in outcomes]


def _next_action(state: MemberState, ended: AttemptEnd, policy: Policy) -> Action:
    run, node = ended.run, {"node": ended.node} if ended.node else {}
    if ended.done:
        return _finish(run, node, ended.reason or None)
    failure = {"kind": ended.kind, "reason": ended.reason, **node}
    if may_retry(policy.retries, ended.kind, state.retries_used, ended.excused):
        return Retry(run, "retried", failure, ended.reason)
    stopped = ended.kind == "stopped" and ended.stop_requested
    # With a decider, a member may stop only at the decider's request; any other stop is a failure.
    event = "stopped" if stopped or (ended.kind == "stopped" and not policy.has_decider) else "failed"
    if stopped and policy.has_decider:
        return Submit(run, event, failure)  # the member has saved; the decider may resume it later
    # Ended, or asked to stop, before this command began. The user gave the command to continue the study: run it again.
    if policy.again and (ended.ended_before or stopped):
        return Retry(run, event, failure, ended.reason)
    return GiveUp(run, event, failure, _reported_end(event, ended.kind), ended.reason)


def _finish(run: str, fields: Mapping[str, Any], reason: str | None, already_recorded: bool = False) -> Finish:
    """Return the action for a finished member.

    With `already_recorded`, the ledger has the end already; it is only reported.
    """
    fields = {**fields, **({"reason": reason} if reason else {})}
    return Finish(run, None if already_recorded else "finished", fields, reason)


def _reported_end(state: str, kind: str | None) -> str:
    """Return the state of a member that was given up, as reported to observers."""
    return "cancelled" if state == "failed" and kind in ("cancelled", "stopped") else state


def wished_actions(
    states: Mapping[str, MemberState],
    wish: Wish,
    at_work: Collection[str],
    stop_reasons: Mapping[str, str],
    waiting: Sequence[str],
    held: Sequence[str],
) -> list[Action]:
    """Decide about the members that a decider wants to run, pause or end.

    Args:
        states: states from the ledger.
        wish: the decider's decision.
        at_work: members whose processes or jobs have not ended.
        stop_reasons: reasons for which running members were already asked to stop, by identity.
        waiting: members that are queued for submission.
        held: members that were held back after an earlier wish.

    Returns:
        Actions to stop members, to give members up, to submit members in the decider's order, and to hold members
        back. Each member in `waiting` or `held` is given up, submitted or held back.
    """
    unwanted = {**wish.to_pause, **wish.to_end}
    stop = [
        Stop(run, reason=unwanted[run]) for run in at_work if run in unwanted and stop_reasons.get(run) != unwanted[run]
    ]
    idle = dict.fromkeys([*held, *waiting])
    submit = [Submit(run) for run in dict.fromkeys(wish.to_run) if run in idle and run not in wish.to_end]
    submitted, held_before = {action.run for action in submit}, set(held)
    ended, given_up, held_back = [], [], []
    for run in idle:
        state = states[run]
        if run in wish.to_end:
            ended.append(_end(state, wish.to_end[run]))
        elif run in submitted:
            continue
        elif state.state == "failed" and run not in wish.to_pause:  # the decider does not resume the member
            given_up.append(_repeated_give_up(state))
        else:
            newly_held = run not in held_before and state.state == "stopped"
            held_back.append(Hold(run, reason=wish.to_pause.get(run) if newly_held else None))
    return [*stop, *ended, *given_up, *submit, *held_back]


def _end(member: MemberState, reason: str) -> GiveUp:
    # The ledger contains redacted reasons, so redact this one too before comparing.
    if member.state == "stopped" and member.reason == redact(reason):
        return _repeated_give_up(member)
    return GiveUp(member.run, "stopped", {"kind": "stopped", "reason": reason}, "stopped", reason)


def _repeated_give_up(member: MemberState) -> GiveUp:
    """Return the action for a member whose end is in the ledger already: it is reported, but not recorded again."""
    return GiveUp(member.run, state=_reported_end(member.state, member.kind), reason=member.reason)
