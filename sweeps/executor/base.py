"""Interface of executors, which start members of a study, follow them, and report how they ended.

`local` has the executors of this machine, `clusters` lists those of clusters.
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
    """A member to start, or to follow again after a restart.

    Attributes:
        run, run_dir: identity of the member, and its folder.
        retries_used: number of retries so far, by kind of failure.
        excluded: names of nodes that it must not run on.
        submission, job: submission and job id of an attempt to follow again; None for a new attempt.
        unanswered: earlier submissions that got no answer. They may have been accepted; their jobs are unwanted.
        layout: number of nodes and of ranks per node (`RunSpec.layout`); None for the executor's own settings.
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
    """End of a member's process or job: exit code, kind of failure and reason.

    Attributes:
        run: identity of the member.
        exit_code: exit code of the process, or minus the number of the signal that killed it. 86: the member hung
            and ended itself. 87: it was asked to stop, and saved a checkpoint first.
        kind: kind of failure (`sweeps.executor.failure.KINDS`); None if the exit code is all that is known.
        reason: the failure in words; None where the executor does not know it.
        node: node to blame for the failure; None if none is.
        ended_before: whether the member had already ended when this executor, which adopted it, polled first.
    """

    run: str
    exit_code: int
    kind: str | None = None
    reason: str | None = None
    node: str | None = None
    ended_before: bool = False

    @property
    def how(self) -> str:
        """Describe the end by the exit code alone, such as "killed by SIGKILL" or "exit code 1"."""
        return ended_with(self.exit_code)


class Executor(Protocol):
    """Protocol of an executor, which starts members and reports which have ended.

    `outlives` is True if members keep running when the process that started them ends. They are then submitted under
    a name by which a later process finds them again. tests/sweeps/executor/test_contract.py states the contract of all
    executors.
    """

    outlives: bool

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many members from the front of `waiting` may be submitted now, in one batch; 0 for none."""

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Start members under a name that is used once. Return job by run, empty if they cannot be accepted now."""

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow members that an earlier process started. Return job by run, for members that were really submitted."""

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return members that have ended since the last call; waits up to `timeout_s` for the first."""

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Ask members to save and end at the next step boundary; their outcome is then of kind `stopped`.

        A queued member never begins. Members that this executor does not follow are ignored.
        """

    def running(self) -> list[str]:
        """Return the members that are submitted and have not ended."""

    def queued(self) -> frozenset[str]:
        """Return the members of `running` that are still queued."""

    def settled(self) -> bool:
        """Return True if the state of every started member, running or ended, is known."""

    def close(self) -> None:
        """End the members that do not outlive this process."""


def load_entry(name: str) -> Any:
    """Import the function that a text `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
