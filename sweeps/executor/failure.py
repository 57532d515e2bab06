"""Why a member ended without being done, and whether trying again can help.

A reason is one of `KINDS`. Preemption, a time limit and a lost node say nothing about the recipe: the member goes on
from its checkpoint. An error in the recipe's own code fails the same way again.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from sweeps.errors import UserError

# kind: (in words, attempts after the first; None is as many as it takes)
KINDS: Mapping[str, tuple[str, int | None]] = {
    "error": ("an error of the program or its configuration", 0),
    "out_of_memory": ("out of memory", 1),
    "disk_full": ("no space left on the disk", 0),
    "preempted": ("preempted", None),
    "time_limit": ("the job's time limit", None),
    "gave_up": ("the chain of jobs was given up", 0),
    "node": ("the node failed", 5),
    "killed": ("killed from outside", 2),
    "launch": ("the job ended before the member began", 1),
    "lost": ("the scheduler forgot the job", 5),
    "cancelled": ("cancelled", 0),
    "outgrown": ("the budget grew while the job ran", 3),
}

# After these, the next attempt keeps off the node.
BLAMES_NODE = frozenset({"node", "killed", "launch"})

# A host that ran out of memory gets this much more at the next attempt.
MEMORY_GROWTH = 1.5

# Attempts that may end without a single new checkpoint before a chain of jobs is given up.
MAX_IDLE_ATTEMPTS = 5


def retries(given: Mapping[str, int | None] | None = None) -> dict[str, int | None]:
    """The number of attempts after the first, by kind; `given` changes the defaults.

    Raises:
        UserError: an unknown kind, or a number below 0.
    """
    policy = {kind: number for kind, (_, number) in KINDS.items()}
    for kind, number in (given or {}).items():
        if kind not in policy:
            raise UserError(f"retries.{kind}: no such reason for a failure; valid: {', '.join(KINDS)}")
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise UserError(f"retries.{kind}: {number!r} must be a whole number from 0 on, or null for no limit")
        policy[kind] = number
    return policy


# How collectives (gloo, NCCL) tell of a process that ended.
_PEER_GONE = (
    *("connection closed by peer", "connection reset by peer", "closed by remote peer", "connection was likely closed"),
    *("broken pipe", "ncclremoteerror", "ncclsystemerror", "communicator was aborted", "remote process exited"),
)

NEVER: dict[str, int | None] = dict.fromkeys(KINDS, 0)


def may_retry(policy: Mapping[str, int | None], kind: str, spent: Mapping[str, int]) -> bool:
    """Whether a member that failed for this reason may try again, `spent` being its attempts by reason so far."""
    limit = policy.get(kind, 0)
    return limit is None or spent.get(kind, 0) < limit


def kind_of(error: BaseException) -> str:
    """The kind of an exception that ended a member."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in chain:
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk_full"
        # torch writes files through its own streams, whose errors carry the number in words only.
        text = str(each).lower()
        if "no space left on device" in text or "disk quota exceeded" in text:
            return "disk_full"
        # By name: torch must not be imported to look at an error.
        if isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError":
            return "out_of_memory"
        if isinstance(each, RuntimeError) and ("not enough memory" in text or "out of memory" in text):
            return "out_of_memory"
        if type(each).__name__ == "LeaseLostError":
            return "killed"
        # Another rank of the job is gone; its own end says why, if it could.
        if isinstance(each, RuntimeError) and any(words in text for words in _PEER_GONE):
            return "killed"
    return "error"


def first_line(error: BaseException) -> str:
    """An exception in one line: type and message."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:500] if message else type(error).__name__
