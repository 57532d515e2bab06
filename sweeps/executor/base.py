"""Interface of executors, which start members of a study, follow them, and report how they ended.

Those of this machine are in `local`, that of a SLURM cluster in `slurm`.
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
    """A member to be started, or to be found again.

    Attributes:
        run, run_dir: identity of the member, and its folder.
        spent: number of retries so far, by kind of failure.
        excluded: names of nodes that it must not run on.
        submission, job: submission and scheduler's id of an attempt to be found again; None for a new one.
        unanswered: earlier submissions that the scheduler may have taken without an answer; their jobs are unwanted.
        layout: nodes and ranks on each (`RunSpec.layout`); None for the executor's own settings.
    """

    run: str
    run_dir: Path
    spent: Mapping[str, int] = field(default_factory=dict)
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
        exit_code: exit code of the process (86: it hung and ended itself; 87: asked to stop, it has saved itself), or
            minus the number of the signal that killed it.
        kind: kind of failure (`sweeps.executor.failure.KINDS`); None where the exit code alone tells.
        reason: the failure in words; None where the executor does not know it.
        node: node to blame for the failure; None if none is.
        earlier: whether it had ended before the executor that adopted it first looked.
    """

    run: str
    exit_code: int
    kind: str | None = None
    reason: str | None = None
    node: str | None = None
    earlier: bool = False

    @property
    def how(self) -> str:
        """Text on the end from the exit code alone, such as "killed by SIGKILL" or "exit code 1"."""
        return ended_with(self.exit_code)


class Executor(Protocol):
    """Protocol of an executor, which starts members and reports which have ended.

    `outlives` is True if members go on when the process that started them ends: then they are submitted under a
    name, and can be found again by it. What every executor keeps to is tests/sweeps/executor/test_contract.py: another
    engine is a module here, and a line there.
    """

    outlives: bool

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many members from the front of `waiting` may be submitted now, in one batch; 0 for none."""

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Start members under a name that is used once; job by run, empty if they cannot be taken now."""

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow members that an earlier process started; job by run, for those that were really submitted."""

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Members that have ended since the last call; waits up to `timeout_s` for the first."""

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Ask members to save and end at the next step boundary; their outcome is then of kind `stopped`.

        A queued member never begins. One that this executor does not follow is ignored.
        """

    def running(self) -> list[str]:
        """Members submitted and not ended."""

    def queued(self) -> frozenset[str]:
        """Members of `running` that are still queued."""

    def settled(self) -> bool:
        """Return whether the executor knows of every started member whether it still runs."""

    def close(self) -> None:
        """End what does not outlive this process."""


def load_entry(name: str) -> Any:
    """Import the function that a text `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
