"""What an executor is: it starts members of a study, follows them, and says how they ended.

Those of this machine are in `local`, that of a SLURM cluster in `slurm`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Launch:
    """A member to be started, or to be found again.

    Attributes:
        run, run_dir: who and where.
        spent: attempts after the first so far, by kind of failure.
        excluded: nodes to keep off.
        submission, job: of an attempt that was started before.
        unanswered: submissions of which nobody knows whether they were taken; given up.
    """

    run: str
    run_dir: Path
    spent: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    submission: str | None = None
    job: str | None = None
    unanswered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a member's process or job ended.

    Attributes:
        run: who.
        exit_code: 0, another one, or minus the signal that killed it.
        kind: of failure (`sweeps.executor.failure.KINDS`), if the executor knows better than the exit code.
        reason: the same in words.
        node: where it ran, if it is to blame.
        earlier: whether it was over before the executor that adopted it first looked.
    """

    run: str
    exit_code: int
    kind: str | None = None
    reason: str | None = None
    node: str | None = None
    earlier: bool = False

    @property
    def how(self) -> str:
        """In words, from the exit code alone."""
        if self.exit_code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"killed by {names.get(-self.exit_code, f'signal {-self.exit_code}')}"
        return f"exit code {self.exit_code}"


class Executor(Protocol):
    """Starts members and says which have ended.

    `outlives` says whether members go on when the process that started them ends: then they are submitted under a
    name, and can be found again by it. What every executor keeps to is tests/sweeps/executor/test_contract.py: another
    engine is a module here, and a line there.
    """

    outlives: bool

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """How many from the front of `waiting` may be submitted now, in one go; 0 is none."""
        ...

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Start members under a name that is used once; job by run, empty if they cannot be taken now."""
        ...

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow members that an earlier process started; job by run, for those that were really submitted."""
        ...

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Members that have ended since the last call; waits up to `timeout_s` for the first."""
        ...

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Have members end at their next clean border, saved; their outcome is then of kind `stopped`.

        One that waits for its turn never begins. Of one that is not followed here, nothing comes.
        """
        ...

    def running(self) -> list[str]:
        """Members submitted and not ended."""
        ...

    def queued(self) -> frozenset[str]:
        """Those of `running` that wait for their turn."""
        ...

    def settled(self) -> bool:
        """Whether it is clear of every member that was started whether it still runs."""
        ...

    def close(self) -> None:
        """End what does not outlive this process."""
        ...


def load_entry(name: str) -> Any:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
