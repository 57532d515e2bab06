"""Protocol of conductors, which decide while a study runs which members are at work: a race, a search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.launch.ledger import MemberState
from sweeps.run.spec import RunSpec


@dataclass(frozen=True)
class Wish:
    """A conductor's decision on the members that have neither finished nor failed.

    Attributes:
        go_on: those that are to be at work, the most urgent first.
        later: those that are to wait, saved, until it says otherwise; why.
        over: those that are not to go on; why.
        said: lines for people, since it was asked last.
    """

    go_on: Sequence[str] = ()
    later: Mapping[str, str] = field(default_factory=dict)
    over: Mapping[str, str] = field(default_factory=dict)
    said: Sequence[str] = ()


class Conductor(Protocol):
    """Protocol of a conductor, called before anything is submitted, and then about once a second.

    Another process that resumes the study must get the same decisions: they follow from the journals alone, or from
    what the conductor has written down itself.

    Attributes:
        files: names of what it writes in the study's folder; a launch that is refused leaves them as they were.
    """

    files: tuple[str, ...]

    def decided(self) -> Sequence[RunSpec]:
        """Return members, and larger budgets, decided by an earlier process: part of the study from the beginning.

        Called once, before anything else, while the study's lease is held. New members of `members` are not among them.
        """
        ...

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> Wish:
        """Decide which members are to run, wait or stop.

        Args:
            states: of all members, by identity.
            at_work: those that run now, and do not only wait for their turn on a cluster.
        """
        ...

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Return members to add to the study, or known ones with a larger budget. Called after a wish."""
        ...
