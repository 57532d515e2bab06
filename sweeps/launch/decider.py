"""Protocol of deciders, which decide during a study which members run: a race, a search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.launch.ledger import MemberState
from sweeps.run.spec import RunSpec


@dataclass(frozen=True)
class Wish:
    """A decider's decision about the members that have neither finished nor failed.

    Attributes:
        go_on: identities of members that should run, the most urgent first.
        later: members that should save, stop and wait for a later decision, each with the reason.
        over: members that should not be resumed, each with the reason.
        messages: new lines to print since the last call.
    """

    go_on: Sequence[str] = ()
    later: Mapping[str, str] = field(default_factory=dict)
    over: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[str] = ()


class Decider(Protocol):
    """Protocol of a decider, called before anything is submitted, and then about once per second.

    Another process that resumes the study must get the same decisions, so they must follow from the journals, or from
    files that the decider has stored itself.

    Attributes:
        files: names of the files that it writes in the study's folder; a refused launch restores them.
    """

    files: tuple[str, ...]

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Decide which members should run, wait or stop.

        Args:
            states: state of every member, by identity; `started` also if the process that started it is gone.
            at_work: identities of running members.
            queued: identities of members whose jobs wait in a cluster's queue.
        """

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Return members to add to the study. Called before a wish."""
