"""Protocol of deciders, which decide while a study runs which members are at work: a race, a search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.launch.ledger import MemberState
from sweeps.run.spec import RunSpec


@dataclass(frozen=True)
class Wish:
    """A decider's decision on the members that have neither finished nor failed.

    Attributes:
        go_on: identities of members that are to run, the most urgent first.
        later: members that are to save, stop and wait until a later decision, each with the reason.
        over: members that are not to be resumed, each with the reason.
        said: new lines to print since the last call.
    """

    go_on: Sequence[str] = ()
    later: Mapping[str, str] = field(default_factory=dict)
    over: Mapping[str, str] = field(default_factory=dict)
    said: Sequence[str] = ()


class Decider(Protocol):
    """Protocol of a decider, called before anything is submitted, and then about once a second.

    Another process that resumes the study must get the same decisions: they follow from the journals alone, or from
    what the decider has written down itself.

    Attributes:
        files: names of what it writes in the study's folder; a launch that is refused leaves them as they were.
    """

    files: tuple[str, ...]

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Decide which members are to run, wait or stop.

        Args:
            states: state of every member, by identity; `started` also where an earlier process began it and is gone.
            at_work: identities of the members that run now.
            queued: identities of the members whose jobs wait in a cluster's queue.
        """

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Return members to add to the study. Called before a wish."""
