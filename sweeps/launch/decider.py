"""Protocol of deciders, such as a race or a search, which decide while a study runs which of its members run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.launch.ledger import MemberState
from sweeps.run.spec import RunSpec


@dataclass(frozen=True)
class Wish:
    """A decider's decision about members that have neither finished nor failed.

    Attributes:
        to_run: identities of members that should run, the most urgent first.
        to_pause: members that should save, stop, and wait for a later decision; reasons by identity.
        to_end: members that should stop and not be resumed; reasons by identity.
        messages: lines to print that are new since the last call.
    """

    to_run: Sequence[str] = ()
    to_pause: Mapping[str, str] = field(default_factory=dict)
    to_end: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[str] = ()


class Decider(Protocol):
    """Protocol of a decider. The controller calls it before it submits anything, and then about once per second.

    A process that resumes the study must come to the same decisions. So decide only from the journals, or from files
    that the decider itself has written.

    Attributes:
        files: names of the files that the decider writes in the study's folder; a refused launch restores them.
    """

    files: tuple[str, ...]

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Decide which members should run, wait or stop.

        Args:
            states: state of every member, by identity. `started` does not imply that the member's process still exists.
            at_work: identities of running members.
            queued: identities of members whose jobs wait in a cluster's queue.
        """

    def members(self, states: Mapping[str, MemberState]) -> Sequence[RunSpec]:
        """Return members to add to the study. The controller calls this between two calls of `wish`."""
