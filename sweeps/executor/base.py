"""Protocol of executors, which start members of a study, follow them, and report how they ended.

`local` has the executors for this machine. `clusters` lists the kinds of cluster, with their executors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sweeps.process import ended_with


@dataclass(frozen=True)
class Launch:
    """A member to start, or to follow again after the controller was restarted.

    Attributes:
        run, run_dir: identity of the member, and its folder.
        retries_used: number of retries so far, by kind of failure.
        excluded: names of nodes on which the member must not run.
        submission, job: name of the submission and id of the job to follow again; None for a new attempt.
        unanswered: names of earlier submissions without an answer. If they were accepted after all, their jobs must be
            cancelled.
        layout: numbers of nodes and of ranks per node (`RunSpec.layout`); None for the executor's own settings.
    """

    run: str
    run_dir: Path
    retries_used: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    submission: str | None = None
    job: str | None = None
    unanswered: tuple[str, ...] = ()
    layout: tuple[int, int] | None = None


@dataclass(frozen=True)
class Outcome:
    """End of a member's process or job.

    Attributes:
        run: identity of the member.
        exit_code: exit code of the process, or minus the number of the signal that killed it. 86: the member hung, and
            ended itself. 87: the member was asked to stop, and saved a checkpoint.
        kind: kind of failure (`sweeps.executor.failure.KINDS`); None if only the exit code is known.
        reason: message of the failure; None if the executor does not know it.
        node: node that may have caused the failure; None if no node is to blame.
        ended_before: whether a member that was followed again had ended before this executor polled for the first time.
    """

    run: str
    exit_code: int
    kind: str | None = None
    reason: str | None = None
    node: str | None = None
    ended_before: bool = False

    @property
    def how(self) -> str:
        """Description of the exit code, such as "killed by SIGKILL" or "exit code 1"."""
        return ended_with(self.exit_code)


class Executor(Protocol):
    """Protocol of an executor: it starts members, and reports those that have ended.

    All executors must pass tests/sweeps/executor/test_contract.py.

    Attributes:
        outlives: whether members keep running when the process that started them ends. Such members are submitted under
            a name by which a later process finds them.
    """

    outlives: bool

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many members, from the front of `waiting`, may be submitted now as one batch; 0 for none."""

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Start members under the name `submission`, which is used only once.

        Returns:
            The job (None without a scheduler) of each accepted member, by identity; empty if none can be accepted now.
        """

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow members that an earlier process started or tried to submit.

        Returns:
            The job of each member that was found, by identity.
        """

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return outcomes of members that have ended since the last call. Wait up to `timeout_s` for the first."""

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Ask members to save and end at the next step boundary; their outcome is then of kind `stopped`.

        A queued member is removed from the queue. Members that this executor does not follow are ignored.
        """

    def running(self) -> list[str]:
        """Return the members that are submitted and have not ended."""

    def queued(self) -> frozenset[str]:
        """Return the members of `running` that are still queued."""

    def settled(self) -> bool:
        """Return whether the executor knows, for every started member, whether it runs or has ended."""

    def close(self) -> None:
        """End the running members, except on a cluster, whose jobs continue without this process."""


def load_entry(name: str) -> Any:
    """Import a function by its name `module:function`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
