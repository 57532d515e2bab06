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
        to_run: identities of members that should run, the most urgent first.
        to_pause: reasons, by identity, of members that should save, stop, and wait for a later decision.
        to_end: reasons, by identity, of members that should stop and not be resumed.
        messages: lines to print that are new since the last call.
    """

    to_run: Sequence[str] = ()
    to_pause: Mapping[str, str] = field(default_factory=dict)
    to_end: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[str] = ()


class Decider(Protocol):
    """Protocol of a decider, called before anything is submitted, and then about once per second.

    A process that resumes the study must get the same decisions. So decide from the journals, or from files that the
    decider has written.

    Attributes:
        files: names of the files that the decider writes in the study's folder; a refused launch restores them.
    """

    files: tuple[str, ...]

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Decide which members should run, wait or stop.

        Args:
            states: state of every member, by identity. A member stays `started` if the process that started it is gone.
            at_work: identities of running members.
            queued: identities of members whose jobs wait in a cluster's queue.
        """

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Return members to add to the study. The controller calls this between two calls of `wish`."""
