"""Who decides, while a study runs, which members are at work: a race, a search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.launch.ledger import MemberState
from sweeps.run.spec import RunSpec


@dataclass(frozen=True)
class Wish:
    """What a conductor wants of the members that have neither finished nor failed.

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
    """Asked before anything is submitted, and then about once a second.

    What it decides it must decide again when it is asked by another process that goes on with the study: from what
    stands in the journals, or from what it has written down itself.

    Attributes:
        files: names of what it writes in the study's folder; a launch that is refused leaves them as they were.
    """

    files: tuple[str, ...]

    def decided(self) -> Sequence[RunSpec]:
        """Members, and larger budgets, that another process has written down: part of the study from the beginning.

        Asked once, before anything else, while the study is held. What `members` names anew is not among them.
        """
        ...

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> Wish:
        """What is to become of members.

        Args:
            states: of all members, by identity.
            at_work: those that run now, and do not only wait for their turn on a cluster.
        """
        ...

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Members that the study is to have besides those it has; or with a larger budget. Asked after a wish."""
        ...
